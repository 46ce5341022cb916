"""Frames about streams and the connection (RFC 9113 sections 6.3 to 6.9): what they change, and how they are answered.

Each has a rule about its stream and one about its size. The listener counts those that cost the peer little and us
something: ``on_reset`` (CVE-2023-44487, CVE-2025-8671), ``on_settings`` (CVE-2019-9515),
``on_ping`` (CVE-2019-9512), ``on_window_update`` (CVE-2019-9517), ``on_priority`` and ``on_oddity`` (CVE-2019-9513).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, Protocol

from raftkv.rpc.http2 import frames as f
from raftkv.rpc.http2.errors import ConnectionFailedError, ErrorCode, StreamFailedError
from raftkv.rpc.http2.hpack import Headers
from raftkv.rpc.http2.sending import Sender

_uint32: Final = Struct(">I").unpack_from
_entries: Final = Struct(">HI").iter_unpack

# -- listener -------------------------------------------------------------------------------------------------------
#
# Whom a connection calls, what it allows its peer, and what it remembers of a header block.


class Listener(Protocol):
    """Whom a connection calls. It may send from within each of these."""

    def on_data(self, stream_id: int, data: bytes, end_stream: bool) -> None:
        """Octets of a body have come."""

    def on_stray_data(self, size_bytes: int, end_stream: bool) -> None:
        """Octets have come for a stream that is closed."""

    def on_closed(self, stream_id: int, code: int) -> None:
        """A stream is closed: both ends have ended it (code 0), or one has reset it."""

    def on_settings(self) -> None:
        """The peer has sent settings."""

    def on_window_update(self) -> None:
        """The peer has opened a window."""

    def on_priority(self) -> None:
        """The peer has said which stream is dearer to it (RFC 9218 section 7.1)."""

    def on_ping(self) -> None:
        """The peer has sent a ping, which is answered already."""

    def on_pong(self, opaque: bytes) -> None:
        """A ping of ours has come back."""

    def on_reset(self, stream_id: int) -> None:
        """The peer has reset a stream, or has made us reset one."""

    def on_oddity(self) -> None:
        """A frame has come that is allowed and of no use: one of many is an attack."""

    def on_goaway(self, last_stream_id: int, code: int, debug_data: bytes) -> None:
        """The peer takes no more streams."""

    def on_failed(self, error: ConnectionFailedError) -> None:
        """The peer has broken a rule: the connection ends, and a GOAWAY that says so waits to be sent."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a connection allows its peer.

    Attributes:
        stream_window_bytes: body octets that a stream may send ahead.
        connection_window_bytes: the same for the whole connection.
        header_list_bytes: of the fields of a block (section 6.5.2, SETTINGS_MAX_HEADER_LIST_SIZE).
        header_count: fields of a block.
        continuations: frames of a block after its first (CVE-2024-27316).
        settings_entries: of one SETTINGS frame (CVE-2020-11080).
        outbound_acks: answers to PING and SETTINGS that wait to be sent (CVE-2019-9512).
    """

    stream_window_bytes: int
    connection_window_bytes: int
    header_list_bytes: int
    header_count: int = 1024
    continuations: int = 8
    settings_entries: int = 32
    outbound_acks: int = 1000


class Block:
    """What a header block means.

    Attributes:
        fields: of it.
        is_sound: all have octets that a header may have.
        opening: what the listener has made of it, once it was asked.
    """

    __slots__ = ("fields", "is_sound", "opening")

    def __init__(self, fields: Headers, is_sound: bool) -> None:
        self.fields = fields
        self.is_sound = is_sound
        self.opening: Any = None


class Controlled(Sender):
    """The sending half, which obeys its peer's control frames.

    Attributes:
        peer_settings: by number, what the peer has said.
    """

    def __init__(self, listener: Any, limits: Limits, indexed: frozenset[bytes]) -> None:
        super().__init__(listener, indexed, limits.outbound_acks)
        self._settings_max = limits.settings_entries
        self._settings_sent = 0
        self._is_settled = False
        self.peer_settings: dict[int, int] = {}

    @abstractmethod
    def _is_idle(self, stream_id: int) -> bool:
        """Return whether a stream was never opened (section 5.1)."""

    def _say_settings(self, settings: dict[int, int]) -> None:
        self._settings_sent += 1
        self._out.append(f.settings_frame(settings))

    # ---- frames

    def _control_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Take a frame that carries neither a body nor a header."""
        if not self._is_settled and (kind != f.SETTINGS or flags & f.ACK):
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")  # section 3.4
        take = _FRAMES.get(kind)
        if take is None:
            self._listener.on_oddity()  # section 5.5: an unknown kind is ignored
        else:
            take(self, flags, stream_id, payload)

    def _priority_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Section 6.3: taken, and left alone."""
        del flags
        if not stream_id:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "PRIORITY of stream 0")
        self._listener.on_oddity()
        if len(payload) != f.PRIORITY_BYTES:
            if self._is_idle(stream_id):  # which takes no RST_STREAM (section 6.4)
                raise ConnectionFailedError(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY is not of 5 octets")
            raise StreamFailedError(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY is not of 5 octets")

    def _reset_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Section 6.4."""
        del flags
        if len(payload) != 4:
            raise ConnectionFailedError(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM is not of 4 octets")
        if not stream_id or self._is_idle(stream_id):
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "RST_STREAM of a stream that was never open")
        self._listener.on_reset(stream_id)
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._remove(stream, _uint32(payload)[0])

    def _settings_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Section 6.5."""
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
        """Section 6.5.2."""
        if key == f.INITIAL_WINDOW_SIZE:
            if value > f.MAX_WINDOW_BYTES or not self._move_windows(value):
                raise ConnectionFailedError(ErrorCode.FLOW_CONTROL_ERROR, "a window of 2^31 octets or more")
        elif key == f.HEADER_TABLE_SIZE:
            self._encoder.limit(value)
        elif key == f.ENABLE_PUSH:
            self._check_push(value)
        elif key == f.MAX_FRAME_SIZE and not f.MAX_FRAME_BYTES <= value < 2**24:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, f"a maximum frame size of {value}")
        if key <= f.MAX_HEADER_LIST_SIZE:  # others are left alone, and not kept
            self.peer_settings[key] = value

    def _check_push(self, value: int) -> None:
        if value > 1:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}")

    def _push_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Sections 6.6 and 8.4: a client pushes nothing, and we have told servers not to."""
        del flags, stream_id, payload
        raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE")

    def _ping_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Section 6.7."""
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
        """Section 6.8."""
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
        """Section 6.9."""
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
        """Section 6.10: it follows HEADERS only."""
        del flags, stream_id, payload
        raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")

    def _update_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        """RFC 9218 section 7.1: a priority, which is left alone."""
        del flags, payload
        if stream_id:
            raise ConnectionFailedError(ErrorCode.PROTOCOL_ERROR, "PRIORITY_UPDATE of a stream")
        self._listener.on_priority()


_FRAMES: Final[dict[int, Callable[[Controlled, int, int, bytes], None]]] = {
    f.PRIORITY: Controlled._priority_frame,
    f.RST_STREAM: Controlled._reset_frame,
    f.SETTINGS: Controlled._settings_frame,
    f.PUSH_PROMISE: Controlled._push_frame,
    f.PING: Controlled._ping_frame,
    f.GOAWAY: Controlled._goaway_frame,
    f.WINDOW_UPDATE: Controlled._window_frame,
    f.CONTINUATION: Controlled._stray_continuation,
    f.PRIORITY_UPDATE: Controlled._update_frame,
}
