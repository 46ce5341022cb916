"""Reads with a staleness bound: served from this member's state if it is certainly recent enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv import suspend_clock
from raftkv.replica.node.reads import RETRY_S, ReadQueue
from tests.replica.node.node_world import Reader

TIMEOUT_S = 7.0


@pytest.fixture(autouse=True)
def awake(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the machine has slept; tests on virtual time must not look at the real one."""
    slept = [0.0]
    monkeypatch.setattr(suspend_clock, "suspended_s", lambda: (slept[0], slept[0]))
    return slept


@pytest.fixture
def asked() -> list[bytes]:
    return []


@pytest.fixture
def queue(asked: list[bytes], awake: list[float]) -> ReadQueue:
    return ReadQueue(asked.append, count(1), TIMEOUT_S, lambda: None)


def read(queue: ReadQueue, bound_s: float, now: float) -> Reader:
    reader = Reader()
    queue.add_within(reader, bound_s, now)
    queue.start(now)
    return reader


def test_unconfirmed_state_has_infinite_age(queue: ReadQueue, asked: list[bytes]) -> None:
    reader = read(queue, 1e6, 100.0)
    assert reader.outcome is None
    queue.confirm(asked[0], index=5, applied=5, now=100.1)
    assert reader.outcome == "served"


def test_the_state_is_as_new_as_the_moment_its_round_began(queue: ReadQueue, asked: list[bytes]) -> None:
    read(queue, 1.0, 100.0)
    queue.confirm(asked[0], index=5, applied=5, now=100.5)
    assert read(queue, 1.0, 100.9).outcome == "served"
    late = read(queue, 1.0, 101.1)
    assert late.outcome is None, "confirmed 0.6 s ago, but what was committed since 100.0 may be missing"
    assert len(asked) == 2


def test_a_round_counts_only_once_its_index_is_applied(queue: ReadQueue, asked: list[bytes]) -> None:
    first = read(queue, 1.0, 100.0)
    queue.confirm(asked[0], index=9, applied=7, now=100.1)
    second = read(queue, 1.0, 100.2)
    assert (first.outcome, second.outcome, len(asked)) == (None, None, 1), "the second joins the confirmed round"
    queue.applied(9)
    assert (first.outcome, second.outcome) == ("served", "served")


def test_reader_joins_round_that_is_recent_enough(queue: ReadQueue, asked: list[bytes]) -> None:
    first = read(queue, 1.0, 100.0)
    joined, strict = read(queue, 0.3, 100.2), read(queue, 0.1, 100.2)
    queue.confirm(asked[0], index=5, applied=5, now=100.25)
    assert (first.outcome, joined.outcome, strict.outcome) == ("served", "served", None)
    queue.confirm(asked[1], index=5, applied=5, now=100.3)
    assert strict.outcome == "served"


def test_a_bound_of_nothing_is_a_linearizable_read(queue: ReadQueue, asked: list[bytes]) -> None:
    read(queue, 0.0, 100.0)
    same_moment = read(queue, 0.0, 100.0)
    queue.confirm(asked[0], index=5, applied=5, now=100.0)
    assert same_moment.outcome is None, "a write may have been acknowledged in between"


def test_a_round_that_seems_lost_is_not_joined(queue: ReadQueue, asked: list[bytes]) -> None:
    read(queue, 1e6, 100.0)
    late = read(queue, 1e6, 100.0 + RETRY_S + 1.0)
    queue.tick(100.0 + TIMEOUT_S + 0.1)
    assert late.outcome is None, "it has a round of its own, and its whole time to wait"


def test_plain_readers_make_the_state_newer_for_all(queue: ReadQueue, asked: list[bytes]) -> None:
    queue.add(Reader(), 100.0)
    queue.start(100.0)
    queue.confirm(asked[0], index=5, applied=5, now=100.1)
    assert read(queue, 1.0, 100.2).outcome == "served"
    assert len(asked) == 1


@pytest.mark.interpreted
def test_suspended_time_counts_for_staleness(queue: ReadQueue, asked: list[bytes], awake: list[float]) -> None:
    read(queue, 10.0, 100.0)
    queue.confirm(asked[0], index=5, applied=5, now=100.1)
    read(queue, 0.01, 100.5)  # a round is under way, and the lid is closed
    awake[0] = 3600.0
    woken = read(queue, 10.0, 101.0)
    assert woken.outcome is None, "the clock of the loop stood still meanwhile"
    queue.confirm(asked[1], index=5, applied=5, now=101.1)
    assert woken.outcome is None, "that round began an hour ago"
    assert read(queue, 10.0, 101.15).outcome is None
    queue.confirm(asked[2], index=5, applied=5, now=101.2)
    assert woken.outcome == "served"


@dataclass
class _World:
    """A cluster as its read rounds see it: writes are committed at moments, and a round returns the index then."""

    now: float = 1000.0
    committed: list[float] = field(default_factory=list)
    """When each index was committed (and so could be acknowledged)."""
    applied: int = 0
    asked: list[tuple[bytes, int]] = field(default_factory=list)
    """Rounds with the index that is confirmed, which is that of the ask or later."""

    def ask(self, context: bytes) -> None:
        self.asked.append((context, len(self.committed)))


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.sampled_from((0.001, 0.1, 0.6, 3.0))),
        st.tuples(st.just("commit"), st.just(0.0)),
        st.tuples(st.just("apply"), st.just(0.0)),
        st.tuples(st.just("confirm"), st.sampled_from((0.0, 1.0))),
        st.tuples(st.just("read"), st.sampled_from((0.0, 0.05, 0.5, 5.0))),
        st.tuples(st.just("tick"), st.just(0.0)),
        st.tuples(st.just("leader"), st.just(0.0)),
    ),
    max_size=60,
)


@given(_STEPS)
def test_reader_never_gets_state_older_than_its_bound(steps: list[tuple[str, float]]) -> None:
    world = _World()
    before, suspend_clock.suspended_s = suspend_clock.suspended_s, lambda: (0.0, 0.0)
    try:
        queue = ReadQueue(world.ask, count(1), TIMEOUT_S, lambda: None)

        class Checked(Reader):
            def __init__(self, bound_s: float) -> None:
                super().__init__()
                self.oldest = world.now - bound_s

            def ready(self) -> None:
                missing = [at for at in world.committed[world.applied :] if at < self.oldest]
                assert not missing, f"committed at {missing}, asked for {self.oldest}"
                super().ready()

        for step, value in steps:
            if step == "pass":
                world.now += value
            elif step == "commit":
                world.committed.append(world.now)
            elif step == "apply" and world.applied < len(world.committed):
                world.applied += 1
                queue.applied(world.applied)
            elif step == "confirm" and world.asked:
                context, index = world.asked.pop(0 if value else -1)
                queue.confirm(context, index, world.applied, world.now)
            elif step == "read":
                queue.add_within(Checked(value), value, world.now)
                queue.start(world.now)
            elif step == "tick":
                queue.tick(world.now)
            elif step == "leader":
                queue.leader_changed(world.now)
    finally:
        suspend_clock.suspended_s = before
