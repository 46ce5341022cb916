"""Few of very many may go on in each turn of the loop; the others wait, in their order, and cost nothing meanwhile.

if not turnstile.try_enter():
    await turnstile.enter()

It is for coroutines; ``paced`` does the same for callbacks.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets so many in for each turn of the loop on which it was made.

    Arguments:
        in_a_turn: how many.
    """

    def __init__(self, in_a_turn: int) -> None:
        self._in_a_turn = self._left = in_a_turn
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    def __len__(self) -> int:
        return len(self._waiting)

    def try_enter(self) -> bool:
        """Enter, if this turn has room."""
        if self._left <= 0:
            return False
        self._left -= 1
        self._schedule()
        return True

    async def enter(self) -> None:
        """Wait for a turn that has room, and enter; whoever was called and came too late is called first again."""
        wait = self._waiting.append
        while not self.try_enter():
            turn = self._loop.create_future()
            wait(turn)
            await turn
            wait = self._waiting.appendleft

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self._left = self._in_a_turn
        if self._waiting:
            self._schedule()  # before those who are called now: what they take is of this turn
        for _ in range(min(self._in_a_turn, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # it was cancelled meanwhile
                turn.set_result(None)
