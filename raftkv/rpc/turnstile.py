"""Few of very many may go on in each turn of the loop; the others wait, in their order, and cost nothing meanwhile.

    if not turnstile.try_enter():
        await turnstile.enter()

Who has more to do than others says so by a weight: one that weighs more than a turn has room for is alone in its turn.
It is for coroutines; ``paced`` does the same for callbacks.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets so many in for each turn of the loop on which it was made.

    Arguments:
        in_a_turn: how many, or how much if they have weights.
    """

    def __init__(self, in_a_turn: int) -> None:
        self._in_a_turn = self._left = in_a_turn
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._is_scheduled = False
        self._called = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def try_enter(self, weight: int = 1) -> bool:
        """Enter, if this turn has room and nobody waits."""
        if self._left <= 0 or self._waiting:
            return False
        self._left -= weight
        self._schedule()
        return True

    async def enter(self, weight: int = 1) -> None:
        """Wait for a turn that has room, behind all who wait already, and enter."""
        if not self.try_enter(weight):
            turn = self._loop.create_future()
            self._waiting.append((turn, weight))
            self._schedule()
            await turn

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self._left = self._in_a_turn - self._called  # who was called in the turn before goes on in this one
        self._called = 0
        if self._waiting or self._left < self._in_a_turn:
            self._schedule()  # before those who are called now: what they take is of that turn
        while self._waiting and self._called < self._in_a_turn:
            turn, weight = self._waiting.popleft()
            if not turn.done():  # it was cancelled meanwhile
                self._called += weight
                turn.set_result(None)
