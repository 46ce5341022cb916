"""Writers, which carry out commits: a thread in production, the caller itself in tools.

A writer runs jobs one at a time, in order, and reports each on the owner's thread through ``done(error)``. Nothing
here knows asyncio: the server injects ``loop.call_soon_threadsafe`` as ``notify``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Protocol

Job = Callable[[], None]
Done = Callable[[BaseException | None], None]


class Writer(Protocol):
    """A worker that runs jobs one at a time, in order."""

    def submit(self, job: Job, done: Done) -> None:
        """Run a job some time, then report it on the owner's thread.

        Arguments:
            job: what to do.
            done: called with ``None``, or with the error that the job raised.
        """

    def drain(self) -> None:
        """Wait until the jobs submitted so far have run; their reports may come later."""

    def close(self) -> None:
        """Finish what was submitted and stop. Reports that were not delivered yet may be lost."""


def _outcome(job: Job) -> BaseException | None:
    try:
        job()
    # Not ``BaseException``: a ``FailpointPanic`` stands for the death of the process, and is no failure of the job.
    except Exception as error:
        return error
    return None


def _ignore(error: BaseException | None) -> None:
    """Drop the report of a job."""


class InlineWriter:
    """A writer that runs each job inside ``submit``: for tools, and for tests of everything but the overlap."""

    def submit(self, job: Job, done: Done) -> None:
        """Implement ``Writer.submit``."""
        done(_outcome(job))

    def drain(self) -> None:
        """Implement ``Writer.drain``."""

    def close(self) -> None:
        """Implement ``Writer.close``."""


class ThreadWriter:
    """A writer with a thread of its own: the backend thread of a member."""

    def __init__(self, notify: Callable[[Callable[[], None]], object], name: str = "backend") -> None:
        """Start the thread. ``notify(call)`` must have ``call()`` run on the owner's thread, soon, in order."""
        self._notify = notify
        self._jobs: SimpleQueue[tuple[Job, Done] | None] = SimpleQueue()
        self._began_s = math.inf
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, done: Done) -> None:
        """Implement ``Writer.submit``."""
        self._jobs.put((job, done))

    def is_busy_for(self, seconds: float) -> bool:
        """Return whether the job under way has taken so long already."""
        return monotonic() - self._began_s > seconds

    def drain(self) -> None:
        """Implement ``Writer.drain``."""
        drained = threading.Event()
        # A job like any other: when it runs, all before it have run.
        self._jobs.put((drained.set, _ignore))
        drained.wait()

    def close(self) -> None:
        """Implement ``Writer.close``."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            self._began_s = monotonic()
            # The job runs here and its report there: the owner never sees its state change under it.
            error = _outcome(job)
            self._began_s = math.inf
            try:
                self._notify(partial(done, error))
            except RuntimeError:  # the loop is closed, and the owner is gone
                return
