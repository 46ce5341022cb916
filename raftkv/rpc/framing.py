"""Length-prefixed messages: gRPC's five bytes in front of each message, and their reassembly.

::

    | 0 | 00 00 00 05 | hello |        compressed flag, length (big endian), message

The messages do not depend on how the bytes are cut. The length is checked as soon as the prefix is known, before any
byte of the message is kept, so a peer can make us hold at most one message below the limit per stream.
A set compressed flag is an error here, with grpc-go's text.
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Iterable
from struct import Struct
from typing import Final

from raftkv.rpc.status import Code, Headers, RpcError, decode_binary, encode_binary

SMALL_PIECE_BYTES = 1024
"""Payloads of unfinished messages below this size are joined."""

PIECES_FREE = 64
PIECE_BYTES_MIN = 128
"""A message may arrive in 64 pieces of any size; more pieces must have 128 bytes on average."""

PREFIX: Final = Struct(">BI")
PREFIX_BYTES: Final = 5
_pack: Final = PREFIX.pack
_unpack: Final = PREFIX.unpack_from


def frame(message: bytes) -> bytes:
    """Return the message with its prefix."""
    return _pack(0, len(message)) + message


def prefix_of(message: bytes) -> bytes:
    """Return only the prefix: it avoids copying the bytes of a large message."""
    return _pack(0, len(message))


def prefix(size_bytes: int) -> bytes:
    """Return the prefix of a message of the given size."""
    return _pack(0, size_bytes)


def message_too_large(length: int, limit: int) -> RpcError:
    """Return grpc-go's error for a message above the limit (bytes)."""
    return RpcError(Code.RESOURCE_EXHAUSTED, f"grpc: received message larger than max ({length} vs. {limit})")


def refusal_of(flag: int, length: int, limit: int, encoding: bytes | None, on_server: bool = True) -> RpcError:
    """Return grpc-go's error for a prefix that cannot be accepted.

    Arguments:
        flag, length: fields of the prefix; the length in bytes.
        limit: message limit in bytes.
        encoding: ``grpc-encoding`` of the call.
        on_server: whether the server refuses: the texts differ.
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
    """Return grpc-go's error for a ``grpc-encoding`` that is not supported."""
    quoted = '"' + encoding.decode("latin-1") + '"'
    code = Code.UNIMPLEMENTED if on_server else Code.INTERNAL
    return RpcError(code, f"grpc: Decompressor is not installed for grpc-encoding {quoted}")


class MessageAssembler:
    """Turns the DATA payloads of one stream into messages.

    Small pieces are joined as they arrive: as separate objects they would take many times their size.

    Attributes:
        held_bytes: bytes of the unfinished message (with its prefix) held here.
        pieces: payloads received of the unfinished message.
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
        """True if the unfinished message arrives in pieces so small that they cost more than they are worth."""
        return self.pieces > PIECES_FREE and self.pieces * PIECE_BYTES_MIN > self.held_bytes

    @property
    def is_busy(self) -> bool:
        """Whether received messages are not ready yet; never here."""
        return False

    def drop(self) -> None:
        """Drop the received bytes."""
        self._chunks.clear()
        self.held_bytes = self.pieces = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take a payload, and return the messages it completes.

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
            if length == size and not flag and length <= self._limit:  # nearly always: one whole message
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


# -- packed ---------------------------------------------------------------------------------------------------------
#
# Compressed messages of a call: gzip, unpacked a piece at a time.
#
# A few octets may unpack to millions, or take long to unpack to nothing. So one step takes at most ``PIECE_BYTES`` of
# the input, and makes at most ``ROOM_BYTES`` of output; between two steps the caller checks whether there is time for
# another. Unpacked bytes count as an unfinished message until it is whole, and no message grows above the message
# limit.
#
# Codes and texts are those of grpc-go, which trusts the size at the end of the data before it unpacks anything. (For
# damaged deflate data grpc-go also gives the offset.) Answers are never compressed: a client accepts plain ones.

PIECE_BYTES: Final = 8 * 1024
"""Input of one step. The worst input, blocks with nothing but their tables, takes 2 ms."""
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
    """One compressed message that is being unpacked.

    Arguments:
        packed: gzip members, one after another.
        limit_bytes: limit on the unpacked message.

    Attributes:
        held_bytes: memory in use: the packed message, and its unpacked part.

    Raises:
        RpcError: the message does not begin with a gzip header, or announces a size above the limit.
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
        """Memory in use, packed and unpacked."""
        return len(self._packed) + len(self._made)

    def _member(self) -> zlib._Decompress:
        """Begin a gzip member; its whole header must be there."""
        rest = len(self._packed) - self._at
        if rest < _HEAD_BYTES:
            raise _broken("unexpected EOF" if rest else "EOF")
        if not self._packed.startswith(_HEAD, self._at):
            raise _broken("gzip: invalid header")
        return zlib.decompressobj(_WITH_GZIP_HEAD)

    def step(self) -> bytes | None:
        """Unpack one piece. Returns the message after the last piece.

        Raises:
            RpcError: the data is not gzip, or unpacks to more than the message limit.
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
        """End a member: another may follow it."""
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
    """Messages of a call with ``grpc-encoding: gzip``: each may be compressed or plain.

    While ``is_busy``, call ``feed(b"")`` to continue with the received bytes, and feed nothing else. Waiting messages
    count with their prefix, so ``held_bytes`` is above zero then.
    """

    __slots__ = ("_kept_bytes", "_refused", "_unpacking", "_waiting", "_waiting_bytes")

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes, GZIP)
        self._kept_bytes = 0
        self._refused: tuple[int, int] | None = None
        """The flag and the length that will end the call, after the waiting messages."""
        self._unpacking: Unpacking | None = None
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0

    @property
    def is_busy(self) -> bool:
        """Whether received messages are not unpacked yet."""
        return self._unpacking is not None or len(self._waiting) > 0 or self._refused is not None

    def feed(self, data: bytes) -> list[bytes]:
        """Take a payload, or continue with the last one. Returns the completed messages."""
        return self._go_on() if self.is_busy else super().feed(data)

    def drop(self) -> None:
        """Drop the received bytes."""
        super().drop()
        self._unpacking = self._refused = None
        self._waiting.clear()
        self._waiting_bytes = 0

    def _split(self, data: bytes) -> list[bytes]:
        """Set all whole messages aside, and begin with the first one."""
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


# -- metadata -------------------------------------------------------------------------------------------------------
#
# Call metadata: timeouts in header form, user metadata in both directions, reserved names.
#
# Names are lower-case ASCII; a name that ends in ``-bin`` carries bytes, which cross the wire as base64. Users of
# this package see such values as plain bytes. Source: gRPC's PROTOCOL-HTTP2.md, "Requests".

Metadata = Iterable[tuple[str | bytes, str | bytes]]
"""User metadata as callers write it: pairs of a name and a value."""

_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT_DIGITS_MAX = 8
_LARGEST_VALUE = 10**_TIMEOUT_DIGITS_MAX - 1


def encode_timeout(timeout_s: float) -> bytes:
    """Return the ``grpc-timeout`` value: the finest unit whose number has at most 8 digits, rounded up."""
    for unit, per_second in ((b"n", 10**9), (b"u", 10**6), (b"m", 10**3), (b"S", 1)):
        number = -int(-timeout_s * per_second // 1)
        if number <= _LARGEST_VALUE:
            return b"%d%s" % (max(number, 0), unit)
    return b"%dH" % min(-int(-timeout_s // 3600), _LARGEST_VALUE)


def decode_timeout(value: bytes) -> float:
    """Return the seconds of a ``grpc-timeout`` value; ValueError when it is not 1-8 digits and a unit."""
    unit = _UNIT_S.get(value[-1:])
    digits = value[:-1]
    if unit is None or not digits.isdigit() or len(digits) > _TIMEOUT_DIGITS_MAX:
        raise ValueError(f"not a timeout: {value[:32]!r}")
    return int(digits) * unit


_NAME = re.compile(rb"[0-9a-z_.\-]+")
_VALUE = re.compile(rb"[\x20-\x7e]*")


def encode_metadata(metadata: Metadata) -> Headers:
    """Return user metadata as header fields, in order.

    Raises:
        ValueError: a name is invalid in gRPC or reserved, or a text value is not printable ASCII.
    """
    return tuple(_encode_field(name, value) for name, value in metadata)


def _encode_field(name: str | bytes, value: str | bytes) -> tuple[bytes, bytes]:
    key = name.encode("ascii") if isinstance(name, str) else name
    raw = value.encode("utf-8") if isinstance(value, str) else value
    if not _NAME.fullmatch(key) or key.startswith(b"grpc-") or key in _RESERVED:
        raise ValueError(f"not a metadata name: {key!r}")
    if key.endswith(b"-bin"):
        return key, encode_binary(raw)
    if not _VALUE.fullmatch(raw):
        raise ValueError(f"metadata value of {key!r} is not printable ASCII; use a name that ends in -bin")
    return key, raw


_RESERVED = frozenset((b"te", b"content-type", b"user-agent", b"host", b"connection", b"content-length"))


def user_metadata(headers: Headers) -> dict[str, str | bytes]:
    """Return a request's or response's metadata by name; the last of equal names wins.

    Fields of HTTP and gRPC are left out, except ``:authority`` and ``user-agent``, which handlers use. The value of a
    ``-bin`` name is bytes. So is a value that is not UTF-8, so that a handler can refuse it.
    """
    found: dict[str, str | bytes] = {}
    for name, value in headers:
        if name in _HIDDEN or name.startswith(b"grpc-"):
            continue
        found[name.decode("latin-1")] = _decode_value(name, value)
    return found


_HIDDEN = frozenset((b":method", b":scheme", b":path", b":status", b"te", b"content-type"))


def _decode_value(name: bytes, value: bytes) -> str | bytes:
    try:
        return decode_binary(value) if name.endswith(b"-bin") else value.decode("utf-8")
    except ValueError:
        return value
