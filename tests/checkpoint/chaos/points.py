"""Points at which a rank can be stopped while it saves, its shard, and an independent reading of keys and files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from raftkv.checkpoint.keys import RegistryKeys

# -- points ---------------------------------------------------------------------------------------------------------
#
# Where a rank can be stopped while it saves a checkpoint.
#
# A rank that reaches its point says so over its pipe and waits there: to be killed, to be frozen, or to go on.

BEFORE_WRITE: Final = "before_write"
MID_WRITE: Final = "mid_write"
BEFORE_PREPARE: Final = "before_prepare"
AFTER_PREPARE: Final = "after_prepare"
BEFORE_COMMIT: Final = "before_commit"
AFTER_COMMIT: Final = "after_commit"

POINTS: Final = (BEFORE_WRITE, MID_WRITE, BEFORE_PREPARE, AFTER_PREPARE, BEFORE_COMMIT, AFTER_COMMIT)
"""Nothing written; half of the shard; all bytes durable; prepared; manifest written, but not committed; committed."""
COORDINATOR_POINTS: Final = (BEFORE_COMMIT, AFTER_COMMIT)
"""The coordinator stops here for each rank that is to be killed, since the others wait for it."""

AT: Final = "at"
DONE: Final = "done"
FAILED: Final = "failed"
READY: Final = "ready"
"""What ranks say."""
GO: Final = "go"
"""The answer."""


class Points:
    """The point at which this rank is to stop.

    Arguments:
        link: to the driver.
    """

    def __init__(self, link: Connection) -> None:
        self._link = link
        self.stop_at = ""

    def reach(self, point: str) -> None:
        """Stop here, if this is the point."""
        if point == self.stop_at:
            self.stop_at = ""
            self._link.send((AT, point))
            self._link.recv()


# -- shards ---------------------------------------------------------------------------------------------------------
#
# The files that ranks write, and what a loader sees of them.
#
# A shard begins with a line that says whose it is, and ends with a mark: a loader sees that a file is missing or cut
# off, but not that it, or a part of it, is another generation's.

SHARD_BYTES: Final = 16 * 1024
MIXTURE: Final = -1
_END: Final = b"\nend of shard\n"


@dataclass(frozen=True)
class Shard:
    """Whose bytes they are: of which rank, step and generation."""

    rank: int
    step: int
    generation: int

    def encoded(self) -> bytes:
        """Return the bytes of the file; of one length for all ranks."""
        head = json.dumps(asdict(self)).encode().ljust(128) + b"\n"
        body = bytes([(self.rank * 7 + self.step * 13 + self.generation) % 251]) * SHARD_BYTES
        return head + body + _END


def write_shard(path: Path, shard: Shard, midway: Callable[[], None], *, fsync: bool = True) -> bytes:
    """Write a shard in two halves; returns its bytes.

    Arguments:
        path: of the file.
        shard: whose it is.
        midway: called when half of it is written.
        fsync: make it, and its name, durable.
    """
    data = shard.encoded()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb", buffering=0) as file:
        file.write(data[: len(data) // 2])
        midway()
        file.write(data[len(data) // 2 :])
        if fsync:
            os.fsync(file.fileno())
    if fsync:
        descriptor = os.open(path.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return data


def read_shard(path: Path) -> Shard | None:
    """Return whose shard it is; None: it is missing, or cut off. ``MIXTURE``: two processes have written to it."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if not data.endswith(_END):
        return None
    shard = Shard(**json.loads(data.partition(b"\n")[0]))
    return shard if data == shard.encoded() else replace(shard, generation=MIXTURE)


# -- oracle ---------------------------------------------------------------------------------------------------------
#
# What the keys and the files say, read without the code that is tested: what a takeover must come to, what is left.
#
# Only the names of keys are taken from ``raftkv.checkpoint.keys``.


@dataclass(frozen=True)
class State:
    """The registry's keys at one moment.

    Attributes:
        committed: steps that have a record.
        latest: the step of ``latest``; 0: there is none.
        heads: step and generation of every attempt that is not decided, and whether all its ranks have prepared.
        named: directories that a record, an attempt or a deletion names.
    """

    committed: frozenset[int]
    latest: int
    heads: tuple[tuple[int, int, bool], ...]
    named: frozenset[str]

    @property
    def expected(self) -> int:
        """The step that ``latest`` must have after a takeover of all that there is."""
        return max([self.latest, *(step for step, _, is_whole in self.heads if is_whole)])


def read_state(kv: Any, run_id: str) -> State:
    """Read all keys of a run."""
    keys = RegistryKeys(run_id)
    values = {item.key.decode(): item.value for item in kv.scan(keys.base, prefix=True)}
    ranks = Counter(key.rpartition("rank/")[0] for key in values if key.startswith(keys.attempts) and "/rank/" in key)
    heads = []
    for key in values:
        if key.startswith(keys.attempts) and key.endswith("/head"):
            head = json.loads(values[key])
            is_whole = ranks[key.removesuffix("head")] == head["world_size"]
            heads.append((head["step"], head["generation"], is_whole))
    latest = [json.loads(item.value)["step"] for item in kv.scan(keys.latest_all, prefix=True)]
    places = (keys.attempts, keys.records, keys.deletings)
    naming = [json.loads(value) for key, value in values.items() if key.startswith(places) and "/rank/" not in key]
    return State(
        frozenset(int(key.rpartition("/")[2]) for key in values if key.startswith(keys.records)),
        max(latest, default=0),
        tuple(sorted(heads)),
        frozenset(Path(each["uri"]).name for each in naming),
    )


def strays(state: State, directory: Path) -> list[str]:
    """Return directories that no key names: no reader finds them, nor does the collector."""
    return sorted(path.name for path in directory.iterdir() if path.is_dir() and path.name not in state.named)
