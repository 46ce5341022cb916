"""etcd3gw: leases, their keys, keep-alive, revoke and expiry."""

from __future__ import annotations

import time

from common import connect, event, failure, until
from report import Report, run


def life(report: Report) -> None:
    """Grant, look, refresh, revoke; the keys go with the lease."""
    client = connect(report)
    lease = client.lease(60)
    for name in "ba":
        client.put(report.key(name), name, lease=lease)
    report.step("keys", sorted(map(report.name, lease.keys())))
    report.step("ttl", 50 < lease.ttl() <= 60, lease.refresh())
    events, cancel = client.watch_prefix(report.prefix)
    report.step("revoked", lease.revoke())
    report.step("deleted in one revision", [event(report, next(events)) for _ in "ab"])
    cancel()
    report.step("gone", client.get(report.key("a")), lease.ttl(), lease.refresh(), lease.keys())
    report.fails("revoke again", lease.revoke, failure)


def expiry(report: Report) -> None:
    """A lease that is not refreshed takes its key away, not before its time; one that is refreshed keeps it."""
    client = connect(report)
    begun = time.monotonic()
    left, kept = client.lease(2), client.lease(2)
    client.put(report.key("left"), "1", lease=left)
    client.put(report.key("kept"), "1", lease=kept)
    until(lambda: kept.refresh() != 2 or not client.get(report.key("left")))
    report.step("not early", time.monotonic() - begun >= 2)
    report.step("left", client.get(report.key("left")), left.ttl(), left.refresh())
    report.step("kept", client.get(report.key("kept")), kept.ttl() >= 1)
    kept.revoke()


def refusals(report: Report) -> None:
    """TTLs have a longest; a key needs a lease that exists."""
    client = connect(report)
    report.fails("too long", lambda: client.lease(9_000_000_001), failure)
    report.fails("no number", lambda: client.lease("x"), failure)
    lease = client.lease(60)
    lease.revoke()
    report.fails("no such lease", lambda: client.put(report.key("a"), "1", lease=lease), failure)


if __name__ == "__main__":
    run(life, expiry, refusals)
