"""Waits between attempts: short at first, doubling, with jitter, back to short after success."""

from __future__ import annotations

import asyncio
import random

BASE_S = 0.025
MAX_S = 1.0


class Backoff:
    """The waits of one loop that tries again.

    Arguments:
        base_s: the first wait.
        max_s: the longest.
    """

    __slots__ = ("_base_s", "_max_s", "failures")

    def __init__(self, base_s: float = BASE_S, max_s: float = MAX_S) -> None:
        self.failures = 0
        self._base_s = base_s
        self._max_s = max_s

    def reset(self) -> None:
        """It worked: begin with the shortest wait again."""
        self.failures = 0

    def next_s(self) -> float:
        """Length of the next wait: half to all of what doubling gives, so that clients spread."""
        full_s = min(self._base_s * 2.0 ** min(self.failures, 30), self._max_s)
        self.failures += 1
        return full_s * random.uniform(0.5, 1.0)

    async def wait(self) -> None:
        """Wait."""
        await asyncio.sleep(self.next_s())
