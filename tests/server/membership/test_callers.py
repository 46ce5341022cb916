"""Who asks for a change of the members travels with what a member passes on to the leader."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.auth.caller import MEMBER, Caller
from raftkv.apply.membership import Membership, conf_change_of
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft.types import StateRole
from raftkv.rpc.status import RpcError
from raftkv.server.membership.changes import CALLER, Changes, Ways, _caller_metadata, forwarded_caller
from raftkv.storage.backend.memory import MemoryBackend
from raftkv.storage.mvcc import Store


@pytest.mark.parametrize("caller", [None, MEMBER, Caller(b"root", 3), Caller("ä.b\n".encode() + b"\xff", 2**64 - 1)])
def test_the_leader_is_told_who_asks(caller: Caller | None) -> None:
    metadata = dict(_caller_metadata(caller))
    assert all(value.isascii() and value.isprintable() for value in metadata.values())
    assert forwarded_caller(metadata) == caller


@pytest.mark.parametrize("text", ["", "zz.1", "00", "00.", "00.x", "."])
def test_what_names_nobody_is_refused(text: str) -> None:
    with pytest.raises(errors.MalformedEntryError):
        forwarded_caller({CALLER: text})


class Channel:
    """Notes what the leader is asked, and how often; ``refusal`` is its answer, if it refuses."""

    def __init__(self, refusal: errors.StatusError | None = None) -> None:
        self.metadata: dict[str, str] = {}
        self.asked = 0
        self._refusal = refusal

    async def unary(self, path: str, data: bytes, timeout_s: float, metadata: Any, **_: Any) -> bytes:
        self.metadata = dict(metadata)
        self.asked += 1
        if self._refusal is not None:
            raise RpcError(self._refusal.code, str(self._refusal))
        return rpc_pb2.MemberPromoteResponse(members=[rpc_pb2.Member(ID=9)]).SerializeToString()


async def _dispensable() -> None:
    """Nobody waits for it."""


def _follower(channel: Channel, change_members: Any = None) -> Changes:
    settings = SimpleNamespace(request_timeout_s=5.0, member_id=1)
    node = SimpleNamespace(
        stopped=False, role=StateRole.FOLLOWER, leader=2, settings=settings, change_members=change_members
    )
    ways = Ways(
        connected_since=lambda peer: 0.0,
        channel=cast(Any, lambda peer: channel),
        introduction=lambda peer: (("cluster", "c1"),),
        wait_until_dispensable=_dispensable,
    )
    membership = Membership(Store.open(MemoryBackend()))
    return Changes(cast(Any, node), membership, ways, cluster_id=1, strict=False, learners_max=1)


@pytest.mark.parametrize(
    "refusal",
    [
        errors.NotCapableError(),
        errors.TooManyRequestsError(),
        errors.LearnerNotReadyError(),
        errors.ConfChangeRefusedError("raftkv: the members cannot be changed like this now: it is joint"),
    ],
)
def test_what_the_leader_refuses_is_told_at_once(refusal: errors.StatusError) -> None:
    """Ask once: the leader was asked until the time was up, and the client heard of nothing but that."""
    channel = Channel(refusal)

    async def ask() -> None:
        await _follower(channel).promote(9, None)

    with pytest.raises(type(refusal)) as refused:
        asyncio.run(ask())
    assert str(refused.value) == str(refusal)
    assert channel.asked == 1


def test_a_follower_passes_the_caller_on_and_other_changes_have_it_in_the_log() -> None:
    root = Caller(b"root", 3)
    channel, logged = Channel(), list[raft_pb2.MembershipChange]()

    async def change_members(record: raft_pb2.MembershipChange) -> Any:
        logged.append(record)
        return Outcome(0)

    async def act() -> None:
        changes = _follower(channel, change_members)
        await changes.promote(9, root)
        await changes.add(rpc_pb2.Member(ID=5), root)
        await changes.remove(5, root)
        await changes.update(5, ("http://m:1",), root)
        await changes.update(5, ("http://m:1",), None)

    asyncio.run(act())
    assert channel.metadata["cluster"] == "c1"
    assert forwarded_caller({**channel.metadata}) == root
    callers = [record.caller if record.HasField("caller") else None for record in logged]
    assert callers == [*[raft_pb2.Caller(user=b"root", auth_revision=3)] * 3, None]
    assert conf_change_of(logged[0]).context == logged[0].SerializeToString(deterministic=True)
