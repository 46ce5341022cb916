"""HTTP/2: the only module that knows the library underneath (ngh2, a binding of libnghttp2).

Owns the settings both ends announce, the limits handed to libnghttp2, and the few composite operations of gRPC.
``H2Connection`` *is* an ngh2 connection (methods are inherited, so a call costs nothing extra); other modules use only
the methods named in this docstring, and the event and error classes re-exported here.

Used: ``receive_data``, ``events``, ``data_to_send``, ``send_request``, ``send_response``, ``send_data``,
``send_trailers``, ``end_stream``, ``reset`` (ours), ``ping``, ``send_goaway``, ``send_shutdown_notice``,
``acknowledge_received_data``, ``queued_body_size``, ``next_stream_id``, ``can_send_request``, ``remote_settings``.

Facts of ngh2 0.3 that the callers rely on (each is held by a test):

- Windows are returned by hand only. Every ``DataReceived`` must be acknowledged in the end, even after its stream has
  closed, or its bookkeeping and the connection window leak.
- The part of a DATA frame that has come when its stream is reset is never given back: see ``window_leaked``.
- A reset queued in the same turn as a response overtakes and cancels it: reset after the response has been pulled.
- ``StreamClosed`` is reported for every stream, also those that a GOAWAY or a refusal ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import ngh2
from ngh2 import (
    ConnectionClosed,
    DataReceived,
    ErrorCode,
    Event,
    GoAwayReceived,
    InformationalResponseReceived,
    NGH2Error,
    PingAcknowledged,
    PingReceived,
    PriorityUpdateReceived,
    RequestReceived,
    ResponseReceived,
    SettingsReceived,
    StreamClosed,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)

from raftkv.rpc.framing import prefix, prefix_of
from raftkv.rpc.limits import ChannelOptions, ServerLimits
from raftkv.rpc.status import Headers

__all__ = [
    "CLOSED",
    "MAX_CONCURRENT_STREAMS",
    "PREFACE",
    "ConnectionClosed",
    "DataReceived",
    "ErrorCode",
    "Event",
    "GoAwayReceived",
    "H2Connection",
    "H2Error",
    "InformationalResponseReceived",
    "PingAcknowledged",
    "PingReceived",
    "PriorityUpdateReceived",
    "RequestReceived",
    "ResponseReceived",
    "SettingsReceived",
    "StreamClosed",
    "StreamReset",
    "TrailersReceived",
    "WindowUpdated",
    "client_connection",
    "server_connection",
    "window_update_frame",
]

H2Error = NGH2Error
"""Base of everything the library raises for protocol reasons."""

EMPTY_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first frame of a server that has nothing to say about its limits."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of every HTTP/2 client."""

MAX_CONCURRENT_STREAMS = int(ngh2.Setting.MAX_CONCURRENT_STREAMS)

MAX_FRAME_BYTES = 16_384
"""Largest frame we accept (the protocol's default)."""

SLICE_BYTES = 16 * 1024
"""Large messages of streams are queued in pieces of this size."""

RESPONSE_HEADERS: Headers = ((b":status", b"200"), (b"content-type", b"application/grpc"))
OK_TRAILERS: Headers = ((b"grpc-status", b"0"),)


class H2Connection(ngh2.Connection):
    """One end of an HTTP/2 connection, sans-IO.

    Attributes:
        window_bytes: the connection's receive window, as we have announced it.
    """

    window_bytes: int
    _resets_to_audit: int

    def open_window(self, window_bytes: int) -> None:
        """Announce the connection's receive window."""
        self.window_bytes = window_bytes
        self._resets_to_audit = self._audit_interval()
        self.set_local_window_size(window_bytes)

    def _audit_interval(self) -> int:
        """Resets that may go by unaudited: what they can leak at most is an eighth of the window."""
        return max(1, self.window_bytes // (8 * MAX_FRAME_BYTES))

    def reset(self, stream_id: int, error_code: int) -> bool:
        """Reset a stream; True when it is time to ask ``window_leaked``.

        Args:
            stream_id: of the stream.
            error_code: of HTTP/2.
        """
        self.reset_stream(stream_id, error_code)
        self._resets_to_audit -= 1
        if self._resets_to_audit > 0:
            return False
        self._resets_to_audit = self._audit_interval()
        return True

    def window_leaked(self, unacknowledged: int) -> bool:
        """True when resets have eaten so much of the receive window that the connection should be replaced.

        The engine loses count of a DATA frame that is half received when its stream is reset. What it owes us can be
        seen from outside: it announces what we gave back once that is half the window, so apart from what we have not
        given back (``unacknowledged``) and one frame under way, half must be open at any time.
        """
        return self.local_window_size + unacknowledged + MAX_FRAME_BYTES < self.window_bytes // 2

    def answer(self, stream_id: int, framed: bytes) -> None:
        """Queue a whole successful unary response: headers, one framed message, trailers."""
        self.send_response(stream_id, RESPONSE_HEADERS)
        self.send_data(stream_id, framed)
        self.send_trailers(stream_id, OK_TRAILERS)

    def answer_in_pieces(self, stream_id: int, message: bytes, trailers: Headers) -> None:
        """Like ``answer``, for large messages (not copied behind a prefix) or with trailing metadata."""
        self.send_response(stream_id, RESPONSE_HEADERS)
        self.send_message(stream_id, message)
        self.send_trailers(stream_id, OK_TRAILERS + trailers)

    def answer_many(self, stream_id: int, pieces: Sequence[bytes]) -> None:
        """Like ``answer``, for a message whose pieces are never put together."""
        self.send_response(stream_id, RESPONSE_HEADERS)
        self.send_data(stream_id, prefix(sum(map(len, pieces))))
        for piece in pieces:
            self.send_data(stream_id, piece)
        self.send_trailers(stream_id, OK_TRAILERS)

    def send_message(self, stream_id: int, message: bytes) -> None:
        """Queue a message behind its prefix, in two pieces."""
        self.send_data(stream_id, prefix_of(message))
        self.send_data(stream_id, message)

    def send_in_slices(self, stream_id: int, message: bytes) -> None:
        """Queue a large message in pieces that are free as soon as they have left; one piece would stay whole."""
        self.send_data(stream_id, prefix_of(message))
        for start in range(0, len(message), SLICE_BYTES):
            self.send_data(stream_id, message[start : start + SLICE_BYTES])

    def consume(self, amount: int, stream_id: int) -> None:
        """Give ``amount`` received body bytes back to the windows of the stream and the connection."""
        if amount:
            self.acknowledge_received_data(amount, stream_id)


def goaway_frame(error_code: int, debug_data: bytes = b"", last_stream_id: int = 2**31 - 1) -> bytes:
    """Return a GOAWAY written by hand: for a connection whose engine has failed and can say nothing any more.

    The usual ``last_stream_id`` says that any call may have been served: a client must not repeat it as if it had not.
    """
    payload = last_stream_id.to_bytes(4, "big") + error_code.to_bytes(4, "big") + debug_data
    return len(payload).to_bytes(3, "big") + b"\x07\x00" + bytes(4) + payload


def window_update_frame(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE as a client sends it; stream 0 is the connection."""
    return b"\0\0\x04\x08\0" + stream_id.to_bytes(4, "big") + increment.to_bytes(4, "big")


def server_connection(limits: ServerLimits) -> H2Connection:
    """Return the server's end, its SETTINGS already queued."""
    config = ngh2.Configuration(
        auto_window_update=False,
        max_outbound_ack=limits.outbound_acks,
        max_settings=limits.settings_entries,
        stream_reset_rate_limit=(limits.reset_burst, limits.reset_per_s),
        max_continuations=limits.continuations,
        glitch_rate_limit=(limits.glitch_burst, limits.glitch_per_s),
        max_inbound_header_list_size=limits.header_list_bytes,
        max_inbound_header_count=limits.header_count,
        max_send_header_block_length=4 * 65_536,
    )
    connection = H2Connection(ngh2.Role.SERVER, config)
    connection.initiate_connection(
        {
            MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams,
            int(ngh2.Setting.INITIAL_WINDOW_SIZE): limits.stream_window_bytes,
            int(ngh2.Setting.MAX_HEADER_LIST_SIZE): limits.header_list_bytes,
        }
    )
    connection.open_window(limits.connection_window_bytes)
    return connection


def client_connection(options: ChannelOptions) -> H2Connection:
    """Return the client's end, preface and SETTINGS already queued."""
    config = ngh2.Configuration(
        auto_window_update=False,
        # We count streams ourselves, so that a call above the limit stays ours and certainly unsent.
        peer_max_concurrent_streams=0xFFFF_FFFF,
        max_reserved_remote_streams=0,
        max_inbound_header_list_size=options.header_list_bytes,
        max_send_header_block_length=4 * 65_536,
    )
    connection = H2Connection(ngh2.Role.CLIENT, config)
    connection.initiate_connection(
        {
            int(ngh2.Setting.ENABLE_PUSH): 0,
            int(ngh2.Setting.INITIAL_WINDOW_SIZE): options.stream_window_bytes,
            int(ngh2.Setting.MAX_HEADER_LIST_SIZE): options.header_list_bytes,
        }
    )
    connection.open_window(options.connection_window_bytes)
    return connection


CLOSED = H2Connection(ngh2.Role.SERVER, ngh2.Configuration())
"""Takes the place of the engine of a connection that has gone: holds nothing, and refuses everything with H2Error."""
