"""Which stream of which worker goes to a file, to the console, or to both: torchrun's words for it.

>>> parse_streams("1")(0), parse_streams("0:3,2:1")(2), parse_streams("0:3,2:1")(1)
(<Streams.OUT: 1>, <Streams.OUT: 1>, <Streams.NONE: 0>)

Owns the folders: ``<log-dir>/<run>_<random>/epoch_<generation>/<local rank>/stdout.log`` and ``stderr.log``, new
for every start of ``run exec``, so that nothing is written over.
"""

from __future__ import annotations

import enum
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raftkv.errors import ConfigError

_ALL: Final = re.compile(r"[0-3]")
_EACH: Final = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


class Streams(enum.IntFlag):
    """Streams of a worker."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


Choice = Callable[[int], Streams]
"""The streams that are meant, by local rank."""


def parse_streams(text: str) -> Choice:
    """Read ``2``, or ``0:3,1:2`` for some local ranks only.

    Raises:
        ConfigError: it is neither.
    """
    if _ALL.fullmatch(text):
        every = Streams(int(text))
        return lambda local_rank: every
    if not _EACH.fullmatch(text):
        raise ConfigError(f"is 0, 1 (stdout), 2 (stderr), 3 (both) or LOCAL_RANK:NUMBER,..., not {text!r}")
    pairs = (pair.split(":") for pair in text.split(","))
    chosen = {int(local_rank): Streams(int(streams)) for local_rank, streams in pairs}
    return lambda local_rank: chosen.get(local_rank, Streams.NONE)


def parse_ranks(text: str) -> frozenset[int] | None:
    """Read ``0,2``; an empty text is None: all.

    Raises:
        ConfigError: there is something else than numbers.
    """
    if not text:
        return None
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"is a list of numbers, as in 0,1, not {text!r}")
    return frozenset(int(word) for word in words)


def _none(local_rank: int) -> Streams:
    return Streams.NONE


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where output goes.

    Attributes:
        directory: of the log files; None: there are none.
        redirects: streams that go to a file alone.
        tee: streams that go to a file and to the console.
        shown: local ranks whose output is on the console; None: all.
        prefixed: whether lines on the console begin with the rank.
    """

    directory: Path | None = None
    redirects: Choice = _none
    tee: Choice = _none
    shown: frozenset[int] | None = None
    prefixed: bool = True

    def file(self, generation: int, local_rank: int, stream: Streams) -> Path | None:
        """Return the log file of a stream, in a folder that exists then.

        Arguments:
            generation: of the worker.
            local_rank: on its node.
            stream: ``stdout`` or ``stderr``.

        Raises:
            OSError: it cannot be.
        """
        if self.directory is None or not stream & (self.redirects(local_rank) | self.tee(local_rank)):
            return None
        folder = self.directory / f"epoch_{generation}" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / ("stdout.log" if stream is Streams.OUT else "stderr.log")

    def is_shown(self, local_rank: int, stream: Streams) -> bool:
        """Tell whether a stream goes to the console.

        Arguments:
            local_rank: of the worker on its node.
            stream: which.
        """
        only_in_file = stream & self.redirects(local_rank) and not stream & self.tee(local_rank)
        return not only_in_file and (self.shown is None or local_rank in self.shown)


def make_directory(base: str, run_id: str) -> Path:
    """Make a folder for the logs of a run, below ``base`` or, if that is empty, among the temporary files.

    Arguments:
        base: the folder that the user names; empty: none.
        run_id: part of the name.

    Raises:
        OSError: it cannot be made.
    """
    if base:
        Path(base).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{run_id.replace('/', '_')}_", dir=base or None)).resolve()
