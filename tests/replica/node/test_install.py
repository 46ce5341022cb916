"""While a received database replaces the state, the loop keeps running; work on the new state waits."""

from __future__ import annotations

from raftkv.raft.types import ConfState, Entry, Message, MessageType, SnapshotMeta
from tests.replica.node.node_world import ME, World

CONF = ConfState(voters=(1, 2, 3))


def snapshot(index: int, term: int = 1, leader: int = 2) -> Message:
    return Message(MessageType.SNAPSHOT, to=ME, from_=leader, term=term, snapshot=SnapshotMeta(index, term, CONF))


def append(index: int, commit: int, count: int = 1) -> Message:
    entries = [Entry(1, index + 1 + number, b"") for number in range(count)]
    return Message(
        MessageType.APPEND, to=ME, from_=2, term=1, log_term=min(index, 1), index=index, entries=entries, commit=commit
    )


async def test_only_heartbeats_are_answered_while_a_database_is_installed(world: World) -> None:
    world.node.receive([snapshot(10)])
    assert world.node.awaits_snapshot(10)
    await world.turns()
    ((meta, done),) = world.installing
    assert meta.index == 10
    assert world.node.awaits_snapshot(10)
    assert not world.node.awaits_snapshot(9)
    for _ in range(3):
        world.node.receive([world.heartbeat(leader=2, commit=10)])
        world.node._tick()
        await world.turns()
        assert len(world.sender.take(MessageType.HEARTBEAT_RESPONSE)) == 1
    world.node.receive([append(10, commit=12, count=3)])
    await world.turns()
    assert not world.sender.take(MessageType.APPEND_RESPONSE)
    assert (world.node.applied, world.log.last_index(), world.noted) == (0, 13, [])
    done()
    assert (world.node.applied, world.noted) == (10, [(10, 1)])
    await world.turns()
    assert [message.index for message in world.sender.take(MessageType.APPEND_RESPONSE)] == [10, 13]
    assert world.node.applied == 12
    assert not world.node.awaits_snapshot(10)
    assert not world.failures


async def test_newer_snapshot_is_installed_after_the_current_one(world: World) -> None:
    world.node.receive([snapshot(10)])
    await world.turns()
    world.node.receive([snapshot(20, term=2, leader=3)])
    await world.turns()
    assert [meta.index for meta, _ in world.installing] == [10]
    assert world.node.awaits_snapshot(20)
    world.installing[0][1]()
    await world.turns()
    assert [meta.index for meta, _ in world.installing] == [10, 20]
    assert world.node.applied == 10
    world.installing[1][1]()
    await world.turns()
    assert world.node.applied == 20
    assert [message.index for message in world.sender.take(MessageType.APPEND_RESPONSE)][-1] == 20
    assert not world.failures


async def test_of_several_each_is_awaited_until_it_is_in_place(world: World) -> None:
    """The second of three was not, so its file went if it was sent again meanwhile: the member stopped."""
    for term, index in enumerate((10, 20, 30), 1):
        world.node.receive([snapshot(index, term, leader=2 + term % 2)])
        await world.turns()
    awaited = [[index for index in (10, 20, 30) if world.node.awaits_snapshot(index)]]
    for number in range(3):
        world.installing[number][1]()
        await world.turns()
        awaited.append([index for index in (10, 20, 30) if world.node.awaits_snapshot(index)])
    assert awaited == [[10, 20, 30], [20, 30], [30], []]
    assert not world.failures


async def test_one_that_is_of_no_use_is_not_awaited(world: World) -> None:
    world.node.receive([append(0, commit=3, count=3)])
    await world.turns()
    world.node.receive([snapshot(2)])
    assert not world.node.awaits_snapshot(2)
    await world.turns()
    assert not world.installing
    assert not world.failures


async def test_nothing_begins_before_the_marker_is_durable(world: World) -> None:
    world.disk.held = []
    world.node.receive([snapshot(10)])
    await world.turns()
    assert not world.installing
    (batch,) = world.disk.held
    batch.done()
    assert [meta.index for meta, _ in world.installing] == [10]
