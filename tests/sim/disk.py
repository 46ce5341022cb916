"""The simulated disk of one member: a write-ahead log and a state image, with what a crash does to them.

Owns everything that survives a crash. The write-ahead log is a sequence of records; a record is *written* (in the
page cache) at once and *durable* only when a later sync has finished. A crash keeps the durable records and a
random prefix of the written ones: the checksum chain of the real log cuts at the first damaged frame, so a tail
torn at any byte leaves a prefix of whole frames. The state image (the production LMDB) is replaced atomically:
after a crash it is either the old one or the new one, and always state and applied index together.

Leaves out: bytes. ``LogView`` is what reading the records back gives.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from raftkv.raft.types import Entry, HardState, SnapshotMeta

from .clock import Scheduler
from .machine import StateImage


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A received state image, written before the log's marker that refers to it."""

    meta: SnapshotMeta
    image: StateImage


Record = Entry | HardState | SnapshotMeta | SnapshotFile


class LogView:
    """What a write-ahead log says: the fold of its records in order."""

    def __init__(self) -> None:
        self.hard_state = HardState()
        self.snapshot = SnapshotMeta()
        self.entries: list[Entry] = []
        self.files: dict[int, SnapshotFile] = {}

    def copy(self) -> LogView:
        """An independent copy."""
        other = LogView()
        other.hard_state, other.snapshot = self.hard_state, self.snapshot
        other.entries, other.files = list(self.entries), dict(self.files)
        return other

    def last_index(self) -> int:
        """Index of the last entry, or of the snapshot marker."""
        return self.snapshot.index + len(self.entries)

    def term(self, index: int) -> int | None:
        """Term at ``index``; None where the log does not say."""
        if index == self.snapshot.index:
            return self.snapshot.term
        if self.snapshot.index < index <= self.last_index():
            return self.entries[index - self.snapshot.index - 1].term
        return None

    def fold(self, record: Record) -> None:
        """Add one record."""
        if isinstance(record, Entry):
            self._fold_entry(record)
        elif isinstance(record, HardState):
            self.hard_state = record
        elif isinstance(record, SnapshotMeta):
            self._fold_marker(record)
        else:
            self.files = {record.meta.index: record}

    def _fold_entry(self, entry: Entry) -> None:
        if entry.index <= self.snapshot.index:
            return
        position = entry.index - self.snapshot.index - 1
        if position > len(self.entries):
            raise LogGapError(f"entry {entry.index} after {self.last_index()}")
        del self.entries[position:]
        self.entries.append(entry)

    def _fold_marker(self, meta: SnapshotMeta) -> None:
        """Forget what the snapshot covers; keep the tail only if it continues the snapshot's own history.

        A marker of a *received* snapshot has another term at its index (else Raft would not have restored it):
        what was written before it belongs to another history and must not be read back.
        """
        if meta.index <= self.snapshot.index:
            return
        matches = self.term(meta.index) == meta.term
        self.entries = self.entries[meta.index - self.snapshot.index :] if matches else []
        self.snapshot = meta


def frames(records: list[Record]) -> list[list[Record]]:
    """The parts of a write that a crash cannot tear: a marker, and a batch of entries with its hard state."""
    batch: list[Record] = [record for record in records if isinstance(record, Entry | HardState)]
    parts: list[list[Record]] = [[record] for record in records if not isinstance(record, Entry | HardState)]
    if batch:
        parts.append(batch)
    return parts


class LogGapError(Exception):
    """A write-ahead log skips an index: the member wrote its entries in the wrong order."""


@dataclass(frozen=True, slots=True)
class DiskParameters:
    """How fast the disk is (microseconds) and how it tears."""

    sync_us_min: int = 80
    sync_us_mean: int = 500
    image_us_mean: int = 20_000
    torn_tail: bool = True
    coalesce: bool = True
    segment_bytes: int = 0
    """Segments of the production write-ahead log on an in-memory file system; 0 for records without bytes."""


@dataclass(slots=True)
class _Write:
    records: list[Record]
    done: Callable[[], None] | None = field(repr=False)


class Disk:
    """One member's disk. ``log`` is the durable view; ``image`` the durable state."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, parameters: DiskParameters) -> None:
        self.parameters = parameters
        self.slow_factor = 1
        self.log = LogView()
        self.image: StateImage | None = None
        self.syncs_count = 0
        self.torn_count = 0
        self._scheduler = scheduler
        self._rng = rng
        self._queue: list[_Write] = []
        self._syncing_count = 0
        self._epoch = 0
        self._sync_number = 0
        self._image_epoch = 0
        self._image_pending = False

    def write(self, records: list[Record], done: Callable[[], None], must_sync: bool = True) -> None:
        """Append ``records`` to the log; call ``done`` once they are durable. Writes finish in order.

        Without ``must_sync`` the records only join the next sync, and ``done`` waits for nothing but earlier writes.
        """
        write = _Write(records, done)
        self._queue.append(write)
        if must_sync or any(earlier.done is not None for earlier in self._queue[:-1]):
            if not self._syncing_count:
                self._start_sync()
            return
        write.done = None
        done()

    def write_image(self, image: StateImage, done: Callable[[], None]) -> bool:
        """Replace the state image atomically some time later. False while another replacement is under way."""
        if self._image_pending:
            return False
        self._image_pending = True
        delay_us = self.slow_factor * self._latency_us(self.parameters.image_us_mean)
        self._scheduler.after(delay_us, self._image_written, self._image_epoch, image, done)
        return True

    def crash(self) -> None:
        """Lose what was not synced, but for a random part from its beginning."""
        self._epoch += 1
        self._image_epoch += 1
        self._lose([frame for write in self._queue for frame in frames(write.records)])
        self._queue.clear()
        self._syncing_count = 0
        self.syncs_count = self._sync_number
        self._image_pending = False

    def _lose(self, written: list[list[Record]]) -> None:
        """Decide what of the frames that are not durable yet is there after a crash."""
        kept = self._rng.randint(0, len(written)) if self.parameters.torn_tail else 0
        if 0 < kept < len(written):
            self.torn_count += 1
        for frame in written[:kept]:
            for record in frame:
                self.log.fold(record)

    def boot(self, image: StateImage | None, records: list[Record]) -> None:
        """Begin with these records and this state, durable."""
        self.image = image
        for record in records:
            self.log.fold(record)

    def _begin_sync(self, records: list[list[Record]]) -> None:
        """A sync of these writes begins."""

    def _end_sync(self) -> None:
        """It has ended."""

    def _latency_us(self, mean_us: int) -> int:
        return self.parameters.sync_us_min + int(self._rng.expovariate(1.0 / mean_us))

    def _start_sync(self) -> None:
        """One sync covers everything written before it began (group commit), or up to the oldest waiting write."""
        waiting = next(i for i, write in enumerate(self._queue) if write.done is not None)
        self._syncing_count = len(self._queue) if self.parameters.coalesce else waiting + 1
        delay_us = self.slow_factor * self._latency_us(self.parameters.sync_us_mean)
        self._begin_sync([write.records for write in self._queue[: self._syncing_count]])
        self._sync_number += 1
        self._scheduler.after(delay_us, self._synced, self._epoch, self._sync_number)

    def heal(self) -> None:
        """Be a fast disk from now on, also with the sync that is under way."""
        self.slow_factor = 1
        fast = DiskParameters()
        self.parameters = replace(
            self.parameters,
            sync_us_min=fast.sync_us_min,
            sync_us_mean=fast.sync_us_mean,
            image_us_mean=fast.image_us_mean,
        )
        if self._syncing_count:
            delay_us = self._latency_us(self.parameters.sync_us_mean)
            self._scheduler.after(delay_us, self._synced, self._epoch, self._sync_number)

    def _synced(self, epoch: int, number: int) -> None:
        if epoch != self._epoch or number <= self.syncs_count:
            return
        self.syncs_count = number
        self._end_sync()
        finished = self._queue[: self._syncing_count]
        del self._queue[: self._syncing_count]
        self._syncing_count = 0
        for write in finished:
            for record in write.records:
                self.log.fold(record)
        if any(write.done is not None for write in self._queue):
            self._start_sync()
        for write in finished:
            if write.done is not None and epoch == self._epoch:
                write.done()

    def install_image(self, image: StateImage) -> None:
        """Put a received image, already durable as a file, in the place of the state image."""
        self._image_epoch += 1
        self._image_pending = False
        self.image = image

    def _image_written(self, epoch: int, image: StateImage, done: Callable[[], None]) -> None:
        if epoch != self._image_epoch:
            return
        self._image_pending = False
        self.image = image
        done()
