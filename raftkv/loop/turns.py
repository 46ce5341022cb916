"""The event loop of a member, and how long its turns take: during a turn it answers no request and no heartbeat.

Owns the loop and its selector. A turn is the time between two waits for events. It includes everything except the
waiting: callbacks, tasks, an inline sync, a pause of the process. Measuring costs 0.4 us a turn.

    selector = TurnSelector(turns := LoopTurns())
    asyncio.Runner(loop_factory=lambda: MemberLoop(selector))

Turns are reported in three ways: the histogram ``raftkv_loop_turn_seconds``; gauges of the longest turn since the last
scrape (two scrapers each see a part of the turns); and a warning for a turn above ``TURN_LIMIT_S``, at most one a
second, that names the functions which ran. A thread samples the loop ten times a second to find these names, so short
turns cost it nothing. (It cannot sample more often: each sample takes the interpreter lock from a busy loop, which on
a crowded machine costs more than a turn.) On Linux the loop also knows how long its thread waited for a processor.
``own`` is the turn without that wait: the member's own work, including syncs and waits for the interpreter lock.
The measured wait may begin up to 20 ms before the turn, so ``own`` may be too short by that much.

Leaves out: cutting long work into slices (``scheduler``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import selectors
import sys
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from math import ceil
from time import monotonic
from types import FrameType
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raftkv.histograms import Buckets, histogram_family

TURN_LIMIT_S: Final = 0.05
"""Longest turn that a request of a client may cause."""
WARNING_INTERVAL_S: Final = 1.0
LOOK_INTERVAL_S: Final = 0.1
SEEN_AFTER_S: Final = 0.01
"""A turn that has lasted this long when it is sampled is noted; most turns end sooner."""
SAMPLE_INTERVAL_S: Final = 0.02
"""Longest age of the base sample for processor waits. Reading a sample costs 4 us."""
EVENTS_MAX: Final = 16
"""Readers that run before the kernel is asked again."""
FOREVER_S: Final = 3600.0
FRAMES_MAX: Final = 4
"""Functions named in a warning, the innermost first."""
_BUCKETS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

_log = logging.getLogger(__name__)


class LoopTurns(Collector):
    """Statistics of the turns of one loop. Only the loop's thread writes them; scrapes run there too.

    Attributes:
        buckets: buckets of the histogram.
        longest_s, longest_own_s: longest turn since the last scrape, by the clock, and without waits for a
            processor.
        notable_s: longest turn that needs no attention: a longer one is the longest so far, or too long.
    """

    def __init__(self) -> None:
        self.buckets = Buckets(_BUCKETS_S)
        self.longest_s = self.longest_own_s = self.notable_s = 0.0
        self._warned_at = float("-inf")
        self._unreported = 0

    def notable(self, seconds: float, own_seconds: float, work: str, now: float) -> None:
        """Count a turn that took longer than ``notable_s``.

        Arguments:
            seconds: length by the clock.
            own_seconds: length without waits for a processor.
            work: functions that were seen running; empty: none.
            now: monotonic seconds.
        """
        self.longest_s = max(self.longest_s, seconds)
        self.longest_own_s = max(self.longest_own_s, own_seconds)
        self.notable_s = min(self.longest_own_s, TURN_LIMIT_S)
        if seconds > TURN_LIMIT_S:
            self._warn(seconds, own_seconds, work, now)

    def _warn(self, seconds: float, own_seconds: float, work: str, now: float) -> None:
        if now - self._warned_at < WARNING_INTERVAL_S:
            self._unreported += 1
            return
        others = f"; {self._unreported} other long turns since the last such line" if self._unreported else ""
        _log.warning(
            "slow turn of the event loop: %.0f ms, %.0f ms without waits for a CPU, in %s%s",
            seconds * 1e3,
            own_seconds * 1e3,
            work or "work that ended before it could be named",
            others,
        )
        self._warned_at = now
        self._unreported = 0

    def collect(self) -> Iterator[Metric]:
        """Yield all families. The longest turn is reset by each scrape."""
        longest_s, own_s = self.longest_s, self.longest_own_s
        self.longest_s = self.longest_own_s = self.notable_s = 0.0
        text = "How long turns of the event loop take."
        yield histogram_family("raftkv_loop_turn_seconds", text, {(): self.buckets})
        text = "The longest turn of the event loop since the last scrape."
        yield GaugeMetricFamily("raftkv_loop_turn_longest_seconds", text, longest_s)
        text = "The longest turn since the last scrape, without waits for a processor."
        yield GaugeMetricFamily("raftkv_loop_turn_longest_own_seconds", text, own_s)


class TurnSelector(selectors.DefaultSelector):
    """A selector that measures the time its loop spends between two calls of ``select``.

    Arguments:
        turns: receives every turn.
    """

    def __init__(self, turns: LoopTurns) -> None:
        super().__init__()
        self.turns = turns
        self._wait = super().select
        self.turn = 0
        """Number of the current turn; 0: none has begun."""
        self.began = 0.0
        """When the current turn began; 0: the loop waits for events."""
        self._waits: _Waits | None = None
        self._onlooker: _Onlooker | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """End a turn, wait, begin the next one."""
        self.end_turn()
        ready = self._wait(timeout)
        self.begin_turn()
        return ready

    def begin_turn(self) -> None:
        """Begin a turn: the wait for events has ended."""
        self.turn += 1
        self.began = monotonic()

    def end_turn(self) -> None:
        """Count the current turn, if there is one."""
        turns, began = self.turns, self.began
        if began:
            now = monotonic()
            seconds = now - began
            buckets = turns.buckets
            buckets.counts[bisect_left(_BUCKETS_S, seconds)] += 1
            buckets.total += seconds
            if seconds > turns.notable_s:
                self._notable(seconds, now)
            elif self._waits is not None and now - self._waits.sampled_at > SAMPLE_INTERVAL_S:
                self._waits.since_sample_s(now)
            self.began = 0.0
        elif self._onlooker is None:
            # The first call. It runs on the loop's own thread: the waits and frames of that thread are measured.
            self._waits = _Waits()
            self._onlooker = _Onlooker(self)

    def _notable(self, seconds: float, now: float) -> None:
        waited_s = self._waits.since_sample_s(now) if self._waits is not None else 0.0
        number, work = self._onlooker.seen if self._onlooker is not None else (0, "")
        self.turns.notable(seconds, max(0.0, seconds - waited_s), work if number == self.turn else "", now)

    def disregard(self) -> None:
        """Do not count the current turn: a member that is opening its data has no clients yet."""
        self.began = 0.0
        if self._waits is not None:
            self._waits.since_sample_s(monotonic())

    def close(self) -> None:
        """Close the selector, and stop its threads."""
        if self._onlooker is not None:
            self._onlooker.stop()
        if self._waits is not None:
            self._waits.close()
        super().close()


class MemberLoop(asyncio.SelectorEventLoop):
    """The loop of a member. It calls readers as soon as the kernel reports their descriptors.

    For each event asyncio makes an object and queues a handle, and it goes through its queues and timers before and
    after. That takes longer than finding one request in a pass over the sockets. While nothing is queued and no timer
    is due, this loop therefore calls readers directly. Their descriptors have no writers.

    Arguments:
        selector: counts the turns of the loop.
    """

    time = staticmethod(monotonic)
    """The C function itself, without a wrapper: the clock is read several times for each request."""
    # Attributes of asyncio: callbacks of the next turn, a heap of timers, whether the loop is to stop.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool

    def __init__(self, selector: TurnSelector) -> None:
        super().__init__(selector)
        self._turns = selector
        self._readers: dict[int, Callable[[], object]] = {}
        # Each of the two objects closes its own descriptor.
        self._epoll = select.epoll.fromfd(os.dup(selector.fileno())) if hasattr(select, "epoll") else None

    def add_reader(self, fd: Any, callback: Callable[..., object], *arguments: Any) -> None:  # type: ignore[override]
        """Call back each time that a descriptor becomes readable."""
        super().add_reader(fd, callback, *arguments)
        self._readers[fd] = partial(callback, *arguments) if arguments else callback

    def remove_reader(self, fd: Any) -> bool:
        """Stop calling back. Returns whether the descriptor had a reader."""
        self._readers.pop(fd, None)
        return super().remove_reader(fd)

    def close(self) -> None:
        """Close the loop."""
        super().close()
        if self._epoll is not None:
            self._epoll.close()

    def _run_once(self) -> None:
        if self._epoll is not None:
            self._serve_readers(self._epoll)
        super()._run_once()  # type: ignore[misc]

    def _serve_readers(self, epoll: select.epoll) -> None:
        """Call readers until there is other work. asyncio does that work, and asks the kernel once more."""
        queued, timers, readers, turns = self._ready, self._scheduled, self._readers, self._turns
        has_others = False
        while not (queued or has_others or self._stopping):
            wait_s = timers[0].when() - monotonic() if timers else FOREVER_S
            if wait_s <= 0:
                return
            turns.end_turn()
            named = epoll.poll(ceil(wait_s * 1e3) / 1e3, EVENTS_MAX)
            turns.begin_turn()
            has_others = not named
            for fd, _ in named:
                reader = readers.get(fd)
                if reader is None:
                    has_others = True
                    continue
                try:
                    reader()
                except Exception as error:
                    self.call_exception_handler({"message": "a reader failed", "exception": error})


class _Waits:
    """Measures how long the thread that created the object waited for a processor since the previous sample."""

    def __init__(self) -> None:
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1  # not Linux
        self.sampled_at = 0.0
        self._total_s = 0.0
        self.since_sample_s(0.0)

    def since_sample_s(self, now: float) -> float:
        """Take a sample, and return the wait since the previous one."""
        if self._file < 0:
            return 0.0
        # Nanoseconds on a processor, nanoseconds of waiting for one, and how often.
        try:
            total_s = int(os.pread(self._file, 100, 0).split()[1]) / 1e9
        except OSError:
            total_s = self._total_s
        waited_s, self._total_s, self.sampled_at = total_s - self._total_s, total_s, now
        return waited_s

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)


class _Onlooker:
    """The thread that samples the loop. Create it on the loop's own thread.

    Attributes:
        seen: number of the last turn that was found to be long, and the functions that ran in it.
    """

    def __init__(self, selector: TurnSelector) -> None:
        self.seen: tuple[int, str] = (0, "")
        self._selector = selector
        self._loop_thread = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-turns", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        selector = self._selector
        while not self._stopped.wait(LOOK_INTERVAL_S):
            turn, began = selector.turn, selector.began
            if began and monotonic() - began >= SEEN_AFTER_S:
                with contextlib.suppress(MemoryError):
                    self.seen = (turn, name_work(sys._current_frames().get(self._loop_thread)))


def name_work(frame: FrameType | None) -> str:
    """Return the functions of raftkv in a stack, the innermost first: ``storage.index.range < server.kv.range``."""
    names: list[str] = []
    while frame is not None and len(names) < FRAMES_MAX:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("raftkv.") and module != __name__:
            names.append(f"{module.removeprefix('raftkv.')}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    return " < ".join(names)
