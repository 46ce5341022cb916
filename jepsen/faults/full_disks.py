"""Disks that are full for a while, and disks that fail: what a member may not lose a write over.

    full: no room -> alarm, writes that grow the store are refused -> room -> the operator disarms -> writes again
    failing: each sync is an error -> the member ends -> start

A full disk is one of ``disks.py``. What fails a sync is a tracer (strace), which answers for the kernel; the member
must end, since what the kernel has done with the pages is unknown then.

Left out: disks that are only slow.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import ClassVar, Final

from jepsen.db import Cluster, DbError, Member
from jepsen.faults.disks import Disks

SYNCS: Final = "fdatasync,fsync,io_submit"
"""``io_submit`` is how raftkv has the kernel sync beside its loop; who is refused that syncs by itself."""


class Full:
    """A disk without room, and with room again; the nemesis disarms the alarms then, as an operator would."""

    targets: ClassVar[tuple[str, ...]] = ("one", "leader", "follower", "quorum", "all")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: fill."""
        for member in members:
            _disks(cluster).fill(member.number)

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: make room."""
        for member in members:
            _disks(cluster).free(member.number)


class Failing:
    """A disk that answers each sync with an input/output error, until the member has ended."""

    targets: ClassVar[tuple[str, ...]] = ("one", "leader", "follower", "all")

    def __init__(self) -> None:
        self._tracers: list[subprocess.Popen[bytes]] = []

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: answer for the kernel."""
        if shutil.which("strace") is None:
            raise DbError("strace is needed to fail a member's syncs")
        for member in members:
            if member.process is not None:
                command = ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(member.process.pid)]
                command += ["-e", f"trace={SYNCS}", "-e", f"inject={SYNCS}:error=EIO"]
                self._tracers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: leave the kernel its answers, and start who has ended."""
        for tracer in self._tracers:
            tracer.terminate()
            tracer.wait()
        cluster.start([member for member in members if not member.up])


def _disks(cluster: Cluster) -> Disks:
    if cluster.disks is None:
        raise DbError("the members of this cluster have no disks of their own")
    return cluster.disks


FAULTS: Final[dict[str, type[Full] | type[Failing]]] = {"full": Full, "failing": Failing}
