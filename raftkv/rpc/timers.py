"""Couples a DeadlineWheel to an event loop: one timer for any number of deadlines."""

from __future__ import annotations

import asyncio

from raftkv.rpc.deadlines import DeadlineWheel


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
        """Stop; deadlines that are left never fire."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self.wheel.close()
