"""Keep-alives at the leader: number answered per turn."""

from __future__ import annotations

from collections.abc import Sequence

from raftkv import errors
from raftkv.loop.cork import Cork
from raftkv.replica.lease.renewals import RENEW_MAX, Done, PendingKeepAlive, Renewals
from raftkv.replica.lease.times import LeaseClock, LeaseTimes

TTL_S = 60


class Asked(PendingKeepAlive):
    """A keep-alive of a client."""

    def __init__(self, lease_id: int, told: list[int]) -> None:
        self.lease_id = lease_id
        self.deadline = 0.0
        self.told = told

    def answer(self, ttl_s: int) -> None:
        assert ttl_s == TTL_S
        self.told.append(self.lease_id)

    def fail(self, error: errors.StatusError) -> None:
        raise AssertionError(error)


def test_renewals_during_an_entry_are_answered_in_slices() -> None:
    """While a disk or a quorum stands still for a second, 300,000 may come: all in one turn they held it for 0.7 s."""
    proposed: list[tuple[Sequence[int], Done]] = []
    clock = LeaseClock(lambda: 100.0)
    times = LeaseTimes(clock, lambda lease_id: None)
    cork = Cork(lambda flush: None)
    renewals = Renewals(times, clock, lambda kind, ids, done: proposed.append((ids, done)), lambda batch: None, cork)
    for lease_id in (1, 2):
        times.granted(lease_id, TTL_S)
    times.promote(after_outage=False)
    clock.beat()
    told: list[int] = []
    order = [1, 2] * (5 * RENEW_MAX // 2)
    renewals.take([Asked(lease_id, told) for lease_id in order[:2]])
    for lease_id in order[2:]:
        renewals.take_one(Asked(lease_id, told))
    while proposed:
        ids, done = proposed.pop(0)
        assert set(ids) <= {1, 2}
        before = len(told)
        done(None)
        assert 0 < len(told) - before <= 2 * RENEW_MAX
    assert told == order
