"""etcd-client-py: the server's Lock service: waiting, time-outs, expiry, mutual exclusion."""

from __future__ import annotations

import asyncio
from typing import Any

from common import client, connect, failure, key, run
from etcd_client import EtcdLockOption
from report import Report


async def keys(connection: Any, name: bytes, wanted: int) -> int:
    """Ask until `wanted` keys stand in the queue of a lock; a waiter that gave up is removed a moment later."""
    for _ in range(1000):
        found = len(await connection.keys_prefix(name))
        if found == wanted:
            break
    return found


async def time_out(report: Report) -> None:
    """A client that waits no longer leaves nothing behind; the lock is free when its holder leaves."""
    name = key(report, "mutex")
    async with connect(report) as c:
        async with client(report).with_lock(EtcdLockOption(lock_name=name, ttl=60)) as holder:
            await holder.put(key(report, "seen"), b"1")
            report.step("held", len(await c.keys_prefix(name)))
            waiter = client(report).with_lock(EtcdLockOption(lock_name=name, timeout=0.5))
            await report.afails("in vain", waiter.__aenter__(), failure)
            report.step("one key is left", await keys(c, name, 1))
        async with client(report).with_lock(EtcdLockOption(lock_name=name, timeout=10.0)):
            report.step("free", await keys(c, name, 1))
        report.step("nobody", await keys(c, name, 0))


async def expiry(report: Report) -> None:
    """A holder whose lease ends loses the lock to the one who waits."""
    name = key(report, "mutex")
    async with connect(report) as c, client(report).with_lock(EtcdLockOption(lock_name=name, ttl=2)):
        first = await c.keys_prefix(name)
        async with client(report).with_lock(EtcdLockOption(lock_name=name, ttl=60, timeout=15.0)):
            report.step("another holder", await keys(c, name, 1), first != await c.keys_prefix(name))


async def counting(report: Report) -> None:
    """Eight tasks add to a number under the lock: none is lost."""
    name, number = key(report, "mutex"), key(report, "number")
    async with connect(report) as c:
        await c.put(number, b"0")

        async def add() -> None:
            for _ in range(5):
                async with client(report).with_lock(EtcdLockOption(lock_name=name, ttl=60)) as holder:
                    await holder.put(number, str(int(await holder.get(number)) + 1).encode())

        await asyncio.gather(*(add() for _ in range(8)))
        report.step("number", await c.get(number), await keys(c, name, 0))


if __name__ == "__main__":
    run(time_out, expiry, counting)
