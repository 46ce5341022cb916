"""The fast path of plain txns decodes, refuses, writes and answers the same bytes as the message classes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raftkv import errors
from raftkv.apply import check, compares, txn, wire
from raftkv.apply.alarms import can_grow
from raftkv.apply.wire import Kind
from raftkv.pb import rpc_pb2
from raftkv.storage.key_value import varint
from tests.apply.arbitrary import payload
from tests.apply.machine import OPERATIONS_MAX, Machine

KEYS = (b"a", b"b", b"\xff", b"k" * 130)
NUMBERS = (*(0, 1, 2, 3, 100, 127, 128, 2**31, 2**63 - 1) * 3, 2**63, 2**64 - 1)


class Pair:
    """A machine that takes txns as a member does, and one that is given their messages."""

    def __init__(self, **limits: int) -> None:
        self.plain, self.messages = Machine(**limits), Machine(**limits)

    def apply(self, data: bytes, is_answered: bool) -> None:
        """Apply the bytes of a txn to both; they come to the same."""
        try:
            message: Any = rpc_pb2.TxnRequest.FromString(data)
        except DecodeError:
            message = None
        told = []
        for machine, request in ((self.plain, None), (self.messages, message)):
            outcome = machine.applier.apply(Kind.TXN, data, request, is_answered=is_answered)
            machine.store.set_applied(machine.store.applied_index + 1, 1)
            told.append((outcome.revision, outcome.body, repr(outcome.error)))
        assert told[0] == told[1], data.hex()

    def check_equal(self) -> None:
        """The states are the same."""
        for read in (lambda machine: machine.hash(), lambda machine: machine.store.range(b"\0", b"\0").kvs):
            assert read(self.plain) == read(self.messages)


def check_decoded(data: bytes) -> bool:
    """Compare what is decoded of some bytes with their message; whether it is a plain txn."""
    decoded = wire.decode_txn(data, OPERATIONS_MAX)
    if decoded is None:
        return False
    message = rpc_pb2.TxnRequest.FromString(data)
    check.check_txn(message, OPERATIONS_MAX)
    assert decoded.compares == [(one.key, one.target, one.result, compares.wanted(one)) for one in message.compare]
    assert not any(one.range_end for one in message.compare)
    assert decoded.success == [_operation(one) for one in message.success]
    assert decoded.failure == [_operation(one) for one in message.failure]
    assert decoded.writes == txn.has_put(message) == can_grow(Kind.TXN, message) == can_grow(Kind.TXN, decoded)
    assert decoded.writes or txn.is_readonly(message)
    assert decoded.message() == message
    return True


def _operation(operation: rpc_pb2.RequestOp) -> wire.PlainOperation:
    """A put or a range, which has no other option."""
    if operation.HasField("request_put"):
        put = operation.request_put
        assert put == rpc_pb2.PutRequest(key=put.key, value=put.value, lease=put.lease)
        return put.key, put.value, put.lease
    assert operation.request_range == rpc_pb2.RangeRequest(key=operation.request_range.key)
    return operation.request_range.key, None, 0


def _number(rng: Random, number: int) -> bytes:
    """A varint, now and then longer than it need be."""
    data = varint(number)
    return data if rng.random() > 0.005 else data[:-1] + bytes((data[-1] | 0x80, 0))


def _length_delimited(rng: Random, tag: int, data: bytes) -> bytes:
    return bytes((tag,)) + _number(rng, len(data)) + data


def _message(rng: Random, fields: list[bytes]) -> bytes:
    """Fields in order, now and then not, or one twice, or with an unknown one."""
    choice = rng.random()
    if choice < 0.03:
        rng.shuffle(fields)
    elif choice < 0.06 and fields:
        fields.append(rng.choice(fields))
    elif choice < 0.08:
        fields.append(b"\xc2\x3e\x03abc")
    return b"".join(fields)


def _integer(rng: Random, tag: int) -> bytes:
    return bytes((tag,)) + _number(rng, rng.choice(NUMBERS))


def _compare(rng: Random) -> bytes:
    target = rng.choice((*(0, 1, 2, 3, 4) * 4, 5, 200))
    fields = [b"\x08" + _number(rng, rng.choice((*(0, 1, 2, 3) * 4, 4)))] if rng.random() < 0.7 else []
    if target or rng.random() < 0.1:
        fields.append(b"\x10" + _number(rng, target))
    fields.append(_length_delimited(rng, 0x1A, rng.choice((*KEYS * 8, b""))))
    operand = target if rng.random() < 0.95 else rng.randrange(5)
    if operand == 3:
        fields.append(_length_delimited(rng, 0x3A, rng.choice((b"", b"1", b"v" * 200))))
    elif operand < 5 and rng.random() < 0.9:
        fields.append(_integer(rng, (0x20, 0x28, 0x30, 0, 0x40)[operand]))
    if rng.random() < 0.03:
        fields.append(b"\x82\x04\x01z")  # range_end
    return _message(rng, fields)


def _request(rng: Random) -> bytes:
    fields = [_length_delimited(rng, 0x0A, rng.choice((*KEYS * 8, b"")))]
    if rng.random() < 0.4:
        return _length_delimited(rng, 0x0A, _message(rng, fields))
    if rng.random() < 0.9:
        fields.append(_length_delimited(rng, 0x12, rng.choice((b"", b"1", b"v" * 200, b"v" * 20_000))))
    if rng.random() < 0.2:
        fields.append(_integer(rng, 0x18))
    if rng.random() < 0.03:
        fields.append(bytes((rng.choice((0x20, 0x28, 0x30)), rng.randrange(3))))
    return _length_delimited(rng, rng.choice((*(0x12,) * 30, 0x1A)), _message(rng, fields))


def encoded(rng: Random) -> bytes:
    """Bytes of a txn, most of them plain."""
    fields = [_length_delimited(rng, 0x0A, _compare(rng)) for _ in range(rng.choice((0, 1, 1, 2)))]
    for tag in (0x12, 0x1A):
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            operation = [_request(rng)]
            if rng.random() < 0.02:
                operation.append(_request(rng))  # the last member of a oneof wins, and two of the same kind merge
            fields.append(_length_delimited(rng, tag, b"".join(operation)))
    data = _message(rng, fields)
    choice = rng.random()
    if choice < 0.03:
        return data[: rng.randrange(len(data) + 1)]
    if choice < 0.08 and data:
        position = rng.randrange(len(data))
        return data[:position] + bytes((rng.randrange(256),)) + data[position + 1 :]
    return data


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.integers(0, 2**32).map(lambda seed: encoded(Random(seed))), st.binary(max_size=60)))
@example(b"")
@example(bytes.fromhex("0a00"))
@example(bytes.fromhex("12040a021a00"))
@example(bytes.fromhex("0a031a0161"))
@example(bytes.fromhex("0a051a01612000"))
@example(bytes.fromhex("0a051a01613000"))
@example(bytes.fromhex("120712030a01611805"))  # what follows a put is not its lease
def test_plain_txn_decoding_equals_the_message(data: bytes) -> None:
    check_decoded(data)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_states_and_answers_are_the_same(seed: int) -> None:
    rng = Random(seed)
    pair = Pair() if rng.random() < 0.7 else Pair(at_once_max=3, changes_max=4)
    for _ in range(40):
        data = encoded(rng) if rng.random() < 0.9 else payload(rng, rpc_pb2.TxnRequest, 3)
        pair.apply(data, is_answered=rng.random() < 0.7)
    pair.check_equal()


def test_most_txns_are_plain() -> None:
    """Else the tests above would compare nothing."""
    rng = Random(1)
    assert sum(check_decoded(encoded(rng)) for _ in range(500)) > 150


def _txn(success: int = 1, compares_: int = 1) -> rpc_pb2.TxnRequest:
    operations = [rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"%d" % n)) for n in range(success)]
    conditions = [rpc_pb2.Compare(key=b"a", version=0)] * compares_
    return rpc_pb2.TxnRequest(compare=conditions, success=operations)


@pytest.mark.parametrize(("success", "conditions", "is_plain"), [(64, 1, True), (65, 1, False), (1, 65, False)])
def test_long_lists_are_left_to_the_messages(success: int, conditions: int, is_plain: bool) -> None:
    assert check_decoded(_txn(success, conditions).SerializeToString()) is is_plain


def test_a_limit_of_the_operator_holds() -> None:
    assert wire.decode_txn(_txn(3).SerializeToString(), 3) is not None
    assert wire.decode_txn(_txn(4).SerializeToString(), 3) is None


@pytest.mark.parametrize("changed", ["alarm", "quota", "users"])
def test_alarms_quotas_and_users_see_a_plain_txn_too(changed: str) -> None:
    pair = Pair()
    for machine in (pair.plain, pair.messages):
        if changed == "alarm":
            machine.apply(rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=1, alarm=rpc_pb2.NOSPACE))
        elif changed == "quota":
            machine.applier.quotas.is_active = True
        else:
            machine.applier.auth.is_enabled = True
    data = _txn().SerializeToString()
    pair.apply(data, is_answered=True)
    pair.check_equal()
    refused = Pair().plain
    assert refused.applier.apply(Kind.TXN, data).error is None
    expected = {"alarm": errors.NoSpaceError, "quota": type(None), "users": errors.StatusError}[changed]
    assert isinstance(pair.plain.applier.apply(Kind.TXN, data).error, expected)
