"""Tests of the invariant checks: each rule is broken once and must be reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raftkv.raft.core import Raft
from raftkv.raft.errors import InvariantError
from raftkv.raft.log import MemoryLog
from raftkv.raft.types import ConfState, Entry, RaftConfig, StateRole
from tests.raft import invariants

from .cluster_checks import ClusterChecks
from .member import FixedRandom, Member


def _leader(id: int = 1) -> Member:
    log = MemoryLog(conf_state=ConfState(voters=(id,), learners=(id + 1,)))
    member = Member(RaftConfig(id=id, pre_vote=False), log, FixedRandom(0))
    member.node.campaign()
    while member.node.has_ready():
        member.work()
    member.node.propose_batch([b"a", b"b"])
    member.work()
    member.checker.check()
    return member


def _shrink(raft: Raft) -> None:
    del raft.log.unstable.entries[:]
    raft.log.reader.append([Entry(1, 1)])
    raft.log.last_index = 1
    raft.log.committed = raft.log.applying = raft.log.applied = 1
    raft.log.unstable.offset = raft.log.unstable.in_progress = 2
    for progress in raft.tracker.progress.values():
        progress.match, progress.next = 1, 2
        progress.inflights.reset()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda raft: setattr(raft.log, "committed", 99), "committed 99"),
        (lambda raft: setattr(raft.log, "last_term", 9), "last entry has term 9"),
        (lambda raft: setattr(raft.log.unstable, "in_progress", 1), "in progress to 1"),
        (lambda raft: setattr(raft.log, "last_index", 7), "unstable tail ends"),
        (lambda raft: setattr(raft, "leader", 2), "with leader 2"),
        (lambda raft: setattr(raft, "vote", 2), "LEADER voted for 2"),
        (lambda raft: setattr(raft, "term_start_index", 77), "leads from 77"),
        (lambda raft: setattr(raft, "uncommitted_bytes", -1), "uncommitted size"),
        (lambda raft: setattr(raft.tracker.progress[2], "is_learner", False), "2 is learner"),
        (lambda raft: setattr(raft.tracker.progress[2], "next", 0), "match 0, next 0"),
        (lambda raft: setattr(raft.tracker.progress[2], "match", 50), "match 50"),
        (lambda raft: setattr(raft.tracker.progress[2], "pending_snapshot", 5), "pending snapshot in state"),
        (lambda raft: raft.tracker.progress.pop(2), "exactly the members"),
    ],
)
def test_basic_rules_are_noticed(spoil: Callable[[Raft], None], text: str) -> None:
    member = _leader()
    spoil(member.node.raft)
    with pytest.raises(InvariantError, match=text):
        invariants.check_basic(member.node.raft)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda raft: setattr(raft, "term", 0), "term fell"),
        (lambda raft: setattr(raft, "vote", 2), "vote changed from 1 to 2"),
        (lambda raft: setattr(raft, "leader", 2), "leader changed from 1 to 2"),
        (lambda raft: setattr(raft, "role", StateRole.CANDIDATE), "leader became candidate"),
        (lambda raft: setattr(raft.log, "committed", 0), "committed fell"),
        (lambda raft: setattr(raft.log, "applied", 0), "applied fell"),
        (_shrink, "log shrank"),
    ],
)
def test_delta_rules_are_noticed(spoil: Callable[[Raft], None], text: str) -> None:
    member = _leader()
    before = invariants.observe(member.node.raft)
    spoil(member.node.raft)
    assert any(text in broken for broken in invariants._broken_delta(before, member.node.raft))
    with pytest.raises(InvariantError):
        invariants.check_delta(before, member.node.raft)


def test_a_forgotten_term_or_vote_is_noticed() -> None:
    member = _leader()
    persisted = invariants.observe(member.node.raft)
    member.node.raft.vote = 0
    with pytest.raises(InvariantError, match="forgot its vote"):
        invariants.check_restart(persisted, member.node.raft)
    member.node.raft.term = 0
    with pytest.raises(InvariantError, match="forgot term"):
        invariants.check_restart(persisted, member.node.raft)


def test_the_cluster_checks_notice_two_leaders_and_two_truths() -> None:
    one, other = _leader(1), _leader(2)
    with pytest.raises(InvariantError, match="lead term 1"):
        ClusterChecks().check([one.node.raft, other.node.raft])
    other.node.raft.role = StateRole.FOLLOWER
    other.log.append([Entry(1, 1, b"different"), Entry(1, 2, b"a"), Entry(1, 3, b"b")])
    with pytest.raises(InvariantError, match="committed"):
        ClusterChecks().check([one.node.raft, other.node.raft])
