"""The identity of a client: user, password and token as programs, files and the environment give them.

Owns what keeps them from being shown: a ``Secret`` prints as ``***``, in ``repr``, in a log, in a debugger's locals.

    connect(user="alice", password="pw")                       # a text, for as long as the client lives
    connect(user="alice", password=Path("/run/secrets/pw"))    # a file, read again for each login: rotation
    connect(token=lambda: vault.read("raftkv-jwt"))            # a function, called when a new one is needed

    RAFTKV_USER=alice RAFTKV_PASSWORD_FILE=/run/secrets/pw     # the same for a whole program; or RAFTKV_USER=alice:pw

Leaves out when a client logs in, which ``rpc.login`` knows.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

from raftkv.errors import ConfigError

FILE_BYTES_MAX: Final = 64 * 1024
"""Largest file that can hold a secret: what is larger was named by mistake."""

Given = str | os.PathLike[str] | Callable[[], str] | Callable[[], Awaitable[str]]
"""How a secret is given: itself, a file that holds it, or a function (async too) that returns it at once."""

_FILES: Final = {"ca_file": "RAFTKV_CACERT", "cert_file": "RAFTKV_CERT", "key_file": "RAFTKV_KEY"}


class Secret:
    """A password or a token, or where it comes from; it shows neither.

    A copy in another process has the text too, or the way to it: hand a file on where pickles are kept.

    Arguments:
        given: see ``Given``; another ``Secret`` is taken as it is.
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
        """Whether it never changes."""
        return isinstance(self._given, str)

    @property
    def file(self) -> str:
        """The file that holds it; empty: none does."""
        return os.fspath(self._given) if isinstance(self._given, os.PathLike) else ""

    async def reveal(self) -> str:
        """Return it as it is now: read the file, or call the function.

        Raises:
            ConfigError: the file cannot be read, or there is no text in it; the function failed.
        """
        if isinstance(self._given, str):
            return self._given
        if isinstance(self._given, os.PathLike):
            return _read(Path(self._given))
        try:
            found = self._given()
            text = await found if inspect.isawaitable(found) else found
        except Exception as error:
            # The error's text is left out: the secret may be in it.
            raise ConfigError(f"the function that returns a secret failed: {type(error).__name__}") from error
        if not isinstance(text, str) or not text:
            raise ConfigError("the function that returns a secret returned no text")
        return text

    def check(self) -> None:
        """Refuse a file that cannot be used, before it is needed.

        Raises:
            ConfigError: as ``reveal``.
        """
        if isinstance(self._given, os.PathLike):
            _read(Path(self._given))

    def text(self) -> str:
        """Return it if it was given as a text; empty: it was given in another way."""
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
    """Return name and password of ``NAME`` or ``NAME:PASSWORD``.

    >>> split_user("ann:se:cret"), split_user("ann")
    (('ann', 'se:cret'), ('ann', ''))
    """
    name, _, password = text.partition(":")
    return name, password


def client_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Read how to connect from the environment, as arguments of ``connect``; what is not there is left out.

    ``RAFTKV_USER`` is ``NAME`` or ``NAME:PASSWORD``; ``RAFTKV_PASSWORD`` or ``RAFTKV_PASSWORD_FILE`` has the password,
    ``RAFTKV_TOKEN`` or ``RAFTKV_TOKEN_FILE`` a token instead; ``RAFTKV_CACERT``, ``RAFTKV_CERT`` and ``RAFTKV_KEY`` are
    files.

    Arguments:
        environment: as ``os.environ``.

    Raises:
        ConfigError: it holds a password without a user, or one secret in two ways.
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
    """Return the files of ``client_settings``, and no user.

    Arguments:
        environment: as ``os.environ``.
    """
    return {name: environment[variable] for name, variable in _FILES.items() if environment.get(variable)}


def password_of(user: str, environment: Mapping[str, str]) -> Secret:
    """Return the password that the environment has for a user; empty: none, or that of another one.

    Arguments:
        user: the name.
        environment: as ``os.environ``.
    """
    name, inline = split_user(environment.get("RAFTKV_USER", ""))
    if name not in ("", user):
        return NO_SECRET
    return Secret(inline) if inline else _either(environment, "RAFTKV_PASSWORD")


def user_settings(flag: str) -> dict[str, Any]:
    """Return the arguments of ``connect`` for a flag ``--user NAME[:PASSWORD]``; nothing, if it is not given.

    All users of the machine can read a command line: give the name alone, and ``RAFTKV_PASSWORD_FILE``.

    Arguments:
        flag: its text.
    """
    user, inline = split_user(flag)
    return {"user": user, "password": Secret(inline)} if user else {}


def _either(environment: Mapping[str, str], name: str) -> Secret:
    text, file = environment.get(name, ""), environment.get(f"{name}_FILE", "")
    if text and file:
        raise ConfigError(f"{name} and {name}_FILE are both in the environment: give one")
    return Secret(Path(file)) if file else Secret(text)


def announce_settings(settings: Mapping[str, Any], environment: MutableMapping[str, str]) -> None:
    """Write settings into the environment of processes that shall connect in the same way; see ``client_settings``.

    Only its user can read the environment of a process, but all users read its command line: so never there. A secret
    that a function returns stays with the function.

    Arguments:
        settings: arguments of ``connect``; others than those of ``client_settings`` are left out.
        environment: of the processes. What it says of a user is replaced if the settings name one, else kept.
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
