"""The simulated disk of a member's log: the production write-ahead log on files in memory, and its crashes.

Owns the bytes (frames, checksums, segments, cuts, release) and ``view``: what is certainly durable, as a fold of the
records that were synced. After a crash, what the production code reads back must be ``view`` and a part of what was
written after it, from its beginning; another answer is a violation (D6).

``Disk`` replaces the production ``Disk`` and simulates its thread on virtual time: batches are written when a sync
begins, nothing is written during a sync, and batches submitted during a sync share the next one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from raftkv.errors import CorruptionError
from raftkv.raft.types import Entry, HardState, SnapshotMeta
from raftkv.replica.node.disk import Batch
from raftkv.storage.wal import WAL, Recovered
from tests.sim.clients.history import ViolationError
from tests.storage.wal.simdisk import SimDisk

_DIRECTORY = "/wal"
_METADATA = b"simulated"

Record = Entry | HardState | SnapshotMeta


class Threads(Protocol):
    """Runs functions in the process of a member while it lives."""

    def later(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Run a function on a thread other than the loop's."""

    def call_soon(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Run a function on the loop."""


@dataclass(frozen=True, slots=True)
class DiskParameters:
    """Speed of the disks (seconds), and effects of a crash."""

    sync_s_min: float = 0.000_08
    sync_s_mean: float = 0.000_5
    commit_s_mean: float = 0.01
    inline: bool = True
    """Syncs are short: batches are written within the turn of the loop, as production does on a fast disk."""
    power_cuts: float = 0.7
    """Share of the crashes that cost the page cache too."""
    segment_bytes: int = 32_768


class LogGapError(Exception):
    """A write-ahead log skips an index: the member wrote its entries in the wrong order."""


class LogView:
    """The state described by a write-ahead log: the fold of its records in order."""

    def __init__(self) -> None:
        self.hard_state = HardState()
        self.snapshot = SnapshotMeta()
        self.entries: list[Entry] = []

    def copy(self) -> LogView:
        """An independent copy."""
        other = LogView()
        other.hard_state, other.snapshot, other.entries = self.hard_state, self.snapshot, list(self.entries)
        return other

    def last_index(self) -> int:
        """Index of the last entry, or of the snapshot marker."""
        return self.snapshot.index + len(self.entries)

    def term(self, index: int) -> int | None:
        """Term at ``index``; None where the log does not have it."""
        at = index - self.snapshot.index
        if at == 0:
            return self.snapshot.term
        return self.entries[at - 1].term if 0 < at <= len(self.entries) else None

    def fold(self, record: Record) -> None:
        """Add one record."""
        if isinstance(record, Entry):
            self._fold_entry(record)
        elif isinstance(record, HardState):
            self.hard_state = record
        else:
            self._fold_marker(record)

    def _fold_entry(self, entry: Entry) -> None:
        if entry.index <= self.snapshot.index:
            return
        position = entry.index - self.snapshot.index - 1
        if position > len(self.entries):
            raise LogGapError(f"entry {entry.index} after {self.last_index()}")
        del self.entries[position:]
        self.entries.append(entry)

    def _fold_marker(self, meta: SnapshotMeta) -> None:
        """Drop entries that the snapshot covers; keep the tail only if it continues the snapshot's history.

        A marker of a *received* snapshot has another term at its index (else Raft would not have restored it):
        entries written before it belong to another history and must not be read back.
        """
        if meta.index <= self.snapshot.index:
            return
        matches = self.term(meta.index) == meta.term
        self.entries = self.entries[meta.index - self.snapshot.index :] if matches else []
        self.snapshot = meta

    def settled(self) -> LogView:
        """Return the view with its hard state advanced to the marker: a snapshot stands for committed entries."""
        state, meta, other = self.hard_state, self.snapshot, self.copy()
        vote = state.vote if meta.term <= state.term else 0
        other.hard_state = HardState(max(state.term, meta.term), vote, max(state.commit, meta.index))
        return other


class _Files(SimDisk):
    """Files of a process that may be dead: closing a file again is allowed."""

    def close(self, fd: int) -> None:
        if fd in self.open_files or fd in self.locks:
            super().close(fd)


class DurableLog:
    """The log of a member in all its lives. Satisfies ``replica.node.disk.Log``."""

    def __init__(self, rng: random.Random, parameters: DiskParameters) -> None:
        self.directory = _DIRECTORY
        self.view = LogView()
        self.torn_count = 0
        self.syncs_count = 0
        self._rng = rng
        self._segment_bytes = parameters.segment_bytes
        self._files = _Files()
        self._frames: list[list[Record]] = []
        """Written, or about to be, and not synced."""
        self._allowed: list[LogView] | None = None
        self._wal = WAL.create(_DIRECTORY, _METADATA, segment_bytes=self._segment_bytes, disk=self._files)

    def found(self, meta: SnapshotMeta) -> None:
        """Begin behind a marker."""
        self.save_snapshot(meta, HardState(meta.term, 0, meta.index))
        self.sync()

    # -- what the member does -------------------------------------------------------------------------------

    def append(self, hard_state: HardState | None, entries: Sequence[Entry]) -> None:
        """Implement ``Log.append``."""
        self._frames.append([*entries] if hard_state is None else [*entries, hard_state])
        self._wal.append(hard_state, entries)

    def save_snapshot(self, meta: SnapshotMeta, hard_state: HardState | None = None) -> None:
        """Implement ``Log.save_snapshot``."""
        self._frames.append([meta] if hard_state is None else [meta, hard_state])
        self._wal.save_snapshot(meta, hard_state)

    def sync(self) -> None:
        """Implement ``Log.sync``."""
        self._wal.sync()
        self._synced()

    def release(self, index: int) -> int:
        """Implement ``Log.release``."""
        count = self._wal.release(index)
        self._synced()
        return count

    def _synced(self) -> None:
        self.syncs_count += 1
        frames, self._frames = self._frames, []
        fold = self.view.fold
        for frame in frames:
            for record in frame:
                fold(record)

    @property
    def needs_next(self) -> bool:
        """Implement ``WAL.needs_next``."""
        return self._wal.needs_next

    def prepare_next(self) -> None:
        """Implement ``WAL.prepare_next``."""
        self._wal.prepare_next()

    # -- what happens to it ---------------------------------------------------------------------------------

    def crash(self, *, power: bool) -> None:
        """Crash the process or cut its power."""
        views = [self.view]
        for frame in self._frames:
            view = views[-1].copy()
            for record in frame:
                view.fold(record)
            views.append(view)
        if self._allowed is None:  # else it died while it started: nothing was written since the last crash
            self._allowed = [view.settled() for view in reversed(views)]
        self._frames = []
        self._files.calls.clear()
        if power:
            self._files.power_cut(self._rng)
        else:
            self._files.kill()

    def open(self) -> Recovered:
        """Read the log back. Raises ViolationError when no crash can have left its contents."""
        if self._allowed is None:
            self._files.kill()
            self._allowed = [self.view.settled()]
        try:
            self._wal, recovered = WAL.open(_DIRECTORY, segment_bytes=self._segment_bytes, disk=self._files)
        except CorruptionError as error:
            raise ViolationError("D6", f"a crash alone made the log unreadable: {error}") from error
        self.torn_count += recovered.repair is not None
        found = (recovered.hard_state, recovered.snapshot, recovered.entries)
        for view in self._allowed:
            if (view.hard_state, view.snapshot, view.entries) == found:
                self.view, self._allowed = view, None
                return recovered
        allowed = [f"{view.hard_state} {view.snapshot} {view.entries}" for view in self._allowed]
        raise ViolationError("D6", f"read back {recovered}, allowed was one of {allowed}")


class Disk:
    """Makes batches durable in order, in the turn or later. Replaces ``replica.node.disk.Disk``.

    Arguments:
        log: of the member.
        threads: of the member.
        rng: draws latencies.
        parameters: ranges of latencies.
    """

    def __init__(self, log: DurableLog, threads: Threads, rng: random.Random, parameters: DiskParameters) -> None:
        self.outstanding = 0
        self.slow_factor = 1
        self._log = log
        self._threads = threads
        self._rng = rng
        self._parameters = parameters
        self._queue: list[Batch] = []
        self._number = 0
        self._syncing: list[Batch] = []

    def submit(self, batch: Batch) -> None:
        """Implement ``replica.node.disk.Disk.submit``."""
        if self._parameters.inline and self.slow_factor == 1 and batch.is_short and not self.outstanding:
            batch.write(self._log)
            if batch.must_sync:
                self._log.sync()
            batch.done()
            return
        self.outstanding += 1
        self._queue.append(batch)
        if not self._syncing:
            self._begin()

    def _begin(self) -> None:
        """Start a sync of all waiting batches."""
        self._syncing, self._queue = self._queue, []
        self._number += 1
        self._threads.later(0.0, self._write, self._number)

    def _write(self, number: int) -> None:
        for batch in self._syncing:
            batch.write(self._log)
        self._threads.later(self._latency_s(), self._sync, number)

    def _latency_s(self) -> float:
        parameters = self._parameters
        return self.slow_factor * (parameters.sync_s_min + self._rng.expovariate(1.0 / parameters.sync_s_mean))

    def _sync(self, number: int) -> None:
        if number != self._number:
            return
        if any(batch.must_sync for batch in self._syncing):
            self._log.sync()
        finished, self._syncing = self._syncing, []
        self._threads.call_soon(self._finish, finished)
        self._number += 1
        if self._queue:
            self._begin()

    def _finish(self, batches: list[Batch]) -> None:
        self.outstanding -= len(batches)
        for batch in batches:
            batch.done()

    def heal(self) -> None:
        """Sync fast from now on, the sync in progress included."""
        self.slow_factor = 1
        fast = DiskParameters()
        self._parameters = replace(
            self._parameters, sync_s_min=fast.sync_s_min, sync_s_mean=fast.sync_s_mean, commit_s_mean=fast.commit_s_mean
        )
        if self._syncing:
            self._threads.later(self._latency_s(), self._sync, self._number)
