"""etcd3gw: watches by iterator, by callback and once; replay, previous values, many events."""

from __future__ import annotations

import threading

from common import Inbox, connect, event, failure
from etcd3gw.watch import Watcher
from report import Report, run


def one_key(report: Report) -> None:
    """An iterator sees what happens to its key alone."""
    client, key = connect(report), report.key("a")
    events, cancel = client.watch(key)
    client.put(key, "1")
    client.put(report.key("ab"), "not watched")
    client.put(key, "<2>")
    client.delete(key)
    report.step("events", [event(report, next(events)) for _ in range(3)])
    cancel()


def prefix_and_txn(report: Report) -> None:
    """All events of a transaction arrive, in the order of its operations."""
    client = connect(report)
    events, cancel = client.watch_prefix(report.prefix)
    client.create(report.key("b"), "1")
    client.delete_prefix(report.prefix)
    client.create(report.key("a"), "2")
    report.step("events", [event(report, next(events)) for _ in range(3)])
    cancel()


def from_old_revision(report: Report) -> None:
    """A watch from an old revision replays, with previous values, and goes on with what is new."""
    client, key = connect(report), report.key("a")
    for value in "123":
        client.put(key, value)
    client.delete(key)
    events, cancel = client.watch(key, start_revision=report.base + 2, prev_kv=True)
    client.put(key, "4")
    found = [next(events) for _ in range(4)]
    report.step("events", [event(report, raw) for raw in found])
    report.step("previous", [raw.get("prev_kv", {}).get("version") for raw in found])
    cancel()
    events, cancel = client.watch(key, start_revision=report.base + 1, filters=["NODELETE"])
    report.step("puts alone", [event(report, next(events)) for _ in range(4)])
    cancel()


def once(report: Report) -> None:
    """watch_once returns the first event or says that none came."""
    client, key = connect(report), report.key("a")
    report.fails("nothing happens", lambda: client.watch_once(key, timeout=1), failure)
    writer = threading.Timer(0.1, client.put, [key, "1"])
    writer.start()
    report.step("happened", event(report, client.watch_once(key, timeout=60)))
    writer.join()


def many(report: Report) -> None:
    """Four hundred changes by four writers: every one arrives once, in the order of revisions."""
    client = connect(report)
    inbox = Inbox()
    watcher = Watcher(client, report.prefix, inbox, range_end=report.prefix[:-1] + "0")

    def write(writer: int) -> None:
        own = connect(report)
        for number in range(100):
            own.put(report.key(str(writer)), str(number))

    base = report.base
    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    found = inbox.take(400)
    for writer in writers:
        writer.join()
    report.step("all, in order", [int(raw["kv"]["mod_revision"]) - base for raw in found] == list(range(1, 401)))
    watcher.stop()


def large_events(report: Report) -> None:
    """Sixteen values of 64 KiB come through, live and replayed."""
    client = connect(report)
    live, replayed = Inbox(), Inbox()
    first = Watcher(client, report.prefix, live, range_end=report.prefix[:-1] + "0")
    for number in range(16):
        client.put(report.key(f"{number:02}"), bytes([number]) * 65536)
    report.step("live", [len(raw["kv"]["value"]) for raw in live.take(16)] == [65536] * 16)
    second = Watcher(client, report.key("07"), replayed, start_revision=report.base + 1)
    report.step("replayed", [len(raw["kv"]["value"]) for raw in replayed.take(1)])
    first.stop()
    second.stop()
    client.delete_prefix(report.prefix)


if __name__ == "__main__":
    run(one_key, prefix_and_txn, from_old_revision, once, many, large_events)
