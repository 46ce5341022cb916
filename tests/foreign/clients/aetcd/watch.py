"""aetcd: watches, replay, previous values, kinds, cancel, compaction, many events."""

from __future__ import annotations

import asyncio

import aetcd
from common import connect, failure, key, next_events, take
from report import Report, run


async def one_key(report: Report) -> None:
    """A watch sees what happens to its key alone; after its cancel nothing more."""
    async with connect(report) as client:
        a = key(report, "a")
        watch = await client.watch(a)
        events = aiter(watch)
        await client.put(a, b"1")
        await client.put(key(report, "ab"), b"not watched")
        await client.put(a, b"2")
        await client.delete(a)
        report.step("events", await next_events(report, events, 3))
        await watch.cancel()
        await client.put(a, b"3")
        report.step("after cancel", [one async for one in events])


async def prefix_and_txn(report: Report) -> None:
    """The events of a transaction come in the order of its operations, with one revision."""
    async with connect(report) as client:
        t = client.transactions
        events = aiter(await client.watch_prefix(report.prefix.encode(), prev_kv=True))
        await client.put(key(report, "c"), b"0")
        puts = [t.put(key(report, name), name.encode()) for name in "bad"]
        await client.transaction(compare=[], success=[*puts, t.delete(key(report, "c"))], failure=[])
        await client.delete_prefix(report.prefix.encode())
        report.step("put", await next_events(report, events, 1))
        report.step("txn", await next_events(report, events, 4))
        report.step("delete", await next_events(report, events, 3))


async def from_old_revision(report: Report) -> None:
    """A watch from an old revision replays and goes on; kinds are chosen by the server."""
    async with connect(report) as client:
        a = key(report, "a")
        for value in (b"1", b"2", b"3"):
            await client.put(a, value)
        await client.delete(a)
        start = report.base + 2
        everything = aiter(await client.watch(a, start_revision=start, prev_kv=True))
        puts = aiter(await client.watch(a, start_revision=start, kind=aetcd.EventKind.PUT))
        deletes = aiter(await client.watch(a, start_revision=start, kind=aetcd.EventKind.DELETE))
        await client.put(a, b"4")
        await client.delete(a)
        report.step("everything", await next_events(report, everything, 5))
        report.step("puts", await next_events(report, puts, 3))
        report.step("deletes", await next_events(report, deletes, 2))


async def compacted_start(report: Report) -> None:
    """A start that was compacted raises with the revision from which one may watch."""
    async with connect(report) as client:
        a = key(report, "a")
        for value in (b"1", b"2", b"3", b"4"):
            await client.put(a, value)
        await client.compact(report.base + 3)
        events = aiter(await client.watch(a, start_revision=report.base + 1))
        try:
            report.step("lost", await take(events, 1))
        except aetcd.RevisionCompactedError as error:
            report.step("lost", report.rev(error.compacted_revision))
        events = aiter(await client.watch(a, start_revision=report.base + 3))
        report.step("at the edge", await next_events(report, events, 2))


async def once(report: Report) -> None:
    """watch_once gives the first event, or says that none came."""
    async with connect(report) as client:
        a = key(report, "a")
        await report.afails("nothing happens", client.watch_once(a, timeout=0.3), failure)
        await client.put(a, b"1")
        first = await client.watch_once(a, start_revision=report.base + 1)
        report.step("happened", first.kind, first.kv.value)
        first = await client.watch_prefix_once(report.prefix.encode(), start_revision=report.base + 1)
        report.step("happened", first.kind, report.name(first.kv.key))


async def many(report: Report) -> None:
    """A thousand changes by ten writers: every one arrives once, in the order of revisions, at each of two watches."""
    async with connect(report) as client, connect(report) as other:
        prefix = report.prefix.encode()
        watches = [aiter(await one.watch_prefix(prefix)) for one in (client, other)]

        async def write(writer: int) -> None:
            for number in range(100):
                await client.put(key(report, str(writer)), str(number).encode())

        await asyncio.gather(*(write(number) for number in range(10)))
        for watch in watches:
            events = await take(watch, 1000)
            revisions = [report.rev(one.kv.mod_revision) for one in events]
            of_one = [one.kv.value.decode() for one in events if report.name(one.kv.key) == "3"]
            report.step("all, in order", revisions == list(range(1, 1001)), of_one == [str(n) for n in range(100)])
        replayed = await take(aiter(await client.watch_prefix(prefix, start_revision=report.base + 1)), 1000)
        report.step(
            "the same again", [one.kv.mod_revision for one in replayed] == [one.kv.mod_revision for one in events]
        )


async def a_hundred_watches(report: Report) -> None:
    """A hundred watches on one stream: each sees its own key."""
    async with connect(report) as client:
        names = [f"{number:02}" for number in range(100)]
        watches = {name: await client.watch(key(report, name)) for name in names}
        report.step("ids", len({watch.watch_id for watch in watches.values()}))
        for name in names[::2]:
            await watches[name].cancel()
        for name in names:
            await client.put(key(report, name), name.encode())
        seen = [(await take(aiter(watches[name]), 1))[0].kv.value.decode() for name in names[1::2]]
        report.step("seen", seen == names[1::2])


if __name__ == "__main__":
    run(one_key, prefix_and_txn, from_old_revision, compacted_start, once, many, a_hundred_watches, around=asyncio.run)
