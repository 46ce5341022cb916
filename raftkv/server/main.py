"""The server process: settings in, exit code out."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from typing import Final

from raftkv.config import ServerConfig
from raftkv.errors import ConfigError, CorruptionError, StorageError, UnknownEntryError
from raftkv.server import descriptors, logs
from raftkv.server.member import ExtendHttp, Member
from raftkv.server.turns import LoopTurns, TurnSelector

_log = logging.getLogger(__name__)

NEEDS_UPGRADE_STATUS: Final = 3
"""Exit status of a member whose log holds what only a later version knows. Its data is as it was."""

SWITCH_INTERVAL_S: Final = 0.000_5
"""How long the loop may keep the interpreter when the log or database thread wants it (Python's default: 5 ms)."""

GC_THRESHOLDS: Final = (10_000, 4, 1_000_000)
"""A collection looks at no more than some 60,000 objects (about 5 ms), and what it leaves is never looked at again: a
full one holds the loop for 0.2 s with 300,000 keys. Cycles that live longer are not freed, so there must be none."""


def run(config: ServerConfig, extend_http: ExtendHttp | None = None) -> int:
    """Serve until a signal or a failure.

    Arguments:
        config: settings of the member.
        extend_http: see ``Member``.

    Returns:
        The exit code: 0 never (a signal ends the process as that signal would), 1 for a failure,
        ``NEEDS_UPGRADE_STATUS`` if the log is of a later version.
    """
    if sys.flags.optimize:
        return _complain("python -O is refused: it removes checks that keep members from diverging")
    logs.configure(config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    collect_in_small_passes()
    os.umask(0o077)
    try:
        descriptors.raise_limit()
        descriptors.import_early()
        turns = LoopTurns()
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(TurnSelector(turns))) as runner:
            received, failure = runner.run(_serve(config, turns, extend_http))
    except (ConfigError, StorageError, CorruptionError) as error:
        return _complain(str(error))
    if isinstance(failure, UnknownEntryError):
        return _complain(str(failure), NEEDS_UPGRADE_STATUS)
    if failure is not None:
        return _complain(f"stopped: {failure}")
    # Ended by a signal, and to look so: the default action gives the exit status that callers expect.
    signal.signal(received, signal.SIG_DFL)
    os.kill(os.getpid(), received)
    return 1


async def _serve(
    config: ServerConfig, turns: LoopTurns, extend_http: ExtendHttp | None
) -> tuple[signal.Signals, BaseException | None]:
    member = Member(config, turns, extend_http)
    gc.freeze()
    received = signal.SIGTERM
    loop = asyncio.get_running_loop()
    descriptors.log_lack_in_a_line(loop)

    def on_signal(number: signal.Signals) -> None:
        nonlocal received
        received = number
        _log.info("stopping on %s", number.name)
        member.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, on_signal, number)
    await member.run()
    return received, member.failure


def collect_in_small_passes() -> None:
    """Have the collector of this process look at young objects alone, whatever the size of the store."""
    gc.set_threshold(*GC_THRESHOLDS)
    if _keep_out_of_sight not in gc.callbacks:
        gc.callbacks.append(_keep_out_of_sight)


def _keep_out_of_sight(phase: str, collection: dict[str, int]) -> None:
    if phase == "stop" and collection["generation"] > 0:
        gc.freeze()


def _complain(text: str, status: int = 1) -> int:
    print(f"raftkv: {text}", file=sys.stderr)
    return status
