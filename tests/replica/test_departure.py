"""When a member stops because another reports its removal."""

from __future__ import annotations

from raftkv.apply.membership import Membership
from raftkv.errors import MemberRemovedError
from raftkv.pb import rpc_pb2
from raftkv.replica.membership.presence import Departure
from tests.replica.node.node_world import World


async def test_a_member_that_hears_its_leader_is_not_removed_by_the_word_of_another() -> None:
    """A survivor that was forced to go on alone said so when the network healed: a quorum stopped for good."""
    world, ended = World(check_quorum=True), []
    membership = Membership(world.machine.store)
    membership.bootstrap([rpc_pb2.Member(ID=1, name="a", peerURLs=["http://10.0.0.1:2380"])])
    departure = Departure(1, membership, lambda: ended.append("left"), lambda: world.node.hears_leader)
    world.node.receive([world.heartbeat(2)])
    await world.turns()
    assert not departure.refused(f"permission denied: {MemberRemovedError.text}")
    assert ended == []
    # A leader that has removed it sends it nothing more.
    for _ in range(25):
        world.node.raw.tick()
    await world.turns()
    assert departure.refused(f"permission denied: {MemberRemovedError.text}")
    assert ended == ["left"]
