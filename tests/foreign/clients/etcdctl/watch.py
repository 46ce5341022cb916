"""etcdctl watch: live, replayed, with previous values, interactive, running a command, compacted, many events."""

from __future__ import annotations

import json

from common import begin, ctl, running, transaction, until_created
from report import Report, run


def live(report: Report) -> None:
    """Without a revision the watch sees what happens from now on."""
    key = report.key("a")
    with running(report, "watch", key) as watch:
        until_created(report, key, watch)
        ctl(report, "put", key, "1")
        ctl(report, "put", report.key("ab"), "not watched")
        ctl(report, "del", key)
        report.step("lines", watch.lines(6))
        report.step("interrupted", watch.leave() != 0)


def from_old_revision(report: Report) -> None:
    """A prefix from an old revision, with previous values; a transaction's events in the order of its operations."""
    start, a, b = begin(report), report.key("a"), report.key("b")
    ctl(report, "put", a, "1")
    ctl(report, "put", a, "2")
    transaction(report, f"put {b} 3", f"del {a}")
    with running(report, "watch", "--prefix", "--prev-kv", "--rev", start, report.prefix) as watch:
        ctl(report, "put", b, "4")
        report.step("lines", watch.lines(21))


def as_json(report: Report) -> None:
    """Every field of an event."""
    start, key = begin(report), report.key("a")
    with running(report, "watch", "--rev", start, key, "-w", "json") as watch:
        for words in (["put", key, "1"], ["del", key]):
            ctl(report, *words)
            response = json.loads(watch.line())
            for raw in response["Events"]:
                kv = raw["kv"]
                report.step("event", raw.get("type", 0), report.rev(kv["mod_revision"]), kv.get("version", 0))
            report.step("response", response["Canceled"], response["Created"], response["CompactRevision"])


def interactive(report: Report) -> None:
    """Several watches typed one after another, and progress asked for."""
    start = begin(report)
    with running(report, "watch", "-i") as watch:
        watch.type(f"watch {report.key('a')} --rev={start}")
        watch.type(f"watch {report.key('b')} --rev={start}")
        ctl(report, "put", report.key("a"), "1")
        report.step("a", watch.lines(3))
        ctl(report, "put", report.key("b"), "2")
        report.step("b", watch.lines(3))
        watch.type("progress")
        words = watch.line().split(":")
        # What scripts before left to a lease may end just now: at least what was written here must be counted.
        report.step(words[0], report.rev(int(words[1])) >= 2)


def command(report: Report) -> None:
    """A command runs for every event and knows it from its environment."""
    start, key = begin(report), report.key("a")
    shown = 'echo "$ETCD_WATCH_EVENT_TYPE $ETCD_WATCH_KEY $ETCD_WATCH_VALUE"'
    with running(report, "watch", "--rev", start, key, "--", "sh", "-c", shown) as watch:
        for words in (["put", key, "1"], ["del", key]):
            ctl(report, *words)
            report.step("lines", watch.lines(4))


def compacted(report: Report) -> None:
    """A start that was compacted ends the command, which says so."""
    begin(report)
    for value in "1234":
        ctl(report, "put", report.key("a"), value)
    report.step("compact", len(ctl(report, "compact", str(report.base + 3))))
    ctl(report, "endpoint", "health")  # reads at each member, which has applied the compaction then
    report.step("watch", ctl(report, "watch", "--rev", str(report.base + 1), report.key("a")))
    with running(report, "watch", "--rev", str(report.base + 3), report.key("a")) as watch:
        report.step("at the edge", watch.lines(6))


def many(report: Report) -> None:
    """Five transactions of a hundred puts: five hundred events in order."""
    start = begin(report)
    with running(report, "watch", "--prefix", "--rev", start, report.prefix) as watch:
        for turn in range(5):
            transaction(report, *(f"put {report.key(f'{number:02}')} {turn}" for number in range(100)))
        lines = watch.lines(1500)
    seen = [(lines[at + 2], lines[at + 1]) for at in range(0, 1500, 3)]
    report.step("in order", seen == [(str(turn), f"{number:02}") for turn in range(5) for number in range(100)])


if __name__ == "__main__":
    run(live, from_old_revision, as_json, interactive, command, compacted, many)
