"""What a member does beside serving: commits to disk, compaction in slices, cutting the log, watching the disk.

Runs on the loop in small steps. None of it is needed for an acknowledgement to be safe; all of it is needed for a
member that runs for months.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from raftkv.errors import MapFullError
from raftkv.raft.config import NO_LIMIT
from raftkv.raft.memory_log import size_of
from raftkv.raft.types import SnapshotMeta
from raftkv.server.node.admission import Admission
from raftkv.server.node.auto_compaction import AutoCompaction
from raftkv.server.node.disk import Disk, Mark
from raftkv.server.node.node import Node
from raftkv.storage.mvcc import Store
from raftkv.storage.wal import WAL, WALSpaceError

_log = logging.getLogger(__name__)
SPACE_FAILURES_MAX: Final = 3
"""Commits in a row that fail for want of room on a disk that has some (of address space, for example)."""

DISK_WATCH_S: Final = 1.0


LOG_HELD_ENTRIES_MAX: Final = 500_000
LOG_HELD_BYTES_MAX: Final = 512 * 1024 * 1024
"""Entries kept in memory and on disk for a member that is being sent the database. When more is written meanwhile, the
send is given up, and the log is cut: the member gets a newer database later."""


class SnapshotsSent(Protocol):
    """Snapshots on their way to other members."""

    @property
    def in_flight(self) -> bool:
        """Whether there are any."""

    def give_up(self, reason: str) -> bool:
        """End them."""


class Housekeeping:
    """The periodic work of a member.

    Arguments:
        node, store, wal, disk, admission: of the member.
        commit_interval_s: longest time between commits of the database.
        compaction_pause_s: rest between two slices of a compaction.
        compaction_keys: keys that a slice looks at.
        snapshot_entries: applied entries after which the log is cut.
        catchup_entries: entries kept behind the cut for slow followers.
        snapshots: while one is being sent the entries after it must stay, up to ``LOG_HELD_*``.
        on_no_space: called while the database finds no room for a commit.
        auto_compaction: compacts by the clock, if the member was asked to.
    """

    def __init__(
        self,
        node: Node,
        store: Store,
        wal: WAL,
        disk: Disk,
        admission: Admission,
        *,
        commit_interval_s: float,
        compaction_pause_s: float,
        compaction_keys: int,
        snapshot_entries: int,
        catchup_entries: int,
        snapshots: SnapshotsSent,
        on_no_space: Callable[[], None],
        auto_compaction: AutoCompaction | None,
    ) -> None:
        self._node = node
        self._store = store
        self._wal = wal
        self._disk = disk
        self._admission = admission
        self._commit_interval_s = commit_interval_s
        self._compaction_pause_s = compaction_pause_s
        self._compaction_keys = compaction_keys
        self._snapshot_entries = snapshot_entries
        self._catchup_entries = catchup_entries
        self._snapshots = snapshots
        self._held_to = self._held_entries = self._held_bytes = 0
        self._on_no_space = on_no_space
        self._space_error: Exception | None = None
        self._space_failures = 0
        self._auto_compaction = auto_compaction
        self._marking = False

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
            self._cut_log()

    def _note_space(self) -> None:
        """Have writes refused while the database finds no room: its batch is kept in memory and tried again.

        A failure may be older than the room that somebody has made since, so the disk is looked at again. A map that
        is full grows as soon as nobody reads the database: no reason to refuse anything.
        """
        error = self._store.space_error
        if error is None or isinstance(error, MapFullError):
            self._space_failures = 0
        elif error is not self._space_error:
            self._space_error = error
            self._space_failures += 1
            if self._admission.finds_no_room() or self._space_failures >= SPACE_FAILURES_MAX:
                self._on_no_space()

    async def _compact(self) -> None:
        """A slice of compaction, then a pause for the clients; and so on while there is something to compact."""
        while True:
            await asyncio.sleep(self._compaction_pause_s if self._store.is_compacting else self._commit_interval_s)
            if self._store.is_compacting:
                self._store.compaction_step(self._compaction_keys)

    async def _watch_disk(self) -> None:
        while True:
            await asyncio.sleep(DISK_WATCH_S)
            self._admission.watch_disk()
            if self._wal.needs_next:
                await self._prepare_segment()

    async def _prepare_segment(self) -> None:
        try:
            await asyncio.to_thread(self._wal.prepare_next)
        except WALSpaceError as error:
            # There is room in the present segment; writes that can grow the store are refused by now.
            _log.warning("no room for the next log segment: %s", error)

    def _cut_log(self) -> None:
        """Mark what the database holds, so that the log before it can go."""
        log, durable = self._node.log, self._store.durable_index
        marked = log.snapshot().index
        if self._marking or self._holds_log() or durable - marked < self._snapshot_entries:
            return
        if durable < self._node.conf_changed_at:
            return  # the configuration of that moment is known once the database has caught up
        self._marking = True
        meta = SnapshotMeta(durable, log.term(durable), self._store.conf_state)
        self._disk.submit(Mark(meta, lambda: self._marked(meta)))

    def _holds_log(self) -> bool:
        """Whether the log must stay for a member that is being sent the database; not for ever, as it is in memory."""
        log = self._node.log
        last = log.last_index()
        if not self._snapshots.in_flight:
            self._held_to, self._held_entries, self._held_bytes = last, 0, 0
            return False
        first = max(self._held_to + 1, log.first_index())
        if last >= first:
            self._held_entries += last + 1 - first
            self._held_bytes += size_of(log.entries(first, last + 1, NO_LIMIT))
            self._held_to = last
        if self._held_entries > LOG_HELD_ENTRIES_MAX or self._held_bytes > LOG_HELD_BYTES_MAX:
            self._snapshots.give_up(
                f"{self._held_entries} entries of {self._held_bytes >> 20} MiB were written meanwhile, too many to keep"
            )
        return True

    def _marked(self, meta: SnapshotMeta) -> None:
        self._marking = False
        log = self._node.log
        if meta.index <= log.snapshot().index:
            return  # a received snapshot replaced the log meanwhile
        log.create_snapshot(meta.index, meta.conf_state)
        cut = meta.index - self._catchup_entries
        if cut >= log.first_index():
            log.compact(cut)
            _log.debug("cut the log at %d", cut)
