"""A stream of keep-alives: loop callbacks between a request and its answer, and effects of errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raftkv import errors
from raftkv.apply.auth.store import AuthStore
from raftkv.loop.cork import Cork
from raftkv.pb import rpc_pb2
from raftkv.replica.lease.graces import Graces
from raftkv.replica.lease.renewals import PendingKeepAlive
from raftkv.replica.node.leadership import LeaderGuard
from raftkv.rpc.framing import MessageAssembler
from raftkv.rpc.server.stream import ListenedCall
from raftkv.rpc.shares import Shares
from raftkv.rpc.status import RpcError
from raftkv.server.streams import keep_alives
from raftkv.server.streams.keep_alives import WAITING_MAX, KeepAliveStream, MemberBatch


class Call:
    """The RPC of a stream; ``writes`` has one entry per write."""

    severed = False
    caller = None
    send_buffer_size = 0

    def __init__(self) -> None:
        self.writes: list[list[int]] = []
        self.end = ""
        self.failures = 0

    def finish(self, frames: bytes = b"", count: int = 0) -> None:
        if frames:
            self.send_frames_nowait(frames, count)
        self.end = self.end or "OK"

    def fail_with(self, error: RpcError) -> None:
        self.end = self.end or str(error)
        self.failures += 1

    def send_frames_nowait(self, frames: bytes, count: int) -> None:
        messages = MessageAssembler(2**20).feed(frames)
        self.writes.append([rpc_pb2.LeaseKeepAliveResponse.FromString(message).ID for message in messages])


class Service:
    """Answers leases below 100 at once, keeps the others waiting."""

    def __init__(self) -> None:
        self.scheduled: list[Callable[[], None]] = []
        self.auth = cast(AuthStore, SimpleNamespace(is_enabled=False))
        self.cork = Cork(self.scheduled.append)
        self.graces = Graces(lambda: 0.0, lambda lost: None)
        self.leader_guard = cast(LeaderGuard, SimpleNamespace(forget=lambda call: None))
        self.known: dict[bytes, tuple[int, bytes, int]] = {}
        self.kept_waiting: list[PendingKeepAlive] = []
        self.waiting = Shares(WAITING_MAX)

    def renew_at_once(self, lease_id: int) -> int:
        return 10 if lease_id < 100 else 0

    def keep_alive(self, pending: PendingKeepAlive) -> None:
        self.kept_waiting.append(pending)

    def parse_keep_alive(self, data: bytes) -> tuple[int, bytes, int]:
        request = rpc_pb2.LeaseKeepAliveRequest.FromString(data)
        return request.ID, rpc_pb2.LeaseKeepAliveResponse(ID=request.ID).SerializeToString(), 0

    def header(self) -> bytes:
        return b""


class World:
    """One stream and its environment."""

    def __init__(self) -> None:
        self.service, self.call = Service(), Call()
        self.stream = KeepAliveStream(self.service, cast(ListenedCall, self.call))

    def receive(self, *lease_ids: int) -> None:
        for lease_id in lease_ids:
            self.stream.receive(rpc_pb2.LeaseKeepAliveRequest(ID=lease_id).SerializeToString())


@pytest.fixture
@asynccontextmanager
async def world() -> AsyncIterator[World]:
    yield World()


async def test_requests_of_a_turn_are_answered_by_one_callback_and_one_write(world: World) -> None:
    world.receive(1, 2, 3)
    assert (len(world.service.scheduled), world.call.writes) == (1, [])
    world.service.scheduled[0]()
    assert (len(world.service.scheduled), world.call.writes) == (1, [[1, 2, 3]])
    assert not world.service.kept_waiting, "nothing that waits is made for what is answered at once"


async def test_answers_that_had_to_wait_leave_with_the_turn_that_has_them(world: World) -> None:
    world.receive(100, 101)
    assert world.service.scheduled == []
    with world.service.cork:
        for pending in world.service.kept_waiting:
            pending.answer(10)
        assert world.call.writes == []
    assert world.call.writes == [[100, 101]]
    world.stream.half_closed()
    assert world.call.end == "OK"


async def test_error_ends_stream_after_pending_answers(world: World) -> None:
    world.receive(1, 100)
    world.service.kept_waiting[0].fail(errors.NoLeaderError())
    assert world.call.writes == [[1]]
    assert "no leader" in world.call.end


async def test_a_stream_ends_once_however_many_of_its_requests_fail(world: World) -> None:
    """To end it anew for each of 10,000 that were passed on together took 0.26 s."""
    world.receive(1, 100, 101, 102)
    for pending in world.service.kept_waiting:
        pending.fail(errors.NoLeaderError())
    assert (world.call.writes, world.call.failures) == ([[1]], 1)


async def test_waiting_keep_alives_of_an_identity_are_limited(world: World) -> None:
    """Without a leader 90 streams had a member keep millions of them, 700 MB, and look at all of them in a turn."""
    world.service.waiting.limit = 2
    other = Call()
    stream = KeepAliveStream(world.service, cast(ListenedCall, other))
    world.receive(100, 101)
    stream.receive(rpc_pb2.LeaseKeepAliveRequest(ID=102).SerializeToString())
    assert "this client has its share of the 2 keep-alives that may wait" in other.end
    with world.service.cork:
        world.service.kept_waiting[0].answer(10)
    world.receive(103)
    world.service.kept_waiting[1].fail(errors.NoLeaderError())
    assert ("no leader" in world.call.end, world.service.waiting.used) == (True, 1)


@pytest.mark.interpreted
async def test_a_stream_has_a_limit_of_unanswered_requests(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alives, "UNANSWERED_MAX", 2)
    world.receive(100, 101)
    with pytest.raises(RpcError, match="more than 2 keep-alives"):
        world.receive(102)


def test_a_batch_of_another_member_is_answered_whole_or_fails_whole() -> None:
    async def main() -> None:
        batch, failed = MemberBatch([7, 8, 7]), MemberBatch([1, 2])
        for ttl_s, pending in enumerate(batch.pending, 10):
            assert not batch.answered.done()
            pending.answer(ttl_s)
        assert await batch.answered == [10, 11, 12]
        assert batch.pending == [], "they hold the batch"
        first, second = failed.pending
        first.answer(10)
        second.fail(errors.NotLeaderError())
        first.fail(errors.NotLeaderError())
        assert failed.pending == []
        with pytest.raises(errors.NotLeaderError):
            await failed.answered

    asyncio.run(cast(Any, main()))
