"""Deadlines of many calls behind one event loop timer.

    timer = WheelTimer(loop)                        # one for a server or a channel
    timer.wheel.add(call, deadline, loop.time())    # call.expire() when the deadline has passed
    forget(call)                                    # unless it is forgotten before

``DeadlineWheel`` is a wheel of buckets: adding and removing cost O(1) and leave nothing behind, so a million finished
calls with long deadlines hold no memory. Near deadlines share a bucket of one tick; far ones share coarser buckets
(rounded *down*, and sorted in again at that time), so there are at most 64 buckets for each power of two of ticks.

The wheel has no clock and no timer: its owner calls ``expire(now)`` at the time passed to ``on_earlier``.
``WheelTimer`` does so on an event loop. A deadline never fires early, and at most one tick late (plus the owner's
delay). When many pass at once, ``FIRED_MAX`` fire at a time: each may end a call, and thousands may share a deadline.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from typing import Protocol

FIRED_MAX = 200
"""Entries that one call of ``expire`` examines: ending a call with its task takes 10 to 50 us."""
TICK_S = 0.01
_PER_S = 1 / TICK_S
_EXACT_TICKS = 64


class Expiring(Protocol):
    """An entry of a wheel. The wheel owns both attributes while the entry is in it."""

    bucket: dict[Expiring, None] | None
    deadline: float | None

    def expire(self) -> None:
        """End the entry: its deadline has passed. Called once."""

    def __hash__(self) -> int: ...


class DeadlineWheel:
    """The deadlines of one server or channel.

    ``on_earlier(when)`` is called when the next expiry moves to an earlier time (seconds of the owner's clock).
    """

    def __init__(self, on_earlier: Callable[[float], None]) -> None:
        self._on_earlier = on_earlier
        self._buckets: dict[int, dict[Expiring, None]] = {}
        self._ticks: list[int] = []
        self._due: deque[Expiring] = deque()
        """Entries of expired buckets that have not been examined yet."""
        self._expired_at = 0.0

    def add(self, entry: Expiring, deadline: float, now: float) -> None:
        """Watch an entry until its deadline.

        Arguments:
            entry: its ``expire`` is called then, unless ``forget`` is called before.
            deadline, now: times of the owner's clock, in seconds.
        """
        entry.deadline = deadline
        tick = int(deadline * _PER_S) + 1
        ahead = tick - int(now * _PER_S)
        if ahead > _EXACT_TICKS:
            shift = ahead.bit_length() - 6
            tick = tick >> shift << shift
        bucket = self._buckets.get(tick)
        if bucket is None:
            bucket = self._open(tick)
        bucket[entry] = None
        entry.bucket = bucket

    def _open(self, tick: int) -> dict[Expiring, None]:
        bucket: dict[Expiring, None] = {}
        self._buckets[tick] = bucket
        heapq.heappush(self._ticks, tick)
        if self._ticks[0] == tick and not self._due:
            self._on_earlier(tick * TICK_S)
        return bucket

    def next_expiry(self) -> float | None:
        """Return when ``expire`` is due next, or None."""
        if self._due:
            return self._expired_at
        return self._ticks[0] * TICK_S if self._ticks else None

    def expire(self, now: float) -> None:
        """Fire up to ``FIRED_MAX`` entries whose deadline has passed. If more have, ``next_expiry`` is at once."""
        due, self._expired_at = self._due, now
        while self._ticks and self._ticks[0] * TICK_S <= now:
            due.extend(self._buckets.pop(heapq.heappop(self._ticks)))
        # Fired only after all buckets are taken: an entry that is put into another bucket must not be examined twice.
        for _ in range(min(len(due), FIRED_MAX)):
            self._fire(due.popleft(), now)

    def _fire(self, entry: Expiring, now: float) -> None:
        if entry.bucket is None:
            return  # an earlier entry of this bucket has ended this one
        entry.bucket = None
        if entry.deadline is not None and entry.deadline > now:
            self.add(entry, entry.deadline, now)
        else:
            entry.expire()

    def close(self) -> None:
        """Fire no more entries, and drop the reference to the owner."""
        self._on_earlier = _ignore
        self._buckets.clear()
        self._ticks.clear()
        self._due.clear()


def _ignore(when: float) -> None:
    del when


def forget(entry: Expiring) -> None:
    """Stop watching ``entry``; harmless if it is not watched."""
    bucket = entry.bucket
    if bucket is not None:
        bucket.pop(entry, None)
        entry.bucket = None


class WheelTimer:
    """Runs ``wheel.expire`` when it is due."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None
        self.wheel = DeadlineWheel(self._arm)

    def _arm(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_at(when, self._fire)

    def _fire(self) -> None:
        self._handle = None
        self.wheel.expire(self._loop.time())
        due = self.wheel.next_expiry()
        if due is not None:
            self._arm(due)

    def close(self) -> None:
        """Stop the timer; the remaining deadlines never fire."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self.wheel.close()
