"""python etcd3 knows one endpoint: what its user sees when that member dies and comes back."""

from __future__ import annotations

import etcd3
import grpc
from common import Inbox, connect, event, failure
from report import WAIT_S, Report, run

# Without these, grpc would wait longer and longer before it tries a dead member again.
QUICK = [
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.initial_reconnect_backoff_ms", 50),
]


def member_dies(report: Report) -> None:
    """The watch tells its loss, calls fail; after the restart all is there and the watch goes on from its revision."""
    client, key = connect(report, grpc_options=QUICK), report.key("a")
    lease = client.lease(60)
    client.put(report.key("leased"), "1", lease=lease)
    inbox = Inbox()
    client.add_watch_callback(key, inbox)
    client.put(key, "1")
    seen = inbox.events(1)[0]
    report.order("kill", 0)
    report.step("the watch", failure(inbox.next())[0])
    report.fails("a call", lambda: client.get(key), failure)
    report.order("restart", 0)
    grpc.channel_ready_future(client.channel).result(WAIT_S)
    report.step("value", client.get(key)[0])
    resumed = Inbox()
    _watch_again(client, key, resumed, seen.mod_revision + 1)
    client.put(key, "2")
    report.step("goes on", [event(report, raw) for raw in resumed.events(1)])
    report.step("the lease lives", lease.refresh()[0].TTL, [report.name(name) for name in lease.keys])
    lease.revoke()
    report.step("and ends", client.get(report.key("leased")))


def _watch_again(client: etcd3.Etcd3Client, key: str, inbox: Inbox, revision: int) -> None:
    """Open a watch; etcd3 0.12 may still hand it to a stream that failed while the member was down."""
    for _ in range(1000):
        try:
            client.add_watch_callback(key, inbox, start_revision=revision)
        except etcd3.exceptions.ConnectionFailedError:
            continue
        return
    raise TimeoutError("no watch could be opened")


if __name__ == "__main__":
    run(member_dies)
