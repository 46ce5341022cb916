"""Measures suspended time (laptop lid shut, virtual machine paused), which event loop clocks do not count.

    clock = SuspendClock()
    clock.has_slept()     # since the last call
    clock.total_s         # since the clock was made, as of the last call
    elapsed_ns()          # since the machine was started

The rest of the world continues during the suspension: leases expire, and cached states become old.
"""

from __future__ import annotations

import time
from typing import Final

SUSPENDED_MIN_S: Final = 0.001
"""The shortest suspension that is detected. Two clocks read one after the other can differ by less."""

READINGS_MAX: Final = 5
"""Consecutive readings that must show a suspension: another process may have run between the two clocks of one."""

_SINCE_BOOT: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that counts suspended time; only Linux has one."""


def elapsed_ns() -> int:
    """Return the nanoseconds since boot, suspended time included."""
    return time.clock_gettime_ns(_SINCE_BOOT)


def suspended_s() -> tuple[float, float]:
    """Return a lower and an upper bound of the seconds suspended since boot."""
    before = time.clock_gettime(_SINCE_BOOT)
    awake = time.clock_gettime(time.CLOCK_MONOTONIC)
    return before - awake, time.clock_gettime(_SINCE_BOOT) - awake


class SuspendClock:
    """Detects that the machine was suspended.

    Attributes:
        total_s: seconds suspended since this object was created, as of the last call. Only a suspension changes it,
            never jitter between the two clock readings; simulations rely on this.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._known_s = suspended_s()[0]

    def has_slept(self) -> bool:
        """Read the clocks, and return whether the machine was suspended since the last call."""
        at_least = self._known_s
        for _ in range(READINGS_MAX):
            at_least, at_most = suspended_s()
            if at_most <= self._known_s + SUSPENDED_MIN_S:
                return False
        self.total_s += max(at_least - self._known_s, 0.0)
        self._known_s = at_least
        return True
