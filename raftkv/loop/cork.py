"""Streams and connections with pending output, flushed together at the end of a turn of the loop.

    cork.touch(stream)        # the stream has messages: they go to its connection at the end of the turn
    cork.mark(connection)     # the connection has bytes: they go to its socket at the end of the turn

    with cork:                # a turn that makes many answers: no flush before the block ends
        ...

    cork.begin_pass()         # the same for a pass over all ready sockets
    cork.end_pass(False)      # first runs the callbacks of cork.defer(turn), then flushes

    cork.expect(8)            # eight callers are answered in this turn: most of them send the next request at once
    cork.arrived()            # one of the expected requests has arrived

Output that is touched or marked outside of a block and a pass is flushed at the start of the loop's next turn, by one
callback. Streams are flushed first, so the output of a turn for one connection leaves in one system call.

    request read -> handler -> stream.answer -> touch ...... end of the turn: stream.flush -> mark -> connection.flush

Deferred work costs the same for one request as for many: a write to the log, a sync, a message to each member. So a
pass may wait a moment while callers are expected (``awaits_more``).

Leaves out: the output itself, and limits on it (``rpc.server.budget``, streams).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Flushable(Protocol):
    """Collects bytes or messages during a turn."""

    def flush(self) -> None:
        """Pass the output on."""


def _next_turn(callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(callback)


class Cork:
    """Collects streams and connections, and flushes them at the end of a turn.

    Arguments:
        schedule: calls a function at the start of the loop's next turn.
    """

    def __init__(self, schedule: Callable[[Callable[[], None]], None] = _next_turn) -> None:
        self._schedule = schedule
        self._touched: list[Flushable] = []
        self._marked: list[Flushable] = []
        self._is_held = False
        self._deferred: list[Callable[[], None]] | None = None
        self._expected = 0
        self._has_arrived = False

    def touch(self, stream: Flushable) -> None:
        """Flush a stream at the end of the turn. Each stream calls this once per turn."""
        if not self._is_held and not self._touched and not self._marked:
            self._schedule(self.flush)
        self._touched.append(stream)

    def mark(self, connection: Flushable) -> None:
        """Flush a connection at the end of the turn, after all streams. Each connection calls this once per turn."""
        if not self._is_held and not self._marked and not self._touched:
            self._schedule(self.flush)
        self._marked.append(connection)

    def flush(self) -> None:
        """Flush now, even within a ``with`` block.

        Raises:
            Exception: first error of a flush, raised after all other flushes.
        """
        was_held, self._is_held = self._is_held, True  # streams touched by a flush are flushed in this loop too
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
        """Do not flush until the pass ends."""
        self._is_held = True
        self._deferred = []
        self._has_arrived = False

    def end_pass(self, is_late: bool) -> None:
        """Run the deferred callbacks, and flush.

        Arguments:
            is_late: the pass has used up its time, so deferred callbacks wait for the next turn of the loop.

        Raises:
            Exception: first error of a callback or flush, raised after all others.
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
        """Call back at the end of the current pass, which saves a turn of the loop. Returns False outside of a pass.

        Arguments:
            callback: does work that all requests of the pass share.
        """
        if self._deferred is None:
            return False
        self._deferred.append(callback)
        return True

    def expect(self, callers: int) -> None:
        """Note answered callers: each may send its next request as soon as it has read the answer.

        Arguments:
            callers: number of callers.
        """
        self._expected += callers

    def arrived(self) -> None:
        """Note a request with deferred work; it counts as one of the expected callers."""
        self._has_arrived = True
        if self._expected > 0:
            self._expected -= 1

    def expect_none(self) -> None:
        """Stop expecting callers: they take too long."""
        self._expected = 0

    @property
    def awaits_more(self) -> bool:
        """Whether the current pass has a request with deferred work, and more requests that could share it are due."""
        return self._has_arrived and self._expected > 0

    def __enter__(self) -> None:
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        self.flush()
