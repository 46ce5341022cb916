"""Periodic work of a member: database commits, compaction in slices, cutting the log, checking the free disk space.

It runs on the loop in small steps. None of it is needed for the safety of acknowledgements; all of it is needed for a
member that runs for months.

CUTTING THE LOG: when what the database has is marked in it, and what of it is kept behind the marker.

The log of a member is in memory and on disk. Both would grow with every entry. So the log is cut when it has a certain
number of entries after its last marker, or a certain size: some entries may be a million times larger than others.

    entries   ... 4990 | 4991 ........ 5000 | 5001 ...... 5400 | 5401 ..... 5460
                 gone  |  kept for slow     ^ marker           ^ durable in the database
                       |  followers           next marker: when it has moved far enough

Invariants

- Only entries that are durable in the database are marked; only marked entries are dropped, in memory and, in whole
  segments, on disk.
- Memory: at most ``snapshot_bytes + catchup_bytes`` and the entries that the database does not have yet, except while a
  database copy is being sent.
- While a copy is being sent, the entries after it are kept, up to ``LOG_HELD_*``; beyond that the copy is cancelled.

Not here: the copies (``replica/snapshots``); when the database writes (``housekeeping``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from raftkv.errors import MapFullError
from raftkv.histograms import Buckets, doubling
from raftkv.raft.log import ENTRY_OVERHEAD_BYTES
from raftkv.raft.types import NO_LIMIT, SnapshotMeta
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.auto_compaction import AutoCompaction
from raftkv.replica.node.disk import Disk, Marker
from raftkv.replica.node.node import Node
from raftkv.replica.snapshots import SnapshotSender
from raftkv.storage.mvcc import Store
from raftkv.storage.wal import WAL, WALSpaceError

_log = logging.getLogger(__name__)

LOG_HELD_ENTRIES_MAX: Final = 500_000
LOG_HELD_BYTES_MAX: Final = 512 * 1024 * 1024
"""Maximum size of entries kept in memory and on disk for a member that is being sent the database. When more is written
meanwhile, the transfer is cancelled and the log is cut: the member gets a newer database later."""

DROPPED_AT_ONCE_MAX: Final = 5_000
"""Entries dropped per step: freeing them takes about 2 ms, and write rates stay below 50,000 entries per second."""

DROPPED_AT_ONCE_BYTES: Final = 32 * 1024 * 1024
"""Bytes of entries dropped per step: returning memory to the system takes about 0.1 ms per MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Limits of the size of the log.

    Attributes:
        snapshot_entries: number of applied entries after which the log is marked and cut.
        snapshot_bytes: size of the log, beyond the entries kept for slow followers, after which it is cut too.
        catchup_entries, catchup_bytes: entries kept before the marker for slow followers; the lower limit applies.
    """

    snapshot_entries: int
    snapshot_bytes: int
    catchup_entries: int
    catchup_bytes: int


class LogCut:
    """Cuts the log of one member.

    Arguments:
        node, store, disk: parts of the member.
        retention: limits of the log.
        snapshots: while it sends a database, the entries after that must stay, up to ``LOG_HELD_*``.
    """

    def __init__(self, node: Node, store: Store, disk: Disk, retention: Retention, snapshots: SnapshotSender) -> None:
        self._node = node
        self._store = store
        self._disk = disk
        self._retention = retention
        self._snapshots = snapshots
        self._marking = False
        # End and size of the log at the beginning of the copy for which the log is kept.
        self._held_from: tuple[int, int] | None = None

    def step(self) -> None:
        """Write a marker for the entries in the database, if due, and drop unneeded entries; call after each commit."""
        self._drop()
        if not self._marking and not self._is_held() and self._is_due():
            log, durable = self._node.log, self._store.durable_index
            self._marking = True
            meta = SnapshotMeta(durable, log.term(durable), self._store.conf_state)
            self._disk.submit(Marker(meta, lambda: self._marked(meta)))

    def _is_due(self) -> bool:
        log, durable, retention = self._node.log, self._store.durable_index, self._retention
        new = durable - log.snapshot().index
        if new < retention.snapshot_entries and (
            new <= 0 or log.size_bytes < retention.snapshot_bytes + retention.catchup_bytes
        ):
            return False
        # The configuration at that index is known only when the database has caught up with its last change.
        return durable >= self._node.conf_changed_at

    def _is_held(self) -> bool:
        """Whether the log must be kept for a member that is being sent the database; limited, as it is in memory."""
        log = self._node.log
        if not self._snapshots.holds_log():
            self._held_from = None
            return False
        if self._held_from is None:
            self._held_from = log.last_index(), log.size_bytes
        entries, size_bytes = log.last_index() - self._held_from[0], log.size_bytes - self._held_from[1]
        if entries > LOG_HELD_ENTRIES_MAX or size_bytes > LOG_HELD_BYTES_MAX:
            self._snapshots.give_up(
                f"{entries} entries of {size_bytes >> 20} MiB were written meanwhile, too many to keep"
            )
        return True

    def _marked(self, meta: SnapshotMeta) -> None:
        self._marking = False
        log = self._node.log
        if meta.index <= log.snapshot().index:
            return  # a received snapshot has replaced the log meanwhile
        log.create_snapshot(meta.index, meta.conf_state)
        self._drop()

    def _drop(self) -> None:
        """Drop entries before the marker that exceed the limits; a large number is dropped over several steps."""
        log, retention = self._node.log, self._retention
        marked, first = log.snapshot().index, log.first_index()
        too_old, size_bytes = marked - retention.catchup_entries, log.size_bytes
        if first > marked or (first > too_old and size_bytes <= retention.catchup_bytes):
            return
        end = min(marked + 1, first + DROPPED_AT_ONCE_MAX)
        cut, least_bytes = first - 1, size_bytes - DROPPED_AT_ONCE_BYTES
        for entry in log.entries(first, end, NO_LIMIT):
            if size_bytes < least_bytes or (entry.index > too_old and size_bytes <= retention.catchup_bytes):
                break
            size_bytes -= len(entry.data) + ENTRY_OVERHEAD_BYTES
            cut = entry.index
        log.compact(cut)
        _log.debug("truncated the log before entry %d", cut)


SPACE_FAILURES_MAX: Final = 3
"""Commits in a row that may fail for lack of space although the disk has some (lack of address space, for example)."""

DISK_WATCH_S: Final = 1.0


class CompactionTimes:
    """Durations of compactions, in milliseconds, as etcd counts them.

    Attributes:
        slices: durations of the slices, during which everything else waits.
        wholes: durations of whole compactions, including pauses between slices.
        ended_at: end time of the last compaction, in seconds since 1970; 0: none since the start.
    """

    def __init__(self) -> None:
        self.slices = Buckets(doubling(1, 13))
        self.wholes = Buckets(doubling(100, 14))
        self.ended_at = 0.0
        self._began_s: float | None = None

    @contextmanager
    def slice(self) -> Iterator[None]:
        """Measure the duration of a slice."""
        began_s = time.perf_counter()
        if self._began_s is None:
            self._began_s = began_s
        yield
        self.slices.observe((time.perf_counter() - began_s) * 1e3)

    def over(self) -> None:
        """Record the end of the last scheduled compaction."""
        if self._began_s is not None:
            self.wholes.observe((time.perf_counter() - self._began_s) * 1e3)
            self.ended_at, self._began_s = time.time(), None


class Housekeeping:
    """The periodic work of a member.

    Arguments:
        node, store, wal, admission: parts of the member.
        commit_interval_s: longest time between commits of the database.
        compaction_pause_s: pause between two slices of a compaction.
        compaction_keys: number of keys per slice.
        log_cut: cuts the part of the log that the database has.
        on_no_space: called with the reason while the database or the log finds no space.
        auto_compaction: compacts automatically, if configured.
    """

    def __init__(
        self,
        node: Node,
        store: Store,
        wal: WAL,
        admission: Admission,
        log_cut: LogCut,
        *,
        commit_interval_s: float,
        compaction_pause_s: float,
        compaction_keys: int,
        on_no_space: Callable[[str], None],
        auto_compaction: AutoCompaction | None,
    ) -> None:
        self._node = node
        self._store = store
        self._wal = wal
        self._admission = admission
        self._log_cut = log_cut
        self._commit_interval_s = commit_interval_s
        self._compaction_pause_s = compaction_pause_s
        self._compaction_keys = compaction_keys
        self._on_no_space = on_no_space
        self._space_error: Exception | None = None
        self._space_failures = 0
        self._auto_compaction = auto_compaction
        self.compactions = CompactionTimes()

    async def run(self) -> None:
        """Work until cancelled; an error stops the member."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._commit())
                group.create_task(self._compact())
                group.create_task(self._watch_disk())
                if self._auto_compaction is not None:
                    group.create_task(self._auto_compaction.run())
        except* Exception as errors:
            self._node.fatal(errors.exceptions[0])

    async def _commit(self) -> None:
        while True:
            await asyncio.sleep(self._commit_interval_s)
            self._store.commit()
            self._note_space()
            self._log_cut.step()

    def _note_space(self) -> None:
        """Make the member refuse writes while the database finds no space: its batch is kept in memory and retried.

        Space may have become free after the failure, so the disk is checked again. A full map grows as soon as the last
        reader of the database has ended, which is no reason to refuse writes.
        """
        error = self._store.space_error
        if error is None or isinstance(error, MapFullError):
            self._space_failures = 0
        elif error is not self._space_error:
            self._space_error = error
            has_room = not self._admission.finds_no_room()
            self._space_failures = self._space_failures + 1 if has_room else 0
            if not has_room or self._space_failures >= SPACE_FAILURES_MAX:
                self._on_no_space(str(error))

    async def _compact(self) -> None:
        """Run a slice of compaction, then pause for the clients; repeat while there is something to compact."""
        while True:
            await asyncio.sleep(self._compaction_pause_s if self._store.is_compacting else self._commit_interval_s)
            if self._store.is_compacting:
                with self.compactions.slice():
                    self._store.compaction_step(self._compaction_keys)
            else:
                self.compactions.over()

    async def _watch_disk(self) -> None:
        while True:
            await asyncio.sleep(DISK_WATCH_S)
            self._admission.watch_disk()
            self._admission.watch_quota()
            if self._wal.needs_next:
                await self._prepare_segment()

    async def _prepare_segment(self) -> None:
        try:
            await asyncio.to_thread(self._wal.prepare_next)
        except WALSpaceError as error:
            # The current segment still has space for requests that free space.
            self._on_no_space(str(error))
