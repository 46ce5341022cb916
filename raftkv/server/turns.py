"""How long the turns of the event loop are: while one lasts, the member hears nobody, heartbeats included.

Owns the selector that the loop is made with. A turn is the time between a return of ``select`` and the next call to it,
so waiting for events is not part of it, and everything else is: callbacks, tasks, an inline sync, a pause of the
process. Measuring costs 0.4 us a turn.

    selector = TurnSelector(turns := LoopTurns())
    asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector))

Told in three ways: the histogram ``raftkv_loop_turn_seconds``, the gauges of the longest turn since the last scrape (so
one scraper, or each sees a part), and a warning for a turn above ``TURN_LIMIT_S``, at most one a second, that names the
functions which ran. Those come from a thread that looks every 25 ms: it sees what a long turn is doing without any
work in the short ones. It also says how much of the turn the loop's thread was on a processor at most: the rest are
syncs, waits for the interpreter lock, and a machine with other things to do.

Leaves out: what a turn above the limit should lead to; that is up to whoever cuts the work into slices.
"""

from __future__ import annotations

import logging
import selectors
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from time import monotonic
from types import FrameType
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raftkv.server.metrics import histogram_family

TURN_LIMIT_S: Final = 0.05
"""No turn may be longer, whatever one client asks for."""
WARNING_INTERVAL_S: Final = 1.0
LOOK_INTERVAL_S: Final = 0.025
FRAMES_MAX: Final = 4
"""Functions that a warning names, the innermost first."""
_BUCKETS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

_log = logging.getLogger(__name__)


class LoopTurns(Collector):
    """The figures of one loop. Only the loop's thread writes them; a scrape runs there too.

    Attributes:
        counts, sum_s: of the histogram.
        longest_s: the longest turn since the last scrape.
        notable_s: a turn above this is either the longest or too long.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS_S) + 1)
        self.sum_s = 0.0
        self.longest_s = 0.0
        self.notable_s = 0.0
        self._longest_cpu_s = 0.0
        self._warned_at = float("-inf")
        self._unreported = 0

    def longest(self, seconds: float, cpu_seconds: float) -> None:
        """Note the longest turn since the last scrape, and how long of it the thread was on a processor."""
        self.longest_s = seconds
        self._longest_cpu_s = cpu_seconds
        self.notable_s = min(seconds, TURN_LIMIT_S)

    def warn(self, seconds: float, cpu_seconds: float, work: str, now: float) -> None:
        """Log a turn above the limit, unless one was logged less than a second ago."""
        if now - self._warned_at < WARNING_INTERVAL_S:
            self._unreported += 1
            return
        others = f"; {self._unreported} other long turns since the last such line" if self._unreported else ""
        _log.warning(
            "a turn of the event loop took %.0f ms, on the processor for at most %.0f ms of it, in %s%s",
            seconds * 1e3,
            cpu_seconds * 1e3,
            work or "work that was over before it was seen",
            others,
        )
        self._warned_at = now
        self._unreported = 0

    def collect(self) -> Iterator[Metric]:
        """All families. The longest turn begins anew with each scrape."""
        longest_s, cpu_s = self.longest_s, self._longest_cpu_s
        self.longest(0.0, 0.0)
        text = "How long turns of the event loop take."
        yield histogram_family("raftkv_loop_turn_seconds", text, _BUCKETS_S, self.counts, self.sum_s)
        text = "The longest turn of the event loop since the last scrape."
        yield GaugeMetricFamily("raftkv_loop_turn_longest_seconds", text, longest_s)
        text = "How long the loop was on a processor during the longest turn since the last scrape, at most."
        yield GaugeMetricFamily("raftkv_loop_turn_longest_cpu_seconds", text, cpu_s)


class TurnSelector(selectors.DefaultSelector):
    """A selector that times what its loop does between two calls of ``select``.

    Arguments:
        turns: told of every turn.
    """

    def __init__(self, turns: LoopTurns) -> None:
        super().__init__()
        self._turns = turns
        self._wait = super().select
        self.turn = 0
        """The number of the turn under way; 0: none was begun."""
        self.began = 0.0
        """When it began; 0: the loop waits for events."""
        self._onlooker: _Onlooker | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """End a turn, wait, begin the next one."""
        turns, began = self._turns, self.began
        if began:
            now = monotonic()
            seconds = now - began
            turns.counts[bisect_left(_BUCKETS_S, seconds)] += 1
            turns.sum_s += seconds
            if seconds > turns.notable_s:
                self._notable(seconds, now)
            self.began = 0.0
        elif self._onlooker is None:
            self._onlooker = _Onlooker(self)
        ready = self._wait(timeout)
        self.turn += 1
        self.began = monotonic()
        return ready

    def _notable(self, seconds: float, now: float) -> None:
        work, cpu_seconds = self._onlooker.seen(self.turn, seconds) if self._onlooker is not None else ("", seconds)
        if seconds > self._turns.longest_s:
            self._turns.longest(seconds, cpu_seconds)
        if seconds > TURN_LIMIT_S:
            self._turns.warn(seconds, cpu_seconds, work, now)

    def close(self) -> None:
        """Close it, and let its thread end."""
        if self._onlooker is not None:
            self._onlooker.stop()
        super().close()


class _Onlooker:
    """The thread that looks at the loop; made on the loop's own thread."""

    def __init__(self, selector: TurnSelector) -> None:
        self._selector = selector
        self._loop_thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._loop_thread)
        self._stopped = threading.Event()
        # What was seen of a turn, and the loop's processor time before the newest turns: (turn, seconds), the last two.
        self._work: tuple[int, str] = (0, "")
        self._before = self._newest = (0, time.clock_gettime(self._clock))
        threading.Thread(target=self._run, name="loop-turns", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end."""
        self._stopped.set()

    def seen(self, turn: int, seconds: float) -> tuple[str, float]:
        """What was seen of a turn that is just over, and how long it was on a processor at most."""
        number, work = self._work
        # The newest look may have fallen into this turn; then the one before it is the base.
        base = self._newest if self._newest[0] < turn else self._before
        cpu_seconds = min(seconds, time.clock_gettime(self._clock) - base[1])
        return work if number == turn else "", cpu_seconds

    def _run(self) -> None:
        selector = self._selector
        while not self._stopped.wait(LOOK_INTERVAL_S):
            turn, began = selector.turn, selector.began
            if turn != self._newest[0]:
                self._before = self._newest
                self._newest = (turn, time.clock_gettime(self._clock))
            if began and monotonic() - began >= LOOK_INTERVAL_S and self._work[0] != turn:
                self._work = (turn, name_work(sys._current_frames().get(self._loop_thread)))


def name_work(frame: FrameType | None) -> str:
    """The functions of raftkv in a stack, the innermost first: ``storage.index.range < server.kv.range``."""
    names: list[str] = []
    while frame is not None and len(names) < FRAMES_MAX:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("raftkv.") and module != __name__:
            names.append(f"{module.removeprefix('raftkv.')}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    return " < ".join(names)
