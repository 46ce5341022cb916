"""One client connection, sans-IO: calls in, bytes out; bytes in, results to calls.

Owns the table of open streams, the server's stream limit, GOAWAY, and what an ended stream means for its call.
It has no socket: the shell moves bytes (same four duties as in ``server.core``), and hears through ``ClientEvents``
when the connection is ready, when it takes no more calls, and when there is room for another.

``RpcError.definite`` is decided here: a stream whose HEADERS never left, one above the last stream id of a GOAWAY, and
one refused with REFUSED_STREAM certainly reached no handler.
"""

from __future__ import annotations

from typing import Final, Protocol

from raftkv.rpc.framing import PREFIX, PREFIX_BYTES, MessageAssembler
from raftkv.rpc.h2 import (
    CLOSED,
    MAX_CONCURRENT_STREAMS,
    ConnectionClosed,
    DataReceived,
    ErrorCode,
    Event,
    GoAwayReceived,
    H2Error,
    PingAcknowledged,
    ResponseReceived,
    SettingsReceived,
    StreamClosed,
    TrailersReceived,
    client_connection,
)
from raftkv.rpc.limits import ChannelOptions
from raftkv.rpc.protocol import DrainWatcher
from raftkv.rpc.status import CODE_OF_HTTP_STATUS, CODE_OF_RESET, Code, Headers, RpcError, status_of

_unpack = PREFIX.unpack_from


class ClientCall(Protocol):
    """What the core needs of a call."""

    stream_id: int
    assembler: MessageAssembler | None

    @property
    def unacknowledged(self) -> int:
        """Received bytes that were not given back to the server's windows."""

    def request_headers(self) -> Headers:
        """Make the header fields of the request, when it is about to leave."""

    def started(self, core: ClientCore) -> None:
        """Note the stream that it runs on."""

    def on_headers(self, headers: Headers) -> None:
        """Take the header fields of the response."""

    def on_data(self, data: bytes) -> None:
        """Take a piece of the response."""

    def on_message(self, message: bytes) -> None:
        """Take a response that came whole."""

    def on_end(self, error: RpcError | None, trailers: Headers) -> None:
        """End, well if ``error`` is None."""

    def on_refused(self) -> bool:
        """Return whether to start again: the server has certainly not looked at it."""


class ClientEvents(Protocol):
    """What the core calls of its channel."""

    def wake(self) -> None:
        """Have bytes pulled at the end of the turn."""

    def ready(self) -> None:
        """The server's SETTINGS have come: calls may start."""

    def draining(self, too_many_pings: bool) -> None:
        """No new calls may start on this connection."""

    def room(self) -> None:
        """A stream has become free."""


class _Nobody:
    """Hears the events of a connection that has gone."""

    def wake(self) -> None:
        pass

    def ready(self) -> None:
        pass

    def draining(self, too_many_pings: bool) -> None:
        pass

    def room(self) -> None:
        pass


_NOBODY: Final = _Nobody()


class ClientCore:
    """The client's end of one HTTP/2 connection.

    Attributes:
        closing: no more bytes will come or go; the shell closes the transport.
        accepting: new calls may be started.
        streams_max: streams to have open at once: the server's limit, less after it has refused one.
    """

    def __init__(self, options: ChannelOptions, events: ClientEvents) -> None:
        self.h2 = client_connection(options)
        self.options = options
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
        self._drain_watch: set[DrainWatcher] = set()

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
        if not self._dirty:
            self._dirty = True
            self._events.wake()

    def start(self, call: ClientCall) -> None:
        """Open a stream for ``call``; it sends its messages itself once ``started``."""
        call.stream_id = self.h2.send_request(call.request_headers())
        self.calls[call.stream_id] = call
        call.started(self)
        self.wake()

    def forget(self, call: ClientCall) -> None:
        """The call wants nothing more of its stream: reset it."""
        if self.calls.pop(call.stream_id, None) is not None:
            self.reset(call.stream_id)
            self._events.room()

    def reset(self, stream_id: int) -> None:
        """Tell the server that nothing more of this stream is wanted."""
        try:
            audit = self.h2.reset(stream_id, ErrorCode.CANCEL)
        except H2Error:
            return  # the connection has gone
        if audit and self.accepting and self.h2.window_leaked(sum(c.unacknowledged for c in self.calls.values())):
            self.goaway_text = "the connection is being replaced"
            self.accepting = False
            self._events.draining(too_many_pings=False)
        self.wake()

    # ---- bytes in

    def receive(self, data: bytes | memoryview) -> None:
        """Take bytes from the server; afterwards the shell pulls."""
        try:
            self.h2.receive_data(data)
            self._dispatch(self.h2.events())
        except H2Error as error:
            self._engine_failed(error)
        if self.closing or self.goaway_text or self.h2.want_write:
            self.wake()

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            kind = type(event)
            if kind is DataReceived:
                self._on_data(event)  # type: ignore[arg-type]
            elif kind is ResponseReceived:
                self._on_response(event)  # type: ignore[arg-type]
            elif kind is TrailersReceived:
                self._on_trailers(event)  # type: ignore[arg-type]
            elif kind is StreamClosed:
                if event.stream_id in self.calls:  # type: ignore[attr-defined]
                    self._on_closed(event)  # type: ignore[arg-type]
            else:
                self._on_rare(event)

    def _on_response(self, event: ResponseReceived) -> None:
        headers = event.headers
        call = self.calls.get(event.stream_id)
        if call is None:
            return
        if headers == self._usual_headers and not event.end_stream:
            call.on_headers(headers)
            return
        if event.end_stream:
            self._end(call, self._error_of_headers(headers), headers)
            return
        error = _check_response(headers)
        if error is not None:
            self.forget(call)
            call.on_end(error, ())
            return
        call.on_headers(headers)
        if len(headers) == 2:
            self._usual_headers = headers

    def _error_of_headers(self, headers: Headers) -> RpcError | None:
        fields = dict(headers)
        if b"grpc-status" not in fields:
            return _check_response(headers) or status_of(fields, headers)
        return status_of(fields, headers)

    def _on_data(self, event: DataReceived) -> None:
        data = event.data
        call = self.calls.get(event.stream_id)
        if call is None:
            self.consume(len(data), event.stream_id)
            return
        try:
            if call.assembler is None and self._is_whole_message(data):
                call.on_message(data[PREFIX_BYTES:])
                self._acknowledge(len(data), event.stream_id)
            else:
                call.on_data(data)
        except RpcError as error:
            self.forget(call)
            call.on_end(error, ())
        if event.end_stream:
            self._ended_without_trailers(event.stream_id)

    def _acknowledge(self, amount: int, stream_id: int) -> None:
        try:
            self.h2.acknowledge_received_data(amount, stream_id)
        except H2Error:
            return  # the bytes that followed have ended the connection; the answer is good all the same

    def _is_whole_message(self, data: bytes) -> bool:
        if len(data) < PREFIX_BYTES:
            return False
        flag, length = _unpack(data)
        return not flag and length == len(data) - PREFIX_BYTES and length <= self.options.max_receive_message_bytes

    def _ended_without_trailers(self, stream_id: int) -> None:
        call = self.calls.get(stream_id)
        if call is not None:
            self._end(call, RpcError(Code.INTERNAL, "server closed the stream without sending trailers"), ())

    def _on_trailers(self, event: TrailersReceived) -> None:
        call = self.calls.get(event.stream_id)
        if call is None:
            return
        trailers = event.headers
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

    def _on_closed(self, event: StreamClosed) -> None:
        call = self.calls[event.stream_id]
        code = event.error_code
        definite = code == ErrorCode.REFUSED_STREAM or event.local_error is not None
        if code == ErrorCode.REFUSED_STREAM and self.accepting:
            del self.calls[event.stream_id]
            # Servers count a stream a little longer than we can see: stay lower, and come up one by one.
            self.streams_max = max(1, min(self.streams_max, len(self.calls)))
            if call.on_refused():
                return
            self.calls[event.stream_id] = call
        text = f"stream terminated by RST_STREAM with error code: {_name_of(code)}"
        if self.goaway_text and definite:
            text = self.goaway_text
        if event.local_error is not None:
            text = str(event.local_error)
        self._end(call, RpcError(CODE_OF_RESET.get(code, Code.UNKNOWN), text, definite=definite), ())

    def _on_rare(self, event: Event) -> None:
        match event:
            case SettingsReceived():
                self._on_settings()
            case GoAwayReceived():
                self._on_goaway(event)
            case ConnectionClosed():
                self.closing = True
            case PingAcknowledged():
                pass  # any byte is a sign of life: see keepalive

    def _on_settings(self) -> None:
        self._streams_allowed = self.streams_max = self.h2.remote_settings[MAX_CONCURRENT_STREAMS]
        if not self.accepting and not self.goaway_text and not self.closing:
            self.accepting = True
            self._events.ready()
        self._events.room()

    def _on_goaway(self, event: GoAwayReceived) -> None:
        reason = event.debug_data.decode("ascii", "replace")
        self.goaway_text = f"the connection is draining: GOAWAY {_name_of(event.error_code)} {reason}".rstrip()
        self.accepting = False
        too_many_pings = event.error_code == ErrorCode.ENHANCE_YOUR_CALM and event.debug_data == b"too_many_pings"
        self._events.draining(too_many_pings)

    def _engine_failed(self, error: H2Error) -> None:
        self.goaway_text = self.goaway_text or str(error)
        self.accepting = False
        self.closing = True

    # ---- bytes out

    def pull(self, amount: int) -> bytes:
        """Return at most ``amount`` bytes to send; call again while it returns that many."""
        self._dirty = False
        if self.calls:
            # Ids only grow: everything opened so far may leave with this pull.
            self._flushed_through = max(self._flushed_through, next(reversed(self.calls)))
        try:
            data = self.h2.data_to_send(amount)
            if self._drain_watch and len(data) < amount:
                self._wake_drained()
            self._dispatch(self.h2.events())
        except H2Error as error:
            self._engine_failed(error)
            return b""
        if not self.accepting and self.goaway_text and not self.calls:
            self.closing = True
        return data

    def _wake_drained(self) -> None:
        room = self.options.stream_send_buffer_bytes
        for watcher in [one for one in self._drain_watch if one.send_buffer_size <= room]:
            watcher.drained()

    def wake(self) -> None:
        """Ask the shell to pull this turn."""
        if not self._dirty:
            self._dirty = True
            self._events.wake()

    def ping(self, opaque: bytes) -> None:
        """Ping the server with eight bytes."""
        try:
            self.h2.ping(opaque)
        except H2Error:
            self.closing = True
        self.wake()

    def close(self) -> None:
        """Say goodbye to the server; the shell flushes and closes."""
        self.accepting = False
        if not self.closing:
            try:
                self.h2.send_goaway(ErrorCode.NO_ERROR)
            except H2Error:
                pass
            self.closing = True
            self.wake()

    def lost(self) -> None:
        """The transport has gone: every open call fails."""
        self.fail_all(Code.UNAVAILABLE, self.goaway_text or "error reading from server: EOF")

    def fail_all(self, code: Code, text: str) -> None:
        """End every open call with a status of our own making.

        Args:
            code, text: of the status.
        """
        self.closing = True
        self.accepting = False
        calls, self.calls = self.calls, {}
        for stream_id, call in calls.items():
            call.on_end(RpcError(code, text, definite=stream_id > self._flushed_through), ())

    # ---- what calls use

    def consume(self, amount: int, stream_id: int) -> None:
        """Give received bytes back to the server's windows."""
        if amount:
            try:
                self.h2.consume(amount, stream_id)
            except H2Error:
                return  # the whole connection has gone
            if self.h2.want_write:
                self.wake()

    def consume_of(self, stream_id: int, amount: int) -> None:
        """Consume, for a partial that names the stream: an inbox that held its call would never be freed with it."""
        self.consume(amount, stream_id)

    def released(self) -> None:
        """The connection has gone: let go of it, and of the engine."""
        self._events = _NOBODY
        self._drain_watch.clear()
        self.h2 = CLOSED

    def make_assembler(self) -> MessageAssembler:
        """Return an assembler under this channel's message limit."""
        return MessageAssembler(self.options.max_receive_message_bytes, on_server=False)

    def watch_drain(self, watcher: DrainWatcher) -> None:
        """Tell ``watcher.drained`` when its send buffer has room."""
        self._drain_watch.add(watcher)

    def unwatch_drain(self, watcher: DrainWatcher) -> None:
        """Stop calling ``drained``."""
        self._drain_watch.discard(watcher)


def _check_response(headers: Headers) -> RpcError | None:
    """Say what is wrong with a response header that carries no status of its own."""
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


def _name_of(error_code: int) -> str:
    try:
        return ErrorCode(error_code).name
    except ValueError:
        return str(error_code)
