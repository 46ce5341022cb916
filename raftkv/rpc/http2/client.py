"""The client's end of an HTTP/2 connection: it opens streams, and takes no pushed ones."""

from __future__ import annotations

from typing import Final, Protocol

from raftkv.rpc.http2 import frames as f
from raftkv.rpc.http2.connection import Connection
from raftkv.rpc.http2.control import Block, Limits, Listener
from raftkv.rpc.http2.errors import ConnectionFailedError, ConnectionGoneError, ErrorCode, StreamFailedError
from raftkv.rpc.http2.hpack import Headers, check_response, check_trailers, malformed
from raftkv.rpc.http2.sending import Stream
from raftkv.rpc.limits import ChannelOptions

INDEXED: Final = frozenset((b":path", b":authority", b"content-type", b"te", b"user-agent", b"grpc-accept-encoding"))
"""Fields that a client repeats with every call."""


class ClientListener(Listener, Protocol):
    """Whom a client's connection calls."""

    def on_response(self, stream_id: int, fields: Headers, end_stream: bool) -> None:
        """The header of a response has come."""

    def on_trailers(self, stream_id: int, fields: Headers) -> None:
        """The end of a response has come."""


class ClientConnection(Connection):
    """The client's end; the preface is what it sends first.

    Arguments:
        listener: is called.
        options: what the server may do.
    """

    def __init__(self, listener: ClientListener, options: ChannelOptions) -> None:
        settings = {
            f.ENABLE_PUSH: 0,
            f.INITIAL_WINDOW_SIZE: options.stream_window_bytes,
            f.MAX_HEADER_LIST_SIZE: options.header_list_bytes,
        }
        allowed = Limits(options.stream_window_bytes, options.connection_window_bytes, options.header_list_bytes)
        super().__init__(listener, allowed, settings, INDEXED)
        self._next_id = 1
        self._out.insert(0, f.PREFACE)

    # ---- octets in

    def _last_peer_stream(self) -> int:
        return 0

    def _is_idle(self, stream_id: int) -> bool:
        return stream_id >= self._next_id or not stream_id & 1

    def _on_headers(self, stream_id: int, block: Block, end_stream: bool) -> None:
        stream = self._streams.get(stream_id)
        if stream is None or stream.is_remote_closed:
            self._on_stray_headers(stream_id, stream)
            return
        if not block.is_sound:
            raise malformed("octets that no header field may have")
        if stream.has_headers:
            self._on_trailers(stream, block, end_stream)
            return
        if block.opening is None:
            block.opening = check_response(block.fields)
        status, length = block.opening
        if status < 200:
            if end_stream:
                raise malformed("an interim response that ends the stream")  # section 8.1
            self._listener.on_oddity()
            return
        stream.has_headers = True
        if length is not None:
            self._expect(stream, length, end_stream)
        stream.is_remote_closed = end_stream
        self._listener.on_response(stream_id, block.fields, end_stream)
        if end_stream:
            self._ended(stream)

    def _on_stray_headers(self, stream_id: int, stream: Stream | None) -> None:
        if self._is_idle(stream_id):
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "HEADERS of a stream that we have not opened")
        if stream is not None:
            raise StreamFailedError(ErrorCode.STREAM_CLOSED, "HEADERS of a stream that has ended")
        if not self._was_reset(stream_id):
            raise StreamFailedError(ErrorCode.STREAM_CLOSED, "HEADERS of a stream that is closed")

    def _on_trailers(self, stream: Stream, block: Block, end_stream: bool) -> None:
        if not end_stream:
            raise malformed("a second header that does not end the message")
        check_trailers(block.fields)
        self._check_content(stream)
        stream.is_remote_closed = True
        self._listener.on_trailers(stream.stream_id, block.fields)
        self._ended(stream)

    def _check_push(self, value: int) -> None:
        if value:  # section 6.5.2: only clients may say so
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "a server with ENABLE_PUSH")

    def _on_goaway(self, last_stream_id: int, code: int, debug_data: bytes) -> None:
        super()._on_goaway(last_stream_id, code, debug_data)
        for stream in [one for one in self._streams.values() if one.stream_id > last_stream_id]:
            if stream.stream_id in self._streams:  # the end of one call may end another
                self._remove(stream, ErrorCode.REFUSED_STREAM)  # section 6.8: the server has not processed them

    # ---- what is sent

    def send_request(self, fields: Headers) -> int:
        """Open a stream with the header of a request.

        Arguments:
            fields: in order.

        Returns:
            The stream's id.

        Raises:
            ConnectionGoneError: the connection has failed or goes, or has no ids left (section 5.1.1).
        """
        stream_id = self._next_id
        if self.has_failed or self._goes or stream_id > f.LAST_STREAM:
            raise ConnectionGoneError("the connection takes no more streams")
        self._next_id = stream_id + 2
        self._streams[stream_id] = Stream(stream_id, self._stream_credit)
        self._write(f.header_frames(stream_id, self._encoder.encode(fields), end_stream=False))
        return stream_id
