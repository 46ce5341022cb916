"""etcd-client-py: keys, prefixes, transactions, refusals."""

from __future__ import annotations

import asyncio

from common import connect, failure, key, revision, run
from etcd_client import Compare, CompareOp, Txn, TxnOp
from report import Report


async def put_get_delete(report: Report) -> None:
    """Keys' lives."""
    async with connect(report) as c:
        report.base = await revision(c)
        report.step("missing", await c.get(key(report, "a")))
        for name in "ab":
            await c.put(key(report, name), name.encode())
        await c.put(key(report, "a"), b"\x00\xff")
        report.step("get", await c.get(key(report, "a")) == b"\x00\xff", await c.get(key(report, "b")))
        prefix = report.prefix.encode()
        report.step("prefix", [report.name(name) for name, _ in await c.get_prefix(prefix)])
        report.step("keys", [report.name(name) for name in await c.keys_prefix(prefix)])
        await c.delete(key(report, "a"))
        await c.delete(key(report, "never was"))
        report.step("after delete", await c.get(key(report, "a")), report.rev(await revision(c)))
        await c.delete_prefix(prefix)
        report.step("after delete", await c.keys_prefix(prefix), report.rev(await revision(c)))


async def txn(report: Report) -> None:
    """Every kind of compare, both branches, nested transactions."""
    async with connect(report) as c:
        report.base = await revision(c)
        a, b = key(report, "a"), key(report, "b")
        await c.put(a, b"1")
        compares = {
            "value": Compare.value(a, CompareOp.EQUAL, b"1"),
            "value of what is missing": Compare.value(b, CompareOp.NOT_EQUAL, b"1"),
            "version": Compare.version(a, CompareOp.GREATER, 0),
            "missing": Compare.version(b, CompareOp.EQUAL, 0),
            "create": Compare.create_revision(a, CompareOp.EQUAL, report.base + 1),
            "mod": Compare.mod_revision(a, CompareOp.LESS, report.base + 1),
            "lease": Compare.lease(a, CompareOp.EQUAL, 0),
            "prefix": Compare.version(report.prefix.encode(), CompareOp.GREATER, 0).with_prefix(),
        }
        for name, compare in compares.items():
            report.step(name, (await c.txn(Txn().when([compare]))).succeeded())
        put = Txn().and_then([TxnOp.put(a, b"2"), TxnOp.txn(Txn().and_then([TxnOp.put(b, b"3")]))])
        report.step("nested", (await c.txn(put)).succeeded(), await c.get(a), await c.get(b))
        otherwise = Txn().when([compares["missing"]]).and_then([TxnOp.delete(a)]).or_else([TxnOp.put(a, b"else")])
        report.step("else", (await c.txn(otherwise)).succeeded(), await c.get(a), report.rev(await revision(c)))
        twice = Txn().and_then([TxnOp.put(a, b"1"), TxnOp.put(a, b"1")])
        await report.afails("twice the same key", c.txn(twice), failure)


async def refusals(report: Report) -> None:
    """Codes and texts are etcd's, and the connection goes on."""
    async with connect(report) as c:
        await report.afails("empty key", c.put(b"", b"1"), failure)
        await report.afails("too large", c.put(key(report, "a"), b"x" * 1_800_000), failure)
        await report.afails("no such lease", c.lease_revoke(4711), failure)
        await report.afails("unlock nothing", c.unlock(b""), failure)
        await c.put(key(report, "a"), b"x" * 1_000_000)
        report.step("after", len(await c.get(key(report, "a"))))


async def at_once(report: Report) -> None:
    """Two hundred calls at once: each gets its own answer."""
    async with connect(report) as c:
        names = [f"{number:03}" for number in range(200)]
        await asyncio.gather(*(c.put(key(report, name), name.encode()) for name in names))
        values = await asyncio.gather(*(c.get(key(report, name)) for name in names))
        report.step("values", [value.decode() for value in values] == names)


if __name__ == "__main__":
    run(put_get_delete, txn, refusals, at_once)
