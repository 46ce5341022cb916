"""What thousands of open calls on one connection cost: one frame moves the windows of all."""

from __future__ import annotations

import asyncio

import pytest

from raftkv.loop.timers import DeadlineWheel
from raftkv.rpc import Server, ServerLimits
from raftkv.rpc.framing import frame
from raftkv.rpc.server.calls import Environment, Peer
from raftkv.rpc.server.core import ServerCore
from tests.rpc import raw

WINDOW = 4
TAKEN_BYTES = 1 << 20


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
