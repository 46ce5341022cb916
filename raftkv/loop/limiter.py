"""Limits on what one turn of the event loop does; the rest waits for later turns, in order of arrival.

    if not turnstile.try_enter():    # coroutines: a few enter in each turn; a heavy one takes the room of several
        await turnstile.enter()

    paced = Paced(100)               # short callbacks: at most 100 in each turn
    paced.add(callback)              # called in the next turn that has room
    paced.begin(callbacks)           # the same for many, and the first of them are called now
    paced.clear()                    # drop the callbacks that were not called yet

    backlog.add(connection.go_on)    # connections with unprocessed input: ``TURN_S`` in each turn for all together

    text = SharedText(make)          # a slow text for concurrent requests: one is made at a time
    await text()                     # as it is after this call

One event may let thousands continue: a key that all of them waited for has changed, the leader is lost, one pass over
the sockets brought the first bytes of as many handshakes. All at once they would hold the loop.

Leaves out: work that is long in itself and pauses by itself (``scheduler``).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from raftkv.loop.cork import Cork

Callback = Callable[[], object]

TURN_S: Final = 0.005
"""Time of a backlog in each turn of the loop: as long as a pass over the sockets."""


class Turnstile:
    """Admits coroutines, a few in each turn of the loop on which it was made.

    Arguments:
        in_a_turn: how many, or the sum of their weights.
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
        """Enter if this turn has room and no other coroutine waits.

        Arguments:
            weight: how much it has to do. A weight above the room of a turn gets a turn of its own.
        """
        if self._left <= 0 or self._waiting:
            return False
        self._left -= weight
        self._schedule()
        return True

    async def enter(self, weight: int = 1) -> None:
        """Wait for a turn that has room, behind the coroutines that wait already, and enter."""
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
        self._left = self._in_a_turn - self._called  # coroutines woken in the previous turn run in this one
        self._called = 0
        if self._waiting or self._left < self._in_a_turn:
            self._schedule()  # before waking coroutines: what they schedule belongs to the turn after
        while self._waiting and self._called < self._in_a_turn:
            turn, weight = self._waiting.popleft()
            if not turn.done():  # cancelled meanwhile
                self._called += weight
                turn.set_result(None)


class Paced:
    """Calls callbacks, a few in each turn of the loop that runs when they are added.

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
        """Call back once in the next turn that has room; adding a callback that waits already changes nothing."""
        self._waiting[callback] = None
        if not self._is_scheduled:
            self._schedule()

    def begin(self, callbacks: Iterable[Callback]) -> None:
        """Call the first of many now, unless others wait already, and the rest in later turns."""
        self._waiting.update(dict.fromkeys(callbacks))
        if not self._is_scheduled:
            self._call_some()

    def clear(self) -> None:
        """Drop the callbacks that wait."""
        self._waiting.clear()

    def _call_some(self) -> None:
        self._is_scheduled = True  # a callback added meanwhile waits for the next turn
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


class Backlog:
    """Connections of one server that brought more work than one turn may do.

    A read is bounded in bytes, but the cost of its requests is not: a client may send 2,000 large requests except for
    their last octets, and then all of those in one read. So a connection that has used its time stops between two
    frames, is not read meanwhile, and continues here. ``TURN_S`` is for all of them together, however many there are.

    Arguments:
        cork: held while they work.
        loop: of the server.
    """

    def __init__(self, cork: Cork, loop: asyncio.AbstractEventLoop) -> None:
        self._cork = cork
        self._loop = loop
        self._waiting: deque[Callback] = deque()
        self._is_scheduled = False

    def add(self, go_on: Callback) -> None:
        """Call back in a later turn.

        Arguments:
            go_on: does some of the work, and adds itself again if some is left.
        """
        self._waiting.append(go_on)
        self._next_turn()

    def _next_turn(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        self._is_scheduled = False
        clock = self._loop.time
        until = clock() + TURN_S
        self._cork.begin_pass()
        try:
            for _ in range(len(self._waiting)):
                self._waiting.popleft()()
                if clock() > until:
                    break
        finally:
            if self._waiting:
                self._next_turn()
            self._cork.end_pass(is_late=clock() > until)


class SharedText:
    """Makes a text on demand. Requests that come while one is made share the next one.

    Arguments:
        make: returns the text as it is now.
    """

    def __init__(self, make: Callable[[], Awaitable[bytes]]) -> None:
        self._make = make
        self._begun = 0
        """Texts that were begun."""
        self._text = (0, b"")
        """The last one that is whole, and which it is."""
        self._turn = asyncio.Lock()

    async def __call__(self) -> bytes:
        """Return the text as it is after this call."""
        begun = self._begun
        async with self._turn:
            if self._text[0] <= begun:  # no caller has begun one since
                self._begun += 1
                number = self._begun
                self._text = number, await self._make()
            return self._text[1]
