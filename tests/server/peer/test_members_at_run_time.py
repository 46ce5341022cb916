"""Peers are added, removed and moved while a member runs; a removed peer is refused with the text that stops it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv.errors import MemberRemovedError
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.raft.types import Message, MessageType
from raftkv.replica.membership.versions import Versions
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.server.peer import service, transport
from raftkv.server.peer.service import PeerService
from raftkv.server.peer.transport import Transport
from tests.rpc.loop import until

CLUSTER, OWN, OTHER = 9, 1, 2
ASKED_BY_MEMBERS = ("LeaseRenew", "LeaseTimeToLive", "LeaseShorten", "MemberPromote", "MemberReplace", "Figures")
ASKED = (*ASKED_BY_MEMBERS, "SnapshotOffset", "HashKV")
"""What is asked of a peer port by one call."""


async def _done(_data: bytes, _call: UnaryCall) -> bytes:
    return b"done"


class Receiver:
    """The other end: a peer port with members that the test changes."""

    def __init__(self) -> None:
        self.members = SimpleNamespace(
            members={OWN: rpc_pb2.Member(ID=OWN), OTHER: rpc_pb2.Member(ID=OTHER)},
            removed=set(),
            version_of=lambda _: "",
        )
        self.received: list[Message] = []
        anything: Any = None
        self.versions = Versions(self.members, OTHER)
        asked = {SERVICES["raftkvpb.Peer"][name].path: _done for name in ASKED}
        self.service = PeerService(CLUSTER, OTHER, self.members, self.received.extend, anything, asked, self.versions)
        self.server = Server()
        self.service.register(self.server)

    async def listen(self) -> str:
        ((_, port),) = await self.server.listen("127.0.0.1", 0)
        return f"http://127.0.0.1:{port}"

    def remove(self, member_id: int) -> None:
        del self.members.members[member_id]
        self.members.removed.add(member_id)
        self.service.follow(self.members.members, self.members.removed)


@pytest.fixture
@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    yield receiver
    await receiver.server.close(0.0)


@pytest.fixture
def refusals() -> list[str]:
    return []


@pytest.fixture
@asynccontextmanager
async def network(refusals: list[str]) -> AsyncIterator[Transport]:
    network = Transport(CLUSTER, OWN, None, lambda peer: None, lambda message: None, refusals.append)
    yield network
    await network.close()


def member(url: str) -> dict[int, rpc_pb2.Member]:
    return {
        OWN: rpc_pb2.Member(ID=OWN, peerURLs=["http://127.0.0.1:1"]),
        OTHER: rpc_pb2.Member(ID=OTHER, peerURLs=[url]),
    }


async def connected(network: Transport) -> None:
    await until(lambda: network.connected_since(OTHER) is not None)


async def test_a_peer_that_moved_is_followed_to_its_new_url(receiver, network, monkeypatch):
    url = await receiver.listen()
    network.follow(member("http://127.0.0.1:1"))
    assert set(network.peers) == {OTHER}
    before = network.peers[OTHER]
    network.follow(member("http://127.0.0.1:1"))
    assert network.peers[OTHER] is before, "nothing changed"
    network.follow(member(url))
    await connected(network)
    network.send([Message(MessageType.HEARTBEAT, to=OTHER, from_=OWN, term=1)])
    await until(lambda: bool(receiver.received))


async def test_a_peer_that_left_is_sent_to_for_a_moment_and_then_forgotten(receiver, network, monkeypatch):
    monkeypatch.setattr(transport, "LEAVING_S", 0.05)
    network.follow(member(await receiver.listen()))
    await connected(network)
    network.follow({OWN: rpc_pb2.Member(ID=OWN)})
    network.follow({OWN: rpc_pb2.Member(ID=OWN)})
    network.send([Message(MessageType.HEARTBEAT, to=OTHER, from_=OWN, term=1)])
    await until(lambda: bool(receiver.received))
    await until(lambda: not network.peers)
    network.send([Message(MessageType.HEARTBEAT, to=OTHER, from_=OWN, term=1)])


async def test_the_stream_of_a_removed_member_ends_with_the_words_that_end_it(receiver, network, refusals, monkeypatch):
    monkeypatch.setattr(service, "LEAVING_S", 0.05)
    network.follow(member(await receiver.listen()))
    await connected(network)
    receiver.remove(OWN)
    # The end of the open stream, and the refusal of each new one.
    await until(lambda: len(refusals) >= 2)
    assert set(refusals) == {f"raftkv: {MemberRemovedError.text}"}


async def test_a_member_that_is_removed_while_its_stream_opens_is_told(receiver, network, refusals, monkeypatch):
    monkeypatch.setattr(service, "LEAVING_S", 0.05)

    def removed(_member_id: int, _urls: str) -> None:
        if OWN in receiver.members.members:
            receiver.remove(OWN)

    monkeypatch.setattr(receiver.service, "_heard_of", removed)
    network.follow(member(await receiver.listen()))
    await until(lambda: bool(refusals))
    assert refusals[0] == f"raftkv: {MemberRemovedError.text}"


async def test_new_member_is_answered_however_many_strangers_have_called(receiver, network):
    """Sixteen calls under ids of no member took the places of all members that came later, for good."""
    url = await receiver.listen()
    for stranger in range(100, 100 + 2 * transport.GUESTS_MAX):
        network.heard_of(stranger, "http://127.0.0.1:1")
    assert len(network.peers) == transport.GUESTS_MAX
    network.heard_of(OTHER, url)
    await connected(network)
    for stranger in range(200, 200 + transport.GUESTS_MAX):
        network.heard_of(stranger, "http://127.0.0.1:1")
    assert network.connected_since(OTHER) is not None, "one that answers stays"
    assert len(network.peers) == transport.GUESTS_MAX
