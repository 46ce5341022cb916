"""Long work on the loop, done in slices between all other work. Most of it reads many keys.

    job = slices.run(begin, failed, size, user) # begin() -> a generator that pauses after each small piece of work
    job.cancel()                                # the client has left: stop the job where it is
    await slices.result(begin, size, user)      # the same for a coroutine
    await on_thread(job, give_up)               # blocking work: its thread has ended when this returns

Each pass of the loop gives at most ``TURN_S`` to all jobs together, and at most ``INLINE_S`` more to jobs that begin
in it (and ``SLICE_S`` to one urgent job, ``run_ahead``). So puts and heartbeats never wait longer than a few
milliseconds. A job that fits into the rest of ``INLINE_S`` is completed at once, without another pass. Other jobs take
turns of ``SLICE_S``.

Two lanes share the time equally, so short jobs never wait for long ones; ``size`` selects the lane. Within a lane each
identity has an equal part of the time, however many jobs it has (``fair``). A lane works on few jobs at a time and
begins the next when one ends: waiting jobs hold no results, and every active job finishes. An identity without an
active job may begin one even in a full lane, until twice as many jobs are active.

Leaves out: the work of jobs and their answers; how long a job may take, except that ``hold`` limits how long it may
keep history from being compacted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator
from heapq import merge
from itertools import islice
from time import perf_counter
from typing import Any, Final, Protocol, TypeVar

from raftkv.loop.fair import EQUAL, MEMBER, FairQueue, Identity, Weights

T = TypeVar("T", bound=Any)
Work = Generator[None, None, T]

TURN_S: Final = 0.002
SLICE_S: Final = 0.001
INLINE_S: Final = 0.003
SHORT_KEYS: Final = 10_000
"""Jobs above this size go to the lane for long jobs."""
SHORT_ACTIVE_MAX: Final = 64
LONG_ACTIVE_MAX: Final = 4
RUN_ITEMS: Final = 1000
"""Items that are sorted or joined at once."""
RUN_BYTES: Final = 256 * 1024
"""Bytes that are joined at once."""
HOLD_MAX_S: Final = 30.0
"""How long a job may keep the data that it reads from being compacted."""


class Job:
    """One piece of work; created by ``Slices.run``."""

    __slots__ = ("_begin", "_failed", "_is_running", "_work", "identity", "is_over", "lane")

    def __init__(
        self, begin: Callable[[], Work[None]], failed: Callable[[Exception], None], lane: _Lane, identity: Identity
    ) -> None:
        self._begin = begin
        self._failed = failed
        self._work: Work[None] | None = None
        self._is_running = False
        self.is_over = False
        self.lane = lane
        self.identity = identity

    def step(self, until: float) -> bool:
        """Work until a moment of ``perf_counter``, for at least one piece. Returns whether the job has ended."""
        self._is_running = True
        try:
            if self._work is None:
                self._work = self._begin()
            while not self.is_over:
                next(self._work)
                if perf_counter() >= until:
                    break
        except StopIteration:
            self.is_over = True
        except Exception as error:
            self.is_over = True
            self._failed(error)
        self._is_running = False
        if self.is_over and self._work is not None:
            self._work.close()
        return self.is_over

    def cancel(self) -> None:
        """Stop the job, unless it has ended: its result is no longer needed."""
        if not self.is_over:
            self.is_over = True
            self.lane.remove(self)
            if self._work is not None and not self._is_running:
                self._work.close()


class _Lane:
    """Jobs of one kind: some are active and take turns, the others wait."""

    def __init__(self, active_max: int, weights: Weights) -> None:
        self._active_max = active_max
        self._active = FairQueue[Job](weights=weights)
        self._waiting = FairQueue[Job](perf_counter, weights)

    def __len__(self) -> int:
        return len(self._active) + len(self._waiting)

    def has_room(self, identity: Identity) -> bool:
        """Return whether another job of an identity may begin."""
        if self._waiting.has(identity):
            return False  # its older jobs come first
        active = len(self._active)
        return active < self._active_max or (active < 2 * self._active_max and not self._active.has(identity))

    def wait_s(self, identity: Identity) -> float:
        """Return about how long a new job of an identity would wait to begin."""
        return self._waiting.wait_s(identity)

    def add(self, job: Job) -> None:
        """Begin a job now if there is room, otherwise when its turn comes."""
        (self._active if self.has_room(job.identity) else self._waiting).add(job.identity, job)

    def remove(self, job: Job) -> None:
        """Remove a job, if it is here; the next may begin."""
        self._active.discard(job.identity, job)
        self._waiting.discard(job.identity, job)
        self._begin_next()

    def _begin_next(self) -> None:
        while len(self._waiting) and len(self._active) < self._active_max:
            identity, job = self._waiting.pop()
            self._waiting.charge(identity, 1)
            self._active.add(identity, job)
        # An identity without an active job may begin one in a full lane, and later arrivals must not overtake it.
        while len(self._active) < 2 * self._active_max:
            found = self._waiting.pop_other_than(self._active.has)
            if found is None:
                break
            self._waiting.charge(found[0], 1)
            self._active.add(*found)

    def step(self, until: float, charge: Callable[[Identity, float], None]) -> None:
        """Run a slice of the next job."""
        began = perf_counter()
        identity, job = self._active.pop()
        is_over = True
        try:
            is_over = job.step(until)
        finally:
            took_s = perf_counter() - began
            self._active.charge(identity, took_s)
            charge(identity, took_s)
            if not is_over:
                self._active.add(identity, job)
            self._begin_next()


class Slices:
    """The long work of one member. It belongs to the loop on which it was created.

    Arguments:
        weights: as in ``FairQueue``.

    Attributes:
        charge: called with an identity and the seconds that were worked for it.
    """

    def __init__(self, weights: Weights = EQUAL) -> None:
        self.charge: Callable[[Identity, float], None] = lambda identity, seconds: None
        self._loop = asyncio.get_running_loop()
        self._short = _Lane(SHORT_ACTIVE_MAX, weights)
        self._long = _Lane(LONG_ACTIVE_MAX, weights)
        self._ahead = _Lane(SHORT_ACTIVE_MAX, weights)
        self._scheduled = False
        self._inline_left_s = INLINE_S
        self.is_late = False
        """Whether this pass of the loop has no time left for jobs: new ones wait for the next pass."""

    def __len__(self) -> int:
        return len(self._short) + len(self._long) + len(self._ahead)

    def run(
        self, begin: Callable[[], Work[None]], failed: Callable[[Exception], None], size: int, identity: Identity
    ) -> Job:
        """Do some work: now, if there is time, otherwise when its turn comes.

        Arguments:
            begin: returns the generator; called when the job's turn comes.
            failed: called with the error that ended the job, also one of ``begin``.
            size: approximate number of keys that the job reads.
            identity: identity that the job works for; ``MEMBER``: no client.
        """
        lane = self._long if size > SHORT_KEYS else self._short
        job = Job(begin, failed, lane, identity)
        if not self.is_late and lane.has_room(identity) and self._begin(job, min(SLICE_S, self._inline_left_s)):
            return job
        lane.add(job)
        self._schedule()
        return job

    def wait_s(self, size: int, identity: Identity) -> float:
        """Return about how long a new job would wait; 0: not at all, or unknown."""
        return (self._long if size > SHORT_KEYS else self._short).wait_s(identity)

    def run_ahead(self, begin: Callable[[], Work[None]], failed: Callable[[Exception], None], *, at_once: bool) -> None:
        """Do rare, urgent work ahead of all waiting jobs, for example revoking a right.

        Arguments:
            begin, failed: as in ``run``.
            at_once: run a slice now, even if this pass of the loop has no time left.
        """
        job = Job(begin, failed, self._ahead, MEMBER)
        if (at_once or not self.is_late) and self._begin(job, SLICE_S):
            return
        self._ahead.add(job)
        self._schedule()

    def _begin(self, job: Job, seconds: float) -> bool:
        """Run the first slice of a job. Returns whether the job has ended."""
        started_at = perf_counter()
        is_over = job.step(started_at + seconds)
        self.spend(perf_counter() - started_at)
        return is_over

    def spend(self, seconds: float) -> None:
        """Subtract time that a caller spent on such work from this pass of the loop."""
        self._inline_left_s -= seconds
        self.is_late = self._inline_left_s <= 0
        self._schedule()

    async def result(self, begin: Callable[[], Work[T]], size: int, identity: Identity) -> T:
        """Do some work for a coroutine. Cancelling the coroutine cancels the work.

        Arguments:
            begin: returns the generator.
            size: approximate number of keys or items that the work reads.
            identity: as in ``run``.

        Raises:
            Exception: error of the work.
        """
        done: asyncio.Future[T] = self._loop.create_future()

        def work() -> Work[None]:
            value = yield from begin()
            if not done.done():
                done.set_result(value)

        def failed(error: Exception) -> None:
            if not done.done():
                done.set_exception(error)

        job = self.run(work, failed, size, identity)
        try:
            return await done
        finally:
            job.cancel()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Work on jobs for one pass of the loop."""
        self._scheduled = False
        self._inline_left_s, self.is_late = INLINE_S, False
        first, second = self._short, self._long
        try:
            if self._ahead:
                self._ahead.step(perf_counter() + SLICE_S, self.charge)
            now = perf_counter()
            until = now + TURN_S
            while (first or second) and now < until:
                if not first:
                    first, second = second, first
                first.step(min(now + SLICE_S, until), self.charge)
                first, second = second, first
                now = perf_counter()
        finally:
            if first or second or self._ahead:
                self._schedule()


def in_order(items: Iterable[T]) -> Work[Iterator[T]]:
    """Sort items, with pauses. The returned iterator yields them one by one; its user must pause too."""
    runs: list[list[T]] = []
    source = iter(items)
    while run := sorted(islice(source, RUN_ITEMS)):
        runs.append(run)
        yield
    return merge(*runs)


def encoded(items: Iterable[T], encode: Callable[[T], bytes]) -> Work[list[bytes]]:
    """Encode items, with pauses. Returns the pieces of an answer, in order.

    Arguments:
        items: must not change until the end.
        encode: returns the bytes of one item.
    """
    pieces: list[bytes] = []
    size_bytes = 0
    run: list[bytes] = []
    for item in items:
        run.append(encode(item))
        size_bytes += len(run[-1])
        if len(run) == RUN_ITEMS or size_bytes >= RUN_BYTES:
            pieces.append(b"".join(run))
            run, size_bytes = [], 0
            yield
    if run:
        pieces.append(b"".join(run))
    return pieces


class Pinned(Protocol):
    """A view of the current state that keeps history from being compacted."""

    def let_go(self) -> None:
        """Release the view: history may be compacted."""


V = TypeVar("V", bound=Pinned)


def hold(pin: Callable[[], V], work_on: Callable[[V], Work[T]]) -> Work[T]:
    """Work on a pinned view. The view is released at the end of the work, at the latest after ``HOLD_MAX_S``.

    Arguments:
        pin: creates the view.
        work_on: works on the view, with pauses.
    """
    view = pin()
    until = perf_counter() + HOLD_MAX_S
    work = work_on(view)
    try:
        while True:
            try:
                next(work)
            except StopIteration as end:
                value: T = end.value
                return value
            yield
            if perf_counter() > until:
                view.let_go()
    finally:
        work.close()
        view.let_go()


def _go_on() -> None:
    """Let a job run to its end."""


async def on_thread(job: Callable[[], T], give_up: Callable[[], None] = _go_on) -> T:
    """Run a job on a thread, and wait until it ends even if cancelled: the caller then deletes the job's files.

    Deleting them while the thread still runs would fail, and that error would replace the cancellation.

    Arguments:
        job: blocking work.
        give_up: called on each cancellation; may make the job end soon.
    """
    running = asyncio.ensure_future(asyncio.to_thread(job))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
            give_up()
    if cancelled is not None:
        running.exception()  # marks the exception as retrieved
        raise cancelled
    return running.result()
