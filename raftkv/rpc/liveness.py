"""Whether the peer of a connection is alive, and whether it reads.

    guard = StallGuard(loop, timeout_s=60.0)
    guard.arm(transport, transport.abort)     # output waits for the socket: from now on bytes must pass
    guard.disarm()                            # no output waits, or the connection is lost

``StallGuard`` cuts a peer that takes no bytes, and leaves a slow reader alone. It counts the bytes that the peer's
kernel has acknowledged, and does not wait for an empty buffer of ours: ten megabytes at 100 kB/s take longer than any
timeout, and a kernel with a large buffer takes no bytes from us for a long time while its peer reads steadily. Where
the kernel does not tell (unix sockets, systems other than Linux), our buffer counts. There is no minimum speed: a peer
that takes one byte now and then holds a connection and one buffer, which are bounded.

``Keepalive`` pings an HTTP/2 peer after silence, and ends the connection when no byte comes. As in grpc-go, any byte
from the peer counts as a sign of life.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Final

from raftkv.loop.cycle_free import nothing

CHECKS: Final = 4
"""Looks within one timeout: a stalled peer is cut after the timeout, at most this share of it late."""

_BYTES_ACKED_AT: Final = 120
_BYTES_ACKED: Final = struct.Struct("=Q")


class StallGuard:
    """Cuts one connection whose peer takes no bytes while output waits.

    Arguments:
        loop: for its time and timers.
        timeout_s: how long a peer may take no bytes.
    """

    __slots__ = ("_cut", "_handle", "_loop", "_passed", "_since_s", "_timeout_s", "_transport")

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._timeout_s = timeout_s
        self._cut: Callable[[], None] | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._passed = 0
        self._since_s = 0.0

    def arm(self, transport: asyncio.Transport, cut: Callable[[], None]) -> None:
        """Call back once no byte has passed for the timeout. A guard that is armed already continues.

        Arguments:
            transport: whose progress is looked at.
            cut: ends the connection.
        """
        if self._handle is None:
            self._transport, self._cut = transport, cut
            self._passed = _passed_bytes(transport)
            self._since_s = self._loop.time()
            self._look_again()

    def disarm(self) -> None:
        """Stop watching, and drop the reference to the transport."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._transport = self._cut = None

    def _look_again(self) -> None:
        self._handle = self._loop.call_later(self._timeout_s / CHECKS, self._look)

    def _look(self) -> None:
        transport, cut, now_s = self._transport, self._cut, self._loop.time()
        if transport is None or cut is None:
            return
        passed = _passed_bytes(transport)
        if passed != self._passed:
            self._passed, self._since_s = passed, now_s
        if now_s - self._since_s < self._timeout_s:
            self._look_again()
            return
        self.disarm()
        cut()


def _passed_bytes(transport: asyncio.Transport) -> int:
    """Return a number that changes when the peer takes bytes."""
    connected = transport.get_extra_info("socket")
    try:
        # Linux: struct tcp_info, tcpi_bytes_acked.
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED_AT + _BYTES_ACKED.size)
        (acked,) = _BYTES_ACKED.unpack_from(info, _BYTES_ACKED_AT)
    except (OSError, AttributeError, struct.error):
        return transport.get_write_buffer_size()
    return int(acked)


KEEPALIVE_PING = b"keepaliv"


class Keepalive:
    """Pings one HTTP/2 connection when its peer is silent.

    Arguments:
        loop: for its time and timers.
        time_s: silence before a ping.
        timeout_s: silence after the ping before ``dead`` is called.
        last_read_s: returns the loop time of the last byte received.
        active: returns False while no ping should be sent.
        ping: sends a ping.
        dead: ends the connection.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        time_s: float,
        timeout_s: float,
        *,
        last_read_s: Callable[[], float],
        active: Callable[[], bool],
        ping: Callable[[], None],
        dead: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._time_s = time_s
        self._timeout_s = timeout_s
        self._last_read_s = last_read_s
        self._active = active
        self._ping = ping
        self._dead = dead
        self._pinged_s: float | None = None
        self._handle = loop.call_later(time_s, self._check)

    def _check(self) -> None:
        now, last_read_s = self._loop.time(), self._last_read_s()
        if self._pinged_s is not None and last_read_s > self._pinged_s:
            self._pinged_s = None
        if self._pinged_s is None:
            wait_s = self._ping_if_silent(now, now - last_read_s)
        else:
            wait_s = self._pinged_s + self._timeout_s - now
        if wait_s > 0:
            self._handle = self._loop.call_later(min(wait_s, self._time_s), self._check)
        else:
            self._dead()

    def _ping_if_silent(self, now: float, silence_s: float) -> float:
        """Ping if it is time to; return how long to wait."""
        if silence_s < self._time_s:
            return self._time_s - silence_s
        if not self._active():
            return self._time_s
        self._pinged_s = now
        self._ping()
        return self._timeout_s

    def close(self) -> None:
        """Stop watching, and drop the references to the connection."""
        self._handle.cancel()
        self._last_read_s, self._active = _never, bool
        self._ping = self._dead = nothing


def _never() -> float:
    return 0.0
