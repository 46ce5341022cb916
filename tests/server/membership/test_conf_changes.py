"""Membership changes in one member's loop: one at a time, each with its outcome, for any entries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.membership import Change, conf_change_of
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft import confchange
from raftkv.raft.types import (
    ConfChange,
    ConfChangeSingle,
    ConfChangeType,
    ConfState,
    Entry,
    EntryType,
    HardState,
    Message,
    MessageType,
    SnapshotMeta,
)
from raftkv.replica.node import conf_changes
from tests.replica.node.node_world import ME, SETTINGS, Caller, World


def add(member: int, learner: bool = True) -> raft_pb2.MembershipChange:
    added = rpc_pb2.Member(ID=member, peerURLs=[f"http://m{member}:1"], isLearner=learner)
    return raft_pb2.MembershipChange(changes=[Change(kind=Change.ADD, member=added)])


def remove(member: int) -> raft_pb2.MembershipChange:
    return raft_pb2.MembershipChange(changes=[Change(kind=Change.REMOVE, member=rpc_pb2.Member(ID=member))])


async def leader() -> World:
    """The only voter of its cluster, leading it."""
    world = World(voters=(ME,))
    world.node.applier.membership.bootstrap([rpc_pb2.Member(ID=ME, name="me", peerURLs=["http://m1:1"])])
    world.node.raw.campaign()
    world.node.start()
    await world.turns()
    assert world.node.leader == ME
    return world


@pytest.fixture
@asynccontextmanager
async def world() -> AsyncIterator[World]:
    world = await leader()
    yield world
    world.node.stop()
    assert world.failures == []


def ids(caller: Caller) -> list[int]:
    assert isinstance(caller.outcome, Outcome), caller.outcome
    assert caller.outcome.error is None
    return [member.ID for member in rpc_pb2.MemberListResponse.FromString(caller.outcome.body).members]


async def test_two_changes_at_once_are_applied_one_after_the_other(world: World) -> None:
    callers = [Caller() for _ in range(3)]
    world.disk.held = []  # the first is in the log and not applied when the next are asked for
    for caller, record in zip(callers, (add(5), add(6), remove(5)), strict=True):
        world.node.submit_change(record, caller)
        await world.turns()
    held, world.disk.held = world.disk.held, None
    assert len(held) == 1
    world.disk.outstanding = 0
    held[0].done()
    await world.turns()
    assert [ids(caller) for caller in callers] == [[ME, 5], [ME, 5, 6], [ME, 6]]
    assert world.node.conf_state == ConfState(voters=(ME,), learners=(6,))


async def test_outdated_change_is_refused_and_next_proceeds(world: World) -> None:
    first, again, last, other = (Caller() for _ in range(4))
    for caller, record in ((first, add(5)), (again, add(5)), (last, remove(ME)), (other, add(6))):
        world.node.submit_change(record, caller)
    await world.turns()
    assert ids(other) == [ME, 5, 6]
    errors_found = [each.outcome.error for each in (again, last) if isinstance(each.outcome, Outcome)]
    assert list(map(type, errors_found)) == [errors.MemberExistsError, errors.NotEnoughStartedMembersError]


async def test_forwarded_change_waits_for_its_turn(world: World) -> None:
    entries = []
    for member in (5, 6):
        change = conf_change_of(add(member))
        entries.append(Entry(0, 0, confchange.encode(change), confchange.entry_type(change)))
    world.node.receive([Message(MessageType.PROPOSE, to=ME, from_=5, entries=[entry]) for entry in entries])
    await world.turns()
    assert world.node.conf_state.learners == (5, 6)


def test_expired_forwarded_change_is_dropped() -> None:
    """Drop what its caller was told has failed: it was kept while the leader had no quorum, and took effect after."""

    async def scenario() -> None:
        loop, passed_s = asyncio.get_running_loop(), [0.0]
        clock = loop.time
        vars(loop).update(time=lambda: clock() + passed_s[0])
        world = await leader()
        first, world.disk.held = Caller(), []
        world.node.submit_change(add(5), first)
        await world.turns()
        for member, more_s in ((6, SETTINGS.request_timeout_s - 1), (7, 2.0)):
            change = conf_change_of(add(member))
            entry = Entry(0, 0, confchange.encode(change), confchange.entry_type(change))
            world.node.receive([Message(MessageType.PROPOSE, to=ME, from_=5, entries=[entry])])
            await world.turns()
            passed_s[0] += more_s
        held, world.disk.held, world.disk.outstanding = world.disk.held, None, 0
        held[0].done()
        await world.turns()
        assert world.node.conf_state.learners == (5, 7)
        world.node.stop()
        assert world.failures == []

    asyncio.run(scenario())  # the clock of the loop is set beyond the time that a test may take


@pytest.mark.parametrize("kind", list(ConfChangeType))
async def test_forwarded_change_of_voters_alone_is_dropped(world: World, kind: ConfChangeType) -> None:
    """Drop a change without a caller: previously voters changed without a right, and the members shown did not."""
    change = ConfChange((ConfChangeSingle(kind, 5),))
    entry = Entry(0, 0, confchange.encode(change), confchange.entry_type(change))
    world.node.receive([Message(MessageType.PROPOSE, to=ME, from_=2, entries=[entry])])
    await world.turns()
    assert world.node.conf_state == ConfState(voters=(ME,))
    assert world.node.conf_changed_at == 0
    assert world.node.proposals_dropped == 1


@pytest.mark.parametrize("data", [b"\xff", b"\x01\x00\x00\x01", b"\x01\x00\x00\x00garbage"])
async def test_garbage_in_the_log_changes_nothing_and_stops_no_member(data: bytes) -> None:
    """A member that follows: a leader's own check would not let such an entry in."""
    world = World()
    entry = Entry(1, 1, data, EntryType.CONF_CHANGE)
    world.node.receive([Message(MessageType.APPEND, to=ME, from_=2, term=1, entries=[entry], commit=1)])
    await world.turns()
    assert world.failures == []
    assert (world.node.applied, world.node.conf_state) == (1, ConfState(voters=(1, 2, 3)))
    world.node.stop()


async def test_an_empty_member_is_sent_the_database_once_a_member_is_no_founder(world: World) -> None:
    assert world.log.first_index() == 1
    caller = Caller()
    world.node.submit_change(add(5), caller)
    await world.turns()
    assert world.log.first_index() == 2
    probe = world.sender.take(MessageType.APPEND)[0]
    world.node.receive([Message(MessageType.APPEND_RESPONSE, to=ME, from_=5, term=1, index=probe.index, reject=True)])
    await world.turns()
    assert world.sender.take(MessageType.SNAPSHOT)


async def test_waits_end_and_too_many_are_refused() -> None:
    world = World()  # a follower without a leader
    callers = [Caller() for _ in range(conf_changes.WAITING_MAX)]
    for number, caller in enumerate(callers):
        world.node.submit_change(add(10 + number), caller)
    with pytest.raises(errors.TooManyRequestsError):
        world.node.submit_change(add(9), Caller())
    world.node.stop()
    assert {type(caller.outcome) for caller in callers} == {errors.StoppedError}


async def test_an_added_member_is_told_apart_after_a_restart(world: World) -> None:
    """What a change did is in the same batch of the database as its index."""
    caller = Caller()
    world.node.submit_change(add(5), caller)
    await world.turns()
    store = world.machine.store
    assert store.conf_state == ConfState(voters=(ME,), learners=(5,))
    assert store.applied_index == world.node.applied
    assert world.log.hard_state == HardState(1, ME, world.log.hard_state.commit)
    assert world.log.conf_state == ConfState(voters=(ME,), learners=(5,))


@asynccontextmanager
async def following(caller: Caller, asked_for: raft_pb2.MembershipChange) -> AsyncIterator[World]:
    """A follower of three, in which a change was requested when 2 led in term 1."""
    world = World()
    founders = [rpc_pb2.Member(ID=one, name=f"m{one}", peerURLs=[f"http://m{one}:1"]) for one in (1, 2, 3)]
    world.node.applier.membership.bootstrap(founders)
    world.node.receive([world.heartbeat(leader=2)])
    world.node.submit_change(asked_for, caller)
    await world.turns()
    assert [message.to for message in world.sender.sent if message.type is MessageType.PROPOSE] == [2]
    yield world
    world.node.stop()
    assert world.failures == []


@pytest.fixture
def caller() -> Caller:
    return Caller()


@pytest.fixture
def follower(caller: Caller) -> AbstractAsyncContextManager[World]:
    return following(caller, add(5))


def append(leader: int, term: int, *entries: Entry) -> Message:
    """What a new leader sends to one that has nothing: all of its log, committed."""
    commit = len(entries)
    return Message(MessageType.APPEND, to=ME, from_=leader, term=term, entries=list(entries), commit=commit)


async def passed_on(world: World, *messages: Message) -> list[Message]:
    """What a follower passes on once it has these messages."""
    world.sender.sent.clear()
    world.node.receive(messages)
    await world.turns()
    return world.sender.take(MessageType.PROPOSE)


async def test_a_change_whose_leader_is_lost_is_passed_on_to_the_next(follower: World, caller: Caller) -> None:
    (first,) = [message for message in follower.sender.sent if message.type is MessageType.PROPOSE]
    # What the leader before had in its log may be committed yet, until there is an entry of the next.
    assert not await passed_on(follower, follower.heartbeat(leader=3, term=2))
    (again,) = await passed_on(follower, append(3, 2, Entry(2, 1, b"")))
    assert (again.to, [entry.data for entry in again.entries]) == (3, [entry.data for entry in first.entries])
    assert not await passed_on(follower, follower.heartbeat(leader=3, term=2))
    assert caller.outcome is None


async def test_new_urls_are_passed_on_once(caller: Caller) -> None:
    """A late copy, to an earlier leader that leads again, would undo later changes."""
    member = rpc_pb2.Member(ID=2, peerURLs=["http://other:1"])
    change = raft_pb2.MembershipChange(changes=[Change(kind=Change.UPDATE, member=member)])
    async with following(caller, change) as follower:
        assert not await passed_on(follower, append(3, 2, Entry(2, 1, b"")))
        assert caller.outcome is None


async def test_a_change_is_passed_on_again_once_there_is_another_connection_to_the_leader(follower: World) -> None:
    assert not await passed_on(follower, append(2, 1, Entry(1, 1, b"")))
    follower.sender.since = follower.sender.backlog = None
    assert not await passed_on(follower, follower.heartbeat(leader=2))
    follower.sender.since, follower.sender.backlog = 9.0, 0
    assert len(await passed_on(follower, follower.heartbeat(leader=2))) == 1
    assert not await passed_on(follower, follower.heartbeat(leader=2))


async def test_change_is_not_forwarded_without_connection_to_leader() -> None:
    world = World()
    world.sender.since = world.sender.backlog = None
    world.node.submit_change(add(5), Caller())
    assert not await passed_on(world, world.heartbeat(leader=2))
    world.sender.since = world.sender.backlog = 0
    assert len(await passed_on(world, world.heartbeat(leader=2))) == 1
    world.node.stop()


async def test_a_change_that_the_leader_before_had_in_its_log_is_not_passed_on_again(follower, caller):
    (first,) = [message for message in follower.sender.sent if message.type is MessageType.PROPOSE]
    (entry,) = first.entries
    log = [Entry(1, 1, entry.data, entry.type), Entry(2, 2, b"")]
    assert not await passed_on(follower, append(3, 2, *log))
    assert ids(caller) == [1, 2, 3, 5]


async def test_a_change_is_not_passed_on_again_if_a_received_database_may_have_it(follower: World) -> None:
    meta = SnapshotMeta(10, 2, ConfState(voters=(1, 2, 3), learners=(5,)))
    assert not await passed_on(follower, Message(MessageType.SNAPSHOT, to=ME, from_=3, term=2, snapshot=meta))
    follower.installing[0][1]()
    assert not await passed_on(follower, follower.heartbeat(leader=3, term=2))
    assert follower.node.applied == 10


async def test_an_abandoned_change_is_not_forwarded_again(follower: World) -> None:
    follower.node.withdraw(1)
    assert not await passed_on(follower, append(3, 2, Entry(2, 1, b"")))


async def test_a_leader_takes_a_request_of_another_member_once(world: World) -> None:
    record = add(5)
    record.request_id = 77
    change = conf_change_of(record)
    entry = Entry(0, 0, confchange.encode(change), confchange.entry_type(change))
    for _ in range(2):
        world.node.receive([Message(MessageType.PROPOSE, to=ME, from_=5, entries=[entry])])
        await world.turns()
    assert world.node.conf_state.learners == (5,)
    assert world.log.last_index() == 2, "its own entry, and the change"


async def test_a_follower_forwards_no_change_of_another_member(follower: World) -> None:
    """The asked member passes it on itself, so it would come late, and a second time."""
    change = conf_change_of(add(6))
    entry = Entry(0, 0, confchange.encode(change), confchange.entry_type(change))
    assert not await passed_on(follower, Message(MessageType.PROPOSE, to=ME, from_=3, entries=[entry]))
    assert follower.node.proposals_dropped == 1
