"""One end of an HTTP/2 connection (RFC 9113), without a socket: octets in, calls to a listener, octets out.

    connection.receive(octets)           # calls the listener, in the order of the frames
    connection.send_headers(1, fields)
    connection.send_data(1, body, end_stream=True)
    octets = connection.take(65_536)     # octets to send, at most that many

``Connection`` is the common part of both ends: output, queues, frames, windows and header blocks.
``ServerConnection`` opens no streams and answers those of its client. It also has ``answer``, which sends a whole unary
answer of gRPC at once, with the same octets of header and trailers each time once the header tables have settled.
``ClientConnection`` opens streams, and accepts no pushed ones.

Invariants of input:

- A broken rule ends the stream or the connection, with the code of the section that states the rule (section 5.4).
  Nothing that a peer sends makes ``receive`` raise.
- The listener returns received octets to the windows (``acknowledge``), also for streams that have closed meanwhile.
  Octets without a stream are returned at once: the connection's window never shrinks for good (section 6.9).
- A header block is decoded even if its stream is refused or closed (section 4.3).
- A peer can make us hold: a frame, a block of twice the header list limit, ``BLOCKS_MAX`` short blocks, a table.
- The listener counts frames that cost the peer little and us more: ``on_reset`` (CVE-2023-44487, CVE-2025-8671),
  ``on_stray_reset``, ``on_settings`` (CVE-2019-9515), ``on_ping`` (CVE-2019-9512), ``on_window_update``
  (CVE-2019-9517), ``on_priority`` and ``on_oddity`` (CVE-2019-9513).

Invariants of output:

- No body octet leaves beyond the windows of its stream and of the connection (section 6.9.1).
- A header block is encoded when its frame is written: blocks leave in the order in which they change the peer's table
  (RFC 7541 section 2.2).
- Output that may leave at once becomes frames at once. Other output waits in the outbox of its stream: header blocks
  wait for the socket only, bodies also for the windows; streams with waiting bodies take turns.
- While the socket is full, at most ``DIRECT_BYTES`` of frames are made. A frame that ends a stream is made when it can
  leave: until then its stream counts as open, and so against the peer's stream limit.

Leaves out: priorities (section 5.3; RFC 9218), push (section 8.4), padding of sent frames (section 10.7).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, Protocol

from raftkv.rpc.framing import decode_timeout, frame, prefix, prefix_of
from raftkv.rpc.http2 import frames as f
from raftkv.rpc.http2.frames import (
    ConnectionFailedError,
    ConnectionGoneError,
    ErrorCode,
    H2Error,
    StreamFailedError,
    StreamGoneError,
)
from raftkv.rpc.http2.hpack import (
    FIELD_BYTES,
    Decoder,
    Encoder,
    Headers,
    check_request,
    check_response,
    check_trailers,
    malformed,
)
from raftkv.rpc.limits import ChannelOptions, ServerLimits

_uint32: Final = Struct(">I").unpack_from
_entries: Final = Struct(">HI").iter_unpack
_pack: Final = f.HEAD.pack
_unpack_head: Final = f.HEAD.unpack_from


class Listener(Protocol):
    """Receives the events of a connection. Its methods may send on the connection.

    A server connection also calls ``prepare`` and ``on_request``, a client connection ``on_response`` and
    ``on_trailers``.
    """

    def on_data(self, stream_id: int, data: bytes, end_stream: bool) -> None:
        """Take octets of a body."""

    def on_stray_data(self, size_bytes: int, end_stream: bool) -> None:
        """Note octets for a closed stream."""

    def on_closed(self, stream_id: int, code: int) -> None:
        """Note that a stream is closed: both ends have ended it (code 0), or one has reset it."""

    def on_settings(self) -> None:
        """Note that the peer has sent SETTINGS."""

    def on_window_update(self) -> None:
        """Note that the peer has sent a WINDOW_UPDATE."""

    def on_priority(self) -> None:
        """Note that the peer has sent a priority of streams (RFC 9218 section 7.1)."""

    def on_ping(self) -> None:
        """Note that the peer has sent a ping. It is answered already."""

    def on_pong(self, opaque: bytes) -> None:
        """Take the answer to our ping."""

    def on_reset(self, stream_id: int) -> None:
        """Note that the peer has reset an open stream, or has made us reset one."""

    def on_stray_reset(self) -> None:
        """Note that the peer has reset a stream that is closed."""

    def on_oddity(self) -> None:
        """Note an allowed but useless frame: many of them are an attack."""

    def on_goaway(self, last_stream_id: int, code: int, debug_data: bytes) -> None:
        """Note that the peer accepts no more streams."""

    def on_failed(self, error: ConnectionFailedError) -> None:
        """Note that the peer has broken a rule: the connection ends, and a GOAWAY with the reason is queued."""


class RequestListener(Listener, Protocol):
    """Receives the events of a server connection."""

    def prepare(self, fields: Headers) -> Any:
        """Return what ``on_request`` needs from the headers of a request, without their ``VARYING`` field.

        Called once for headers that repeat, with or without another timeout.
        """

    def on_request(self, stream_id: int, request: Request, end_stream: bool) -> None:
        """Begin a request."""


class ResponseListener(Listener, Protocol):
    """Receives the events of a client connection."""

    def on_response(self, stream_id: int, fields: Headers, end_stream: bool) -> None:
        """Take the header of a response."""

    def on_trailers(self, stream_id: int, fields: Headers) -> None:
        """Take the end of a response."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a connection allows its peer.

    Attributes:
        stream_window_bytes: body octets that a stream may send ahead.
        connection_window_bytes: the same for the whole connection.
        header_list_bytes: size of the fields of a block (section 6.5.2, SETTINGS_MAX_HEADER_LIST_SIZE).
        header_count: fields of a block.
        continuations: frames of a block after its first (CVE-2024-27316).
        settings_entries: entries of one SETTINGS frame (CVE-2020-11080).
        outbound_acks: unsent answers to PING and SETTINGS (CVE-2019-9512).
    """

    stream_window_bytes: int
    connection_window_bytes: int
    header_list_bytes: int
    header_count: int = 1024
    continuations: int = 8
    settings_entries: int = 32
    outbound_acks: int = 1000


class Block:
    """A decoded header block.

    Attributes:
        fields: fields of the block.
        is_sound: whether all fields have only octets that a header may have.
        opening: result of the listener for this block, once it was asked.
    """

    __slots__ = ("fields", "is_sound", "opening")

    def __init__(self, fields: Headers, is_sound: bool) -> None:
        self.fields = fields
        self.is_sound = is_sound
        self.opening: Any = None


class Stream:
    """A stream that is open, or closed by one end only.

    Attributes:
        credit: body octets that the peer may still send (section 5.2).
        send_extra: body octets that we may still send, beyond the peer's current SETTINGS_INITIAL_WINDOW_SIZE. That
            setting moves the windows of all streams (section 6.9.2); kept apart, it costs nothing per stream.
        returned: consumed octets that the peer has not been told about.
        content_left: body octets still to come according to content-length; None: there is no content-length.
        has_headers: whether the final header of the peer's message has arrived (1xx do not count).
        is_remote_closed: whether the peer sends nothing more.
        is_local_closed: whether we send nothing more, except what waits in ``outbox``.
        outbox: waiting output; None: nothing waits.
    """

    __slots__ = (
        "content_left",
        "credit",
        "has_headers",
        "is_local_closed",
        "is_remote_closed",
        "outbox",
        "returned",
        "send_extra",
        "stream_id",
    )

    def __init__(self, stream_id: int, credit: int) -> None:
        self.stream_id = stream_id
        self.credit = credit
        self.send_extra = 0
        self.returned = 0
        self.content_left: int | None = None
        self.has_headers = False
        self.is_remote_closed = False
        self.is_local_closed = False
        self.outbox: Outbox | None = None


class Outbox:
    """Waiting output of a stream: a header block, pieces of a body, and the end of the stream.

    Attributes:
        head: fields of a header block that is sent before the body; None: there is none, or it has left.
        size_bytes: octets of all pieces.
        trailers: fields sent after the body; None: an empty DATA frame ends the stream, or nothing yet.
        ends: whether the stream ends after this output.
    """

    __slots__ = ("_at", "_pieces", "ends", "head", "size_bytes", "trailers")

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._at = 0
        self.head: Headers | None = None
        self.size_bytes = 0
        self.trailers: Headers | None = None
        self.ends = False

    def add(self, piece: bytes) -> None:
        """Queue a piece. It is kept whole until its last octet is taken."""
        if piece:
            self._pieces.append(piece)
            self.size_bytes += len(piece)

    def take(self, size_bytes: int) -> bytes:
        """Take a number of octets; that many must be queued."""
        self.size_bytes -= size_bytes
        parts: list[bytes] = []
        while size_bytes:
            piece = self._pieces[0]
            part = piece[self._at : self._at + size_bytes]
            size_bytes -= len(part)
            self._at += len(part)
            if self._at == len(piece):
                self._pieces.popleft()
                self._at = 0
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def drop_some(self, size_bytes: int) -> int:
        """Drop pieces of about ``size_bytes`` octets. Returns the number of dropped octets."""
        before = self.size_bytes
        while self.size_bytes and before - self.size_bytes < size_bytes:
            self.drop()
        return before - self.size_bytes

    def drop(self) -> int:
        """Drop the first piece. Returns its octets that were left."""
        freed = len(self._pieces.popleft()) - self._at
        self._at = 0
        self.size_bytes -= freed
        return freed


DIRECT_BYTES: Final = 64 * 1024
"""Octets of frames that may wait for ``take``; more output waits in outboxes, where it is counted."""

LEFT_BEHIND_BYTES: Final = 64 * 1024
"""Waiting output of a closed stream is freed at once up to this size: hundreds may be closed at once."""

RESETS_REMEMBERED: Final = 256
"""Streams that we have reset, and whose frames may still arrive (section 5.1, closed).

Of older ones only the highest id is kept; all closed streams up to it count as reset ones.
"""

BLOCKS_MAX: Final = 32
BLOCK_BYTES_MAX: Final = 512
BLOCK_FIELDS_MAX: Final = 32
"""Header blocks of a connection whose meaning is remembered, their longest size, and their most fields: one octet can
name a field, which takes a hundred here."""


class Connection(ABC):
    """One end of a connection. See ``ServerConnection`` and ``ClientConnection`` for the differences.

    Arguments:
        listener: receives the events.
        limits: limits for the peer.
        settings: settings sent to the peer first.
        indexed: names of fields that repeat in many sent messages.

    Attributes:
        is_blocked: whether the socket is full: frames are not made before ``take`` asks for them.
        is_held: set by a listener that has used its time: whole frames are left for ``go_on``.
        has_failed: whether the peer broke a rule, or the owner has ended the connection: all input is ignored.
        left_behind: large waiting output of closed streams, for the owner to free bit by bit; None: it is freed at
            once.
        moved_streams: streams with waiting output whose windows the peer's SETTINGS have opened; the owner resets it.
        peer_settings: settings of the peer, by number.
    """

    def __init__(self, listener: Any, limits: Limits, settings: dict[int, int], indexed: frozenset[bytes]) -> None:
        self._listener = listener
        self._encoder = Encoder(indexed)
        self._streams: dict[int, Stream] = {}
        self._resets: dict[int, None] = {}
        self._resets_forgotten = 0
        self._send_window = self._peer_window = f.WINDOW_BYTES
        self._extra_max = self._queued_bytes = 0
        # Taken from the front: a plain dict would pass over all entries that were there before.
        self._waiting: OrderedDict[int, Stream] = OrderedDict()
        self._waiting_heads: OrderedDict[int, Stream] = OrderedDict()
        self._stuck: dict[int, Stream] = {}
        self.moved_streams = 0
        self._out: list[bytes] = [f.settings_frame(settings)]
        self._out_bytes = self._acks = self._pings = 0
        self._acks_max = limits.outbound_acks
        self._goes = self.is_blocked = self.is_held = self.has_failed = False
        self.left_behind: list[Outbox] | None = None
        self._settings_max = limits.settings_entries
        self._settings_sent = 1
        self._is_settled = False
        self.peer_settings: dict[int, int] = {}
        self._decoder = Decoder(limits.header_list_bytes, limits.header_count)
        self._known: dict[bytes, Block] = {}
        self._awaited = self._rest = b""
        self._block: list[bytes] | None = None
        self._block_end_stream = False
        self._block_stream_id = self._block_room = 0
        self._block_room_max = 2 * limits.header_list_bytes
        self._continuations_max = limits.continuations
        self._stream_credit = limits.stream_window_bytes
        self._window_bytes = self._credit = limits.connection_window_bytes
        self._returned = 0
        if limits.connection_window_bytes > f.WINDOW_BYTES:
            self._out.append(f.window_update_frame(0, limits.connection_window_bytes - f.WINDOW_BYTES))

    @abstractmethod
    def _last_peer_stream(self) -> int:
        """Return the last stream of the peer that was processed, for GOAWAY."""

    @abstractmethod
    def _is_idle(self, stream_id: int) -> bool:
        """Return whether a stream was never opened (section 5.1)."""

    @abstractmethod
    def _on_headers(self, stream_id: int, block: Block, end_stream: bool) -> None:
        """Take a complete header block."""

    # ---- pending output

    @property
    def want_write(self) -> bool:
        """Whether ``take`` would return something."""
        return bool(self._out or self._waiting_heads or (self._waiting and self._send_window > 0))

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended: it has failed, or it is closing and has no stream left."""
        return self.has_failed or (self._goes and not self._streams)

    @property
    def open_streams(self) -> int:
        """Number of streams that are not closed, including those with waiting output."""
        return len(self._streams)

    @property
    def send_window(self) -> int:
        """Body octets that the window of the connection allows."""
        return self._send_window

    def queued_body_size(self, stream_id: int | None = None) -> int:
        """Return the body octets that wait for the peer's windows or for the socket.

        Arguments:
            stream_id: stream; None: all streams.
        """
        if stream_id is None:
            return self._queued_bytes
        stream = self._streams.get(stream_id)
        return 0 if stream is None or stream.outbox is None else stream.outbox.size_bytes

    def is_held_up(self, stream_id: int) -> bool:
        """Return whether the waiting output of a stream waits for a window, and not only for the socket.

        Arguments:
            stream_id: stream with waiting output.
        """
        return stream_id in self._stuck or self._send_window <= 0

    # ---- messages

    def send_headers(self, stream_id: int, fields: Headers, end_stream: bool = False) -> None:
        """Send the header of a message, or its trailers, which follow all waiting output.

        Arguments:
            stream_id: stream to send on.
            fields: fields in order.
            end_stream: whether nothing follows.

        Raises:
            StreamGoneError: the stream is closed, or has ended.
            ConnectionGoneError: the connection has failed.
        """
        stream = self._sending(stream_id)
        outbox = stream.outbox
        if outbox is None and not self.is_blocked and self._out_bytes < DIRECT_BYTES:
            self._write(f.header_frames(stream_id, self._encoder.encode(fields), end_stream))
            if end_stream:
                self._end_local(stream)
            return
        if outbox is None:
            outbox = stream.outbox = Outbox()
            outbox.head = fields
            self._waiting_heads[stream_id] = stream
        else:
            outbox.trailers = fields
        if end_stream:
            outbox.ends = stream.is_local_closed = True

    def send_data(self, stream_id: int, data: bytes, end_stream: bool = False) -> None:
        """Send octets of a body. Those that the windows do not allow wait.

        Arguments:
            stream_id: stream to send on.
            data: any number of octets.
            end_stream: whether nothing follows.

        Raises:
            StreamGoneError: the stream is closed, or has ended.
            ConnectionGoneError: the connection has failed.
        """
        stream = self._sending(stream_id)
        size = len(data)
        if stream.outbox is None and self._may_leave(stream, size):
            self._send_window -= size
            stream.send_extra -= size
            flags = f.END_STREAM if end_stream else 0
            self._write(_pack(size >> 8, size & 0xFF, f.DATA, flags, stream_id) + data)
            if end_stream:
                self._end_local(stream)
            return
        outbox = stream.outbox
        if outbox is None:
            outbox = stream.outbox = Outbox()
            waiting = self._waiting if size else self._waiting_heads  # section 6.9.1: an empty frame needs no window
            waiting[stream_id] = stream
        outbox.add(data)
        self._queued_bytes += size
        if end_stream:
            outbox.ends = stream.is_local_closed = True

    def end_stream(self, stream_id: int) -> None:
        """End our side of a stream.

        Arguments:
            stream_id: stream to end.
        """
        self.send_data(stream_id, b"", end_stream=True)

    def _sending(self, stream_id: int) -> Stream:
        stream = self._streams.get(stream_id)
        if stream is None or stream.is_local_closed:
            if self.has_failed:
                raise ConnectionGoneError("the connection has failed")
            raise StreamGoneError(f"stream {stream_id} is closed")
        return stream

    def _may_leave(self, stream: Stream, size: int) -> bool:
        return (
            size <= self._send_window
            and size <= self._peer_window + stream.send_extra
            and size <= f.MAX_FRAME_BYTES
            and self._out_bytes < DIRECT_BYTES
            and not self.is_blocked
            and not self._waiting
        )

    def _write(self, octets: bytes) -> None:
        self._out.append(octets)
        self._out_bytes += len(octets)

    # ---- the end of streams

    def _end_local(self, stream: Stream) -> None:
        """Note that our end of a stream has ended, and its last frame is written."""
        stream.is_local_closed = True
        if stream.is_remote_closed:
            self._remove(stream, ErrorCode.NO_ERROR)

    def reset(self, stream_id: int, code: int) -> None:
        """End a stream at once, and drop its waiting output; does nothing if it is closed.

        Arguments:
            stream_id: stream to reset.
            code: reason.
        """
        stream = self._streams.get(stream_id)
        if stream is None or self.has_failed:
            return
        self._out.append(f.reset_frame(stream_id, code))
        self._remember_reset(stream_id)
        self._remove(stream, code)

    def _remember_reset(self, stream_id: int) -> None:
        if len(self._resets) >= RESETS_REMEMBERED:
            oldest = next(iter(self._resets))
            del self._resets[oldest]
            self._resets_forgotten = max(self._resets_forgotten, oldest)
        self._resets[stream_id] = None

    def _was_reset(self, stream_id: int) -> bool:
        """Return whether we have reset a closed stream, or may have done so: its frames are then ignored."""
        return stream_id in self._resets or stream_id <= self._resets_forgotten

    def _remove(self, stream: Stream, code: int) -> None:
        stream_id = stream.stream_id
        del self._streams[stream_id]
        stream.is_local_closed = stream.is_remote_closed = True
        outbox, stream.outbox = stream.outbox, None
        if outbox is not None:
            self._queued_bytes -= outbox.size_bytes
            if outbox.size_bytes > LEFT_BEHIND_BYTES and self.left_behind is not None:
                self.left_behind.append(outbox)
            self._waiting.pop(stream_id, None)
            self._waiting_heads.pop(stream_id, None)
            self._stuck.pop(stream_id, None)
        self._listener.on_closed(stream_id, code)

    def drop(self, size_bytes: int) -> bool:
        """Free a part of the waiting output of a lost connection.

        Arguments:
            size_bytes: approximate number of octets to free.

        Returns:
            Whether output is left.
        """
        for stream in self._streams.values():
            outbox = stream.outbox
            while outbox is not None and outbox.size_bytes and size_bytes > 0:
                freed = outbox.drop()
                self._queued_bytes -= freed
                size_bytes -= freed
            if size_bytes <= 0:
                return True
        return False

    # ---- the connection

    def ping(self, opaque: bytes) -> None:
        """Send a ping of eight octets."""
        self._pings += 1
        self._out.append(f.frame(f.PING, 0, 0, opaque))

    def send_goaway(self, code: int, debug_data: bytes = b"") -> None:
        """Announce that no further stream is accepted; open streams continue.

        Arguments:
            code: reason.
            debug_data: human-readable reason.
        """
        self._goes = True
        self._out.append(f.goaway_frame(code, debug_data, self._last_peer_stream()))

    def send_shutdown_notice(self) -> None:
        """Announce that soon no further stream will be accepted (section 6.8)."""
        self._out.append(f.goaway_frame(ErrorCode.NO_ERROR))

    def fail(self, code: int, debug_data: bytes) -> None:
        """End the connection (section 5.4.1). GOAWAY is the last frame sent, once, and all input is ignored.

        Arguments:
            code: reason.
            debug_data: human-readable reason.
        """
        if not self.has_failed:
            self.send_goaway(code, debug_data)
            self.stop()

    def stop(self) -> None:
        """Ignore all further input, including input that has already arrived."""
        self.has_failed = True
        self._block, self._rest = None, b""

    def _acknowledge_frame(self, frame: bytes) -> None:
        self._acks += 1
        if self._acks > self._acks_max:
            raise ConnectionFailedError(ErrorCode.ENHANCE_YOUR_CALM, "too many acknowledgements wait to be read")
        self._out.append(frame)

    # ---- octets out

    def take(self, amount: int) -> bytes:
        """Return octets to send.

        Arguments:
            amount: most octets to return.
        """
        if self._waiting_heads:
            self._fill_heads(amount)
        if self._waiting and self._send_window > 0:
            self._fill(amount)
        out = self._out
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        self._acks = 0
        if len(data) <= amount:
            self._out = []
            self._out_bytes = 0
            return data
        self._out = [data[amount:]]
        self._out_bytes = len(data) - amount
        return data[:amount]

    def _fill_heads(self, amount: int) -> None:
        """Write the waiting header blocks and empty ends: no window holds them back (section 6.9)."""
        heads = self._waiting_heads
        while heads and self._out_bytes < amount:
            _, stream = heads.popitem(last=False)
            outbox = stream.outbox
            if outbox is None:
                continue
            if outbox.head is None and not outbox.size_bytes:
                self._fill_frame(stream, outbox, 0)
                continue
            head, outbox.head = outbox.head, None
            has_more = outbox.size_bytes > 0 or outbox.trailers is not None
            ends = outbox.ends and not has_more
            if head is not None:
                self._write(f.header_frames(stream.stream_id, self._encoder.encode(head), ends))
            if outbox.size_bytes:
                self._waiting[stream.stream_id] = stream
            else:
                self._finish(stream, outbox)

    def _fill(self, amount: int) -> None:
        """Make frames of waiting bodies, one frame of each stream in turn."""
        waiting = self._waiting
        while waiting and self._out_bytes < amount:
            stream_id, stream = waiting.popitem(last=False)
            outbox = stream.outbox
            if outbox is None:
                continue
            left = min(self._peer_window + stream.send_extra, self._send_window)
            size = min(outbox.size_bytes, f.MAX_FRAME_BYTES, max(left, 0))
            if not size and outbox.size_bytes:
                if self._send_window <= 0:
                    waiting[stream_id] = stream
                    return
                self._stuck[stream_id] = stream  # until the peer opens this stream's window
                continue
            self._fill_frame(stream, outbox, size)
            if stream.outbox is not None:
                waiting[stream_id] = stream

    def _fill_frame(self, stream: Stream, outbox: Outbox, size: int) -> None:
        self._send_window -= size
        stream.send_extra -= size
        self._queued_bytes -= size
        is_done = size == outbox.size_bytes
        ends = is_done and outbox.ends and outbox.trailers is None
        if size or ends:
            flags = f.END_STREAM if ends else 0
            self._write(_pack(size >> 8, size & 0xFF, f.DATA, flags, stream.stream_id) + outbox.take(size))
        if is_done:
            self._finish(stream, outbox)

    def _finish(self, stream: Stream, outbox: Outbox) -> None:
        """Send what follows a body that is written completely."""
        stream.outbox = None
        if outbox.trailers is not None:
            self._write(f.header_frames(stream.stream_id, self._encoder.encode(outbox.trailers), end_stream=True))
        if outbox.ends:
            self._end_local(stream)

    def _open_window(self, stream: Stream, increment: int) -> bool:
        """Apply a WINDOW_UPDATE of a stream. Returns whether its window is within the maximum (section 6.9.1)."""
        stream.send_extra += increment
        self._extra_max = max(self._extra_max, stream.send_extra)
        if self._stuck.pop(stream.stream_id, None) is not None:
            self._waiting[stream.stream_id] = stream
        return self._peer_window + stream.send_extra <= f.MAX_WINDOW_BYTES

    def _move_windows(self, window_bytes: int) -> bool:
        """Apply SETTINGS_INITIAL_WINDOW_SIZE. Returns whether all windows are within the maximum (section 6.9.2)."""
        if window_bytes > self._peer_window:
            self.moved_streams += len(self._stuck)
            self._waiting.update(self._stuck)
            self._stuck.clear()
        self._peer_window = window_bytes
        if window_bytes + self._extra_max > f.MAX_WINDOW_BYTES:  # the stream with that window may be gone
            self._extra_max = max((stream.send_extra for stream in self._streams.values()), default=0)
        return window_bytes + self._extra_max <= f.MAX_WINDOW_BYTES

    # ---- octets in

    @property
    def unread_bytes(self) -> int:
        """Octets of an incomplete frame and of an incomplete header block."""
        if self._block is None:
            return len(self._rest)
        return len(self._rest) + self._block_room_max - self._block_room

    def receive(self, data: bytes) -> None:
        """Take received octets.

        Arguments:
            data: any part of the peer's output.
        """
        if self._rest:
            data, self._rest = self._rest + data, b""
        if self.has_failed:
            return
        if self.is_held:
            self._rest = data
            return
        try:
            at = self._preface(data) if self._awaited else 0
            at = self._frames(data, at)
        except ConnectionFailedError as error:
            self.fail(error.code, str(error).encode("ascii", "replace"))
            self._listener.on_failed(error)
            return
        if at < len(data) and not self.has_failed:
            self._rest = data[at:]

    def go_on(self) -> None:
        """Continue with the frames left when the listener had used its time."""
        self.is_held = False
        self.receive(b"")

    def _preface(self, data: bytes) -> int:
        """Skip the octets that a client begins with (section 3.4). Returns the position of the first frame."""
        size = min(len(self._awaited), len(data))
        if self._awaited[:size] != data[:size]:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "no preface of HTTP/2")
        self._awaited = self._awaited[size:]
        return size

    def _frames(self, data: bytes, at: int) -> int:
        """Take all complete frames from a position on. Returns the position of the rest."""
        end = len(data)
        while end - at >= f.HEAD_BYTES and not self.has_failed and not self.is_held:
            high, low, kind, flags, stream_id = _unpack_head(data, at)
            size = high << 8 | low
            if size > f.MAX_FRAME_BYTES:  # section 4.2
                raise ConnectionFailedError(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} octets")
            start, after = at + f.HEAD_BYTES, at + f.HEAD_BYTES + size
            if after > end:
                break
            at = after
            stream_id &= f.LAST_STREAM
            try:
                self._frame(kind, flags, stream_id, data[start:after])
            except StreamFailedError as error:
                self._refuse_stream(stream_id, error)
        return at

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None:
            # Section 4.3: the frames of a block are contiguous.
            if kind != f.CONTINUATION or stream_id != self._block_stream_id:
                raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "another frame within a header block")
            self._continuation_frame(self._block, flags, payload)
        elif kind == f.DATA:
            self._data_frame(flags, stream_id, payload)
        elif kind == f.HEADERS and self._is_settled:
            self._headers_frame(flags, stream_id, payload)
        else:
            self._control_frame(kind, flags, stream_id, payload)

    def _refuse_stream(self, stream_id: int, error: StreamFailedError) -> None:
        """End one stream that broke a rule (section 5.4.2)."""
        if stream_id in self._streams:
            self._listener.on_reset(stream_id)  # as if by the peer: the call was begun for nothing (CVE-2025-8671)
            self.reset(stream_id, error.code)
        else:
            self._listener.on_oddity()
            self._out.append(f.reset_frame(stream_id, error.code))
            self._remember_reset(stream_id)

    # ---- headers

    def _headers_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & (f.PADDED | f.HAS_PRIORITY):
            skipped = f.PRIORITY_BYTES if flags & f.HAS_PRIORITY else 0
            payload = _unpadded(payload, flags, skipped)[skipped:]
        if not stream_id:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "HEADERS of stream 0")  # section 6.2
        end_stream = flags & f.END_STREAM != 0
        if flags & f.END_HEADERS:
            self._whole_block(stream_id, payload, end_stream)
            return
        self._block, self._block_stream_id, self._block_end_stream = [payload], stream_id, end_stream
        self._block_room = self._block_room_max - len(payload)

    def _continuation_frame(self, block: list[bytes], flags: int, payload: bytes) -> None:
        block.append(payload)
        self._block_room -= len(payload)
        if self._block_room < 0 or len(block) > self._continuations_max + 1:
            raise ConnectionFailedError(ErrorCode.ENHANCE_YOUR_CALM, "too many header fields, or too large ones")
        if flags & f.END_HEADERS:
            self._block = None
            self._whole_block(self._block_stream_id, b"".join(block), self._block_end_stream)

    def _whole_block(self, stream_id: int, octets: bytes, end_stream: bool) -> None:
        block = self._known.get(octets)
        if block is None:
            fields, is_sound, is_stable = self._decoder.decode(octets)
            block = Block(fields, is_sound)
            if not is_stable:
                self._known.clear()
            elif len(octets) <= BLOCK_BYTES_MAX and len(fields) <= BLOCK_FIELDS_MAX:
                if len(self._known) >= BLOCKS_MAX:
                    self._known.clear()
                self._known[octets] = block
        self._on_headers(stream_id, block, end_stream)

    # ---- bodies

    def _data_frame(self, flags: int, stream_id: int, data: bytes) -> None:
        size = len(data)
        self._credit -= size
        if self._credit < 0:
            raise ConnectionFailedError(ErrorCode.FLOW_CONTROL_ERROR, "more than the connection's window")  # 6.9.1
        if flags & f.PADDED:
            data = _unpadded(data, flags, 0)
        stream = self._streams.get(stream_id)
        if stream is None or stream.is_remote_closed or not stream.has_headers:
            self._stray_data(stream_id, stream, size, flags & f.END_STREAM != 0)
            return
        stream.credit -= size
        if stream.credit < 0:
            self.acknowledge(size, 0)
            raise StreamFailedError(ErrorCode.FLOW_CONTROL_ERROR, "more than the stream's window")
        if size != len(data):
            self.acknowledge(size - len(data), stream_id)
        end_stream = flags & f.END_STREAM != 0
        if stream.content_left is not None:
            self._count_content(stream, len(data), end_stream)
        stream.is_remote_closed = end_stream
        self._listener.on_data(stream_id, data, end_stream)
        if end_stream:
            self._ended(stream)

    def _stray_data(self, stream_id: int, stream: Stream | None, size: int, end_stream: bool) -> None:
        """Handle DATA without an open stream: its octets are returned to the window at once."""
        if not stream_id or self._is_idle(stream_id):
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "DATA of a stream that is not open")  # 6.1, 5.1
        self.acknowledge(size, 0)
        self._listener.on_stray_data(size, end_stream)
        if stream is not None and not stream.is_remote_closed:
            raise malformed("DATA before a header")  # section 8.1
        if not self._was_reset(stream_id):
            raise StreamFailedError(ErrorCode.STREAM_CLOSED, "DATA of a stream that is closed")

    def _expect(self, stream: Stream, length: int, end_stream: bool) -> None:
        """Check the DATA of a message against its content-length (section 8.1.1)."""
        stream.content_left = length
        if end_stream:
            self._check_content(stream)

    def _check_content(self, stream: Stream) -> None:
        if stream.content_left:
            raise malformed("another size than content-length says")

    def _count_content(self, stream: Stream, size: int, end_stream: bool) -> None:
        left = (stream.content_left or 0) - size
        stream.content_left = left
        if left < 0 or (end_stream and left):
            self.acknowledge(size, 0)
            raise malformed("another size than content-length says")

    def _ended(self, stream: Stream) -> None:
        """Close a stream that the peer has ended, if our end has ended too. The listener knows of the peer's end."""
        if stream.is_local_closed and stream.outbox is None and self._streams.get(stream.stream_id) is stream:
            self._remove(stream, ErrorCode.NO_ERROR)

    def acknowledge(self, amount: int, stream_id: int) -> None:
        """Return consumed octets to the windows of the connection and of the stream.

        Arguments:
            amount: number of octets.
            stream_id: their stream, open or closed. 0: they count for the connection only.
        """
        self._returned += amount
        if self._returned >= self._window_bytes >> 1:
            self._out.append(f.window_update_frame(0, self._returned))
            self._credit += self._returned
            self._returned = 0
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.is_remote_closed:
            stream.returned += amount
            if stream.returned >= self._stream_credit >> 1:
                self._out.append(f.window_update_frame(stream_id, stream.returned))
                stream.credit += stream.returned
                stream.returned = 0

    # ---- control frames (sections 6.3 to 6.9)

    def _control_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Take a frame other than DATA and HEADERS."""
        if not self._is_settled and (kind != f.SETTINGS or flags & f.ACK):
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")  # section 3.4
        take = _FRAMES.get(kind)
        if take is None:
            self._listener.on_oddity()  # section 5.5: unknown types are ignored
        else:
            take(self, flags, stream_id, payload)

    def _priority_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Check a PRIORITY frame, and ignore it (section 6.3)."""
        del flags
        if not stream_id:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "PRIORITY of stream 0")
        self._listener.on_oddity()
        if len(payload) != f.PRIORITY_BYTES:
            if self._is_idle(stream_id):  # no RST_STREAM may be sent for it (section 6.4)
                raise ConnectionFailedError(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY is not of 5 octets")
            raise StreamFailedError(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY is not of 5 octets")

    def _reset_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Take RST_STREAM (section 6.4)."""
        del flags
        if len(payload) != 4:
            raise ConnectionFailedError(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM is not of 4 octets")
        if not stream_id or self._is_idle(stream_id):
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "RST_STREAM of a stream that was never open")
        stream = self._streams.get(stream_id)
        if stream is None:
            self._listener.on_stray_reset()
            return
        self._listener.on_reset(stream_id)
        if stream_id in self._streams:
            self._remove(stream, _uint32(payload)[0])

    def _settings_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Take SETTINGS (section 6.5)."""
        if stream_id:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & f.ACK:
            self._settings_acknowledged(payload)
            return
        if len(payload) % 6:
            raise ConnectionFailedError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS is not of 6 octets each")
        if len(payload) > 6 * self._settings_max:
            raise ConnectionFailedError(ErrorCode.ENHANCE_YOUR_CALM, "too many settings in one frame")
        for key, value in _entries(payload):
            self._setting(key, value)
        self._is_settled = True
        self._acknowledge_frame(f.frame(f.SETTINGS, f.ACK, 0))
        self._listener.on_settings()

    def _settings_acknowledged(self, payload: bytes) -> None:
        if payload:
            raise ConnectionFailedError(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS with settings")
        if not self._settings_sent:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "an acknowledgement of SETTINGS that were not sent")
        self._settings_sent -= 1

    def _setting(self, key: int, value: int) -> None:
        """Apply one setting (section 6.5.2)."""
        if key == f.INITIAL_WINDOW_SIZE:
            if value > f.MAX_WINDOW_BYTES or not self._move_windows(value):
                raise ConnectionFailedError(ErrorCode.FLOW_CONTROL_ERROR, "a window of 2^31 octets or more")
        elif key == f.HEADER_TABLE_SIZE:
            self._encoder.limit(value)
        elif key == f.ENABLE_PUSH:
            self._check_push(value)
        elif key == f.MAX_FRAME_SIZE and not f.MAX_FRAME_BYTES <= value < 2**24:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, f"a maximum frame size of {value}")
        if key <= f.MAX_HEADER_LIST_SIZE:  # others are ignored and not kept
            self.peer_settings[key] = value

    def _check_push(self, value: int) -> None:
        if value > 1:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}")

    def _push_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Fail: a client pushes nothing, and we have told servers not to (sections 6.6 and 8.4)."""
        del flags, stream_id, payload
        raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE")

    def _ping_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Take PING (section 6.7)."""
        if stream_id:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise ConnectionFailedError(ErrorCode.FRAME_SIZE_ERROR, "PING is not of 8 octets")
        if flags & f.ACK:
            self._pong(payload)
            return
        self._acknowledge_frame(f.frame(f.PING, f.ACK, 0, payload))
        self._listener.on_ping()

    def _pong(self, payload: bytes) -> None:
        if self._pings:
            self._pings -= 1
            self._listener.on_pong(payload)
        else:
            self._listener.on_oddity()

    def _goaway_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Take GOAWAY (section 6.8)."""
        del flags
        if stream_id:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < 8:
            raise ConnectionFailedError(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY is of less than 8 octets")
        last, code = _uint32(payload)[0] & f.LAST_STREAM, _uint32(payload, 4)[0]
        self._on_goaway(last, code, payload[8:])

    def _on_goaway(self, last_stream_id: int, code: int, debug_data: bytes) -> None:
        self._goes = True
        self._listener.on_goaway(last_stream_id, code, debug_data)

    def _window_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Take WINDOW_UPDATE (section 6.9)."""
        del flags
        if len(payload) != 4:
            raise ConnectionFailedError(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE is not of 4 octets")
        increment = _uint32(payload)[0] & f.MAX_WINDOW_BYTES
        self._listener.on_window_update()
        if not stream_id:
            if not increment:
                raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            self._send_window += increment
            if self._send_window > f.MAX_WINDOW_BYTES:
                raise ConnectionFailedError(ErrorCode.FLOW_CONTROL_ERROR, "a window of 2^31 octets or more")
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            if self._is_idle(stream_id):
                raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of a stream that was never open")
            return
        if not increment:
            raise StreamFailedError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        if not self._open_window(stream, increment):
            raise StreamFailedError(ErrorCode.FLOW_CONTROL_ERROR, "a window of 2^31 octets or more")

    def _stray_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Fail: CONTINUATION may follow only HEADERS (section 6.10)."""
        del flags, stream_id, payload
        raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")

    def _update_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Take PRIORITY_UPDATE, and ignore the priority (RFC 9218 section 7.1)."""
        del flags, payload
        if stream_id:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "PRIORITY_UPDATE of a stream")
        self._listener.on_priority()


_FRAMES: Final[dict[int, Callable[[Connection, int, int, bytes], None]]] = {
    f.PRIORITY: Connection._priority_frame,
    f.RST_STREAM: Connection._reset_frame,
    f.SETTINGS: Connection._settings_frame,
    f.PUSH_PROMISE: Connection._push_frame,
    f.PING: Connection._ping_frame,
    f.GOAWAY: Connection._goaway_frame,
    f.WINDOW_UPDATE: Connection._window_frame,
    f.CONTINUATION: Connection._stray_continuation,
    f.PRIORITY_UPDATE: Connection._update_frame,
}


def _unpadded(payload: bytes, flags: int, needed_bytes: int) -> bytes:
    """Return a payload without its padding, with at least ``needed_bytes`` octets (sections 6.1 and 6.2)."""
    is_padded = flags & f.PADDED != 0
    size = len(payload) - is_padded - needed_bytes
    if size < 0:  # section 4.2
        raise ConnectionFailedError(ErrorCode.FRAME_SIZE_ERROR, "a frame ends before what its flags say")
    if not is_padded:
        return payload
    if payload[0] > size:
        raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "more padding than there are octets")
    return payload[1 : len(payload) - payload[0]]


# -- server ---------------------------------------------------------------------------------------------------------

RESPONSE_HEADERS: Headers = ((b":status", b"200"), (b"content-type", b"application/grpc"))
OK_TRAILERS: Headers = ((b"grpc-status", b"0"),)

_SERVER_INDEXED: Final = frozenset((b"content-type", b"grpc-status"))
"""Fields with few values that are in nearly every answer."""

_pack_id: Final = Struct(">I").pack
_pack_data: Final = Struct(">HBBBIBI").pack
"""The head of a DATA frame, and the prefix of its message."""
_PREFIX_BYTES: Final = 5
_ID_AT: Final = 5


VARYING: Final = b"grpc-timeout"
"""The field whose value differs in each request: results for the other fields are remembered without it."""

SHAPES_MAX: Final = 16
SHAPE_BYTES_MAX: Final = 2048
"""Header lists without ``VARYING`` that a connection remembers, with their results; and their largest size, as counted
in RFC 7541 section 4.1."""

KEPT_BYTES_FREE: Final = 4096
FIELD_OBJECTS_BYTES: Final = 120
"""Memory of a usual request's fields, which callers need not count; and the memory of a field beyond its size."""


def _headers(block: bytes, flags: int) -> tuple[bytes, bytes]:
    """Return the two parts of a HEADERS frame, before and after its stream id."""
    return f.HEAD.pack(0, len(block), f.HEADERS, flags, 0)[:_ID_AT], block


class Request:
    """The header of a request; headers that repeat share one object.

    Attributes:
        fields: fields in order.
        timeout_s: value of ``VARYING``, or None.
        malformed_timeout: invalid value of ``VARYING``; None: the value is valid.
        content_length: value of content-length, or None.
        prepared: result of ``RequestListener.prepare`` for the fields.
        kept_bytes: memory of the fields; 0: ``KEPT_BYTES_FREE`` or less.
    """

    __slots__ = ("content_length", "fields", "kept_bytes", "malformed_timeout", "prepared", "timeout_s")

    def __init__(
        self, fields: Headers, timeout: bytes | None, content_length: int | None, prepared: Any, kept_bytes: int
    ) -> None:
        self.fields = fields
        self.timeout_s: float | None = None
        self.malformed_timeout: bytes | None = None
        if timeout is not None:
            try:
                self.timeout_s = decode_timeout(timeout)
            except ValueError:
                self.malformed_timeout = timeout[:64]
        self.content_length = content_length
        self.prepared = prepared
        self.kept_bytes = kept_bytes


SLICE_BYTES: Final = 16 * 1024
"""Large messages of streams are queued in pieces of this size."""

LARGE_BYTES: Final = 64 * 1024
"""Messages above this size are queued without copying them behind their prefix."""


class ServerConnection(Connection):
    """The server end of a connection.

    Arguments:
        listener: receives the events.
        limits: limits for the client.
    """

    def __init__(self, listener: RequestListener, limits: ServerLimits) -> None:
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
        super().__init__(listener, allowed, settings, _SERVER_INDEXED)
        self._streams_max = limits.max_concurrent_streams
        self._last_id = self._last_taken = 0
        self._refuses = False
        self.left_behind = []
        self._awaited = f.PREFACE
        self._answer_head = self._answer_tail = _headers(b"", 0)
        self._answer_changes = -1
        self._shapes: dict[tuple[int, Headers], tuple[int | None, Any, int]] = {}

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
            self._remember_reset(stream_id)  # above the last stream of our GOAWAY: ignored (section 6.8)
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
        for place in range(len(fields) - 1, -1, -1):  # the last of several counts, as in grpc-go
            if fields[place][0] == VARYING:
                timeout, at = fields[place][1], place
                break
        shape = (at, fields if at < 0 else fields[:at] + fields[at + 1 :])
        known = self._shapes.get(shape)
        if known is None:
            size_bytes = sum(len(name) + len(value) + FIELD_BYTES for name, value in fields)
            kept_bytes = size_bytes + FIELD_OBJECTS_BYTES * len(fields)
            kept_bytes = kept_bytes if kept_bytes > KEPT_BYTES_FREE else 0
            known = check_request(fields), self._listener.prepare(fields), kept_bytes
            if size_bytes <= SHAPE_BYTES_MAX:
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

    # ---- output

    def send_goaway(self, code: int, debug_data: bytes = b"") -> None:
        """Announce that no further stream is accepted; open streams continue."""
        if not self._refuses:
            self._refuses, self._last_taken = True, self._last_id
        super().send_goaway(code, debug_data)

    def _end_local(self, stream: Stream) -> None:
        stream.is_local_closed = True
        if not stream.is_remote_closed:
            # Section 8.1: the answer is complete, and the rest of the request is not needed.
            self._out.append(f.reset_frame(stream.stream_id, ErrorCode.NO_ERROR))
            self._remember_reset(stream.stream_id)
        self._remove(stream, ErrorCode.NO_ERROR)

    def answer(self, stream_id: int, body: bytes, has_prefix: bool = False) -> bool:
        """Send a whole answer of gRPC, if it may leave at once.

        Arguments:
            stream_id: stream on which nothing was sent.
            body: the message, or all messages of the answer.
            has_prefix: whether each message has its prefix.

        Returns:
            Whether the answer was sent. The stream is then closed, without a call of the listener.
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
            if encoder.changes == changes:  # so both will be the same the next time
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

    def answer_later(self, stream_id: int, pieces: Sequence[bytes], trailers: Headers = ()) -> None:
        """Queue a whole unary answer that may not leave at once.

        Arguments:
            stream_id: stream to answer.
            pieces: pieces of the message, which are never joined; a single small piece is copied behind its prefix.
            trailers: trailers of the handler, sent after the status.
        """
        self.send_headers(stream_id, RESPONSE_HEADERS)
        if len(pieces) == 1 and len(pieces[0]) <= LARGE_BYTES:
            self.send_data(stream_id, frame(pieces[0]))
        else:
            self.send_data(stream_id, prefix(sum(map(len, pieces))))
            for piece in pieces:
                self.send_data(stream_id, piece)
        self.send_headers(stream_id, OK_TRAILERS + trailers, end_stream=True)

    def send_in_slices(self, stream_id: int, message: bytes) -> None:
        """Queue a large message in pieces, each of which is freed once it has left; a single piece would stay whole."""
        self.send_data(stream_id, prefix_of(message))
        for start in range(0, len(message), SLICE_BYTES):
            self.send_data(stream_id, message[start : start + SLICE_BYTES])


# -- client ---------------------------------------------------------------------------------------------------------

_CLIENT_INDEXED: Final = frozenset(
    (b":path", b":authority", b"content-type", b"te", b"user-agent", b"grpc-accept-encoding")
)
"""Fields that a client repeats in every call."""


class ClientConnection(Connection):
    """The client end of a connection. It sends the preface first.

    Arguments:
        listener: receives the events.
        options: limits for the server.
    """

    def __init__(self, listener: ResponseListener, options: ChannelOptions) -> None:
        settings = {
            f.ENABLE_PUSH: 0,
            f.INITIAL_WINDOW_SIZE: options.stream_window_bytes,
            f.MAX_HEADER_LIST_SIZE: options.header_list_bytes,
        }
        allowed = Limits(options.stream_window_bytes, options.connection_window_bytes, options.header_list_bytes)
        super().__init__(listener, allowed, settings, _CLIENT_INDEXED)
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
        if value:  # section 6.5.2: only clients may enable push
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "a server with ENABLE_PUSH")

    def _on_goaway(self, last_stream_id: int, code: int, debug_data: bytes) -> None:
        super()._on_goaway(last_stream_id, code, debug_data)
        for stream in [one for one in self._streams.values() if one.stream_id > last_stream_id]:
            if stream.stream_id in self._streams:  # the end of one call may end another
                self._remove(stream, ErrorCode.REFUSED_STREAM)  # section 6.8: the server has not processed them

    # ---- output

    def send_request(self, fields: Headers) -> int:
        """Open a stream with the header of a request.

        Arguments:
            fields: fields in order.

        Returns:
            The stream's id.

        Raises:
            ConnectionGoneError: the connection has failed or is closing, or has no ids left (section 5.1.1).
        """
        stream_id = self._next_id
        if self.has_failed or self._goes or stream_id > f.LAST_STREAM:
            raise ConnectionGoneError("the connection takes no more streams")
        self._next_id = stream_id + 2
        self._streams[stream_id] = Stream(stream_id, self._stream_credit)
        self._write(f.header_frames(stream_id, self._encoder.encode(fields), end_stream=False))
        return stream_id

    def send_message(self, stream_id: int, message: bytes) -> None:
        """Queue a message after its prefix, as two pieces."""
        self.send_data(stream_id, prefix_of(message))
        self.send_data(stream_id, message)


# -- neither --------------------------------------------------------------------------------------------------------


class _NoListener:
    """The listener of a connection that does not exist: fails on every event."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a connection that has gone")


class _Closed(ServerConnection):
    """Replaces a lost connection: holds nothing, and sends nothing."""

    def __init__(self) -> None:
        super().__init__(_NoListener(), ServerLimits())
        self.has_failed = True
        self._out = []

    def acknowledge(self, amount: int, stream_id: int) -> None:
        """Ignore it: the connection is closed."""

    def reset(self, stream_id: int, code: int) -> None:
        """Ignore it: all streams are closed."""

    def ping(self, opaque: bytes) -> None:
        """Ignore it: no peer answers."""

    def send_goaway(self, code: int, debug_data: bytes = b"") -> None:
        """Ignore it: no peer reads it."""

    def send_shutdown_notice(self) -> None:
        """Ignore it: no peer reads it."""

    def send_request(self, fields: Headers) -> int:
        """Refuse a call of a client whose connection is lost."""
        del fields
        raise H2Error("the connection has gone")


CLOSED: Final[Any] = _Closed()
