"""A cache of 100,000 keys that 1,000 tasks read, on one member: ``python -m bench.cache [--keys N] [--readers N]``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from statistics import median
from time import perf_counter
from typing import Final

import raftkv.aio
from bench.report import finish, markdown, parser_of

PREFIX: Final = "bench/"
VALUE: Final = b"x" * 100
READS: Final = 100
"""Reads of each task."""


async def timed_ms(call: Callable[[], Awaitable[object]], times: int) -> float:
    """Return the median duration of a call."""
    took_s = []
    for _ in range(times):
        began = perf_counter()
        await call()
        took_s.append(perf_counter() - began)
    return 1e3 * median(took_s)


async def measure(kv: raftkv.aio.Client, keys: int, readers: int) -> list[tuple[str, str]]:
    """Return the rows of the table."""
    first = f"{PREFIX}{0:07}"
    await kv.put_many((f"{PREFIX}{number:07}", VALUE) for number in range(keys))
    began = perf_counter()
    async with kv.cache(PREFIX) as cache:
        fill_s = perf_counter() - began

        async def read(reader: int) -> None:
            for number in range(READS):
                await cache.get(f"{PREFIX}{(reader * 7919 + number) % keys:07}")

        async def change() -> None:
            await cache.wait((await kv.put(first, VALUE)).revision)

        async def read_all() -> None:
            await asyncio.gather(*map(read, range(readers)))

        async def read_newest() -> None:
            await asyncio.gather(*(cache.get(first, linearizable=True) for _ in range(readers)))

        put_ms, change_ms = await timed_ms(lambda: kv.put(first, VALUE), READS), await timed_ms(change, READS)
        return [
            ("fill, s", f"{fill_s:.2f}"),
            ("reads of all tasks, 1/s", f"{readers * READS / await timed_ms(read_all, 3) * 1e3:,.0f}"),
            ("event after the answer to its put, ms", f"{max(change_ms - put_ms, 0.0):.2f}"),
            ("linearizable read, ms", f"{await timed_ms(lambda: cache.get(first, linearizable=True), READS):.2f}"),
            (f"{readers:,} linearizable reads at once, ms", f"{await timed_ms(read_newest, 5):.0f}"),
            ("range of all keys over the wire, ms", f"{await timed_ms(lambda: kv.range(PREFIX, prefix=True), 3):.0f}"),
        ]


def main() -> None:
    """Measure, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--readers", type=int, default=1_000)
    options = parser.parse_args()

    async def run(endpoints: list[str]) -> list[tuple[str, str]]:
        async with raftkv.aio.connect(endpoints, timeout_s=60.0) as kv:
            return await measure(kv, options.keys, options.readers)

    with raftkv.local() as cluster:
        rows = asyncio.run(run(cluster.endpoints))
    finish(markdown((f"{options.keys:,} keys, {options.readers:,} readers", ""), rows))


if __name__ == "__main__":
    main()
