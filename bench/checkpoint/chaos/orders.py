"""The order of operations in which other tools save, and by which they find what to resume from.

Only the order is theirs, as their sources have it (versions in
``docs/training/checkpoints-chaos.md``): which file is written
when, where the ranks wait for each other, and what a resume reads. The files are ``shards``, written to one directory
for each step, as all of them do, so a step that is done again is written over.

    DCP         shards, all ranks, `.metadata` by rename, all ranks, then a tracker file of the user's
    DeepSpeed   shards, `latest` by rank 0 when *it* is through, then all ranks wait
    Megatron    shards, all ranks, tracker truncated and written, all ranks
    HF Trainer  model and trainer state by rank 0, a file of each rank's own; the newest folder is the checkpoint
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

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
MID_TRACKER: Final = "mid_tracker"
AFTER_COMMIT: Final = "after_commit"

POINTS: Final = (BEFORE_WRITE, MID_WRITE, BEFORE_PREPARE, AFTER_PREPARE, BEFORE_COMMIT, AFTER_COMMIT)
"""Nothing written; half of the shard; all bytes durable; prepared; manifest written, but not committed; committed."""
ALL_POINTS: Final = (*POINTS[:-1], MID_TRACKER, AFTER_COMMIT)
"""With the one that only tools with a tracker file have: it is truncated, and not written yet."""
COORDINATOR_POINTS: Final = (BEFORE_COMMIT, MID_TRACKER, AFTER_COMMIT)
"""Here the coordinator stops, whoever is to be killed: the others wait for it."""

AT: Final = "at"
BARRIER: Final = "barrier"
DONE: Final = "done"
FAILED: Final = "failed"
READY: Final = "ready"
"""What ranks say."""
GO: Final = "go"
BROKEN: Final = "broken"
"""What they are answered."""


class GroupBroken(Exception):
    """The process group of a rank is gone: a collective failed."""


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

    def barrier(self) -> None:
        """Wait for all ranks of the generation.

        Raises:
            GroupBroken: one of them is gone.
        """
        self._link.send((BARRIER, ""))
        if self._link.recv() == BROKEN:
            raise GroupBroken


# -- shards ---------------------------------------------------------------------------------------------------------
#
# The files that ranks write, and what a loader sees of them.
#
# A shard begins with a line that says whose it is, and ends with a mark, so that one can see what a loader of a real
# tool
# sees: that a file is missing or cut off, but not that it, or a part of it, is another generation's.

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
        """Return the bytes of the file; of one length, whoever writes them."""
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


LOADS: Final = "loads"
PARTIAL: Final = "does not load"
MIXED: Final = "loads a mixture of two generations"
LOST_STATE: Final = "loads without a rank's state"
REFUSES: Final = "refuses to start"
SCRATCH: Final = "starts from scratch"


class Found(NamedTuple):
    """What a resume comes to: how it ends, and with which step."""

    verdict: str
    step: int = 0


class Order:
    """How one tool saves; a rank of it.

    Arguments:
        points: where it is to stop.
        root: directory of all checkpoints.
    """

    TRACKER = "latest"
    FSYNC = False

    def __init__(self, points: Points, root: Path) -> None:
        self._points = points
        self.root = root

    def open(self, root: str) -> None:
        """Use another directory."""
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)

    def folder(self, step: int) -> Path:
        """Return the directory of a step."""
        return self.root / f"step-{step}"

    def shard_name(self, rank: int) -> str:
        """Return the name of a rank's file."""
        return f"rank_{rank}.pt"

    def save(self, step: int, rank: int, size: int, generation: int, stop_at: str) -> None:
        """Save a step, and stop at a point."""
        raise NotImplementedError

    def resume(self, size: int) -> Found:
        """Load the step that the tracker file names."""
        path = self.root / self.TRACKER
        if not path.exists():
            return Found(SCRATCH)
        text = path.read_text(encoding="ascii").strip()
        return self.load(int(text), size) if text else Found(REFUSES)

    # ---- what they have in common

    def _write(self, step: int, rank: int, generation: int) -> None:
        self._points.reach(BEFORE_WRITE)
        path = self.folder(step) / self.shard_name(rank)
        write_shard(path, Shard(rank, step, generation), lambda: self._points.reach(MID_WRITE), fsync=self.FSYNC)
        self._points.reach(BEFORE_PREPARE)

    def _write_tracker(self, text: str) -> None:
        self._points.reach(BEFORE_COMMIT)
        with (self.root / self.TRACKER).open("w", encoding="ascii") as file:  # truncated from here on
            self._points.reach(MID_TRACKER)
            file.write(text)

    def load(self, step: int, size: int) -> Found:
        """Load a step, as far as a loader can tell that it should not."""
        shards = [read_shard(self.folder(step) / self.shard_name(rank)) for rank in range(size)]
        whole = [shard for shard in shards if shard is not None]
        if len(whole) < size:
            return Found(PARTIAL, step)
        generations = {shard.generation for shard in whole}
        return Found(LOADS if len(generations) == 1 and MIXTURE not in generations else MIXED, step)


class PlainDcp(Order):
    """torch.distributed.checkpoint, and a file with the newest step, as scripts write it after ``dcp.save``."""

    FSYNC = True

    def shard_name(self, rank: int) -> str:
        """Implement ``Order.shard_name``."""
        return f"__{rank}_0.distcp"

    def save(self, step: int, rank: int, size: int, generation: int, stop_at: str) -> None:
        """Implement ``Order.save``."""
        self._points.stop_at = stop_at
        self._write(step, rank, generation)
        self._points.barrier()  # the coordinator gathers what all have written
        self._points.reach(AFTER_PREPARE)
        if rank == 0:
            folder = self.folder(step)
            (folder / ".metadata.tmp").write_text(str(size), encoding="ascii")
            (folder / ".metadata").unlink(missing_ok=True)
            os.rename(folder / ".metadata.tmp", folder / ".metadata")
        self._points.barrier()  # and tells them the outcome
        if rank == 0:
            self._write_tracker(str(step))
        self._points.reach(AFTER_COMMIT)

    def load(self, step: int, size: int) -> Found:
        """Implement ``Order.load``."""
        if not (self.folder(step) / ".metadata").exists():
            return Found(PARTIAL, step)
        return super().load(step, size)


class DeepSpeed(Order):
    """``engine.save_checkpoint``: rank 0 writes ``latest`` after its own commit, and before the barrier."""

    def save(self, step: int, rank: int, size: int, generation: int, stop_at: str) -> None:
        """Implement ``Order.save``."""
        self._points.stop_at = stop_at
        self._points.barrier()
        self._write(step, rank, generation)
        self._points.reach(AFTER_PREPARE)
        if rank == 0:
            self._write_tracker(str(step))
        self._points.barrier()
        self._points.reach(AFTER_COMMIT)


class Megatron(Order):
    """``save_checkpoint``: the tracker is truncated in place, after a barrier."""

    TRACKER = "latest_checkpointed_iteration.txt"

    def save(self, step: int, rank: int, size: int, generation: int, stop_at: str) -> None:
        """Implement ``Order.save``."""
        self._points.stop_at = stop_at
        self._write(step, rank, generation)
        self._points.barrier()
        self._points.reach(AFTER_PREPARE)
        if rank == 0:
            self._write_tracker(str(step))
        self._points.barrier()
        self._points.reach(AFTER_COMMIT)


class NewestFolder(Order):
    """The Trainer of transformers: ``get_last_checkpoint`` takes the folder with the highest number."""

    STATE = "trainer_state.json"

    def folder(self, step: int) -> Path:
        """Implement ``Order.folder``."""
        return self.root / f"checkpoint-{step}"

    def shard_name(self, rank: int) -> str:
        """Implement ``Order.shard_name``."""
        return "model.safetensors" if rank == 0 else f"rng_state_{rank}.pth"

    def save(self, step: int, rank: int, size: int, generation: int, stop_at: str) -> None:
        """Implement ``Order.save``."""
        self._points.stop_at = stop_at
        self.folder(step).mkdir(parents=True, exist_ok=True)
        self._write(step, rank, generation)
        self._points.reach(AFTER_PREPARE)
        self._points.reach(BEFORE_COMMIT)
        if rank == 0:
            (self.folder(step) / self.STATE).write_text(str(step), encoding="ascii")
        self._points.reach(AFTER_COMMIT)

    def resume(self, size: int) -> Found:
        """Implement ``Order.resume``: the state of a rank's random numbers may be missing, with a warning."""
        steps = [int(path.name.rpartition("-")[2]) for path in self.root.glob("checkpoint-*")]
        if not steps:
            return Found(SCRATCH)
        step = max(steps)
        folder = self.folder(step)
        found = self.load(step, size)
        if not (folder / self.STATE).exists() or read_shard(folder / self.shard_name(0)) is None:
            return Found(PARTIAL, step)
        is_missing = any(not (folder / self.shard_name(rank)).exists() for rank in range(size))
        return Found(LOST_STATE, step) if is_missing else found


ORDERS: Mapping[str, Callable[[Points, Path], Order]] = {
    "DCP + tracker": PlainDcp,
    "DeepSpeed": DeepSpeed,
    "Megatron": Megatron,
    "HF newest folder": NewestFolder,
}
"""By the name of the tool."""


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
    """Return directories that nobody could ever find, to load or to delete them."""
    return sorted(path.name for path in directory.iterdir() if path.is_dir() and path.name not in state.named)
