"""Fast paths of plain puts and reads decode, write and answer the same bytes as the message classes."""

from __future__ import annotations

from random import Random

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raftkv.apply import check, ranges, wire
from raftkv.apply.wire import Kind
from raftkv.pb import rpc_pb2
from raftkv.storage.key_value import varint
from tests.apply.machine import Machine

KEYS = (b"a", b"b", b"\xff", b"k" * 130, b"k" * 20_000)


def check_put(data: bytes) -> bool:
    """Compare what is decoded of some bytes with their message; whether it is a plain put."""
    put = wire.decode_put(data)
    if put is None:
        return False
    message = rpc_pb2.PutRequest.FromString(data)
    check.check_put(message)
    assert message == rpc_pb2.PutRequest(key=put.key, value=put.value, lease=put.lease) == put.message()
    return True


def check_get(data: bytes) -> bool:
    """Compare what is decoded of some bytes with their message; whether it is a plain read."""
    get = wire.decode_get(data)
    if get is None:
        return False
    message = rpc_pb2.RangeRequest.FromString(data)
    check.check_range(message)
    assert message == rpc_pb2.RangeRequest(key=get.key, serializable=get.serializable) == get.message()
    return True


def encoded(rng: Random) -> bytes:
    """Bytes of a put or a read, most of them plain."""
    fields = [_field(0x0A, rng.choice((*KEYS * 8, b"")))]
    if rng.random() < 0.5:
        fields.append(_field(0x12, rng.choice((b"", b"1", b"v" * 300, b"v" * 20_000))))
        if rng.random() < 0.4:
            fields.append(b"\x18" + varint(rng.choice((0, 1, 127, 128, 2**63 - 1, 2**63, 2**64 - 1))))
        if rng.random() < 0.1:
            fields.append(bytes((rng.choice((0x20, 0x28, 0x30)), rng.randrange(3))))
    elif rng.random() < 0.6:
        fields.append(
            bytes((rng.choice((0x38, 0x38, 0x38, 0x18, 0x20, 0x28, 0x40, 0x48)), rng.choice((0, 1, 1, 1, 2))))
        )
    choice = rng.random()
    if choice < 0.1:
        fields.append(rng.choice(fields))
        rng.shuffle(fields)
    data = b"".join(fields)
    if 0.1 < choice < 0.15:
        return data[: rng.randrange(len(data) + 1)]
    if 0.15 < choice < 0.2 and data:
        position = rng.randrange(len(data))
        return data[:position] + bytes((rng.randrange(256),)) + data[position + 1 :]
    return data


def _field(tag: int, data: bytes) -> bytes:
    return bytes((tag,)) + varint(len(data)) + data


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.integers(0, 2**32).map(lambda seed: encoded(Random(seed))), st.binary(max_size=60)))
@example(b"")
@example(bytes.fromhex("0a"))
@example(bytes.fromhex("0a00"))
@example(bytes.fromhex("0a0161120130"))
@example(bytes.fromhex("0a01613801"))
@example(bytes.fromhex("0a01613802"))  # true as well
@example(bytes.fromhex("0a0161380138"))
@example(bytes.fromhex("0a8100613801"))  # a length that is longer than it need be
def test_plain_decoding_equals_the_message(data: bytes) -> None:
    check_put(data)
    check_get(data)


def test_most_requests_are_plain() -> None:
    """Otherwise the test above would compare nothing."""
    rng = Random(1)
    samples = [encoded(rng) for _ in range(500)]
    assert sum(map(check_put, samples)) > 200
    assert sum(map(check_get, samples)) > 80


def _told(machine: Machine, data: bytes, request: rpc_pb2.PutRequest | None) -> tuple[int, bytes, str]:
    outcome = machine.applier.apply(Kind.PUT, data, request)
    machine.store.set_applied(machine.store.applied_index + 1, 1)
    return outcome.revision, outcome.body, repr(outcome.error)


@pytest.mark.parametrize("changed", ["nothing", "alarm", "quota", "users"])
def test_states_and_answers_of_puts_are_the_same(changed: str) -> None:
    rng, taken, messages = Random(3), Machine(), Machine()
    for machine in (taken, messages):
        machine.apply(rpc_pb2.LeaseGrantRequest(ID=127, TTL=60))
        if changed == "alarm":
            machine.apply(rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=1, alarm=rpc_pb2.NOSPACE))
        elif changed == "quota":
            machine.applier.quotas.is_active = True
        elif changed == "users":
            machine.applier.auth.is_enabled = True
    outcomes = set()
    for _ in range(300):
        data = encoded(rng)
        try:
            message = rpc_pb2.PutRequest.FromString(data)
        except DecodeError:
            continue
        if not message.key:
            continue
        told = _told(taken, data, None)
        assert told == _told(messages, data, message), data.hex()
        outcomes.add(told[2])
        read = rpc_pb2.RangeRequest(key=message.key)
        assert ranges.get(taken.store, message.key) == ranges.execute(messages.store, read)
    assert taken.hash() == messages.hash()
    refusal = {"alarm": "NoSpaceError", "users": "Error"}.get(changed, "LeaseNotFoundError")
    assert any(refusal in outcome for outcome in outcomes)
    assert ("None" in outcomes) is (changed in {"nothing", "quota"})
