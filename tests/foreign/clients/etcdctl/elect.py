"""etcdctl elect: campaign, observe, handover."""

from __future__ import annotations

from common import ctl, running
from report import Report, run


def handover(report: Report) -> None:
    """The next candidate leads when the leader goes; an observer sees both."""
    name = report.key("leader")
    with running(report, "elect", name, "one") as first:
        report.step("first", first.lines(2))
        with running(report, "elect", "-l", name) as observer, running(report, "elect", name, "two") as second:
            report.step("observed", observer.lines(2))
            while len(ctl(report, "get", "--prefix", "--keys-only", report.prefix)) < 4:
                pass
            report.step("first leaves", first.leave())
            report.step("second", second.lines(2))
            report.step("observed", observer.lines(2))
            report.step("second leaves", second.leave())
    report.step("nobody", ctl(report, "get", "--prefix", report.prefix))


if __name__ == "__main__":
    run(handover)
