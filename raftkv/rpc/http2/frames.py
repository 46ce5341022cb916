"""Frames (RFC 9113 sections 4.1 and 6): types, flags, settings, encoding, and errors that end streams or connections.

Errors are those of section 5.4, with the codes of section 7.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9
PRIORITY_UPDATE: Final = 16
"""RFC 9218 section 7.1."""

ACK: Final = 1
END_STREAM: Final = 1
END_HEADERS: Final = 4
PADDED: Final = 8
HAS_PRIORITY: Final = 32

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

HEAD_BYTES: Final = 9
PRIORITY_BYTES: Final = 5
MAX_FRAME_BYTES: Final = 16_384
"""The largest payload accepted and sent: the protocol's default, which every peer accepts."""

WINDOW_BYTES: Final = 65_535
"""Initial window of a stream and of a connection (section 6.9.2)."""

MAX_WINDOW_BYTES: Final = 2**31 - 1
LAST_STREAM: Final = 2**31 - 1

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first octets sent by every client (section 3.4)."""

HEAD: Final = Struct(">HBBBI")
"""Length (two parts), type, flags, stream."""

_head: Final = HEAD.pack


class ErrorCode(IntEnum):
    """Why a stream or a connection ends; the code of RST_STREAM and GOAWAY."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class H2Error(Exception):
    """Base of all exceptions of this package."""


class StreamGoneError(H2Error):
    """A frame cannot be sent: the stream is closed, or our end of it has ended."""


class ConnectionGoneError(H2Error):
    """A frame cannot be sent: the connection has ended."""


class ConnectionFailedError(H2Error):
    """The peer has broken a rule that ends the connection.

    Attributes:
        code: code for the GOAWAY.
    """

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFailedError(H2Error):
    """The peer has broken a rule that ends one stream.

    Attributes:
        code: code for the RST_STREAM.
    """

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    size = len(payload)
    return _head(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def header_frames(stream_id: int, block: bytes, end_stream: bool) -> bytes:
    """Return a header block as HEADERS, followed by CONTINUATION if it needs more frames (section 6.10)."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= MAX_FRAME_BYTES:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    pieces = [block[start : start + MAX_FRAME_BYTES] for start in range(0, len(block), MAX_FRAME_BYTES)]
    middle = (frame(CONTINUATION, 0, stream_id, piece) for piece in pieces[1:-1])
    last = frame(CONTINUATION, END_HEADERS, stream_id, pieces[-1])
    return b"".join((frame(HEADERS, flags, stream_id, pieces[0]), *middle, last))


def settings_frame(settings: dict[int, int]) -> bytes:
    """Return SETTINGS (section 6.5)."""
    entries = (key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in settings.items())
    return frame(SETTINGS, 0, 0, b"".join(entries))


def reset_frame(stream_id: int, code: int) -> bytes:
    """Return RST_STREAM (section 6.4)."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway_frame(code: int, debug_data: bytes = b"", last_stream_id: int = LAST_STREAM) -> bytes:
    """Return GOAWAY (section 6.8).

    The default ``last_stream_id`` means that any call may have been served, so a client must not simply repeat it.
    """
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big") + debug_data)


def window_update_frame(stream_id: int, increment: int) -> bytes:
    """Return WINDOW_UPDATE (section 6.9); stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def name_of(code: int) -> str:
    """Return the name of an error code, or its number."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return str(code)
