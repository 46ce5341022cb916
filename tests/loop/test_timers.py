"""The wheel: fires everything once, never early, at most a tick late, and keeps nothing of what was removed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raftkv.loop.timers import FIRED_MAX, TICK_S, DeadlineWheel, Expiring, forget


class Entry:
    def __init__(self, fired: list[Entry]) -> None:
        self.bucket: dict[Expiring, None] | None = None
        self.deadline: float | None = None
        self._fired = fired

    def expire(self) -> None:
        self._fired.append(self)


class Owner:
    """Drives a wheel in simulated time, as the loop's timer does."""

    def __init__(self) -> None:
        self.armed: float | None = None
        self.wheel = DeadlineWheel(self._arm)

    def _arm(self, when: float) -> None:
        self.armed = when

    def run_to(self, end: float, fired: list[Entry], times: dict[Entry, float]) -> None:
        while self.armed is not None and self.armed <= end:
            now = self.armed
            self.armed = None
            before = len(fired)
            self.wheel.expire(now)
            times.update((entry, now) for entry in fired[before:])
            self.armed = self.wheel.next_expiry()


@given(st.lists(st.floats(0, 40_000), max_size=40), st.sets(st.integers(0, 39)))
def test_fires_once_never_early_at_most_two_ticks_late(delays: list[float], removed: set[int]) -> None:
    fired: list[Entry] = []
    owner, start = Owner(), 1000.0
    entries = [Entry(fired) for _ in delays]
    for entry, delay in zip(entries, delays, strict=True):
        owner.wheel.add(entry, start + delay, start)
    for index in removed & set(range(len(entries))):
        forget(entries[index])
    times: dict[Entry, float] = {}
    owner.run_to(start + 50_000, fired, times)
    assert set(fired) == {entry for index, entry in enumerate(entries) if index not in removed}
    assert len(fired) == len(set(fired))
    for entry, delay in zip(entries, delays, strict=True):
        if entry in times:
            assert start + delay <= times[entry] <= start + delay + 2 * TICK_S
    assert owner.wheel.next_expiry() is None


def test_a_million_finished_calls_with_long_deadlines_hold_few_buckets() -> None:
    owner, fired = Owner(), []
    for index in range(100_000):
        entry = Entry(fired)
        owner.wheel.add(entry, 3600 + index * 0.37, index * 0.0001)
        forget(entry)
    assert len(owner.wheel._buckets) < 1500


def test_an_expiry_may_remove_its_neighbour() -> None:
    owner, fired = Owner(), []
    neighbour = Entry(fired)

    class Remover(Entry):
        def expire(self) -> None:
            super().expire()
            forget(neighbour)

    remover = Remover(fired)
    owner.wheel.add(remover, 5.0, 4.99)
    owner.wheel.add(neighbour, 5.0, 4.99)
    owner.wheel.expire(6.0)
    assert fired == [remover]


def test_an_entry_sorted_in_again_is_not_looked_at_twice_at_one_time() -> None:
    """Rounding may put it back where it was; the loop must go on all the same."""
    owner, fired = Owner(), []
    entry = Entry(fired)
    owner.wheel.add(entry, 5.0, 4.99)
    entry.deadline = 5.02
    owner.wheel.expire(5.01)
    assert fired == []
    owner.wheel.expire(5.03)
    assert fired == [entry]


def test_of_very_many_that_pass_at_once_some_are_fired_at_a_time() -> None:
    fired: list[Entry] = []
    owner, start = Owner(), 1000.0
    entries = [Entry(fired) for _ in range(3 * FIRED_MAX + 1)]
    for entry in entries:
        owner.wheel.add(entry, start + 0.5, start)
    now = start + 1.0
    for turn in (1, 2, 3):
        owner.wheel.expire(now)
        assert len(fired) == turn * FIRED_MAX
        assert owner.wheel.next_expiry() == now
    forget(entries[-1])
    owner.armed = None
    owner.wheel.add(Entry(fired), now + 0.1, now)
    assert owner.armed is None, "nothing may put off what is due"
    owner.wheel.expire(now)
    assert fired == entries[:-1]
    owner.armed = owner.wheel.next_expiry()
    owner.run_to(now + 1.0, fired, {})
    assert len(fired) == len(entries)
