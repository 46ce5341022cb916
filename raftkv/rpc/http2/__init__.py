"""HTTP/2 (RFC 9113) and HPACK (RFC 7541) for both ends of gRPC, without sockets or clocks.

    connection = ServerConnection(listener, ServerLimits())
    connection.receive(octets)       # listener.on_request(1, ...), listener.on_data(1, ..., True)
    connection.answer(1, message)
    socket.send(connection.take(65_536))

Each module imports only earlier ones: ``frames``, ``hpack``, ``connection``.
"""

from __future__ import annotations

from raftkv.rpc.http2.connection import (
    CLOSED,
    OK_TRAILERS,
    RESPONSE_HEADERS,
    SLICE_BYTES,
    ClientConnection,
    Connection,
    Listener,
    Request,
    RequestListener,
    ResponseListener,
    ServerConnection,
)
from raftkv.rpc.http2.frames import (
    PREFACE,
    ConnectionFailedError,
    ErrorCode,
    H2Error,
    goaway_frame,
    window_update_frame,
)
from raftkv.rpc.http2.hpack import Headers

__all__ = [
    "CLOSED",
    "OK_TRAILERS",
    "PREFACE",
    "RESPONSE_HEADERS",
    "SLICE_BYTES",
    "ClientConnection",
    "Connection",
    "ConnectionFailedError",
    "ErrorCode",
    "H2Error",
    "Headers",
    "Listener",
    "Request",
    "RequestListener",
    "ResponseListener",
    "ServerConnection",
    "goaway_frame",
    "window_update_frame",
]
