"""Disks on which members lose power, are lied to, meet errors, wait or run short of memory: ``power.LyingDisk``.

    power      members are killed and lose what was not synced -> start
    liar       the syncs of one member do nothing -> it loses power -> start: the others have what it acknowledged
    liars      the same on all members, which no store survives: it shows that the checkers see the loss
    failing    each sync is an error -> the member ends -> start
    erring     one call in fifty fails with one errno, or writes half -> members that ended start again
    stalling   each sync takes 200 ms
    rewind     a member is down; its disk is copied -> it lives on -> its disk is as it was: it forgets a while
    rot        bits flip in the files of a member that runs, and so in the pages that it has mapped, or of one that is
               down for a moment -> its answers are right or errors -> it is replaced, as by an operator
    starve     one allocation of memory in a million fails (by the same shim) -> a member that ended starts again

Left out: disks without room (``full_disks``).
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Final

from jepsen.db import Cluster, Member
from jepsen.faults.power import ALLOCATIONS, NAMES, OPENS, READS, SECTOR_BYTES, SHORT, SYNCS, WRITES, Loss, disk_of

STALL_MS: Final = 200
ROTTEN_SHARE: Final = 0.1
"""Share of the sectors: a smaller one is seldom read while the fault lasts."""
ERRING_PER_MILLION: Final = 20_000
STARVED_PER_MILLION: Final = 1
STARVED_ENVIRONMENT: Final = {"PYTHONMALLOC": "malloc"}
"""Python asks the C library for each object, not for many at once."""
ERRORS: Final = (
    (OPENS | READS | WRITES | SYNCS | NAMES, errno.EIO),
    (OPENS | WRITES | NAMES, errno.ENOSPC),
    (OPENS | WRITES | NAMES, errno.EROFS),
    (WRITES, errno.EDQUOT),
    (OPENS, errno.EMFILE),
    (WRITES, SHORT),
)


class _BadDisk(ABC):
    """The base: healing makes the disk a good one and starts members that have ended."""

    targets: ClassVar[tuple[str, ...]] = ("one", "leader", "follower", "all")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``."""
        for member in members:
            self._spoil(cluster, member)

    @abstractmethod
    def _spoil(self, cluster: Cluster, member: Member) -> None:
        """Make the disk of one member a bad one."""

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``."""
        for member in members:
            disk_of(member).set()
            cluster.ended(member)
        cluster.start([member for member in members if not member.up])


class Power(_BadDisk):
    """A loss of power: death, and what was not synced is lost, torn and reordered."""

    targets: ClassVar[tuple[str, ...]] = ("one", "leader", "follower", "quorum", "all")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: all at one instant."""
        cluster.kill(members)
        for member in members:
            self._spoil(cluster, member)

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        disk_of(member).lose_power(random.Random(f"power {cluster.seed} {member.name} {member.lives}"))


class Liar(Power):
    """A disk whose syncs do nothing, which then loses power."""

    targets: ClassVar[tuple[str, ...]] = ("one", "leader", "follower")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: lie."""
        for member in members:
            disk_of(member).set(lies=True)

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: lose power, with a good disk from now on."""
        super().inject(cluster, members)
        super().heal(cluster, members)


class Liars(Liar):
    """Disks of all members that lie: acknowledged writes are lost, and the checkers must say so."""

    targets: ClassVar[tuple[str, ...]] = ("all",)

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        disk_of(member).lose_power(random.Random(0), Loss())  # what is left is whole: members cannot find out


class Failing(_BadDisk):
    """A disk that answers each sync with an input/output error, until the member has ended."""

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        disk_of(member).set(calls=SYNCS, error=errno.EIO)


class Erring(_BadDisk):
    """A disk on which some calls fail, with one errno each time."""

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        rng = random.Random(f"erring {cluster.seed} {member.name} {member.lives}")
        calls, error = rng.choice(ERRORS)
        disk_of(member).set(calls=calls, error=error, per_million=ERRING_PER_MILLION)

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``; one that is about to end is ended first."""
        for member in members:
            cluster.ended(member)
        cluster.kill(members)
        super().heal(cluster, members)


class Stalling(_BadDisk):
    """A disk on which each sync takes 200 ms."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "follower", "quorum", "all")

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        disk_of(member).set(delay_ms=STALL_MS)


class Rewind(_BadDisk):
    """A disk that goes back in time, as one that was restored from a copy does."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "follower")

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        cluster.kill([member])
        shutil.copytree(member.folder / "data", member.folder / "copy")
        cluster.start([member])

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: the copy takes the place of the disk."""
        cluster.kill(members)
        for member in members:
            shutil.rmtree(member.folder / "data")
            (member.folder / "copy").rename(member.folder / "data")
            disk_of(member).renew()
        super().heal(cluster, members)


class Rot(_BadDisk):
    """Bits that flip in the files of a member, in the middle of its life or between two."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "follower")

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        rng = random.Random(f"rot {cluster.seed} {member.name} {member.lives}")
        data, at_rest = member.folder / "data", rng.random() < 0.5
        if at_rest:
            cluster.kill([member])
        for path in sorted((data / "member" / "snap" / "db", *data.rglob("*.wal"))):
            if path.exists():  # a new member has none before its first entry
                self._flip(path, rng)
        if at_rest:
            cluster.start([member])

    def _flip(self, path: Path, rng: random.Random) -> None:
        with path.open("r+b", buffering=0) as file:
            sectors = range(0, path.stat().st_size, SECTOR_BYTES)
            used = [at for at in sectors if any(os.pread(file.fileno(), SECTOR_BYTES, at))]
            for sector in rng.sample(used, round(ROTTEN_SHARE * len(used))):
                at = sector + rng.randrange(SECTOR_BYTES)
                if byte := os.pread(file.fileno(), 1, at):
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << rng.randrange(8)]), at)

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: the member ends, and its disk is not used again."""
        for member in members:
            cluster.ended(member)
        cluster.kill(members)


class Starve(Erring):
    """Memory that runs out for an instant, anywhere in the program."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "follower")

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        disk_of(member).set(calls=ALLOCATIONS, error=errno.ENOMEM, per_million=STARVED_PER_MILLION)


FAULTS: Final[dict[str, type[_BadDisk]]] = {
    "power": Power,
    "liar": Liar,
    "liars": Liars,
    "failing": Failing,
    "erring": Erring,
    "stalling": Stalling,
    "rewind": Rewind,
    "rot": Rot,
    "starve": Starve,
}
