"""The clock of leases: the loop's, and the time in which the machine slept, which that one leaves out.

    asked_at = clock.now()                 # before a question leaves
    clock.now() < asked_at + ttl           # afterwards: the lease lives

The cluster goes on while the machine sleeps. Whoever wakes up goes by this clock and knows at once that its leases are
over, whatever its own loop believes.
"""

from __future__ import annotations

import asyncio
from typing import Final

from raftkv.asleep import Sleep

_sleep: Final = Sleep()


def now() -> float:
    """Return the present, by the clock of leases; on the loop."""
    _sleep.has_been()
    return _sleep.total_s + asyncio.get_running_loop().time()
