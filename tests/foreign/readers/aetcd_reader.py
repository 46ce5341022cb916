"""aetcd (grpc.aio): ranges and watches of any size, see `report`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aetcd
from report import Task, run


def ranged(task: Task) -> Iterator[bytes]:
    """The values of a prefix in one answer."""
    yield from asyncio.run(_ranged(task))


def watched(task: Task) -> Iterator[bytes]:
    """The values of the events under a prefix since a revision."""
    yield from asyncio.run(_watched(task))


async def _ranged(task: Task) -> list[bytes]:
    async with _client(task) as client:
        return [kv.value for kv in await client.get_prefix(task.prefix.encode())]


async def _watched(task: Task) -> list[bytes]:
    async with _client(task) as client:
        watch = await client.watch_prefix(task.prefix.encode(), start_revision=task.revision)
        events = aiter(watch)
        values = [(await anext(events)).kv.value for _ in range(task.count)]
        await watch.cancel()
        return values


def _client(task: Task) -> aetcd.Client:
    options = {"grpc.max_receive_message_length": -1}
    return aetcd.Client(host=task.host, port=task.port, timeout=task.timeout_s, options=options)


if __name__ == "__main__":
    run(ranged, watched)
