"""RangeStream: its chunks, and their cost during writes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import cycle, repeat
from typing import Any, cast

import pytest

from raftkv import errors
from raftkv.apply.applier import Applier
from raftkv.apply.wire import HeaderEncoder
from raftkv.pb import rpc_pb2
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.node import Node
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.shares import Uses
from raftkv.rpc.status import RpcError
from raftkv.server.services.range_stream import RangeStreamService
from raftkv.server.services.responder import Responder
from raftkv.storage.index import Index
from raftkv.storage.selection import BYTES_PER_PIECE
from tests.apply.machine import Machine
from tests.server.recipes.recipes import Granted, ManualNode, NoAdmission

CHUNK_BYTES = 20_000


class Call:
    """One call of a client; ``rooms``: whether there is room for a chunk, at each look."""

    def __init__(self, request: rpc_pb2.RangeRequest, on_chunk: Any, rooms: Iterable[bool]) -> None:
        self._request = request
        self._on_chunk = on_chunk
        self._rooms = iter(rooms)
        self.waits = 0
        self.chunks: list[rpc_pb2.RangeResponse] = []

    async def receive(self) -> bytes:
        return self._request.SerializeToString()

    @property
    def has_room(self) -> bool:
        return next(self._rooms)

    async def wait_for_room(self) -> None:
        self.waits += 1

    async def send(self, message: bytes) -> None:
        self.chunks.append(rpc_pb2.RangeStreamResponse.FromString(message).range_response)
        self._on_chunk()


def stream(machine: Machine, request: rpc_pb2.RangeRequest, on_chunk: Any = lambda: None) -> rpc_pb2.RangeResponse:
    """All chunks of an answer, merged."""
    return streamed(machine, request, on_chunk, repeat(True))[0]


def streamed(
    machine: Machine, request: rpc_pb2.RangeRequest, on_chunk: Any, rooms: Iterable[bool]
) -> tuple[rpc_pb2.RangeResponse, int]:
    """The same, and how often there was a wait for room."""

    async def run() -> tuple[rpc_pb2.RangeResponse, int]:
        applier = Applier(machine.store, machine.alarms, machine.membership, Granted())
        header = HeaderEncoder(1, 2)
        responder = Responder(
            cast(Node, ManualNode()), applier, header, cast(Admission, NoAdmission()), lambda needed: None, Uses()
        )
        service = RangeStreamService(responder, CHUNK_BYTES)
        call = Call(request, on_chunk, rooms)
        await service.range_stream(cast(StreamCall, call))
        whole = rpc_pb2.RangeResponse()
        for chunk in call.chunks:
            assert chunk.ByteSize() < CHUNK_BYTES + BYTES_PER_PIECE + 110_000
            whole.MergeFrom(chunk)
        return whole, call.waits

    return asyncio.run(run())


def filled(keys: int) -> Machine:
    machine = Machine()
    for number in range(keys):
        _put(machine, b"k%05d" % number)
    return machine


def _put(machine: Machine, key: bytes) -> None:
    txn = machine.store.begin()
    txn.put(key, b"v" * 20)
    txn.end()


ALL = {"key": b"k", "range_end": b"l", "serializable": True}


def test_keys_are_looked_at_once_however_many_puts_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = 4000
    machine = filled(keys)
    visited, states = 0, Index.states

    def counted(index: Index, names: list[bytes], main: int) -> Any:
        nonlocal visited
        visited += len(names)
        return states(index, names, main)

    monkeypatch.setattr(Index, "states", counted)
    whole = stream(machine, rpc_pb2.RangeRequest(**ALL), lambda: _put(machine, b"k00001"))
    assert (len(whole.kvs), whole.count, whole.header.revision) == (keys, keys, keys + 1)
    assert visited < 1.2 * keys
    visited = 0
    stream(machine, rpc_pb2.RangeRequest(**ALL, revision=keys), lambda: _put(machine, b"k00001"))
    assert visited < 2.2 * keys, "an older revision is counted by a walk, once"


def test_the_present_is_that_of_the_first_chunk() -> None:
    machine = filled(100)
    expected = list(machine.store.range(b"k", b"l").kvs)
    whole = stream(machine, rpc_pb2.RangeRequest(**ALL), lambda: _put(machine, b"k00099"))
    assert [kv.SerializeToString() for kv in whole.kvs] == expected


def test_a_reader_that_a_compaction_overtakes_is_told() -> None:
    machine = filled(100)

    def compact() -> None:
        _put(machine, b"k00099")
        machine.store.compact(machine.store.revision)

    with pytest.raises(RpcError, match="required revision has been compacted") as raised:
        stream(machine, rpc_pb2.RangeRequest(**ALL), compact)
    assert raised.value.code == errors.OUT_OF_RANGE


def test_a_chunk_is_read_when_its_client_has_room_for_it() -> None:
    """Streams of one connection waited with chunks that no budget counted: 4 MB for each of 10,000."""
    chunks: list[None] = []
    whole, waits = streamed(filled(100), rpc_pb2.RangeRequest(**ALL), lambda: chunks.append(None), cycle((False, True)))
    assert (len(whole.kvs), waits) == (100, 2 * len(chunks))


def test_values_that_grow_do_not_make_huge_chunks() -> None:
    machine = filled(2000)
    for number in range(50):
        txn = machine.store.begin()
        txn.put(b"kk%05d" % number, b"v" * 100_000)
        txn.end()
    assert len(stream(machine, rpc_pb2.RangeRequest(**ALL)).kvs) == 2050
