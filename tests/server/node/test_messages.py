"""What other members send must not stop one, however odd it is."""

from __future__ import annotations

import pytest

from raftkv.raft.core import WITHOUT_TERM
from raftkv.raft.raw_node import _LOCAL
from raftkv.raft.types import Message, MessageType, StateRole
from tests.rpc.loop import on_loop
from tests.server.node.node_world import ME, World

FROM_OTHERS = [kind for kind in MessageType if kind not in _LOCAL and kind not in WITHOUT_TERM]


@pytest.mark.parametrize("pre_vote", [False, True])
@pytest.mark.parametrize("kind", FROM_OTHERS)
@on_loop
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
