"""HTTP/2 (RFC 9113) and HPACK (RFC 7541) for both ends of gRPC, without sockets and clocks.

    connection = ServerConnection(listener, ServerLimits())
    connection.receive(octets)       # listener.on_request(1, ...), listener.on_data(1, ..., True)
    connection.answer(1, message)
    socket.send(connection.take(65_536))

Arrows: ``hpack``, ``frames`` < ``sending`` < ``control`` < ``connection`` < ``server``,
``client``.
"""

from __future__ import annotations

from raftkv.rpc.http2.client import ClientConnection, ClientListener
from raftkv.rpc.http2.connection import Connection
from raftkv.rpc.http2.control import Listener
from raftkv.rpc.http2.errors import ConnectionFailedError, ErrorCode, H2Error
from raftkv.rpc.http2.frames import PREFACE, goaway_frame, window_update_frame
from raftkv.rpc.http2.hpack import Headers
from raftkv.rpc.http2.server import OK_TRAILERS, RESPONSE_HEADERS, Request, ServerConnection, ServerListener

__all__ = [
    "OK_TRAILERS",
    "PREFACE",
    "RESPONSE_HEADERS",
    "ClientConnection",
    "ClientListener",
    "Connection",
    "ConnectionFailedError",
    "ErrorCode",
    "H2Error",
    "Headers",
    "Listener",
    "Request",
    "ServerConnection",
    "ServerListener",
    "goaway_frame",
    "window_update_frame",
]
