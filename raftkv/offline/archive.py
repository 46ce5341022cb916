"""Archived segments: the committed entries of a cluster in order, the time when each was applied, and their replay.

    archive = Archive.find(path, base)                # base: log position of a database
    for entry in archive.entries(): ...               # base.index + 1, base.index + 2, ...
    index = archive.index_at(time_s)

This module decides which entries are *committed*: those that a later hard state, marker or mark of the same member
covers. Further entries of a segment may have been overwritten later, so they are left out. Several members may have
archived the same entries; a gap in one archive is filled from another.

Invariants: entries come without a gap, and the checksum chain of each segment is verified. A gap is an
``ArchiveGapError`` with the indexes. If members disagree on a committed entry, that is a ``CorruptionError``.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Final

from raftkv.apply import wire
from raftkv.apply.alarms import Alarms
from raftkv.apply.applier import AT_ONCE_MAX, Applier, Outcome
from raftkv.apply.leases import Leases
from raftkv.apply.membership import Membership
from raftkv.errors import CorruptionError, StorageError
from raftkv.offline.database import Base, Forward
from raftkv.pb import raft_pb2
from raftkv.raft.types import Entry, EntryType, HardState, SnapshotMeta
from raftkv.storage import schema
from raftkv.storage.backend.base import WriteBatch
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.mvcc import Store
from raftkv.storage.wal import ReadingDisk
from raftkv.storage.wal.archive import MARKS_SUFFIX, Mark, format_time
from raftkv.storage.wal.archive import parse_time as parse_time
from raftkv.storage.wal.record import Record
from raftkv.storage.wal.segment import SegmentName, SegmentReader, load_segment
from raftkv.storage.wal.tail import Verdict

CLOCK_S: Final = 60.0
"""Seconds: if a clock was set back by more than this, times are not usable."""


class ArchiveGapError(StorageError):
    """Entries that a restore needs are not in the archive."""


class _Committed:
    """Collects one member's committed entries from its records."""

    def __init__(self) -> None:
        self._pending: list[Entry] = []

    def feed(self, record: Record) -> list[Entry]:
        """Process a record; return the entries that it shows to be committed."""
        if isinstance(record, Entry):
            self._append(record)
        elif isinstance(record, HardState):
            return self._up_to(record.commit)
        elif isinstance(record, SnapshotMeta) and record.index:
            return self._marker(record)
        return []

    def _marker(self, meta: SnapshotMeta) -> list[Entry]:
        done = self.confirm(meta.index, meta.term)
        # A database that the leader sent: the log starts again after it, without the uncommitted rest of the old log.
        if not done and self._pending and meta.index >= self._pending[0].index:
            self.forget()
        return done

    def _append(self, entry: Entry) -> None:
        pending = self._pending
        if pending and entry.index != pending[-1].index + 1:
            del pending[max(entry.index - pending[0].index, 0) :]
        pending.append(entry)

    def confirm(self, index: int, term: int) -> list[Entry]:
        """Record that an entry is applied; it confirms earlier entries only if it is here, with its term."""
        position = index - self._pending[0].index if self._pending else -1
        if 0 <= position < len(self._pending) and self._pending[position].term == term:
            return self._up_to(index)
        return []

    def _up_to(self, commit: int) -> list[Entry]:
        count = max(commit - self._pending[0].index + 1, 0) if self._pending else 0
        done, self._pending = self._pending[:count], self._pending[count:]
        return done

    def forget(self) -> None:
        """Handle a gap: pending entries may have been overwritten in it."""
        self._pending.clear()


@dataclass
class MemberArchive:
    """The segments of one member.

    Attributes:
        directory: directory of the segments.
        names: names of the segments, oldest first.
        cluster_id: id of their cluster.
        problems: descriptions of unreadable parts, in order.
        ends_badly: whether everything after the last returned entry was unreadable.
    """

    directory: Path
    names: list[SegmentName]
    cluster_id: int
    problems: list[str] = field(default_factory=list)
    ends_badly: bool = False

    @classmethod
    def open(cls, directory: Path) -> MemberArchive:
        """Examine a directory with segments.

        Raises:
            CorruptionError: none of its segments can be read.
        """
        names = sorted(name for path in directory.glob("*.wal") if (name := SegmentName.parse(path.name)))
        # Any segment names the cluster: a damaged one may be older than all that a restore needs.
        for name in names:
            try:
                head = load_segment(ReadingDisk(), str(directory), name)
            except CorruptionError:
                if name == names[-1]:
                    raise
            else:
                break
        return cls(directory, names, raft_pb2.WALMetadata.FromString(head.metadata).cluster_id)

    def marks(self) -> Iterator[Mark]:
        """Iterate over all time marks, in the order in which they were made."""
        for name in self.names:
            yield from self._marks_of(name)

    def _marks_of(self, name: SegmentName) -> list[Mark]:
        try:
            with (self.directory / f"{name}{MARKS_SUFFIX}").open(errors="replace") as file:
                return [mark for line in file if (mark := Mark.parse(line))]
        except FileNotFoundError:
            return []

    def committed(self) -> Iterator[Entry]:
        """Iterate over the committed entries in order, without those in missing or damaged segments."""
        fold, before, emitted = _Committed(), None, 0
        for name in self.names:
            if before is not None and name.sequence != before[0].sequence + 1:
                self._note(f"{self.directory}: the segments between {before[0]} and {name} are missing")
                fold.forget()
                before = None
            try:
                reader = load_segment(ReadingDisk(), str(self.directory), name)
                if before is not None and reader.previous != before[1]:
                    raise CorruptionError(f"{reader.path} does not go on from the segment before it")
                for entry in self._segment(reader, fold, name):
                    if entry.index > emitted:
                        emitted, self.ends_badly = entry.index, False
                        yield entry
                before = name, reader.crc
            except CorruptionError as error:
                self._note(str(error))
                fold.forget()
                before = None

    def _note(self, problem: str) -> None:
        self.ends_badly = True
        if problem not in self.problems:
            self.problems.append(problem)

    def _segment(self, reader: SegmentReader, fold: _Committed, name: SegmentName) -> Iterator[Entry]:
        for head_record in reader.head_state:
            yield from fold.feed(head_record)
        for frame in reader.frames():
            for _, record in reader.records(frame):
                yield from fold.feed(record)
        tail = reader.tail()
        if tail.verdict is not Verdict.END:
            raise CorruptionError(f"{reader.path} is damaged at offset {reader.offset}: {tail.reason}")
        for mark in self._marks_of(name):
            yield from fold.confirm(mark.index, mark.term)


def segment_directories(path: Path) -> list[Path]:
    """Return the directories at or below ``path`` that contain segments; none if it does not exist.

    Raises:
        StorageError: a directory cannot be read: its segments must not count as missing.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise StorageError(f"cannot read the archive {error.filename}: {error.strerror}") from error

    walked = os.walk(path, onerror=refuse)
    return sorted(Path(directory) for directory, _, names in walked if any(map(SegmentName.parse, names)))


class Archive:
    """The archives of the members of one cluster.

    Arguments:
        members: archives of the members.
        base: log position after which entries are needed.
    """

    def __init__(self, members: list[MemberArchive], base: Base) -> None:
        self._members = members
        self._base = base

    @classmethod
    def find(cls, path: Path, base: Base) -> Archive:
        """Find the segments below a directory that continue a database.

        Arguments:
            path: an archive, or a directory with those of several members.
            base: log position of the database.

        Raises:
            StorageError: there are no segments, none of the database's cluster, or those of several clusters.
            CorruptionError: a segment cannot be read.
        """
        if not path.is_dir():
            raise StorageError(
                f"there is no archive at {path}: a member makes it when it first closes a segment, or stops"
            )
        directories = segment_directories(path)
        if not directories:
            raise StorageError(f"there are no archived segments in {path}")
        clusters: dict[int, list[MemberArchive]] = defaultdict(list)
        for directory in directories:
            member = MemberArchive.open(directory)
            clusters[member.cluster_id].append(member)
        if len(clusters) == 1:
            return cls(next(iter(clusters.values())), base)
        known = [members for members in clusters.values() if cls(members, base).holds_base()]
        if len(known) != 1:
            names = ", ".join(f"{cluster:x}" for cluster in sorted(clusters))
            raise StorageError(f"{path} has segments of the clusters {names}: give the directory of one of them")
        return cls(known[0], base)

    def holds_base(self) -> bool:
        """Return whether the archive contains the last entry of the database, with the same term."""
        wanted = self._base
        for member in self._members:
            for entry in member.committed():
                if entry.index == wanted.index:
                    return entry.term == wanted.term
                if entry.index > wanted.index:
                    break
        return False

    @property
    def problems(self) -> list[str]:
        """Descriptions of unreadable parts; complete after all entries were read."""
        return [problem for member in self._members for problem in member.problems]

    @property
    def ends_badly(self) -> bool:
        """Whether every member's archive ends with an unreadable part; known after all entries were read."""
        return all(member.ends_badly for member in self._members)

    def index_at(self, time_s: float) -> int | None:
        """Return the index of the last entry applied at a time; ``None``: all marks are later.

        Arguments:
            time_s: seconds since the epoch, by the members' clocks.

        Raises:
            StorageError: the clock of a member jumped, so an earlier entry has a later time.
        """
        indexes = [mark.index for member in self._members if (mark := _last_at(time_s, list(member.marks())))]
        return max(indexes, default=None)

    def span_s(self) -> tuple[float, float] | None:
        """Return the times of the first and last mark, in seconds since the epoch; ``None``: there are no marks."""
        times = [mark.time_s for member in self._members for mark in member.marks()]
        return (min(times), max(times)) if times else None

    def entries(self) -> Iterator[Entry]:
        """Iterate over the committed entries after the base, without a gap, up to the last archived one.

        Raises:
            ArchiveGapError: entries are missing before later ones.
            CorruptionError: members disagree, or the database has another history.
        """
        streams = [_Stream(member.committed()) for member in self._members]
        wanted = self._base.index
        while True:
            found = {entry.term: entry for stream in streams if (entry := stream.at(wanted))}
            if len(found) > 1:
                raise CorruptionError(
                    f"the archived logs disagree on entry {wanted}: terms {sorted(found)}; after a lost quorum, "
                    "give the directory of the member that went on"
                )
            (entry,) = found.values() if found else (None,)
            if wanted == self._base.index:
                self._check_base(entry)
            elif entry is not None:
                yield entry
            else:
                self._check_end(streams, wanted)
                return
            wanted += 1

    def _check_base(self, entry: Entry | None) -> None:
        if entry is not None and self._base.term and entry.term != self._base.term:
            raise CorruptionError(
                f"the snapshot is not of the cluster of this archive: entry {entry.index} has term {self._base.term} "
                f"in the snapshot and term {entry.term} in the archive"
            )

    def _check_end(self, streams: list[_Stream], wanted: int) -> None:
        """Refuse a missing entry before existing ones."""
        later = [stream.head.index for stream in streams if stream.head is not None]
        if later:
            why = "".join(f"; {problem}" for problem in self.problems)
            raise ArchiveGapError(f"the archive lacks the entries {wanted} to {min(later) - 1}{why}")


class _Stream:
    """One member's committed entries, read by ascending index."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._next: Callable[[], Entry | None] = lambda: next(entries, None)
        self.head: Entry | None = self._next()

    def at(self, index: int) -> Entry | None:
        """Return the entry at an index; ``None``: it is not here."""
        while self.head is not None and self.head.index < index:
            self.head = self._next()
        return self.head if self.head is not None and self.head.index == index else None


def _last_at(time_s: float, marks: list[Mark]) -> Mark | None:
    """Return the mark of the last entry that one member had applied at a time, by its own clock.

    Marks of another member prove nothing, because it may lag.

    Raises:
        StorageError: the clock jumped.
    """
    last = max((mark for mark in marks if mark.time_s <= time_s), key=attrgetter("index"), default=None)
    later = (mark for mark in marks if mark.time_s > time_s + CLOCK_S)
    first_later = min(later, key=attrgetter("index"), default=None)
    if last is not None and first_later is not None and first_later.index < last.index:
        raise StorageError(
            f"the clock of a member jumped: by the marks of the archive, {format_time(time_s)} is after entry "
            f"{last.index} ({format_time(last.time_s)}) and before the earlier entry {first_later.index} "
            f"({format_time(first_later.time_s)}); give --to-revision"
        )
    return last


# -- prune ----------------------------------------------------------------------------------------------------------
#
# ``prune(Path("archive"), {cluster_id: lowest_index_of_the_backups_kept})`` deletes archived segments that no backup
# needs any more. A segment is deleted when the next one in the same directory begins at or before the first entry that
# a restore from the oldest backup would need, so the newest always stays. Clusters without a backup are not touched.


def prune(archive: Path, needed: Mapping[int, int]) -> list[Path]:
    """Delete segments with their marks, the oldest first, and return their paths.

    Arguments:
        archive: a directory with those of members; it may not exist before the first segment is archived.
        needed: by cluster, the lowest applied index of the kept backups.

    Raises:
        StorageError: a file cannot be deleted.
        CorruptionError: no segment of a member can be read.
    """
    deleted = []
    for directory in segment_directories(archive):
        member = MemberArchive.open(directory)
        if member.cluster_id not in needed:
            continue
        for name, after in pairwise(member.names):
            if after.first_index > needed[member.cluster_id] + 1:
                break
            path = directory / str(name)
            try:
                path.unlink()
                path.with_name(path.name + MARKS_SUFFIX).unlink(missing_ok=True)
            except OSError as error:
                raise StorageError(f"cannot delete {path}: {error.strerror}") from error
            deleted.append(path)
    return deleted


# -- replay ---------------------------------------------------------------------------------------------------------
#
# Advances a database with archived entries, to a revision, to a time, or to the last entry.
#
#     replayed = replay(backend, Base(index=700, term=2), Path("archive"), Target(revision=1_000))
#
# A replay stops exactly at a target revision, even inside an entry that makes several (the end of many leases); later
# changes that make no revision are left out. A target time means the last mark at or before it: all entries applied by
# then and no later ones, by the clock of the member that made the mark, to a second.
#
# Invariants: entries are executed by the production applier, in order, each once; a target beyond the archive is an
# error. The database is changed in place: the caller passes a copy, and discards it after an error. Membership changes
# have no effect: a restored cluster has its own members.


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a replay: a revision, a time (seconds since the epoch), or, without both, the last entry."""

    revision: int | None = None
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay: the revision and last entry of the database, the number of entries, and a remark."""

    revision: int
    index: int
    term: int
    entries: int
    remark: str = ""


def replay(backend: LMDBBackend, base: Base, archive: Path, target: Target) -> Replayed:
    """Advance a database in place. Afterwards it has no log position: its next log begins at the start.

    Arguments:
        backend: the database; unusable after an error.
        base: its log position.
        archive: directory of archived segments.
        target: where to stop.

    Raises:
        ArchiveGapError: needed entries are missing.
        StorageError: the target is before the database or beyond the archive, or a file cannot be used.
        CorruptionError: a file is damaged, or belongs to another cluster.
        UnknownEntryError: an entry needs a later version.
    """
    _stand(backend, base)
    store = Store.open(backend)
    try:
        replayed = _Replay(store, archive, target).run()
    finally:
        store.close()
    _stand(backend, Base(0, 0))
    return replayed


def forward_to(archive: Path, target: Target, on_done: Callable[[Replayed], None]) -> Forward:
    """Return the function with which a restore advances the contents of a snapshot to a point in time.

    Arguments:
        archive, target: as in ``replay``.
        on_done: called with the result.
    """
    return lambda backend, base: on_done(replay(backend, base, archive, target))


def _stand(backend: LMDBBackend, base: Base) -> None:
    batch = WriteBatch()
    batch.values[schema.META, schema.META_CONSISTENT_INDEX] = schema.encode_integer(base.index)
    batch.values[schema.META, schema.META_TERM] = schema.encode_integer(base.term)
    backend.commit(batch)


class _Replay:
    def __init__(self, store: Store, archive: Path, target: Target) -> None:
        self._store = store
        self._target = target
        self._archive = Archive.find(archive, Base(store.applied_index, store.applied_term))
        self._last_index, self._remark = self._limit()
        # In pieces, so that the replay can stop between two revisions of an entry.
        at_once_max = AT_ONCE_MAX if target.revision is None else 0
        alarms, leases = Alarms(store, schema.ALARM), Leases(store)
        membership = Membership(store)
        self._applier = Applier(store, alarms, membership, leases, at_once_max=at_once_max)

    def _limit(self) -> tuple[int | None, str]:
        """Return the last needed entry (``None``: any), and a remark for the user."""
        time_s, store = self._target.time_s, self._store
        if self._target.revision is not None and self._target.revision < store.revision:
            raise StorageError(
                f"the snapshot is at revision {store.revision}, after revision {self._target.revision}: "
                "take an older snapshot"
            )
        if time_s is None:
            return None, ""
        index, span_s = self._archive.index_at(time_s), self._archive.span_s()
        if span_s is None or index is None:
            since = "has no marks of time" if span_s is None else f"begins at {format_time(span_s[0])}"
            raise StorageError(f"the archive {since}, after {format_time(time_s)}: take an older archive")
        if index < store.applied_index:
            raise StorageError(
                f"the snapshot has entries up to {store.applied_index}, and {format_time(time_s)} is entry {index}: "
                "take an older snapshot"
            )
        if time_s > span_s[1]:
            return None, f"the archive ends at {format_time(span_s[1])}, before {format_time(time_s)}"
        return index, ""

    def run(self) -> Replayed:
        store, count = self._store, 0
        if not self._is_reached(store.applied_index):
            for entry in self._archive.entries():
                self._apply(entry)
                count += 1
                if self._is_reached(entry.index):
                    break
            else:
                self._check_reached()
        while store.is_compacting:
            store.compaction_step()
            store.commit()
        store.commit()
        return Replayed(store.revision, store.applied_index, store.applied_term, count, self._remark)

    def _is_reached(self, index: int) -> bool:
        if self._target.revision is not None:
            return self._store.revision >= self._target.revision
        return self._last_index is not None and index >= self._last_index

    def _check_reached(self) -> None:
        """Check, at the end of the archive, whether the target was reached."""
        if self._archive.ends_badly:
            problems = "; ".join(self._archive.problems)
            raise ArchiveGapError(f"the archive ends at entry {self._store.applied_index}: {problems}")
        if self._last_index is not None:
            self._remark = f"the archive ends at entry {self._store.applied_index}, before entry {self._last_index}"
        if self._target.revision is not None:
            raise StorageError(
                f"the archive ends at revision {self._store.revision}, before revision {self._target.revision}; "
                "a running member archives the rest of its log when it stops"
            )

    def _apply(self, entry: Entry) -> None:
        store, applier = self._store, self._applier
        applier.term, applier.index = entry.term, entry.index
        request = wire.decode(entry.data) if entry.type == EntryType.NORMAL and entry.data else None
        if request is not None:
            kind, _, body = request
            work = applier.begin(kind, body, is_answered=False)
            if not isinstance(work, Outcome):
                for _ in work:
                    if self._target.revision is not None and store.revision >= self._target.revision:
                        work.close()
                        break
        store.set_applied(entry.index, entry.term)
        while store.is_compacting:
            store.compaction_step()
            store.commit()
