"""Length-prefixed messages: gRPC's five bytes in front of each message, and their reassembly.

::

    | 0 | 00 00 00 05 | hello |        compressed flag, length (big endian), message

Any cutting of the bytes gives the same messages. The length is checked when the prefix is known, before a byte of
the message is kept, so a peer can make us hold at most one message below the limit per stream.
A set flag is an error here, worded as grpc-go words it; ``packed`` has the messages of calls that compress them.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from raftkv.rpc.status import Code, RpcError

SMALL_PIECE_BYTES = 1024
"""Payloads of unfinished messages below this are copied together."""

PIECES_FREE = 64
PIECE_BYTES_MIN = 128
"""A message may come in 64 pieces of any size; beyond that they must have 128 bytes on average."""

PREFIX: Final = Struct(">BI")
PREFIX_BYTES: Final = 5
_pack: Final = PREFIX.pack
_unpack: Final = PREFIX.unpack_from


def frame(message: bytes) -> bytes:
    """Return the message with its prefix."""
    return _pack(0, len(message)) + message


def prefix_of(message: bytes) -> bytes:
    """Return only the prefix: for large messages, whose bytes should not be copied."""
    return _pack(0, len(message))


def prefix(size_bytes: int) -> bytes:
    """Return the prefix of a message of a size."""
    return _pack(0, size_bytes)


def message_too_large(length: int, limit: int) -> RpcError:
    """Return the error of grpc-go for a message above the limit (bytes)."""
    return RpcError(Code.RESOURCE_EXHAUSTED, f"grpc: received message larger than max ({length} vs. {limit})")


def refusal_of(flag: int, length: int, limit: int, encoding: bytes | None, on_server: bool = True) -> RpcError:
    """Return the error of grpc-go for a prefix that cannot be accepted.

    Arguments:
        flag, length: of the prefix; the length in bytes.
        limit: on a message, in bytes.
        encoding: of the call's ``grpc-encoding``.
        on_server: which side refuses: the texts differ.
    """
    if flag == 1:
        return _compressed(encoding, on_server)
    if flag != 0:
        return RpcError(Code.INTERNAL, f"grpc: received unexpected payload format {flag}")
    return message_too_large(length, limit)


def _compressed(encoding: bytes | None, on_server: bool) -> RpcError:
    if encoding in (None, b"", b"identity"):
        return RpcError(Code.INTERNAL, "grpc: compressed flag set with identity or empty encoding")
    return decompressor_missing(encoding or b"", on_server)


def decompressor_missing(encoding: bytes, on_server: bool = True) -> RpcError:
    """Return the error of grpc-go for a ``grpc-encoding`` that is not installed."""
    quoted = '"' + encoding.decode("latin-1") + '"'
    code = Code.UNIMPLEMENTED if on_server else Code.INTERNAL
    return RpcError(code, f"grpc: Decompressor is not installed for grpc-encoding {quoted}")


class MessageAssembler:
    """Turns the DATA payloads of one stream into messages.

    Small pieces are put together as they come: as objects of their own they would take many times their size.

    Attributes:
        held_bytes: bytes of the unfinished message (with its prefix) that are kept here.
        pieces: payloads that the unfinished message has come in.
    """

    __slots__ = ("_chunks", "_encoding", "_limit", "_need", "_on_server", "held_bytes", "pieces")

    def __init__(self, limit_bytes: int, encoding: bytes | None = None, on_server: bool = True) -> None:
        self._limit = limit_bytes
        self._encoding = encoding
        self._on_server = on_server
        self._chunks: list[bytes | bytearray] = []
        self._need = 0
        self.held_bytes = 0
        self.pieces = 0

    @property
    def crumbled(self) -> bool:
        """True if the unfinished message comes in pieces so small that taking them costs more than it is worth."""
        return self.pieces > PIECES_FREE and self.pieces * PIECE_BYTES_MIN > self.held_bytes

    @property
    def is_busy(self) -> bool:
        """Whether messages that have come are not ready yet; here they are always."""
        return False

    def drop(self) -> None:
        """Forget what has come."""
        self._chunks.clear()
        self.held_bytes = self.pieces = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take a payload, return the messages it completes.

        Raises:
            RpcError: a prefix announces a message that is too large, compressed or malformed.
        """
        if self._chunks:
            self._append(data)
            if self.held_bytes < self._need:
                return []
            data = b"".join(self._chunks)
            self._chunks.clear()
        size = len(data) - PREFIX_BYTES
        if size >= 0:
            flag, length = _unpack(data)
            if length == size and not flag and length <= self._limit:  # as nearly all come: one, and whole
                self.held_bytes = 0
                self.pieces = 1
                return [data[PREFIX_BYTES:]]
        return self._split(data)

    def _split(self, data: bytes) -> list[bytes]:
        messages = []
        offset, size = 0, len(data)
        self._need = PREFIX_BYTES
        while size - offset >= PREFIX_BYTES:
            flag, length = _unpack(data, offset)
            if flag or length > self._limit:
                raise refusal_of(flag, length, self._limit, self._encoding, self._on_server)
            end = offset + PREFIX_BYTES + length
            if end > size:
                self._need = PREFIX_BYTES + length
                break
            messages.append(data[offset + PREFIX_BYTES : end])
            offset = end
        self._keep(data[offset:])
        return messages

    def _append(self, data: bytes) -> None:
        self.held_bytes += len(data)
        self.pieces += 1
        last = self._chunks[-1]
        if len(data) >= SMALL_PIECE_BYTES:
            self._chunks.append(data)
        elif type(last) is bytearray:
            last += data
        else:
            self._chunks.append(bytearray(data))

    def _keep(self, rest: bytes) -> None:
        self.held_bytes = len(rest)
        self.pieces = 1
        if rest:
            self._chunks.append(rest)
