"""The clock of leases: the loop's, and the time in which the machine slept, which that one leaves out.

    asked_at = clock.now()                 # before a question leaves
    clock.now() < asked_at + ttl           # afterwards: the lease lives

The cluster goes on while a laptop's lid is shut, or a virtual machine is suspended. Whoever wakes up goes by this clock
and knows at once that its leases are over, whatever its own loop believes.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

ASLEEP_S: Final = 0.001
"""Sleep that is noticed; two clocks that are read one after the other differ by less."""
LOOKS_MAX: Final = 5
"""Looks after which it has slept: another process may have had the processor between the two clocks of one."""
_SINCE_BOOT: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Return the present, by the clock of leases; on the loop."""
    return _asleep.look() + asyncio.get_running_loop().time()


def asleep_s() -> tuple[float, float]:
    """Return how long the machine has slept since it was started: at least, and at most."""
    before = time.clock_gettime(_SINCE_BOOT)
    awake = time.clock_gettime(time.CLOCK_MONOTONIC)
    return before - awake, time.clock_gettime(_SINCE_BOOT) - awake


class Asleep:
    """How long the machine has slept since this was made.

    It changes with a sleep alone, never by how the two clocks were read: where time is simulated, nothing else counts.
    """

    def __init__(self) -> None:
        self._total_s = 0.0
        self._known_s = asleep_s()[0]

    def look(self) -> float:
        """Return the seconds."""
        at_least = self._known_s
        for _ in range(LOOKS_MAX):
            at_least, at_most = asleep_s()
            if at_most <= self._known_s + ASLEEP_S:
                return self._total_s
        self._total_s += max(at_least - self._known_s, 0.0)
        self._known_s = at_least
        return self._total_s


_asleep: Final = Asleep()
