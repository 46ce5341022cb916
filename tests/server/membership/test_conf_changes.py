"""Changes on their way through one member's loop: one at a time, each with its outcome, whatever the entries hold."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.membership import Change, conf_change_of
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft import confchange
from raftkv.raft.types import ConfState, Entry, EntryType, HardState, Message, MessageType
from raftkv.server.node import conf_changes
from tests.server.node.node_world import ME, Caller, World


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


def play(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = await leader()
        await scenario(world)
        world.node.stop()
        assert world.failures == []

    asyncio.run(run())


def ids(caller: Caller) -> list[int]:
    assert isinstance(caller.outcome, Outcome), caller.outcome
    assert caller.outcome.error is None
    return [member.ID for member in rpc_pb2.MemberListResponse.FromString(caller.outcome.body).members]


def test_two_changes_at_once_are_applied_one_after_the_other() -> None:
    async def scenario(world: World) -> None:
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

    play(scenario)


def test_a_change_that_is_not_valid_any_more_is_refused_and_the_next_goes_on() -> None:
    async def scenario(world: World) -> None:
        first, again, last, other = (Caller() for _ in range(4))
        for caller, record in ((first, add(5)), (again, add(5)), (last, remove(ME)), (other, add(6))):
            world.node.submit_change(record, caller)
        await world.turns()
        assert ids(other) == [ME, 5, 6]
        errors_found = [each.outcome.error for each in (again, last) if isinstance(each.outcome, Outcome)]
        assert list(map(type, errors_found)) == [errors.MemberExistsError, errors.NotEnoughStartedMembersError]

    play(scenario)


def test_what_a_follower_passed_on_waits_for_its_turn() -> None:
    async def scenario(world: World) -> None:
        entries = []
        for member in (5, 6):
            change = conf_change_of(add(member))
            entries.append(Entry(0, 0, confchange.encode(change), confchange.entry_type(change)))
        world.node.receive([Message(MessageType.PROPOSE, to=ME, from_=5, entries=[entry]) for entry in entries])
        await world.turns()
        assert world.node.conf_state.learners == (5, 6)

    play(scenario)


@pytest.mark.parametrize("data", [b"\xff", b"\x01\x00\x00\x01", b"\x01\x00\x00\x00garbage"])
def test_garbage_in_the_log_changes_nothing_and_stops_nobody(data: bytes) -> None:
    """A member that follows: a leader's own check would not let such an entry in."""

    async def scenario() -> None:
        world = World()
        entry = Entry(1, 1, data, EntryType.CONF_CHANGE)
        world.node.receive([Message(MessageType.APPEND, to=ME, from_=2, term=1, entries=[entry], commit=1)])
        await world.turns()
        assert world.failures == []
        assert (world.node.applied, world.node.conf_state) == (1, ConfState(voters=(1, 2, 3)))
        world.node.stop()

    asyncio.run(scenario())


def test_who_has_nothing_is_sent_the_database_once_there_is_a_member_that_is_no_founder() -> None:
    async def scenario(world: World) -> None:
        assert world.log.first_index() == 1
        caller = Caller()
        world.node.submit_change(add(5), caller)
        await world.turns()
        assert world.log.first_index() == 2
        probe = world.sender.take(MessageType.APPEND)[0]
        world.node.receive(
            [Message(MessageType.APPEND_RESPONSE, to=ME, from_=5, term=1, index=probe.index, reject=True)]
        )
        await world.turns()
        assert world.sender.take(MessageType.SNAPSHOT)

    play(scenario)


def test_nobody_waits_for_ever_and_too_many_are_refused() -> None:
    async def scenario() -> None:
        world = World()  # a follower without a leader
        callers = [Caller() for _ in range(conf_changes.WAITING_MAX)]
        for number, caller in enumerate(callers):
            world.node.submit_change(add(10 + number), caller)
        with pytest.raises(errors.TooManyRequestsError):
            world.node.submit_change(add(9), Caller())
        world.node.stop()
        assert {type(caller.outcome) for caller in callers} == {errors.StoppedError}

    asyncio.run(scenario())


def test_who_was_added_is_told_apart_after_a_restart() -> None:
    """What a change did is in the same batch of the database as its index."""

    async def scenario(world: World) -> None:
        caller = Caller()
        world.node.submit_change(add(5), caller)
        await world.turns()
        store = world.machine.store
        assert store.conf_state == ConfState(voters=(ME,), learners=(5,))
        assert store.applied_index == world.node.applied
        assert world.log.initial_state() == (
            HardState(1, ME, world.log.initial_state()[0].commit),
            ConfState(voters=(ME,), learners=(5,)),
        )

    play(scenario)
