"""Large answers as JSON, a piece at a time, from their wire form.

    work = encode_large(descriptor, pieces)      # a generator: text of JSON, or None for a pause

A message that is small is parsed and written at once (``encoder``). Of a large one the fields are walked, and its large
parts likewise, so that neither an answer's objects nor its text are ever there as a whole. What comes here are our own
answers: fields in ascending order, each single field once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from raftkv.server.gateway.encoder import encoder_of, field_encoder

SMALL_BYTES: Final = 4 * 1024
"""Messages up to this size are written at once: 0.2 ms or less."""

Text = Generator[str, None, None]

_LENGTH: Final = 2
"""The wire type of what has a length before it."""


class _Rope:
    """Bytes in pieces, taken from the front."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = deque(pieces)
        self._at = 0
        self.left_bytes = sum(map(len, pieces))

    def take(self, size_bytes: int) -> bytes:
        """Take so many bytes."""
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
        """Take a number; also returns its bytes."""
        raw = bytearray()
        while True:
            raw += self.take(1)
            if raw[-1] < 0x80:
                break
        return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(raw)), bytes(raw)


def encode_large(descriptor: Descriptor, pieces: Sequence[bytes]) -> Text:
    """Write a message, however large, piece by piece.

    Arguments:
        descriptor: of the message.
        pieces: its wire form.
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
