"""Requirements of the paper (Ongaro & Ousterhout 2014) and the thesis (Ongaro 2014), by section, as tables."""

from __future__ import annotations

import random

import pytest

from raftkv.raft.log import MemoryLog
from raftkv.raft.types import ConfState, Entry, HardState, Message, MessageType, RaftConfig, StateRole

from .member import FixedRandom, Member

FOLLOWER, CANDIDATE, LEADER = StateRole.FOLLOWER, StateRole.CANDIDATE, StateRole.LEADER


def _member(
    *terms: int, voters: int = 3, term: int = 0, commit: int = 0, id: int = 1, rng: random.Random | None = None
) -> Member:
    log = MemoryLog(conf_state=ConfState(voters=tuple(range(1, voters + 1))))
    log.append([Entry(each, index) for index, each in enumerate(terms, 1)])
    log.hard_state = HardState(term=max((term, *terms)), commit=commit)
    config = RaftConfig(id=id, pre_vote=False, check_quorum=False, election_ticks=10, heartbeat_ticks=1)
    return Member(config, log, rng or FixedRandom(0))


def _leader(*terms: int, voters: int = 3, term: int = 0, commit: int = 0) -> Member:
    member = _member(*terms, voters=voters, term=term, commit=commit)
    member.node.campaign()
    member.work()
    for voter in range(2, voters // 2 + 2):
        member.node.step(
            Message(MessageType.VOTE_RESPONSE, to=1, from_=voter, term=member.node.raft.term, reject=False)
        )
    assert member.node.raft.role == LEADER
    return member


def _answers(member: Member) -> list[Message]:
    return [message for message in member.work()[1] if message.to != member.id]


# -- section 5.1: terms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [FOLLOWER, CANDIDATE, LEADER])
def test_5_1_a_newer_term_makes_a_follower(role: StateRole) -> None:
    member = _leader() if role == LEADER else _member()
    if role == CANDIDATE:
        member.node.campaign()
    member.node.step(Message(MessageType.APPEND, to=1, from_=2, term=9))
    assert (member.node.raft.role, member.node.raft.term, member.node.raft.leader) == (FOLLOWER, 9, 2)


@pytest.mark.parametrize(
    "kind", [MessageType.APPEND, MessageType.VOTE_RESPONSE, MessageType.APPEND_RESPONSE, MessageType.HEARTBEAT]
)
def test_5_1_an_older_term_is_rejected(kind: MessageType) -> None:
    member = _member(term=5)
    member.node.step(Message(kind, to=1, from_=2, term=4, entries=[]))
    assert (member.node.raft.term, member.node.raft.leader, _answers(member)) == (5, 0, [])


# -- section 5.2: leader election ------------------------------------------------------------------------------------


def test_5_2_a_leader_sends_heartbeats() -> None:
    leader = _leader()
    leader.work()
    leader.node.tick()
    sent = _answers(leader)
    assert [(message.type, message.to) for message in sent] == [(MessageType.HEARTBEAT, 2), (MessageType.HEARTBEAT, 3)]


def test_5_2_a_follower_without_leader_campaigns_and_votes_for_itself() -> None:
    member = _member()
    for _ in range(10):
        member.node.tick()
    raft = member.node.raft
    assert (raft.role, raft.term, raft.vote) == (CANDIDATE, 1, 1)
    assert [(message.type, message.to) for message in _answers(member)] == [
        (MessageType.VOTE, 2),
        (MessageType.VOTE, 3),
    ]


@pytest.mark.parametrize(
    ("voters", "granted", "refused", "role"),
    [
        (1, 0, 0, LEADER),
        (3, 2, 0, LEADER),
        (3, 1, 0, LEADER),
        (3, 1, 1, LEADER),
        (3, 0, 0, CANDIDATE),
        (3, 0, 1, CANDIDATE),
        (3, 0, 2, FOLLOWER),
        (5, 4, 0, LEADER),
        (5, 2, 0, LEADER),
        (5, 2, 2, LEADER),
        (5, 1, 2, CANDIDATE),
        (5, 1, 3, FOLLOWER),
        (5, 0, 0, CANDIDATE),
    ],
)
def test_5_2_votes_decide(voters: int, granted: int, refused: int, role: StateRole) -> None:
    member = _member(voters=voters)
    member.node.campaign()
    member.work()
    for voter in range(2, 2 + granted + refused):
        if member.node.raft.role != LEADER:
            reject = voter >= 2 + granted
            member.node.step(Message(MessageType.VOTE_RESPONSE, to=1, from_=voter, term=1, reject=reject))
    assert member.node.raft.role == role


@pytest.mark.parametrize(("voted_for", "asks", "rejected"), [(0, 2, False), (0, 3, False), (2, 2, False), (2, 3, True)])
def test_5_2_one_vote_a_term_first_come_first_served(voted_for: int, asks: int, rejected: bool) -> None:
    member = _member()
    member.log.hard_state = HardState(term=1, vote=voted_for)
    member.crash()
    member.node.step(Message(MessageType.VOTE, to=1, from_=asks, term=1))
    assert [(message.to, message.reject) for message in _answers(member)] == [(asks, rejected)]


@pytest.mark.parametrize("term", [1, 2])
def test_5_2_a_candidate_follows_a_leader_of_its_term_or_a_later_one(term: int) -> None:
    member = _member()
    member.node.campaign()
    member.node.step(Message(MessageType.APPEND, to=1, from_=3, term=term))
    assert (member.node.raft.role, member.node.raft.term, member.node.raft.leader) == (FOLLOWER, term, 3)


def test_5_2_election_timeouts_are_spread_over_one_to_two_timeouts() -> None:
    member = _member(rng=random.Random(7))
    drawn = set()
    for term in range(1, 400):
        member.node.raft.become_follower(term, 0)
        drawn.add(member.node.raft.randomized_election_ticks)
    assert drawn == set(range(10, 20))


# -- section 5.3: log replication ------------------------------------------------------------------------------------


def test_5_3_a_proposal_is_appended_and_sent() -> None:
    leader = _leader()
    leader.work()
    for follower in (2, 3):
        leader.node.step(Message(MessageType.APPEND_RESPONSE, to=1, from_=follower, term=1, index=1))
    leader.work()
    leader.node.propose(b"x")
    ready, _ = leader.work()
    assert ready.entries == [Entry(1, 2, b"x")]
    assert [(message.to, message.index, message.log_term, message.entries) for message in ready.messages] == [
        (2, 1, 1, [Entry(1, 2, b"x")]),
        (3, 1, 1, [Entry(1, 2, b"x")]),
    ]


@pytest.mark.parametrize(
    ("voters", "acknowledge", "committed"),
    [(1, 0, True), (3, 0, False), (3, 1, True), (3, 2, True), (5, 1, False), (5, 2, True), (5, 4, True)],
)
def test_5_3_an_entry_on_a_majority_is_committed(voters: int, acknowledge: int, committed: bool) -> None:
    leader = _leader(voters=voters)
    leader.work()
    for follower in range(2, 2 + acknowledge):
        leader.node.step(Message(MessageType.APPEND_RESPONSE, to=1, from_=follower, term=1, index=1))
    assert leader.node.raft.log.committed == int(committed)


@pytest.mark.parametrize("terms", [(), (2,), (1, 2), (1,)])
def test_5_3_committing_commits_everything_before(terms: tuple[int, ...]) -> None:
    leader = _leader(*terms, term=2)
    leader.work()
    leader.node.propose(b"x")
    leader.work()
    last = len(terms) + 2
    leader.node.step(Message(MessageType.APPEND_RESPONSE, to=1, from_=2, term=3, index=last))
    leader.work()
    assert [entry.index for entry in leader.history] == list(range(1, last + 1))


@pytest.mark.parametrize(
    ("log_term", "index", "rejected", "hint"),
    [(0, 0, False, 0), (1, 1, False, 0), (2, 2, False, 0), (1, 2, True, 1), (3, 3, True, 2)],
)
def test_5_3_follower_checks_previous_entry_of_append(log_term: int, index: int, rejected: bool, hint: int) -> None:
    member = _member(1, 2, commit=0)
    member.node.step(Message(MessageType.APPEND, to=1, from_=2, term=2, log_term=log_term, index=index))
    (answer,) = _answers(member)
    assert (answer.type, answer.reject, answer.reject_hint) == (MessageType.APPEND_RESPONSE, rejected, hint)


@pytest.mark.parametrize(
    ("log_term", "index", "sent", "log", "unstable"),
    [
        # The follower has terms 1 2: what fits is kept, what conflicts is replaced, what is new is appended.
        (2, 2, [3], [1, 2, 3], [3]),
        (1, 1, [3, 4], [1, 3, 4], [3, 4]),
        (0, 0, [1], [1, 2], []),
        (0, 0, [3], [3], [3]),
        (0, 0, [1, 2, 4], [1, 2, 4], [4]),
    ],
)
def test_5_3_a_follower_appends(
    log_term: int, index: int, sent: list[int], log: list[int], unstable: list[int]
) -> None:
    member = _member(1, 2)
    entries = [Entry(term, at) for at, term in enumerate(sent, index + 1)]
    member.node.step(
        Message(MessageType.APPEND, to=1, from_=2, term=4, log_term=log_term, index=index, entries=entries)
    )
    raft = member.node.raft.log
    assert [entry.term for entry in raft.entries(1, raft.last_index + 1, 1 << 40)] == log
    assert [entry.term for entry in member.node.ready().entries] == unstable


@pytest.mark.parametrize(
    ("leader_commit", "sent", "committed"), [(1, 1, 1), (1, 2, 1), (2, 2, 2), (3, 1, 1), (0, 2, 0)]
)
def test_5_3_follower_commits_up_to_the_append(leader_commit: int, sent: int, committed: int) -> None:
    member = _member()
    entries = [Entry(1, index) for index in range(1, sent + 1)]
    member.node.step(Message(MessageType.APPEND, to=1, from_=2, term=1, entries=entries, commit=leader_commit))
    assert member.node.raft.log.committed == committed


# -- section 5.4: safety ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "log_term", "index", "rejected"),
    [
        # Same log, longer log of the same term, later term of any length.
        ((1,), 1, 1, False),
        ((1,), 1, 2, False),
        ((1, 1), 1, 1, True),
        ((1,), 2, 1, False),
        ((1,), 2, 2, False),
        ((1, 1), 2, 1, False),
        ((2,), 1, 1, True),
        ((2,), 1, 2, True),
        ((2, 2), 1, 9, True),
    ],
)
def test_5_4_1_votes_go_to_logs_that_are_as_good(
    log: tuple[int, ...], log_term: int, index: int, rejected: bool
) -> None:
    member = _member(*log)
    member.node.step(Message(MessageType.VOTE, to=1, from_=2, term=3, log_term=log_term, index=index))
    (answer,) = _answers(member)
    assert answer.reject is rejected


@pytest.mark.parametrize(("acknowledged", "committed"), [(1, 0), (2, 0), (3, 3)])
def test_5_4_2_only_entries_of_the_own_term_commit_by_counting(acknowledged: int, committed: int) -> None:
    leader = _leader(1, 2, term=2)
    leader.work()
    leader.node.step(Message(MessageType.APPEND_RESPONSE, to=1, from_=2, term=3, index=acknowledged))
    assert leader.node.raft.log.committed == committed
