"""etcd-client-py (Rust's etcd-client on tonic): ranges and watches of any size, see `report`.

This client cannot watch from an old revision, so it writes the events that it is to see anew, each with its own value.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

from etcd_client import Client, CondVar, ConnectOptions
from report import Task, run


def ranged(task: Task) -> Iterator[bytes]:
    """The values of a prefix in one answer."""
    yield from asyncio.run(_ranged(task))


def watched(task: Task) -> Iterator[bytes]:
    """The values of the events under a prefix, which are written while they are watched."""
    yield from asyncio.run(_watched(task))


async def _ranged(task: Task) -> list[bytes]:
    async with _connect(task) as client:
        return [bytes(value) for _, value in await client.get_prefix(task.prefix.encode())]


async def _watched(task: Task) -> list[bytes]:
    async with _connect(task) as client:
        ready, values = CondVar(), []
        writer = asyncio.create_task(_write(client, ready, task))
        async for event in client.watch_prefix(task.prefix.encode(), ready_event=ready):
            values.append(bytes(event.value))
            if len(values) == task.count:
                break
        await writer
        return values


async def _write(client: Any, ready: CondVar, task: Task) -> None:
    await ready.wait()
    for number in range(task.count):
        key = f"{task.prefix}{number:05d}".encode()
        await client.put(key, await client.get(key))


def _connect(task: Task) -> Any:
    client = Client([f"http://{task.host}:{task.port}"])
    return client.connect(ConnectOptions().with_timeout(float(task.timeout_s)))


if __name__ == "__main__":
    run(ranged, watched)
    os._exit(0)  # threads of tokio that go on while the interpreter ends may abort it
