"""What one peer can make a connection do and keep: steps for each octet, and octets of memory, for any input.

Steps are lines of Python that ran, so that a busy machine changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.fuzz.memory import measured
from tests.rpc.http2.ends import HAS_PRIORITY, PRIORITY, REQUEST, TRAILERS, ServerEnd, ending, headers
from tests.rpc.raw import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    header_block,
    reset,
    settings,
)

BLOCK = header_block(REQUEST)
MANY = 1000
OPEN = b"".join(headers(stream_id) for stream_id in range(1, 2 * MANY, 2))
NEXT = range(2 * MANY + 1, 2 * MANY + 81, 2)


def _block(stream_id: int, rest: bytes) -> bytes:
    return frame(HEADERS, END_HEADERS, stream_id, BLOCK + rest)


ATTACKS: dict[str, tuple[float, bytes]] = {
    # The most steps for an octet, and what is sent to a connection with many open streams.
    "windows of all streams": (3, b"".join(settings((4, 65_535 + n % 2)) for n in range(200))),
    "so, many times a frame": (3, b"".join(settings(*[(4, n) for n in range(32)]) for _ in range(20))),
    "windows to the maximum": (
        25,
        b"".join(
            frame(WINDOW_UPDATE, 0, 2 * n + 1, b"\x7f\0\0\0") + reset(2 * n + 1) + settings((4, 2**31 - 1), (4, 7))
            for n in range(100)
        ),
    ),
    "frames of an unknown kind": (3, frame(0x77, 0, 0) * 300),
    "PINGs": (3, frame(PING, 0, 0, bytes(8)) * 300),
    "DATA of one octet": (5, frame(DATA, 0, 1, b"x") * 300),
    "DATA of padding": (5, frame(DATA, 8, 1, b"\1\0") * 300),
    "DATA of closed streams": (5, reset(1) + frame(DATA, 0, 1, b"x") * 300),
    "RST_STREAM": (3, b"".join(reset(2 * n + 1) for n in range(300))),
    "priorities": (3, b"".join(frame(PRIORITY, 0, 2 * n + 1, bytes(5)) for n in range(300))),
    "trailers that are none": (6, b"".join(headers(stream_id, REQUEST) for stream_id in range(1, 401, 2))),
    "a field again and again": (
        12,
        b"".join(_block(n, b"\0\1x\1y" * 120 + b"\0\1z\2%d" % (n % 90 + 10)) for n in NEXT),
    ),
    "sizes of the table": (25, b"".join(frame(HEADERS, END_HEADERS, n, b"\x20" * 900 + BLOCK) for n in NEXT)),
    "new entries": (20, b"".join(_block(n, b"\x40\0\0" * 120) for n in NEXT)),
    "the last entry": (20, _block(NEXT[0], b"\x40\1x\1y" * 110) + b"".join(_block(n, b"\xea" * 120) for n in NEXT[1:])),
    "a long string in Huffman code": (30, _block(NEXT[0], b"\0\1x" + b"\xff\x81\x3e" + b"\x1c" * 8064)),
    "a block in pieces": (9, b"".join(frame(HEADERS, 0, n, BLOCK) + frame(CONTINUATION, 4, n) for n in NEXT)),
    "the same block": (8, b"".join(frame(HEADERS, END_HEADERS | HAS_PRIORITY, n, bytes(5) + BLOCK) for n in NEXT)),
}


def _steps(work: Callable[[], Any]) -> int:
    count = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", ATTACKS)
def test_steps_for_an_octet(name: str) -> None:
    most, octets = ATTACKS[name]
    end = ServerEnd()
    end.feed(OPEN)
    steps = _steps(lambda: end.connection.receive(octets))
    assert steps <= most * len(octets) + 100, steps / max(1, len(octets))


def test_a_frame_that_comes_octet_by_octet() -> None:
    """A frame is put together again with each octet: what is copied is bounded by the largest frame."""
    end = ServerEnd()
    octets = frame(0x77, 0, 0, bytes(16_384)) * 3
    for at in range(len(octets)):
        end.connection.receive(octets[at : at + 1])
        assert end.connection.unread_bytes <= 9 + 16_384
    assert end.connection.unread_bytes == 0


def test_a_header_block_that_has_not_ended_is_counted() -> None:
    """What its frames have brought lies here until the last one comes."""
    end = ServerEnd()
    end.feed(OPEN)
    end.connection.receive(frame(HEADERS, 0, 1, bytes(1000)))
    assert end.connection.unread_bytes == 1000
    end.connection.receive(frame(CONTINUATION, 0, 1, bytes(500)) + b"\0\0")
    assert end.connection.unread_bytes == 1502
    end.connection.stop()
    assert end.connection.unread_bytes == 0


def test_a_body_that_waits_leaves_in_steps_of_its_size() -> None:
    """Many streams with something to say and no window cost nothing while others speak."""
    end = ServerEnd()
    end.feed(settings((4, 0)) + b"".join(ending(stream_id) for stream_id in range(1, 2 * MANY + 1, 2)))
    for stream_id in range(1, 2 * MANY + 1, 2):
        end.connection.send_headers(stream_id, TRAILERS)
        end.connection.send_data(stream_id, bytes(1000), end_stream=True)
    end.flush()
    end.feed(frame(WINDOW_UPDATE, 0, 0, b"\0\xff\0\0"))
    end.forget()

    def work() -> None:
        for stream_id in range(1, 201, 2):
            end.feed(frame(WINDOW_UPDATE, 0, stream_id, b"\0\0\x03\xe8"))

    assert _steps(work) < 100 * 150
    assert end.connection.queued_body_size() == 1000 * (MANY - 100)


def _kept(octets: list[bytes]) -> int:
    """Octets of memory that a connection has after these, its events forgotten."""

    def work() -> ServerEnd:
        end = ServerEnd()
        for piece in octets:
            end.connection.receive(piece)
            end.octets()
            end.forget()
        return end

    return measured(work).kept_bytes


def _reset(stream_id: int, rest: bytes) -> bytes:
    return _block(stream_id, rest) + reset(stream_id)


KEPT: dict[str, tuple[int, list[bytes]]] = {
    "nothing": (20_000, []),
    "unknown settings": (20_000, [settings(*[(32 * n + one, 7) for one in range(10, 42)]) for n in range(1000)]),
    "blocks of many fields": (160_000, [_reset(n, b"\x0f\x00\0" * 100 + b"\0\1z\4%04d" % n) for n in range(1, 121, 2)]),
    "blocks of some fields": (256_000, [_reset(n, b"\0\2xx\0" * 24 + b"\0\1z\4%04d" % n) for n in range(1, 121, 2)]),
    "long blocks": (60_000, [_reset(n, header_block(((b"x", b"%04d" % n * 3000),))) for n in range(1, 201, 2)]),
    "entries of the table": (60_000, [_reset(n, b"\x40\0\2%02d" % (n % 100) * 100) for n in range(1, 201, 2)]),
    "streams that were reset": (60_000, [headers(n, TRAILERS) for n in range(1, 6_001, 2)]),
    "half a frame": (40_000, [frame(0x77, 0, 0, bytes(16_384))[:-1]]),
    "half a block": (60_000, [frame(HEADERS, 0, 1, bytes(16_000)) + frame(CONTINUATION, 0, 1, bytes(16_000))]),
    "streams": (700_000, [headers(n) for n in range(1, 4001, 2)]),
}


@pytest.mark.parametrize("name", KEPT)
def test_memory_kept(name: str) -> None:
    most, octets = KEPT[name]
    assert _kept(octets) <= most


def test_unread_answers_are_bounded() -> None:
    """PING and SETTINGS are answered so many times without being read; then the connection ends."""
    for octets in (frame(PING, 0, 0, bytes(8)), frame(SETTINGS, 0, 0)):
        end = ServerEnd()
        end.connection.receive(octets * 1000)
        assert not end.connection.has_failed
        end.connection.receive(octets)
        assert end.connection.has_failed
        assert len(end.octets()) < 1000 * 17 + 100


def test_stream_errors_answer_with_less_than_they_cost() -> None:
    """What is sent for malformed requests, DATA of no stream and RST_STREAM is shorter than what was received."""
    for one in (headers(1, TRAILERS), frame(DATA, 0, 1, b""), reset(1)):
        end = ServerEnd()
        end.feed(headers(1))
        end.forget()
        octets = one * 500
        end.connection.receive(octets)
        assert len(end.octets()) <= len(octets) + 50
        assert all(kind == RST_STREAM for kind, *_ in end.said)
