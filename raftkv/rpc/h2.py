"""HTTP/2 as gRPC uses it: whole answers, messages behind their prefixes, and the engines of both ends.

The engine itself is ``http2``; here are the few operations that calls use beside its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from raftkv.rpc.framing import frame, prefix, prefix_of
from raftkv.rpc.http2 import (
    OK_TRAILERS,
    PREFACE,
    RESPONSE_HEADERS,
    ClientConnection,
    ClientListener,
    ConnectionFailedError,
    ErrorCode,
    H2Error,
    Request,
    ServerConnection,
    ServerListener,
    goaway_frame,
)
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.status import Headers

__all__ = [
    "CLOSED",
    "EMPTY_SETTINGS",
    "OK_TRAILERS",
    "PREFACE",
    "RESPONSE_HEADERS",
    "SLICE_BYTES",
    "ClientEngine",
    "ClientListener",
    "ConnectionFailedError",
    "ErrorCode",
    "H2Error",
    "Request",
    "ServerEngine",
    "ServerListener",
    "goaway_frame",
]

EMPTY_SETTINGS: Final = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first frame of a server that has nothing to say about its limits."""

SLICE_BYTES: Final = 16 * 1024
"""Large messages of streams are queued in pieces of this size."""


class ServerEngine(ServerConnection):
    """The server's end of a connection that speaks gRPC."""

    def __init__(self, listener: Any, limits: ServerLimits) -> None:
        super().__init__(listener, limits)
        self.left_behind = []

    def answer_later(self, stream_id: int, message: bytes) -> None:
        """Queue a whole unary answer of which not all may leave at once."""
        self.send_headers(stream_id, RESPONSE_HEADERS)
        self.send_data(stream_id, frame(message))
        self.send_headers(stream_id, OK_TRAILERS, end_stream=True)

    def answer_in_pieces(self, stream_id: int, message: bytes, trailers: Headers) -> None:
        """Queue a large answer (not copied behind a prefix), or one with trailing metadata."""
        self.send_headers(stream_id, RESPONSE_HEADERS)
        self.send_data(stream_id, prefix_of(message))
        self.send_data(stream_id, message)
        self.send_headers(stream_id, OK_TRAILERS + trailers, end_stream=True)

    def answer_many(self, stream_id: int, pieces: Sequence[bytes]) -> None:
        """Queue an answer whose pieces are never put together."""
        self.send_headers(stream_id, RESPONSE_HEADERS)
        self.send_data(stream_id, prefix(sum(map(len, pieces))))
        for piece in pieces:
            self.send_data(stream_id, piece)
        self.send_headers(stream_id, OK_TRAILERS, end_stream=True)

    def send_in_slices(self, stream_id: int, message: bytes) -> None:
        """Queue a large message in pieces that are free as soon as they have left; one piece would stay whole."""
        self.send_data(stream_id, prefix_of(message))
        for start in range(0, len(message), SLICE_BYTES):
            self.send_data(stream_id, message[start : start + SLICE_BYTES])


class ClientEngine(ClientConnection):
    """The client's end of a connection that speaks gRPC."""

    def send_message(self, stream_id: int, message: bytes) -> None:
        """Queue a message behind its prefix, in two pieces."""
        self.send_data(stream_id, prefix_of(message))
        self.send_data(stream_id, message)


class _NoListener:
    """Hears nothing: the listener of an engine that has no connection."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a connection that has gone")


class _ClosedEngine(ServerEngine):
    """Takes the place of the engine of a connection that has gone: holds nothing, and sends nothing."""

    def __init__(self) -> None:
        super().__init__(_NoListener(), ServerLimits())
        self.has_failed = True
        self._out = []

    def acknowledge(self, amount: int, stream_id: int) -> None:
        """Ignore it: the connection is closed."""

    def reset(self, stream_id: int, code: int) -> None:
        """All streams are closed."""

    def ping(self, opaque: bytes) -> None:
        """Ignore it: no peer answers."""

    def send_goaway(self, code: int, debug_data: bytes = b"") -> None:
        """Ignore it: no peer reads it."""

    def send_shutdown_notice(self) -> None:
        """Ignore it: no peer reads it."""

    def send_request(self, fields: Headers) -> int:
        """Refuse a call of a client whose connection has gone."""
        del fields
        raise H2Error("the connection has gone")


CLOSED: Final[Any] = _ClosedEngine()
