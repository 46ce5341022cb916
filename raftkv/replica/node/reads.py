"""Linearizable reads, batched: all waiting reads share one ReadIndex round (thesis section 6.4).

    read arrives --> waiting --> round started --> index confirmed by a quorum --> applied >= index --> served
                     (while another round is in progress)

This module keeps the readers of each round. A reader joins only a round that starts after it arrived: a round already
in progress may have been confirmed before the last write that the reader must see.

A round is repeated with a **new** id when no response comes: an id used twice could be answered by an old confirmation
that a paused process finds in its socket (etcd issue 20418). Every id of a round was issued after all its readers
arrived, so a response to any of them is valid.

A reader may allow the state to have a certain age (``add_within``). It is served at once while this member's state is
certainly not older: the state that covers the index of a confirmed round has everything that was committed when that
round *began*. The beginning is read from this member's own clock; no other clock is used, and time in which the machine
was suspended counts. Otherwise such a reader joins a round, possibly one in progress that began recently enough.

While the leader's read lease holds (``raft/read_lease``), its readers need no round (``add_at``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Final, Protocol

from mypy_extensions import mypyc_attr

from raftkv import errors
from raftkv.histograms import Buckets, doubling
from raftkv.suspend_clock import SuspendClock

RETRY_S: Final = 0.5
"""Seconds after which a round without a response is repeated (etcd: readIndexRetryTime)."""


READERS_AT_ONCE: Final = 500
"""Readers that are served, or failed, in one turn of the loop: 10 ms. A slow round may gather any number."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Reader(Protocol):
    """A request that waits until the member's state is recent enough."""

    @property
    def is_over(self) -> bool:
        """Return whether its caller has left."""

    def ready(self) -> None:
        """Serve the request now."""

    def fail(self, error: errors.StatusError) -> None:
        """Fail the request: it cannot be served."""


class _Gone:
    """Replaces a reader whose caller has left, until its turn comes."""

    is_over = True

    def ready(self) -> None:
        """Do nothing."""

    def fail(self, error: errors.StatusError) -> None:
        """Do nothing."""


_GONE: Final = _Gone()

Marks = list[tuple[float, int]]
"""Times, and the number of readers that had arrived by then; ascending. Readers themselves have no time."""


class _Round:
    __slots__ = ("asked_at", "contexts", "marks", "readers", "started_at")

    def __init__(self, readers: list[Reader], marks: Marks, now: float) -> None:
        self.readers = readers
        self.marks = marks
        self.contexts: set[bytes] = set()
        self.started_at = now
        self.asked_at = now


class ReadQueue:
    """The waiting reads of a member.

    Arguments:
        ask: starts a ReadIndex with this context in the Raft core; it may be lost.
        ids: fresh request ids.
        timeout_s: longest wait of a reader.
        wake: requests another turn, in which ``serve`` is called.
        on_served: called with the number of readers that are served next.

    Attributes:
        waiting: readers of the next round, which ``start`` begins.
        confirmed: rounds whose index may not be applied yet, with their readers; ``applied`` handles them.
        due, failed: readers whose wait has ended; ``serve`` handles them.
    """

    def __init__(
        self,
        ask: Callable[[bytes], None],
        ids: Iterator[int],
        timeout_s: float,
        wake: Callable[[], None],
        on_served: Callable[[int], None] = lambda readers: None,
    ) -> None:
        self._wake = wake
        self._on_served = on_served
        self._ask = ask
        self._ids = ids
        self._timeout_s = timeout_s
        self.waiting: list[Reader] = []
        self._marks: Marks = []
        self._round: _Round | None = None
        self.confirmed: deque[tuple[int, float, list[Reader]]] = deque()
        self.due: deque[Reader] = deque()
        self.failed: deque[tuple[Reader, errors.StatusError]] = deque()
        # The state has everything committed before this time; rounds from before a suspension do not count.
        self._fresh_at = -math.inf
        self._awake_since = -math.inf
        self._sleep = SuspendClock()
        self.durations = Buckets(doubling(0.0001, 20))
        """Durations of serving readers once their round is confirmed, in seconds."""
        self.rounds_retried = 0
        self.reads_failed = 0

    def add(self, reader: Reader, now: float) -> None:
        """Queue a reader; ``start`` begins its round.

        Arguments:
            reader: called when it may read.
            now: loop time.
        """
        if not self.waiting:
            self._marks.append((now, 1))
        self.waiting.append(reader)

    def add_at(self, reader: Reader, index: int, applied: int, now: float) -> None:
        """Serve a reader that needs no round, now or once an index is applied.

        Arguments:
            reader: called when it may read.
            index: index that it must see.
            applied: index that is applied here.
            now: loop time.
        """
        if index <= applied:
            reader.ready()
        else:
            self.confirmed.append((index, now, [reader]))

    def add_within(self, reader: Reader, staleness_s_max: float, now: float) -> None:
        """Serve a reader now, if the state is recent enough for it, or queue it; ``start`` begins its round.

        Arguments:
            reader: called when it may read.
            staleness_s_max: maximum age of the state; 0 as in ``add``.
            now: loop time.
        """
        self._notice_sleep(now)
        oldest = now - staleness_s_max
        if self._fresh_at > oldest:
            reader.ready()
            return
        # A round without a response for long is probably lost, and with it the readers that would join it.
        begun_after = max(oldest, now - RETRY_S, self._awake_since)
        for _, started_at, readers in self.confirmed:
            if started_at > begun_after:
                readers.append(reader)
                return
        if self._round is not None and self._round.started_at > begun_after:
            self._round.readers.append(reader)
            return
        self.add(reader, now)

    def _notice_sleep(self, now: float) -> None:
        if self._sleep.has_slept():
            self._awake_since = now
            self._fresh_at = -math.inf

    def start(self, now: float) -> None:
        """Begin a round for all waiting readers, unless one is in progress."""
        if self._round is None and self.waiting:
            self._round = _Round(self.waiting, self._marks, now)
            self.waiting, self._marks = [], []
            self._ask_round(self._round, now)

    def confirm(self, context: bytes, index: int, applied: int, now: float) -> None:
        """Handle the confirmation of a round; an unknown context is ignored.

        Arguments:
            context: id of the round.
            index: commit index when a quorum confirmed it.
            applied: index that is applied here now.
            now: loop time.
        """
        current = self._round
        if current is None or context not in current.contexts:
            return
        self._round = None
        self.confirmed.append((index, current.started_at, current.readers))
        self.applied(applied)
        self.start(now)

    def applied(self, index: int) -> None:
        """Serve the readers of rounds confirmed at or below the applied index; if they are too many, the rest is left
        for ``serve``.
        """
        while self.confirmed and self.confirmed[0][0] <= index:
            _, started_at, readers = self.confirmed.popleft()
            if started_at >= self._awake_since:
                self._fresh_at = started_at
            self.due.extend(readers)
        self.serve()

    def serve(self) -> None:
        """Serve, or fail, some of the readers whose wait has ended; nearly always there are few, or none."""
        left = READERS_AT_ONCE
        while self.failed and left:
            left -= 1
            reader, error = self.failed.popleft()
            reader.fail(error)
        if self.due and left:
            began_s = perf_counter()
            served = min(left, len(self.due))
            self._on_served(served)
            for _ in range(served):
                self.due.popleft().ready()
            # The clock is read once for all: the average duration counts for each.
            self.durations.observe((perf_counter() - began_s) / served, served)
        if self.due or self.failed:
            self._wake()

    def leader_changed(self, now: float) -> None:
        """Ask the new leader: the old one may never respond."""
        if self._round is not None:
            self._ask_round(self._round, now)

    def tick(self, now: float) -> None:
        """Repeat a round without a response; fail only readers that waited too long.

        Readers that arrived during a cancelled round wait for the next.
        """
        groups = [self.waiting, *(readers for _, _, readers in self.confirmed)]
        for readers in groups if self._round is None else [*groups, self._round.readers]:
            _forget_over(readers)
        oldest = now - self._timeout_s
        late = _take_late(self.waiting, self._marks, oldest)
        if self.waiting and (not self._marks or self._marks[-1][1] < len(self.waiting)):
            self._marks.append((now, len(self.waiting)))
        current = self._round
        if current is not None and current.started_at < oldest:
            late += current.readers
            self._round = None
        elif current is not None:
            late += _take_late(current.readers, current.marks, oldest)
            if not current.readers:
                self._round = None
            elif current.asked_at < now - RETRY_S:
                self.rounds_retried += 1
                self._ask_round(current, now)
        if late:
            self._fail(late, errors.RequestTimeoutError())
        while self.confirmed and self.confirmed[0][1] < oldest:
            self._fail(self.confirmed.popleft()[2], errors.WaitAppliedTimeoutError())
        self.start(now)

    def close(self) -> None:
        """Fail everything, because the member stops."""
        readers = [*self.due, *(reader for _, _, group in self.confirmed for reader in group)]
        readers += self.waiting + (self._round.readers if self._round else [])
        self.confirmed.clear()
        self.due.clear()
        self.waiting, self._marks = [], []
        self._round = None
        self._fail(readers, errors.StoppedError())
        while self.failed:
            self.serve()

    def _ask_round(self, current: _Round, now: float) -> None:
        context = next(self._ids).to_bytes(8, "big")
        current.contexts.add(context)
        current.asked_at = now
        self._ask(context)

    def _fail(self, readers: list[Reader], error: errors.StatusError) -> None:
        self.reads_failed += len(readers)
        self.failed.extend([(reader, error) for reader in readers])
        self.serve()


def _forget_over(readers: list[Reader]) -> None:
    """Drop calls that have ended: a round may last until there is a leader again."""
    for at, reader in enumerate(readers):
        if reader.is_over:
            readers[at] = _GONE


def _take_late(readers: list[Reader], marks: Marks, oldest: float) -> list[Reader]:
    """Remove and return the readers that arrived before a time.

    Arguments:
        readers, marks: in order.
        oldest: the time.
    """
    count = passed = 0
    for moment, come in marks:
        if moment >= oldest:
            break
        count, passed = come, passed + 1
    if not count:
        return []
    late = readers[:count]
    del readers[:count]
    marks[:] = [(moment, come - count) for moment, come in marks[passed:]]
    return late
