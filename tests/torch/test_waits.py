"""Waits for collectives that gloo does not end: given up once the group is over, and not a moment before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import Work

from raftkv.torch import interrupt
from raftkv.torch.interrupt import Waits, WorkLost


class Stuck:
    """A work that is not completed, until ``ends_after`` slices have passed."""

    def __init__(self, ends_after: int = sys.maxsize, error: Exception | None = None) -> None:
        self.waited: list[timedelta] = []
        self.ends_after = ends_after
        self.error = error

    def is_completed(self) -> bool:
        return len(self.waited) >= self.ends_after


def wait(work: Stuck, timeout: timedelta = timedelta(0)) -> bool:
    """As torch's: a limit that passes raises, and changes nothing."""
    work.waited.append(timeout)
    if not work.is_completed():
        raise RuntimeError("Operation timed out!")
    if work.error is not None:
        raise work.error
    return True


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether the group is over; torch's own wait is replaced by the one above."""
    monkeypatch.setattr(interrupt, "_wait", wait)
    answer = [False]
    present = Waits(lambda: answer[0])
    yield answer
    monkeypatch.undo()  # before the end puts back what it finds there
    present.close()


def test_a_wait_of_a_group_that_goes_on_lasts_as_long_as_it_takes(over: list[bool]) -> None:
    work = Stuck(ends_after=7)
    assert Work.wait(work)
    assert set(work.waited) == {interrupt.SLICE}


def test_a_limit_of_the_callers_own_is_torchs_business(over: list[bool]) -> None:
    over[0] = True
    work = Stuck(ends_after=1)
    assert interrupt._wait_in_slices(work, timedelta(seconds=3))
    assert work.waited == [timedelta(seconds=3)]


def test_a_work_that_failed_raises_what_it_failed_with(over: list[bool]) -> None:
    over[0] = True
    work = Stuck(ends_after=2, error=ConnectionError("closed by peer"))
    with pytest.raises(ConnectionError, match="closed by peer"):
        interrupt._wait_in_slices(work)


def test_a_work_of_a_group_that_is_over_is_given_up(over: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def passing(work: Stuck, timeout: timedelta = timedelta(0)) -> bool:
        now[0] += timeout.total_seconds()
        return wait(work, timeout)

    monkeypatch.setattr(interrupt, "_wait", passing)
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    over[0] = True
    work = Stuck()
    with pytest.raises(WorkLost):
        interrupt._wait_in_slices(work)
    assert interrupt.GIVE_UP_S <= now[0] - 100.0 <= interrupt.GIVE_UP_S + 2 * interrupt.SLICE.total_seconds()


def test_groups_with_a_lost_work_are_never_destroyed_and_others_are(over: list[bool]) -> None:
    present = interrupt._present[-1]
    groups = [object(), object()]
    before = [sys.getrefcount(group) for group in groups]
    present.leak(groups)
    assert [sys.getrefcount(group) for group in groups] == before
    present.lost = True
    present.leak(groups)
    assert [sys.getrefcount(group) for group in groups] == [count + 1 for count in before]
    assert not present.lost


def test_without_groups_waits_are_torchs_own() -> None:
    assert Work.wait == interrupt._wait
    present = Waits(lambda: False)
    assert Work.wait == interrupt._wait_in_slices
    present.close()
    present.close()
    assert Work.wait == interrupt._wait
