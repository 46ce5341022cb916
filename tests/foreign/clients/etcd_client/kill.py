"""etcd-client-py knows all endpoints: every member dies once, in turn.

Its watch ends with an error when its member dies and cannot say from where it goes on: its user reads and watches
anew. What must hold: no acknowledged put is lost, nothing is seen in a wrong order, and no lock is held twice.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from typing import Any

from common import Watched, client, failure, key, run
from etcd_client import Client, ClientError, ConnectOptions, EtcdLockOption
from report import Report

QUICK = ConnectOptions().with_timeout(0.7).with_connect_timeout(1.0)


async def _persist(call: Any) -> Any:
    """Try until a member answers; every call here may be repeated."""
    for _ in range(200):
        try:
            return await call()
        except ClientError as error:
            last = error
            await asyncio.sleep(0.05)
    raise last


async def _watch(connection: Any, name: bytes) -> Watched:
    """Open a watch, or raise what became of it."""
    return await Watched(partial(connection.watch, name)).opened()


async def puts_and_watches(report: Report) -> None:
    """Acknowledged puts are there after every death, and a new watch works."""
    acknowledged = []
    async with Client([f"http://{endpoint}" for endpoint in report.endpoints]).connect(QUICK) as c:
        for member in range(3):
            report.order("kill", member)
            for number in range(10):
                name = f"{member}{number}"
                await _persist(partial(c.put, key(report, name), b"1"))
                acknowledged.append(name)
            found = [report.name(k) for k in await _persist(partial(c.keys_prefix, report.prefix.encode()))]
            report.step("all there", member, found == acknowledged)
            async with aclosing(await _persist(partial(_watch, c, key(report, "watched")))) as watched:
                await _persist(partial(c.put, key(report, "watched"), str(member).encode()))
                report.step("watched", (await watched.take(1))[0].value)
            await _persist(partial(c.delete, key(report, "watched")))
            report.order("restart", member)


async def watch_is_told(report: Report) -> None:
    """A watch whose member died says so; it does not just fall silent."""
    one = Client([f"http://{report.endpoints[0]}"]).connect(QUICK)
    async with one as c, Watched(partial(c.watch, key(report, "a"))) as watched:
        report.order("kill", 0)
        report.step("reported", failure((await watched.take(1))[0])[0] != 0)
        report.order("restart", 0)


async def lock_outlives_members(report: Report) -> None:
    """A lock stays held while every member dies once; then it goes to the one who waits."""
    name = key(report, "mutex")
    async with client(report).with_lock(EtcdLockOption(lock_name=name, ttl=60), QUICK) as holder:
        for member in range(3):
            report.order("kill", member)
            others = [endpoint for index, endpoint in enumerate(report.endpoints) if index != member]
            alive = Client([f"http://{endpoint}" for endpoint in others])
            waiter = alive.with_lock(EtcdLockOption(lock_name=name, timeout=0.5))
            await report.afails("in vain", waiter.__aenter__(), lambda error: isinstance(error, ClientError))
            report.order("restart", member)
        report.step("held", any(await _persist(partial(holder.keys_prefix, name))))
        await _persist(partial(holder.delete_prefix, name))
        async with client(report).with_lock(EtcdLockOption(lock_name=name, timeout=15.0)) as second:
            report.step("handed on", len(await second.keys_prefix(name)))


if __name__ == "__main__":
    run(puts_and_watches, watch_is_told, lock_outlives_members)
