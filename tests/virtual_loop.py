"""Virtual time: one event loop for each node, all driven by one seeded scheduler.

Controls the clock and the order of all events. Production code runs unchanged: it sees an asyncio loop, and
``loop.time``, ``asyncio.sleep``, ``asyncio.timeout`` and ``time.time`` show the time of *its* machine, which may be an
hour ahead.

Invariants:
1. Time is a whole number of ticks and only grows; a timer never fires early, by the clock of its own loop.
2. Callbacks of one loop run in the order that asyncio guarantees; loops that are ready at the same tick take turns at
   random.
3. A frozen loop runs nothing; when it is thawed, messages that arrived in the meantime run first, then all late timers.
4. A crashed loop never runs anything again, not even a ``finally`` block, until the simulation has ended.

    scheduler = Scheduler(random.Random(7))
    loop = NodeLoop(scheduler, offset_s=3600.0)
    loop.create_task(agent())
    scheduler.run_until(60.0)

Work on a thread (``run_in_executor``) is executed at one moment, a little later, on the same thread. Not supported:
sockets; a simulation has a simulated network.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import random
import secrets
import time
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")

TICKS_PER_S = 1 << 20
"""A power of two, so that sums of times and offsets are exact."""
WALL_AT_START_S = 1_800_000_000.0
THREAD_DELAY_S = 0.001
"""Longest delay of a job for a thread."""
CALLBACKS_MAX = 3_000_000
"""Far above the need of any simulation: code that spins without waiting is an error, not a hang."""
TEARDOWN_TURNS = 200


class SpinningError(Exception):
    """A loop never becomes idle: something runs repeatedly without waiting."""


class Scheduler:
    """The only source of time and order.

    Attributes:
        now_ticks: current time.
        random: decides the order of events at the same tick.
        loops: all loops ever created, crashed ones too.
        failures: reports to the loops' exception handlers, as text.
    """

    def __init__(self, source: random.Random) -> None:
        self.now_ticks = 0
        self.random = source
        self.loops: list[NodeLoop] = []
        self.failures: list[str] = []
        self.running: NodeLoop | None = None
        self._queue: list[tuple[int, float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0
        self._callbacks = 0

    @property
    def now(self) -> float:
        """Seconds since the start, exactly."""
        return self.now_ticks / TICKS_PER_S

    def after(self, delay_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Run an action after a delay; 0: at this tick, in random order with the other actions."""
        self.at_ticks(self.now_ticks + math.ceil(delay_s * TICKS_PER_S), action, *arguments)

    def at_ticks(self, ticks: int, action: Callable[..., object], *arguments: Any) -> None:
        """Run an action at a tick, or now if the tick has passed."""
        self._number += 1
        entry = (max(ticks, self.now_ticks), self.random.random(), self._number, action, arguments)
        heapq.heappush(self._queue, entry)

    def wake(self, action: Callable[[], object]) -> None:
        """Run an action at this tick: ``after`` without delay, for the many times that a loop requests its turn."""
        self._number += 1
        heapq.heappush(self._queue, (self.now_ticks, self.random.random(), self._number, action, ()))

    def run_until(self, deadline_s: float, stop: Callable[[], bool] | None = None) -> bool:
        """Advance time to a deadline; return True if ``stop`` held before."""
        deadline_ticks = math.ceil(deadline_s * TICKS_PER_S)
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= deadline_ticks:
            if stop is not None and stop():
                return True
            self.now_ticks, _, _, action, arguments = pop(queue)
            action(*arguments)
        self.now_ticks = max(self.now_ticks, deadline_ticks)
        return stop is not None and stop()

    def count(self, callbacks: int) -> None:
        """Add to the number of executed callbacks."""
        self._callbacks += callbacks
        if self._callbacks > CALLBACKS_MAX:
            raise SpinningError(f"{CALLBACKS_MAX} callbacks by {self.now:.3f} s")

    @contextlib.contextmanager
    def ambient(self) -> Iterator[None]:
        """During the block, ``time.time`` is that of the running program, and ids are not truly random."""
        wall, token = time.time, secrets.token_hex
        names = random.Random(self.random.random())
        time.time = lambda: WALL_AT_START_S + self._local()
        secrets.token_hex = lambda nbytes=None: names.randbytes(nbytes or 32).hex()
        try:
            yield
        finally:
            time.time, secrets.token_hex = wall, token

    def _local(self) -> float:
        return self.running.time() if self.running is not None else self.now

    def tear_down(self) -> None:
        """End all remaining tasks, so that nothing of this simulation runs when it is garbage-collected."""
        for loop in self.loops:
            loop.tear_down()
        self._queue.clear()


class NodeLoop(asyncio.AbstractEventLoop):
    """The event loop of one node.

    Arguments:
        scheduler: source of its time.
        offset_s: seconds by which its clock is ahead; a multiple of a tick.
        name: name in traces.
    """

    turns_in_a_row = 1
    """Turns that it may have at one tick before other loops get theirs; more turns are faster."""

    def __init__(self, scheduler: Scheduler, offset_s: float = 0.0, name: str = "") -> None:
        self.name = name
        self.offset_s = math.floor(offset_s * TICKS_PER_S) / TICKS_PER_S
        self.frozen = False
        self.crashed = False
        self._scheduler = scheduler
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._number = 0
        self._due = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._torn = False
        self._steps_left = -1
        scheduler.loops.append(self)

    # ---- control by the simulation

    def freeze(self) -> None:
        """Stop the machine, as SIGSTOP or a hypervisor would."""
        self.frozen = True

    def thaw(self) -> None:
        """Resume the machine."""
        self.frozen = False
        self._wake()

    def crash(self) -> None:
        """End the loop in the middle of its work."""
        self.crashed = True

    def crash_after(self, steps: int) -> None:
        """End the loop after a number of further callbacks, in the middle of a turn or between two."""
        self._steps_left = steps

    def enter(self, callback: Callable[..., T], *args: Any) -> T:
        """Call a function now, with this loop running; its exceptions go to the caller."""
        self._scheduler.running = self
        events._set_running_loop(self)
        try:
            return callback(*args)
        finally:
            events._set_running_loop(None)
            self._scheduler.running = None

    def died(self) -> None:
        """Called when ``crash_after`` has ended the loop."""
        self.crash()

    def turned(self) -> None:
        """Called after each turn in which something ran."""

    def tear_down(self) -> None:
        """Cancel all tasks, and run only the resulting callbacks."""
        self._torn = True
        self._timers.clear()
        for task in list(self._tasks):
            task.cancel()
        for _ in range(TEARDOWN_TURNS):
            if not self._ready:
                break
            self._run_ready()

    # ---- time

    def time(self) -> float:
        return self._scheduler.now_ticks / TICKS_PER_S + self.offset_s

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._wake()
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, handle))
        self._scheduler.at_ticks(math.ceil((when - self.offset_s) * TICKS_PER_S), self._timer_due, handle)
        return handle

    def _timer_due(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            self._turn()

    def _wake(self) -> None:
        if not self._due and not self._torn:
            self._due = True
            self._scheduler.wake(self._turn)

    def _turn(self) -> None:
        """Run one iteration like asyncio's: ready callbacks, then due timers."""
        self._due = False
        if self.frozen or self.crashed:
            return
        now = self.time()
        while self._timers and self._timers[0][0] <= now:
            self._ready.append(heapq.heappop(self._timers)[2])
        for _ in range(self.turns_in_a_row):
            if not self._ready:
                return
            self._run_ready()
            if self.crashed or self.frozen:
                return
            self.turned()
        if self._ready:
            self._wake()

    def _run_ready(self) -> None:
        ready, count = self._ready, len(self._ready)
        self._scheduler.count(count)
        self._scheduler.running = self
        events._set_running_loop(self)
        try:
            for _ in range(count):
                if self._steps_left >= 0:
                    self._count_down()
                if self.crashed and not self._torn:
                    return
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
        finally:
            events._set_running_loop(None)
            self._scheduler.running = None

    def _count_down(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0 and not self._torn:
            self.died()

    # ---- tasks and futures

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        delay_s = self._scheduler.random.uniform(0.0, THREAD_DELAY_S)
        self.call_later(delay_s, _work, future, func, *args)
        return future

    # ---- the rest of asyncio's interface

    def is_running(self) -> bool:
        return events._get_running_loop() is self

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is skipped when it is due."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._torn:
            return
        error = context.get("exception")
        self._scheduler.failures.append(f"{self.name}: {context.get('message')}: {error!r}")


def _work(future: asyncio.Future[T], func: Callable[..., T], *args: Any) -> None:
    try:
        result = func(*args)
    except Exception as error:
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(result)
