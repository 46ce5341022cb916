"""Where the kernel does not tell what a peer has taken, our own buffer does."""

from __future__ import annotations

import asyncio

import pytest

from raftkv.rpc.protocol import StallGuard
from tests.rpc.clock import Clock, on_clock


class Transport(asyncio.Transport):
    """One without a socket."""

    buffered = 1000

    def get_write_buffer_size(self) -> int:
        return self.buffered


@pytest.mark.parametrize(("step", "lives"), [(1, True), (0, False)])
@on_clock
async def test_progress_is_what_leaves_the_buffer(clock: Clock, step: int, lives: bool) -> None:
    cut: list[bool] = []
    transport = Transport()
    guard = StallGuard(asyncio.get_running_loop(), 60.0)
    guard.arm(transport, lambda: cut.append(True))
    for _ in range(10):
        transport.buffered -= step
        await clock.pass_s(15.0)
    assert (cut == []) == lives
    guard.disarm()


@on_clock
async def test_a_disarmed_guard_cuts_no_connection(clock: Clock) -> None:
    cut: list[bool] = []
    guard, transport = StallGuard(asyncio.get_running_loop(), 60.0), Transport()
    guard.arm(transport, lambda: cut.append(True))
    guard.disarm()
    await clock.pass_s(100.0)
    guard.arm(transport, lambda: cut.append(True))
    await clock.pass_s(59.0)
    assert cut == []
    guard.disarm()
