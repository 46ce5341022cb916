"""A txn of ranges in pieces gives the same answer as at once, under any change of the store between the pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.apply import txn
from raftkv.apply.applier import Applier
from raftkv.errors import CompactedError, FutureRevisionError
from raftkv.pb import rpc_pb2
from raftkv.storage.mvcc_range import PinnedView
from raftkv.storage.selection import finish
from tests.apply.machine import Machine
from tests.server.recipes.recipes import Granted

KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])
ENDS = st.sampled_from([b"", b"\0", b"c", b"z"])
COMPARES = st.builds(
    rpc_pb2.Compare,
    key=KEYS,
    range_end=ENDS,
    result=st.integers(0, 3),
    target=st.just(rpc_pb2.Compare.VERSION),
    version=st.integers(0, 3),
) | st.builds(
    rpc_pb2.Compare,
    key=KEYS,
    range_end=ENDS,
    result=st.integers(0, 3),
    target=st.sampled_from([rpc_pb2.Compare.VALUE, rpc_pb2.Compare.LEASE]),
    value=st.sampled_from([b"", b"1", b"2"]),
)
RANGES = st.builds(
    rpc_pb2.RangeRequest,
    key=KEYS,
    range_end=ENDS,
    limit=st.integers(0, 3),
    revision=st.sampled_from([0, 0, 2, 3]),
    sort_order=st.integers(0, 2),
    sort_target=st.integers(0, 4),
    keys_only=st.booleans(),
)
OPERATIONS = st.lists(RANGES.map(lambda request: rpc_pb2.RequestOp(request_range=request)), max_size=3)
REQUESTS = st.builds(rpc_pb2.TxnRequest, compare=st.lists(COMPARES, max_size=3), success=OPERATIONS, failure=OPERATIONS)
PUTS = st.lists(st.tuples(KEYS, st.sampled_from([b"", b"1", b"2"])), min_size=3, max_size=12)


def filled(puts: list[tuple[bytes, bytes]]) -> tuple[Machine, Applier]:
    machine = Machine()
    for key, value in puts:
        put(machine, key, value)
    return machine, Applier(machine.store, machine.alarms, machine.membership, Granted())


def put(machine: Machine, key: bytes, value: bytes) -> None:
    txn = machine.store.begin()
    txn.put(key, value)
    txn.end()


def executed(view: PinnedView, request: rpc_pb2.TxnRequest, between: Any = lambda: None) -> tuple[int, bytes]:
    work = txn.read_in_pieces(view, request)

    def paused() -> Any:
        answer = yield from work
        return answer

    steps = paused()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            revision, pieces = end.value
            return revision, b"".join(pieces)
        between()


@given(PUTS, REQUESTS)
def test_in_pieces_is_at_once(puts: list[tuple[bytes, bytes]], request: rpc_pb2.TxnRequest) -> None:
    machine, applier = filled(puts)
    expected = applier.read_txn(request)
    view = machine.store.pin()
    revision, body = executed(view, request, lambda: put(machine, b"c", b"9"))
    assert (revision, body) == (expected.revision, expected.body)
    view.let_go()


def test_refusals_come_before_anything_is_read() -> None:
    machine, _ = filled([(b"a", b"1")] * 5)
    machine.store.compact(3)
    view = machine.store.pin()
    for revision, error in ((2, CompactedError), (-1, CompactedError), (99, FutureRevisionError)):
        operation = rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=b"a", revision=revision))
        with pytest.raises(error):
            executed(view, rpc_pb2.TxnRequest(success=[operation]))
    view.let_go()


def test_oversized_read_txn_is_abandoned() -> None:
    machine, _ = filled([(b"%03d" % number, b"v" * 1000) for number in range(300)])
    view = machine.store.pin()
    operation = rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=b"0", range_end=b"9"))
    held = 0

    def grow(size_bytes: int) -> None:
        nonlocal held
        held += size_bytes
        if held > 1_000_000:
            raise MemoryError

    with pytest.raises(MemoryError):
        finish(txn.read_in_pieces(view, rpc_pb2.TxnRequest(success=[operation] * 9), grow))
    assert held < 1_400_000
    view.let_go()
