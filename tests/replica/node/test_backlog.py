"""Committed but unapplied entries have a memory limit, and clients learn at once that a member is behind."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raftkv import errors
from raftkv.apply.wire import Kind
from raftkv.pb import rpc_pb2
from raftkv.raft.log import MemoryLog, RaftLog, size_of
from raftkv.raft.types import NO_LIMIT, Entry, HardState, Message, MessageType
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.waits import NodeSettings
from raftkv.rpc.server.calls import ServerCall
from tests.replica.node.node_world import ME, World

KIB = 1024
MIB = 1024 * KIB
UNAPPLIED_MAX_BYTES = 20 * MIB


def put(number: int, size_bytes: int) -> Entry:
    body = rpc_pb2.PutRequest(key=b"k", value=bytes(size_bytes)).SerializeToString()
    return Entry(1, number, bytes([Kind.PUT]) + number.to_bytes(8, "big") + body)


def append(after: int, entries: list[Entry], commit: int) -> Message:
    return Message(MessageType.APPEND, ME, 2, 1, 1 if after else 0, after, entries, commit)


class Frozen:
    """A follower whose database accepts nothing, so apply stops."""

    def __init__(self, **limits: int) -> None:
        settings = NodeSettings(ME, 60.0, 600.0, unwritten_max_bytes=-1, **limits)
        self.world = World(settings=settings)
        self.node = self.world.node

    async def fill(self, count: int, size_bytes: int) -> None:
        """A leader appends, and commits what it has appended before; it begins again where it is not answered."""
        node = self.node
        for _ in range(count):
            last = node.raw.raft.log.last_index
            node.receive([append(last, [put(last + 1, size_bytes)], last)])
            await self.world.turns()

    async def thaw(self) -> None:
        """The database catches up."""
        self.node.settings = replace(self.node.settings, unwritten_max_bytes=NO_LIMIT)
        self.node.applying._go_on()
        await self.world.turns()


async def test_follower_that_applies_nothing_takes_limited_bytes_then_the_rest() -> None:
    frozen = Frozen(unapplied_max_bytes=UNAPPLIED_MAX_BYTES)
    node = frozen.node
    await frozen.fill(60, MIB)
    assert node.applied == 0
    assert UNAPPLIED_MAX_BYTES < frozen.world.log.size_bytes < UNAPPLIED_MAX_BYTES + 3 * MIB
    assert node.backlog.size_bytes <= UNAPPLIED_MAX_BYTES + MIB + KIB
    assert node.backlog.appends_dropped == 60 - node.raw.raft.log.last_index
    # It hears of its leader all the same, and commits what it has.
    frozen.world.sender.sent.clear()
    last = node.raw.raft.log.last_index
    node.receive([frozen.world.heartbeat(leader=2, commit=last)])
    await frozen.world.turns()
    assert len(frozen.world.sender.take(MessageType.HEARTBEAT_RESPONSE)) == 1
    # A refusal would bring it the database, which it cannot install before it has applied, again and again.
    node.receive([append(last + 5, [], last + 5)])
    await frozen.world.turns()
    assert not frozen.world.sender.take(MessageType.APPEND_RESPONSE)
    await frozen.thaw()
    assert (node.applied, node.backlog.size_bytes) == (last, 0)
    await frozen.fill(60 - last, MIB)
    assert node.raw.raft.log.last_index == 60
    assert not frozen.world.failures


async def test_uncommitted_entries_are_taken() -> None:
    # A member that starts with a long log knows little of its commit index before it has taken an append.
    frozen = Frozen(unapplied_max_bytes=UNAPPLIED_MAX_BYTES)
    for number in range(1, 61):
        frozen.node.receive([append(number - 1, [put(number, MIB)], 0)])
        await frozen.world.turns()
    assert frozen.node.raw.raft.log.last_index == 60
    assert frozen.node.backlog.appends_dropped == 0


@pytest.mark.parametrize(("count", "size_bytes", "limits"), [(40, 10, {"unapplied_max": 30}), (30, MIB, {})])
async def test_a_client_hears_at_once_that_a_member_is_behind(count, size_bytes, limits):
    frozen = Frozen(unapplied_max_bytes=UNAPPLIED_MAX_BYTES, **limits)
    node = frozen.node
    admission = Admission(
        node,
        frozen.world.machine.applier,
        max_request_bytes=MIB,
        quota_bytes=None,
        size_bytes=lambda: 0,
        data_dir="/",
        log_dir="/",
        raise_no_space=lambda reason: None,
        make_room=lambda: False,
    )
    call = cast(ServerCall, SimpleNamespace(headers=()))
    request: Any = rpc_pb2.DeleteRangeRequest(key=b"k")
    await frozen.fill(count, size_bytes)
    node._tick()
    if limits:  # one large batch is no reason
        admission.check_write(call, Kind.DELETE_RANGE, b"", request)
    node._tick()
    with pytest.raises(errors.TooManyRequestsError):
        admission.check_write(call, Kind.DELETE_RANGE, b"", request)
    await frozen.thaw()
    node._tick()
    admission.check_write(call, Kind.DELETE_RANGE, b"", request)
    node.stop()


def test_bytes_are_counted_page_by_page() -> None:
    memory = MemoryLog(HardState(1, 0, 0))
    memory.append([Entry(1, number, bytes(100)) for number in range(1, 101)])
    log = RaftLog(memory, max_applying_bytes=1_000)
    committed = applied = 0
    for step in range(300):
        committed = min(committed + step % 3, 100)
        log.commit_to(committed)
        if log.has_next_committed():
            log.next_committed()
        if step % 4 == 0 and log.applying > applied:
            applied = min(applied + 5, log.applying)
            log.applied_to(applied)
        least = size_of(memory.entries(applied + 1, committed + 1, NO_LIMIT)) if applied < committed else 0
        # A page counts until all of it is applied.
        assert least <= log.unapplied_bytes() <= least + 1_000
    assert (applied, log.unapplied_bytes()) == (100, 0)
