"""Both ends of a connection without sockets: octets go in, and what the engine makes of them is written down.

end = ServerEnd()
end.feed(headers(1, REQUEST) + frame(PING, 0, 0, b"12345678"))
end.verdict                      # "taken", "stream 1 PROTOCOL_ERROR" or "connection PROTOCOL_ERROR"
end.events                       # [("request", 1, REQUEST, False), ("ping",)]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raftkv.rpc.http2 import (
    PREFACE,
    ClientConnection,
    Connection,
    ConnectionFailedError,
    ErrorCode,
    Headers,
    Request,
    ServerConnection,
)
from raftkv.rpc.limits import ChannelOptions, ServerLimits
from tests.rpc.raw import ACK, END_HEADERS, END_STREAM, GOAWAY, HEADERS, RST_STREAM, SETTINGS, frame, header_block

PRIORITY, PUSH_PROMISE = 2, 5
PADDED, HAS_PRIORITY = 8, 32

REQUEST: Headers = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/s/m"),
    (b":authority", b"x"),
    (b"te", b"trailers"),
)
RESPONSE: Headers = ((b":status", b"200"), (b"content-type", b"application/grpc"))
TRAILERS: Headers = ((b"grpc-status", b"0"),)
SETTLED = frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0)

Frame = tuple[int, int, int, bytes]
"""Kind, flags, stream, payload."""


def headers(stream_id: int, fields: Headers = REQUEST, flags: int = 0) -> bytes:
    """Return a whole header block; ``flags`` are added to END_HEADERS."""
    return frame(HEADERS, END_HEADERS | flags, stream_id, header_block(fields))


def ending(stream_id: int, fields: Headers = REQUEST) -> bytes:
    """Return a whole header block that ends its stream."""
    return headers(stream_id, fields, END_STREAM)


def frames_of(octets: bytes) -> list[Frame]:
    """Cut what was sent into frames."""
    found, at = [], 0
    while at < len(octets):
        size = int.from_bytes(octets[at : at + 3], "big")
        stream_id = int.from_bytes(octets[at + 5 : at + 9], "big")
        found.append((octets[at + 3], octets[at + 4], stream_id, octets[at + 9 : at + 9 + size]))
        at += 9 + size
    assert at == len(octets), "half a frame"
    return found


class Recorder:
    """Writes down what it is called for; a test may have it do something then.

    Attributes:
        then: by event, what is done when it comes.
        keeps: octets of bodies are not given back.
    """

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.then: dict[str, Callable[[int], None]] = {}
        self.keeps = False
        self.connection: Connection
        self.oddities = self.resets = 0

    def _note(self, *event: Any) -> None:
        self.events.append(event)
        if event[0] in self.then:
            self.then[event[0]](event[1])

    def prepare(self, fields: Headers) -> Headers:
        return fields

    def on_request(self, stream_id: int, request: Request, end_stream: bool) -> None:
        self._note("request", stream_id, request.fields, end_stream)

    def on_response(self, stream_id: int, fields: Headers, end_stream: bool) -> None:
        self._note("response", stream_id, fields, end_stream)

    def on_trailers(self, stream_id: int, fields: Headers) -> None:
        self._note("trailers", stream_id, fields)

    def on_data(self, stream_id: int, data: bytes, end_stream: bool) -> None:
        self._note("data", stream_id, data, end_stream)
        if not self.keeps:
            self.connection.acknowledge(len(data), stream_id)

    def on_closed(self, stream_id: int, code: int) -> None:
        self._note("closed", stream_id, code)

    def on_settings(self) -> None:
        self.events.append(("settings",))

    def on_window_update(self) -> None:
        self.events.append(("window",))

    def on_ping(self) -> None:
        self.events.append(("ping",))

    def on_pong(self, opaque: bytes) -> None:
        self.events.append(("pong", opaque))

    def on_reset(self, stream_id: int) -> None:
        del stream_id
        self.resets += 1

    def on_stray_reset(self) -> None:
        self.resets += 1

    def on_stray_data(self, size_bytes: int, end_stream: bool) -> None:
        del size_bytes, end_stream
        self.oddities += 1

    def on_priority(self) -> None:
        self.oddities += 1

    def on_oddity(self) -> None:
        self.oddities += 1

    def on_goaway(self, last_stream_id: int, code: int, debug_data: bytes) -> None:
        self._note("goaway", last_stream_id, code, debug_data)

    def on_failed(self, error: ConnectionFailedError) -> None:
        self._note("failed", error.code)


@dataclass
class End:
    """One end, what it heard, and what it said since the last ``feed``."""

    connection: Any
    recorder: Recorder
    said: list[Frame]

    @property
    def events(self) -> list[tuple[Any, ...]]:
        return self.recorder.events

    def feed(self, octets: bytes, step: int = 0) -> None:
        """Hand octets over in pieces of ``step``; 0: all at once."""
        for start in range(0, len(octets), step or len(octets) or 1):
            self.connection.receive(octets[start : start + (step or len(octets))])
            self.said += self.flush()

    def flush(self) -> list[Frame]:
        """What is to be sent."""
        return frames_of(self.octets())

    def octets(self) -> bytes:
        pieces = []
        while piece := self.connection.take(65_536):
            pieces.append(piece)
        return b"".join(pieces)

    def forget(self) -> None:
        """What comes from here on is looked at alone."""
        self.events.clear()
        self.said.clear()

    @property
    def verdict(self) -> str:
        """How the peer's rules were broken, if they were."""
        found = []
        for kind, _, stream_id, payload in self.said:
            if kind == GOAWAY:
                found.append(f"connection {ErrorCode(int.from_bytes(payload[4:8], 'big')).name}")
            elif kind == RST_STREAM:
                found.append(f"stream {stream_id} {ErrorCode(int.from_bytes(payload, 'big')).name}")
        return ", ".join(found) or "taken"


class ServerEnd(End):
    """A server whose client has said its preface and settings."""

    def __init__(self, limits: ServerLimits | None = None, start: bytes = PREFACE + SETTLED) -> None:
        recorder = Recorder()
        recorder.connection = ServerConnection(recorder, limits or ServerLimits())
        super().__init__(recorder.connection, recorder, [])
        self.greeting = self.octets()
        if start:
            self.feed(start)
            self.forget()


class ClientEnd(End):
    """A client whose server has said its settings; it asks on streams 1 (whole) and 3 (goes on)."""

    def __init__(self, options: ChannelOptions | None = None, start: bytes = SETTLED) -> None:
        recorder = Recorder()
        recorder.connection = ClientConnection(recorder, options or ChannelOptions())
        super().__init__(recorder.connection, recorder, [])
        self.greeting = self.octets()
        if start:
            self.feed(start)
            for ends in (True, False):
                self.connection.send_data(self.connection.send_request(REQUEST), b"hello", end_stream=ends)
            self.flush()
            self.forget()


@dataclass(frozen=True)
class Row:
    """A rule, what breaks or keeps it, and what must be seen.

    Attributes:
        rule: section, and what it says.
        sent: by the peer.
        seen: the verdict.
        events: what the listener must hear beside it; None: nothing is asked.
    """

    rule: str
    sent: bytes
    seen: str
    events: tuple[tuple[Any, ...], ...] | None = None

    def __str__(self) -> str:
        return self.rule


def judge(row: Row, make: Callable[[], End]) -> None:
    """Play a row at once, in pieces of seven octets, and octet by octet."""
    told = []
    for step in (0, 7, 1):
        end = make()
        end.feed(row.sent, step)
        assert end.verdict == row.seen, row.rule
        if row.events is not None:
            assert [event for event in end.events if event[0] != "window"] == list(row.events), row.rule
        told.append((list(end.events), end.recorder.oddities, end.recorder.resets, end.said[:]))
        if end.connection.has_failed:
            _is_deaf(end)
        else:
            end.forget()
            end.feed(frame(6, 0, 0, b"12345678"))
            assert end.said == [(6, ACK, 0, b"12345678")], f"{row.rule}: the connection lives on"
    assert told[0] == told[1] == told[2], row.rule


def _is_deaf(end: End) -> None:
    """A connection that has failed says so once, and nothing after it."""
    assert [kind for kind, *_ in end.said].count(GOAWAY) == 1
    end.forget()
    end.feed(frame(6, 0, 0, b"12345678") + headers(101))
    assert not end.said
    assert not end.events
