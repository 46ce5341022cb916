"""The server's end of an HTTP/2 connection: it opens no streams, and answers those of its client.

Beside the general calls it has ``answer``, which makes a whole unary answer of gRPC at once: its header and trailers
are the same octets each time, once the tables have settled.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final, Protocol

from raftkv.rpc.http2 import frames as f
from raftkv.rpc.http2.connection import Connection
from raftkv.rpc.http2.control import Block, Limits, Listener
from raftkv.rpc.http2.errors import ConnectionFailedError, ErrorCode, StreamFailedError
from raftkv.rpc.http2.hpack import FIELD_BYTES, Headers, check_request, check_trailers, malformed
from raftkv.rpc.http2.sending import Stream
from raftkv.rpc.limits import ServerLimits

RESPONSE_HEADERS: Headers = ((b":status", b"200"), (b"content-type", b"application/grpc"))
OK_TRAILERS: Headers = ((b"grpc-status", b"0"),)

INDEXED: Final = frozenset((b"content-type", b"grpc-status"))
"""Fields whose few values are in nearly every answer."""

_pack_id: Final = Struct(">I").pack
_pack_data: Final = Struct(">HBBBIBI").pack
"""The head of a DATA frame, and the prefix of the message in it."""
_PREFIX_BYTES: Final = 5
_ID_AT: Final = 5


VARYING: Final = b"grpc-timeout"
"""The field whose value differs with each request: what the others ask for is remembered without it."""

SHAPES_MAX: Final = 16
SHAPE_BYTES_MAX: Final = 2048
"""Requests but for ``VARYING`` of which a connection remembers what they ask for; their size, as RFC 7541 section 4.1
counts it."""


def _headers(block: bytes, flags: int) -> tuple[bytes, bytes]:
    """Return a HEADERS frame without the id of its stream: what comes before it, and after it."""
    return f.HEAD.pack(0, len(block), f.HEADERS, flags, 0)[:_ID_AT], block


class Request:
    """The header of a request; the same object for headers that repeat.

    Attributes:
        fields: in order.
        timeout: value of ``VARYING``; None: there is none.
        content_length: what it says; None: it says nothing.
        prepared: what the listener has made of the fields.
    """

    __slots__ = ("content_length", "fields", "prepared", "timeout")

    def __init__(self, fields: Headers, timeout: bytes | None, content_length: int | None, prepared: Any) -> None:
        self.fields = fields
        self.timeout = timeout
        self.content_length = content_length
        self.prepared = prepared


class ServerListener(Listener, Protocol):
    """Whom a server's connection calls."""

    def prepare(self, fields: Headers) -> Any:
        """Return what ``on_request`` needs of the header of a request, apart from its ``VARYING`` field.

        Asked once for headers that repeat, with or without another timeout.
        """

    def on_request(self, stream_id: int, request: Request, end_stream: bool) -> None:
        """A request has begun."""


class ServerConnection(Connection):
    """The server's end.

    Arguments:
        listener: is called.
        limits: what the client may do.
    """

    def __init__(self, listener: ServerListener, limits: ServerLimits) -> None:
        settings = {
            f.MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams,
            f.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            f.MAX_HEADER_LIST_SIZE: limits.header_list_bytes,
        }
        allowed = Limits(
            stream_window_bytes=limits.stream_window_bytes,
            connection_window_bytes=limits.connection_window_bytes,
            header_list_bytes=limits.header_list_bytes,
            header_count=limits.header_count,
            continuations=limits.continuations,
            settings_entries=limits.settings_entries,
            outbound_acks=limits.outbound_acks,
        )
        super().__init__(listener, allowed, settings, INDEXED)
        self._streams_max = limits.max_concurrent_streams
        self._last_id = self._last_taken = 0
        self._refuses = False
        self._awaited = f.PREFACE
        self._answer_head = self._answer_tail = _headers(b"", 0)
        self._answer_changes = -1
        self._shapes: dict[tuple[int, Headers], tuple[int | None, Any]] = {}

    # ---- octets in

    def _last_peer_stream(self) -> int:
        return self._last_taken if self._refuses else self._last_id  # section 6.8: it never grows

    def _is_idle(self, stream_id: int) -> bool:
        return stream_id > self._last_id or not stream_id & 1

    def _on_headers(self, stream_id: int, block: Block, end_stream: bool) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._on_trailers(stream, block, end_stream)
            return
        if not stream_id & 1:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "a client's stream has an odd id")  # section 5.1.1
        if stream_id <= self._last_id:
            if not self._was_reset(stream_id):
                raise ConnectionFailedError(ErrorCode.STREAM_CLOSED, "HEADERS of a stream that is closed")  # 5.1
            self._listener.on_oddity()
            return
        self._last_id = stream_id
        if self._refuses:
            self._remember_reset(stream_id)  # above what our GOAWAY says: left alone (section 6.8)
            self._listener.on_oddity()
            return
        if len(self._streams) >= self._streams_max:
            self._remember_reset(stream_id)
            raise StreamFailedError(ErrorCode.REFUSED_STREAM, "too many streams are open")  # section 5.1.2
        request: Request | None = block.opening
        if request is None:
            request = block.opening = self._request(block)
        stream = self._streams[stream_id] = Stream(stream_id, self._stream_credit)
        stream.has_headers = True
        stream.is_remote_closed = end_stream
        if request.content_length is not None:
            self._expect(stream, request.content_length, end_stream)
        self._listener.on_request(stream_id, request, end_stream)
        if end_stream:
            self._ended(stream)

    def _request(self, block: Block) -> Request:
        if not block.is_sound:
            raise malformed("octets that no header field may have")
        fields, timeout, at = block.fields, None, -1
        for place in range(len(fields) - 1, -1, -1):  # of several the last one counts, as for grpc-go
            if fields[place][0] == VARYING:
                timeout, at = fields[place][1], place
                break
        shape = (at, fields if at < 0 else fields[:at] + fields[at + 1 :])
        known = self._shapes.get(shape)
        if known is None:
            known = check_request(fields), self._listener.prepare(fields)
            if sum(len(name) + len(value) + FIELD_BYTES for name, value in fields) <= SHAPE_BYTES_MAX:
                if len(self._shapes) >= SHAPES_MAX:
                    self._shapes.clear()
                self._shapes[shape] = known
        return Request(fields, timeout, *known)

    def _on_trailers(self, stream: Stream, block: Block, end_stream: bool) -> None:
        if stream.is_remote_closed:
            raise ConnectionFailedError(ErrorCode.STREAM_CLOSED, "HEADERS of a stream that has ended")
        if not end_stream:
            raise malformed("a second header that does not end the message")  # section 8.1
        if not block.is_sound:
            raise malformed("octets that no header field may have")
        check_trailers(block.fields)
        self._check_content(stream)
        stream.is_remote_closed = True
        self._listener.on_data(stream.stream_id, b"", True)
        self._ended(stream)

    # ---- what is sent

    def send_goaway(self, code: int, debug_data: bytes = b"") -> None:
        """Say that no further stream is taken; those that are open go on."""
        if not self._refuses:
            self._refuses, self._last_taken = True, self._last_id
        super().send_goaway(code, debug_data)

    def _end_local(self, stream: Stream) -> None:
        stream.is_local_closed = True
        if not stream.is_remote_closed:
            # Section 8.1: the answer is whole, and the rest of the request is of no use.
            self._out.append(f.reset_frame(stream.stream_id, ErrorCode.NO_ERROR))
            self._remember_reset(stream.stream_id)
        self._remove(stream, ErrorCode.NO_ERROR)

    def answer(self, stream_id: int, body: bytes, has_prefix: bool = False) -> bool:
        """Send a whole answer of gRPC, if it may leave at once.

        Arguments:
            stream_id: of a stream that nothing was sent on.
            body: of the answer: its message, or all of its messages.
            has_prefix: whether each message stands behind its prefix.

        Returns:
            Whether it was sent; the stream is closed then, and the listener does not hear of it.
        """
        stream = self._streams.get(stream_id)
        size = len(body) if has_prefix else len(body) + _PREFIX_BYTES
        if stream is None or not stream.is_remote_closed or not self._may_leave(stream, size):
            return False
        encoder = self._encoder
        head, tail = self._answer_head, self._answer_tail
        changes = encoder.changes
        if self._answer_changes != changes:
            head = _headers(encoder.encode(RESPONSE_HEADERS), f.END_HEADERS)
            tail = _headers(encoder.encode(OK_TRAILERS), f.END_HEADERS | f.END_STREAM)
            if encoder.changes == changes:  # so they will be the same the next time
                self._answer_head, self._answer_tail, self._answer_changes = head, tail, changes
        self._send_window -= size
        name = _pack_id(stream_id)
        if has_prefix:
            data_head = f.HEAD.pack(size >> 8, size & 0xFF, f.DATA, 0, stream_id)
        else:
            data_head = _pack_data(size >> 8, size & 0xFF, f.DATA, 0, stream_id, 0, size - _PREFIX_BYTES)
        octets = b"".join((head[0], name, head[1], data_head, body, tail[0], name, tail[1]))
        self._out.append(octets)
        self._out_bytes += len(octets)
        del self._streams[stream_id]
        stream.is_local_closed = True
        return True
