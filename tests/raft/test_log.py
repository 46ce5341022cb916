"""The log: MemoryLog and RaftLog against a plain list, sizes, and refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raftkv.raft.errors import CompactedError, InvariantError, SnapshotOutOfDateError, UnavailableError
from raftkv.raft.log import ENTRY_OVERHEAD_BYTES, REJECTED, MemoryLog, RaftLog, limit_size
from raftkv.raft.types import ConfState, Entry, SnapshotMeta

NO_LIMIT = 1 << 62


def _entries(first: int, terms: list[int], size: int = 0) -> list[Entry]:
    return [Entry(term, index, b"x" * size) for index, term in enumerate(terms, first)]


def _log(*terms: int) -> MemoryLog:
    log = MemoryLog()
    log.append(_entries(1, list(terms)))
    return log


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8), limit=st.integers(0, 200))
def test_limit_size_is_the_longest_prefix_that_fits_but_never_empty(sizes: list[int], limit: int) -> None:
    entries = [Entry(1, at, b"x" * size) for at, size in enumerate(sizes, 1)]
    fitting = [
        count
        for count in range(1, len(sizes) + 1)
        if sum(sizes[:count]) + count * ENTRY_OVERHEAD_BYTES <= limit or count == 1
    ]
    assert limit_size(entries, limit) == entries[: max(fitting)]


def test_memory_log_refuses_missing_entries() -> None:
    log = _log(1, 1, 2, 2)
    log.compact(2)
    assert (log.first_index(), log.last_index(), log.term(2)) == (3, 4, 1)
    with pytest.raises(CompactedError):
        log.term(1)
    with pytest.raises(CompactedError):
        log.entries(2, 4, NO_LIMIT)
    with pytest.raises(CompactedError):
        log.compact(2)
    with pytest.raises(UnavailableError):
        log.term(5)
    with pytest.raises(UnavailableError):
        log.entries(3, 6, NO_LIMIT)
    with pytest.raises(InvariantError):
        log.compact(5)
    with pytest.raises(InvariantError):
        log.append(_entries(6, [2]))


def test_memory_log_snapshots() -> None:
    log = _log(1, 1, 2)
    meta = log.create_snapshot(2, ConfState(voters=(1,)))
    assert meta == SnapshotMeta(2, 1, ConfState(voters=(1,))) == log.snapshot()
    with pytest.raises(SnapshotOutOfDateError):
        log.create_snapshot(2, ConfState())
    with pytest.raises(InvariantError):
        log.create_snapshot(9, ConfState())
    log.apply_snapshot(SnapshotMeta(7, 3, ConfState(voters=(1, 2))))
    assert (log.first_index(), log.last_index(), log.term(7)) == (8, 7, 3)
    assert log.conf_state == ConfState(voters=(1, 2))
    with pytest.raises(SnapshotOutOfDateError):
        log.apply_snapshot(SnapshotMeta(7, 3))


def test_memory_log_passes_over_compacted_entries() -> None:
    log = _log(1, 1, 1)
    log.compact(2)
    log.append(_entries(1, [1, 1]))
    assert log.last_index() == 3
    log.append(_entries(2, [1, 2, 2]))
    assert [entry.term for entry in log.entries(3, 5, NO_LIMIT)] == [2, 2]


@given(st.lists(st.integers(1, 4), max_size=12).map(sorted), st.data())
def test_find_conflict_by_term_is_the_last_that_may_match(terms: list[int], data: st.DataObject) -> None:
    memory = _log(*terms)
    kept = data.draw(st.integers(0, len(terms)))
    if kept:
        memory.compact(kept)
    index, term = data.draw(st.integers(0, len(terms) + 2)), data.draw(st.integers(0, 5))

    def known(at: int) -> int | None:
        return None if not kept <= at <= len(terms) else [0, *terms][at]

    expected = index
    while expected and (found := known(expected)) is not None and found > term:
        expected -= 1
    assert RaftLog(memory, NO_LIMIT).find_conflict_by_term(index, term) == (expected, known(expected) or 0)


def test_find_conflict_by_term_looks_at_few_entries() -> None:
    """A linear scan: two thousand messages with an old term blocked a member for 2.3 s."""
    looked_at: list[int] = []

    class Counted(MemoryLog):
        def term(self, index: int) -> int:
            looked_at.append(index)
            return super().term(index)

    memory = Counted()
    memory.append(_entries(1, [7] * 100_000))
    assert RaftLog(memory, NO_LIMIT).find_conflict_by_term(100_000, 3) == (0, 0)
    assert len(looked_at) < 40


def test_a_committed_entry_is_never_replaced() -> None:
    log = RaftLog(_log(1, 1, 1), NO_LIMIT)
    log.commit_to(2)
    with pytest.raises(InvariantError, match="committed"):
        log.maybe_append(1, 1, _entries(2, [2]), 0)
    with pytest.raises(InvariantError, match="corrupted, truncated or lost"):
        log.commit_to(4)


def test_followers_at_one_point_share_one_list() -> None:
    log = RaftLog(_log(), NO_LIMIT)
    log.append(_entries(1, [1, 1], size=5))
    first, size = log.entries_to_send(1, NO_LIMIT)
    assert log.entries_to_send(1, NO_LIMIT)[0] is first
    assert size == 10
    log.append(_entries(2, [2], size=1))
    assert [entry.term for entry in log.entries_to_send(1, NO_LIMIT)[0]] == [1, 2]
    # What was handed out before is not touched by the truncation.
    assert [entry.term for entry in first] == [1, 1]


class LogMachine(RuleBasedStateMachine):
    """A follower's log: appends of leaders of rising terms, slow writes, crashes of nothing; a list is the model."""

    @initialize(limit=st.sampled_from([30, 70, NO_LIMIT]))
    def start(self, limit: int) -> None:
        self.memory = MemoryLog()
        self.log = RaftLog(self.memory, limit)
        self.limit = limit
        self.model: list[int] = []
        self.term = 1
        self.writing: list[tuple[list[Entry], tuple[int, int, int]]] = []
        self.given: list[int] = []

    @rule(back=st.integers(0, 5), count=st.integers(0, 4), commit=st.integers(0, 20), newer=st.booleans())
    def append(self, back: int, count: int, commit: int, newer: bool) -> None:
        self.term += newer
        index = max(len(self.model) - back, self.log.committed)
        term = self.model[index - 1] if index else 0
        sent = [*self.model[index : index + count // 2], *([self.term] * (count - count // 2))]
        if sent != sorted(sent):
            return
        # Log matching: a leader's entry of an index and term is the same everywhere.
        kept = 0
        while kept < len(sent) and self.model[index + kept : index + kept + 1] == [sent[kept]]:
            kept += 1
        # Nor does a leader take back what it has appended in its own term.
        if kept < len(sent) and self.term in self.model[index + kept :]:
            return
        result = self.log.maybe_append(index, term, _entries(index + 1, sent, size=3), commit)
        if kept < len(sent):
            self.model[index + kept :] = sent[kept:]
        assert result == index + len(sent)

    @rule(index=st.integers(0, 20), term=st.integers(1, 20))
    def append_that_does_not_match(self, index: int, term: int) -> None:
        known = self.model[index - 1] if 0 < index <= len(self.model) else 0
        if term != known:
            assert self.log.maybe_append(index, term, [], 0) == REJECTED

    @rule()
    def hand_out(self) -> None:
        unstable = self.log.unstable
        entries = unstable.next_entries()
        unstable.accept()
        self.writing.append((entries, (self.term, self.log.last_index, self.log.last_term)))

    @precondition(lambda self: self.writing)
    @rule()
    def written(self) -> None:
        entries, (term, index, last_term) = self.writing.pop(0)
        self.memory.append(entries)
        if term == self.term:
            self.log.unstable.stable_to(index, last_term)

    @rule()
    def take_committed(self) -> None:
        page = self.log.next_committed()
        self.given += [entry.index for entry in page]
        outstanding = len(self.given) * (3 + ENTRY_OVERHEAD_BYTES)
        assert outstanding <= self.limit or len(page) <= 1
        # Only what is durable here is handed out.
        assert all(self.memory.term(entry.index) == entry.term for entry in page)

    @precondition(lambda self: self.given)
    @rule()
    def applied(self) -> None:
        self.log.applied_to(self.given[-1])
        self.given = []

    @precondition(lambda self: self.log.applied > self.memory.first_index())
    @rule()
    def compact(self) -> None:
        self.memory.compact(self.log.applied - 1)

    @invariant()
    def equals_the_list(self) -> None:
        if not hasattr(self, "log"):
            return
        log = self.log
        assert log.last_index == len(self.model)
        assert log.last_term == (self.model[-1] if self.model else 0)
        assert log.applied <= log.applying <= log.committed <= log.last_index
        first = log.first_index()
        assert [log.term(index) for index in range(first, log.last_index + 1)] == self.model[first - 1 :]
        read = log.entries(first, log.last_index + 1, NO_LIMIT) if log.last_index >= first else []
        assert [entry.term for entry in read] == self.model[first - 1 :]


TestLog = LogMachine.TestCase
