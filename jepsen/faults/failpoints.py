"""Crashes at named points of the code: a member is down for a while, starts armed, dies at the point, starts again.

    kill -> others continue -> start with RAFTKV_FAILPOINTS="walBeforeSync=after-7 panic" -> exit status 66 -> start

The points are raftkv's (``storage/failpoints.py``; a test checks that the lists here name each one). A point that a run
does not reach within ``REACH_S`` is recorded as not reached: a small store does not fill a log segment, for example.
"""

from __future__ import annotations

from random import Random
from typing import ClassVar, Final

from jepsen.db import Cluster, Member

ENVIRONMENT: Final = "RAFTKV_FAILPOINTS"
PANIC_STATUS: Final = 66
REACH_S: Final = 15.0
"""Time limit for an armed member to start and to reach its point."""

BEHIND_ACKS: Final = 150
"""Writes that the member first misses: with ``--snapshot-count=50`` it then receives the whole database."""

OFTEN: Final = (
    "raftBeforeSave", "raftAfterSave", "raftBeforeLeaderSend", "raftBeforeFollowerSend", "raftBeforeAdvance",
    "beforeApplyOneEntryNormal", "afterApplyOneEntryNormal", "walBeforeWrite", "walAfterWrite", "walBeforeSync",
    "walAfterSync", "beforeCommit", "afterCommit", "beforeWritebackBuf", "afterWritebackBuf",
)  # fmt: skip
"""Points that every busy member reaches: it dies at one of the first ``HITS_MAX`` times."""

HITS_MAX: Final = 15

RECEIVING: Final = (
    "snapshotAfterPiece", "snapshotBeforeRename", "snapshotAfterRename", "raftBeforeApplySnap", "raftBeforeSaveSnap",
    "raftAfterSaveSnap", "applyBeforeOpenSnapshot", "replaceBeforeRename", "raftAfterApplySnap",
)  # fmt: skip
"""Points of a member that receives the database."""

SELDOM: Final = (
    "raftBeforeWALRelease", "raftAfterWALRelease", "compactBeforeCommitScheduledCompact",
    "compactAfterCommitScheduledCompact", "compactBeforeCommitBatch", "compactAfterCommitBatch",
    "compactBeforeSetFinishedCompact", "compactAfterSetFinishedCompact",
)  # fmt: skip
"""Points at log truncation and compaction: they require a small ``--snapshot-count`` and ``--compact-every``."""

ELSEWHERE: Final = {
    "walBeforeCut": "tests/storage/wal/test_failures.py",
    "walBeforeCutRename": "tests/storage/wal/test_failures.py",
    "walAfterCut": "tests/storage/wal/test_failures.py",
    "walBeforeUnlink": "tests/storage/wal/test_failures.py",
    "walAfterUnlink": "tests/storage/wal/test_failures.py",
    "walBeforeRepair": "tests/storage/wal/test_failures.py",
    "walAfterRepairCopy": "tests/storage/wal/test_failures.py",
    "walAfterRepair": "tests/storage/wal/test_failures.py",
    "defragBeforeCopy": "tests/replica/maintenance/test_defragment.py",
    "defragAfterCopy": "tests/replica/maintenance/test_defragment.py",
    "defragBeforeRename": "tests/replica/maintenance/test_defragment.py",
    "defragAfterRename": "tests/replica/maintenance/test_defragment.py",
    "restoreBeforeRename": "tests/offline/etcd/test_restore.py",
    "restoreBeforeRenameLog": "tests/offline/etcd/test_restore.py",
    "snapshotBeforeSend": "tests/server/process/test_cluster.py",
    "snapshotBeforeCopySync": "tests/server/process/test_cluster.py",
    "beforeApplyOneConfChange": "tests/server/process/test_total.py",
    "afterApplyOneConfChange": "tests/server/process/test_total.py",
}
"""Points that no storm reaches, and the tests that do."""


class Crash:
    """A crash of a member at a failpoint; the nemesis executes it step by step (``Nemesis``)."""

    targets: ClassVar[tuple[str, ...]] = (*OFTEN, *RECEIVING, *SELDOM)

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: kill, so that the next start can be armed."""
        cluster.kill(members)

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: start without the point."""
        cluster.start([member for member in members if not member.up])


def environment(point: str, shuffle: int) -> dict[str, str]:
    """Return the environment that arms a point of a member about to start.

    Arguments:
        point: name of the failpoint.
        shuffle: seed of the number of passes before the member dies at the point.
    """
    hits = Random(shuffle).randrange(HITS_MAX) if point in OFTEN else 0
    return {ENVIRONMENT: f"{point}=after-{hits} panic"}
