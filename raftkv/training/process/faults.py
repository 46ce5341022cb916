"""The end of a worker: converts the kernel's status of a child to a ``Fault`` that all nodes of the run see.

::

    before = MemoryEvents.of(pid)
    ...                                     # the worker is killed
    end = end_of(status, worker, out_of_memory=MemoryEvents.of(pid).grew_since(before))
    participant.report(end.fault(generation, node, host))

The status of a process that was killed for lack of memory is a plain SIGKILL. But the kernel counts such kills for the
process' memory cgroup (version 2: ``memory.events``, version 1: ``memory.oom_control``), or, if that cannot be read,
for the machine (``/proc/vmstat``). A SIGKILL while the count increased is reported as "out of memory".

The loss of a whole host is not handled here: its lease ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from raftkv.training.records import EXIT, OUT_OF_MEMORY, SIGNAL, Fault

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")
_MESSAGE_MAX: Final = 300
_ERROR_FILE_BYTES_MAX: Final = 1 << 20
_KILLS: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process, as known while it runs.

    Attributes:
        pid: process id.
        rank, local_rank: values from its environment; -1: unknown.
        error_file: file in which torch's ``@record`` writes the exception that ends the worker; empty: none.
    """

    pid: int
    rank: int = -1
    local_rank: int = -1
    error_file: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """How a worker ended.

    Attributes:
        worker: worker that ended.
        exit_code: exit code; -1: a signal ended it.
        signal: name of that signal, as ``SIGKILL``; else empty.
        out_of_memory: whether the kernel killed it, or another process of its cgroup, for lack of memory.
        message: the exception that ended it, if it recorded one.
        time: when it was seen, by the wall clock, for people.
    """

    worker: Worker
    exit_code: int
    signal: str = ""
    out_of_memory: bool = False
    message: str = ""
    time: float = field(default_factory=time.time)

    @property
    def is_fault(self) -> bool:
        """Whether the worker ended with a fault."""
        return self.exit_code != 0

    @property
    def is_cause(self) -> bool:
        """Whether the end is certainly not the consequence of another one.

        A worker that raises, or that NCCL's watchdog aborts, may only have lost a peer. Reporting it before the loss of
        that peer is known would blame the wrong host.
        """
        return bool(self.signal) and not self.is_request and self.signal != "SIGABRT"

    @property
    def is_request(self) -> bool:
        """Whether the end was requested by a signal, from the agent or a user."""
        return self.signal in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")

    def fault(self, generation: int, node: str, host: str) -> Fault:
        """Make the record of the end, for all nodes.

        Arguments:
            generation: generation in which it happened.
            node, host: where it happened.
        """
        return Fault(
            generation=generation,
            node=node,
            host=host,
            rank=self.worker.rank,
            cause=self._cause(),
            exit_code=max(self.exit_code, 0),
            signal=self.signal,
            message=self._message(),
            time=self.time,
        )

    def _cause(self) -> str:
        if not self.signal:
            return EXIT
        return OUT_OF_MEMORY if self._is_memory_kill() else SIGNAL

    def _is_memory_kill(self) -> bool:
        return self.out_of_memory and self.signal == "SIGKILL"

    def _message(self) -> str:
        if self._is_memory_kill():
            return f"the kernel killed process {self.worker.pid}"
        beside = "the kernel killed a process beside it for lack of memory" if self.out_of_memory else ""
        return "; ".join(part for part in (self.message, beside) if part)


def end_of(status: os.waitid_result, worker: Worker, *, out_of_memory: bool = False) -> End:
    """Describe a child that has ended, from the result of ``os.waitid``.

    Arguments:
        status: status from ``os.waitid``.
        worker: worker that ended.
        out_of_memory: whether the kernel killed it for lack of memory.
    """
    if status.si_code == os.CLD_EXITED:
        message = _exception(worker.error_file) if status.si_status else ""
        return End(worker, status.si_status, out_of_memory=out_of_memory, message=message)
    return End(worker, -1, signal_name(status.si_status), out_of_memory)


def signal_name(number: int) -> str:
    """Return the name of a signal, as ``SIGKILL`` for 9.

    >>> signal_name(9), signal_name(64 + 1)
    ('SIGKILL', 'signal 65')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exception(error_file: str) -> str:
    """Return the first line of the exception that torch's ``@record`` has written, if any."""
    try:
        with open(os.open(error_file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # perhaps a pipe
            message = json.loads(file.read(_ERROR_FILE_BYTES_MAX))["message"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    text = message.get("message", "") if isinstance(message, dict) else message
    return str(text).strip().split("\n", 1)[0][:_MESSAGE_MAX]


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """The kernel's count of kills for lack of memory that covers one process.

    Attributes:
        place: file with the count.
        kills: number of kills so far.
    """

    place: str
    kills: int

    @classmethod
    def of(cls, pid: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> MemoryEvents:
        """Read the count for a process that runs, or has ended but was not yet waited for.

        Arguments:
            pid: process id.
            proc, cgroups: mount points of the file systems with these names.
        """
        for place in (*_cgroup_files(proc / str(pid) / "cgroup", cgroups), proc / "vmstat"):
            found = _KILLS.search(_read(place))
            if found:
                return cls(str(place), int(found[1]))
        return cls("", 0)

    def again(self) -> MemoryEvents:
        """Read the same count now."""
        found = _KILLS.search(_read(Path(self.place))) if self.place else None
        return MemoryEvents(self.place, int(found[1])) if found else self

    def grew_since(self, before: MemoryEvents) -> bool:
        """Return whether there was a kill since."""
        return self.place == before.place and self.kills > before.kills


def _cgroup_files(table: Path, cgroups: Path) -> list[Path]:
    """Return the files that may count kills for lack of memory, the most specific first.

    In a container the path may be that of the host; then the mounted tree is the container's part.
    """
    files = []
    for line in _read(table).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        inside = path.strip("/")
        if "memory" in controllers.split(","):
            files += [cgroups / "memory" / inside / "memory.oom_control", cgroups / "memory" / "memory.oom_control"]
        elif not controllers:
            files += [cgroups / inside / "memory.events", cgroups / "unified" / inside / "memory.events"]
            files.append(cgroups / "memory.events")
    return files


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# -- exit_watch -----------------------------------------------------------------------------------------------------
#
# Detects the deaths of an agent's workers at once, without starting or waiting for them.
#
# ::
#
#     with WorkerWatch(on_end, run_id="job1") as watch:
#         ...                # the agent starts its workers
#                 watch.look()       # finds children whose environment has RANK and TORCHELASTIC_RUN_ID=job1
#         watch.add(pid, rank=3)                # or the caller adds one
#
# A thread for each worker sleeps on its pidfd. When the worker ends, it reads the status with ``WNOWAIT``, which leaves
# the status for the agent's own wait, and calls ``on_end``. So the agent works as usual, and all other nodes of the run
# learn of the death 0.1 s (a poll of the agent) and a collective's timeout earlier.
#
# Invariants:
#
# 1. No process is waited for, signalled or reaped here, so the agent is not disturbed.
# 2. Each worker's end is reported at most once (see below); only children of this process are reported.
#
# Limits: Linux only (pidfds: 5.3); elsewhere ``is_available`` is false, nothing is reported, and a death is known when
# the agent's own poll returns to the rendezvous. A worker that ends before the first ``look``, or that the agent reaps
# at the same moment, is not reported either. Workers that torch starts from a Python function (not from a script) have
# their rank in no readable environment, and are not found.

STARVED_S: Final = 0.1
"""How long the thread pauses after a lack of memory before it tries again."""
REFRESH_S: Final = 10.0
"""At a death, the count of memory kills is compared with a count that is one to two of these intervals old: a large
process takes seconds to end after the kernel has killed it, and a kill an hour ago is not the cause."""


def is_available() -> bool:
    """Return whether a process can watch its children on this system."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and (PROC / "self" / "task").is_dir()


class WorkerWatch:
    """Reports each worker's end at once.

    Arguments:
        on_end: called on a thread of the watch with each end, successful or not; one call at a time.
        run_id: run whose workers ``look`` finds.
        proc, cgroups: mount points of the proc and cgroup file systems.
    """

    def __init__(
        self, on_end: Callable[[End], None], *, run_id: str = "", proc: Path = PROC, cgroups: Path = CGROUPS
    ) -> None:
        self._on_end = on_end
        self._run_id = run_id
        self._proc = proc
        self._cgroups = cgroups
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._seen: set[int] = set()
        self._living: dict[int, Worker] = {}
        self._threads: set[threading.Thread] = set()
        # The end of this pipe wakes all threads; the last one closes it.
        self._stopping, self._stop = os.pipe()
        self._is_stopped = False

    @property
    def living(self) -> list[Worker]:
        """Watched workers that have not ended."""
        return list(self._living.values())

    def look(self) -> int:
        """Find new workers among this process' children; cheap, from any thread.

        Returns:
            Number of watched workers.
        """
        with self._lock:
            if is_available() and not self._is_stopped:
                children = set(_children(self._proc))
                self._seen &= children
                for pid in sorted(children - self._seen):
                    self._look_at(pid)
        return len(self._living)

    def add(self, pid: int, rank: int = -1, local_rank: int = -1) -> None:
        """Watch a child that the caller has started; does nothing where that is not possible.

        Arguments:
            pid: process id of the child.
            rank: rank in the generation.
            local_rank: rank on its node.
        """
        with self._lock:
            if is_available() and not self._is_stopped:
                self._seen.add(pid)
                self._watch(Worker(pid, rank, local_rank))

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            os.close(self._stop)
            threads = set(self._threads)
            self._close_if_over()
        if threading.current_thread() not in threads:  # not called by ``on_end``, for which other threads may wait
            for thread in threads:
                thread.join()

    def _close_if_over(self) -> None:
        if self._is_stopped and not self._threads:
            os.close(self._stopping)

    def __enter__(self) -> WorkerWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- finding

    def _look_at(self, pid: int) -> None:
        environment = _environment(self._proc / str(pid) / "environ")
        if not environment or environment == _environment(self._proc / "self" / "environ"):
            return  # it has ended or has not called exec yet; the next look finds it
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
        with contextlib.suppress(OSError):  # it has ended, and its parent reports it
            descriptor = os.pidfd_open(worker.pid)
            memory = MemoryEvents.of(worker.pid, self._proc, self._cgroups)
            self._living[worker.pid] = worker
            thread = threading.Thread(
                target=self._follow, args=(worker, descriptor, memory), name="raftkv-worker", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # no more threads: the agent's own poll tells
                del self._living[worker.pid]
                os.close(descriptor)
                return
            self._threads.add(thread)

    # ---- on the thread of a worker

    def _follow(self, worker: Worker, descriptor: int, memory: MemoryEvents) -> None:
        try:
            self._await_end(worker, descriptor, memory)
        finally:
            os.close(descriptor)
            with self._lock:
                self._threads.remove(threading.current_thread())
                self._close_if_over()

    def _await_end(self, worker: Worker, descriptor: int, memory: MemoryEvents) -> None:
        before, end = memory, None
        while not self._is_stopped:
            try:
                poll = select.poll()
                for one in (descriptor, self._stopping):
                    poll.register(one, select.POLLIN)
                if not poll.poll(REFRESH_S * 1000):
                    before, memory = memory, memory.again()
                    continue
                end = end or _peek(worker, descriptor, before)
                self._living.pop(worker.pid, None)
                if end is not None:
                    with self._telling:
                        self._on_end(end)
                return
            except MemoryError:  # what kills workers too
                select.select((), (), (), STARVED_S)


def _peek(worker: Worker, descriptor: int, before: MemoryEvents) -> End | None:
    """Return how a worker ended; None: it has not, or the agent has already reaped it."""
    try:
        status = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None
    if status is None:
        return None
    return end_of(status, worker, out_of_memory=before.again().grew_since(before))


def _children(proc: Path) -> Iterator[int]:
    """Children of this process, started by any of its threads."""
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
