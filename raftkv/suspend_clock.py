"""Time in which the machine slept (a laptop's lid was shut, a virtual machine suspended): no loop's clock counts it.

    clock = SuspendClock()
    clock.has_slept()     # since the last call
    clock.total_s         # since the clock was made, as of the last call
    elapsed_ns()          # since the machine was started

The rest of the world goes on meanwhile: leases end, and states that were recent are old.
"""

from __future__ import annotations

import time
from typing import Final

SUSPENDED_MIN_S: Final = 0.001
"""The shortest sleep that is noticed: two clocks that are read one after the other differ by less."""

READINGS_MAX: Final = 5
"""Readings in a row that must agree on a sleep: in one of them another process may have run between the two clocks."""

_SINCE_BOOT: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux alone has a clock that counts sleep."""


def elapsed_ns() -> int:
    """Return the nanoseconds since the machine was started, sleep included."""
    return time.clock_gettime_ns(_SINCE_BOOT)


def suspended_s() -> tuple[float, float]:
    """Return how long the machine has slept since it was started: at least, and at most."""
    before = time.clock_gettime(_SINCE_BOOT)
    awake = time.clock_gettime(time.CLOCK_MONOTONIC)
    return before - awake, time.clock_gettime(_SINCE_BOOT) - awake


class SuspendClock:
    """Notices that the machine has slept.

    Attributes:
        total_s: how long since this was made, as of the last call. It changes with a sleep alone, never by how the two
            clocks were read: where time is simulated, nothing else counts.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._known_s = suspended_s()[0]

    def has_slept(self) -> bool:
        """Read the clocks, and return whether the machine has slept since the last call."""
        at_least = self._known_s
        for _ in range(READINGS_MAX):
            at_least, at_most = suspended_s()
            if at_most <= self._known_s + SUSPENDED_MIN_S:
                return False
        self.total_s += max(at_least - self._known_s, 0.0)
        self._known_s = at_least
        return True
