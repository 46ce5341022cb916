"""Opening a log: read every segment, check that they are one chain, fold their records, cut a torn tail.

Owns what is checked across segments (the checks within one are ``segment.py``'s) and what the caller gets to see.

- sequences follow each other; each segment continues the checksum of the one before it; metadata are the same;
- only the last segment may have a torn tail (``tail.py``): a segment is synced before its successor gets a name;
- segments that are kept for an archive alone are not read, however many gigabytes they are: what they hold lies before
  the last marker, as in those that were released;
- the records make sense in their order (``replay.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from raftkv.raft.types import Entry, HardState, SnapshotMeta

from .disk import Disk
from .errors import WALCorruptError
from .record import Record
from .repair import Repair, cut_tail
from .replay import LogReplay, ReplayError
from .segment import SegmentName, SegmentReader, load_segment
from .tail import Verdict, classify_tail


@dataclass(frozen=True, slots=True)
class Recovered:
    """The contents of a log as it was opened; all of it is durable."""

    metadata: bytes
    """The bytes given to ``WAL.create``."""
    hard_state: HardState
    """The last one, with a commit index of at least ``snapshot.index``."""
    entries: list[Entry]
    """The log behind ``snapshot``, contiguous from ``snapshot.index + 1``; overwritten entries are gone."""
    snapshot: SnapshotMeta
    """The marker asked for, else the last one; zeros if there is none."""
    markers: tuple[SnapshotMeta, ...] = ()
    """All markers that the kept segments hold, in order."""
    repair: Repair | None = None
    """What was cut off the end, if a crash had torn it: worth a line in the log of the member."""


class Recovery:
    """One pass over a log; afterwards its fields say how the log goes on.

    Arguments:
        disk: the file operations.
        directory: of the log.
        names: its segments, oldest first.
        all_segments: read also those of which nothing is needed behind the last marker.
        marker_max: as of ``LogReplay``.

    Attributes:
        unsure_offset, unsure: frames at the end of the last segment, of which nothing says that a sync succeeded.
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
        # The first segment that is left has nothing before it to be compared with: earlier ones were released.
        if name == self.names[0]:
            self.metadata = reader.metadata
        else:
            self._check_link(reader)
        # The head repeats hard state and marker, so the fold needs no earlier segment.
        self._feed_all(reader, ((0, record) for record in reader.head_state))
        durable = reader.offset
        for frame in reader.frames():
            self._feed_all(reader, reader.records(frame))
            durable = frame.header.durable
        self._check_tail(reader, last=name == self.names[-1])
        self.reader_path, self.size_bytes = reader.path, len(reader.data)
        self.total_bytes += self.size_bytes
        self.offset, self.crc, self.seed = reader.offset, reader.crc, reader.seed
        self.unsure_offset, self.unsure = durable, reader.data[durable : reader.offset]

    def _check_link(self, reader: SegmentReader) -> None:
        # A head carries the checksum of the last frame before it, so the chain goes through all segments.
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
        tail = classify_tail(reader.data, reader.offset, reader.seed)
        if tail.verdict is Verdict.END:
            return
        # A segment is synced before its successor gets a name, so a tail before the last segment was durable.
        if tail.verdict is Verdict.DAMAGED or not last:
            raise WALCorruptError(reader.path, reader.offset, tail.reason)
        # Cut only in ``finish``: a log that turns out to be refused is left as it was found.
        self._torn = reader, tail.reason

    def finish(self, snapshot_index: int | None) -> Recovered:
        """Return what the log says, after a torn tail is cut: nothing is changed in a log that is refused."""
        # Everything that can be refused is refused in here.
        recovered = self.result(snapshot_index)
        if self._torn is None:
            return recovered
        reader, reason = self._torn
        repair = cut_tail(self.disk, reader.path, reader.data, reader.offset, reason)
        return replace(recovered, repair=repair)

    @property
    def torn(self) -> str | None:
        """Why the end of the last segment is to be cut off; None if it is whole."""
        return None if self._torn is None else self._torn[1]

    def result(self, snapshot_index: int | None) -> Recovered:
        """Return what the log says from a marker on, and change nothing.

        Arguments:
            snapshot_index: as of ``WAL.open``.

        Raises:
            WALCorruptError: the log does not reach from the marker to the commit index.
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
        # The state that the caller has may be older than the last marker: a crash came before the database followed.
        for meta in reversed(self.replay.markers):
            if meta.index == snapshot_index:
                return meta
        raise ReplayError(f"there is no snapshot marker {snapshot_index}")

    @property
    def path(self) -> str:
        """Path of the last segment."""
        return os.path.join(self.directory, str(self.names[-1]))


def _needed(names: list[SegmentName], last: SegmentReader) -> list[SegmentName]:
    """The segments that ``WAL.release`` could not delete, by the marker that the head of the last one repeats."""
    marker = next(record.index for record in last.head_state if isinstance(record, SnapshotMeta))
    # The first entry of the next segment bounds those that a segment holds. After a rewind that is less than before.
    begins = [place for place, name in enumerate(names) if name.first_index <= marker + 1]
    return names[max(begins, default=0) :]
