"""A rank that saves through the registry: what the driver asks for, one command at a time.

Coordinator is rank 0. It begins, waits for the others, prepares last, and commits; ``before_commit`` is between the
manifest and the transaction. A process outlives its generation: then it is a zombie, and ``trespass`` has it try
everything that its claim allowed it before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import raftkv
from raftkv.checkpoint import Attempt, Claim, FileRecord, Registry, digest
from raftkv.checkpoint import registry as registry_module
from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.commit.manifest import Manifest
from raftkv.errors import RaftKVError
from tests.checkpoint.chaos.points import (
    AFTER_COMMIT,
    AFTER_PREPARE,
    BEFORE_COMMIT,
    BEFORE_PREPARE,
    BEFORE_WRITE,
    MID_WRITE,
    Points,
    Shard,
    read_shard,
    write_shard,
)

METRIC = "loss"
SHARD_NAME = "rank-"


class RegistryRank:
    """Save and resume steps on the driver's commands.

    Arguments:
        points: where it is to stop.
        endpoints: of the cluster.
    """

    def __init__(self, points: Points, endpoints: list[str]) -> None:
        self._points = points
        self._kv = raftkv.connect(endpoints)
        self._registry: Any = None
        self._claim: Claim | None = None
        self._attempt: Attempt | None = None
        stop_after_the_manifest(points)

    def open(self, run_id: str, uri: str) -> None:
        """Use the checkpoints of a run."""
        self._registry = Registry(self._kv, run_id, uri=uri)
        self._attempt = None

    def gather(self, path: str, rank: int, size: int) -> None:
        """Build the process group of a generation; here there is none."""

    def claim(self) -> str:
        """Claim the run's checkpoints; returns the token for the other ranks."""
        self._claim = self._registry.claim()
        return self._claim.token

    def adopt(self, token: str) -> None:
        """Take the claim of the coordinator."""
        self._claim = Claim.from_token(token)

    def take_over(self) -> list[tuple[int, bool]]:
        """Decide what dead generations have left; returns steps, and whether they are committed now."""
        taken = self._registry.take_over(self._claim)
        return [(each.attempt.step, each.checkpoint is not None) for each in taken]

    def resume(self) -> tuple[int, list[str]]:
        """Load the latest checkpoint; returns its step, 0 if there is none, and what is wrong with it."""
        try:
            found = self._registry.latest()
        except LookupError:
            return 0, []
        return found.step, problems_of(found)

    def save(self, step: int, rank: int, size: int, stop_at: str) -> int:
        """Save a checkpoint, and stop at a point; returns its number when it is committed."""
        self._points.stop_at = stop_at
        claim = self._claim
        if rank == 0:
            attempt = self._registry.begin(claim, step, world_size=size)
        else:
            attempt = self._registry.join(claim, step)
        self._attempt = attempt
        self._points.reach(BEFORE_WRITE)
        file = self._write(attempt, rank)
        self._points.reach(BEFORE_PREPARE)
        if rank == 0:
            attempt.prepared(but=[0])
        attempt.prepare(rank, [file])
        self._points.reach(AFTER_PREPARE)
        if rank == 0:
            committed = attempt.commit(metrics={METRIC: 1.0 / step})
        else:
            committed = attempt.outcome()
        self._points.reach(AFTER_COMMIT)
        return int(committed.number)

    def _write(self, attempt: Attempt, rank: int) -> FileRecord:
        record, name = attempt.record, f"{SHARD_NAME}{rank}.bin"
        shard = Shard(rank, record.step, record.generation)
        data = write_shard(Path(attempt.uri) / name, shard, lambda: self._points.reach(MID_WRITE))
        return FileRecord(name, len(data), digest.of_bytes(data))

    def trespass(self, rank: int, size: int) -> dict[str, str]:
        """Try everything with a claim that is over; returns the error of each, empty for one that was admitted."""
        attempt, claim, step = self._attempt, self._claim, 0
        tried: dict[str, Callable[[], object]] = {}
        if attempt is not None:
            step = attempt.record.step
            file = self._write(attempt, rank)  # its bytes are its own: they must not be in another checkpoint
            tried["prepare"] = lambda: attempt.prepare(rank, [file])
            tried["commit"] = lambda: attempt.commit(timeout_s=5.0)
            tried["abort"] = lambda: attempt.abort("a zombie")
        tried["begin"] = lambda: self._registry.begin(claim, step + 1000, world_size=size)
        tried["take over"] = lambda: self._registry.take_over(claim)
        return {name: _error_of(call) for name, call in tried.items()}


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RaftKVError as error:
        return type(error).__name__
    return ""


def problems_of(checkpoint: Any) -> list[str]:
    """Return what is wrong with the bytes of a checkpoint, by its record alone."""
    place = Path(checkpoint.uri)
    where = f"step {checkpoint.step} in {place.name}"
    try:
        data = (place / MANIFEST).read_bytes()
    except OSError as error:
        return [f"{where}: no manifest: {error.strerror}"]
    if digest.of_bytes(data) != checkpoint.manifest:
        return [f"{where}: the manifest is not what was committed"]
    files = Manifest.decode(data).files
    wrong = [] if {rank for rank, _ in files} == set(range(checkpoint.world_size)) else [f"{where}: ranks are missing"]
    for rank, file in files:
        path = place / file.name
        content = path.read_bytes() if path.exists() else b""
        if len(content) != file.size_bytes or digest.of_bytes(content) != file.digest:
            wrong.append(f"{where}: {file.name} is not what was prepared")
        elif file.name.startswith(SHARD_NAME) and read_shard(path) != Shard(
            rank, checkpoint.step, checkpoint.generation
        ):
            wrong.append(f"{where}: {file.name} is not rank {rank}'s of this attempt")
    return wrong


def stop_after_the_manifest(points: Points) -> None:
    """Have registries stop between the manifest and the transaction of a commit."""
    written = registry_module.write_manifest

    async def write(uri: str, data: bytes) -> None:
        await written(uri, data)
        await asyncio.to_thread(points.reach, BEFORE_COMMIT)

    registry_module.write_manifest = write
