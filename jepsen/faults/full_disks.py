"""Disks that are full for a while: what a member may not lose a write over.

    no room -> alarm, writes that grow the store are refused -> room -> the operator disarms -> writes again

Each disk is one of ``disks.py``.
"""

from __future__ import annotations

from typing import ClassVar, Final

from jepsen.db import Cluster, DbError, Member
from jepsen.faults.disks import Disks


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


def _disks(cluster: Cluster) -> Disks:
    if cluster.disks is None:
        raise DbError("the members of this cluster have no disks of their own")
    return cluster.disks


FAULTS: Final[dict[str, type[Full]]] = {"full": Full}
