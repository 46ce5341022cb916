"""Wall clocks that step by hours while a member runs, and clocks that run too fast or too slow.

Members run with ``libfaketime``, which reads the offset of the clock every second from a file in the member's folder.
Steps do not affect monotonic clocks, as when the kernel's clock is set. A clock with another rate simulates a bad
quartz: the monotonic clock has the same rate, and the member is restarted for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final

from jepsen.db import Cluster, DbError, Member

LIBRARY: Final = "libfaketimeMT.so.1"
PLACES: Final = ("/usr/lib", "/usr/lib64", "/usr/local/lib")


def library() -> str:
    """Return the path of libfaketime.

    Raises:
        DbError: libfaketime is not installed.
    """
    for place in PLACES:
        for path in sorted(Path(place).glob(f"**/faketime/{LIBRARY}")):
            return str(path)
    raise DbError(f"there is no {LIBRARY}, which clocks are stepped with: apt-get install faketime")


def environment(member: Member, library_path: str) -> dict[str, str]:
    """Return the environment in which a member reads its clock offset from its file; the initial offset is zero."""
    if not _file(member).exists():
        set_offset(member, "+0")
    return {
        "LD_PRELOAD": library_path,
        "FAKETIME_TIMESTAMP_FILE": str(_file(member)),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def set_offset(member: Member, offset: str) -> None:
    """Set the offset of a member's wall clock, in libfaketime's syntax, such as ``+3h``."""
    file = _file(member)
    beside = file.with_suffix(".new")
    beside.write_text(offset)
    beside.replace(file)  # the file is never read half-written


def _file(member: Member) -> Path:
    return member.folder.resolve() / "clock"


class Ahead:
    """A clock that jumps three hours ahead, and back."""

    targets: ClassVar[tuple[str, ...]] = ("one", "leader", "follower", "all")
    offset: ClassVar[str] = "+3h"

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: jump."""
        for member in members:
            set_offset(member, self.offset)

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: jump back."""
        for member in members:
            set_offset(member, "+0")


class Behind(Ahead):
    """A clock that jumps three hours back, and ahead again."""

    offset: ClassVar[str] = "-3h"


class Fast:
    """All clocks of a member run five percent fast, for one of its lives."""

    targets: ClassVar[tuple[str, ...]] = ("one", "leader", "follower", "all")
    rate: ClassVar[str] = "x1.05"

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: restart with another rate."""
        cluster.kill(members)
        for member in members:
            file = member.folder.resolve() / "rate"
            file.write_text(f"+0 {self.rate}")
            rated = {"FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_DONT_FAKE_MONOTONIC": "0"}
            cluster.start([member], {**cluster.environment(member), **rated})

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: restart with the right rate."""
        cluster.kill(members)
        cluster.start(members)


class Tardy(Fast):
    """All clocks of a member run five percent slow, for one of its lives."""

    rate: ClassVar[str] = "x0.95"


RATES: Final = ("fast", "tardy")
FAULTS: Final[dict[str, type[Ahead] | type[Fast]]] = {"ahead": Ahead, "behind": Behind, "fast": Fast, "tardy": Tardy}
