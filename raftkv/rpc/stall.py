"""Whether a peer still reads: ends a connection that lets nothing through, and leaves a slow reader alone.

    guard = StallGuard(loop, timeout_s=60.0)
    guard.arm(transport, transport.abort)     # something waits for the socket: from now on bytes must pass
    guard.disarm()                            # nothing waits any more, or the connection has gone

What counts is what the peer's kernel has acknowledged, not whether our own buffer has become empty: ten megabytes at
100 kB/s take longer than any timeout, and a kernel with a large buffer takes nothing from us for a long time while
its peer reads steadily. Where the kernel does not say (unix sockets, systems other than Linux), our buffer counts.

Left out: a least speed. A peer that takes one byte now and then holds a connection and one buffer, which are bounded.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Final

CHECKS: Final = 4
"""Looks within one timeout: a stalled peer is cut after the timeout, at most this share of it late."""

_BYTES_ACKED_AT: Final = 120
_BYTES_ACKED: Final = struct.Struct("=Q")


class StallGuard:
    """Watches one connection while something waits for its peer.

    Arguments:
        loop: for its time and timers.
        timeout_s: a peer that lets nothing through for so long is cut.
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
        """Call back once nothing has passed for the timeout, because something waits. An armed guard goes on.

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
        """Nothing waits any more; the guard lets go of the transport."""
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
