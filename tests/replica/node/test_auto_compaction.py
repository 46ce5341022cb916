"""Periodic compaction with a manual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.wire import Kind
from raftkv.pb import rpc_pb2
from raftkv.replica.node.auto_compaction import AutoCompaction, PeriodicPolicy, Policy, RevisionPolicy

MINUTE_S = 60.0
HOUR_S = 3600.0


@dataclass
class FakeMember:
    """Proposes at once, and answers as the test says."""

    policy: Policy
    revision: int = 0
    leads: bool = True
    refusal: errors.StatusError | None = None
    answers: bool = True
    now: float = 0.0
    compactions: list[tuple[float, int]] = field(default_factory=list)
    waiting: list[Coroutine[Any, Any, None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.auto = AutoCompaction(self.policy, self, lambda: self.leads, lambda: self.revision)

    async def propose(self, kind: int, body: bytes, request: object, caller: object, *, identity: object) -> Outcome:
        assert kind == Kind.COMPACT
        self.compactions.append((self.now, rpc_pb2.CompactionRequest.FromString(body).revision))
        if not self.answers:
            await asyncio.sleep(0)  # until ``end_waiting``
        return Outcome(0, error=self.refusal)

    def tick(self) -> None:
        """Sample, and compact as far as that goes by itself."""
        target = self.auto.sample(self.now)
        if target is not None:
            compaction = self.auto.compact(self.now, target)
            try:
                compaction.send(None)
                self.waiting.append(compaction)
            except StopIteration:
                pass

    def end_waiting(self, error: errors.StatusError) -> None:
        """Have the compaction under way fail."""
        with pytest.raises(StopIteration):
            self.waiting.pop().throw(error)

    def run(self, until_s: float) -> list[tuple[float, int]]:
        """Turn the clock, one revision a second; the compactions as (time, revision) since the last call."""
        while self.now <= until_s:
            self.revision = int(self.now)
            self.tick()
            self.now += self.policy.interval_s
        done, self.compactions = self.compactions, []
        return done


def _times(*pairs: tuple[float, float]) -> list[tuple[float, float]]:
    return [(pytest.approx(now), pytest.approx(revision)) for now, revision in pairs]


def test_a_short_retention_is_also_the_period() -> None:
    member = FakeMember(PeriodicPolicy(10 * MINUTE_S, 0.0))
    assert member.policy.interval_s == MINUTE_S
    # Never before a whole retention, and to what was sampled a retention ago: at 10 min that is revision 0.
    assert member.run(19 * MINUTE_S) == _times((11 * MINUTE_S, MINUTE_S))
    assert member.run(41 * MINUTE_S) == _times(
        (21 * MINUTE_S, 11 * MINUTE_S), (31 * MINUTE_S, 21 * MINUTE_S), (41 * MINUTE_S, 31 * MINUTE_S)
    )


def test_a_long_retention_compacts_every_hour() -> None:
    member = FakeMember(PeriodicPolicy(5 * HOUR_S, 0.0))
    member.run(0.0)
    assert member.policy.interval_s == HOUR_S / 10
    first = 5 * HOUR_S + HOUR_S / 10
    assert member.run(first + 2 * HOUR_S) == _times(
        (first, first - 5 * HOUR_S), (first + HOUR_S, first - 4 * HOUR_S), (first + 2 * HOUR_S, first - 3 * HOUR_S)
    )


def test_a_timer_that_fires_early_costs_no_interval() -> None:
    policy = PeriodicPolicy(10.0, 0.0)
    for second in range(1, 11):
        assert policy.target(second - 0.001, second) == (1 if second == 10 else None)


def test_a_history_that_stands_still_is_left_alone() -> None:
    policy = PeriodicPolicy(10.0, 0.0)
    member = FakeMember(policy)
    targets = []
    for second in range(100):
        target = policy.target(float(second), 7)
        if target is not None:
            targets.append(target)
            policy.done(float(second), target)
    assert targets == [7]
    assert member.compactions == []


def test_followers_sample_and_do_not_compact() -> None:
    member = FakeMember(PeriodicPolicy(10 * MINUTE_S, 0.0), leads=False)
    assert member.run(30 * MINUTE_S) == []
    member.leads = True
    # The new leader knows where the history stood a retention ago.
    assert member.run(31 * MINUTE_S) == _times((31 * MINUTE_S, 21 * MINUTE_S))


def test_a_failure_is_tried_again_at_the_next_sample() -> None:
    member = FakeMember(PeriodicPolicy(10 * MINUTE_S, 0.0), refusal=errors.RequestTimeoutError())
    assert [now for now, _ in member.run(13 * MINUTE_S)] == [11 * MINUTE_S, 12 * MINUTE_S, 13 * MINUTE_S]
    member.refusal = errors.CompactedError()  # another member did it
    assert len(member.run(20 * MINUTE_S)) == 1


def test_one_compaction_at_a_time() -> None:
    member = FakeMember(PeriodicPolicy(10 * MINUTE_S, 0.0), answers=False)
    assert len(member.run(30 * MINUTE_S)) == 1
    member.end_waiting(errors.StoppedError())
    assert len(member.run(31 * MINUTE_S)) == 1


def test_a_number_of_revisions() -> None:
    member = FakeMember(RevisionPolicy(1000))
    assert member.policy.interval_s == 5 * MINUTE_S
    assert member.run(15 * MINUTE_S) == []
    assert member.run(25 * MINUTE_S) == _times((20 * MINUTE_S, 200.0), (25 * MINUTE_S, 500.0))
    member.run(60 * MINUTE_S)
    member.revision = 100
    member.tick()
    assert member.compactions == []


def test_a_stopping_member_refuses_at_once() -> None:
    class Stopping(FakeMember):
        async def propose(
            self, kind: int, body: bytes, request: object, caller: object, *, identity: object
        ) -> Outcome:
            self.compactions.append((self.now, 0))
            raise errors.StoppedError

    member = Stopping(RevisionPolicy(1))
    assert len(member.run(10 * MINUTE_S)) == 2
