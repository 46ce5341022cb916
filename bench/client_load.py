"""One client library under load, in the environment of that library: standard library only, but for what is measured.

    python -P bench/client_load.py etcd3 ENDPOINT put 64 2.0
        ->  {"calls": 9120, "seconds": 2.0, "p50_ms": 13.9, "p99_ms": 21.0}

Threads share a client whose calls block, tasks share one whose calls are awaited, as the documentation of each has it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

KEYS = [f"bench/{number:04}" for number in range(1000)]
VALUE = b"v" * 256
WARM_UP_S = 0.5

Calls = dict[str, Callable[[str], Any]]
"""``put`` and ``get`` of a key."""


@contextmanager
def _raftkv_sync(endpoint: str) -> Iterator[Calls]:
    import raftkv

    with raftkv.connect(endpoint) as client:
        yield {"put": lambda key: client.put(key, VALUE), "get": client.get}


@contextmanager
def _etcd3(endpoint: str) -> Iterator[Calls]:
    import etcd3

    host, _, port = endpoint.rpartition(":")
    client = etcd3.client(host=host, port=int(port))
    yield {"put": lambda key: client.put(key, VALUE), "get": client.get}


@asynccontextmanager
async def _raftkv_async(endpoint: str) -> AsyncIterator[Calls]:
    import raftkv.aio

    async with raftkv.aio.connect(endpoint) as client:
        yield {"put": lambda key: client.put(key, VALUE), "get": client.get}


def _of_bytes(client: Any) -> Calls:
    return {"put": lambda key: client.put(key.encode(), VALUE), "get": lambda key: client.get(key.encode())}


@asynccontextmanager
async def _aetcd(endpoint: str) -> AsyncIterator[Calls]:
    import aetcd

    host, _, port = endpoint.rpartition(":")
    async with aetcd.Client(host=host, port=int(port)) as client:
        yield _of_bytes(client)


@asynccontextmanager
async def _etcd_client(endpoint: str) -> AsyncIterator[Calls]:
    import etcd_client

    async with etcd_client.Client([f"http://{endpoint}"]).connect() as client:
        yield _of_bytes(client)


BLOCKING = {"raftkv": _raftkv_sync, "etcd3": _etcd3}
AWAITED = {"raftkv-aio": _raftkv_async, "aetcd": _aetcd, "etcd_client": _etcd_client}


class Clock:
    """When calls count: after the warm-up, and until so many seconds later."""

    def __init__(self, seconds: float) -> None:
        self.starts_at = time.perf_counter() + WARM_UP_S
        self.ends_at = self.starts_at + seconds
        self.times_s: list[float] = []

    def keys(self, number: int, callers: int) -> Iterator[str]:
        """Give one of the callers the key of its next call until the time is over; what it asks between is a call."""
        clock, turn, own = time.perf_counter, number, []
        while (before := clock()) < self.ends_at:
            yield KEYS[turn % len(KEYS)]
            turn += callers
            own.append((before, clock()))
        self.times_s += [after - before for before, after in own if before >= self.starts_at and after <= self.ends_at]


def run_threads(calls: Any, operation: str, callers: int, clock: Clock) -> None:
    """Call from as many threads at once."""

    def work(number: int) -> None:
        for key in clock.keys(number, callers):
            calls[operation](key)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def run_tasks(library: str, endpoint: str, operation: str, callers: int, seconds: float) -> Clock:
    """Call from as many tasks at once."""
    async with AWAITED[library](endpoint) as calls:
        clock = Clock(seconds)

        async def work(number: int) -> None:
            for key in clock.keys(number, callers):
                await calls[operation](key)

        await asyncio.gather(*map(work, range(callers)))
    return clock


def main() -> None:
    """Measure as the command line says, and print the result."""
    library, endpoint, operation, callers, seconds = sys.argv[1:]
    if library in AWAITED:
        clock = asyncio.run(run_tasks(library, endpoint, operation, int(callers), float(seconds)))
    else:
        with BLOCKING[library](endpoint) as calls:
            clock = Clock(float(seconds))
            run_threads(calls, operation, int(callers), clock)
    times = clock.times_s
    cuts = statistics.quantiles(times, n=100) if len(times) > 1 else [0.0] * 99
    result = {"calls": len(times), "seconds": float(seconds), "p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
