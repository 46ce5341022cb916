"""etcdctl lock: holding, waiting, interrupted, killed, with a command."""

from __future__ import annotations

from common import ctl, running
from report import Report, run


def held_and_handed_on(report: Report) -> None:
    """The second gets the lock when the first is interrupted; the third when the second is."""
    name = report.key("mutex")
    with running(report, "lock", name) as first:
        report.step("first", first.line())
        with running(report, "lock", name) as second:
            report.step("two keys", _keys(report, 2))
            report.step("first leaves", first.leave(), first.rest())
            report.step("second", second.line())
            report.step("one key", _keys(report, 1))
            report.step("second leaves", second.leave(), second.rest())
    report.step("nobody", _keys(report, 0))


def killed_holder(report: Report) -> None:
    """The lease of a holder that was killed ends, and with it its lock."""
    name = report.key("mutex")
    with running(report, "lock", "--ttl", "2", name) as first:
        report.step("first", first.line())
        with running(report, "lock", name) as second:
            first.process.kill()
            report.step("second", second.line())
            second.leave()


def command(report: Report) -> None:
    """A command runs while the lock is held, and its status is etcdctl's; it knows the key and the revision."""
    name = report.key("mutex")
    shown = 'test "$ETCD_LOCK_REV" -gt 1 && echo "$ETCD_LOCK_KEY"'
    report.step("command", ctl(report, "lock", name, "--", "sh", "-c", shown))
    report.step("its status", ctl(report, "lock", name, "--", "sh", "-c", "exit 3")[-1])
    report.step("free", _keys(report, 0))


def _keys(report: Report, wanted: int) -> int:
    """Ask until there are `wanted` keys under the prefix; return how many there are."""
    for _ in range(100):
        found = len(ctl(report, "get", "--prefix", "--keys-only", report.prefix)) // 2
        if found == wanted:
            break
    return found


if __name__ == "__main__":
    run(held_and_handed_on, killed_holder, command)
