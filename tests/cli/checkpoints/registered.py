"""A registry with checkpoints whose records and files tests know."""

from __future__ import annotations

from pathlib import Path

import raftkv
from raftkv.checkpoint import FileRecord, Reference, digest
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.storage.place import Place
from tests.cli.runner import Ran, run_ctl


def save(
    kv: raftkv.Client,
    directory: Path,
    step: int,
    *,
    run_id: str = "job",
    kind: str = "dcp",
    parent: Reference | None = None,
    **metrics: float,
) -> Checkpoint:
    """Save a checkpoint of two ranks, with a file of each."""
    registry = raftkv.checkpoint.Registry(kv, run_id, uri=str(directory / run_id.replace("/", "-")))
    attempt = registry.begin(registry.claim("test"), step, world_size=2, kind=kind, parent=parent)
    for rank in range(2):
        data = f"step {step}, rank {rank}".encode()
        Place(attempt.uri).write(f"{rank}.bin", data)
        attempt.prepare(rank, [FileRecord(f"{rank}.bin", len(data), digest.of_bytes(data))])
    return attempt.commit(metrics=metrics)


def ctl(cluster: raftkv.LocalCluster, *words: str) -> Ran:
    """Run ``raftkvctl checkpoint``."""
    return run_ctl(["--endpoints", cluster.endpoints[0], "checkpoint", *words])


def text_of(ran: Ran) -> str:
    """What a command printed that ended well."""
    assert (ran.code, ran.errors) == (0, "")
    return ran.output.decode()
