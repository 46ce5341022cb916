"""Messages as JSON, exactly as grpc-gateway 1.16 (Go's jsonpb) writes them.

    encode(message)  ->  '{"header":{"cluster_id":"1",...},"kvs":[{"key":"Zm9v",...}],"count":"1"}'

Names as in ``proto/``, 64-bit integers as strings, bytes in base64, enums by name, what is zero left out, no spaces,
and in strings what Go escapes: ``<``, ``>``, ``&``. A plan is made of each message type once, when it is first met.
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

Encode = Callable[[Any], str]

_HTML: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}
_SHORT: Final = {"\\b": "\\u0008", "\\f": "\\u000c"}
"""Escapes that Python's json has and Go's has not."""

_QUOTED: Final = frozenset(
    {
        *(FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_SINT64),
        *(FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64),
    }
)


def encode_string(text: str) -> str:
    """Return a string as Go's ``encoding/json`` writes it.

    >>> print(encode_string('a <b> "c"'))
    "a \\u003cb\\u003e \\"c\\""
    """
    quoted = json.dumps(text, ensure_ascii=False).translate(_HTML)
    if "\\" in quoted and ("\\b" in quoted or "\\f" in quoted):
        return _with_long_escapes(quoted)
    return quoted


def _with_long_escapes(quoted: str) -> str:
    parts = quoted.split("\\\\")
    for short, long in _SHORT.items():
        parts = [part.replace(short, long) for part in parts]
    return "\\\\".join(parts)


def _quoted(value: int) -> str:
    return f'"{value}"'


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _bytes(value: bytes) -> str:
    return '"' + b2a_base64(value, newline=False).decode("ascii") + '"'


def _enum(field: FieldDescriptor) -> Encode:
    enum: Any = field.enum_type
    names = {value.number: f'"{value.name}"' for value in enum.values}

    def encode_enum(number: int) -> str:
        return names.get(number) or str(number)

    return encode_enum


def field_encoder(field: FieldDescriptor) -> Encode:
    """Return what encodes one value of a field, without its name.

    Arguments:
        field: of a message.
    """
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        message_type: Any = field.message_type
        return encoder_of(message_type)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return _enum(field)
    if field.type in _QUOTED:
        return _quoted
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _bytes
    if field.type == FieldDescriptor.TYPE_BOOL:
        return _bool
    return encode_string if field.type == FieldDescriptor.TYPE_STRING else str


def _of_field(field: FieldDescriptor) -> Encode:
    encode_value = field_encoder(field)
    prefix = f'"{field.name}":'
    if not field.is_repeated:
        return lambda value: prefix + encode_value(value)
    return lambda values: f"{prefix}[{','.join(map(encode_value, values))}]"


_encoders: dict[str, Encode] = {}


def encoder_of(descriptor: Descriptor) -> Encode:
    """Return what encodes messages of a type.

    Arguments:
        descriptor: of the type.
    """
    known = _encoders.get(descriptor.full_name)
    if known is not None:
        return known
    fields: dict[int, Encode] = {}

    def encode_message(message: Any) -> str:
        return "{" + ",".join([fields[field.number](value) for field, value in message.ListFields()]) + "}"

    _encoders[descriptor.full_name] = encode_message  # first: types may hold themselves
    fields |= {field.number: _of_field(field) for field in descriptor.fields}
    return encode_message


def encode(message: Any) -> str:
    """Return a message as JSON.

    Arguments:
        message: of any type.
    """
    return encoder_of(message.DESCRIPTOR)(message)
