"""aetcd knows one endpoint: what its user sees when that member dies and comes back."""

from __future__ import annotations

import asyncio

from common import connect, failure, key, next_events, take
from report import WAIT_S, Report, run

# Without these, grpc would wait longer and longer before it tries a dead member again.
QUICK = {
    "grpc.min_reconnect_backoff_ms": 50,
    "grpc.max_reconnect_backoff_ms": 200,
    "grpc.initial_reconnect_backoff_ms": 50,
}


async def member_dies(report: Report) -> None:
    """The watch raises, calls fail, and after the restart the watch goes on from its revision."""
    async with connect(report, options=QUICK) as client:
        a, lease = key(report, "a"), await client.lease(60)
        await client.put(key(report, "leased"), b"1", lease=lease)
        events = aiter(await client.watch(a))
        await client.put(a, b"1")
        seen = (await take(events, 1))[0]
        report.order("kill", 0)
        await report.afails("the watch", take(events, 1), lambda error: failure(error)[0])
        await report.afails("a call", client.get(a), lambda error: failure(error)[0])
        report.order("restart", 0)
        await asyncio.wait_for(client.channel.channel_ready(), WAIT_S)
        report.step("value", (await client.get(a)).value)
        events = aiter(await client.watch(a, start_revision=seen.kv.mod_revision + 1))
        await client.put(a, b"2")
        report.step("goes on", await next_events(report, events, 1))
        report.step("the lease lives", (await lease.refresh()).TTL)
        await lease.revoke()
        report.step("and ends", await client.get(key(report, "leased")))


if __name__ == "__main__":
    run(member_dies, around=asyncio.run)
