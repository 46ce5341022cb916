"""Row ``lookup``: every question that the registry answers, asked of many checkpoints of many runs.

The records are written as commits write them, in larger txns: what is measured is how they are found.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic

import raftkv.aio
from bench.checkpoint.registry.figures import Figure, latencies
from raftkv.checkpoint.aio import Registry
from raftkv.checkpoint.commit.summary import advanced, indexed
from raftkv.checkpoint.keys import TAG, RegistryKeys
from raftkv.checkpoint.records import Checkpoint, Hold, Latest, Reference
from raftkv.client.kv.operations import Operation, put
from tests.procs import Cluster

BAR_MS = 5.0
OPERATIONS_MAX = 120
AT_ONCE = 32
KIND = "dcp"
DIGEST = f"sha256:{'cd' * 32}"
TAG_EVERY = 100


def checkpoint_of(run: int, step: int) -> Checkpoint:
    """Return what a commit of 64 ranks writes."""
    choose = random.Random(run * 1_000_003 + step)
    return Checkpoint(
        run_id(run), step, 1, step, KIND, 64, f"/shared/checkpoints/{run_id(run)}/step-{step:012d}.g1.{step}", DIGEST,
        DIGEST, 128, 64 << 28, None, {"loss": choose.random(), "accuracy": choose.random()}, {}, "host:1", 1e9, 30.0,
    )  # fmt: skip


def run_id(run: int) -> str:
    return f"team/job-{run:04d}"


def _records(run: int, count: int) -> list[list[Operation]]:
    """Return the puts of one run, a txn each."""
    keys = RegistryKeys(run_id(run))
    latest: Latest | None = None
    puts: list[Operation] = []
    for step in range(1, count + 1):
        one = checkpoint_of(run, step)
        latest = advanced(latest, one)
        puts += [put(keys.record(KIND, step), one.encode()), *indexed(keys, one)]
        if step % TAG_EVERY == 0:
            reference = Reference(run_id(run), KIND, step)
            puts.append(put(keys.tag(f"tag-{step}"), reference.encode()))
            puts.append(put(keys.hold(KIND, step, TAG, f"tag-{step}"), Hold().encode()))
    if latest is not None:
        puts.append(put(keys.latest(KIND), latest.encode()))
    return [puts[start : start + OPERATIONS_MAX] for start in range(0, len(puts), OPERATIONS_MAX)]


async def _fill(kv: raftkv.aio.Client, runs: int, each: int) -> float:
    began = monotonic()
    slots = asyncio.Semaphore(AT_ONCE)

    async def write(operations: list[Operation]) -> None:
        async with slots:
            await kv.txn().then(*operations).commit(timeout_s=60)

    for run in range(runs):
        async with asyncio.TaskGroup() as group:
            for operations in _records(run, each):
                group.create_task(write(operations))
    return monotonic() - began


def resident_bytes(pid: int) -> int:
    """Return how much memory a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


async def measure(cluster: Cluster, endpoints: list[str], checkpoints: int, runs: int, rounds: int) -> list[Figure]:
    """Fill the registry, and ask."""
    row = "lookup"
    async with raftkv.aio.connect(endpoints) as kv:
        took_s = await _fill(kv, runs, checkpoints // runs)
        found = [Figure(row, f"fill with {checkpoints:,}", round(took_s, 1), "s")]
        for name, ask in _questions(kv, runs, checkpoints // runs).items():
            await ask()
            times = []
            for _ in range(rounds):
                began = monotonic()
                await ask()
                times.append(monotonic() - began)
            found += latencies(row, name, times, BAR_MS)
    memory = max(resident_bytes(member.process.pid) for member in cluster.members if member.process is not None)
    return [*found, Figure(row, "memory of a member", round(memory / (1 << 20)), "MiB")]


def _questions(kv: raftkv.aio.Client, runs: int, each: int) -> dict[str, Callable[[], Awaitable[object]]]:
    choose = random.Random(7)

    def registry() -> Registry:
        return Registry(kv, run_id(choose.randrange(runs)))

    def step() -> int:
        return choose.randint(1, each)

    def tag() -> str:
        return f"tag-{choose.randint(1, each // TAG_EVERY) * TAG_EVERY}"

    return {
        "latest": lambda: registry().latest(),
        "latest of a kind": lambda: registry().latest(KIND),
        "at a step": lambda: registry().at(step()),
        "tagged": lambda: registry().tagged(tag()),
        "best": lambda: registry().best("loss"),
        "best of a run, 10": lambda: registry().lookup.best(run_id(choose.randrange(runs)), "loss", "max", count=10),
        "best of all runs": lambda: registry().lookup.best_of_all("accuracy", "max"),
        "list of runs": registry().lookup.latest_of_all,
        "last 20 of a run": lambda: registry().checkpoints(newest_first=True, limit=20),
    }
