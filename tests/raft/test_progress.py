"""Progress and its window of in-flight messages against simple models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raftkv.raft.errors import InvariantError
from raftkv.raft.tracker import PROBE, REPLICATE, SNAPSHOT, Inflights, Progress


@given(
    max_count=st.integers(1, 5),
    max_bytes=st.integers(0, 40),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 25), st.integers(1, 3)), max_size=40),
)
def test_window_is_a_list_of_messages(max_count: int, max_bytes: int, steps: list[tuple[bool, int, int]]) -> None:
    window = Inflights(max_count, max_bytes)
    model: list[tuple[int, int]] = []
    last = 0
    for adds, number, gap in steps:
        full = len(model) == max_count or (max_bytes > 0 and sum(size for _, size in model) >= max_bytes)
        assert window.full() == full
        if not adds:
            window.free_to(number)
            model = [(index, size) for index, size in model if index > number]
        elif full:
            with pytest.raises(InvariantError):
                window.add(last + gap, number)
        else:
            last += gap
            window.add(last, number)
            model.append((last, number))
        assert window.indexes() == [index for index, _ in model]
        assert (len(window), window.bytes) == (len(model), sum(size for _, size in model))
    window.reset()
    assert (len(window), window.bytes, window.full()) == (0, 0, False)


class ProgressMachine(RuleBasedStateMachine):
    """A leader with a growing log, and a follower whose answers may be stale."""

    @initialize(last=st.integers(0, 5))
    def start(self, last: int) -> None:
        self.last = last
        self.progress = Progress(last + 1, Inflights(3, 0))
        self.acknowledged = 0

    @rule(count=st.integers(1, 4))
    def grow(self, count: int) -> None:
        self.last += count

    @precondition(lambda self: not self.progress.is_paused() and not self.progress.inflights.full())
    @rule(count=st.integers(0, 4))
    def send(self, count: int) -> None:
        before = self.progress.next
        count = min(count, self.last + 1 - before)
        self.progress.sent_entries(count, count)
        # Only streaming is optimistic; a probe with entries waits for its answer.
        assert self.progress.next == before + (count if self.progress.state is REPLICATE else 0)
        if self.progress.state is PROBE and count:
            assert self.progress.is_paused()

    @rule(index=st.integers(0, 30))
    def acknowledge(self, index: int) -> None:
        index = min(index, self.last)
        news = self.progress.maybe_update(index)
        assert news == (index > self.acknowledged)
        self.acknowledged = max(self.acknowledged, index)
        if news and self.progress.state is REPLICATE:
            self.progress.inflights.free_to(index)

    @rule(rejected=st.integers(0, 30), hint=st.integers(0, 30))
    def reject(self, rejected: int, hint: int) -> None:
        before = self.progress.next
        genuine = {
            REPLICATE: rejected > self.acknowledged,
            PROBE: rejected == before - 1,
            # What is rejected now was sent before the snapshot.
            SNAPSHOT: False,
        }[self.progress.state]
        assert self.progress.maybe_decrement(rejected, hint) == genuine
        assert genuine or self.progress.next == before
        assert self.progress.next <= max(before, self.acknowledged + 1)
        if genuine:
            self.progress.become_probe()

    @rule()
    def probe(self) -> None:
        pending = self.progress.pending_snapshot
        self.progress.become_probe()
        assert self.progress.next == max(self.acknowledged, pending) + 1

    @rule()
    def replicate(self) -> None:
        self.progress.become_replicate()
        assert self.progress.next == self.acknowledged + 1

    @precondition(lambda self: self.last > self.acknowledged)
    @rule()
    def snapshot(self) -> None:
        self.progress.become_snapshot(self.last)
        assert self.progress.is_paused()

    @rule(committed=st.integers(0, 30))
    def commit(self, committed: int) -> None:
        committed = min(committed, self.last)
        if self.progress.can_bump_commit(committed):
            assert committed > self.progress.sent_commit
            self.progress.sent_commit = committed

    @invariant()
    def books_are_sound(self) -> None:
        if not hasattr(self, "progress"):
            return
        assert self.progress.match == self.acknowledged
        assert 0 <= self.progress.match < self.progress.next
        window = self.progress.inflights.indexes()
        assert window == sorted(set(window))
        assert all(self.progress.match < index < self.progress.next for index in window)


TestProgress = ProgressMachine.TestCase


def test_nothing_is_appended_while_a_snapshot_is_pending() -> None:
    progress = Progress(5, Inflights(1, 0))
    progress.become_snapshot(7)
    with pytest.raises(InvariantError):
        progress.sent_entries(1, 1)


def streaming(match: int, sent: int) -> Progress:
    """A follower that acknowledged up to ``match``, and is sent everything up to ``sent``, with that commit index."""
    progress = Progress(match + 1, Inflights(3, 0))
    progress.maybe_update(match)
    progress.become_replicate()
    progress.sent_entries(sent - match, 1)
    progress.sent_commit = sent
    return progress


def test_a_commit_index_that_was_lost_with_its_entries_is_sent_again_with_them() -> None:
    progress = streaming(match=2, sent=6)
    assert not progress.can_bump_commit(6)
    progress.become_probe()
    assert progress.sent_commit == 2
    progress.become_replicate()
    progress.sent_entries(4, 1)
    assert progress.can_bump_commit(6)


def test_a_rejected_probe_takes_its_commit_index_back() -> None:
    progress = Progress(7, Inflights(3, 0))
    progress.sent_commit = 6
    assert progress.maybe_decrement(6, 3)
    assert (progress.next, progress.sent_commit, progress.is_paused()) == (4, 3, False)


def test_a_snapshot_brings_its_commit_index() -> None:
    progress = streaming(match=2, sent=4)
    progress.become_snapshot(9)
    assert (progress.sent_commit, progress.inflights.indexes()) == (9, [])
    progress.become_probe()
    assert (progress.next, progress.sent_commit) == (10, 9)


def test_reset_forgets_progress_of_last_term() -> None:
    progress = streaming(match=2, sent=6)
    progress.become_snapshot(9)
    progress.reset(next=10, match=0)
    assert (progress.state, progress.is_paused(), progress.pending_snapshot) == (PROBE, False, 0)
    assert (progress.match, progress.next, progress.sent_commit) == (0, 10, 0)
    assert (progress.inflights.indexes(), progress.recent_active) == ([], False)
