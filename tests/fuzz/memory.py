"""What a piece of work allocates, measured in a forked process that does nothing else.

    assert measured(lambda: parse(data)).peak_bytes < 300_000

In a process of tests other threads allocate too: that which takes orders from pytest-xdist receives the numbers of
thousands of tests at any moment, and `tracemalloc` counts what all threads allocate.
"""

from __future__ import annotations

import gc
import json
import os
import traceback
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Memory:
    """What a piece of work allocated, in bytes: at most at once, and kept by what it returned."""

    peak_bytes: int
    kept_bytes: int


def measured(work: Callable[[], object]) -> Memory:
    """Do `work` in a child process, and measure it.

    Raises:
        AssertionError: the work failed; the text is its traceback.
    """
    source, sink = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on: the other threads are not in the child, which is what is wanted.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _report(work, sink)
    os.close(sink)
    with open(source, "rb") as pipe:
        report = json.loads(pipe.read() or b'{"failure": "the process of the measurement has died"}')
    os.waitpid(pid, 0)
    assert "failure" not in report, report["failure"]
    return Memory(**report)


def _report(work: Callable[[], object], sink: int) -> None:
    """In the child: measure, write, end."""
    try:
        report = asdict(_trace(work))
    except BaseException:
        report = {"failure": traceback.format_exc()}
    os.write(sink, json.dumps(report).encode())
    os._exit(0)


def _trace(work: Callable[[], object]) -> Memory:
    gc.freeze()  # collected here, what other tests have left would look for threads that only their process has
    tracemalloc.start()
    kept = work()
    _, peak_bytes = tracemalloc.get_traced_memory()
    gc.collect()
    kept_bytes, _ = tracemalloc.get_traced_memory()
    del kept
    return Memory(peak_bytes, kept_bytes)
