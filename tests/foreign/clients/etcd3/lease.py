"""python etcd3: leases, their keys, keep-alive, revoke and expiry."""

from __future__ import annotations

import time

import etcd3
from common import Inbox, connect, event, failure, until
from report import Report, run


def life(report: Report) -> None:
    """Grant, look, refresh, revoke; the keys go with the lease."""
    client = connect(report)
    lease = client.lease(60)
    report.step("granted", lease.ttl, lease.id > 0)
    for name in "ba":
        client.put(report.key(name), name, lease=lease)
    report.step("of the key", client.get(report.key("a"))[1].lease_id == lease.id)
    report.step("keys", sorted(report.name(key) for key in lease.keys))
    report.step("ttl", lease.granted_ttl, 50 < lease.remaining_ttl <= 60)
    answer = lease.refresh()[0]
    report.step("refresh", answer.TTL, lease.id == answer.ID, report.rev(answer.header.revision))
    inbox = Inbox()
    client.add_watch_prefix_callback(report.prefix, inbox, prev_kv=True)
    lease.revoke()
    report.step("deleted in one revision", [event(report, raw) for raw in inbox.events(2)])
    report.step("gone", client.get(report.key("a")), list(client.get_prefix(report.prefix)))
    report.step("ttl", lease.remaining_ttl, lease.granted_ttl, list(lease.keys))
    report.step("refresh", lease.refresh()[0].TTL)
    report.fails("revoke again", lease.revoke, failure)


def chosen_id(report: Report) -> None:
    """An id may be chosen, once; a key needs a lease that exists; TTLs have a shortest and a longest."""
    client = connect(report)
    lease = client.lease(60, lease_id=4242)
    report.step("granted", lease.id, lease.ttl)
    report.fails("again", lambda: client.lease(60, lease_id=4242), failure)
    lease.revoke()
    report.fails("no such lease", lambda: client.put(report.key("a"), "1", lease=4242), failure)
    report.step("shortest", [client.lease(ttl).ttl for ttl in (-1, 0, 1, 2, 3)])
    report.fails("too long", lambda: client.lease(9_000_000_001), failure)


def moving(report: Report) -> None:
    """A put without the lease takes the key out of it; one with another lease moves it."""
    client, key = connect(report), report.key("a")
    first, second = client.lease(60), client.lease(60)
    client.put(key, "1", lease=first)
    client.put(key, "2", lease=second)
    report.step("moved", [report.name(name) for name in first.keys], [report.name(name) for name in second.keys])
    first.revoke()
    report.step("stays", client.get(key)[0])
    client.put(key, "3")
    second.revoke()
    report.step("stays", client.get(key)[0])


def expiry(report: Report) -> None:
    """A lease that is not refreshed takes its key away, not before its time; one that is refreshed keeps it."""
    client = connect(report)
    begun = time.monotonic()
    left, kept = client.lease(2), client.lease(2)
    client.put(report.key("left"), "1", lease=left)
    client.put(report.key("kept"), "1", lease=kept)
    inbox = Inbox()
    client.add_watch_prefix_callback(report.prefix, inbox)
    until(lambda: kept.refresh()[0].TTL != 2 or not inbox._queue.empty(), client, report)
    report.step("expired", [event(report, raw) for raw in inbox.events(1)])
    report.step("not early", time.monotonic() - begun >= 2)
    report.step("ttl", left.remaining_ttl, left.refresh()[0].TTL)
    report.step("kept", client.get(report.key("kept"))[0], kept.remaining_ttl >= 1)
    kept.revoke()


def with_transaction(report: Report) -> None:
    """Leases work in transactions; the condition and the put are one."""
    client, key = connect(report), report.key("a")
    lease = client.lease(60)
    report.step("put", client.put_if_not_exists(key, "1", lease=lease), client.put_if_not_exists(key, "2", lease=lease))
    report.step("keys", [report.name(name) for name in lease.keys])
    lease.revoke()
    report.step("after", client.put_if_not_exists(key, "3"), client.get(key)[0])


if __name__ == "__main__":
    assert etcd3.__version__ == "0.12.0"
    run(life, chosen_id, moving, expiry, with_transaction)
