"""Processor time of members, of a generator and of all else on the machine, from `/proc`."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.procs import Cluster

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_IDLE, _IO_WAIT, _GUEST = 3, 4, 8
"""Fields of the first line of `/proc/stat`; guests are counted as user time already."""


def process_s(pid: int) -> float:
    """User and system time of a process with all its threads, in seconds, to 10 ms."""
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS_A_SECOND


def busy_s(stat: str) -> float:
    """Time in which the machine's cores were not idle, in seconds, from the text of `/proc/stat`."""
    fields = [int(field) for field in stat.splitlines()[0].split()[1 : 1 + _GUEST]]
    return (sum(fields) - fields[_IDLE] - fields[_IO_WAIT]) / _TICKS_A_SECOND


@dataclass(frozen=True)
class Times:
    """Clocks at one moment, or what passed between two, in seconds of processors but for ``wall_s``.

    Attributes:
        members: of one cluster.
        ours: this process and the children that it has waited for.
        all: whatever kept the machine's cores busy.
    """

    wall_s: float
    members: float
    ours: float
    all: float

    def __sub__(self, before: Times) -> Times:
        return Times(
            self.wall_s - before.wall_s, self.members - before.members, self.ours - before.ours, self.all - before.all
        )

    @property
    def others_share(self) -> float:
        """Share of the machine's cores that others than the members and this benchmark used, 0 to 1."""
        cores_s = self.wall_s * (os.cpu_count() or 1)
        return min(1.0, max(0.0, self.all - self.members - self.ours) / cores_s)


def now(pids: Sequence[int]) -> Times:
    """Read all clocks."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Times(
        time.perf_counter(),
        sum(map(process_s, pids)),
        sum(usage.ru_utime + usage.ru_stime for usage in usages),
        busy_s(Path("/proc/stat").read_text(encoding="utf-8")),
    )


def pids_of(cluster: Cluster) -> list[int]:
    """Return the processes of all members."""
    return [member.process.pid for member in cluster.members if member.process is not None]
