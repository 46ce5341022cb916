"""aetcd: status, members, alarms; users that do not exist."""

from __future__ import annotations

import asyncio

from common import connect, failure, key
from report import Report, run


async def status_and_members(report: Report) -> None:
    """The library reads the status and finds the leader among the members."""
    async with connect(report) as client:
        found = await client.status()
        report.step("status", found.version.count("."), found.db_size > 0, found.raft_index > 0, found.raft_term > 0)
        report.step("leader", found.leader.name.startswith("m"))
        urls = sorted([url async for member in client.members() for url in member.client_urls])
        report.step("client URLs", urls == sorted(f"http://{endpoint}" for endpoint in report.endpoints))
        report.step("hash", await client.hash() > 0)


async def alarms(report: Report) -> None:
    """An alarm stops puts until it is disarmed."""
    async with connect(report) as client:
        member = (await client.status()).leader.id
        raised = await client.create_alarm(member_id=member)
        report.step("raised", [alarm.alarm_type for alarm in raised])
        report.step("listed", [alarm.alarm_type async for alarm in client.list_alarms()])
        await report.afails("put", client.put(key(report, "a"), b"1"), failure)
        report.step("disarmed", [alarm.alarm_type for alarm in await client.disarm_alarm(member_id=member)])
        report.step("none", [alarm.alarm_type async for alarm in client.list_alarms()])
        report.step("put", (await client.put(key(report, "a"), b"1")).prev_kv)


async def users(report: Report) -> None:
    """Logging in where there are no users fails politely, and nothing else suffers."""

    async def log_in() -> None:
        async with connect(report, username="root", password="secret"):
            pass

    await report.afails(
        "log in", log_in(), lambda error: failure(error)[0] in ("PreconditionFailedError", "ClientError")
    )
    async with connect(report) as client:
        report.step("without", await client.get(key(report, "a")))


if __name__ == "__main__":
    run(status_and_members, alarms, users, around=asyncio.run)
