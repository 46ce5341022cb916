"""What thousands of open calls on one connection cost: their windows move by one frame, and their answers wait."""

from __future__ import annotations

import asyncio
import time

import pytest

from raftkv.loop.timers import DeadlineWheel
from raftkv.rpc import Server, ServerLimits
from raftkv.rpc.framing import frame
from raftkv.rpc.http2 import OK_TRAILERS, RESPONSE_HEADERS
from raftkv.rpc.http2.connection import ServerConnection
from raftkv.rpc.server.calls import Environment, Peer
from raftkv.rpc.server.core import ServerCore
from tests.rpc import raw
from tests.rpc.attacks.test_engine_limits import Heard, requests

WINDOW = 4
TAKEN_BYTES = 1 << 20


def stuck(count: int) -> ServerConnection:
    """Return the server end of a connection with ``count`` answers that wait for the client's windows."""
    engine = ServerConnection(Heard(), ServerLimits(max_concurrent_streams=count))
    engine.receive(raw.PREFACE + raw.settings((WINDOW, 0)) + raw.frame(raw.SETTINGS, raw.ACK, 0))
    engine.receive(requests(1, count))
    for stream_id in range(1, 2 * count, 2):
        engine.send_headers(stream_id, RESPONSE_HEADERS)
        engine.send_data(stream_id, bytes(1_000))
        engine.send_headers(stream_id, OK_TRAILERS, end_stream=True)
    while engine.take(TAKEN_BYTES):
        pass
    return engine


def opened_s(count: int) -> float:
    """Seconds of the processor for one more byte of each of ``count`` answers."""
    engine = stuck(count)
    taken = []
    for window_bytes in range(1, 4):
        engine.receive(raw.settings((WINDOW, window_bytes)))
        began_s = time.process_time()
        octets = engine.take(TAKEN_BYTES)
        taken.append(time.process_time() - began_s)
        assert len(octets) >= 10 * count
    return min(taken)


def test_moving_windows_takes_time_in_proportion_to_the_answers_that_wait() -> None:
    """Taking from the front of a dict passes over all entries that were there: 10,000 answers took 72 ms."""
    assert opened_s(16_000) < 20 * opened_s(2_000)


def test_settings_count_for_the_answers_whose_windows_they_open() -> None:
    """15 bytes made a member look at each of thousands of waiting answers, 100 times a second."""
    server = Server()
    server.unary("/test.Echo/Hang", lambda call, message: call.reply(bytes(1_000)))
    environment = Environment(
        clock=lambda: 0.0,
        wheel=DeadlineWheel(lambda when: None),
        spawn=asyncio.ensure_future,
        report=lambda path, error: pytest.fail(f"{path}: {error}"),
        translate=lambda error: None,
        answers=server.answers,
    )
    core = ServerCore(server.router, ServerLimits(), environment, Peer(identity="address 127.0.0.1"))
    core.receive(raw.PREFACE + raw.settings((WINDOW, 0)) + raw.frame(raw.SETTINGS, raw.ACK, 0))
    for stream_id in range(1, 4_000, 2):
        core.receive(raw.headers(stream_id) + raw.message(stream_id, frame(b""), raw.END_STREAM))
        core.pull(TAKEN_BYTES)

    def move(times: int) -> int:
        for number in range(times):
            core.receive(raw.settings((WINDOW, number % 2)))
            core.pull(TAKEN_BYTES)
            if core.closing:
                return number
        return times

    assert move(20) == 20, "a client that measures its bandwidth moves them a few times"
    assert move(200) < 120
