"""Hand-encoded responses equal those built by protobuf."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.apply import wire
from raftkv.pb import kv_pb2, rpc_pb2

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
COUNT = st.integers(0, 2**63 - 1)
KV = st.builds(
    kv_pb2.KeyValue,
    key=st.binary(max_size=200),
    value=st.binary(max_size=200),
    create_revision=COUNT,
    mod_revision=COUNT,
    version=COUNT,
    lease=INT64,
)
KVS = st.lists(KV, max_size=4)


def _stored(kvs: list[Any]) -> list[bytes]:
    return [kv.SerializeToString() for kv in kvs]


@given(COUNT)
@pytest.mark.parametrize("sign", [1, -1])
def test_varints(sign: int, number: int) -> None:
    number *= sign
    assert rpc_pb2.RangeResponse.FromString(b"\x20" + wire.varint(number)).count == number


@given(KVS, st.booleans(), COUNT)
def test_range(kvs: list[Any], more: bool, count: int) -> None:
    body = wire.range_body(_stored(kvs), more, count)
    assert body == rpc_pb2.RangeResponse(kvs=kvs, more=more, count=count).SerializeToString()


@given(st.none() | KV)
def test_put(prev: Any) -> None:
    body = wire.put_body(None if prev is None else prev.SerializeToString())
    assert body == rpc_pb2.PutResponse(prev_kv=prev).SerializeToString()


@given(COUNT, KVS)
def test_delete_range(deleted: int, kvs: list[Any]) -> None:
    body = wire.delete_range_body(deleted, _stored(kvs))
    assert body == rpc_pb2.DeleteRangeResponse(deleted=deleted, prev_kvs=kvs).SerializeToString()


@given(st.booleans(), COUNT, KVS)
def test_txn(succeeded: bool, revision: int, kvs: list[Any]) -> None:
    inner = wire.revision_header(revision) + wire.range_body(_stored(kvs), False, len(kvs))
    nested = wire.EMPTY_HEADER + wire.txn_body(not succeeded, [])
    body = wire.txn_body(succeeded, [wire.field(1, inner), wire.field(4, nested)])
    header = rpc_pb2.ResponseHeader(revision=revision)
    expected = rpc_pb2.TxnResponse(
        succeeded=succeeded,
        responses=[
            rpc_pb2.ResponseOp(response_range=rpc_pb2.RangeResponse(header=header, kvs=kvs, count=len(kvs))),
            rpc_pb2.ResponseOp(
                response_txn=rpc_pb2.TxnResponse(header=rpc_pb2.ResponseHeader(), succeeded=not succeeded)
            ),
        ],
    )
    assert body == expected.SerializeToString()


@given(UINT64, UINT64, st.lists(st.tuples(COUNT, UINT64), min_size=1, max_size=5))
def test_header(cluster_id: int, member_id: int, moments: list[tuple[int, int]]) -> None:
    """The encoder keeps what did not change since the last response."""
    encoder = wire.HeaderEncoder(cluster_id, member_id)
    for revision, term in moments:
        header = rpc_pb2.ResponseHeader(cluster_id=cluster_id, member_id=member_id, revision=revision, raft_term=term)
        expected = rpc_pb2.PutResponse(header=header).SerializeToString()
        assert encoder.encode(revision, term) == expected
