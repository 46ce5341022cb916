"""The wire protocol of TCPStore, as torch 2.13 speaks it. No I/O: bytes in, requests out; answers as bytes.

A connection begins with VALIDATE and a magic number. Then come requests, one byte of operation and its fields: numbers
are little-endian, 64 bits; strings are a length and that many bytes. SET, MULTI_SET, APPEND and QUEUE_PUSH are not
answered, so clients send many of them at once; a WAIT or BARRIER is answered when it comes true, and other requests
may be sent and answered meanwhile; CANCEL_WAIT is answered by 1 whether or not anything was waited for.

    >>> reader = Reader()
    >>> reader.feed(VALIDATION + b"\\x08" + pack_bytes(b"/key"))
    >>> [request.op for request in reader.requests()]
    [<Op.VALIDATE: 0>, <Op.DELETE_KEY: 8>]

Everything that a client can make grow is bounded, as in torch's own server: a frame that breaks a bound, or makes no
sense, raises ``FrameError``, after which the connection is of no use.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

MAGIC: Final = 0x3C85F7CE
KEY_BYTES_MAX: Final = 8 * 1024
VALUE_BYTES_MAX: Final = 8 * 1024 * 1024
KEYS_MAX: Final = 128 * 1024
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of one request with all its keys and values; torch's own server has no such bound."""

READY: Final = b"\x00"
"""Answer to WAIT and BARRIER, and to a CHECK whose keys are all there."""
NOT_READY: Final = b"\x01"
CANCELED: Final = b"\x01"


class Op(IntEnum):
    """The first byte of a request."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


class FrameError(Exception):
    """Bytes that are no request, or break a bound."""


class _Incomplete(Exception):
    """The rest of the request has not come yet.

    Attributes:
        end: of the field that is not there.
    """

    def __init__(self, end: int) -> None:
        self.end = end


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        op: what is asked for.
        keys: of the request, one or many.
        values: what goes with them, if the operation has values; COMPARE_SET: what is expected, and the new value.
        number: ADD: how much; BARRIER: how many; PING: what to send back.
        size_bytes: of the frame.
    """

    op: Op
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0
    size_bytes: int = 0

    @property
    def key(self) -> bytes:
        """The only key."""
        return self.keys[0]


class Reader:
    """Cuts the bytes of one connection into requests."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0
        # Of what has come of a request: how much of it must be there before it is worth another look.
        self._needed = 1

    def feed(self, data: bytes) -> None:
        """Take bytes as they came."""
        self._buffer += data

    def requests(self) -> Iterator[Request]:
        """The requests that have come as a whole.

        Raises:
            FrameError: the next bytes are no request.
        """
        start = 0
        try:
            while len(self._buffer) - start >= self._needed:
                self._at = start
                request = self._request(start)
                start = self._at
                self._needed = 1
                yield request
        except _Incomplete as incomplete:
            self._needed = incomplete.end - start
            if self._needed > FRAME_BYTES_MAX:
                raise FrameError(f"a request of more than {FRAME_BYTES_MAX} bytes") from None
        finally:
            del self._buffer[:start]

    def _request(self, start: int) -> Request:
        number = self._take(1)[0]
        try:
            op = Op(number)
        except ValueError:
            raise FrameError(f"{number} is no operation of TCPStore") from None
        keys, values, count = self._fields(op)
        return Request(op, keys, values, count, self._at - start)

    def _fields(self, op: Op) -> tuple[tuple[bytes, ...], tuple[bytes, ...], int]:
        if op in (Op.GETNUMKEYS, Op.CANCEL_WAIT, Op.LIST_KEYS):
            return (), (), 0
        if op in (Op.VALIDATE, Op.PING):
            return (), (), int.from_bytes(self._take(4), "little")
        if op in (Op.CHECK, Op.WAIT, Op.MULTI_GET):
            return tuple([self._key() for _ in range(self._count())]), (), 0
        if op is Op.MULTI_SET:
            pairs = [(self._key(), self._value()) for _ in range(self._count())]
            return tuple([key for key, _ in pairs]), tuple([value for _, value in pairs]), 0
        key = self._key()
        if op in (Op.SET, Op.APPEND, Op.QUEUE_PUSH):
            return (key,), (self._value(),), 0
        if op is Op.COMPARE_SET:
            return (key,), (self._value(), self._value()), 0
        if op in (Op.ADD, Op.BARRIER):
            return (key,), (), int.from_bytes(self._take(8), "little", signed=True)
        return (key,), (), 0

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._buffer):
            raise _Incomplete(end)
        taken = bytes(self._buffer[self._at : end])
        self._at = end
        return taken

    def _count(self) -> int:
        count = int.from_bytes(self._take(8), "little")
        if count > KEYS_MAX:
            raise FrameError(f"{count} keys in one request, the limit is {KEYS_MAX}")
        return count

    def _key(self) -> bytes:
        return self._string(KEY_BYTES_MAX, "key")

    def _value(self) -> bytes:
        return self._string(VALUE_BYTES_MAX, "value")

    def _string(self, limit: int, what: str) -> bytes:
        size = int.from_bytes(self._take(8), "little")
        if size > limit:
            raise FrameError(f"a {what} of {size} bytes, the limit is {limit}")
        return self._take(size)


VALIDATION: Final = struct.pack("<BI", Op.VALIDATE, MAGIC)
"""What every client sends first."""


def pack_bytes(value: bytes) -> bytes:
    """A string, as it stands in requests and answers."""
    return struct.pack("<Q", len(value)) + value


def pack_many(values: Iterable[bytes]) -> bytes:
    """Strings, one behind the other."""
    return b"".join(map(pack_bytes, values))


def pack_int(number: int) -> bytes:
    """A signed number of 64 bits."""
    return struct.pack("<q", number)


def pack_nonce(number: int) -> bytes:
    """The answer to a PING."""
    return struct.pack("<I", number)
