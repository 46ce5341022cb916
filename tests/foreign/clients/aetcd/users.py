"""aetcd 1.0 as a user with a password; it knows no TLS."""

from __future__ import annotations

import asyncio

import aetcd
from common import failure, key
from report import Report, run

THEIRS = b"~others"


def connect(report: Report, username: str, password: str) -> aetcd.Client:
    return aetcd.Client(host=report.host, port=report.port, timeout=60, username=username, password=password)


async def by_password(report: Report) -> None:
    async with connect(report, "alice", "alice-pw") as client:
        own = key(report, "a")
        watch = await client.watch(own)
        await client.put(own, b"1", lease=await client.lease(60))
        report.step("own", (await client.get(own)).value, (await anext(aiter(watch))).kv.value)
        await watch.cancel()
        report.step("deleted", (await client.delete(own)) is not None)
        await report.afails("get", client.get(THEIRS), failure)
        await report.afails("put", client.put(THEIRS, b"1"), failure)
        await report.afails("delete", client.delete(THEIRS), failure)
        await report.afails("all", client.get_all(), failure)
        compare = [client.transactions.version(THEIRS) == 0]
        await report.afails("txn", client.transaction(compare=compare, success=[], failure=[]), failure)


async def refused(report: Report) -> None:
    async def login(user: str, password: str) -> None:
        async with connect(report, user, password) as client:
            await client.get(key(report, "a"))

    await report.afails("wrong", login("alice", "wrong"), failure)
    await report.afails("none", login("none", "alice-pw"), failure)


if __name__ == "__main__":
    run(by_password, refused, around=asyncio.run)
