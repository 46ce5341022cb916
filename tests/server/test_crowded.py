"""Txns of a million operations are refused before they are parsed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv import errors
from raftkv.apply.check import OPERATIONS_TOTAL_MAX
from raftkv.pb import rpc_pb2
from raftkv.rpc.server.router import Kind
from raftkv.server.services import crowded

MIB = 1 << 20
EMPTY_COMPARES = b"\x0a\x00" * MIB
EMPTY_OPERATIONS = b"\x12\x00" * MIB
UNKNOWN = b"\x78\x00"
GROUP = b"\x7b\x7c"


def _length(size: int) -> bytes:
    out = b""
    while size > 0x7F:
        out, size = out + bytes((size & 0x7F | 0x80,)), size >> 7
    return out + bytes((size,))


def _nested(inner: bytes) -> bytes:
    operation = b"\x22" + _length(len(inner)) + inner
    return b"\x12" + _length(len(operation)) + operation


@pytest.mark.parametrize(
    "data",
    [
        EMPTY_COMPARES,
        EMPTY_OPERATIONS,
        _nested(EMPTY_COMPARES),
        _nested(_nested(EMPTY_OPERATIONS)),
        _nested(b"\x0a\x00" * 20_000) * 50,
        _nested(b"") * 100_000,
        b"\x12" + _length(2 * MIB) + b"\x22\x00" * MIB,
        UNKNOWN * MIB,
        GROUP + EMPTY_COMPARES,
    ],
    ids=[
        "compares",
        "operations",
        "nested",
        "twice-nested",
        "many-nested",
        "empty-nested",
        "repeated",
        "unknown",
        "group",
    ],
)
def test_they_are_refused(data: bytes) -> None:
    refused: list[errors.StatusError] = []

    def parsed(call: Any, data: bytes) -> None:
        raise AssertionError("it was parsed")

    handler = crowded.around("/etcdserverpb.KV/Txn", Kind.UNARY, parsed)

    class Call:
        def fail(self, code: int, text: str, **_: object) -> None:
            refused.append(errors.StatusError(text))

    handler(Call(), data)
    assert [str(error) for error in refused] == ["etcdserver: too many operations in txn request"]


def test_other_methods_pay_nothing() -> None:
    def handler(call: Any, data: bytes) -> None:
        pass

    assert crowded.around("/etcdserverpb.KV/Put", Kind.UNARY, handler) is handler


@given(st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=200)), max_size=9), st.integers(0, 5))
def test_txns_within_the_limits_pass(pairs: list[tuple[bytes, bytes]], depth: int) -> None:
    request = rpc_pb2.TxnRequest()
    for key, value in pairs:
        request.compare.add(key=key, value=value)
        request.success.add().request_put.CopyFrom(rpc_pb2.PutRequest(key=key, value=value, lease=2**62))
    for _ in range(depth):
        request = rpc_pb2.TxnRequest(failure=[rpc_pb2.RequestOp(request_txn=request)], compare=request.compare)
    assert not crowded.has_too_many_operations(request.SerializeToString())


def test_as_many_as_may_be_pass() -> None:
    put = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"k" * 20, value=b"v" * 50))
    request = rpc_pb2.TxnRequest(success=[put] * OPERATIONS_TOTAL_MAX)
    assert not crowded.has_too_many_operations(request.SerializeToString())
    request.failure.extend([put] * 1_000)
    assert crowded.has_too_many_operations(request.SerializeToString())


@given(st.binary(max_size=60))
def test_counting_ends_for_any_history(data: bytes) -> None:
    crowded.has_too_many_operations(data)


@pytest.mark.parametrize("size", [1, 127, 128, 300, 16_383, 16_384, 70_000])
def test_lengths_of_up_to_three_bytes_are_read_in_place(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Thousands of txns nested in each other have two lengths of three bytes each, which called functions for 60 ms."""

    def general(*_: object) -> tuple[int, int, int]:
        raise AssertionError("read in the general way")

    monkeypatch.setattr(crowded, "_field", general)
    inner = rpc_pb2.TxnRequest()
    inner.success.add().request_put.key = b"k" * size
    data = inner.SerializeToString()
    for _ in range(50):
        data = _nested(data)
    assert not crowded.has_too_many_operations(data)
