"""The same client for asyncio: workers that share out jobs, and one task that watches them being done."""

from __future__ import annotations

import asyncio

import raftkv
import raftkv.aio
from raftkv.aio import delete, put

JOBS = 20


async def work(kv: raftkv.aio.Client, name: str) -> int:
    """Take jobs until there are none; two workers never take the same."""
    done = 0
    while jobs := await kv.range("todo/", prefix=True, limit=5):
        for job in jobs:
            number = job.key.removeprefix(b"todo/").decode()
            mine, _ = await (
                kv.txn().when(kv.version(job.key) > 0).then(delete(job.key), put(f"done/{number}", name)).commit()
            )
            done += mine
    return done


async def main(endpoints: list[str]) -> None:
    """Share out the jobs."""
    async with raftkv.aio.connect(endpoints) as kv, kv.watch("done/", prefix=True) as finished:
        await kv.put_many({f"todo/{number}": "" for number in range(JOBS)})
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(work(kv, f"worker {number}")) for number in range(3)]
        seen = [await anext(finished) for _ in range(JOBS)]
        print("jobs done:", sum(worker.result() for worker in workers))
        print("events seen:", len({event.key for event in seen}))
        print("left:", await kv.count("todo/", prefix=True))


with raftkv.local() as cluster:
    asyncio.run(main(cluster.endpoints))
