"""etcd-client-py: watches of keys and prefixes, once, many events, several at a time."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from common import Watched, client, connect, event, key, run
from etcd_client import ConnectOptions, GRPCStatusError, Txn, TxnOp
from report import Report


async def one_key(report: Report) -> None:
    """A watch sees what happens to its key alone."""
    async with connect(report) as c, Watched(partial(c.watch, key(report, "a"))) as watched:
        await c.put(key(report, "a"), b"1")
        await c.put(key(report, "ab"), b"not watched")
        await c.put(key(report, "a"), b"2")
        await c.delete(key(report, "a"))
        report.step("events", [event(report, raw) for raw in await watched.take(3)])


async def prefix_and_txn(report: Report) -> None:
    """The events of a transaction come in the order of its operations."""
    prefix = report.prefix.encode()
    async with connect(report) as c, Watched(partial(c.watch_prefix, prefix)) as watched:
        await c.put(key(report, "c"), b"0")
        await c.txn(Txn().and_then([*(TxnOp.put(key(report, n), b"1") for n in "bad"), TxnOp.delete(key(report, "c"))]))
        await c.delete_prefix(prefix)
        report.step("events", [event(report, raw) for raw in await watched.take(8)])


async def once(report: Report) -> None:
    """A watch for one event ends by itself."""
    async with connect(report) as c, Watched(partial(c.watch, key(report, "a"), once=True)) as watched:
        await c.put(key(report, "a"), b"1")
        await c.put(key(report, "a"), b"2")
        report.step("events", [event(report, raw) for raw in await watched.take(1)])
        await watched._task
        report.step("no more", watched.events.empty())


async def many(report: Report) -> None:
    """Eight watches see the same thousand changes in the same order."""
    prefix = report.prefix.encode()
    async with connect(report) as c, asyncio.TaskGroup() as group:
        watches = [await Watched(partial(c.watch_prefix, prefix)).opened() for _ in range(8)]

        async def write(writer: int) -> None:
            for number in range(100):
                await c.put(key(report, str(writer)), str(number).encode())

        for number in range(10):
            group.create_task(write(number))
        seen = [[(raw.key, raw.value) for raw in await watch.take(1000)] for watch in watches]
        report.step("all the same", all(one == seen[0] for one in seen))
        of_one = [value.decode() for name, value in seen[0] if report.name(name) == "3"]
        report.step("in order", of_one == [str(number) for number in range(100)], len(set(seen[0])))
        for watch in watches:
            await watch.aclose()


async def _first_change(report: Report, c: Any) -> list[Any]:
    """A put as a watch sees it. The new connection goes on pinging, and is lost as well if this takes too long."""
    for _ in range(20):
        try:
            async with Watched(partial(c.watch, key(report, "a"))) as watched:
                await c.put(key(report, "a"), b"1")
                raw: list[Any] = await watched.take(1)
        except GRPCStatusError:
            continue
        if not isinstance(raw[0], GRPCStatusError):
            return raw
    return []


async def eager_heartbeats(report: Report) -> None:
    """Who pings an idle connection far more often than every five seconds loses it, and connects anew."""
    options = ConnectOptions().with_keep_alive(0.2, 0.15).with_keep_alive_while_idle(True)
    async with client(report).connect(options) as c:
        async with Watched(partial(c.watch, key(report, "a"))) as watched:
            report.step("reported", isinstance((await watched.take(1))[0], GRPCStatusError))
        report.step("goes on", [event(report, raw) for raw in await _first_change(report, c)])


if __name__ == "__main__":
    run(one_key, prefix_and_txn, once, many, eager_heartbeats)
