"""A cache of many keys, read by many tasks: ``python -m bench.cache [KEYS [READERS]]``; one member, on this machine.

Prints one row each: seconds to fill, bytes a key, reads a second of all readers, lag of an event,
and what a linearizable read costs beside a range over the wire.
"""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from statistics import median
from time import perf_counter

import raftkv.aio

VALUE = b"x" * 100
PREFIX = "bench/"


async def timed(call: Callable[[], Awaitable[object]], times: int) -> float:
    """Return the median duration of a call, in milliseconds."""
    took = []
    for _ in range(times):
        began = perf_counter()
        await call()
        took.append(perf_counter() - began)
    return 1000 * median(took)


async def measure(kv: raftkv.aio.Client, keys: int, readers: int) -> list[tuple[str, str]]:
    """Return the rows of the table."""
    await kv.put_many((f"{PREFIX}{number:07}", VALUE) for number in range(keys))
    began = perf_counter()
    async with kv.cache(PREFIX) as cache:
        fill_s = perf_counter() - began

        async def read(number: int) -> None:
            for turn in range(100):
                await cache.get(f"{PREFIX}{(number * 7919 + turn) % keys:07}")

        began = perf_counter()
        await asyncio.gather(*map(read, range(readers)))
        reads_per_s = readers * 100 / (perf_counter() - began)

        async def change() -> None:
            done = await kv.put(f"{PREFIX}0000000", VALUE)
            await cache.wait(done.revision)

        async def together() -> None:
            await asyncio.gather(*(cache.get(f"{PREFIX}0000000", linearizable=True) for _ in range(readers)))

        put_ms = await timed(lambda: kv.put(f"{PREFIX}0000000", VALUE), 100)
        change_ms = await timed(change, 100)
        one_ms = await timed(lambda: cache.get(f"{PREFIX}0000000", linearizable=True), 100)
        all_ms = await timed(together, 5)
        range_ms = await timed(lambda: kv.range(PREFIX, prefix=True, timeout_s=60.0), 3)
    tracemalloc.start()
    async with kv.cache(PREFIX):
        held_bytes = tracemalloc.get_traced_memory()[0] / keys
    tracemalloc.stop()
    return [
        ("seconds to fill", f"{fill_s:.2f}"),
        ("bytes a key, of them 113 of key and value", f"{held_bytes:.0f}"),
        ("reads/s, all readers", f"{reads_per_s:,.0f}"),
        ("lag of an event behind the answer of its put, ms", f"{max(change_ms - put_ms, 0):.2f}"),
        ("linearizable read, ms", f"{one_ms:.2f}"),
        (f"{readers:,} linearizable reads at once, ms", f"{all_ms:.1f}"),
        ("linearizable range of all keys over the wire, ms", f"{range_ms:.0f}"),
    ]


async def main(keys: int, readers: int) -> None:
    """Measure on a cluster of one member."""
    with raftkv.local() as cluster:
        async with raftkv.aio.connect(cluster.endpoints, timeout_s=60.0) as kv:
            print(f"| {keys:,} keys, {readers:,} readers | |\n|---|---:|")
            for row in await measure(kv, keys, readers):
                print("| {} | {} |".format(*row))


if __name__ == "__main__":
    asyncio.run(main(*(int(each) for each in (sys.argv[1:] + ["100000", "1000"][len(sys.argv) - 1 :]))))
