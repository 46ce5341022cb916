"""Compressed messages of a call: gzip, a piece at a time.

A few octets may be millions when they are unpacked, or take long to unpack to nothing. So no step takes more than
``PIECE_BYTES`` of what came, or makes more than ``ROOM_BYTES`` of it; the caller asks between two of them whether
there is time for another. Unpacked bytes count as an unfinished message until it is whole, and none
grows above the limit on messages.

Codes and texts are those of grpc-go, which trusts the size at the end of the data before it unpacks anything. Of
damaged deflate data it also says where. Answers are never compressed: a client takes them plain.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Final

from raftkv.rpc.framing import PREFIX, PREFIX_BYTES, MessageAssembler, message_too_large, refusal_of
from raftkv.rpc.status import Code, RpcError

PIECE_BYTES: Final = 8 * 1024
"""The worst that can be made of it, blocks that hold nothing but their tables, takes 2 ms."""
ROOM_BYTES: Final = 128 * 1024

GZIP: Final = b"gzip"
ENCODINGS: Final = frozenset((b"identity", b"", GZIP))
"""Encodings of a request; an absent one means identity."""

_HEAD: Final = b"\x1f\x8b\x08"
_HEAD_BYTES: Final = 10
_SIZE_BYTES: Final = 4
_WITH_GZIP_HEAD: Final = 31
_HEAD_WRONG: Final = "header"
_END_WRONG: Final = ("incorrect data check", "incorrect length check")


class Unpacking:
    """One compressed message on its way to what it was.

    Arguments:
        packed: members of gzip, one behind the other.
        limit_bytes: on what they hold.

    Attributes:
        held_bytes: what it takes: the packed message, and what is unpacked of it.

    Raises:
        RpcError: it begins like nothing that is known, or says itself that it is too large.
    """

    __slots__ = ("_at", "_inflater", "_limit", "_made", "_packed", "_tail")

    def __init__(self, packed: bytes, limit_bytes: int) -> None:
        self._packed = packed
        self._limit = limit_bytes
        self._made = bytearray()
        self._at = 0
        self._tail = b""
        self._inflater = self._member()
        said = int.from_bytes(packed[-_SIZE_BYTES:], "little")
        if said > limit_bytes:
            raise message_too_large(said, limit_bytes)

    @property
    def held_bytes(self) -> int:
        """Memory that it takes, packed and unpacked."""
        return len(self._packed) + len(self._made)

    def _member(self) -> zlib._Decompress:
        """Begin a member, of whose head all must be there."""
        rest = len(self._packed) - self._at
        if rest < _HEAD_BYTES:
            raise _broken("unexpected EOF" if rest else "EOF")
        if not self._packed.startswith(_HEAD, self._at):
            raise _broken("gzip: invalid header")
        return zlib.decompressobj(_WITH_GZIP_HEAD)

    def step(self) -> bytes | None:
        """Unpack a piece; the message, when that was the last.

        Raises:
            RpcError: what came is no gzip, or holds more than a message may.
        """
        data = self._tail
        if not data:
            data = self._packed[self._at : self._at + PIECE_BYTES]
            self._at += len(data)
        room = min(ROOM_BYTES, self._limit + 1 - len(self._made))
        inflater = self._inflater
        try:
            made = inflater.decompress(data, room)
        except zlib.error as error:
            raise _broken(_go_text(str(error))) from None
        self._made += made
        if len(self._made) > self._limit:
            raise message_too_large(self._limit + 1, self._limit)
        if inflater.eof:
            return self._ended(inflater)
        self._tail = inflater.unconsumed_tail
        if not self._tail and self._at == len(self._packed) and len(made) < room:
            raise _broken("unexpected EOF")
        return None

    def _ended(self, inflater: zlib._Decompress) -> bytes | None:
        """A member is whole: there may be another behind it."""
        self._at -= len(inflater.unused_data)
        self._tail = b""
        if self._at == len(self._packed):
            return bytes(self._made)
        self._inflater = self._member()
        return None


def _go_text(text: str) -> str:
    if _HEAD_WRONG in text:
        return "gzip: invalid header"
    return "gzip: invalid checksum" if any(one in text for one in _END_WRONG) else "flate: corrupt input"


def _broken(text: str) -> RpcError:
    return RpcError(Code.INTERNAL, f"grpc: failed to decompress the received message {text}")


class PackedAssembler(MessageAssembler):
    """Messages of a call that said ``grpc-encoding: gzip``: each may be compressed or plain.

    While ``is_busy``, ``feed(b"")`` goes on with what has come, and nothing else may be fed. Waiting bytes count with
    their prefix, so that ``held_bytes`` is more than nothing then.
    """

    __slots__ = ("_kept_bytes", "_refused", "_unpacking", "_waiting", "_waiting_bytes")

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes, GZIP)
        self._kept_bytes = 0
        self._refused: tuple[int, int] | None = None
        """The flag and the length that end the call, behind the messages that wait."""
        self._unpacking: Unpacking | None = None
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0

    @property
    def is_busy(self) -> bool:
        """Whether messages that have come are not unpacked yet."""
        return self._unpacking is not None or len(self._waiting) > 0 or self._refused is not None

    def feed(self, data: bytes) -> list[bytes]:
        """Take a payload, or go on with the last one; returns what is whole."""
        return self._go_on() if self.is_busy else super().feed(data)

    def drop(self) -> None:
        """Forget what has come."""
        super().drop()
        self._unpacking = self._refused = None
        self._waiting.clear()
        self._waiting_bytes = 0

    def _split(self, data: bytes) -> list[bytes]:
        """Set all whole messages aside, and begin with the first."""
        offset, size = 0, len(data)
        self._need = PREFIX_BYTES
        while size - offset >= PREFIX_BYTES:
            flag, length = PREFIX.unpack_from(data, offset)
            if flag > 1 or length > self._limit:
                self._refused = (0 if flag == 1 else flag, length)
                self._waiting_bytes += PREFIX_BYTES
                offset = size
                break
            end = offset + PREFIX_BYTES + length
            if end > size:
                self._need = PREFIX_BYTES + length
                break
            self._waiting.append((flag, data[offset + PREFIX_BYTES : end]))
            self._waiting_bytes += PREFIX_BYTES + length
            offset = end
        self._keep(data[offset:])
        self._kept_bytes = self.held_bytes
        return self._go_on() if self.is_busy else []

    def _go_on(self) -> list[bytes]:
        """Do one step with the first message that is not unpacked."""
        unpacking = self._unpacking
        message: bytes | None = None
        if unpacking is None:
            if not self._waiting and self._refused is not None:
                raise refusal_of(*self._refused, self._limit, GZIP)
            flag, message = self._waiting.popleft()
            self._waiting_bytes -= PREFIX_BYTES + len(message)
            if flag:
                unpacking = self._unpacking = Unpacking(message, self._limit)
        if unpacking is not None:
            message = unpacking.step()
            if message is not None:
                unpacking = self._unpacking = None
        unpacked_bytes = 0 if unpacking is None else unpacking.held_bytes
        self.held_bytes = self._kept_bytes + self._waiting_bytes + unpacked_bytes
        return [] if message is None else [message]
