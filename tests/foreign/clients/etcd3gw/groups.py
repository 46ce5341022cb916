"""OpenStack's tooz 9.1 by its driver etcd3gw: locks and groups of several coordinators."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from common import until
from report import Report, run
from tooz import coordination


def start(report: Report, member: str, timeout_s: int = 60) -> Any:
    """Return a coordinator that has begun."""
    url = f"etcd3+http://{report.host}:{report.port}?timeout={timeout_s}"
    coordinator = coordination.get_coordinator(url, member.encode())
    coordinator.start()
    return coordinator


def failure(error: BaseException) -> Any:
    """Describe an error by its class and text."""
    return [type(error).__name__, str(error)]


def locks(report: Report) -> None:
    """One holder at a time; heartbeats keep it, release and break give it away."""
    first, second = start(report, "first"), start(report, "second")
    own, other = (coordinator.get_lock(b"/" + report.prefix.encode()) for coordinator in (first, second))
    report.step("acquired", own.acquire(), other.acquire(blocking=False), own.acquired, other.acquired)
    report.step("heartbeat", first.heartbeat(), second.heartbeat())
    report.step("not the holder", other.release())
    report.step("released", own.release(), other.acquire(blocking=False))
    report.step("broken", own.break_(), own.acquire(blocking=False))
    own.release()
    for coordinator in (first, second):
        coordinator.stop()


def waiting(report: Report) -> None:
    """Who waits for a lock gets it when the holder lets go."""
    first, second = start(report, "first"), start(report, "second")
    own, other = (coordinator.get_lock(b"/" + report.prefix.encode()) for coordinator in (first, second))
    own.acquire()
    got: list[bool] = []
    waiter = threading.Thread(target=lambda: got.append(other.acquire(blocking=30)))
    waiter.start()
    own.release()
    waiter.join()
    report.step("got it", got, other.acquired, other.release())
    for coordinator in (first, second):
        coordinator.stop()


def groups(report: Report) -> None:
    """Groups are made, joined, looked at, left and deleted; capabilities go with members."""
    first, second = start(report, "first"), start(report, "second")
    group = report.prefix.strip("/").replace("/", "-").encode()
    report.step("created", first.create_group(group).get(), group in first.get_groups().get())
    fails(report, "again", first.create_group(group).get)
    report.step("joined", first.join_group(group, {"a": 1}).get(), second.join_group(group).get())
    fails(report, "joined again", first.join_group(group).get)
    report.step("members", sorted(second.get_members(group).get()))
    report.step("capabilities", second.get_member_capabilities(group, b"first").get())
    first.update_capabilities(group, {"a": 2}).get()
    report.step("updated", second.get_member_capabilities(group, b"first").get())
    fails(report, "not empty", first.delete_group(group).get)
    report.step("left", first.leave_group(group).get(), second.leave_group(group).get())
    fails(report, "left again", first.leave_group(group).get)
    report.step("deleted", first.delete_group(group).get())
    fails(report, "deleted again", first.get_members(group).get)
    for coordinator in (first, second):
        coordinator.stop()


def lost_member(report: Report) -> None:
    """A member whose heart stops is out of its group when its time is over; its watchers hear of it."""
    first, second = start(report, "first"), start(report, "second", timeout_s=2)
    group = report.prefix.strip("/").replace("/", "-").encode()
    first.create_group(group).get()
    told: list[str] = []
    first.watch_join_group(group, lambda event: told.append(f"joined {event.member_id.decode()}"))
    first.watch_leave_group(group, lambda event: told.append(f"left {event.member_id.decode()}"))
    first.run_watchers()
    second.join_group(group).get()

    def gone() -> bool:
        first.run_watchers()
        return not first.get_members(group).get()

    until(gone)
    first.run_watchers()
    report.step("told", told)
    first.delete_group(group).get()
    for coordinator in (first, second):
        coordinator.stop()


def fails(report: Report, what: str, call: Callable[[], Any]) -> None:
    """Tell how a call fails, in tooz's words."""
    report.fails(what, call, failure)


if __name__ == "__main__":
    run(locks, waiting, groups, lost_member)
