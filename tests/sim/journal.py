"""The running hash of all events of a simulation, and their text when tracing."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from tests.virtual_loop import Scheduler


class Journal:
    """Hashes only integers, strings and tuples of them, so the result depends on neither ``id()`` nor ``hash()``."""

    def __init__(self, scheduler: Scheduler, trace: Callable[[str], None] | None = None) -> None:
        self._scheduler = scheduler
        self._hash = hashlib.blake2b(digest_size=8)
        self.events_count = 0
        self.trace = trace

    def record(self, kind: str, *details: object) -> None:
        """Fold one event into the hash."""
        self.events_count += 1
        line = f"{self._scheduler.now_ticks} {kind} {details}"
        self._hash.update(line.encode())
        if self.trace is not None:
            self.trace(f"{self._scheduler.now:11.6f} {kind} {details}")

    def digest(self) -> str:
        """The hash so far, 16 hexadecimal digits."""
        return self._hash.hexdigest()


BUSY_S, PERIOD_S = 60.0, 900.0


def slowness(now_s: float, calm: float) -> float:
    """Return the factor for waits: ``calm``, but 1 in the first minute of each quarter of an hour."""
    return calm if now_s % PERIOD_S >= BUSY_S else 1.0


def stream(seed: int, name: str) -> random.Random:
    """Return an independent random stream: a draw from one must not shift the draws of another."""
    return random.Random(f"{seed}/{name}")
