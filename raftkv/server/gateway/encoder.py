"""Answers as JSON, exactly as grpc-gateway 1.16 (Go's jsonpb) writes them: messages, large messages, errors.

    encode(message)  ->  '{"header":{"cluster_id":"1",...},"kvs":[{"key":"Zm9v",...}],"count":"1"}'
    encode_large(descriptor, pieces)        # a text generator for the wire form of a large message
    error_body(code, text)                  # body for a call that failed

Names are those of ``proto/``. 64-bit integers are strings, bytes are base64, enums are names, zero values are left out,
and there are no spaces. Strings escape what Go escapes: ``<``, ``>``, ``&``. The encoder of a message type is created
at its first use.

A small message is parsed and written at once. A large message is written field by field, and its large parts in the
same way, so neither the objects nor the text of an answer are ever in memory as a whole. ``encode_large`` reads only
our own answers: fields in ascending order, each single field once.
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from collections import deque
from collections.abc import Callable, Generator, Sequence
from http import HTTPStatus
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from raftkv.rpc.status import Code

Encode = Callable[[Any], str]

_HTML: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}
_SHORT: Final = {"\\b": "\\u0008", "\\f": "\\u000c"}
"""Escapes written by Python's json but not by Go's."""

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
    """Return the function that encodes one value of a field, without its name.

    Arguments:
        field: field of a message.
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
    """Return the function that encodes messages of a type.

    Arguments:
        descriptor: descriptor of the type.
    """
    known = _encoders.get(descriptor.full_name)
    if known is not None:
        return known
    fields: dict[int, Encode] = {}

    def encode_message(message: Any) -> str:
        return "{" + ",".join([fields[field.number](value) for field, value in message.ListFields()]) + "}"

    _encoders[descriptor.full_name] = encode_message  # stored first: types may contain themselves
    fields |= {field.number: _of_field(field) for field in descriptor.fields}
    return encode_message


def encode(message: Any) -> str:
    """Return a message as JSON.

    Arguments:
        message: message of any type.
    """
    return encoder_of(message.DESCRIPTOR)(message)


# -- large messages ----------------------------------------------------------------------------------------------------

SMALL_BYTES: Final = 4 * 1024
"""Messages up to this size are written at once: 0.2 ms or less."""

Text = Generator[str, None, None]

_LENGTH: Final = 2
"""The wire type of values with a length prefix."""


class _Rope:
    """Bytes in pieces, which are taken from the front."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = deque(pieces)
        self._at = 0
        self.left_bytes = sum(map(len, pieces))

    def take(self, size_bytes: int) -> bytes:
        """Take a number of bytes."""
        parts = []
        self.left_bytes -= size_bytes
        while size_bytes:
            piece = self._pieces[0]
            part = piece[self._at : self._at + size_bytes]
            self._at += len(part)
            size_bytes -= len(part)
            if self._at == len(piece):
                self._pieces.popleft()
                self._at = 0
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def varint(self) -> tuple[int, bytes]:
        """Take a number, and return it with its bytes."""
        raw = bytearray()
        while True:
            raw += self.take(1)
            if raw[-1] < 0x80:
                break
        return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(raw)), bytes(raw)


def encode_large(descriptor: Descriptor, pieces: Sequence[bytes]) -> Text:
    """Write a message of any size, piece by piece.

    Arguments:
        descriptor: descriptor of the message.
        pieces: wire form of the message.
    """
    rope = _Rope(pieces)
    yield from _message(descriptor, rope, rope.left_bytes)


def _message(descriptor: Descriptor, rope: _Rope, size_bytes: int) -> Text:
    message_type: Any = message_factory.GetMessageClass(descriptor)
    if size_bytes <= SMALL_BYTES:
        yield encoder_of(descriptor)(message_type.FromString(rope.take(size_bytes)))
        return
    end_bytes = rope.left_bytes - size_bytes
    open_list = 0
    before = "{"
    while rope.left_bytes > end_bytes:
        tag, raw_tag = rope.varint()
        field: Any = descriptor.fields_by_number[tag >> 3]
        if open_list and open_list != field.number:
            before, open_list = "],", 0
        if not field.is_repeated:
            yield f'{before}"{field.name}":'
        elif open_list:
            yield ","
        else:
            open_list = field.number
            yield f'{before}"{field.name}":['
        before = ","
        yield from _value(field, rope, tag, raw_tag, message_type)
    yield "]}" if open_list else "}"


def _value(field: FieldDescriptor, rope: _Rope, tag: int, raw_tag: bytes, message_type: Any) -> Text:
    size_bytes, raw = rope.varint()
    if tag & 7 != _LENGTH:
        whole = message_type.FromString(raw_tag + raw)
        yield field_encoder(field)(getattr(whole, field.name))
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        part_type: Any = field.message_type
        yield from _message(part_type, rope, size_bytes)
    else:
        value = rope.take(size_bytes)
        yield field_encoder(field)(value.decode() if field.type == FieldDescriptor.TYPE_STRING else value)


# -- errors ------------------------------------------------------------------------------------------------------------

HTTP_STATUS: Final[dict[int, int]] = {
    Code.OK: 200,
    Code.CANCELLED: 408,
    Code.UNKNOWN: 500,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DATA_LOSS: 500,
    Code.UNAUTHENTICATED: 401,
}


def http_status(code: int) -> int:
    """Return the HTTP status of a gRPC code.

    Arguments:
        code: gRPC code.
    """
    return HTTP_STATUS.get(code, 500)


def error_body(code: int, text: str) -> bytes:
    """Return the body for a call that failed.

    >>> error_body(3, "etcdserver: key is not provided").decode()
    '{"error":"etcdserver: key is not provided","code":3,"message":"etcdserver: key is not provided"}'
    """
    shown = encode_string(text)
    return f'{{"error":{shown},"code":{int(code)},"message":{shown}}}'.encode()


def stream_error(code: int, text: str) -> bytes:
    """Return the last line of a stream that failed.

    Arguments:
        code, text: code and text of the status.
    """
    status = http_status(code)
    phrase = encode_string(HTTPStatus(status).phrase)
    return (
        f'{{"error":{{"grpc_code":{int(code)},"http_code":{status},'
        f'"message":{encode_string(text)},"http_status":{phrase}}}}}'
    ).encode()
