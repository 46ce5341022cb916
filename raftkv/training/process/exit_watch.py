"""Sees the workers of an agent die, the instant they do, without a hand in starting or waiting for them.

::

    with WorkerWatch(on_end, run_id="job1") as watch:
        ...                # whoever starts workers starts them
        watch.look()       # finds children whose environment has RANK and TORCHELASTIC_RUN_ID=job1
        watch.add(pid, rank=3)                # or the caller adds it

Owns a thread that sleeps on one pidfd for each worker. When a worker ends, the thread peeks at its status with
``WNOWAIT``, which leaves the status for the agent's own wait, and calls ``on_end``. So the agent finds out as it always
does, and everybody else of the run 0.1 s (a poll of the agent) and a time-out of a collective earlier.

Invariants:

1. Nothing is waited for, signalled or reaped here: the agent is not disturbed.
2. Each worker's end is reported once, or not at all (see below); never a process that is not a child of this one.

Limits: Linux only (pidfds: 5.3); elsewhere ``is_available`` is false, nothing is reported, and a death is
known when the agent's own poll comes back to the rendezvous. A worker that ends before the first ``look``, or that the
agent reaps in the same instant, is not told either. Workers that torch starts from a Python function (not from a
script) carry their rank in no environment that others can read, and are not found.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from raftkv.training.process.faults import CGROUPS, PROC, End, MemoryEvents, Worker, end_of

REFRESH_S: Final = 10.0
"""The count of memory kills at a death is compared with one that is once to twice as old: a large process takes
seconds to go after the kernel has decided, and a kill of an hour before is no reason."""


def is_available() -> bool:
    """Tell whether this system lets a process watch its children."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and (PROC / "self" / "task").is_dir()


@dataclass(slots=True)
class _Watched:
    worker: Worker
    descriptor: int
    memory: MemoryEvents
    next_memory: MemoryEvents


class WorkerWatch:
    """Reports each worker's end in the instant of its death.

    Arguments:
        on_end: called on the watch's thread with each end, good or bad.
        run_id: ``look`` finds the workers of this run.
        proc, cgroups: where the system shows processes and memory groups.
    """

    def __init__(
        self, on_end: Callable[[End], None], *, run_id: str = "", proc: Path = PROC, cgroups: Path = CGROUPS
    ) -> None:
        self._on_end = on_end
        self._run_id = run_id
        self._proc = proc
        self._cgroups = cgroups
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._living: dict[int, _Watched] = {}
        self._new: deque[_Watched] = deque()
        self._thread: threading.Thread | None = None
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._is_stopped = False

    @property
    def living(self) -> list[Worker]:
        """Workers that are watched and have not ended."""
        return [watched.worker for watched in list(self._living.values())]

    def look(self) -> int:
        """Find workers among this process' children that were not known; cheap; any thread.

        Returns:
            how many are watched now.
        """
        if is_available() and not self._is_stopped:
            with self._lock:
                children = set(_children(self._proc))
                self._seen &= children
                for pid in sorted(children - self._seen):
                    self._look_at(pid)
        return len(self._living)

    def add(self, pid: int, rank: int = -1, local_rank: int = -1) -> None:
        """Watch a child that the caller has started; nothing happens where that is not possible.

        Arguments:
            pid: of the child.
            rank: in the generation.
            local_rank: on its node.
        """
        if is_available() and not self._is_stopped:
            with self._lock:
                self._seen.add(pid)
                self._watch(Worker(pid, rank, local_rank))

    def stop(self) -> None:
        """Watch no longer; harmless when repeated."""
        with self._lock:
            self._is_stopped = True
            thread, self._thread = self._thread, None
        self._wake()
        if thread is None:
            self._close_all()
        elif thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> WorkerWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- finding

    def _look_at(self, pid: int) -> None:
        environment = _environment(self._proc / str(pid) / "environ")
        if not environment or environment == _environment(self._proc / "self" / "environ"):
            return  # it has ended, or has its parent's memory until its exec, or none yet: the next look knows
        self._seen.add(pid)
        if "RANK" in environment and environment.get("TORCHELASTIC_RUN_ID") == self._run_id:
            self._watch(
                Worker(
                    pid,
                    _number(environment["RANK"]),
                    _number(environment.get("LOCAL_RANK", "")),
                    environment.get("TORCHELASTIC_ERROR_FILE", ""),
                )
            )

    def _watch(self, worker: Worker) -> None:
        with contextlib.suppress(OSError):  # it has ended, and its parent knows
            descriptor = os.pidfd_open(worker.pid)
            memory = MemoryEvents.of(worker.pid, self._proc, self._cgroups)
            watched = _Watched(worker, descriptor, memory, memory)
            self._living[descriptor] = watched
            self._new.append(watched)
            self._start()
            self._wake()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="raftkv-workers", daemon=True)
            self._thread.start()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    # ---- on the thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while not self._is_stopped:
                ready = selector.select(REFRESH_S if self._living else None)
                self._take_new(selector)
                for key, _ in ready:
                    if key.fd != self._wake_reader.fileno():
                        self._ended(selector, key.fd)
                if not ready:
                    self._refresh()
        self._close_all()

    def _take_new(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)
        while self._new:
            selector.register(self._new.popleft().descriptor, selectors.EVENT_READ)

    def _refresh(self) -> None:
        for watched in list(self._living.values()):
            watched.memory, watched.next_memory = watched.next_memory, watched.memory.again()

    def _ended(self, selector: selectors.BaseSelector, descriptor: int) -> None:
        selector.unregister(descriptor)
        watched = self._living.pop(descriptor)
        end = _peek(watched)
        os.close(descriptor)
        if end is not None:
            self._on_end(end)

    def _close_all(self) -> None:
        for descriptor in list(self._living):
            del self._living[descriptor]
            os.close(descriptor)
        self._wake_reader.close()
        self._wake_writer.close()


def _peek(watched: _Watched) -> End | None:
    """Return how a worker ended; None: somebody has taken its status already."""
    try:
        status = os.waitid(os.P_PIDFD, watched.descriptor, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None
    if status is None:
        return None
    killed = watched.memory.again().grew_since(watched.memory)
    return end_of(status, watched.worker, out_of_memory=killed)


def _children(proc: Path) -> Iterator[int]:
    """Children of this process, whichever of its threads started them."""
    if not (proc / "self" / "task" / str(os.getpid()) / "children").exists():
        yield from _children_by_parent(proc)  # a kernel without CONFIG_PROC_CHILDREN
        return
    for task in (proc / "self" / "task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, (task / "children").read_text(encoding="ascii").split())


def _children_by_parent(proc: Path) -> Iterator[int]:
    own = str(os.getpid())
    for path in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if fields[1] == own:
                yield int(path.parent.name)


def _environment(path: Path) -> dict[str, str]:
    try:
        pairs = path.read_bytes().split(b"\0")
    except OSError:
        return {}
    texts = (pair.decode("utf-8", "replace").partition("=") for pair in pairs if pair)
    return {name: value for name, _, value in texts}


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else -1
