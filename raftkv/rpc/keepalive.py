"""Keepalive of one HTTP/2 connection: a ping after silence, and an end when nothing answers.

Any byte from the peer counts as a sign of life, as in grpc-go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from raftkv.loop.cycle_free import nothing

KEEPALIVE_PING = b"keepaliv"


class Keepalive:
    """Watches one connection.

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
        """Stop watching, and let go of the connection."""
        self._handle.cancel()
        self._last_read_s, self._active = _never, bool
        self._ping = self._dead = nothing


def _never() -> float:
    return 0.0
