"""aetcd: its own lock recipe, a key with a lease whose deletion waiters watch for."""

from __future__ import annotations

import asyncio

from common import connect, key
from report import Report, run


async def acquire_and_release(report: Report) -> None:
    """One holds, another does not get it in time, then it does."""
    async with connect(report) as client:
        first, second = client.lock(key(report, "mutex"), ttl=60), client.lock(key(report, "mutex"), ttl=60)
        report.step("first", await first.acquire(), await first.is_acquired(), await second.is_acquired())
        report.step("second in vain", await second.acquire(timeout=0.3))
        report.step("refresh", (await first.refresh()).TTL)
        report.step("not the holder's release", await second.release(), await first.is_acquired())
        report.step("release", await first.release(), await first.is_acquired())
        report.step("second", await second.acquire(timeout=1), await second.release())


async def waiting(report: Report) -> None:
    """Waiters get the lock one after another, each because the one before let go."""
    order: list[int] = []
    held = asyncio.Event()
    leave = asyncio.Event()

    async def hold(number: int) -> None:
        async with connect(report) as client, client.lock(key(report, "mutex"), ttl=60) as lock:
            order.append(number)
            report.step("holds", await lock.is_acquired())
            held.set()
            await leave.wait()

    tasks = [asyncio.create_task(hold(number)) for number in range(3)]
    await held.wait()
    report.step("one at a time", len(order))
    leave.set()
    await asyncio.gather(*tasks)
    report.step("all", sorted(order))


async def lost(report: Report) -> None:
    """A holder that does not refresh loses the lock when its lease ends."""
    async with connect(report) as client:
        first, second = client.lock(key(report, "mutex"), ttl=2), client.lock(key(report, "mutex"), ttl=60)
        report.step("first", await first.acquire())
        report.step("second", await second.acquire(timeout=10), await first.is_acquired())
        report.step("too late", await first.release(), await second.is_acquired(), await second.release())


async def counting(report: Report) -> None:
    """Four clients add to a number under the lock: none is lost."""
    number = key(report, "number")
    async with connect(report) as client:
        await client.put(number, b"0")

        async def add() -> None:
            async with connect(report) as own:
                for _ in range(5):
                    async with own.lock(key(report, "mutex"), ttl=60):
                        await own.put(number, str(int((await own.get(number)).value) + 1).encode())

        await asyncio.gather(*(add() for _ in range(4)))
        report.step("number", (await client.get(number)).value)


if __name__ == "__main__":
    run(acquire_and_release, waiting, lost, counting, around=asyncio.run)
