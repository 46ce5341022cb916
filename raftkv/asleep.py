"""Time in which the machine slept, which no loop's clock counts: a laptop's lid is shut, a virtual machine suspended.

    sleep = Sleep()
    sleep.has_been()      # since the last look
    sleep.total_s         # since it was made, as of the last look

The rest of the world goes on meanwhile: leases end, and states that were recent are old.
"""

from __future__ import annotations

import time
from typing import Final

ASLEEP_S: Final = 0.001
"""Sleep that is noticed; two clocks that are read one after the other differ by less."""

LOOKS_MAX: Final = 5
"""Looks after which it has slept: another process may have had the processor between the two clocks of one."""

_SINCE_BOOT: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux alone has a clock that counts sleep."""


def asleep_s() -> tuple[float, float]:
    """Return how long the machine has slept since it was started: at least, and at most."""
    before = time.clock_gettime(_SINCE_BOOT)
    awake = time.clock_gettime(time.CLOCK_MONOTONIC)
    return before - awake, time.clock_gettime(_SINCE_BOOT) - awake


class Sleep:
    """Notices that the machine has slept.

    Attributes:
        total_s: how long since this was made, as of the last look. It changes with a sleep alone, never by how the two
            clocks were read: where time is simulated, nothing else counts.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._known_s = asleep_s()[0]

    def has_been(self) -> bool:
        """Look, and return whether the machine has slept since the last look."""
        at_least = self._known_s
        for _ in range(LOOKS_MAX):
            at_least, at_most = asleep_s()
            if at_most <= self._known_s + ASLEEP_S:
                return False
        self.total_s += max(at_least - self._known_s, 0.0)
        self._known_s = at_least
        return True
