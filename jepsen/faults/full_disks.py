"""Disks that are full for a while; a member must not lose writes because of it.

    full -> alarm, writes that grow the store are refused -> space is freed -> the operator disarms -> writes again

The disks are those of ``disks.py``.
"""

from __future__ import annotations

from typing import ClassVar, Final

from jepsen.db import Cluster, DbError, Member
from jepsen.faults.disks import Disks


class Full:
    """A disk that is full, then has space again; the nemesis then disarms the alarms, as an operator would."""

    targets: ClassVar[tuple[str, ...]] = ("one", "leader", "follower", "quorum", "all")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: fill."""
        for member in members:
            _disks(cluster).fill(member.number)

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: free the space."""
        for member in members:
            _disks(cluster).free(member.number)


def _disks(cluster: Cluster) -> Disks:
    if cluster.disks is None:
        raise DbError("the members of this cluster have no disks of their own")
    return cluster.disks


FAULTS: Final[dict[str, type[Full]]] = {"full": Full}
