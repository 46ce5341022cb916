"""One end of an HTTP/2 connection (RFC 9113), without a socket: octets in, calls to a listener, octets out.

    connection.receive(octets)           # calls the listener, in the order of the frames
    connection.send_headers(1, fields)
    connection.send_data(1, body, end_stream=True)
    octets = connection.take(65_536)     # to be sent, at most so many

Owned here: cutting octets into frames, header blocks, bodies and the windows of what is received. ``control`` has the
other frames, ``sending`` what leaves, ``server`` and ``client`` what differs between the ends.

Invariants:

- A rule that is broken ends the stream or the connection with the code of the section that states it (section 5.4);
  nothing that a peer sends raises out of ``receive``.
- Received octets are given back by hand (``acknowledge``), also those of streams that have closed meanwhile; those
  without a stream at once: the connection's window never shrinks for good (section 6.9).
- A header block goes through the decoder even if its stream is refused or closed (section 4.3).
- What a peer makes us keep: a frame, a block of twice the limit of header lists, ``BLOCKS_MAX`` short blocks, a table.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final

from raftkv.rpc.http2 import frames as f
from raftkv.rpc.http2.control import Block, Controlled, Limits
from raftkv.rpc.http2.errors import ConnectionFailedError, ErrorCode, StreamFailedError
from raftkv.rpc.http2.hpack import Decoder, malformed
from raftkv.rpc.http2.sending import Stream

BLOCKS_MAX: Final = 32
BLOCK_BYTES_MAX: Final = 512
BLOCK_FIELDS_MAX: Final = 32
"""Header blocks of a connection whose meaning is remembered, how long they may be, and how many fields may be in one:
an octet can name a field, which takes a hundred here."""

_head: Final = f.HEAD.unpack_from


class Connection(Controlled):
    """One end. See ``server`` and ``client`` for what differs.

    Arguments:
        listener: is called.
        limits: what the peer may do.
        settings: that the peer learns first.
        indexed: names of fields that are sent again and again.
    """

    def __init__(self, listener: Any, limits: Limits, settings: dict[int, int], indexed: frozenset[bytes]) -> None:
        super().__init__(listener, limits, indexed)
        self._decoder = Decoder(limits.header_list_bytes, limits.header_count)
        self._known: dict[bytes, Block] = {}
        self._awaited = b""
        self._rest = b""
        self.is_held = False
        """Set by the listener, which has taken its time: whole frames are left for ``go_on``."""
        self._block: list[bytes] | None = None
        self._block_end_stream = False
        self._block_stream_id = 0
        self._block_room = 0
        self._block_room_max = 2 * limits.header_list_bytes
        self._continuations_max = limits.continuations
        self._stream_credit = limits.stream_window_bytes
        self._window_bytes = limits.connection_window_bytes
        self._credit = limits.connection_window_bytes
        self._returned = 0
        self._say_settings(settings)
        if limits.connection_window_bytes > f.WINDOW_BYTES:
            self._out.append(f.window_update_frame(0, limits.connection_window_bytes - f.WINDOW_BYTES))

    @abstractmethod
    def _on_headers(self, stream_id: int, block: Block, end_stream: bool) -> None:
        """Take a whole header block."""

    # ---- octets in

    @property
    def unread_bytes(self) -> int:
        """Octets of a frame, and of a header block, that have not come whole."""
        if self._block is None:
            return len(self._rest)
        return len(self._rest) + self._block_room_max - self._block_room

    def receive(self, data: bytes) -> None:
        """Take octets as they came.

        Arguments:
            data: any piece of what the peer sends.
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
        """Look at what was left when the listener had taken its time."""
        self.is_held = False
        self.receive(b"")

    def stop(self) -> None:
        """Look at nothing more that the peer sends, not even at what has come already."""
        super().stop()
        self._block, self._rest = None, b""

    def _preface(self, data: bytes) -> int:
        """Skip the octets that a client begins with (section 3.4); returns where frames begin."""
        size = min(len(self._awaited), len(data))
        if self._awaited[:size] != data[:size]:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "no preface of HTTP/2")
        self._awaited = self._awaited[size:]
        return size

    def _frames(self, data: bytes, at: int) -> int:
        """Take all whole frames from a position on; returns where the rest begins."""
        end = len(data)
        while end - at >= f.HEAD_BYTES and not self.has_failed and not self.is_held:
            high, low, kind, flags, stream_id = _head(data, at)
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
            # Section 4.3: a block is one run of frames.
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
        """End one stream (section 5.4.2)."""
        if stream_id in self._streams:
            self._listener.on_reset(stream_id)  # as if the peer had: its call was begun for nothing (CVE-2025-8671)
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
        """DATA without an open stream: its octets are given back at once."""
        if not stream_id or self._is_idle(stream_id):
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "DATA of a stream that is not open")  # 6.1, 5.1
        self.acknowledge(size, 0)
        self._listener.on_stray_data(size, end_stream)
        if stream is not None and not stream.is_remote_closed:
            raise malformed("DATA before a header")  # section 8.1
        if not self._was_reset(stream_id):
            raise StreamFailedError(ErrorCode.STREAM_CLOSED, "DATA of a stream that is closed")

    def _expect(self, stream: Stream, length: int, end_stream: bool) -> None:
        """Section 8.1.1: the DATA of a message must be as long as its content-length says."""
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
        """The peer has ended a stream, and the listener knows: the stream is closed, if our end is."""
        if stream.is_local_closed and stream.outbox is None and self._streams.get(stream.stream_id) is stream:
            self._remove(stream, ErrorCode.NO_ERROR)

    def acknowledge(self, amount: int, stream_id: int) -> None:
        """Give octets that were taken back to the windows of the connection and of the stream.

        Arguments:
            amount: of octets.
            stream_id: where they came; it may be closed. 0: they count for the connection only.
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


def _unpadded(payload: bytes, flags: int, needed_bytes: int) -> bytes:
    """Sections 6.1 and 6.2: what is left without its padding, beginning with octets that must be there."""
    is_padded = flags & f.PADDED != 0
    size = len(payload) - is_padded - needed_bytes
    if size < 0:  # section 4.2
        raise ConnectionFailedError(ErrorCode.FRAME_SIZE_ERROR, "a frame ends before what its flags say")
    if not is_padded:
        return payload
    if payload[0] > size:
        raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "more padding than there are octets")
    return payload[1 : len(payload) - payload[0]]
