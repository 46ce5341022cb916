"""What a member does beside serving: commits to disk, compaction in slices, cutting the log, watching the disk.

Runs on the loop in small steps. None of it is needed for an acknowledgement to be safe; all of it is needed for a
member that runs for months.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from raftkv.errors import MapFullError
from raftkv.histograms import Buckets, doubling
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.auto_compaction import AutoCompaction
from raftkv.replica.node.log_cut import LogCut
from raftkv.replica.node.node import Node
from raftkv.storage.mvcc import Store
from raftkv.storage.wal import WAL, WALSpaceError

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
