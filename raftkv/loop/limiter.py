"""Limits on what one turn of the event loop does; the rest waits for later turns.

    limiter = Limiter(100)                     # room for 100 in each turn
    if not limiter.try_enter():                # a coroutine enters; a heavy one takes the room of several
        await limiter.enter(1, user)
    limiter.add(callback, user)                # a short callback, called in the next turn that has room
    limiter.begin(callbacks)                   # many of the member's own; the first of them are called now
    limiter.clear()                            # drop the callbacks that were not called yet

    backlog.add(connection.go_on, user)        # connections with unprocessed input: ``TURN_S`` in each turn for all

    text = SharedText(parts)                   # a slow text for concurrent requests: one is made at a time
    await text()                               # as it is after this call

One event may let thousands continue: a key that all of them waited for has changed, the leader is lost, one pass over
the sockets brought the first bytes of as many handshakes. All at once they would hold the loop. Identities that wait
are served in turn (``fair``), and the requests of one keep their order.

Leaves out: work that is long in itself and pauses by itself (``scheduler``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import perf_counter
from typing import Final

from raftkv.loop.cork import Cork
from raftkv.loop.fair import MEMBER, FairQueue, Identity

Callback = Callable[[], object]

TURN_S: Final = 0.002
"""Time of a backlog in each turn of the loop. Short, since a put of another client takes three or four turns."""


class Limiter:
    """Lets coroutines enter and calls callbacks, a few in each turn of the loop.

    Arguments:
        in_a_turn: how many, or the sum of their weights.
    """

    def __init__(self, in_a_turn: int) -> None:
        self._in_a_turn = self._left = in_a_turn
        """Room of a turn, and what is left of it for coroutines that come now."""
        self._waiting = FairQueue[Callback]()
        self._room = self._woken = 0
        self._is_scheduled = self._is_calling = False

    def __len__(self) -> int:
        return len(self._waiting)

    def try_enter(self, weight: int = 1) -> bool:
        """Enter if this turn has room and nothing waits.

        Arguments:
            weight: how much the caller has to do. A weight above the room of a turn gets a turn of its own.
        """
        if self._left <= 0 or len(self._waiting):
            return False
        self._left -= weight
        self._schedule()
        return True

    async def enter(self, weight: int, identity: Identity) -> None:
        """Wait for a turn that has room, behind all of the same identity that wait, and enter.

        Arguments:
            weight: as of ``try_enter``.
            identity: for which the caller works.
        """
        if not self.try_enter(weight):
            turn = asyncio.get_running_loop().create_future()
            wake = partial(self._wake, turn, weight, identity)
            self.add(wake, identity)
            try:
                await turn
            except asyncio.CancelledError:
                self._waiting.discard(identity, wake)
                raise

    def _wake(self, turn: asyncio.Future[None], weight: int, identity: Identity) -> None:
        if turn.done():
            self._room += 1  # it was cancelled
            return
        self._room -= weight - 1
        self._woken += weight
        self._waiting.charge(identity, weight - 1)
        turn.set_result(None)

    def add(self, callback: Callback, identity: Identity) -> None:
        """Call back once in the next turn that has room; adding a callback that waits already changes nothing.

        Arguments:
            callback: does little.
            identity: for which it does that.
        """
        self._waiting.add(identity, callback)
        self._schedule()

    def begin(self, callbacks: Iterable[Callback]) -> None:
        """Call the first of many now, unless others wait already, and the rest in later turns."""
        had_waiting = bool(len(self._waiting)) or self._is_calling
        for callback in callbacks:
            self._waiting.add(MEMBER, callback)
        try:
            if not had_waiting:
                self._call_some()
        finally:
            if len(self._waiting):
                self._schedule()

    def clear(self) -> None:
        """Drop the callbacks that wait."""
        self._waiting.clear()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self._left = self._in_a_turn - self._woken  # coroutines woken in the previous turn run in this one
        self._woken = 0
        if len(self._waiting) or self._left < self._in_a_turn:
            self._schedule()  # before waking coroutines: what they schedule belongs to the turn after
        self._call_some()

    def _call_some(self) -> None:
        waiting = self._waiting
        self._room, self._is_calling = self._in_a_turn, True
        try:
            for _ in range(len(waiting)):  # a callback added meanwhile waits for the next turn
                if self._room <= 0 or not len(waiting):
                    break
                self._room -= 1
                identity, callback = waiting.pop()
                waiting.charge(identity, 1)
                callback()
        finally:
            self._is_calling = False


class Backlog:
    """Connections of one server that brought more work than one turn may do.

    A read is bounded in bytes, but the cost of its requests is not: a client may send 2,000 large requests except for
    their last octets, and then all of those in one read. So a connection that has used its time stops between two
    frames, is not read meanwhile, and continues here. ``TURN_S`` is for all of them together, however many there are,
    and each identity has an equal part of it, however many connections it has.

    Arguments:
        cork: held while they work.
        loop: of the server.
    """

    def __init__(self, cork: Cork, loop: asyncio.AbstractEventLoop) -> None:
        self._cork = cork
        self._loop = loop
        self._waiting = FairQueue[Callback]()
        self._is_scheduled = False

    def add(self, go_on: Callback, identity: Identity) -> None:
        """Call back in a later turn.

        Arguments:
            go_on: does some of the work, and adds itself again if some is left.
            identity: of the connection.
        """
        self._waiting.add(identity, go_on)
        self._next_turn()

    def _next_turn(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        self._is_scheduled = False
        clock, waiting = self._loop.time, self._waiting
        now = clock()
        until = now + TURN_S
        self._cork.begin_pass()
        try:
            for _ in range(len(waiting)):
                began = now
                identity, go_on = waiting.pop()
                try:
                    go_on()
                finally:
                    now = clock()
                    waiting.charge(identity, now - began)
                if now > until:
                    break
        finally:
            if len(waiting):
                self._next_turn()
            self._cork.end_pass(is_late=clock() > until)


TEXT_SLICE_S: Final = 0.002
"""How long a turn of the loop works on a text; a part is never cut."""


class SharedText:
    """Makes a text on demand, in slices. Requests that come while one is made share the next one.

    Arguments:
        parts: makes the text as it is now, part by part.
    """

    def __init__(self, parts: Callable[[], Iterator[str]]) -> None:
        self._parts = parts
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

    async def _make(self) -> bytes:
        made: list[str] = []
        until = perf_counter() + TEXT_SLICE_S
        for part in self._parts():
            made.append(part)
            if perf_counter() > until:
                await asyncio.sleep(0)
                until = perf_counter() + TEXT_SLICE_S
        return "".join(made).encode()
