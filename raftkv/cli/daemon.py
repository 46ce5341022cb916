"""Shared by the commands of ``raftkv``: flags and help; for those that serve until a signal, the wait for a cluster.

>>> parsed = parse((Flag("listen", default="127.0.0.1:1"),), ["--listen", "127.0.0.1:2"], "gateway", "Usage: ...")
>>> parsed and parsed.values["listen"]
'127.0.0.1:2'
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from raftkv.cli import pflag
from raftkv.cli.pflag import Flag, Parsed
from raftkv.cli.program import BAD_FLAGS, CommandError, on_signals, refused
from raftkv.errors import ConfigError, StatusError
from raftkv.urls import split_address

if TYPE_CHECKING:
    from raftkv.client.library import Client

T = TypeVar("T")

ENDPOINTS: Final = Flag("endpoints", default="127.0.0.1:2379", usage="members of the raftkv cluster, comma-separated")
CREDENTIALS: Final = (
    Flag("user", usage="NAME, with the password in RAFTKV_PASSWORD_FILE, or NAME:PASSWORD"),
    Flag("cacert", usage="CA file: speak TLS to the cluster"),
    Flag("cert", usage="client certificate"),
    Flag("key", usage="its key"),
)

ATTEMPT_S: Final = 2.0
PROBE_KEY: Final = "raftkv/probe"
"""A key without a value: any answer to a read of it says that the cluster serves."""


def parse(
    flags: Sequence[Flag], words: Sequence[str], command: str, usage: str, *, takes_rest: bool = False
) -> Parsed | None:
    """Read the flags of a command that takes no arguments; or print its help, and return None.

    Arguments:
        flags: that it knows.
        words: the command line after its name.
        command: its name.
        usage: what its help says above the flags.
        takes_rest: whether words may follow ``--``: the command passes them on.

    Raises:
        CommandError: a word is no flag of it, or has no such value.
    """
    parsed = read_flags(flags, words)
    if parsed is None:
        print(usage)
        print_flags(flags)
        return None
    if parsed.arguments and not (takes_rest and "--" in words):
        raise CommandError(f"'{parsed.arguments[0]}' is not a valid flag of raftkv {command}", BAD_FLAGS)
    return parsed


def parse_command(
    commands: Mapping[str, Sequence[Flag]], words: Sequence[str], usage: str
) -> tuple[str, Parsed] | None:
    """Read the words of a command that has commands of its own; or print its help, and return None.

    Arguments:
        commands: each with its flags; the empty word stands for none of the others.
        words: the command line after its name.
        usage: what its help says above the flags.

    Raises:
        CommandError: as of ``read_flags``.
    """
    command = words[0] if words and words[0] in commands else ""
    parsed = read_flags(commands[command], words[1:] if command else words)
    if parsed is not None:
        return command, parsed
    print(usage)
    for name, flags in commands.items():
        print(f"\nFlags{f' of {name}' if name else ''}:")
        print_flags(flags)
    return None


def read_flags(flags: Sequence[Flag], words: Sequence[str]) -> Parsed | None:
    """Read flags and arguments; None: help is asked for.

    Arguments:
        flags: that are known.
        words: the command line.

    Raises:
        CommandError: a flag is unknown, or has no such value.
    """
    try:
        with refused(pflag.FlagError, BAD_FLAGS):
            return pflag.parse([replace(flag, ours=True) for flag in flags], words)
    except pflag.HelpRequested:
        return None


async def before_stop(stop: asyncio.Event, work: Awaitable[T]) -> asyncio.Future[T] | None:
    """Do something until it ends or a signal comes.

    Arguments:
        stop: set by a signal.
        work: to do.

    Returns:
        How it ended; None: the signal came first, and it was cancelled.
    """
    doing, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((doing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)
        return None
    finally:
        stopping.cancel()


@contextlib.asynccontextmanager
async def connected(values: dict[str, Any], **options: Any) -> AsyncIterator[tuple[Client, asyncio.Event]]:
    """Make a client of the cluster, and an event that SIGINT and SIGTERM set, for the time of a block.

    Arguments:
        values: of the flags, ``ENDPOINTS`` and ``CREDENTIALS`` among them.
        options: more of those that ``connect`` takes.
    """
    from raftkv.client.library import connect
    from raftkv.server.descriptors import raise_limit

    raise_limit()
    stop = asyncio.Event()
    with on_signals(stop.set):
        async with connect(values["endpoints"].split(","), **connection(values), **options) as kv:
            yield kv, stop


def connection(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of ``connect`` that the flags ``CREDENTIALS`` stand for."""
    from raftkv.client.credentials import user_settings

    files = {"ca_file": values["cacert"], "cert_file": values["cert"], "key_file": values["key"]}
    return {**user_settings(values["user"]), **files}


def listen_address(text: str) -> tuple[str, int]:
    """Return the host and the port of ``--listen``.

    Raises:
        ConfigError: it is not HOST:PORT.
    """
    try:
        return split_address(text)
    except ValueError:
        raise ConfigError(f"--listen must be HOST:PORT (set to {text!r})") from None


async def wait_cluster(kv: Client, stop: asyncio.Event, command: str) -> bool:
    """Wait until the cluster answers, and say once on standard error why it does not; False: a signal came first.

    Arguments:
        kv: the client.
        stop: set by a signal.
        command: its name, for the line.
    """
    from raftkv.client.errors import EndpointsFailed

    told = False
    while not stop.is_set():
        asked = await before_stop(stop, kv.get(PROBE_KEY, timeout_s=ATTEMPT_S))
        if asked is None:
            break
        error = asked.exception()
        if isinstance(error, EndpointsFailed):
            if not told:
                print(f"raftkv {command}: waiting for the cluster: {error}", file=sys.stderr, flush=True)
            told = True
        elif error is None or isinstance(error, StatusError):
            return True  # a refusal is an answer, too
        else:
            raise error
    return False


def print_flags(flags: Sequence[Flag]) -> None:
    """Print a line for each flag, as wide as the longest name needs."""
    width = max(len(flag.name) for flag in flags)
    for flag in flags:
        print(f"  --{flag.name:<{width}} {flag.usage}" + (f" ({flag.default})" if flag.default else ""))
