"""The event loop of a member, and how long its turns are: during a turn it answers no request and no heartbeat.

Owns the loop and its selector. A turn is the time between two waits for events, so waiting is not part of it, and
everything else is: callbacks, tasks, an inline sync, a pause of the process. Measuring costs 0.4 us a turn.

    selector = TurnSelector(turns := LoopTurns())
    asyncio.Runner(loop_factory=lambda: MemberLoop(selector))

Reported in three ways: the histogram ``raftkv_loop_turn_seconds``; the gauges of the longest turn since the last scrape
(with two scrapers each sees a part); and a warning for a turn above ``TURN_LIMIT_S``, at most one a second, that names
the functions which ran. These names come from a thread that looks at the loop ten times a second, so short turns have
no work with it. (It cannot look more often: each look takes the interpreter lock from a busy loop, which on a crowded
machine costs more than a turn.) On Linux the loop also knows how long it waited for a processor that others had.
``own`` is the turn without that wait: what the member did itself, including syncs and waits for the interpreter lock.
The wait may have begun up to 20 ms before the turn, and ``own`` may be too short by as much.

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
"""A turn that has lasted so long when it is looked at is noted; most end soon."""
SAMPLE_INTERVAL_S: Final = 0.02
"""How old the base may be from which waits for a processor are counted; reading it costs 4 us."""
EVENTS_MAX: Final = 16
"""Readers that are called before the kernel is asked again."""
FOREVER_S: Final = 3600.0
FRAMES_MAX: Final = 4
"""Functions that a warning names, the innermost first."""
_BUCKETS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

_log = logging.getLogger(__name__)


class LoopTurns(Collector):
    """The figures of one loop. Only the loop's thread writes them; a scrape runs there too.

    Attributes:
        buckets: of the histogram.
        longest_s, longest_own_s: the longest turn since the last scrape, by the clock, and without waits for a
            processor.
        notable_s: a turn above this may be the longest, or is too long.
    """

    def __init__(self) -> None:
        self.buckets = Buckets(_BUCKETS_S)
        self.longest_s = self.longest_own_s = self.notable_s = 0.0
        self._warned_at = float("-inf")
        self._unreported = 0

    def notable(self, seconds: float, own_seconds: float, work: str, now: float) -> None:
        """Count a turn that took longer than ``notable_s``.

        Arguments:
            seconds: by the clock.
            own_seconds: without waits for a processor.
            work: names what was seen of it.
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
            "a turn of the event loop took %.0f ms, %.0f ms without waits for a processor, in %s%s",
            seconds * 1e3,
            own_seconds * 1e3,
            work or "work that was over before it was seen",
            others,
        )
        self._warned_at = now
        self._unreported = 0

    def collect(self) -> Iterator[Metric]:
        """All families. The longest turn begins anew with each scrape."""
        longest_s, own_s = self.longest_s, self.longest_own_s
        self.longest_s = self.longest_own_s = self.notable_s = 0.0
        text = "How long turns of the event loop take."
        yield histogram_family("raftkv_loop_turn_seconds", text, {(): self.buckets})
        text = "The longest turn of the event loop since the last scrape."
        yield GaugeMetricFamily("raftkv_loop_turn_longest_seconds", text, longest_s)
        text = "The longest turn since the last scrape, without waits for a processor."
        yield GaugeMetricFamily("raftkv_loop_turn_longest_own_seconds", text, own_s)


class TurnSelector(selectors.DefaultSelector):
    """A selector that times what its loop does between two calls of ``select``.

    Arguments:
        turns: counts every turn.
    """

    def __init__(self, turns: LoopTurns) -> None:
        super().__init__()
        self.turns = turns
        self._wait = super().select
        self.turn = 0
        """The number of the turn under way; 0: none was begun."""
        self.began = 0.0
        """When it began; 0: the loop waits for events."""
        self._waits: _Waits | None = None
        self._onlooker: _Onlooker | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """End a turn, wait, begin the next one."""
        self.end_turn()
        ready = self._wait(timeout)
        self.begin_turn()
        return ready

    def begin_turn(self) -> None:
        """The wait is over."""
        self.turn += 1
        self.began = monotonic()

    def end_turn(self) -> None:
        """Count the turn that ends, if one was begun."""
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
            # The first call: on the loop's own thread, whose waits and frames are meant.
            self._waits = _Waits()
            self._onlooker = _Onlooker(self)

    def _notable(self, seconds: float, now: float) -> None:
        waited_s = self._waits.since_sample_s(now) if self._waits is not None else 0.0
        number, work = self._onlooker.seen if self._onlooker is not None else (0, "")
        self.turns.notable(seconds, max(0.0, seconds - waited_s), work if number == self.turn else "", now)

    def disregard(self) -> None:
        """Do not count the turn under way: no client waits for a member that opens its data."""
        self.began = 0.0
        if self._waits is not None:
            self._waits.since_sample_s(monotonic())

    def close(self) -> None:
        """Close it, and let its thread end."""
        if self._onlooker is not None:
            self._onlooker.stop()
        if self._waits is not None:
            self._waits.close()
        super().close()


class MemberLoop(asyncio.SelectorEventLoop):
    """The loop of a member: its readers are called as soon as the kernel names them.

    asyncio makes an object of each event, queues a handle for it, and goes through its queues and timers before and
    after. That takes longer than a pass over the sockets takes to find one request. So while nothing is queued and no
    timer is due, readers are called without that. Their descriptors have no writers.

    Arguments:
        selector: counts its turns.
    """

    time = staticmethod(monotonic)
    """The C function itself, without a wrapper: the clock is read several times for each request."""
    # asyncio's own: callbacks of the next turn, a heap of timers, whether the loop is to stop.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool

    def __init__(self, selector: TurnSelector) -> None:
        super().__init__(selector)
        self._turns = selector
        self._readers: dict[int, Callable[[], object]] = {}
        # Each of the two objects closes the descriptor that it has.
        self._epoll = select.epoll.fromfd(os.dup(selector.fileno())) if hasattr(select, "epoll") else None

    def add_reader(self, fd: Any, callback: Callable[..., object], *arguments: Any) -> None:  # type: ignore[override]
        """Call back each time that a descriptor can be read."""
        super().add_reader(fd, callback, *arguments)
        self._readers[fd] = partial(callback, *arguments) if arguments else callback

    def remove_reader(self, fd: Any) -> bool:
        """Call back no more; whether there was a reader."""
        self._readers.pop(fd, None)
        return super().remove_reader(fd)

    def close(self) -> None:
        """Close it."""
        super().close()
        if self._epoll is not None:
            self._epoll.close()

    def _run_once(self) -> None:
        if self._epoll is not None:
            self._serve_readers(self._epoll)
        super()._run_once()  # type: ignore[misc]

    def _serve_readers(self, epoll: select.epoll) -> None:
        """Call readers until there is something else to do, which is asyncio's: it asks the kernel once more."""
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
    """How long the thread that made this has waited for a processor, since the sample before."""

    def __init__(self) -> None:
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1  # not Linux
        self.sampled_at = 0.0
        self._total_s = 0.0
        self.since_sample_s(0.0)

    def since_sample_s(self, now: float) -> float:
        """Take a sample."""
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
    """The thread that looks at the loop; made on the loop's own thread.

    Attributes:
        seen: the number of a turn that was long when it was looked at, and what it did.
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
