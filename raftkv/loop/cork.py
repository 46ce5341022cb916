"""What a turn of the loop has touched, flushed at its end: the one registry of everything that gathers bytes.

    cork.touch(stream)        # it has messages: put them together and hand them to the connection, later
    cork.mark(connection)     # it has bytes: write them to the socket, later

    with cork:                # a turn that makes many answers: nothing is flushed before it ends
        ...

    cork.begin_pass()         # the same for a pass over all sockets that have something to say
    cork.end_pass(False)      # what it has left to do is done first: cork.defer(turn)

    cork.expect(8)            # eight callers are answered in this turn: most of them ask again at once
    cork.arrived()            # one has

Touched outside of both, everything is flushed at the start of the loop's next turn, by one callback. Inside, at the
end. Streams come first, so what a turn has for a connection leaves in one system call.

    request read -> handler -> stream.answer -> touch ...... end of the turn: stream.flush -> mark -> connection.flush

What is deferred to the end of a pass costs as much for one request as for many: a write to the log, a sync, a message
to each member. So whoever makes the pass may wait a moment while callers are expected (``awaits_more``).

Leaves out: what is gathered, and limits on it (``budget``, streams).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Flushable(Protocol):
    """Something that gathers bytes, or messages, while a turn lasts."""

    def flush(self) -> None:
        """Hand on what was gathered."""


def _next_turn(callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(callback)


class Cork:
    """Flushes what a turn has touched, at its end.

    Arguments:
        schedule: has a function called at the start of the loop's next turn.
    """

    __slots__ = ("_deferred", "_expected", "_has_arrived", "_is_held", "_marked", "_schedule", "_touched")

    def __init__(self, schedule: Callable[[Callable[[], None]], None] = _next_turn) -> None:
        self._schedule = schedule
        self._touched: list[Flushable] = []
        self._marked: list[Flushable] = []
        self._is_held = False
        self._deferred: list[Callable[[], None]] | None = None
        self._expected = 0
        self._has_arrived = False

    def touch(self, stream: Flushable) -> None:
        """Flush a stream at the end of the turn. It calls this once until then."""
        if not self._is_held and not self._touched and not self._marked:
            self._schedule(self.flush)
        self._touched.append(stream)

    def mark(self, connection: Flushable) -> None:
        """Flush a connection at the end of the turn, after all streams. It calls this once until then."""
        if not self._is_held and not self._marked and not self._touched:
            self._schedule(self.flush)
        self._marked.append(connection)

    def flush(self) -> None:
        """Flush what was touched so far, now; within ``with`` too.

        Raises:
            Exception: the first that a flush raised, after everything else was flushed.
        """
        was_held, self._is_held = self._is_held, True  # what a flush touches is flushed here as well
        failure: Exception | None = None
        while self._touched or self._marked:
            if self._touched:
                batch, self._touched = self._touched, []
            else:
                batch, self._marked = self._marked, []
            for one in batch:
                try:
                    one.flush()
                except Exception as error:
                    failure = failure or error
        self._is_held = was_held
        if failure is not None:
            raise failure

    def begin_pass(self) -> None:
        """Flush nothing until the pass ends."""
        self._is_held = True
        self._deferred = []
        self._has_arrived = False

    def end_pass(self, is_late: bool) -> None:
        """Do what was deferred, and flush.

        Arguments:
            is_late: the pass has taken its time: what was deferred waits for the next turn of the loop.

        Raises:
            Exception: the first that something deferred or flushed has raised, after all else was done.
        """
        deferred, self._deferred = self._deferred, None
        failure: Exception | None = None
        for callback in deferred or ():
            try:
                if is_late:
                    self._schedule(callback)
                else:
                    callback()
            except Exception as error:
                failure = failure or error
        self._is_held = False
        self.flush()
        if failure is not None:
            raise failure

    def defer(self, callback: Callable[[], None]) -> bool:
        """Call back when the pass under way ends, and save a turn of the loop; False if there is none.

        Arguments:
            callback: what many of the pass have work for.
        """
        if self._deferred is None:
            return False
        self._deferred.append(callback)
        return True

    def expect(self, callers: int) -> None:
        """Note that so many callers are answered, who may ask again as soon as they have read that.

        Arguments:
            callers: how many.
        """
        self._expected += callers

    def arrived(self) -> None:
        """Note that a caller has asked for what the end of the pass has work with: one who was expected, if any was."""
        self._has_arrived = True
        if self._expected > 0:
            self._expected -= 1

    def expect_nobody(self) -> None:
        """Forget who was expected: they take their time."""
        self._expected = 0

    @property
    def awaits_more(self) -> bool:
        """Whether a caller has arrived in the pass under way, and more are expected who could share that work."""
        return self._has_arrived and self._expected > 0

    def __enter__(self) -> None:
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        self.flush()
