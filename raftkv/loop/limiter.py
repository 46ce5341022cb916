"""Limits on the work of one turn of the event loop; the rest waits for later turns.

    limiter = Limiter(100)                     # room for 100 in each turn
    await limiter.enter(1, user)               # a coroutine enters; heavy work takes more room (``weight``)
    limiter.add(callback, user)                # a short callback, called in the next turn that has room
    limiter.begin(callbacks)                   # many callbacks of the member itself; the first of them run now
    limiter.clear()                            # drop the callbacks that have not run yet

    backlog.add(connection.go_on, user)        # connections with unprocessed input: together ``TURN_S`` in each turn

    text = SharedText(parts)                   # a text that is slow to build; concurrent requests share one build
    await text()                               # the text as of now or later

One event may wake thousands of waiters: a key that all of them watched has changed, the leader is lost, or one pass
over the sockets read the first bytes of thousands of handshakes. Together they would block the loop. Waiting identities
are served in turn (``fair``), and the requests of one identity keep their order.

Leaves out: work that is long in itself and pauses by itself (``scheduler``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import perf_counter
from typing import Final

from raftkv.loop.cork import Cork
from raftkv.loop.fair import EQUAL, MEMBER, FairQueue, Identity, Weights

Callback = Callable[[], object]

TURN_S: Final = 0.0005
"""Time per turn of the loop for a backlog. It is short because another client's put takes three or four turns."""


class Limiter:
    """Limits how many coroutines enter and how many callbacks run in one turn of the loop.

    Arguments:
        in_a_turn: room of one turn: the sum of the weights that may run in it.
    """

    def __init__(self, in_a_turn: int) -> None:
        self._in_a_turn = self._left = in_a_turn
        """Room of one turn, and the part of it that is left in this turn."""
        self._waiting = FairQueue[Callback]()
        self._room = self._woken = 0
        self._is_scheduled = self._is_calling = False

    def __len__(self) -> int:
        return len(self._waiting)

    def try_enter(self, weight: int = 1) -> bool:
        """Enter if this turn has room and nothing is waiting.

        Arguments:
            weight: room that the caller takes. A weight above the room of a turn gets a turn of its own.
        """
        if self._left <= 0 or len(self._waiting):
            return False
        self._left -= weight
        self._schedule()
        return True

    async def enter(self, weight: int, identity: Identity) -> None:
        """Wait for a turn that has room, behind earlier waiters of the same identity, and enter.

        Arguments:
            weight: as in ``try_enter``.
            identity: identity that the caller works for.
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
        """Call back once, in the next turn that has room. Adding a callback that already waits has no effect.

        Arguments:
            callback: short piece of work.
            identity: identity that it works for.
        """
        self._waiting.add(identity, callback)
        self._schedule()

    def begin(self, callbacks: Iterable[Callback]) -> None:
        """Run the first of many callbacks now, unless others already wait, and the rest in later turns."""
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
        """Drop the waiting callbacks."""
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
            self._schedule()  # before coroutines are woken: callbacks that they schedule belong to the turn after
        self._call_some()

    def _call_some(self) -> None:
        waiting = self._waiting
        self._room, self._is_calling = self._in_a_turn, True
        try:
            for _ in range(len(waiting)):  # a callback added by one of these waits for the next turn
                if self._room <= 0 or not len(waiting):
                    break
                self._room -= 1
                identity, callback = waiting.pop()
                waiting.charge(identity, 1)
                callback()
        finally:
            self._is_calling = False


class Backlog:
    """Connections of one server with more unprocessed input than one turn may handle.

    A read is bounded in bytes, but the cost of its requests is not: a client may send 2,000 large requests without
    their last octets, and then all the last octets in one read. A connection that has used its time therefore stops
    between two frames, is not read while it waits, and continues here. All connections share ``TURN_S``, and each
    identity gets its part of it, however many connections it has.

    Arguments:
        cork: held while the connections work.
        loop: event loop of the server.
        weights: as in ``FairQueue``.
    """

    def __init__(self, cork: Cork, loop: asyncio.AbstractEventLoop, weights: Weights = EQUAL) -> None:
        self._cork = cork
        self._loop = loop
        self._waiting = FairQueue[Callback](weights=weights)
        self._is_scheduled = False

    def add(self, go_on: Callback, identity: Identity) -> None:
        """Call back in a later turn.

        Arguments:
            go_on: does part of the work, and adds itself again if work is left.
            identity: identity of the connection.
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
"""Time per turn of the loop for building a text. One part is never interrupted."""


class SharedText:
    """Builds a text on demand, in slices. Requests that arrive during a build share the next build.

    Arguments:
        parts: yields the current text, part by part.
    """

    def __init__(self, parts: Callable[[], Iterator[str]]) -> None:
        self._parts = parts
        self._begun = 0
        """Number of builds started."""
        self._text = (0, b"")
        """Number of the last finished build, and its text."""
        self._turn = asyncio.Lock()

    async def __call__(self) -> bytes:
        """Return a text whose build began after this call."""
        begun = self._begun
        async with self._turn:
            if self._text[0] <= begun:  # no build has begun since this call
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
