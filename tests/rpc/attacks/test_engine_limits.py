"""What a peer can make the HTTP/2 engine keep or do, on the engine alone: no socket, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from raftkv.rpc import ChannelOptions, ServerLimits
from raftkv.rpc.http2 import OK_TRAILERS, RESPONSE_HEADERS, ClientConnection, ServerConnection
from raftkv.rpc.http2.connection import BLOCKS_MAX, DIRECT_BYTES, SHAPE_BYTES_MAX, SHAPES_MAX
from tests.rpc import raw

OPENED = raw.PREFACE + raw.settings() + raw.frame(raw.SETTINGS, raw.ACK, 0)
PRIORITY_UPDATE = 16
REFUSED = (*RESPONSE_HEADERS, (b"grpc-status", b"12"), (b"grpc-message", b"x" * 200))


class Heard:
    """Notes what an engine says."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.prepared: list[object] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))

    def prepare(self, fields: object) -> object:
        self.prepared.append(fields)
        return fields

    def requests(self) -> list[int]:
        return [call[1] for call in self.calls if call[0] == "on_request"]

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


def served(limits: ServerLimits | None = None) -> tuple[ServerConnection, Heard]:
    heard = Heard()
    engine = ServerConnection(heard, limits or ServerLimits())
    engine.receive(OPENED)
    engine.take(1 << 20)
    heard.calls.clear()
    return engine, heard


def requests(first: int, count: int) -> bytes:
    return b"".join(
        raw.headers(one, flags=raw.END_HEADERS | raw.END_STREAM) for one in range(first, first + 2 * count, 2)
    )


def kinds(octets: bytes) -> list[int]:
    return [kind for kind, _ in frames_of(octets)]


def frames_of(octets: bytes) -> list[tuple[int, int]]:
    """Kind and stream of each frame."""
    found = []
    while octets:
        found.append((octets[3], int.from_bytes(octets[5:9], "big")))
        octets = octets[9 + int.from_bytes(octets[:3], "big") :]
    return found


def test_answers_of_a_client_that_does_not_read_wait_on_streams_that_count() -> None:
    """Else a client that is not read any more could have refusals made without end."""
    engine, heard = served(ServerLimits(max_concurrent_streams=100))
    engine.is_blocked = True
    for first in range(1, 20_001, 200):
        engine.receive(requests(first, 100))
        for stream_id in heard.requests():
            engine.send_headers(stream_id, REFUSED, end_stream=True)
        heard.calls.clear()
    assert len(engine._streams) == 100
    assert sum(map(len, engine._out)) < 20_000 * 13
    engine.is_blocked = False
    octets = engine.take(1 << 20)
    assert kinds(octets).count(raw.HEADERS) == 100
    assert not engine._streams


def test_frames_that_are_made_ahead_of_the_socket_are_bounded() -> None:
    engine, heard = served()
    engine.receive(raw.frame(raw.WINDOW_UPDATE, 0, 0, (2**30).to_bytes(4, "big")) + requests(1, 1_000))
    for stream_id in heard.requests():
        if not engine.answer(stream_id, bytes(1_000)):
            engine.answer_later(stream_id, (bytes(1_000),))
    assert sum(map(len, engine._out)) < DIRECT_BYTES + 1_100
    octets = b""
    while piece := engine.take(100_000):
        octets += piece
    assert kinds(octets).count(raw.DATA) == 1_000
    assert kinds(octets).count(raw.HEADERS) == 2_000
    assert not engine._streams


def test_a_header_that_waits_leaves_though_no_window_is_open() -> None:
    engine, heard = served()
    engine.receive(requests(1, 3))
    engine.send_headers(1, RESPONSE_HEADERS)
    engine.send_data(1, bytes(100_000))
    engine.take(1 << 20)
    assert engine.send_window == 0
    engine.is_blocked = True
    engine.send_headers(3, REFUSED, end_stream=True)
    engine.send_headers(5, RESPONSE_HEADERS)
    engine.send_headers(5, OK_TRAILERS, end_stream=True)
    assert engine.want_write
    engine.is_blocked = False
    octets = engine.take(1 << 20)
    assert frames_of(octets) == [(raw.HEADERS, 3), (raw.HEADERS, 5), (raw.HEADERS, 5)]
    assert [name for name in heard.names() if name == "on_closed"] == ["on_closed"] * 2


def test_nothing_is_looked_at_after_the_end() -> None:
    """The rest of 256 KiB that an attacker has sent would be work without use."""
    engine, heard = served()
    heard.on_ping = lambda: engine.fail(11, b"too_many_pings")
    engine.receive(raw.frame(raw.PING, 0, 0, bytes(8)) + requests(1, 5))
    engine.receive(requests(11, 5))
    assert "on_request" not in heard.names()
    assert kinds(engine.take(1 << 20)) == [raw.PING, raw.GOAWAY]


@pytest.mark.parametrize(
    ("octets", "told"),
    [
        (raw.frame(PRIORITY_UPDATE, 0, 0, bytes(8)), "on_priority"),
        (raw.frame(raw.PING, raw.ACK, 0, bytes(8)), "on_oddity"),
        (raw.frame(200, 0, 0, b"?"), "on_oddity"),
        (raw.frame(raw.WINDOW_UPDATE, 0, 1, bytes(4)), "on_reset"),
        (raw.message(1, b"x"), "on_stray_data"),
    ],
)
def test_frames_of_no_use_are_counted(octets: bytes, told: str) -> None:
    """The fourth makes us reset a call that has begun (CVE-2025-8671)."""
    engine, heard = served()
    engine.receive(requests(1, 1))
    heard.calls.clear()
    if told == "on_stray_data":
        engine.answer(1, b"")
    engine.receive(octets * 3)
    assert told in heard.names()


def test_an_acknowledgement_of_settings_is_taken_once() -> None:
    engine, _ = served()
    engine.receive(raw.frame(raw.SETTINGS, raw.ACK, 0))
    assert engine.has_failed


def test_blocks_are_remembered_to_a_limit() -> None:
    """Short ones only, and the newest: a client whose timeouts vary does not keep others from being remembered."""
    engine, _ = served()
    for number in range(5 * BLOCKS_MAX):
        fields = (*raw.grpc_headers("/a/b"), (b"grpc-timeout", b"%dm" % number))
        engine.receive(
            raw.frame(raw.HEADERS, raw.END_HEADERS | raw.END_STREAM, 2 * number + 1, raw.header_block(fields))
        )
        engine.answer(2 * number + 1, b"")
    assert 0 < len(engine._known) <= BLOCKS_MAX
    known = len(engine._known)
    long = (*raw.grpc_headers("/a/b"), (b"x", b"y" * 2000))
    engine.receive(raw.frame(raw.HEADERS, raw.END_HEADERS | raw.END_STREAM, 10_001, raw.header_block(long)))
    assert len(engine._known) == known


def test_answers_to_thousands_of_cancelled_calls_do_not_end_a_clients_connection() -> None:
    heard = Heard()
    engine = ClientConnection(heard, ChannelOptions())
    engine.receive(raw.settings())
    ids = [engine.send_request(raw.grpc_headers("/a/b")) for _ in range(10_000)]
    for one in ids:
        engine.reset(one, 8)
    head = raw.header_block(RESPONSE_HEADERS)
    engine.receive(
        b"".join(raw.frame(raw.HEADERS, raw.END_HEADERS, one, head) + raw.message(one, b"late") for one in ids)
    )
    assert not engine.has_failed


def test_requests_that_differ_by_their_timeout_are_looked_at_once() -> None:
    """And what is remembered of them is bounded, for any fields."""
    engine, heard = served()
    one = -1

    def ask(*extra: tuple[bytes, bytes], at: int = 6) -> None:
        nonlocal one
        one += 2
        fields = raw.grpc_headers("/a/b")
        block = raw.header_block((*fields[:at], *extra, *fields[at:]))
        engine.receive(raw.frame(raw.HEADERS, raw.END_HEADERS | raw.END_STREAM, one, block))
        engine.answer(one, b"")

    for number in range(100):
        ask((b"grpc-timeout", b"%dm" % number))
    assert len(heard.prepared) == 1
    timeouts_ms = [round(call[2].timeout_s * 1e3) for call in heard.calls if call[0] == "on_request"]
    assert timeouts_ms == list(range(100))
    ask((b"grpc-timeout", b"1m"), at=1)
    assert heard.names()[-1] == "on_oddity", "a timeout among pseudo-header fields is malformed, as ever"
    for number in range(100):
        ask((b"x", b"%d" % number), (b"y", b"z" * (number * 100)), (b"grpc-timeout", b"1m"))
    assert len(engine._shapes) <= SHAPES_MAX
    assert all(sum(len(n) + len(v) for n, v in fields) <= SHAPE_BYTES_MAX for _, fields in engine._shapes)
