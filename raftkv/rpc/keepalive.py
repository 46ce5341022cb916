"""Keepalive of one HTTP/2 connection: a ping after silence, and an end when nothing answers.

Any byte from the peer counts as a sign of life, as in grpc-go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

KEEPALIVE_PING = b"keepaliv"


class Keepalive:
    """Watches one connection.

    Args:
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
        last_read_s = self._last_read_s()
        if self._pinged_s is not None:
            if last_read_s < self._pinged_s:
                self._dead()
                return
            self._pinged_s = None
        silence_s = self._loop.time() - last_read_s
        if silence_s >= self._time_s and self._active():
            self._pinged_s = self._loop.time()
            self._ping()
            self._handle = self._loop.call_later(self._timeout_s, self._check)
        else:
            wait_s = self._time_s - silence_s if silence_s < self._time_s else self._time_s
            self._handle = self._loop.call_later(wait_s, self._check)

    def close(self) -> None:
        """Stop watching."""
        self._handle.cancel()
