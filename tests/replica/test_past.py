"""What a member has promised, and what it states, when its data is an older copy."""

from __future__ import annotations

import pytest

from raftkv.raft.log import MemoryLog
from raftkv.raft.types import ConfState, Message, MessageType, RaftConfig, StateRole
from raftkv.replica.membership import past
from tests.raft.member import FixedRandom, Member


@pytest.fixture
def deposed() -> Member:
    """Member 1, which led term 1 by the vote of 2, who acknowledged its first entry; 3 leads term 2."""
    log = MemoryLog(conf_state=ConfState(voters=(1, 2, 3)))
    member = Member(RaftConfig(id=1, pre_vote=False), log, FixedRandom(0))
    member.node.campaign()
    member.work()
    member.node.step(Message(MessageType.VOTE_RESPONSE, to=1, from_=2, term=1))
    member.work()
    member.node.step(Message(MessageType.APPEND_RESPONSE, to=1, from_=2, term=1, index=1))
    member.work()
    member.node.step(Message(MessageType.VOTE, to=1, from_=3, term=2, log_term=1, index=1))
    member.node.step(Message(MessageType.HEARTBEAT, to=1, from_=3, term=2))
    member.work()
    assert member.node.raft.role == StateRole.FOLLOWER
    return member


@pytest.mark.parametrize(
    ("sender", "stated", "is_refused"),
    [
        (2, "1/1", False),
        (2, "7/9", False),
        (2, "0/1", True),
        (2, "1/0", True),
        (2, "9/0", True),
        (3, "2/0", False),
        (3, "1/5", True),
        (4, "0/0", False),
        (2, "", False),
        (2, "-1/x", False),
    ],
)
def test_member_is_refused_below_its_promises(deposed: Member, sender: int, stated: str, is_refused: bool) -> None:
    text = past.refusal(deposed.node.raft, sender, {past.LOG_KEY: stated} if stated else {})
    assert bool(text) == is_refused == past.is_refusal(text)


def test_statement_of_a_member_does_not_refuse_it(deposed: Member) -> None:
    assert past.refusal(deposed.node.raft, 1, dict(past.statement(deposed.node.raft))) == ""
