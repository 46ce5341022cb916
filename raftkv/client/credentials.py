"""The identity of a client: user, password and token from arguments, files and the environment.

Secrets stay hidden: a ``Secret`` prints as ``***`` in ``repr``, in logs and in a debugger's locals.

    connect(user="alice", password="pw")                       # a text, used as long as the client lives
    connect(user="alice", password=Path("/run/secrets/pw"))    # a file, read at each login, so it can be rotated
    connect(token=lambda: vault.read("raftkv-jwt"))            # a function, called when a new token is needed

    RAFTKV_USER=alice RAFTKV_PASSWORD_FILE=/run/secrets/pw     # the same for a whole program; or RAFTKV_USER=alice:pw

``client.rpc.core`` decides when a client logs in.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

from raftkv.errors import ConfigError

FILE_BYTES_MAX: Final = 64 * 1024
"""Largest accepted secret file; a larger file was probably named by mistake."""

Given = str | os.PathLike[str] | Callable[[], str] | Callable[[], Awaitable[str]]
"""The source of a secret: its text, a file, or a function (sync or async) that returns the text without delay."""

_FILES: Final = {"ca_file": "RAFTKV_CACERT", "cert_file": "RAFTKV_CERT", "key_file": "RAFTKV_KEY"}


class Secret:
    """A password or a token, or its source; printing shows neither.

    A pickled copy contains the text or the source. Where pickles are stored, prefer a file as the source.

    Arguments:
        given: see ``Given``; another ``Secret`` is copied.
    """

    __slots__ = ("_given",)

    def __init__(self, given: Given | Secret) -> None:
        self._given: Given = given._given if isinstance(given, Secret) else given

    def __repr__(self) -> str:
        return "'***'" if self else "''"

    __str__ = __repr__

    def __bool__(self) -> bool:
        return bool(self._given)

    def __eq__(self, other: object) -> bool:
        return self._given == (other._given if isinstance(other, Secret) else other)

    def __hash__(self) -> int:
        return hash(self._given)

    @property
    def is_fixed(self) -> bool:
        """Whether the secret never changes."""
        return isinstance(self._given, str)

    @property
    def file(self) -> str:
        """The file with the secret; empty: the source is not a file."""
        return os.fspath(self._given) if isinstance(self._given, os.PathLike) else ""

    async def reveal(self) -> str:
        """Return the current text: read the file, or call the function.

        Raises:
            ConfigError: the file cannot be read or is empty, or the function failed.
        """
        if isinstance(self._given, str):
            return self._given
        if isinstance(self._given, os.PathLike):
            return _read(Path(self._given))
        try:
            found = self._given()
            text = await found if inspect.isawaitable(found) else found
        except Exception as error:
            # The error's text is left out, because it may contain the secret.
            raise ConfigError(f"the function that returns a secret failed: {type(error).__name__}") from error
        if not isinstance(text, str) or not text:
            raise ConfigError("the function that returns a secret returned no text")
        return text

    def check(self) -> None:
        """Check early that the file is usable.

        Raises:
            ConfigError: as ``reveal``.
        """
        if isinstance(self._given, os.PathLike):
            _read(Path(self._given))

    def text(self) -> str:
        """Return the text if the secret was given as one; otherwise an empty string."""
        return self._given if isinstance(self._given, str) else ""


NO_SECRET: Final = Secret("")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigError(f"the file of a secret, {path}, has more than {FILE_BYTES_MAX} bytes")
        text = data.decode().rstrip("\r\n")
    except OSError as error:
        raise ConfigError(
            f"cannot read the file of a secret, {path}: {(error.strerror or str(error)).lower()}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"the file of a secret, {path}, is not UTF-8") from None
    if not text:
        raise ConfigError(f"the file of a secret, {path}, is empty")
    return text


def split_user(text: str) -> tuple[str, str]:
    """Return the name and the password of ``NAME`` or ``NAME:PASSWORD``.

    >>> split_user("ann:se:cret"), split_user("ann")
    (('ann', 'se:cret'), ('ann', ''))
    """
    name, _, password = text.partition(":")
    return name, password


def client_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Read the arguments of ``connect`` from the environment; variables that are not set are left out.

    ``RAFTKV_USER`` is ``NAME`` or ``NAME:PASSWORD``; ``RAFTKV_PASSWORD`` or ``RAFTKV_PASSWORD_FILE`` has the password,
    ``RAFTKV_TOKEN`` or ``RAFTKV_TOKEN_FILE`` a token instead; ``RAFTKV_CACERT``, ``RAFTKV_CERT`` and ``RAFTKV_KEY`` are
    files.

    Arguments:
        environment: environment variables, such as ``os.environ``.

    Raises:
        ConfigError: there is a password without a user, or a secret is given twice.
    """
    user, inline = split_user(environment.get("RAFTKV_USER", ""))
    password, token = _either(environment, "RAFTKV_PASSWORD"), _either(environment, "RAFTKV_TOKEN")
    if inline and password:
        raise ConfigError("the password is in RAFTKV_USER and in RAFTKV_PASSWORD or RAFTKV_PASSWORD_FILE: give it once")
    if password and not user:
        raise ConfigError("RAFTKV_PASSWORD is in the environment, but RAFTKV_USER is not")
    settings = {"user": user, "password": Secret(inline) if inline else password, "token": token}
    return {name: value for name, value in settings.items() if value} | file_settings(environment)


def file_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return only the files (TLS) of ``client_settings``, without a user.

    Arguments:
        environment: environment variables, such as ``os.environ``.
    """
    return {name: environment[variable] for name, variable in _FILES.items() if environment.get(variable)}


def password_of(user: str, environment: Mapping[str, str]) -> Secret:
    """Return the password of a user from the environment; empty if there is none, or for another user.

    Arguments:
        user: user name.
        environment: environment variables, such as ``os.environ``.
    """
    name, inline = split_user(environment.get("RAFTKV_USER", ""))
    if name not in ("", user):
        return NO_SECRET
    return Secret(inline) if inline else _either(environment, "RAFTKV_PASSWORD")


def user_settings(flag: str) -> dict[str, Any]:
    """Return the arguments of ``connect`` for the flag ``--user NAME[:PASSWORD]``; empty without the flag.

    All users of the machine can read a command line, so prefer the name alone with ``RAFTKV_PASSWORD_FILE``.

    Arguments:
        flag: value of the flag.
    """
    user, inline = split_user(flag)
    return {"user": user, "password": Secret(inline)} if user else {}


def _either(environment: Mapping[str, str], name: str) -> Secret:
    text, file = environment.get(name, ""), environment.get(f"{name}_FILE", "")
    if text and file:
        raise ConfigError(f"{name} and {name}_FILE are both in the environment: give one")
    return Secret(Path(file)) if file else Secret(text)


def announce_settings(settings: Mapping[str, Any], environment: MutableMapping[str, str]) -> None:
    """Write settings into the environment of processes that must connect in the same way; see ``client_settings``.

    The environment is used because all users can read the command line of a process, but only its owner can read its
    environment. A secret from a function is not passed on.

    Arguments:
        settings: arguments of ``connect``; those unknown to ``client_settings`` are left out.
        environment: environment of the processes. If the settings name a user, its user variables are replaced.
    """
    for name, variable in _FILES.items():
        if settings.get(name):
            environment[variable] = str(settings[name])
    if settings.get("user"):
        environment["RAFTKV_USER"] = settings["user"]
        _hand_on(settings.get("password"), "RAFTKV_PASSWORD", environment)
    if settings.get("token") or settings.get("user"):
        _hand_on(settings.get("token"), "RAFTKV_TOKEN", environment)


def _hand_on(given: Given | Secret | None, name: str, environment: MutableMapping[str, str]) -> None:
    secret = Secret(given or "")
    for variable, text in ((name, secret.text()), (f"{name}_FILE", secret.file)):
        environment.pop(variable, None)
        if text:
            environment[variable] = text
