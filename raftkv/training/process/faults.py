"""Why a worker ended: from what the kernel says of a child to a ``Fault`` that everybody of the run gets.

::

    before = MemoryEvents.of(pid)
    ...                                     # the worker is killed
    end = end_of(status, worker, out_of_memory=MemoryEvents.of(pid).grew_since(before))
    participant.report(end.fault(generation, node, host))

Owns the words. The kernel does not say in a process' status that it was killed for lack of memory: that is SIGKILL,
like any other. What tells is the count of such kills that it keeps for the process' memory cgroup (version 2:
``memory.events``, version 1: ``memory.oom_control``), or, where that cannot be read, for the machine
(``/proc/vmstat``). A SIGKILL while the count went up is called "out of memory".

Leaves out: deaths that nobody can see from the machine (a lost host): leases tell of those.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
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
    """A worker process: what is known of it while it lives.

    Attributes:
        pid: its process.
        rank, local_rank: as its environment says; -1: not known.
        error_file: where torch's ``@record`` writes the exception that ends it; empty: nowhere.
    """

    pid: int
    rank: int = -1
    local_rank: int = -1
    error_file: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """How a worker ended.

    Attributes:
        worker: which.
        exit_code: what it returned; -1: a signal ended it.
        signal: name of that signal, as ``SIGKILL``; else empty.
        out_of_memory: the kernel killed it, or something beside it, for lack of memory.
        message: the exception that ended it, where it left one.
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
        """It comes from nowhere else. A worker that raises, or that NCCL's watchdog aborts, may only have lost a peer:
        to tell it before the loss of that peer is known would blame the wrong host.
        """
        return bool(self.signal) and not self.is_request and self.signal != "SIGABRT"

    @property
    def is_request(self) -> bool:
        """Whether somebody asked the worker to end: the agent does that to its own workers, a person may."""
        return self.signal in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")

    def fault(self, generation: int, node: str, host: str) -> Fault:
        """Make a record of the end, for everybody.

        Arguments:
            generation: in which it happened.
            node, host: where.
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
    """Describe in words what ``os.waitid`` says of a child that has ended.

    Arguments:
        status: from ``os.waitid``.
        worker: who has ended.
        out_of_memory: whether the kernel has killed it for lack of memory.
    """
    if status.si_code == os.CLD_EXITED:
        message = _exception(worker.error_file) if status.si_status else ""
        return End(worker, status.si_status, out_of_memory=out_of_memory, message=message)
    return End(worker, -1, signal_name(status.si_status), out_of_memory)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9.

    >>> signal_name(9), signal_name(64 + 1)
    ('SIGKILL', 'signal 65')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exception(error_file: str) -> str:
    """Read the first line of the exception that torch's ``@record`` has written down, if any."""
    try:
        with open(error_file, "rb") as file:
            message = json.loads(file.read(_ERROR_FILE_BYTES_MAX))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    text = message.get("message", "") if isinstance(message, dict) else message
    return str(text).strip().split("\n", 1)[0][:_MESSAGE_MAX]


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """How often the kernel has killed for lack of memory, where it counts for one process.

    Attributes:
        place: the file that counts.
        kills: so many until now.
    """

    place: str
    kills: int

    @classmethod
    def of(cls, pid: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> MemoryEvents:
        """Read the count for a process that lives, or has ended and is still there for its parent to look at.

        Arguments:
            pid: of the process.
            proc, cgroups: where the file systems of these names are.
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
        """There was a kill since."""
        return self.place == before.place and self.kills > before.kills


def _cgroup_files(table: Path, cgroups: Path) -> list[Path]:
    """Return where kills for lack of memory may be counted, the most exact first.

    In a container the path may be that of the host; then what is mounted is the container's own part.
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
