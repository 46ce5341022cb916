"""Arbitrary messages built from the descriptors, valid or not, as any client may send them.

Open enums, extreme numbers, oneofs left unset, deep nesting, long repeated fields, unknown fields, damaged bytes.

    payload(Random(7), rpc_pb2.TxnRequest)          # the same bytes for the same seed and protobuf runtime
"""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

INTEGERS = (0, 1, 2, 3, 5, 7, 100, 1_000, -1, -2, 2**31, 2**63 - 1, -(2**63))
ENUMS = (0, 1, 2, 3, 4, 5, 7, -1, 2**31 - 1, -(2**31))
BYTES = (b"", b"\0", b"a", b"b", b"b\0", b"c", b"z", b"\xff", b"a/", b"a0", b"k" * 300)
TEXTS = ("", "a", "http://127.0.0.1:1", "\N{SNOWMAN}\n", "x" * 300)
UNKNOWN_FIELD = b"\xc2\x3e\x03abc"
"""Field 1000, length-delimited."""

_UNSIGNED = frozenset(
    (
        FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_UINT32,
        FieldDescriptor.TYPE_FIXED64,
        FieldDescriptor.TYPE_FIXED32,
    )
)
_NARROW = frozenset((FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_FIXED32))


def payload(rng: Random, message: type[Any], depth: int = 6) -> bytes:
    """Bytes of an arbitrary message, now and then with an unknown field, or damaged."""
    data: bytes = build(rng, message, depth).SerializeToString()
    if rng.random() < 0.1:
        data += UNKNOWN_FIELD
    if data and rng.random() < 0.05:
        position = rng.randrange(len(data))
        data = data[:position] + bytes((rng.randrange(256),)) + data[position + 1 :]
    return data


def build(rng: Random, message: type[Any], depth: int = 6) -> Any:
    """An arbitrary message; ``depth`` bounds how deep others nest in it."""
    made = message()
    _fill(rng, made, made.DESCRIPTOR, depth)
    return made


def _fill(rng: Random, made: Any, descriptor: Descriptor, depth: int) -> None:
    chosen = {oneof.name: rng.choice([None, *oneof.fields, *oneof.fields]) for oneof in descriptor.oneofs}
    for field in descriptor.fields:
        if field.containing_oneof is not None:
            if chosen[field.containing_oneof.name] is not field:
                continue
        elif rng.random() < 0.3:
            continue
        _set(rng, made, field, depth)


def _set(rng: Random, made: Any, field: FieldDescriptor, depth: int) -> None:
    is_message = field.type == FieldDescriptor.TYPE_MESSAGE
    if is_message and depth <= 0:
        return
    value = getattr(made, field.name)
    if hasattr(value, "extend"):
        for _ in range(rng.choice((0, 1, 1, 2, 3, 3, 20))):
            if is_message:
                _fill(rng, value.add(), field.message_type, depth - 1)
            else:
                value.append(_scalar(rng, field))
    elif is_message:
        value.SetInParent()
        _fill(rng, value, field.message_type, depth - 1)
    else:
        setattr(made, field.name, _scalar(rng, field))


def _scalar(rng: Random, field: FieldDescriptor) -> Any:
    kind = field.type
    if kind == FieldDescriptor.TYPE_BYTES:
        return rng.choice(BYTES)
    if kind == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if kind == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.TYPE_ENUM:
        return rng.choice(ENUMS)
    number = rng.choice(INTEGERS)
    if kind in _NARROW:
        number %= 2**31
    return number % 2**64 if kind in _UNSIGNED else number
