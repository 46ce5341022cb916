"""``RawNode``: refusals, the order of confirmations, status, and limits of the configuration."""

from __future__ import annotations

import random
from typing import Any

import pytest

from raftkv.raft.core import RawNode
from raftkv.raft.errors import (
    ForkError,
    InvalidMessage,
    InvariantError,
    ProposalDropped,
    StepLocalMessage,
    StepPeerNotFound,
)
from raftkv.raft.log import MemoryLog
from raftkv.raft.tracker import ProgressState
from raftkv.raft.types import ConfState, Entry, HardState, Message, MessageType, RaftConfig, SnapshotMeta, StateRole

from .member import FixedRandom, Member


def _single() -> Member:
    log = MemoryLog(conf_state=ConfState(voters=(1,)))
    return Member(RaftConfig(id=1, pre_vote=False), log, FixedRandom(0))


def _settle(member: Member) -> None:
    while member.node.has_ready():
        member.work()


def test_confirmations_out_of_order_are_refused() -> None:
    member = _single()
    member.node.campaign()
    _settle(member)
    member.node.propose(b"a")
    first = member.node.ready()
    member.node.propose(b"b")
    second = member.node.ready()
    assert second.append_number == first.append_number + 1
    with pytest.raises(InvariantError, match="out of order"):
        member.node.on_append_durable(second)
    member.log.append(first.entries)
    member.node.on_append_durable(first)
    with pytest.raises(InvariantError, match="out of order"):
        member.node.on_append_durable(first)


def test_a_ready_without_disk_work_needs_no_confirmation() -> None:
    member = _single()
    ready = member.node.ready()
    assert ready.append_number == 0
    member.node.on_append_durable(ready)


def test_applied_beyond_commit_is_refused() -> None:
    member = _single()
    with pytest.raises(InvariantError, match="applied"):
        member.node.on_applied(1)


def test_advance_is_the_shorthand_for_durable_and_applied() -> None:
    log = MemoryLog(conf_state=ConfState(voters=(1,)))
    node = RawNode(RaftConfig(id=1), log, random.Random(1))
    node.campaign()
    done: list[bytes] = []
    for _ in range(9):
        if node.status().role == StateRole.LEADER and node.status().last_index == 1:
            node.propose_batch([b"a", b"b"])
        ready = node.ready()
        log.append(ready.entries)
        if ready.hard_state is not None:
            log.hard_state = ready.hard_state
        done += [entry.data for entry in ready.committed_entries if entry.data]
        node.advance(ready)
    assert done == [b"a", b"b"]
    assert not node.has_ready()
    assert (node.status().commit, node.status().applied) == (3, 3)


@pytest.mark.parametrize(
    "kind",
    [
        MessageType.HUP,
        MessageType.BEAT,
        MessageType.UNREACHABLE,
        MessageType.SNAPSHOT_STATUS,
        MessageType.CHECK_QUORUM,
        MessageType.FORGET_LEADER,
    ],
)
def test_local_kinds_do_not_come_from_outside(kind: MessageType) -> None:
    with pytest.raises(StepLocalMessage):
        _single().node.step(Message(kind, to=1, from_=2))


@pytest.mark.parametrize(
    "kind",
    [
        MessageType.APPEND_RESPONSE,
        MessageType.VOTE_RESPONSE,
        MessageType.PRE_VOTE_RESPONSE,
        MessageType.HEARTBEAT_RESPONSE,
        MessageType.READ_INDEX_RESPONSE,
    ],
)
def test_answers_of_strangers_are_refused(kind: MessageType) -> None:
    member = _single()
    with pytest.raises(StepPeerNotFound):
        member.node.step(Message(kind, to=1, from_=9, term=99))
    assert member.node.raft.term == 0


def test_two_leaders_in_one_term_stop_the_member() -> None:
    member = _single()
    member.node.campaign()
    _settle(member)
    with pytest.raises(InvariantError, match="two leaders"):
        member.node.step(Message(MessageType.APPEND, to=1, from_=2, term=1))


def test_leader_drops_the_acknowledgement_of_an_entry_that_it_does_not_have() -> None:
    """Keep the leader: it stopped, and each next one, so a member with data from elsewhere ended the cluster."""
    log = MemoryLog(conf_state=ConfState(voters=(1, 2)))
    member = Member(RaftConfig(id=1, pre_vote=False), log, FixedRandom(0))
    member.node.campaign()
    member.work()
    member.node.step(Message(MessageType.VOTE_RESPONSE, to=1, from_=2, term=1))
    with pytest.raises(InvalidMessage, match="acknowledges entry 5, and this leader's log ends at 1"):
        member.node.step(Message(MessageType.APPEND_RESPONSE, to=1, from_=2, term=1, index=5))
    assert (member.node.raft.role, member.node.raft.log.committed) == (StateRole.LEADER, 0)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (MessageType.APPEND, {"index": 1, "log_term": 1, "entries": [Entry(2, 2, b"other"), Entry(2, 3, b"other")]}),
        (MessageType.APPEND, {"index": 1, "log_term": 1, "entries": [Entry(1, 2, b"other")]}),
        (MessageType.APPEND, {"index": 2, "log_term": 2}),
        (MessageType.APPEND, {"index": 3, "log_term": 2, "entries": [Entry(2, 4, b"new")]}),
        (MessageType.SNAPSHOT, {"snapshot": SnapshotMeta(2, 2, ConfState(voters=(1, 2, 3)))}),
    ],
    ids=["entries", "entry of a term with two leaders", "entry before them", "last committed entry", "database"],
)
def test_leader_without_committed_entries_stops_member(kind: MessageType, fields: dict[str, Any]) -> None:
    """A quorum elected it with a member that runs on an older copy of its data, and lost acknowledged entries."""
    log = MemoryLog(conf_state=ConfState(voters=(1, 2, 3)))
    log.append([Entry(1, index, b"x") for index in (1, 2, 3)])
    log.hard_state = HardState(1, 2, 3)
    member = Member(RaftConfig(id=1), log, FixedRandom(0))
    _settle(member)
    with pytest.raises(ForkError, match="of term 1 was committed here"):
        member.node.step(Message(kind, to=1, from_=3, term=2, **fields))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (MessageType.APPEND, {"index": 2, "log_term": 1, "entries": [Entry(4, 3, b"")]}),
        (MessageType.APPEND, {"index": 3, "log_term": 4}),
        (MessageType.APPEND, {"index": 9, "log_term": 2}),
        (MessageType.SNAPSHOT, {"snapshot": SnapshotMeta(9, 2, ConfState(voters=(1, 2, 3)))}),
    ],
    ids=["entry", "entry before none", "later entry of an earlier term", "database"],
)
def test_fork_in_a_compacted_part_of_the_log_stops_member(kind: MessageType, fields: dict[str, Any]) -> None:
    """A member acknowledged all of it, and the leader stopped; or a database replaced what others had lost."""
    log = MemoryLog(conf_state=ConfState(voters=(1, 2, 3)))
    log.append([Entry(3, index, b"x") for index in range(1, 8)])
    log.hard_state = HardState(3, 2, 7)
    log.create_snapshot(6, log.conf_state)
    log.compact(6)
    member = Member(RaftConfig(id=1), log, FixedRandom(0))
    _settle(member)
    with pytest.raises(ForkError, match="of term 3 was committed here"):
        member.node.step(Message(kind, to=1, from_=3, term=4, **fields))


def test_the_messages_given_are_never_changed() -> None:
    log = MemoryLog(conf_state=ConfState(voters=(1, 2)))
    member = Member(RaftConfig(id=1), log, FixedRandom(0))
    member.node.step(Message(MessageType.HEARTBEAT, to=1, from_=2, term=1))
    entries = [Entry(0, 0, b"x")]
    message = Message(MessageType.PROPOSE, to=1, from_=7, entries=entries)
    member.node.step(message)
    (sent,) = [each for each in member.work()[1] if each.type == MessageType.PROPOSE]
    assert (sent.to, sent.from_, sent.term) == (2, 7, 0)
    assert (message.to, message.from_, message.term, message.entries) == (1, 7, 0, entries)


def test_proposals_of_one_batch_are_one_message_and_share_one_list() -> None:
    log = MemoryLog(conf_state=ConfState(voters=(1, 2, 3)))
    member = Member(RaftConfig(id=1, pre_vote=False), log, FixedRandom(0))
    member.node.campaign()
    member.work()
    member.node.step(Message(MessageType.VOTE_RESPONSE, to=1, from_=2, term=1))
    member.work()
    for voter in (2, 3):
        member.node.step(Message(MessageType.APPEND_RESPONSE, to=1, from_=voter, term=1, index=1))
    member.work()
    member.node.propose_batch([b"a", b"b"])
    member.node.propose(b"c")
    messages = member.node.ready().messages
    assert [len(message.entries) for message in messages] == [3, 3]
    assert messages[0].entries is messages[1].entries


def test_an_empty_batch_is_nothing() -> None:
    member = _single()
    member.node.propose_batch([])
    with pytest.raises(ProposalDropped, match="no leader") as dropped:
        member.node.propose(b"x")
    assert dropped.value.reason == "no leader"


def test_status_of_a_leader_shows_all_members() -> None:
    log = MemoryLog(conf_state=ConfState(voters=(1,), learners=(2,)))
    member = Member(RaftConfig(id=1, pre_vote=False), log, FixedRandom(0))
    assert member.node.status().progress == {}
    member.node.campaign()
    _settle(member)
    status = member.node.status()
    assert (status.role, status.leader, status.term, status.vote) == (StateRole.LEADER, 1, 1, 1)
    assert (status.commit, status.applied, status.last_index) == (1, 1, 1)
    assert status.conf == ConfState(voters=(1,), learners=(2,))
    assert status.progress[1].match == 1
    assert status.progress[2].is_learner
    assert status.progress[2].state is ProgressState.PROBE
    assert status.progress[2].paused


def test_a_log_that_contradicts_itself_is_refused() -> None:
    log = MemoryLog(hard_state=HardState(term=1, commit=5), conf_state=ConfState(voters=(1,)))
    log.append([Entry(1, 1)])
    with pytest.raises(InvariantError, match="commit 5 is outside"):
        RawNode(RaftConfig(id=1), log, random.Random(1))


def test_a_state_machine_ahead_of_the_log_is_refused() -> None:
    log = MemoryLog(hard_state=HardState(term=1, commit=1), conf_state=ConfState(voters=(1,)))
    log.append([Entry(1, 1)])
    with pytest.raises(InvariantError, match="corrupted, truncated or lost"):
        RawNode(RaftConfig(id=1, applied=3), log, random.Random(1))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"id": 0}, "member id"),
        ({"id": 1 << 64}, "member id"),
        ({"id": 1, "heartbeat_ticks": 0}, "heartbeat_ticks"),
        ({"id": 1, "election_ticks": 2, "heartbeat_ticks": 2}, "election_ticks"),
        ({"id": 1, "max_inflight_messages": 0}, "max_inflight_messages"),
        ({"id": 1, "max_inflight_bytes": 5}, "max_inflight_bytes"),
        ({"id": 1, "max_uncommitted_bytes": -1}, "negative"),
        ({"id": 1, "applied": -1}, "negative"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RaftConfig(**settings)
