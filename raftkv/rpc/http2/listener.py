"""Whom a connection calls, what it allows its peer, and what it remembers of a header block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from raftkv.rpc.http2.errors import ConnectionFailedError
from raftkv.rpc.http2.hpack import Headers


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
