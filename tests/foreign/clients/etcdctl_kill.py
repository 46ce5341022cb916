"""etcdctl knows all endpoints: every member dies once, in turn, while it watches, holds a lock and leads."""

from __future__ import annotations

from etcdctl_common import begin, ctl, running
from report import Report, run


def watch_goes_on(report: Report) -> None:
    """No event is lost, doubled or out of order, whichever member the watch was on."""
    start = begin(report)
    with running(report, "watch", "--prefix", "--rev", start, report.prefix) as watch:
        for member in range(3):
            report.order("kill", member)
            report.order("settle", member)
            for number in range(5):
                _create(report, f"{member}{number}", member)
            lines = watch.lines(15)
            report.step("all, once, in order", lines[1::3])
            report.order("restart", member)


def lock_and_lead_stay(report: Report) -> None:
    """The lock stays held and the leader leads; both are handed on afterwards."""
    door, leader = report.key("door"), report.key("leader")
    with running(report, "lock", door) as lock, running(report, "elect", leader, "one") as lead:
        report.step("held", lock.line(), lead.lines(2))
        with running(report, "lock", door) as second_lock, running(report, "elect", leader, "two") as second_lead:
            while len(ctl(report, "get", "--prefix", "--keys-only", report.prefix)) < 8:
                pass  # what has not joined its queue yet may fail with the member that it asks
            for member in range(3):
                report.order("kill", member)
                report.order("settle", member)
                _create(report, f"{member}", member)
                report.order("restart", member)
                report.step("still", member, lock.process.poll(), lead.process.poll())
            report.step("nobody else", second_lock._lines.empty(), second_lead._lines.empty())
            report.step("leave", lock.leave(), lead.leave())
            report.step("handed on", second_lock.line(), second_lead.lines(2))


def _create(report: Report, name: str, dead: int) -> None:
    """Create a key at the members that are there."""
    alive = [endpoint for number, endpoint in enumerate(report.endpoints) if number != dead]
    ctl(report, "put", report.key(name), "1", endpoints=alive)


if __name__ == "__main__":
    run(watch_goes_on, lock_and_lead_stay)
