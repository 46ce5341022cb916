"""No message of another member, however odd, may stop a member."""

from __future__ import annotations

import pytest

from raftkv.errors import CorruptionError
from raftkv.raft.core import _LOCAL, WITHOUT_TERM
from raftkv.raft.types import ConfState, Entry, Message, MessageType, SnapshotMeta, StateRole
from raftkv.replica.codec import TERMS_AHEAD_MAX, BatchEncoder
from tests.replica.node.node_world import ME, World

FROM_OTHERS = [kind for kind in MessageType if kind not in _LOCAL and kind not in WITHOUT_TERM]


@pytest.mark.parametrize("pre_vote", [False, True])
@pytest.mark.parametrize("kind", FROM_OTHERS)
async def test_a_message_without_a_term_changes_nothing(kind: MessageType, pre_vote: bool) -> None:
    """The core takes such a message for one of its own: a candidate went back to term 0, and stopped the member."""
    world = World(pre_vote=pre_vote)
    world.node.receive([world.heartbeat(2, term=5)])
    await world.turns()
    world.node.raw.campaign()
    await world.turns()
    before = world.node.raw.status()
    assert before.role == (StateRole.PRE_CANDIDATE if pre_vote else StateRole.CANDIDATE)
    world.node.receive([Message(kind, to=ME, from_=2)])
    await world.turns()
    assert world.node.raw.status() == before
    assert world.failures == []


LARGEST = 2**64 - 1
"""What fits into a field of a message."""
ROLES = ("follower", "pre-candidate", "candidate", "leader")


async def _member(role: str) -> World:
    """A member in term 5, or 6 if it has campaigned, with two entries."""
    world = World(pre_vote=role != "candidate", check_quorum=True)
    entries = [Entry(5, 1, b""), Entry(5, 2, b"")]
    append = Message(MessageType.APPEND, to=ME, from_=2, term=5, entries=entries, commit=1)
    world.node.receive([world.heartbeat(2, term=5), append])
    await world.turns()
    if role != "follower":
        world.node.raw.campaign()
        await world.turns()
    if role == "leader":
        for kind in (MessageType.PRE_VOTE_RESPONSE, MessageType.VOTE_RESPONSE):
            world.node.receive([Message(kind, to=ME, from_=2, term=6)])
            await world.turns()
    assert world.node.raw.status().role.name.lower().replace("_", "-") == role
    return world


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", FROM_OTHERS)
async def test_impossible_numbers_stop_no_member_and_leave_later_terms(kind: MessageType, role: str) -> None:
    """etcd 3.5 panics on such a commit index, and goes to the last term there is, behind which comes term 0."""
    bound = 6 + 2 * TERMS_AHEAD_MAX
    for term in (7, 6 + TERMS_AHEAD_MAX, 2**63, LARGEST):
        for at in (0, LARGEST):
            for reject in (False, True):
                world = await _member(role)
                if role == "leader":
                    assert world.node.raw.raft.term == 6
                entries = [Entry(term, LARGEST, b"x") if at else Entry(5, 1)] if kind is MessageType.APPEND else []
                numbers = {"index": at, "log_term": at, "commit": at, "reject_hint": at}
                forged = Message(kind, ME, 2, term=term, reject=reject, entries=entries, **numbers)
                world.node.receive([forged])
                await world.turns()
                for _ in range(25):
                    world.node.raw.tick()
                world.node._wake()
                await world.turns()
                assert world.failures == []
                assert world.node.raw.raft.term < bound
                assert b"".join(BatchEncoder().batches(world.sender.sent))


@pytest.mark.parametrize(
    ("role", "kind"),
    [("leader", MessageType.APPEND_RESPONSE), ("follower", MessageType.HEARTBEAT), ("follower", MessageType.APPEND)],
)
async def test_numbers_beyond_any_log_in_the_present_term(role: str, kind: MessageType) -> None:
    world = await _member(role)
    term = world.node.raw.raft.term
    world.node.receive([Message(kind, ME, 2, term=term, index=LARGEST, log_term=LARGEST, commit=LARGEST)])
    await world.turns()
    assert world.failures == []
    assert world.node.raw.raft.log.committed <= 2


async def test_entries_of_a_later_term_than_their_leader_are_not_taken() -> None:
    """A log that ends with the last term there is would win every election."""
    world = await _member("follower")
    entries = [Entry(5, 3, b""), Entry(LARGEST, 4, b"")]
    world.node.receive([Message(MessageType.APPEND, ME, 2, term=5, index=2, log_term=5, entries=entries)])
    await world.turns()
    assert world.failures == []
    assert world.node.raw.raft.log.last_index == 2


async def test_no_log_or_database_has_a_later_term_than_its_member() -> None:
    """Such a candidate would win over every log, and such a database would begin one that wins every election."""
    world = await _member("follower")
    world.node.receive([Message(MessageType.VOTE, ME, 3, term=6, index=9, log_term=7, context=b"CampaignTransfer")])
    await world.turns()
    assert not any(message.type == MessageType.VOTE_RESPONSE for message in world.sender.sent)
    database = SnapshotMeta(9, LARGEST, ConfState(voters=(1, 2, 3)))
    world.node.receive([Message(MessageType.SNAPSHOT, ME, 2, term=5, snapshot=database)])
    await world.turns()
    assert (world.failures, world.installing, world.node.raw.raft.log.last_index) == ([], [], 2)


async def test_member_with_lost_log_entries_reports_itself_lost() -> None:
    """An old copy of the data. The disk is not marked: a flipped bit of the leader may have made the message."""
    world = await _member("follower")
    world.node.receive([world.heartbeat(2, term=5, commit=9)])
    (failure,) = world.failures
    assert isinstance(failure, CorruptionError)
    assert "the log ends at 2" in str(failure)
    assert all(index <= 2 for index, _ in world.noted)
