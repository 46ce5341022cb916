"""etcd-client-py: leases. It never tells the id of a lease it was granted, so these look at those of its locks."""

from __future__ import annotations

from common import client, connect, failure, key, run
from etcd_client import EtcdLockOption
from report import Report


async def _lease_of(connection: object, name: bytes) -> int:
    holder = (await connection.keys_prefix(name + b"/"))[0]
    return int(holder.rpartition(b"/")[2], 16)


async def life(report: Report) -> None:
    """The lease behind a lock can be asked about and kept alive; revoking it takes the lock away."""
    name = key(report, "mutex")
    async with connect(report) as c, client(report).with_lock(EtcdLockOption(lock_name=name, ttl=60)):
        await c.lease_grant(60)
        lease = await _lease_of(c, name)
        report.step("ttl", await c.lease_time_to_live(lease))
        report.step("keep-alive", await c.lease_keep_alive(lease))
        await c.lease_revoke(lease)
        report.step("the lock's key", await c.keys_prefix(name))
        await report.afails("revoke again", c.lease_revoke(lease), failure)
        await report.afails("keep-alive", c.lease_keep_alive(lease), failure)
        await report.afails("ttl", c.lease_time_to_live(lease), failure)


async def locked_without_lease(report: Report) -> None:
    """A lock without a lease gets one of 60 s from the server."""
    name = key(report, "mutex")
    async with connect(report) as c:
        await c.lock(name)
        lease = await _lease_of(c, name)
        report.step("ttl", await c.lease_time_to_live(lease))
        await c.unlock((await c.keys_prefix(name))[0])
        report.step("unlocked", await c.keys_prefix(name))
        await c.lease_revoke(lease)


if __name__ == "__main__":
    run(life, locked_without_lease)
