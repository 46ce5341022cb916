"""The wire protocol of TCPStore, as in torch 2.13. No I/O: parses bytes into requests, encodes answers as bytes.

A connection begins with VALIDATE and a magic number. Each request is one byte for the operation, then its fields:
numbers are little-endian, 64 bits; strings are a length and the bytes. SET, MULTI_SET, APPEND and QUEUE_PUSH are not
answered, so clients send many of them at once. A WAIT or BARRIER is answered when its condition holds, and other
requests may be sent and answered meanwhile. CANCEL_WAIT is answered by 1 whether or not there was a wait.

    >>> reader = Reader()
    >>> reader.feed(VALIDATION + b"\\x08" + pack_bytes(b"/key"))
    >>> [request.op for request in reader.requests()]
    [<Op.VALIDATE: 0>, <Op.DELETE_KEY: 8>]

All sizes that a client controls are bounded, as in torch's own server: a frame that exceeds a bound, or is malformed,
raises ``FrameError``, after which the connection cannot be used. Each byte is parsed once, even if it arrives in small
pieces, and no call parses more than ``STRINGS_PER_TURN`` strings.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

MAGIC: Final = 0x3C85F7CE
KEY_BYTES_MAX: Final = 8 * 1024
VALUE_BYTES_MAX: Final = 8 * 1024 * 1024
KEYS_MAX: Final = 128 * 1024
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum bytes of one request with all its keys and values; torch's own server has no such limit."""

STRINGS_PER_TURN: Final = 2048
"""Maximum strings parsed by one call of ``Reader.next``, which takes about 2 ms."""
STRING_OVERHEAD_BYTES: Final = 48
"""Memory of a short string as an object, besides its bytes."""

READY: Final = b"\x00"
"""Answer to WAIT and BARRIER, and to a CHECK whose keys all exist."""
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
    """Bytes that are not a request, or exceed a limit."""


class _Shape(NamedTuple):
    """The fields of an operation: a key and a fixed number of values, once or repeated; then a number.

    Attributes:
        is_counted: the fields begin with how many keys there are.
        keys: 0 or 1.
        values: value for each key.
        number_bytes: size of the number at the end; 0: none.
    """

    is_counted: bool = False
    keys: int = 1
    values: int = 0
    number_bytes: int = 0


_SHAPES: Final[dict[int, tuple[Op, _Shape]]] = {
    op: (op, shape)
    for ops, shape in (
        ((Op.GET, Op.DELETE_KEY, Op.QUEUE_POP, Op.QUEUE_LEN), _Shape()),
        ((Op.SET, Op.APPEND, Op.QUEUE_PUSH), _Shape(values=1)),
        ((Op.COMPARE_SET,), _Shape(values=2)),
        ((Op.ADD, Op.BARRIER), _Shape(number_bytes=8)),
        ((Op.CHECK, Op.WAIT, Op.MULTI_GET), _Shape(is_counted=True)),
        ((Op.MULTI_SET,), _Shape(is_counted=True, values=1)),
        ((Op.VALIDATE, Op.PING), _Shape(keys=0, number_bytes=4)),
        ((Op.GETNUMKEYS, Op.CANCEL_WAIT, Op.LIST_KEYS), _Shape(keys=0)),
    )
    for op in ops
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        op: requested operation.
        keys: keys of the request.
        values: what goes with them, if the operation has values; COMPARE_SET: what is expected, and the new value.
        number: ADD: how much; BARRIER: how many; PING: what to send back.
        size_bytes: size of the frame.
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
    """Parses the bytes of one connection into requests, one at a time; pending requests stay bytes.

    Attributes:
        is_cut_short: the last ``next`` found no whole request because it had done enough, not for want of bytes.
    """

    def __init__(self) -> None:
        self.is_cut_short = False
        self._buffer = bytearray()
        self._at = 0
        # The incomplete request: its operation, its strings so far and their final number (-1: not known yet).
        self._is_begun = False
        self._op = Op.VALIDATE
        self._shape = _Shape()
        self._strings: list[bytes] = []
        self._strings_total = -1
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    @property
    def buffered_bytes(self) -> int:
        """Number of received bytes that are not parsed yet."""
        return len(self._buffer) - self._at

    @property
    def held_bytes(self) -> int:
        """Memory of the reader: unparsed bytes, and the strings of the incomplete request."""
        return self.buffered_bytes + self._size + len(self._strings) * STRING_OVERHEAD_BYTES

    def requests(self) -> Iterator[Request]:
        """Yield the complete requests.

        Raises:
            FrameError: the next bytes are not a request.
        """
        while (request := self.next()) is not None or self.is_cut_short:
            if request is not None:
                yield request

    def next(self) -> Request | None:
        """Return the next request; None: it is incomplete, or (``is_cut_short``) call again in another turn.

        Raises:
            FrameError: the next bytes are not a request.
        """
        self.is_cut_short = False
        request = self._next()
        if request is None or self._at > len(self._buffer) // 2:
            del self._buffer[: self._at]
            self._at = 0
        return request

    def _next(self) -> Request | None:
        if not self._is_begun and not self._begin():
            return None
        if self._strings_total < 0 and not self._count():
            return None
        turn_end = len(self._strings) + STRINGS_PER_TURN
        while len(self._strings) < self._strings_total:
            if len(self._strings) == turn_end:
                self.is_cut_short = True
                return None
            string = self._string()
            if string is None:
                return None
            self._strings.append(string)
        return self._finish()

    def _begin(self) -> bool:
        first = self._take(1)
        if first is None:
            return False
        found = _SHAPES.get(first[0])
        if found is None:
            raise FrameError(f"{first[0]} is not an operation of TCPStore")
        self._op, self._shape = found
        self._is_begun = True
        self._strings_total = -1 if self._shape.is_counted else self._shape.keys * (1 + self._shape.values)
        return True

    def _count(self) -> bool:
        taken = self._take(8)
        if taken is None:
            return False
        count = int.from_bytes(taken, "little")
        if count > KEYS_MAX:
            raise FrameError(f"{count} keys in one request, the limit is {KEYS_MAX}")
        self._strings_total = count * (1 + self._shape.values)
        return True

    def _string(self) -> bytes | None:
        start = self._at + 8
        if start > len(self._buffer):
            return None
        size = int.from_bytes(self._buffer[self._at : start], "little")
        is_value = len(self._strings) % (1 + self._shape.values)
        limit, what = (VALUE_BYTES_MAX, "value") if is_value else (KEY_BYTES_MAX, "key")
        if size > limit:
            raise FrameError(f"a {what} of {size} bytes, the limit is {limit}")
        if self._size + 8 + size > FRAME_BYTES_MAX:
            raise FrameError(f"a request of more than {FRAME_BYTES_MAX} bytes")
        end = start + size
        if end > len(self._buffer):
            return None
        self._at = end
        self._size += 8 + size
        return bytes(self._buffer[start:end])

    def _finish(self) -> Request | None:
        shape, number = self._shape, 0
        if shape.number_bytes:
            taken = self._take(shape.number_bytes)
            if taken is None:
                return None
            number = int.from_bytes(taken, "little", signed=shape.number_bytes == 8)
        strings, step = self._strings, 1 + shape.values
        values = strings[1::2] if step == 2 else strings[1:] if step > 2 else ()
        request = Request(self._op, tuple(strings[::step]), tuple(values), number, self._size)
        self._is_begun, self._strings, self._strings_total, self._size = False, [], -1, 0
        return request

    def _take(self, size: int) -> bytes | None:
        end = self._at + size
        if end > len(self._buffer):
            return None
        taken = bytes(self._buffer[self._at : end])
        self._at = end
        self._size += size
        return taken


VALIDATION: Final = struct.pack("<BI", Op.VALIDATE, MAGIC)
"""First bytes of every client."""


def pack_bytes(value: bytes) -> bytes:
    """Pack a string as in requests and answers."""
    return struct.pack("<Q", len(value)) + value


def pack_many(values: Iterable[bytes]) -> bytes:
    """Pack strings, concatenated."""
    return b"".join(map(pack_bytes, values))


def pack_int(number: int) -> bytes:
    """Pack a signed 64-bit number."""
    return struct.pack("<q", number)


def pack_nonce(number: int) -> bytes:
    """Pack the answer to a PING."""
    return struct.pack("<I", number)
