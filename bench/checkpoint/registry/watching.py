"""Row ``watch``: from the call of ``commit`` to another process that waits for it, with the checkpoint in its hands."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from multiprocessing.connection import Connection
from time import monotonic

import raftkv.aio
from bench.checkpoint.registry.figures import Figure, latencies
from raftkv.checkpoint.aio import Registry

BAR_MS = 50.0
PAUSE_S = 0.02


def _wait_in_process(endpoints: list[str], commits: int, pipe: Connection) -> None:
    asyncio.run(_wait(endpoints, commits, pipe))


async def _wait(endpoints: list[str], wanted: int, pipe: Connection) -> None:
    seen = {}
    async with raftkv.aio.connect(endpoints) as kv:
        commits = Registry(kv, "watch").watch()
        await commits.ready()
        pipe.send(None)
        async for commit in commits:
            seen[commit.checkpoint.step] = monotonic()
            if len(seen) == wanted:
                commits.cancel()
    pipe.send(seen)


async def measure(endpoints: list[str], rounds: int) -> list[Figure]:
    """Commit so many times."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    watcher = context.Process(target=_wait_in_process, args=(endpoints, rounds, theirs), daemon=True)
    watcher.start()
    await asyncio.to_thread(ours.recv)
    called, answered = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        async with raftkv.aio.connect(endpoints) as kv:
            registry = Registry(kv, "watch", uri=directory)
            claim = await registry.claim()
            for step in range(1, rounds + 1):
                attempt = await registry.begin(claim, step)
                await attempt.prepare(0, [])
                called[step] = monotonic()
                await attempt.commit(metrics={"loss": 1.0 / step})
                answered[step] = monotonic()
                await asyncio.sleep(PAUSE_S)  # commits in practice do not come one after the other
    seen = await asyncio.to_thread(ours.recv)
    watcher.join()
    return [
        *latencies("watch", "call of commit to watcher", [seen[step] - called[step] for step in called], BAR_MS),
        *latencies("watch", "call of commit to its return", [answered[step] - called[step] for step in called]),
    ]
