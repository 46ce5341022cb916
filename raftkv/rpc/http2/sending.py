"""What one end of an HTTP/2 connection sends (RFC 9113): frames that leave at once, and what has to wait.

    connection.send_headers(1, fields)
    connection.send_data(1, body, end_stream=True)
    octets = connection.take(65_536)     # for the socket, at most so many

Invariants:

- No body leaves beyond the windows of its stream and of the connection (section 6.9.1).
- A header block is encoded when its frame is written: blocks leave in the order in which they change the peer's table
  (RFC 7541 section 2.2).
- Output that may leave at once becomes frames at once; other output waits in the outbox of its stream: header blocks
  for the socket only, bodies for the windows too, of which streams take turns.
- While the socket takes nothing, ``DIRECT_BYTES`` of frames are made at most, and a frame that ends a stream is made
  when it can leave: until then its stream counts as open, and so against the peer's limit of streams.

Leaves out: priorities (section 5.3; RFC 9218), push (section 8.4), padding of our own (section 10.7).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Final

from raftkv.rpc.http2 import frames as f
from raftkv.rpc.http2.errors import ConnectionFailedError, ConnectionGoneError, ErrorCode, StreamGoneError
from raftkv.rpc.http2.hpack import Encoder, Headers

# -- streams --------------------------------------------------------------------------------------------------------
#
# One stream of a connection (RFC 9113 section 5.1), and what waits to be sent on it.


class Stream:
    """A stream that is open, or closed by one end only.

    Attributes:
        credit: body octets that the peer may still send (section 5.2).
        send_extra: body octets that we may still send, beyond what the peer's SETTINGS_INITIAL_WINDOW_SIZE is now.
            That setting moves the windows of all streams (section 6.9.2): so it costs nothing a stream.
        returned: octets that were taken and of which the peer does not know yet.
        content_left: body octets that are to come as content-length has it; None: it says nothing.
        has_headers: the first header of the peer's message has come, those of 1xx aside.
        is_remote_closed: the peer sends nothing more.
        is_local_closed: we send nothing more; what waits in ``outbox`` goes first.
        outbox: what waits; None: nothing does.
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
    """Output that waits: a header block, body octets in the pieces in which they came, and what ends them.

    Attributes:
        head: fields of a header block that goes before the octets; None: it has left.
        size_bytes: of all pieces.
        trailers: fields to send after them; None: an empty DATA frame ends the stream, or nothing yet.
        ends: whether the stream ends after them.
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
        """Queue a piece; it is kept whole until its last octet is taken."""
        if piece:
            self._pieces.append(piece)
            self.size_bytes += len(piece)

    def take(self, size_bytes: int) -> bytes:
        """Take so many octets, which are there."""
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
        """Drop pieces of so many octets, or of a few more; returns how many."""
        before = self.size_bytes
        while self.size_bytes and before - self.size_bytes < size_bytes:
            self.drop()
        return before - self.size_bytes

    def drop(self) -> int:
        """Drop the first piece; returns how many octets of it were left."""
        freed = len(self._pieces.popleft()) - self._at
        self._at = 0
        self.size_bytes -= freed
        return freed


DIRECT_BYTES: Final = 64 * 1024
"""Octets of frames that wait for ``take``; more wait in outboxes, where they are counted."""

LEFT_BEHIND_BYTES: Final = 64 * 1024
"""What a closed stream leaves behind is freed at once up to here: hundreds may be closed at once."""

RESETS_REMEMBERED: Final = 256
"""Streams that we have reset, and of which frames may still be under way (section 5.1, closed).

Of older ones only the highest id is known; up to there all closed streams are taken for reset ones.
"""

_pack: Final = f.HEAD.pack


class Sender(ABC):
    """The sending half of a connection.

    Attributes:
        is_blocked: the peer's socket takes nothing: frames are not made before ``take`` asks for them.
        has_failed: a rule was broken, or the owner has ended the connection: nothing that comes is looked at.
        left_behind: what waited on closed streams, where that was much, for the owner to be freed bit by bit; None: it
            is freed at once.
    """

    def __init__(self, listener: Any, indexed: frozenset[bytes], acks_max: int) -> None:
        self._listener = listener
        self._encoder = Encoder(indexed)
        self._streams: dict[int, Stream] = {}
        self._resets: dict[int, None] = {}
        self._resets_forgotten = 0
        self._send_window = f.WINDOW_BYTES
        self._peer_window = f.WINDOW_BYTES
        self._extra_max = 0
        self._queued_bytes = 0
        self._waiting: dict[int, Stream] = {}
        self._waiting_heads: dict[int, Stream] = {}
        self._stuck: dict[int, Stream] = {}
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._acks = 0
        self._acks_max = acks_max
        self._pings = 0
        self._goes = False
        self.is_blocked = False
        self.has_failed = False
        self.left_behind: list[Outbox] | None = None

    @abstractmethod
    def _last_peer_stream(self) -> int:
        """Return the last stream of the peer that we have looked at, for GOAWAY."""

    # ---- what is there to be sent

    @property
    def want_write(self) -> bool:
        """Whether ``take`` would return something."""
        return bool(self._out or self._waiting_heads or (self._waiting and self._send_window > 0))

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of this connection: it has failed, or goes and has no stream left."""
        return self.has_failed or (self._goes and not self._streams)

    @property
    def open_streams(self) -> int:
        """Streams that are not closed: those of which something waits to be sent, too."""
        return len(self._streams)

    @property
    def send_window(self) -> int:
        """Body octets that the peer takes of the whole connection."""
        return self._send_window

    def queued_body_size(self, stream_id: int | None = None) -> int:
        """Return the body octets that wait for the peer's windows, or for the socket.

        Arguments:
            stream_id: of which stream; None: of all.
        """
        if stream_id is None:
            return self._queued_bytes
        stream = self._streams.get(stream_id)
        return 0 if stream is None or stream.outbox is None else stream.outbox.size_bytes

    def is_held_up(self, stream_id: int) -> bool:
        """Return whether what waits on a stream waits for the peer to open a window, and not for the socket.

        Arguments:
            stream_id: of a stream on which something waits.
        """
        return stream_id in self._stuck or self._send_window <= 0

    # ---- messages

    def send_headers(self, stream_id: int, fields: Headers, end_stream: bool = False) -> None:
        """Send the header of a message, or its trailers: those go after all that waits.

        Arguments:
            stream_id: of the stream.
            fields: in order.
            end_stream: nothing follows.

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
        """Send octets of a body; what the windows do not let through waits.

        Arguments:
            stream_id: of the stream.
            data: of any size.
            end_stream: nothing follows.

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
            waiting = self._waiting if size else self._waiting_heads  # section 6.9.1: nothing needs no window
            waiting[stream_id] = stream
        outbox.add(data)
        self._queued_bytes += size
        if end_stream:
            outbox.ends = stream.is_local_closed = True

    def end_stream(self, stream_id: int) -> None:
        """End our side of a stream.

        Arguments:
            stream_id: of the stream.
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
        """Our end of a stream has ended, its last frame is written."""
        stream.is_local_closed = True
        if stream.is_remote_closed:
            self._remove(stream, ErrorCode.NO_ERROR)

    def reset(self, stream_id: int, code: int) -> None:
        """End a stream at once, and drop what waits on it; nothing happens if it is closed.

        Arguments:
            stream_id: of the stream.
            code: why.
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
        """Return whether we have reset a stream that is closed, or may have done so: then its frames are left alone."""
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
        """Free some of what waits, of a connection that is gone.

        Arguments:
            size_bytes: about how much.

        Returns:
            Whether something is left.
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
        """Say that no further stream is taken; those that are open go on.

        Arguments:
            code: why.
            debug_data: for people.
        """
        self._goes = True
        self._out.append(f.goaway_frame(code, debug_data, self._last_peer_stream()))

    def send_shutdown_notice(self) -> None:
        """Say that no further stream will be taken soon (section 6.8)."""
        self._out.append(f.goaway_frame(ErrorCode.NO_ERROR))

    def fail(self, code: int, debug_data: bytes) -> None:
        """End the connection (section 5.4.1): GOAWAY is the last that is sent, once, and nothing more is looked at.

        Arguments:
            code: why.
            debug_data: for people.
        """
        if not self.has_failed:
            self.send_goaway(code, debug_data)
            self.stop()

    def stop(self) -> None:
        """Look at nothing more that the peer sends, not even at what has come already."""
        self.has_failed = True

    def _acknowledge_frame(self, frame: bytes) -> None:
        self._acks += 1
        if self._acks > self._acks_max:
            raise ConnectionFailedError(ErrorCode.ENHANCE_YOUR_CALM, "too many acknowledgements wait to be read")
        self._out.append(frame)

    # ---- octets out

    def take(self, amount: int) -> bytes:
        """Return what is to be sent.

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
        """Write the header blocks and the empty ends that wait: no window holds them back (section 6.9)."""
        heads = self._waiting_heads
        while heads and self._out_bytes < amount:
            stream = heads.pop(next(iter(heads)))
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
        """Make frames of bodies that wait, a frame of each stream in turn."""
        waiting = self._waiting
        while waiting and self._out_bytes < amount:
            stream_id = next(iter(waiting))
            stream = waiting.pop(stream_id)
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
        """All of the body that waited is written."""
        stream.outbox = None
        if outbox.trailers is not None:
            self._write(f.header_frames(stream.stream_id, self._encoder.encode(outbox.trailers), end_stream=True))
        if outbox.ends:
            self._end_local(stream)

    def _open_window(self, stream: Stream, increment: int) -> bool:
        """Obey a WINDOW_UPDATE of a stream; returns whether its window is not above the maximum (section 6.9.1)."""
        stream.send_extra += increment
        self._extra_max = max(self._extra_max, stream.send_extra)
        if self._stuck.pop(stream.stream_id, None) is not None:
            self._waiting[stream.stream_id] = stream
        return self._peer_window + stream.send_extra <= f.MAX_WINDOW_BYTES

    def _move_windows(self, window_bytes: int) -> bool:
        """Obey SETTINGS_INITIAL_WINDOW_SIZE; returns whether no window is above the maximum (section 6.9.2)."""
        if window_bytes > self._peer_window:
            self._waiting.update(self._stuck)
            self._stuck.clear()
        self._peer_window = window_bytes
        if window_bytes + self._extra_max > f.MAX_WINDOW_BYTES:  # the stream that had so much may be gone
            self._extra_max = max((stream.send_extra for stream in self._streams.values()), default=0)
        return window_bytes + self._extra_max <= f.MAX_WINDOW_BYTES
