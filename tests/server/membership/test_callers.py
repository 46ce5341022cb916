"""A membership change forwarded to the leader carries its caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.membership import Membership, conf_change_of
from raftkv.apply.wire import MEMBER, Caller
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft.types import StateRole
from raftkv.replica.membership.changes import CALLER, Changes, _caller_metadata, forwarded_caller
from raftkv.rpc.status import RpcError
from raftkv.storage.mvcc import Store
from tests.storage.memory import MemoryBackend


@pytest.mark.parametrize("caller", [None, MEMBER, Caller(b"root", 3), Caller("ä.b\n".encode() + b"\xff", 2**64 - 1)])
def test_forwarded_metadata_names_the_caller(caller: Caller | None) -> None:
    metadata = dict(_caller_metadata(caller))
    assert all(value.isascii() and value.isprintable() for value in metadata.values())
    assert forwarded_caller(metadata) == caller


@pytest.mark.parametrize("text", ["", "zz.1", "00", "00.", "00.x", "."])
def test_request_for_an_unknown_member_is_refused(text: str) -> None:
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


class Node:
    """A follower of 2; who waits for another leader hears of it when ``lead`` is called."""

    def __init__(self, change_members: Any = None) -> None:
        self.stopped, self.role, self.leader = False, StateRole.FOLLOWER, 2
        self.settings = SimpleNamespace(request_timeout_s=5.0, member_id=1)
        self.change_members = change_members
        self._changed = asyncio.Condition()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def lead(self, leader: int) -> None:
        async with self._changed:
            self.leader = leader
            self._changed.notify_all()

    async def confirm_read(self) -> None:
        pass


async def _dispensable() -> None:
    """Ignore the call."""


def _follower(channel: Channel, change_members: Any = None) -> Changes:
    node = Node(change_members)
    return Changes(
        cast(Any, node),
        Membership(Store.open(MemoryBackend())),
        cluster_id=1,
        strict=False,
        learners_max=1,
        connected_since=lambda peer: 0.0,
        channel=cast(Any, lambda peer: channel),
        wait_until_dispensable=_dispensable,
    )


@pytest.mark.parametrize(
    "refusal",
    [
        errors.NotCapableError(),
        errors.TooManyRequestsError(),
        errors.LearnerNotReadyError(),
        errors.ConfChangeRefusedError("raftkv: the members cannot be changed like this now: it is joint"),
    ],
)
def test_refusal_of_the_leader_is_passed_on_at_once(refusal: errors.StatusError) -> None:
    """Ask once: the leader was asked until the time was up, and the client heard of nothing but that."""
    channel = Channel(refusal)

    async def ask() -> None:
        await _follower(channel).promote(9, None)

    with pytest.raises(type(refusal)) as refused:
        asyncio.run(ask())
    assert str(refused.value) == str(refusal)
    assert channel.asked == 1


async def test_a_follower_passes_the_caller_on_and_other_changes_have_it_in_the_log() -> None:
    root = Caller(b"root", 3)
    channel, logged = Channel(), list[raft_pb2.MembershipChange]()

    async def change_members(record: raft_pb2.MembershipChange) -> Any:
        logged.append(record)
        return Outcome(0)

    changes = _follower(channel, change_members)
    await changes.promote(9, root)
    await changes.add(rpc_pb2.Member(ID=5), root)
    await changes.remove(5, root)
    await changes.update(5, ("http://m:1",), root)
    await changes.update(5, ("http://m:1",), None)
    assert forwarded_caller({**channel.metadata}) == root
    callers = [record.caller if record.HasField("caller") else None for record in logged]
    assert callers == [*[raft_pb2.Caller(user=b"root", auth_revision=3)] * 3, None]
    assert conf_change_of(logged[0]).context == logged[0].SerializeToString(deterministic=True)


@pytest.mark.parametrize("what", ["remove", "replace"])
def test_user_who_lost_the_right_cannot_transfer_leader(what: str) -> None:
    """The member that was asked did not know of it yet; the change itself is refused where it is applied."""

    moved: list[int] = []

    async def act() -> None:
        changes = _follower(Channel())
        membership, node = changes._membership, cast(Any, changes)._node
        membership.bootstrap([rpc_pb2.Member(ID=each, name="m", isLearner=each == 9) for each in (1, 2, 3, 9)])
        node.conf_state = SimpleNamespace(voters=(1, 2, 3))
        node.settings.election_s = 0.0
        node.transfer_leader = moved.append
        progress = dict.fromkeys((1, 9), SimpleNamespace(match=5))
        node.raw = SimpleNamespace(status=lambda: SimpleNamespace(progress=progress))

        def refuse(caller: Caller | None) -> None:
            raise errors.PermissionDeniedError

        async def catch_up() -> None:
            membership.check_caller = refuse

        node.confirm_read = catch_up
        if what == "replace":
            node.role, node.leader = StateRole.LEADER, 1
            await changes.replace(1, 9, Caller(b"eve", 3), is_local=False)
        else:
            await changes.remove(2, Caller(b"eve", 3))

    with pytest.raises(errors.PermissionDeniedError):
        asyncio.run(act())
    assert moved == []


class Channels:
    """The leaders that are asked in turn: each answers, refuses, loses the answer, or says nothing."""

    def __init__(self, *answers: BaseException | rpc_pb2.MemberPromoteResponse | None) -> None:
        self._answers = list(answers)
        self.asked = asyncio.Event()

    async def unary(self, path: str, data: bytes, timeout_s: float, metadata: Any, **_: Any) -> bytes:
        self.asked.set()
        answer = self._answers.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, BaseException):
            raise answer
        assert answer is not None
        return bytes(answer.SerializeToString())


def _refusal(error: errors.StatusError) -> RpcError:
    return RpcError(error.code, str(error))


async def test_a_leader_that_says_nothing_is_left_for_the_next() -> None:
    channels = Channels(None, rpc_pb2.MemberPromoteResponse(members=[rpc_pb2.Member(ID=9)]))
    changes = _follower(cast(Any, channels))
    promoting = asyncio.ensure_future(changes.promote(9, None))
    await channels.asked.wait()
    await cast(Any, changes)._node.lead(3)
    assert [member.ID for member in await promoting] == [9]


@pytest.mark.parametrize(("lost", "is_told"), [(True, False), (False, True)])
async def test_change_whose_answer_was_lost_succeeds_when_repeated(lost: bool, is_told: bool) -> None:
    """The next attempt was told that there is no such learner, and so was the client."""
    broken = RpcError(errors.UNAVAILABLE, "the connection is gone", definite=not lost)
    changes = _follower(cast(Any, Channels(broken, _refusal(errors.MemberNotLearnerError()))))
    changes._membership.bootstrap([rpc_pb2.Member(ID=9, name="m9")])
    if is_told:
        with pytest.raises(errors.MemberNotLearnerError):
            await changes.promote(9, None)
    else:
        assert [member.ID for member in await changes.promote(9, None)] == [9]
