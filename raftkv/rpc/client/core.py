"""One client connection, sans-IO: calls in, bytes out; bytes in, results to calls.

Owns the table of open streams, the server's stream limit, GOAWAY, and the outcome of a call whose stream has ended.
It has no socket: the shell moves bytes (with duties as in ``server.core``). ``ClientEvents`` tells the channel when the
connection is ready, when it takes no more calls, and when a stream is free.

``RpcError.definite`` is decided here: a stream whose HEADERS never left, a stream above the last stream id of a GOAWAY,
and a stream refused with REFUSED_STREAM certainly reached no handler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from raftkv.rpc.framing import PREFIX, PREFIX_BYTES, MessageAssembler
from raftkv.rpc.http2 import CLOSED, ClientConnection, ConnectionFailedError, ErrorCode
from raftkv.rpc.http2.frames import MAX_CONCURRENT_STREAMS, name_of
from raftkv.rpc.limits import ChannelOptions, TokenBucket
from raftkv.rpc.protocol import DrainWatcher
from raftkv.rpc.status import CODE_OF_HTTP_STATUS, CODE_OF_RESET, Code, Headers, RpcError, status_of

_unpack = PREFIX.unpack_from

ODDITIES_BURST: Final = 10_000
ODDITIES_PER_S: Final = 330
"""Useless frames accepted from a server: 10,000 at once, then 330 a second."""

LAST_ID: Final = 2**31 - 1
"""Highest stream id of a connection: enough for a thousand million calls."""

TIMED_PING: Final = b"timeping"
"""Payload of a ping whose round trip is measured."""


class SendRoom(DrainWatcher, Protocol):
    """A stream with its own limit on queued bytes."""

    @property
    def has_send_room(self) -> bool:
        """Whether more may be sent."""


class ClientCall(Protocol):
    """A call, as seen by the core."""

    stream_id: int
    assembler: MessageAssembler | None

    def request_headers(self) -> Headers:
        """Return the header fields of the request, just before it leaves."""

    def started(self, core: ClientCore) -> None:
        """Note that the call's stream is open."""

    def on_headers(self, headers: Headers) -> None:
        """Take the header fields of the response."""

    def on_data(self, data: bytes) -> None:
        """Take a piece of the response."""

    def on_message(self, message: bytes) -> None:
        """Take a response that arrived whole."""

    def on_end(self, error: RpcError | None, trailers: Headers) -> None:
        """End the call, successfully if ``error`` is None."""

    def on_refused(self) -> bool:
        """Return whether the call will start again: the server certainly did not process it."""


class ClientEvents(Protocol):
    """The channel, as seen by the core."""

    def wake(self) -> None:
        """Pull bytes at the end of the turn."""

    def flush(self) -> None:
        """Pull bytes now."""

    def ready(self) -> None:
        """Start calls: the server's SETTINGS have arrived."""

    def draining(self, too_many_pings: bool) -> None:
        """Start no new calls on this connection."""

    def room(self) -> None:
        """Start a waiting call: a stream is free."""


class _Nobody:
    """Ignores the events of a lost connection."""

    def wake(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def ready(self) -> None:
        pass

    def draining(self, too_many_pings: bool) -> None:
        pass

    def room(self) -> None:
        pass


_NOBODY: Final = _Nobody()


class ClientCore:
    """The client end of one HTTP/2 connection.

    Attributes:
        closing: whether no more bytes will be sent or received; the shell then closes the transport.
        accepting: whether new calls may be started.
        streams_max: limit on open streams: the server's limit, or less after the server refused a stream.
    """

    def __init__(self, options: ChannelOptions, events: ClientEvents, clock: Callable[[], float]) -> None:
        self.h2 = ClientConnection(self, options)
        self.options = options
        self.on_timed_ping: Callable[[], None] | None = None
        """Called once, when the pending ``TIMED_PING`` is answered."""
        self.closing = False
        self.drop_unsent = False
        self.accepting = False
        self.streams_max = options.assumed_concurrent_streams
        self._streams_allowed = self.streams_max
        self.calls: dict[int, ClientCall] = {}
        self.goaway_text = ""
        self._events = events
        self._dirty = False
        self._flushed_through = 0
        self._usual_headers: Headers = ()
        self._usual_trailers: Headers = ()
        self.drain_watch: set[SendRoom] = set()
        self._clock = clock
        self._oddities = TokenBucket(ODDITIES_BURST, ODDITIES_PER_S)

    # ---- calls out

    def has_room(self) -> bool:
        """True if one more call may be started now."""
        return self.accepting and len(self.calls) < self.streams_max

    def start_unary(self, call: ClientCall, headers: Headers, framed: bytes) -> None:
        """Send a whole unary request."""
        h2 = self.h2
        stream_id = h2.send_request(headers)
        call.stream_id = stream_id
        self.calls[stream_id] = call
        h2.send_data(stream_id, framed, end_stream=True)
        if stream_id == LAST_ID:
            self._use_up()
        if not self._dirty:
            self._dirty = True
            self._events.wake()

    def start(self, call: ClientCall) -> None:
        """Open a stream for ``call``, which sends its messages itself once ``started``."""
        call.stream_id = self.h2.send_request(call.request_headers())
        self.calls[call.stream_id] = call
        call.started(self)
        if call.stream_id == LAST_ID:
            self._use_up()
        self.wake()

    def _use_up(self) -> None:
        """Accept no more calls: no stream id is left (RFC 9113 section 5.1.1). Open calls continue."""
        self.goaway_text = "the connection has no streams left"
        self.accepting = False
        self._events.draining(too_many_pings=False)

    def forget(self, call: ClientCall) -> None:
        """Reset the stream of a call that needs nothing more of it."""
        if self.calls.pop(call.stream_id, None) is not None:
            self.reset(call.stream_id)
            self._events.room()

    def reset(self, stream_id: int) -> None:
        """Reset a stream: nothing more of it is needed."""
        self.h2.reset(stream_id, ErrorCode.CANCEL)
        self.wake()

    # ---- bytes in

    def receive(self, data: bytes | memoryview) -> None:
        """Take bytes from the server. The shell pulls afterwards."""
        self.h2.receive(bytes(data))
        if self.closing or self.goaway_text or self.h2.want_write:
            self.wake()

    def on_response(self, stream_id: int, fields: Headers, end_stream: bool) -> None:
        """Take the header of a response."""
        call = self.calls.get(stream_id)
        if call is None:
            return
        if fields == self._usual_headers and not end_stream:
            call.on_headers(fields)
            return
        if end_stream:
            self._end(call, self._error_of_headers(fields), fields)
            return
        error = _check_response(fields)
        if error is not None:
            self.forget(call)
            call.on_end(error, ())
            return
        call.on_headers(fields)
        if len(fields) == 2:
            self._usual_headers = fields

    def _error_of_headers(self, headers: Headers) -> RpcError | None:
        fields = dict(headers)
        if b"grpc-status" not in fields:
            return _check_response(headers) or status_of(fields, headers)
        return status_of(fields, headers)

    def on_data(self, stream_id: int, data: bytes, end_stream: bool) -> None:
        """Take a piece of a response."""
        call = self.calls.get(stream_id)
        if call is None:
            self.consume(len(data), stream_id)
            return
        try:
            if call.assembler is None and self._is_whole_message(data):
                call.on_message(data[PREFIX_BYTES:])
                self.h2.acknowledge(len(data), stream_id)
            else:
                call.on_data(data)
        except RpcError as error:
            self.forget(call)
            call.on_end(error, ())
        if end_stream:
            self._ended_without_trailers(stream_id)

    def _is_whole_message(self, data: bytes) -> bool:
        if len(data) < PREFIX_BYTES:
            return False
        flag, length = _unpack(data)
        return not flag and length == len(data) - PREFIX_BYTES and length <= self.options.max_receive_message_bytes

    def _ended_without_trailers(self, stream_id: int) -> None:
        call = self.calls.get(stream_id)
        if call is not None:
            self._end(call, RpcError(Code.INTERNAL, "server closed the stream without sending trailers"), ())

    def on_trailers(self, stream_id: int, fields: Headers) -> None:
        """Take the end of a response."""
        call, trailers = self.calls.get(stream_id), fields
        if call is None:
            return
        if trailers == self._usual_trailers:
            self._end(call, None, trailers)
            return
        error = status_of(dict(trailers), trailers)
        if error is None and len(trailers) <= 2:
            self._usual_trailers = trailers
        self._end(call, error, trailers)

    def _end(self, call: ClientCall, error: RpcError | None, trailers: Headers) -> None:
        del self.calls[call.stream_id]
        call.on_end(error, trailers)
        if self.streams_max < self._streams_allowed and error is None:
            self.streams_max += 1
        self._events.room()
        if self.goaway_text:
            self.wake()  # the last call of a draining connection closes it

    def on_closed(self, stream_id: int, code: int) -> None:
        """End the call of a stream that was closed before its response was complete."""
        call = self.calls.get(stream_id)
        if call is None:
            return
        definite = code == ErrorCode.REFUSED_STREAM
        if definite and self.accepting:
            del self.calls[stream_id]
            # A server counts a stream a little longer than its client: lower the limit, and raise it one by one.
            self.streams_max = max(1, min(self.streams_max, len(self.calls)))
            if call.on_refused():
                return
            self.calls[stream_id] = call
        text = f"stream terminated by RST_STREAM with error code: {name_of(code)}"
        if self.goaway_text and definite:
            text = self.goaway_text
        self._end(call, RpcError(CODE_OF_RESET.get(code, Code.UNKNOWN), text, definite=definite), ())

    def on_settings(self) -> None:
        """Take the server's stream limit. Calls may start now."""
        self._streams_allowed = self.h2.peer_settings.get(MAX_CONCURRENT_STREAMS, 2**32 - 1)
        self.streams_max = self._streams_allowed
        if not self.accepting and not self.goaway_text and not self.closing:
            self.accepting = True
            self._events.ready()
        self._events.room()

    def on_goaway(self, last_stream_id: int, code: int, debug_data: bytes) -> None:
        """Accept no more calls on this connection."""
        reason = debug_data.decode("ascii", "replace")
        self.goaway_text = f"the connection is draining: GOAWAY {name_of(code)} {reason}".rstrip()
        self.accepting = False
        too_many_pings = code == ErrorCode.ENHANCE_YOUR_CALM and debug_data == b"too_many_pings"
        self._events.draining(too_many_pings)

    def on_failed(self, error: ConnectionFailedError) -> None:
        """Close: the server has broken a rule."""
        self.goaway_text = self.goaway_text or str(error)
        self.accepting = False
        self.closing = True

    def on_ping(self) -> None:
        """Do nothing: any byte counts as a sign of life (``Keepalive`` in ``rpc.protocol``)."""

    def on_pong(self, opaque: bytes) -> None:
        """Call back for a timed ping."""
        if opaque == TIMED_PING and self.on_timed_ping is not None:
            on_timed_ping, self.on_timed_ping = self.on_timed_ping, None
            on_timed_ping()

    def on_window_update(self) -> None:
        """Do nothing: the next pull sends more."""

    def on_reset(self, stream_id: int) -> None:
        """Do nothing: ``on_closed`` follows."""

    def on_stray_reset(self) -> None:
        """Do nothing: the call has ended."""

    def on_stray_data(self, size_bytes: int, end_stream: bool) -> None:
        """Ignore the rest of the answer to a cancelled call."""

    def on_oddity(self) -> None:
        """Count a useless frame: the server may send a few thousand."""
        if not self._oddities.take(self._clock()):
            self.on_failed(ConnectionFailedError(ErrorCode.ENHANCE_YOUR_CALM, "too many useless frames"))
            self.h2.fail(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_useless_frames")

    def on_priority(self) -> None:
        """Count a priority frame as useless: servers do not send priorities."""
        self.on_oddity()

    # ---- bytes out

    def pull(self, amount: int) -> bytes:
        """Return at most ``amount`` bytes to send; call again while it returns that many."""
        self._dirty = False
        if self.calls:
            # Ids only grow: everything opened so far may leave with this pull.
            self._flushed_through = max(self._flushed_through, next(reversed(self.calls)))
        data = self.h2.take(amount)
        if self.drain_watch and len(data) < amount:
            self._wake_drained()
            data += self.h2.take(amount - len(data))
        if not self.accepting and self.goaway_text and not self.calls:
            self.closing = True
        return data

    def _wake_drained(self) -> None:
        for watcher in [one for one in self.drain_watch if one.has_send_room]:
            watcher.drained()

    def wake(self) -> None:
        """Ask the shell to pull in this turn."""
        if not self._dirty:
            self._dirty = True
            self._events.wake()

    def flush(self) -> None:
        """Ask the shell to pull now."""
        self._events.flush()

    def ping(self, opaque: bytes) -> None:
        """Ping the server with eight bytes."""
        self.h2.ping(opaque)
        self.wake()

    def block(self, is_blocked: bool) -> None:
        """Note whether the socket is full."""
        self.h2.is_blocked = is_blocked

    def close(self) -> None:
        """Send a GOAWAY; the shell flushes it and closes."""
        self.accepting = False
        if not self.closing:
            self.h2.send_goaway(ErrorCode.NO_ERROR)
            self.closing = True
            self.wake()

    def lost(self) -> None:
        """Fail every open call: the transport is gone."""
        self.h2.stop()
        self.fail_all(Code.UNAVAILABLE, self.goaway_text or "error reading from server: EOF")

    def fail_all(self, code: Code, text: str) -> None:
        """End every open call with a status made by this client.

        Arguments:
            code, text: code and text of the status.
        """
        self.closing = True
        self.accepting = False
        calls, self.calls = self.calls, {}
        for stream_id, call in calls.items():
            call.on_end(RpcError(code, text, definite=stream_id > self._flushed_through), ())

    # ---- called by calls

    def consume(self, amount: int, stream_id: int) -> None:
        """Return received bytes to the server's windows."""
        if amount:
            self.h2.acknowledge(amount, stream_id)
            if self.h2.want_write:
                self.wake()

    def consume_of(self, stream_id: int, amount: int) -> None:
        """Consume, with the stream id first, for a partial: an inbox that refers to its call would never be freed."""
        self.consume(amount, stream_id)

    def released(self) -> None:
        """Drop the references to a lost connection and to the engine."""
        self._events = _NOBODY
        self.on_timed_ping = None
        self.drain_watch.clear()
        self.h2 = CLOSED

    def make_assembler(self) -> MessageAssembler:
        """Return an assembler with this channel's message limit."""
        return MessageAssembler(self.options.max_receive_message_bytes, on_server=False)


def _check_response(headers: Headers) -> RpcError | None:
    """Return what is wrong with a response header without a status."""
    fields = dict(headers)
    status = fields.get(b":status", b"")
    content_type = fields.get(b"content-type", b"")
    if status != b"200":
        number = int(status) if status.isdigit() else 0
        code = CODE_OF_HTTP_STATUS.get(number, Code.UNKNOWN)
        text = f"unexpected HTTP status code received from server: {status.decode('latin-1')}"
        return RpcError(code, f'{text}; content-type "{content_type.decode("latin-1")}"')
    if not content_type.startswith(b"application/grpc"):
        text = f'unexpected content-type "{content_type.decode("latin-1")}" in a response'
        return RpcError(Code.UNKNOWN, text)
    return None
