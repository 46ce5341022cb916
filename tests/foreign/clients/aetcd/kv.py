"""aetcd: keys, ranges, transactions, limits, compaction, many calls at once."""

from __future__ import annotations

import asyncio

from common import connect, failure, key
from report import Report, run


async def put_get_delete(report: Report) -> None:
    """One key's life."""
    async with connect(report) as client:
        a = key(report, "a")
        report.step("missing", await client.get(a))
        report.step("put", report.rev((await client.put(a, b"1")).header.revision))
        report.step("put again", (await client.put(a, b"2", prev_kv=True)).prev_kv.value)
        found = await client.get(a)
        report.step("get", found.value, report.rev(found.create_revision), report.rev(found.mod_revision))
        report.step("version", found.version, found.lease)
        deleted = await client.delete(a, prev_kv=True)
        report.step("delete", deleted.deleted, deleted.prev_kv.value, report.rev(deleted.header.revision))
        report.step("delete again", await client.delete(a), await client.get(a))
        report.step("replace", await client.replace(a, b"1", b"2"))


async def ranges(report: Report) -> None:
    """Prefixes, ranges, order."""
    async with connect(report) as client:
        for number, name in enumerate("bacd"):
            await client.put(key(report, name), str(number).encode())
        prefix = report.prefix.encode()
        report.step("prefix", [report.name(kv.key) for kv in await client.get_prefix(prefix)])
        for target in ("key", "create", "mod", "value"):
            found = await client.get_prefix(prefix, sort_order="descend", sort_target=target)
            report.step(target, [report.name(kv.key) for kv in found], found.count, found.more)
        found = await client.get_prefix(prefix, keys_only=True)
        report.step("keys only", [kv.value for kv in found])
        found = await client.get_range(key(report, "b"), key(report, "d"))
        report.step("range", [report.name(kv.key) for kv in found])
        deleted = await client.delete_range(key(report, "b"), key(report, "d"), prev_kv=True)
        report.step("delete range", deleted.deleted, [report.name(kv.key) for kv in deleted])
        report.step("delete prefix", (await client.delete_prefix(prefix)).deleted)


async def txn(report: Report) -> None:
    """Compares, both branches, nested transactions, refusals."""
    async with connect(report) as client:
        t, a, b = client.transactions, key(report, "a"), key(report, "b")
        await client.put(a, b"1")
        ok, answers = await client.transaction(
            compare=[t.value(a) == b"1", t.version(a) > 0, t.create(b) == 0, t.mod(a) != 0],
            success=[t.put(b, b"2"), t.get(b), t.delete(a, prev_kv=True)],
            failure=[t.put(a, b"never")],
        )
        report.step("success", ok, report.rev(answers[0].response_put.header.revision), answers[1][0][0])
        report.step("deleted", answers[2].response_delete_range.deleted)
        ok, answers = await client.transaction(compare=[t.version(a) > 0], failure=[t.get(a), t.get(b)], success=[])
        report.step("failure", ok, [[value for value, _ in answer] for answer in answers])
        inner = t.txn(compare=[t.value(b) == b"2"], success=[t.put(a, b"inner")], failure=[])
        ok, answers = await client.transaction(compare=[], success=[inner], failure=[])
        report.step("nested", ok, answers[0].response_txn.succeeded, (await client.get(a)).value)
        twice = client.transaction(compare=[], success=[t.put(a, b"1"), t.put(a, b"2")], failure=[])
        await report.afails("twice the same key", twice, failure)
        await report.afails("too large", client.put(a, b"x" * 1_800_000), failure)
        await report.afails("empty key", client.put(b"", b"1"), failure)
        await report.afails("no such lease", client.put(a, b"1", lease=4711), failure)


async def at_once(report: Report) -> None:
    """Two hundred calls at once on one connection: each gets its own answer."""
    async with connect(report) as client:
        names = [f"{number:03}" for number in range(200)]
        puts = await asyncio.gather(*(client.put(key(report, name), name.encode()) for name in names))
        report.step("revisions", sorted(report.rev(put.header.revision) for put in puts) == list(range(1, 201)))
        found = await asyncio.gather(*(client.get(key(report, name)) for name in names))
        report.step("values", [kv.value.decode() for kv in found] == names)


async def compaction(report: Report) -> None:
    """What is compacted cannot be compacted again."""
    async with connect(report) as client:
        for value in (b"1", b"2", b"3"):
            await client.put(key(report, "a"), value)
        await client.compact(report.base + 2)
        await report.afails("compacted", client.compact(report.base + 1), failure)
        await report.afails("future", client.compact(report.base + 1000), failure)


if __name__ == "__main__":
    run(put_get_delete, ranges, txn, at_once, compaction, around=asyncio.run)
