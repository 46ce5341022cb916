"""What the loads of all client libraries share: the arguments, the loop that calls and counts, the answer.

Standard library only: it runs in the environment of each library, beside a script that says how that one calls.

    python etcd3_sync.py ENDPOINT put 64 2.0     ->  {"calls": 9120, "seconds": 2.0, "p50_ms": 13.9, "p99_ms": 21.0}
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

KEYS = [f"bench/{number:04}" for number in range(1000)]
VALUE = b"v" * 256
WARM_UP_S = 0.5


@dataclass
class Load:
    """What to measure: ``operation`` is put or get."""

    endpoint: str
    operation: str
    callers: int
    seconds: float
    times_s: list[float] = field(default_factory=list)
    starts_at: float = 0.0
    ends_at: float = 0.0

    @classmethod
    def from_arguments(cls) -> Load:
        """Read the command line."""
        endpoint, operation, callers, seconds = sys.argv[1:]
        return cls(endpoint, operation, int(callers), float(seconds))

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.endpoint.rpartition(":")
        return host, int(port)

    def run_threads(self, call: Callable[[str], object]) -> None:
        """Call from as many threads at once."""
        self._begin()

        def work(number: int) -> None:
            clock, own, turn = time.perf_counter, [], number
            while (before := clock()) < self.ends_at:
                call(KEYS[turn % len(KEYS)])
                turn += self.callers
                own.append((before, clock()))
            self._keep(own)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(self.callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._tell()

    async def run_tasks(self, call: Callable[[str], Awaitable[object]]) -> None:
        """Call from as many tasks at once."""
        self._begin()

        async def work(number: int) -> None:
            clock, own, turn = time.perf_counter, [], number
            while (before := clock()) < self.ends_at:
                await call(KEYS[turn % len(KEYS)])
                turn += self.callers
                own.append((before, clock()))
            self._keep(own)

        await asyncio.gather(*[work(number) for number in range(self.callers)])
        self._tell()

    def _begin(self) -> None:
        self.starts_at = time.perf_counter() + WARM_UP_S
        self.ends_at = self.starts_at + self.seconds

    def _keep(self, calls: list[tuple[float, float]]) -> None:
        """Those that began after the warm-up and were answered in time."""
        self.times_s += [
            after - before for before, after in calls if before >= self.starts_at and after <= self.ends_at
        ]

    def _tell(self) -> None:
        cuts = statistics.quantiles(self.times_s, n=100) if len(self.times_s) > 1 else [0.0] * 99
        result = {
            "calls": len(self.times_s),
            "seconds": self.seconds,
            "p50_ms": cuts[49] * 1e3,
            "p99_ms": cuts[98] * 1e3,
        }
        print(json.dumps(result))
