"""What a member does beside serving: commits to disk, compaction in slices, cutting the log, watching the disk.

Runs on the loop in small steps. None of it is needed for an acknowledgement to be safe; all of it is needed for a
member that runs for months.

CUTTING THE LOG: when what the database has is marked in it, and what of it is kept behind the marker.

The log of a member is in memory and on disk. Both would grow with every entry, so it is cut whenever it has so many
entries behind its last marker, or holds so many bytes: entries may be a million times larger than others.

    entries   ... 4990 | 4991 ........ 5000 | 5001 ...... 5400 | 5401 ..... 5460
                 gone  |  kept for slow     ^ marker           ^ durable in the database
                       |  followers           next marker: when it has moved far enough

Invariants

- Only what is durable in the database is marked; only what is marked is dropped, in memory and, in whole segments, on
  disk.
- Memory: at most ``snapshot_bytes + catchup_bytes`` and what the database does not have yet, but for a copy on its way.
- While a copy is on its way the entries after it stay, up to ``LOG_HELD_*``; then the copy is given up.

Leaves out: the copies (``replica/snapshots``); when the database writes (``housekeeping``).
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
"""Entries kept in memory and on disk for a member that is being sent the database. When more is written meanwhile, the
send is given up, and the log is cut: the member gets a newer database later."""

DROPPED_AT_ONCE_MAX: Final = 5_000
"""Entries that one step drops: to free them takes some 2 ms, and nothing writes 50,000 a second."""

DROPPED_AT_ONCE_BYTES: Final = 32 * 1024 * 1024
"""Bytes of entries after which a step drops no more, likewise: memory goes back to the system at some 0.1 ms a MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How much of the log there may be.

    Attributes:
        snapshot_entries: applied entries after which the log is marked and cut.
        snapshot_bytes: bytes of the log, beyond those kept for slow followers, after which it is too.
        catchup_entries, catchup_bytes: entries kept behind the marker for slow followers, whichever are fewer.
    """

    snapshot_entries: int
    snapshot_bytes: int
    catchup_entries: int
    catchup_bytes: int


class LogCut:
    """Cuts the log of one member.

    Arguments:
        node, store, disk: of the member.
        retention: how much may be kept.
        snapshots: while one is being sent the entries after it must stay, up to ``LOG_HELD_*``.
    """

    def __init__(self, node: Node, store: Store, disk: Disk, retention: Retention, snapshots: SnapshotSender) -> None:
        self._node = node
        self._store = store
        self._disk = disk
        self._retention = retention
        self._snapshots = snapshots
        self._marking = False
        # The end and the size of the log when the copy began that it is held for.
        self._held_from: tuple[int, int] | None = None

    def step(self) -> None:
        """Mark what the database holds, if that is due, and drop what is not needed: after each commit."""
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
        # The configuration of that moment is known once the database has caught up.
        return durable >= self._node.conf_changed_at

    def _is_held(self) -> bool:
        """Whether the log must stay for a member that is being sent the database; not for ever, as it is in memory."""
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
            return  # a received snapshot replaced the log meanwhile
        log.create_snapshot(meta.index, meta.conf_state)
        self._drop()

    def _drop(self) -> None:
        """Drop what lies before the marker and is too much to keep; the rest of much of it in the next steps."""
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
        _log.debug("cut the log at %d", cut)


SPACE_FAILURES_MAX: Final = 3
"""Commits in a row that fail for want of room on a disk that has some (of address space, for example)."""

DISK_WATCH_S: Final = 1.0


class CompactionTimes:
    """How long compactions take, in milliseconds, as etcd counts them.

    Attributes:
        slices: of each slice, for which everything else waits.
        wholes: of each compaction, pauses between its slices included.
        ended_at: when the last one ended, in seconds since 1970; 0: none has since the start.
    """

    def __init__(self) -> None:
        self.slices = Buckets(doubling(1, 13))
        self.wholes = Buckets(doubling(100, 14))
        self.ended_at = 0.0
        self._began_s: float | None = None

    @contextmanager
    def slice(self) -> Iterator[None]:
        """Take the time of a slice."""
        began_s = time.perf_counter()
        if self._began_s is None:
            self._began_s = began_s
        yield
        self.slices.observe((time.perf_counter() - began_s) * 1e3)

    def over(self) -> None:
        """Nothing is compacted any more."""
        if self._began_s is not None:
            self.wholes.observe((time.perf_counter() - self._began_s) * 1e3)
            self.ended_at, self._began_s = time.time(), None


class Housekeeping:
    """The periodic work of a member.

    Arguments:
        node, store, wal, admission: of the member.
        commit_interval_s: longest time between commits of the database.
        compaction_pause_s: rest between two slices of a compaction.
        compaction_keys: keys that a slice looks at.
        log_cut: cuts the log behind what the database has.
        on_no_space: called, with what is in the way, while the database or the log finds no room.
        auto_compaction: compacts by the clock, if the member was asked to.
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
        """Work until cancelled; an error ends the member."""
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
        """Have writes refused while the database finds no room: its batch is kept in memory and tried again.

        A failure may be older than room that was made since, so the disk is looked at again. A full map grows as soon
        as the last reader has left the database: no reason to refuse anything.
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
        """A slice of compaction, then a pause for the clients; and so on while there is something to compact."""
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
            # There is room in the present segment, for what makes room.
            self._on_no_space(str(error))
