"""A leader whose process is gone is replaced within ticks, and one whose disk hangs hands over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from raftkv.raft.types import NONE, Message, MessageType, StateRole
from raftkv.replica.node.leadership import LostLeader, StalledLeader
from raftkv.replica.node.waits import NodeSettings
from tests.replica.node.node_world import World

TICK_S = 60.0


class Timers:
    """Timers fired by the test."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self.set.append((delay_s, lambda: call(*arguments)))


async def follower_of(leader: int, **raft: Any) -> tuple[World, LostLeader, Timers]:
    world, timers = World(**raft), Timers()
    world.node.receive([world.heartbeat(leader)])
    await world.turns()
    loop: Any = timers
    return world, LostLeader(world.node, loop), timers


async def test_unreachable_leader_is_forgotten_and_an_election_starts_a_tick_later() -> None:
    world, lost_leader, timers = await follower_of(2)
    lost_leader.is_gone(2)
    await world.turns()
    assert world.node.leader == NONE
    assert not world.sender.take(MessageType.PRE_VOTE)
    ((delay_s, go_off),) = timers.set
    assert delay_s == TICK_S
    go_off()
    await world.turns()
    assert {message.to for message in world.sender.take(MessageType.PRE_VOTE)} == {2, 3}
    # Only a question: members that hear from the leader say no.
    assert world.node.term == 1


async def test_call_that_requires_a_leader_fails_after_an_election_timeout() -> None:
    """A watch that is opened between two leaders goes on: etcdctl's ends for good with the first refusal."""
    world, lost_leader, _ = await follower_of(2)
    lost_leader.is_gone(2)
    await world.turns()
    assert world.node.leader == NONE
    assert not world.node.is_leaderless
    world.node.leader_lost_at -= world.node.settings.election_s
    assert world.node.is_leaderless
    world.node.receive([world.heartbeat(2)])
    await world.turns()
    assert not world.node.is_leaderless


async def test_a_leader_that_is_heard_of_again_is_followed() -> None:
    world, lost_leader, timers = await follower_of(2)
    lost_leader.is_gone(2)
    await world.turns()
    world.node.receive([world.heartbeat(2)])
    await world.turns()
    timers.set[0][1]()
    await world.turns()
    assert not world.sender.take(MessageType.PRE_VOTE)
    assert (world.node.leader, world.node.role) == (2, StateRole.FOLLOWER)


async def test_voters_do_not_stand_together() -> None:
    world, lost_leader, timers = await follower_of(2)
    # The second of those that are left.
    world.node.settings = NodeSettings(3, TICK_S, 600.0)
    lost_leader.is_gone(2)
    assert timers.set[0][0] == 2 * TICK_S


@pytest.mark.parametrize(
    ("gone", "raft"),
    [(3, {}), (2, {"pre_vote": False}), (2, {"check_quorum": False}), (2, {"voters": (2, 3)})],
    ids=["a follower", "no pre-vote", "no check of the quorum", "no voter"],
)
async def test_otherwise_the_timeout_decides(gone: int, raft: dict[str, Any]) -> None:
    world, lost_leader, timers = await follower_of(2, **raft)
    lost_leader.is_gone(gone)
    await world.turns()
    assert world.node.leader == 2
    assert not timers.set


class Leader:
    """A leader of three whose disk hangs from its first entry on, and the looks of `StalledLeader`."""

    def __init__(self) -> None:
        self.world, self.timers = World(pre_vote=False), Timers()
        loop: Any = self.timers
        loop.create_task = asyncio.get_running_loop().create_task
        stalled = StalledLeader(self.world.node, loop, self.world.sender.connected_since)
        self.world.node.on_leader_change.append(stalled.leader_changed)

    async def elected(self) -> None:
        self.world.node.campaign()
        await self.world.turns()
        self.world.disk.held = []
        await self.hear(MessageType.VOTE_RESPONSE)

    async def hear(self, kind: MessageType, index: int = 0, voter: int = 2) -> None:
        node = self.world.node
        node.receive([Message(kind, to=node.settings.member_id, from_=voter, term=node.term, index=index)])
        await self.world.turns()

    async def look(self) -> list[Message]:
        _, go_off = self.timers.set.pop()
        go_off()
        await asyncio.sleep(0)
        await self.world.turns()
        return self.world.sender.take(MessageType.TIMEOUT_NOW)


async def test_leader_whose_disk_hangs_hands_over_once_the_others_commit_without_it() -> None:
    """Its heartbeats need no disk: it led on, and its clients, and leases, waited for the end of a sync."""
    leader = Leader()
    await leader.elected()
    assert leader.world.node.role == StateRole.LEADER
    assert [await leader.look(), await leader.look()] == [[], []], "no other member has the entry"
    for voter in (2, 3):
        await leader.hear(MessageType.APPEND_RESPONSE, index=1, voter=voter)
    assert leader.world.node.committed == 1
    assert [message.to for message in await leader.look()] == [2]


async def test_leader_whose_disk_is_slow_leads_on() -> None:
    leader = Leader()
    await leader.elected()
    await leader.look()
    await leader.hear(MessageType.APPEND_RESPONSE, index=1)
    for batch in leader.world.disk.held or []:
        batch.done()
    await leader.world.turns()
    assert [await leader.look(), await leader.look()] == [[], []]
