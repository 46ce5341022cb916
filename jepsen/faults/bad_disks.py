"""Bad disks: power loss, false syncs, errors and delays; also shortage of memory. Based on ``power.LyingDisk``.

    power      members are killed and lose unsynced data -> start
    liar       the syncs of one member do nothing -> it loses power -> start: the others have what it acknowledged
    liars      the same on all members, which no store survives: it shows that the checkers detect the loss
    failing    each sync is an error -> the member ends -> start
    erring     one call in fifty fails with one errno, or writes half -> members that ended start again
    stalling   each sync takes 200 ms
    rewind     a member is down, its disk is copied -> it continues -> its disk is reset to the copy: it forgets data
    rot        bits flip in the files of a running member, and so in its mapped pages, or of a briefly stopped one
               -> its answers are right or errors -> it is replaced, as by an operator
    starve     one memory allocation in a million fails (by the same shim) -> a member that ended starts again

Not here: disks without free space (``full_disks``).
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
"""Share of the sectors that rot; with a smaller one, few would be read during the fault."""
ERRING_PER_MILLION: Final = 20_000
STARVED_PER_MILLION: Final = 1
STARVED_ENVIRONMENT: Final = {"PYTHONMALLOC": "malloc"}
"""Makes Python allocate each object in the C library, instead of many at once."""
ERRORS: Final = (
    (OPENS | READS | WRITES | SYNCS | NAMES, errno.EIO),
    (OPENS | WRITES | NAMES, errno.ENOSPC),
    (OPENS | WRITES | NAMES, errno.EROFS),
    (WRITES, errno.EDQUOT),
    (OPENS, errno.EMFILE),
    (WRITES, SHORT),
)


class _BadDisk(ABC):
    """The base class: healing makes the disk good again and starts members that have ended."""

    targets: ClassVar[tuple[str, ...]] = ("one", "leader", "follower", "all")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``."""
        for member in members:
            self._spoil(cluster, member)

    @abstractmethod
    def _spoil(self, cluster: Cluster, member: Member) -> None:
        """Make the disk of one member bad."""

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``."""
        for member in members:
            disk_of(member).set()
            cluster.ended(member)
        cluster.start([member for member in members if not member.up])


class Power(_BadDisk):
    """A power loss: the member dies, and unsynced data is lost, torn and reordered."""

    targets: ClassVar[tuple[str, ...]] = ("one", "leader", "follower", "quorum", "all")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: for all members at the same time."""
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
        """Implement ``Fault.heal``: lose power; the disk is good from then on."""
        super().inject(cluster, members)
        super().heal(cluster, members)


class Liars(Liar):
    """Disks of all members that lie: acknowledged writes are lost, and the checkers must report it."""

    targets: ClassVar[tuple[str, ...]] = ("all",)

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        disk_of(member).lose_power(random.Random(0), Loss())  # consistent data: members cannot detect the loss


class Failing(_BadDisk):
    """A disk that answers each sync with an I/O error, until the member has ended."""

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        disk_of(member).set(calls=SYNCS, error=errno.EIO)


class Erring(_BadDisk):
    """A disk on which some calls fail, with one errno each time."""

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        rng = random.Random(f"erring {cluster.seed} {member.name} {member.lives}")
        calls, error = rng.choice(ERRORS)
        disk_of(member).set(calls=calls, error=error, per_million=ERRING_PER_MILLION)

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``; a member that is about to end is ended first."""
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
    """A disk that goes back in time, like one restored from a copy."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "follower")

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        cluster.kill([member])
        shutil.copytree(member.folder / "data", member.folder / "copy")
        cluster.start([member])

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: replace the disk with the copy."""
        cluster.kill(members)
        for member in members:
            shutil.rmtree(member.folder / "data")
            (member.folder / "copy").rename(member.folder / "data")
            disk_of(member).renew()
        super().heal(cluster, members)


class Rot(_BadDisk):
    """Bits that flip in the files of a member, during its life or between two lives."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "follower")

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        rng = random.Random(f"rot {cluster.seed} {member.name} {member.lives}")
        data, at_rest = member.folder / "data", rng.random() < 0.5
        if at_rest:
            cluster.kill([member])
        for path in sorted((data / "member" / "snap" / "db", *data.rglob("*.wal"))):
            if path.exists():  # a new member has no log before its first entry
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
        """Implement ``Fault.heal``: end the member, and never use its disk again."""
        for member in members:
            cluster.ended(member)
        cluster.kill(members)


class Starve(Erring):
    """Memory that runs out for a moment, anywhere in the program."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "follower")

    def _spoil(self, cluster: Cluster, member: Member) -> None:
        disk_of(member).set(calls=ALLOCATIONS, error=errno.ENOMEM, per_million=STARVED_PER_MILLION)


FAULTS: Final[dict[str, type[_BadDisk]]] = {
    "power": Power, "liar": Liar, "liars": Liars, "failing": Failing, "erring": Erring, "stalling": Stalling,
    "rewind": Rewind, "rot": Rot, "starve": Starve,
}  # fmt: skip
