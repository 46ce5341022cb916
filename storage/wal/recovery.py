"""Opening a log: read every segment, check that they form one chain, fold their records, cut a torn tail.

This module makes the checks across segments (``segment.py`` makes those within one) and returns the contents:

- sequences follow each other; each segment continues the checksum of the one before it; metadata are the same;
- only the last segment may have a torn tail (``tail.py``): a segment is synced before its successor gets a name;
- segments that are kept for an archive alone are not read, however many gigabytes they are: what they hold lies before
  the last marker, as in those that were released;
- the records make sense in their order (``Replay``).

REPLAY: the fold of the records, in order, into hard state, entries and snapshot markers.

Defines the meaning of the sequence, as pure code without files or offsets. ``recovery.py`` feeds every record and adds
the position to the errors.

    records                                  log afterwards
    entry 1, entry 2, entry 3                1 2 3
    entry 2'                                 1 2'           an overwrite truncates all later entries
    marker at 2', entry 3'                   1 2' 3'        a marker within the log: state up to 2' is saved elsewhere
    marker at 9                              (9 | nothing)  a snapshot from the leader: the log starts again
    entry 10                                 (9 | 10)

Refused, because no correct member writes it: a gap before an index, an entry at or below the commit index or a marker,
a decreasing term, a decreasing marker or commit index.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from raftkv.raft.types import Entry, HardState, SnapshotMeta
from raftkv.storage.failpoints import failpoint
from raftkv.storage.wal.disk import Disk, WALCorruptError
from raftkv.storage.wal.record import Metadata, Record, SegmentHead
from raftkv.storage.wal.segment import NO_SPACE, TEMPORARY_NAME, SegmentName, SegmentReader, load_segment
from raftkv.storage.wal.tail import Verdict, written_end


class ReplayError(Exception):
    """An error that gives the reason why a record cannot follow the earlier ones."""


class LogReplay:
    """The state of a log after the records fed so far.

    Invariants: ``entries`` is contiguous and begins at ``first_index``; ``last_index`` is the index of its last entry,
    or, while it is empty, of the marker or of the log before ``first_index``.

    Arguments:
        first_index: index of the first entry that may come.
        marker_max: ignore the log from the first marker beyond this index on; ``None``: read all of it.
    """

    def __init__(self, first_index: int, marker_max: int | None = None) -> None:
        self._marker_max = marker_max
        self._is_over = False
        self.first_index = first_index
        self.last_index = first_index - 1
        self.entries: list[Entry] = []
        self.hard_state = HardState()
        self.snapshot = SnapshotMeta()
        self.markers: list[SnapshotMeta] = []

    def feed(self, record: Record) -> None:
        """Fold in one record.

        Raises:
            ReplayError: the record cannot follow the earlier ones.
        """
        if self._marker_max is not None and isinstance(record, SnapshotMeta) and record.index > self._marker_max:
            self._is_over = True
        if self._is_over:
            return
        if isinstance(record, Entry):
            self._entry(record)
        elif isinstance(record, HardState):
            self._hard_state(record)
        elif isinstance(record, SnapshotMeta):
            self._marker(record)
        elif isinstance(record, SegmentHead | Metadata):
            raise ReplayError("a record of a segment's head is not at its head")

    def _entry(self, entry: Entry) -> None:
        index, entries = entry.index, self.entries
        # A new leader made this member overwrite entries of an earlier leader (paper section 5.3).
        if index != self.last_index + 1:
            self._truncate(index)
        # Terms never decrease along a log (Log Matching, paper section 5.3).
        if entry.term < (entries[-1].term if entries else self._term_before_first(index)):
            raise ReplayError(f"entry {index} has term {entry.term}, below the term of the entry before it")
        entries.append(entry)
        self.last_index = index

    def _truncate(self, index: int) -> None:
        """Remove all entries from ``index`` on."""
        if index > self.last_index + 1:
            raise ReplayError(f"entry {index} follows entry {self.last_index}")
        if index <= max(self.hard_state.commit, self.snapshot.index):
            raise ReplayError(f"entry {index} overwrites what is committed")
        self._drop_from(index)

    def _drop_from(self, index: int) -> None:
        del self.entries[max(index - self.first_index, 0) :]
        self.first_index = min(self.first_index, index)
        self.last_index = index - 1

    def _term_before_first(self, index: int) -> int:
        # The entry before the first one after a marker is the last entry of the snapshot.
        return self.snapshot.term if index == self.snapshot.index + 1 else 0

    def _hard_state(self, state: HardState) -> None:
        if state.term < self.hard_state.term or state.commit < self.hard_state.commit:
            raise ReplayError(f"{state} follows {self.hard_state}")
        self.hard_state = state

    def _marker(self, meta: SnapshotMeta) -> None:
        if meta.index < self.snapshot.index:
            raise ReplayError(f"the snapshot marker {meta.index} follows the marker {self.snapshot.index}")
        # The leader's snapshot is beyond this log, or this log diverged before it: the log is useless.
        if not self._contains(meta):
            self.entries.clear()
            self.first_index = meta.index + 1
            self.last_index = meta.index
        # The head of every segment repeats the last marker, which is listed only once.
        if meta != self.snapshot:
            self.markers.append(meta)
        self.snapshot = meta

    def _contains(self, meta: SnapshotMeta) -> bool:
        """Return whether the current log passes through the marker; a leader's snapshot may replace a diverged log."""
        # The marker in the head of the first kept segment is before its entries: the log passes through it.
        if meta.index < self.first_index:
            return meta.index <= self.last_index
        position = meta.index - self.first_index
        return position < len(self.entries) and self.entries[position].term == meta.term

    def entries_after(self, meta: SnapshotMeta) -> list[Entry]:
        """Return the entries after a marker.

        Raises:
            ReplayError: entries between the marker and the log are missing.
        """
        if meta.index + 1 < self.first_index:
            raise ReplayError(f"the log begins at entry {self.first_index}, the state ends at entry {meta.index}")
        return self.entries[meta.index + 1 - self.first_index :]

    def final_hard_state(self) -> HardState:
        """Return the hard state, advanced to the last marker: all entries of a snapshot are committed.

        Hard state and marker may have been appended separately, with a crash in between. A vote belongs to its term.

        Raises:
            ReplayError: the commit index is beyond the log: its tail is lost.
        """
        state, meta = self.hard_state, self.snapshot
        if state.commit > max(self.last_index, meta.index):
            raise ReplayError(f"the log ends at entry {self.last_index}, but entry {state.commit} was committed")
        # A vote of an earlier term than the snapshot's is not valid in the snapshot's term.
        vote = state.vote if meta.term <= state.term else 0
        return HardState(max(state.term, meta.term), vote, max(state.commit, meta.index))


# -- repair ---------------------------------------------------------------------------------------------------------
#
# Repair cuts a torn tail off the last segment, so that the log continues after its last good frame.
#
# A crash between any two of its steps leaves a segment with a torn tail at the same offset: zeroing only makes the tear
# more obvious. The cut bytes are kept in a file next to the segment for inspection, if the disk has space for them.
# They were never reported as durable, so a full disk does not prevent a member from starting.


@dataclass(frozen=True, slots=True)
class Repair:
    """The description of a cut: ``cut_bytes`` of ``path`` from ``offset`` on, and the name of their copy.

    The name is empty if the disk had no space for a copy.
    """

    path: str
    offset: int
    cut_bytes: int
    reason: str
    saved_as: str

    def __str__(self) -> str:
        kept = f"they are kept in {self.saved_as}" if self.saved_as else "the disk had no room for a copy of them"
        return f"cut {self.cut_bytes} bytes at offset {self.offset} of {self.path} ({self.reason}): {kept}"


def cut_tail(disk: Disk, path: str, data: bytes, offset: int, reason: str) -> Repair:
    """Zero the end of a segment, durably; first copy the written bytes to another file if there is space.

    Arguments:
        disk: the file operations.
        path: segment file.
        data: the segment up to its last byte that is not zero, or any longer part.
        offset: end of the last good frame.
        reason: reason of the cut, for the user.

    Raises:
        OSError: a file operation failed.
    """
    failpoint("walBeforeRepair")
    # Bytes after the last nonzero one were never written, or are already zero.
    end = written_end(data)
    saved_as = _save_copy(disk, path, data[:end])
    failpoint("walAfterRepairCopy")
    fd = disk.open(path)
    try:
        # Write zeros instead of truncating: the head states the length of the file, and another length means damage.
        disk.write(fd, [bytes(end - offset)], offset)
        disk.sync_data(fd)
    finally:
        disk.close(fd)
    failpoint("walAfterRepair")
    return Repair(path, offset, end - offset, reason, saved_as)


def _save_copy(disk: Disk, path: str, data: bytes) -> str:
    directory, name = os.path.split(path)
    saved_as = os.path.join(directory, _free_name(f"{name}.broken", set(disk.list_names(directory))))
    # The copy gets its name only when it is complete and durable, so a crash leaves no partial copy.
    temporary = os.path.join(directory, TEMPORARY_NAME)
    try:
        _write_copy(disk, temporary, data)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        return ""
    disk.rename(temporary, saved_as)
    # Durable before the tail is cut: these bytes exist nowhere else.
    disk.sync_directory(directory)
    return saved_as


def _write_copy(disk: Disk, path: str, data: bytes) -> None:
    fd = disk.create(path)
    try:
        disk.write(fd, [data], 0)
        disk.sync_data(fd)
    except OSError:
        # A partial copy is useless and takes space that is needed.
        disk.remove(path)
        raise
    finally:
        disk.close(fd)


def _free_name(name: str, taken: set[str]) -> str:
    """Return ``name``, or ``name.2`` and so on, to keep the copy of an earlier repair."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}.{number}"
    return free


@dataclass(frozen=True, slots=True)
class Recovered:
    """The contents of an opened log; all of it is durable."""

    metadata: bytes
    """The bytes given to ``WAL.create``."""
    hard_state: HardState
    """The last hard state, with a commit index of at least ``snapshot.index``."""
    entries: list[Entry]
    """The log after ``snapshot``, contiguous from ``snapshot.index + 1``, without overwritten entries."""
    snapshot: SnapshotMeta
    """The requested marker, by default the last one; zeros if there is none."""
    markers: tuple[SnapshotMeta, ...] = ()
    """All markers in the kept segments, in order."""
    repair: Repair | None = None
    """The tail that was cut off, if a crash had torn it; the member should log it."""


class Recovery:
    """One pass over a log; afterwards its attributes describe the end of the log.

    Arguments:
        disk: the file operations.
        directory: directory of the log.
        names: its segments, oldest first.
        all_segments: also read segments that are not needed after the last marker.
        marker_max: as in ``LogReplay``.

    Attributes:
        unsure_offset, unsure: frames at the end of the last segment that are not known to be synced.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        names: list[SegmentName],
        *,
        all_segments: bool = True,
        marker_max: int | None = None,
    ) -> None:
        self.disk = disk
        self.directory = directory
        last = load_segment(disk, directory, names[-1])
        self.names = names if all_segments else _needed(names, last)
        self.replay = LogReplay(self.names[0].first_index, marker_max)
        self.total_bytes = 0
        self._torn: tuple[SegmentReader, str] | None = None
        for name in self.names[:-1]:
            self._read(name, load_segment(disk, directory, name))
        self._read(names[-1], last)

    def _read(self, name: SegmentName, reader: SegmentReader) -> None:
        # The first remaining segment has no predecessor to compare with: earlier ones were released.
        if name == self.names[0]:
            self.metadata = reader.metadata
        else:
            self._check_link(reader)
        # The head repeats hard state and marker, so no earlier segment is needed.
        self._feed_all(reader, ((0, record) for record in reader.head_state))
        durable = reader.offset
        for frame in reader.frames():
            self._feed_all(reader, reader.records(frame))
            durable = frame.header.durable
        self._check_tail(reader, last=name == self.names[-1])
        self.reader_path, self.size_bytes = reader.path, reader.size_bytes
        self.total_bytes += self.size_bytes
        self.offset, self.crc, self.seed = reader.offset, reader.crc, reader.seed
        self.unsure_offset, self.unsure = durable, reader.data[durable : reader.offset]

    def _check_link(self, reader: SegmentReader) -> None:
        # A head has the checksum of the last frame before it, so the chain spans all segments.
        if reader.previous != self.crc:
            raise WALCorruptError(self.reader_path, self.offset, f"{reader.path} goes on from other contents")
        if reader.metadata != self.metadata:
            raise WALCorruptError(reader.path, 0, "its metadata differ from those of the first segment")

    def _feed_all(self, reader: SegmentReader, records: Iterable[tuple[int, Record]]) -> None:
        feed, place = self.replay.feed, 0
        try:
            for offset, record in records:
                place = offset
                feed(record)
        except ReplayError as error:
            raise WALCorruptError(reader.path, place, str(error)) from error

    def _check_tail(self, reader: SegmentReader, last: bool) -> None:
        tail = reader.tail()
        if tail.verdict is Verdict.END:
            return
        # A segment is synced before the next one gets its name, so a tail before the last segment was durable.
        if tail.verdict is Verdict.DAMAGED or not last:
            raise WALCorruptError(reader.path, reader.offset, tail.reason)
        # The tail is cut only in ``finish``: a log that is refused later stays unchanged.
        self._torn = reader, tail.reason

    def finish(self, snapshot_index: int | None) -> Recovered:
        """Cut a torn tail and return the contents of the log; a refused log is not changed."""
        # All reasons to refuse the log raise in here.
        recovered = self.result(snapshot_index)
        if self._torn is None:
            return recovered
        reader, reason = self._torn
        repair = cut_tail(self.disk, reader.path, reader.data, reader.offset, reason)
        return replace(recovered, repair=repair)

    @property
    def torn(self) -> str | None:
        """Reason for cutting the end of the last segment; ``None`` if it is intact."""
        return None if self._torn is None else self._torn[1]

    def result(self, snapshot_index: int | None) -> Recovered:
        """Return the contents of the log from a marker on, without changing anything.

        Arguments:
            snapshot_index: as in ``WAL.open``.

        Raises:
            WALCorruptError: the log lacks entries between the marker and the commit index.
        """
        try:
            base = self._base(snapshot_index)
            entries = self.replay.entries_after(base)
            hard_state = self.replay.final_hard_state()
        except ReplayError as error:
            raise WALCorruptError(self.reader_path, self.offset, str(error)) from error
        return Recovered(self.metadata, hard_state, entries, base, tuple(self.replay.markers))

    def _base(self, snapshot_index: int | None) -> SnapshotMeta:
        if snapshot_index is None:
            return self.replay.snapshot
        if snapshot_index == 0:
            return SnapshotMeta()
        # The caller's state may be older than the last marker, if a crash came before the database caught up.
        for meta in reversed(self.replay.markers):
            if meta.index == snapshot_index:
                return meta
        raise ReplayError(f"there is no snapshot marker {snapshot_index}")

    @property
    def path(self) -> str:
        """Path of the last segment."""
        return os.path.join(self.directory, str(self.names[-1]))


def _needed(names: list[SegmentName], last: SegmentReader) -> list[SegmentName]:
    """Return the segments that ``WAL.release`` could not delete, given the marker in the head of the last one."""
    marker = next(record.index for record in last.head_state if isinstance(record, SnapshotMeta))
    # A segment holds entries below the first index of the next segment, which is smaller than before after a rewind.
    begins = [place for place, name in enumerate(names) if name.first_index <= marker + 1]
    return names[max(begins, default=0) :]
