"""The commit thread and the running time of its job."""

from __future__ import annotations

import math
import threading
import time
from queue import SimpleQueue
from typing import Any

from raftkv.storage.backend.lmdb import ThreadWriter

PATIENCE_S = 90.0


def test_writer_is_busy_only_while_a_job_runs() -> None:
    calls: SimpleQueue[Any] = SimpleQueue()
    writer = ThreadWriter(calls.put)
    begun, may_end = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        may_end.wait(PATIENCE_S)

    try:
        assert writer.busy_since_s == math.inf
        before_s = time.monotonic()
        writer.submit(job, lambda error: None)
        assert begun.wait(PATIENCE_S)
        assert before_s <= writer.busy_since_s <= time.monotonic()
        may_end.set()
        calls.get(timeout=PATIENCE_S)
        writer.submit(lambda: None, lambda error: None)
        calls.get(timeout=PATIENCE_S)
        assert writer.busy_since_s == math.inf, "it reports a job when that is over"
    finally:
        may_end.set()
        writer.close()
