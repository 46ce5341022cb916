"""Reads: from an interval and a revision to serialized KeyValues.

The index answers where, the overlay and the disk answer what. At the current revision the count of an interval is two
subtractions and keys-only answers never touch a value; at an older revision the interval is walked.

Long intervals, and selections of them (``selection.py``), are read in small pieces, so that the owner may do other
things between. ``PinnedView`` is the store as it was at one moment, whatever happens to it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Protocol

from raftkv.errors import CompactedError, FutureRevisionError, RequestTimeoutError
from raftkv.storage.compaction import Hold
from raftkv.storage.index import Index, State, Walk
from raftkv.storage.key_value import KeyValueView, encode
from raftkv.storage.overlay import Overlay
from raftkv.storage.revision import SUB_BITS, SUB_MASK, pack_key
from raftkv.storage.selection import Pieces, Selection, Selector, drain, no_limit, nothing

_SEPARATOR = ord("_")


class RangeResult:
    """What a read found."""

    __slots__ = ("count", "kvs", "revision")

    def __init__(self, kvs: list[bytes], count: int, revision: int) -> None:
        self.kvs = kvs
        """Serialized ``mvccpb.KeyValue``, in order of key."""
        self.count = count
        """Number of keys in the interval, whatever the limit."""
        self.revision = revision
        """Main revision of the store (or of the transaction) when it was read."""


class Reader:
    """Reads one store. Holds no state of its own but a count."""

    __slots__ = ("_index", "_leases", "_overlay", "ranges_total")

    def __init__(self, index: Index, overlay: Overlay, leases: dict[bytes, int]) -> None:
        self._index = index
        self._overlay = overlay
        self._leases = leases
        self.ranges_total = 0

    def get(self, key: bytes) -> bytes | None:
        """The current KeyValue of a key."""
        revision = self._index.latest(key)
        return self.record(revision) if revision else None

    def record(self, revision: int) -> bytes:
        """The KeyValue put at a packed revision that the index knows."""
        return self._overlay.load(pack_key(revision >> SUB_BITS, _SEPARATOR, revision & SUB_MASK))

    def latest(self, key: bytes, end: bytes, limit: int, count_only: bool, keys_only: bool) -> tuple[list[bytes], int]:
        """KeyValues and count of what exists now."""
        self.ranges_total += 1
        if not end:
            revision = self._index.latest(key)
            if not revision:
                return [], 0
            if count_only:
                return [], 1
            return [self._key_only(key) if keys_only else self.record(revision)], 1
        count = self._index.count(key, end)
        if count_only or not count:
            return [], count
        pairs = self._limited(self._index.live(key, end), limit)
        if keys_only:
            return [self._key_only(name) for name, _ in pairs], count
        return self._overlay.load_all(revision for _, revision in pairs), count

    def small(
        self, key: bytes, end: bytes, limit: int, keys_max: int, size_bytes_max: int
    ) -> tuple[list[bytes], int] | None:
        """KeyValues and count of what exists now in an interval; None when they are many or large."""
        count = self._index.known_count(key, end)
        if count > keys_max:
            return None
        if self._index.has_dead:
            count = self._index.count(key, end)
        pairs = self._limited(self._index.live(key, end), limit)
        kvs = self._overlay.load_all((revision for _, revision in pairs), size_bytes_max)
        if len(kvs) < count and (limit <= 0 or len(kvs) < limit):
            return None
        self.ranges_total += 1
        return kvs, count

    def at(
        self, main: int, key: bytes, end: bytes, limit: int, count_only: bool, keys_only: bool
    ) -> tuple[list[bytes], int]:
        """KeyValues and count of what existed at an older revision."""
        self.ranges_total += 1
        pairs = list(self._index.live_at(key, end, main))
        if count_only:
            return [], len(pairs)
        kvs = self._overlay.load_all(revision for _, revision in self._limited(pairs, limit))
        return [KeyValueView(kv).without_value() for kv in kvs] if keys_only else kvs, len(pairs)

    def state(self, key: bytes, main: int) -> State | None:
        """What the index knows of a key as of a main revision."""
        return self._index.state(key, main)

    def lease_at(self, key: bytes, revision: int) -> int:
        """The lease that the value of a packed revision was put with, 0 for none."""
        if self._index.latest(key) == revision:
            return self._leases.get(key, 0)
        return KeyValueView(self.record(revision)).lease

    def walk(self, key: bytes, end: bytes, main: int, *, reverse: bool = False) -> Walk:
        """An interval at a revision, to be gone through in pieces."""
        return Walk(self._index, key, end, main, reverse=reverse)

    def known_count(self, key: bytes, end: bytes) -> int:
        """Keys of an interval that the index knows, live or not."""
        return self._index.known_count(key, end)

    def load_all(self, revisions: list[int], size_bytes_max: int) -> list[bytes]:
        """The first KeyValues of packed revisions that the index knows: at least one, no more once there is enough."""
        return self._overlay.load_all(revisions, size_bytes_max)

    def keys_at(self, pairs: list[tuple[bytes, int]], main: int, size_bytes_max: int) -> list[bytes]:
        """KeyValues without values, of keys and the packed revisions that they had at a main revision.

        At least one, and no more once ``size_bytes_max`` had to be read all the same.
        """
        kvs: list[bytes] = []
        latest, leases = self._index.latest, self._leases
        room = size_bytes_max
        for name, revision in pairs:
            if room < 0:
                break
            found = self._index.get(name, main)
            if latest(name) != revision or found is None:
                # Written again since: the lease of that time is in the record alone.
                record = self.record(revision)
                room -= len(record)
                kvs.append(KeyValueView(record).without_value())
            else:
                modified = revision >> SUB_BITS
                kvs.append(encode(name, found.created, modified, found.version, lease=leases.get(name, 0)))
        return kvs

    def select(
        self,
        main: int,
        key: bytes,
        end: bytes,
        selection: Selection,
        *,
        is_present: bool,
        check: Callable[[], None] = nothing,
        grow: Callable[[int], None] = no_limit,
    ) -> Pieces:
        """Begin to read what is selected of an interval at a main revision.

        ``is_present`` says that the index knows nothing newer, so that it can count without a walk.
        """
        self.ranges_total += 1
        count = self._index.count(key, end) if is_present else None
        return Selector(self, main, key, end, selection, count, check, grow).pieces()

    @staticmethod
    def _limited(
        pairs: Iterator[tuple[bytes, int]] | list[tuple[bytes, int]], limit: int
    ) -> Iterator[tuple[bytes, int]] | list[tuple[bytes, int]]:
        return islice(pairs, limit) if limit > 0 else pairs

    def _key_only(self, key: bytes) -> bytes:
        found = self._index.get_latest(key)
        if found is None:
            raise KeyError(key)
        return encode(key, found.created, found.modified >> SUB_BITS, found.version, lease=self._leases.get(key, 0))


def check_revision(revision: int, current: int, compacted: int) -> None:
    """Refuse a revision that cannot be read (the compacted one itself can).

    Raises:
        FutureRevisionError: it is after ``current``.
        CompactedError: it is before ``compacted``.
    """
    if revision > current:
        raise FutureRevisionError
    if revision < compacted:
        raise CompactedError(compacted)


class Versions(Protocol):
    """The part of a store that says what is present and what is gone."""

    revision: int
    compact_revision: int

    @property
    def is_writing(self) -> bool:
        """Whether a write transaction is open, whose changes are in the index already."""


class PinnedView:
    """A store as it is at one moment, for a read that takes long: what others do meanwhile is not seen.

    Everything that is readable when the view is made stays so until ``let_go``, because compactions wait with their
    work (not with their effect on others). After it, the view can be read on until a compaction overtakes it. A view
    of a store that is replaced by a received database is let go.

    Arguments:
        store: what is read.
        reader: its reader.
        hold: what keeps compactions back; it is given up by ``let_go``.
    """

    def __init__(self, store: Versions, reader: Reader, hold: Hold) -> None:
        self._store = store
        self._reader = reader
        self._hold = hold
        self.revision = store.revision
        """The present of this view."""
        self.compact_revision = store.compact_revision
        """Oldest main revision that can be read in it."""

    def let_go(self) -> None:
        """Let compactions go on; once or more."""
        self._hold.end()

    @property
    def reader(self) -> Reader:
        """Reads the store at any revision; ``check`` first."""
        return self._reader

    def check(self) -> None:
        """Raise if the present of this view cannot be read any more."""
        self._check(self.revision)

    def known_count(self, key: bytes, range_end: bytes) -> int:
        """Keys of an interval that the store knows: how much work a read of it is."""
        return self._reader.known_count(key, range_end)

    def _check(self, main: int) -> None:
        compacted = self._store.compact_revision
        if not self._hold.is_held and main < compacted:
            # A client that asked for the present named no revision that could be compacted.
            raise RequestTimeoutError if main == self.revision else CompactedError(compacted)

    def range(
        self,
        key: bytes,
        range_end: bytes = b"",
        *,
        revision: int = 0,
        limit: int = 0,
        count_only: bool = False,
        keys_only: bool = False,
    ) -> RangeResult:
        """Read an interval at once; see ``Store.range``. Raises as ``select`` does."""
        selection = Selection(limit=limit, count_only=count_only, keys_only=keys_only)
        kvs, found = drain(self.select(key, range_end, selection, revision=revision))
        return RangeResult(kvs, found.count, self.revision)

    def select(
        self,
        key: bytes,
        range_end: bytes,
        selection: Selection,
        *,
        revision: int = 0,
        grow: Callable[[int], None] = no_limit,
    ) -> Pieces:
        """Read an interval in pieces; see ``Store.select``.

        Raises:
            RequestTimeoutError, CompactedError: the view was let go, and its revision is compacted by now.
        """
        main = revision if revision > 0 else self.revision
        check_revision(main, self.revision, self.compact_revision)
        is_present = main == self._store.revision and not self._store.is_writing
        check = partial(self._check, main)
        return self._reader.select(main, key, range_end, selection, is_present=is_present, check=check, grow=grow)
