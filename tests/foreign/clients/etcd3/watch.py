"""python etcd3: watches by iterator, by callback and once; replay, previous values, cancel, compaction."""

from __future__ import annotations

import threading

import etcd3
from common import Inbox, connect, event, failure, take
from report import WAIT_S, Report, run


def one_key(report: Report) -> None:
    """An iterator sees what happens to its key alone, and ends when cancelled."""
    client, key = connect(report), report.key("a")
    events, cancel = client.watch(key)
    client.put(key, "1")
    client.put(report.key("ab"), "not watched")
    client.put(key, "2")
    client.delete(key)
    report.step("events", [event(report, raw) for raw in take(events, 3)])
    cancel()
    client.put(key, "3")
    report.step("after cancel", list(events))


def prefix_and_txn(report: Report) -> None:
    """All events of a transaction come in one response, in the order of its operations."""
    client = connect(report)
    t = client.transactions
    responses, cancel = client.watch_prefix_response(report.prefix)
    client.put(report.key("c"), "0")
    puts = [t.put(report.key(name), name) for name in "bad"]
    client.transaction(compare=[], success=[*puts, t.delete(report.key("c"))], failure=[])
    client.delete_prefix(report.prefix)
    for response in take(responses, 3):
        raw = [event(report, one) for one in response.events]
        report.step("response", raw, revision=report.rev(response.header.revision))
    cancel()


def from_old_revision(report: Report) -> None:
    """A watch from an old revision replays, with previous values, and goes on with what is new."""
    client, key = connect(report), report.key("a")
    for value in "123":
        client.put(key, value)
    client.delete(key)
    client.put(key, "4")
    events, cancel = client.watch(key, start_revision=report.base + 2, prev_kv=True)
    client.put(key, "5")
    report.step("events", [event(report, raw) for raw in take(events, 5)])
    cancel()


def several_on_one_stream(report: Report) -> None:
    """Watches of one client share a stream; ending one leaves the others."""
    client = connect(report)
    inboxes = {name: Inbox() for name in "abc"}
    ids = {name: client.add_watch_callback(report.key(name), inbox) for name, inbox in inboxes.items()}
    everything = Inbox()
    client.add_watch_prefix_callback(report.prefix, everything)
    report.step("ids differ", len(set(ids.values())))
    client.cancel_watch(ids["b"])
    for name in "abc":
        client.put(report.key(name), name)
    report.step("a and c", [event(report, inboxes[name].events(1)[0]) for name in "ac"])
    report.step("everything", [event(report, raw) for raw in everything.events(3)])
    client.put(report.key("b"), "again")
    everything.events(1)
    report.step("b saw nothing", inboxes["b"]._queue.empty())


def compacted_start(report: Report) -> None:
    """A start that was compacted ends the watch with the revision from which one may watch; the next watch works."""
    client, key = connect(report), report.key("a")
    for value in "1234":
        client.put(key, value)
    client.compact(report.base + 3)
    inbox = Inbox()
    client.add_watch_callback(key, inbox, start_revision=report.base + 1)
    error = inbox.next()
    report.step("lost", type(error).__name__, report.rev(error.compacted_revision))
    at_the_edge = Inbox()
    client.add_watch_callback(key, at_the_edge, start_revision=report.base + 3)
    report.step("at the edge", [event(report, raw) for raw in at_the_edge.events(2)])


def future_start(report: Report) -> None:
    """A watch from a revision to come tells nothing before it."""
    client, key = connect(report), report.key("a")
    inbox = Inbox()
    client.add_watch_callback(key, inbox, start_revision=report.base + 3)
    for value in "1234":
        client.put(key, value)
    report.step("events", [event(report, raw) for raw in inbox.events(2)])


def once(report: Report) -> None:
    """watch_once returns the first event or says that none came."""
    client, key = connect(report), report.key("a")
    report.fails("nothing happens", lambda: client.watch_once(key, timeout=0.3), failure)
    found = Inbox()
    opened = threading.Event()

    def wait() -> None:
        opened.set()
        found(client.watch_once(key, timeout=WAIT_S))

    waiter = threading.Thread(target=wait)
    waiter.start()
    opened.wait()
    while waiter.is_alive():
        client.put(key, "1")
        waiter.join(0.05)
    raw = found.next()
    report.step("happened", type(raw).__name__, raw.value)


def many(report: Report) -> None:
    """A thousand changes by eight writers: every one arrives once, in the order of revisions."""
    client = connect(report)
    inbox = Inbox()
    client.add_watch_prefix_callback(report.prefix, inbox)

    def write(writer: int) -> None:
        for number in range(125):
            client.put(report.key(f"{writer}"), str(number))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    events = inbox.events(1000)
    for writer in writers:
        writer.join()
    revisions = [report.rev(raw.mod_revision) for raw in events]
    report.step("all, in order", revisions == list(range(1, 1001)))
    of_one = [raw.value.decode() for raw in events if report.name(raw.key) == "3"]
    report.step("each writer's too", of_one == [str(number) for number in range(125)])
    replayed = Inbox()
    client.add_watch_prefix_callback(report.prefix, replayed, start_revision=report.base + 1)
    report.step(
        "the same again from the past",
        [e.mod_revision for e in replayed.events(1000)] == [e.mod_revision for e in events],
    )


def large_events(report: Report) -> None:
    """Sixty-four values of 64 KiB come through, live and replayed."""
    client = connect(report, grpc_options=[("grpc.max_receive_message_length", -1)])
    inbox, replayed = Inbox(), Inbox()
    client.add_watch_prefix_callback(report.prefix, inbox)
    for number in range(64):
        client.put(report.key(f"{number:02}"), bytes([number]) * 65536)
    events = inbox.events(64)
    report.step("live", [len(raw.value) for raw in events] == [65536] * 64)
    client.add_watch_prefix_callback(report.prefix, replayed, start_revision=report.base + 1)
    report.step("replayed", [raw.value for raw in replayed.events(64)] == [raw.value for raw in events])
    client.delete_prefix(report.prefix)


def empty_range(report: Report) -> None:
    """A range whose end is not after its begin is refused at once; etcd3 0.12 shows a watch that tells nothing."""
    client = connect(report)
    inbox = Inbox()
    client.add_watch_callback(report.key("b"), inbox, range_end=report.key("a"))
    client.put(report.key("b"), "1")
    other = Inbox()
    client.add_watch_callback(report.key("b"), other, start_revision=report.base + 1)
    report.step("another watch", [event(report, raw) for raw in other.events(1)])
    report.step("this one", inbox._queue.empty())


def with_leader_required(report: Report) -> None:
    """The metadata `hasleader` is understood on calls and on streams."""
    client, key = connect(report), report.key("a")
    client.metadata = client.watcher._metadata = (("hasleader", "true"),)
    inbox = Inbox()
    client.add_watch_callback(key, inbox, progress_notify=True)
    client.put(key, "1")
    report.step("events", [event(report, raw) for raw in inbox.events(1)])
    report.step("keep-alive", client.lease(60).refresh()[0].TTL)


if __name__ == "__main__":
    assert etcd3.__version__ == "0.12.0"
    run(
        one_key,
        prefix_and_txn,
        from_old_revision,
        several_on_one_stream,
        compacted_start,
        future_start,
        once,
        many,
        large_events,
        empty_range,
        with_leader_required,
    )
