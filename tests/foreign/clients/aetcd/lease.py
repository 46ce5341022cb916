"""aetcd: leases, their keys, keep-alive, revoke and expiry."""

from __future__ import annotations

import asyncio
import time

from common import connect, failure, key, next_events, until
from report import Report, run


async def life(report: Report) -> None:
    """Grant, look, refresh, revoke; the keys go with the lease."""
    async with connect(report) as client:
        lease = await client.lease(60)
        report.step("granted", lease.ttl, lease.id > 0)
        for name in "ba":
            await client.put(key(report, name), name.encode(), lease=lease)
        report.step("keys", sorted(report.name(name) for name in await lease.keys()))
        report.step("ttl", await lease.granted_ttl(), 50 < await lease.remaining_ttl() <= 60)
        answer = await lease.refresh()
        report.step("refresh", answer.TTL, lease.id == answer.ID)
        events = aiter(await client.watch_prefix(report.prefix.encode(), prev_kv=True))
        await lease.revoke()
        report.step("deleted in one revision", await next_events(report, events, 2))
        report.step("ttl", await lease.remaining_ttl(), await lease.granted_ttl(), await lease.keys())
        report.step("refresh", (await lease.refresh()).TTL)
        await report.afails("revoke again", lease.revoke(), failure)


async def chosen_id(report: Report) -> None:
    """An id may be chosen, once."""
    async with connect(report) as client:
        lease = await client.lease(60, lease_id=4243)
        report.step("granted", lease.id)
        await report.afails("again", client.lease(60, lease_id=4243), failure)
        await lease.revoke()


async def expiry(report: Report) -> None:
    """A lease that is not refreshed takes its key away, not before its time; one that is refreshed keeps it."""
    async with connect(report) as client:
        begun = time.monotonic()
        left, kept = await client.lease(2), await client.lease(2)
        await client.put(key(report, "left"), b"1", lease=left)
        await client.put(key(report, "kept"), b"1", lease=kept)
        events = aiter(await client.watch_prefix(report.prefix.encode()))

        async def refreshed_and_gone() -> bool:
            alive = (await kept.refresh()).TTL == 2
            return not alive or await client.get(key(report, "left")) is None

        await until(refreshed_and_gone, client, report)
        report.step("expired", await next_events(report, events, 1))
        report.step("not early", time.monotonic() - begun >= 2)
        report.step("ttl", await left.remaining_ttl(), (await left.refresh()).TTL)
        report.step("kept", (await client.get(key(report, "kept"))).value)
        await kept.revoke()


if __name__ == "__main__":
    run(life, chosen_id, expiry, around=asyncio.run)
