"""A database brought forward by archived entries, to a revision, to a time, or to the last entry there is.

    replayed = replay(backend, Base(index=700, term=2), Path("archive"), Target(revision=1_000))

Owns where to stop. A revision is stopped at exactly, even inside an entry that makes several (the end of many leases);
what changes no revision and comes after it is left out. A time is the last mark at or before it: all that was applied
by then and nothing that was applied later, by the clock of the member that made the mark, to a second.

Invariants: entries are executed by the production applier, in order, each once; a target that the archive does not
reach is an error. The database is changed in place: the caller hands over a copy, and throws it away after an error.
Changes of the members change nothing here: a restored cluster has members of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raftkv.apply import request as requests
from raftkv.apply.alarms import Alarms
from raftkv.apply.applier import AT_ONCE_MAX, Applier, Outcome
from raftkv.apply.leases import Leases
from raftkv.apply.membership import Membership
from raftkv.errors import StorageError
from raftkv.offline.archive import Archive, ArchiveGapError
from raftkv.offline.database import Base, Forward
from raftkv.raft.types import Entry, EntryType
from raftkv.storage import schema
from raftkv.storage.backend.base import WriteBatch
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.mvcc import Store
from raftkv.storage.wal.archive import format_time, parse_time

__all__ = ["Replayed", "Target", "forward_to", "parse_time", "replay"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where to stop: at a revision, at a time (seconds since the epoch), or, without both, at the last entry."""

    revision: int | None = None
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """How far a database was brought: its revision and last entry, how many entries that took, and what to tell."""

    revision: int
    index: int
    term: int
    entries: int
    remark: str = ""


Progress = Callable[[int], None]
"""Called with the index of each applied entry."""


def replay(
    backend: LMDBBackend, base: Base, archive: Path, target: Target, on_entry: Progress = lambda index: None
) -> Replayed:
    """Bring a database forward, in place. It stands nowhere in a log afterwards: its next one begins anew.

    Arguments:
        backend: the database; of no use after an error.
        base: where it stands.
        archive: directory of archived segments.
        target: where to stop.
        on_entry: told of progress.

    Raises:
        ArchiveGapError: entries on the way are missing.
        StorageError: the target is before the database or beyond the archive, or something cannot be used.
        CorruptionError: a file is damaged, or of another cluster.
        UnknownEntryError: an entry needs a later version.
    """
    _stand(backend, base)
    store = Store.open(backend)
    try:
        replayed = _Replay(store, archive, target).run(on_entry)
    finally:
        store.close()
    _stand(backend, Base(0, 0))
    return replayed


def forward_to(archive: Path, target: Target, on_done: Callable[[Replayed], None]) -> Forward:
    """Return what a restore does with the contents of a snapshot to reach a point in time.

    Arguments:
        archive, target: as of ``replay``.
        on_done: told how far it came.
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
        # In pieces, so that one can stop between two revisions of an entry.
        at_once_max = AT_ONCE_MAX if target.revision is None else 0
        alarms, leases = Alarms(store, schema.ALARM), Leases(store)
        membership = Membership(store)
        self._applier = Applier(store, alarms, membership, leases, at_once_max=at_once_max)

    def _limit(self) -> tuple[int | None, str]:
        """Return the last entry wanted (None: any), and what to tell of it."""
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

    def run(self, on_entry: Progress) -> Replayed:
        store, count = self._store, 0
        if not self._is_reached(store.applied_index):
            for entry in self._archive.entries():
                self._apply(entry)
                count += 1
                on_entry(entry.index)
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
        """The archive ended: whether that is what was asked for."""
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
        request = requests.decode(entry.data) if entry.type == EntryType.NORMAL and entry.data else None
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
