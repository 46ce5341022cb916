"""Wall clocks that step, by hours, under a member that runs: as NTP steps one that was wrong, or an operator's hand.

Members run with ``libfaketime`` before them, which reads how far a clock is off from a file in the member's folder,
every second. Monotonic clocks are left alone, as the kernel leaves them alone when a clock is set.

Left out: clocks that run too fast or too slow, which the simulator has.
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
        DbError: it is not installed.
    """
    for place in PLACES:
        for path in sorted(Path(place).glob(f"**/faketime/{LIBRARY}")):
            return str(path)
    raise DbError(f"there is no {LIBRARY}, which clocks are stepped with: apt-get install faketime")


def environment(member: Member, library_path: str) -> dict[str, str]:
    """Return the variables with which a member takes its wall clock from its file; it begins right."""
    if not _file(member).exists():
        set_offset(member, "+0")
    return {
        "LD_PRELOAD": library_path,
        "FAKETIME_TIMESTAMP_FILE": str(_file(member)),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def set_offset(member: Member, offset: str) -> None:
    """Set how far the wall clock of a member is off, in libfaketime's words, such as ``+3h``."""
    file = _file(member)
    beside = file.with_suffix(".new")
    beside.write_text(offset)
    beside.replace(file)  # never read half


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


FAULTS: Final[dict[str, type[Ahead]]] = {"ahead": Ahead, "behind": Behind}
