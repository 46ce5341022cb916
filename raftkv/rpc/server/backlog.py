"""Connections that have brought more than one turn may do: what is left is done in turns, a few milliseconds each.

A read is bounded in bytes, and what the requests of those bytes cost is not: a client may send 2,000 large ones but for
their last octets, and then those in one read. So a connection stops amid its frames when it has taken its time, is not
read meanwhile, and goes on here. However many there are, a turn of the loop has ``TURN_S`` for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from raftkv.rpc.cork import Cork

TURN_S: Final = 0.005
"""How long those that wait may take in a turn of the loop: as long as a pass over the sockets."""


class Unfinished(Protocol):
    """Has work left that has come already."""

    def go_on(self) -> None:
        """Do some of it; if not all, it adds itself again."""


class Backlog:
    """Those of one server, in the order in which they came.

    Arguments:
        cork: held while they work.
        clock: gives seconds.
        schedule: has a function called in the loop's next turn.
    """

    def __init__(
        self, cork: Cork, clock: Callable[[], float], schedule: Callable[[Callable[[], None]], object]
    ) -> None:
        self._cork = cork
        self._clock = clock
        self._schedule = schedule
        self._waiting: deque[Unfinished] = deque()
        self._is_scheduled = False

    def add(self, one: Unfinished) -> None:
        """Have it go on in a later turn. It is not here yet.

        Arguments:
            one: whose turn comes.
        """
        self._waiting.append(one)
        self._next_turn()

    def _next_turn(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._schedule(self._serve)

    def _serve(self) -> None:
        self._is_scheduled = False
        until = self._clock() + TURN_S
        self._cork.begin_pass()
        try:
            for _ in range(len(self._waiting)):
                self._waiting.popleft().go_on()
                if self._clock() > until:
                    break
        finally:
            if self._waiting:
                self._next_turn()
            self._cork.end_pass(is_late=self._clock() > until)
