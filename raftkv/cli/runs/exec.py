"""``run exec``: take part in a run as a node, with any command as its workers.

Owns the words of the command line and the signals; what happens is ``raftkv.training.process.supervisor``'s.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from raftkv.cli.ctl.session import Session, open_session
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.library import use_library
from raftkv.cli.program import BAD_ARGUMENTS, CommandError
from raftkv.client.credentials import announce_settings
from raftkv.errors import ConfigError
from raftkv.training.config import RunConfig, guess_address, parse_options
from raftkv.training.process.environment import parse_styles
from raftkv.training.process.output import Console, Destinations, Output, make_directory, parse_ranks, parse_streams
from raftkv.training.process.supervisor import PORTS_FIELD, Settings, Supervisor, WorkerStartError, free_port
from raftkv.training.records import GATHERING, RUNNING
from raftkv.training.rendezvous.participant import Participant, Progress, waiting
from raftkv.urls import parse_endpoints

if TYPE_CHECKING:
    from raftkv.client.library import Client

Value = TypeVar("Value")

PASSED_ON: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that workers get and that end nothing here, unless ``--signals-to-handle`` names them."""
_UNUSABLE: Final = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)
KEEPALIVE_TIME_S: Final = 10.0


def execute(invocation: Invocation) -> None:
    """Join, run, leave with the workers' exit code."""
    command = tuple(invocation.arguments)
    if not command:
        text = "run exec needs a command, as in: run exec --job j --nnodes 2:4 -- python train.py"
        raise CommandError(text, BAD_ARGUMENTS)
    session = open_session(invocation)
    session.options = replace(session.options, explain=True, keepalive_time_s=KEEPALIVE_TIME_S)
    console = Console()
    try:
        config, settings = _read(invocation, session, command, console)
        code = use_library(session, lambda kv: _take_part(kv, config, settings))
    finally:
        console.close()
    if code:
        raise CommandError("", code)


def _read(
    invocation: Invocation, session: Session, command: tuple[str, ...], console: Console
) -> tuple[RunConfig, Settings]:
    try:
        config = _config(invocation, session)
        settings = _settings(invocation, session, command, console)
        return config, replace(settings, output=Output(console, _destinations(invocation, config, settings)))
    except ConfigError as error:
        raise CommandError(str(error), BAD_ARGUMENTS) from None


def parse_nodes(text: str) -> tuple[int, int]:
    """Minimum and maximum of ``--nnodes``.

    >>> parse_nodes("2:4"), parse_nodes("3")
    ((2, 4), (3, 3))

    Raises:
        ConfigError: it is neither a number nor two.
    """
    least, separator, most = text.partition(":")
    if not least.isdecimal() or (separator and not most.isdecimal()):
        raise ConfigError(f"--nnodes is a number or MIN:MAX, not {text!r}")
    return int(least), int(most or least)


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Signals of ``--signals-to-handle``.

    >>> [one.name for one in parse_signals("SIGTERM, SIGUSR1")]
    ['SIGTERM', 'SIGUSR1']

    Raises:
        ConfigError: one has no such name, or cannot be handled.
    """
    named = {one.name: one for one in signal.Signals if one not in _UNUSABLE}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in named:
            raise ConfigError(f"--signals-to-handle is a list of signals, as in SIGTERM,SIGUSR1, without {name!r}")
    return tuple(named[name] for name in names)


def _config(invocation: Invocation, session: Session) -> RunConfig:
    if not invocation["job"]:
        raise ConfigError("--job is missing: the id of the run, the same on all of its nodes")
    for name, least in (("max-restarts", 0), ("stop-grace", 0), ("nproc-per-node", 1)):
        if invocation[name] < least:
            raise ConfigError(f"--{name} must be at least {least}, not {invocation[name]:g}")
    pairs = (pair.partition("=") for pair in invocation["conf"])
    fields: dict[str, Any] = parse_options({name.strip(): value.strip() for name, _, value in pairs})
    fields["slots"] = invocation["nproc-per-node"]
    if invocation["node-name"]:
        fields["host"] = invocation["node-name"]
    fewest, most = parse_nodes(invocation["nnodes"])
    address = invocation["local-addr"] or guess_address(parse_endpoints(session.endpoints))
    return RunConfig(run_id=invocation["job"], min_nodes=fewest, max_nodes=most, address=address, **fields).checked()


def _destinations(invocation: Invocation, config: RunConfig, settings: Settings) -> Destinations:
    chosen = {name: _parsed(invocation, name, parse_streams) for name in ("redirects", "tee")}
    base, asked = invocation["log-dir"], {invocation[name] for name in chosen} != {""}
    directory = None
    if base or asked:
        try:
            directory = make_directory(base, config.run_id)
        except OSError as error:
            raise ConfigError(f"--log-dir: {error.filename}: {(error.strerror or str(error)).lower()}") from None
        settings.tell(f"logs are in {directory}")
    if base and not asked:
        chosen["tee"] = parse_streams("3")
    shown = _parsed(invocation, "local-ranks-filter", parse_ranks)
    return Destinations(directory, **chosen, shown=shown, prefixed=not invocation["no-prefix"])


def _parsed(invocation: Invocation, name: str, parse: Callable[[str], Value]) -> Value:
    try:
        return parse(invocation[name] or ("0" if parse is parse_streams else ""))
    except ConfigError as error:
        raise ConfigError(f"--{name} {error}") from None


def _settings(invocation: Invocation, session: Session, command: tuple[str, ...], console: Console) -> Settings:
    # Into a pipe Python would print in blocks of some KiB, and a log would come minutes late.
    inherited = {"PYTHONUNBUFFERED": "1", **os.environ}
    announce_settings(session.connection, inherited)
    return Settings(
        command=command,
        max_restarts=invocation["max-restarts"],
        stop_grace_s=invocation["stop-grace"],
        stop_signals=parse_signals(invocation["signals-to-handle"]),
        styles=parse_styles(invocation["env-style"]),
        endpoints=tuple(session.endpoints),
        inherited=inherited,
        tell=lambda text: None if invocation["quiet"] else console.tell(text),
    )


async def _take_part(kv: Client, config: RunConfig, settings: Settings) -> int:
    ports = ",".join(str(free_port()) for _ in range(config.slots)) if "tf" in settings.styles else ""
    data = {PORTS_FIELD: ports} if ports else {}
    participant = await Participant.open(
        kv, config, data=data, on_progress=lambda one: _tell_progress(settings, one), on_trouble=waiting(settings.tell)
    )
    supervisor = Supervisor(kv, participant, settings)
    loop = asyncio.get_running_loop()
    handled = dict.fromkeys(PASSED_ON, supervisor.pass_on)
    handled |= dict.fromkeys(settings.stop_signals, supervisor.stop)
    for number, handle in handled.items():
        loop.add_signal_handler(number, handle, number)
    try:
        return await supervisor.run()
    except WorkerStartError as error:
        raise CommandError(str(error), error.code) from None
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


def _tell_progress(settings: Settings, progress: Progress) -> None:
    if progress.phase == RUNNING:
        settings.tell(f"generation {progress.generation} runs without this node: waiting for a place")
        return
    because = f" after: {progress.reason}" if progress.reason and progress.phase != GATHERING else ""
    limits = f"{progress.min_nodes}:{progress.max_nodes}"
    settings.tell(f"gathering{because}: {progress.joined} ready, {limits} wanted")
