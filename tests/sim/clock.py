"""Simulated time: one heap of events, and one skewed tick per member.

Owns the order of everything that happens in a simulation. Time is an integer number of microseconds; events at the
same time run in the order they were scheduled, so a run is a function of its seed alone. Leaves out what the
events do.

    scheduler = Scheduler()
    scheduler.after(1_000, print, "one millisecond later")
    scheduler.run_until(2_000)
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from typing import Any

MILLISECOND_US = 1_000
SECOND_US = 1_000_000

Action = Callable[..., None]


class Scheduler:
    """The event heap. ``now_us`` only moves forward."""

    def __init__(self) -> None:
        self.now_us = 0
        self.events_count = 0
        self._heap: list[tuple[int, int, Action, tuple[Any, ...]]] = []
        self._sequence = 0

    def after(self, delay_us: int, action: Action, *arguments: Any) -> None:
        """Run ``action(*arguments)`` ``delay_us`` from now."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_us + delay_us, self._sequence, action, arguments))

    def run_until(self, end_us: int, stop: Callable[[], bool] | None = None) -> None:
        """Run events up to and including ``end_us``, or until ``stop()`` is true after one of them."""
        heap = self._heap
        while heap and heap[0][0] <= end_us:
            self.now_us, _, action, arguments = heapq.heappop(heap)
            self.events_count += 1
            action(*arguments)
            if stop is not None and stop():
                return
        self.now_us = max(self.now_us, end_us)


class Journal:
    """The running 64-bit hash of all events, and their text when a trace is asked for.

    Only integers, strings and tuples of them go in, so that the hash depends on neither ``id()`` nor ``hash()``.
    """

    def __init__(self, scheduler: Scheduler, trace: Callable[[str], None] | None = None) -> None:
        self._scheduler = scheduler
        self._hash = hashlib.blake2b(digest_size=8)
        self.trace = trace

    def record(self, kind: str, *details: object) -> None:
        """Fold one event into the hash."""
        line = f"{self._scheduler.now_us} {kind} {details}"
        self._hash.update(line.encode())
        if self.trace is not None:
            self.trace(line)

    def digest(self) -> str:
        """The hash so far, 16 hexadecimal digits."""
        return self._hash.hexdigest()
