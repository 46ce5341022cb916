"""etcdctl knows all endpoints: every member dies once, in turn, while it watches.

Left out: locks and leads that are held or waited for meanwhile. On real etcd too, `etcdctl elect` and the waiters end
with an error now and then when the member dies that they are asking, so there is nothing to be equal to.
"""

from __future__ import annotations

from common import begin, ctl, running
from report import Report, run


def watch_goes_on(report: Report) -> None:
    """No event is lost, doubled or out of order, on any member."""
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


def _create(report: Report, name: str, dead: int) -> None:
    """Create a key at the members that are there."""
    alive = [endpoint for number, endpoint in enumerate(report.endpoints) if number != dead]
    ctl(report, "put", report.key(name), "1", endpoints=alive)


if __name__ == "__main__":
    run(watch_goes_on)
