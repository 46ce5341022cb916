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

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from bench.checkpoint.chaos.points import (
    AFTER_COMMIT,
    AFTER_PREPARE,
    BEFORE_COMMIT,
    BEFORE_PREPARE,
    BEFORE_WRITE,
    MID_TRACKER,
    MID_WRITE,
    Points,
)
from bench.checkpoint.chaos.shards import MIXTURE, Shard, read_shard, write_shard

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
        """Find what to go on from, and load it."""
        raise NotImplementedError

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

    def _tracked(self, size: int) -> Found:
        path = self.root / self.TRACKER
        if not path.exists():
            return Found(SCRATCH)
        text = path.read_text(encoding="ascii").strip()
        if not text:
            return Found(REFUSES)
        return self.load(int(text), size)

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

    def resume(self, size: int) -> Found:
        """Implement ``Order.resume``."""
        return self._tracked(size)

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

    def resume(self, size: int) -> Found:
        """Implement ``Order.resume``."""
        return self._tracked(size)


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

    def resume(self, size: int) -> Found:
        """Implement ``Order.resume``."""
        return self._tracked(size)


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
