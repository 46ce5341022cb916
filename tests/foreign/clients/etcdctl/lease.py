"""etcdctl lease: grant, timetolive, keep-alive, list, revoke, expiry; put with a lease."""

from __future__ import annotations

import re
import time

from common import answer, begin, ctl, running
from report import Report, run


def life(report: Report) -> None:
    """From grant to revoke; the keys go with the lease and a watch sees it."""
    start = begin(report)
    report.step("grant", ctl(report, "lease", "grant", "60"))
    granted = answer(report, "lease", "grant", "60")
    lease = f"{granted['ID']:x}"
    report.step("granted", granted["TTL"])
    for name in "ba":
        report.step("put", ctl(report, "put", "--lease", lease, report.key(name), name))
    # The keys come in any order.
    answer_text = " ".join(ctl(report, "lease", "timetolive", "--keys", lease)).replace("keys([b a])", "keys([a b])")
    report.step("timetolive", re.sub(r"remaining\(\d\ds\)", "remaining(<near 60>)", answer_text))
    report.step("keep-alive", ctl(report, "lease", "keep-alive", "--once", lease))
    report.step("list", lease in [f"{one['id']:x}" for one in answer(report, "lease", "list")["leases"]])
    with running(report, "watch", "--prefix", "--rev", start, report.prefix) as watch:
        report.step("revoke", ctl(report, "lease", "revoke", lease))
        report.step("watch", watch.lines(12))
    report.step("gone", ctl(report, "get", "--prefix", report.prefix))
    for words in (["timetolive", lease], ["keep-alive", "--once", lease], ["revoke", lease]):
        report.step(words[0], ctl(report, "lease", *words))
    report.step("put", ctl(report, "put", "--lease", lease, report.key("a"), "1"))


def kept_alive_and_expiry(report: Report) -> None:
    """A lease that is kept alive outlives another; when its keeper is gone it ends too, not before its time."""
    start = begin(report)
    kept = f"{answer(report, 'lease', 'grant', '3')['ID']:x}"
    with (
        running(report, "watch", "--prefix", "--rev", start, report.prefix) as watch,
        running(report, "lease", "keep-alive", kept) as keeper,
    ):
        report.step("kept", keeper.line())
        left = f"{answer(report, 'lease', 'grant', '2')['ID']:x}"
        for name, lease in (("left", left), ("kept", kept)):
            ctl(report, "put", "--lease", lease, report.key(name), "1")
        report.step("put", watch.lines(6))
        report.step("expired", watch.lines(3))
        report.step("kept longer than its time to live", keeper.lines(4))
        report.step("there", ctl(report, "get", report.key("kept")))
        keeper.process.kill()
        begun = time.monotonic()
        report.step("expired", watch.lines(3))
        report.step("not at once", time.monotonic() - begun > 0.5)


def refusals(report: Report) -> None:
    """What cannot be granted."""
    report.step("too long", ctl(report, "lease", "grant", "9000000001"))
    report.step("no lease", ctl(report, "lease", "timetolive", "1234"))


if __name__ == "__main__":
    run(life, kept_alive_and_expiry, refusals)
