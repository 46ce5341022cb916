"""Callbacks of which each turn of the loop calls a few; the others wait, in their order.

    paced = Paced(100)
    paced.add(callback)          # called in the next turn that has room
    paced.begin(callbacks)       # the same for many, and the first of them are called now
    paced.clear()                # what was not called yet is not called any more

One event may make thousands go on: a key that all of them waited for has changed, the leader is lost, one pass over
the sockets brought the first bytes of as many handshakes. All at once they would hold the loop.

Leaves out: coroutines that wait for a turn (``turnstile``), and work that is long in itself and measured by its time
(``server/node/slices``).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable

Callback = Callable[[], object]


class Paced:
    """Calls back, on the loop that runs when it is asked to.

    Arguments:
        in_a_turn: callbacks that are called in one turn of the loop.
    """

    def __init__(self, in_a_turn: int) -> None:
        self._in_a_turn = in_a_turn
        self._waiting: OrderedDict[Callback, None] = OrderedDict()
        self._is_scheduled = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, callback: Callback) -> None:
        """Call back in the next turn that has room: once, however often that was asked for meanwhile."""
        self._waiting[callback] = None
        if not self._is_scheduled:
            self._schedule()

    def begin(self, callbacks: Iterable[Callback]) -> None:
        """Call the first of many back now, unless others wait already, and the rest in turns to come."""
        self._waiting.update(dict.fromkeys(callbacks))
        if not self._is_scheduled:
            self._call_some()

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def _call_some(self) -> None:
        self._is_scheduled = True  # what a callback adds waits for the next turn
        left = min(self._in_a_turn, len(self._waiting))
        try:
            while left and self._waiting:
                left -= 1
                self._waiting.popitem(last=False)[0]()
        finally:
            self._is_scheduled = False
            if self._waiting:
                self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._call_some)
