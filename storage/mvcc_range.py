"""Reads: from an interval and a revision to serialized KeyValues.

The index finds the revisions; the overlay and the disk return their records. At the current revision, counting an
interval costs two subtractions, and keys-only reads need no records. At an older revision the read iterates over the
whole interval.

Long intervals, and selections of them (``selection.py``), are read in small pieces, so that the owner can do other
work between the pieces. ``PinnedView`` is the store as it was at one moment; later changes do not affect it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from raftkv.errors import CompactedError, FutureRevisionError, RequestTimeoutError
from raftkv.storage.compaction import Hold
from raftkv.storage.index import Found, Index, State, Walk
from raftkv.storage.key_value import KeyValueView, encode
from raftkv.storage.overlay import Overlay
from raftkv.storage.revision import SUB_BITS, SUB_MASK, after, pack_key
from raftkv.storage.selection import Pieces, Selection, Selector, drain, no_limit, nothing

if TYPE_CHECKING:
    from raftkv.storage.mvcc import Store

_SEPARATOR: Final = 0x5F  # "_"


class RangeResult:
    """The result of one read."""

    __slots__ = ("count", "kvs", "revision")

    def __init__(self, kvs: list[bytes], count: int, revision: int) -> None:
        self.kvs = kvs
        """Serialized ``mvccpb.KeyValue``, in order of key."""
        self.count = count
        """Number of keys in the interval, regardless of the limit."""
        self.revision = revision
        """Main revision of the store (or of the transaction) when it was read."""


class Reader:
    """The read side of one store: combines its index, overlay and leases. Its only state is a counter of reads."""

    def __init__(self, index: Index, overlay: Overlay, leases: dict[bytes, int]) -> None:
        self._index = index
        self._overlay = overlay
        self._leases = leases
        self.ranges_total = 0

    def use_leases(self, leases: dict[bytes, int]) -> None:
        """Replace the table of the leases of keys."""
        self._leases = leases

    def get(self, key: bytes) -> bytes | None:
        """Return the current KeyValue of a key; ``None`` if it does not exist."""
        revision = self._index.latest(key)
        return self.record(revision) if revision else None

    def record(self, revision: int) -> bytes:
        """Return the KeyValue put at a packed revision that the index knows."""
        return self._overlay.load(pack_key(revision >> SUB_BITS, _SEPARATOR, revision & SUB_MASK))

    def latest(self, key: bytes, end: bytes, limit: int, count_only: bool, keys_only: bool) -> tuple[list[bytes], int]:
        """Read what exists now in an interval.

        Arguments:
            key, end: the interval (``index.py``).
            limit: maximum number of KeyValues to return; 0 or less is no limit.
            count_only: return no KeyValues.
            keys_only: leave values and leases out.

        Returns:
            KeyValues in order of key, and the number of keys in the interval, regardless of the limit.
        """
        self.ranges_total += 1
        # One key, by far the most frequent read: one lookup, no iterator.
        if not end:
            revision = self._index.latest(key)
            if not revision:
                return [], 0
            if count_only:
                return [], 1
            return [_key_only(key, self._index.get_latest(key)) if keys_only else self.record(revision)], 1
        # Count without collecting, so that a limit of 1 on a million keys loads one record.
        count = self._index.count(key, end)
        if count_only or not count:
            return [], count
        pairs = self._limited(self._index.live(key, end), limit)
        if keys_only:
            return [_key_only(name, self._index.get_latest(name)) for name, _ in pairs], count
        return self._overlay.load_all(revision for _, revision in pairs), count

    def small(
        self, key: bytes, end: bytes, limit: int, keys_max: int, size_bytes_max: int
    ) -> tuple[list[bytes], int] | None:
        """Read what exists now in an interval, unless it is too large.

        Arguments:
            key, end: the interval (``index.py``).
            limit: maximum number of KeyValues to return; 0 or less is no limit.
            keys_max: number of known keys above which it is too large.
            size_bytes_max: bytes of KeyValues above which it is too large.

        Returns:
            the values of ``latest``, or ``None``.
        """
        count = self._index.known_count(key, end)
        if count > keys_max:
            return None
        # If no key is dead, every known key is live, and the count above is the result.
        if self._index.has_dead:
            count = self._index.count(key, end)
        pairs = self._limited(self._index.live(key, end), limit)
        kvs = self._overlay.load_all((revision for _, revision in pairs), size_bytes_max)
        # ``load_all`` stopped at the size limit: use ``select`` for this read.
        if len(kvs) < count and (limit <= 0 or len(kvs) < limit):
            return None
        self.ranges_total += 1
        return kvs, count

    def at(
        self, main: int, key: bytes, end: bytes, limit: int, count_only: bool, keys_only: bool
    ) -> tuple[list[bytes], int]:
        """Read what existed in an interval at an older revision.

        Arguments:
            main: the main revision.
            key, end, limit, count_only, keys_only: as in ``latest``.

        Returns:
            the values of ``latest``.
        """
        self.ranges_total += 1
        # Only an iteration over all keys shows how many existed then.
        pairs = list(self._index.live_at(key, end, main))
        if count_only:
            return [], len(pairs)
        chosen = self._limited(pairs, limit)
        if keys_only:
            return self.keys_at(chosen, after(main)), len(pairs)
        return self._overlay.load_all(revision for _, revision in chosen), len(pairs)

    def state(self, key: bytes, main: int) -> State | None:
        """Return the state of a key in the index as of a main revision; ``None`` if the key did not exist then.

        Arguments:
            key: the key.
            main: the main revision.
        """
        return self._index.state(key, main)

    def lease_at(self, key: bytes, revision: int) -> int:
        """Return the id of the lease that a value was put with, 0 for none.

        Arguments:
            key: the key.
            revision: packed revision of the put.
        """
        # A key that was not written since still has the lease of that put: no record needs to be read.
        if self._index.latest(key) == revision:
            return self._leases.get(key, 0)
        return KeyValueView(self.record(revision)).lease

    def walk(self, key: bytes, end: bytes, bound: int, *, reverse: bool = False) -> Walk:
        """Return an iteration over an interval at one moment, in pieces.

        Arguments:
            key, end: the interval (``index.py``).
            bound: packed revision; changes before it are visible.
            reverse: begin with the last key.
        """
        return Walk(self._index, key, end, bound, reverse=reverse)

    def known_count(self, key: bytes, end: bytes) -> int:
        """Return the number of keys of an interval that the index knows, live or not.

        Arguments:
            key, end: the interval (``index.py``).
        """
        return self._index.known_count(key, end)

    def free_later(self, items: list[Any]) -> None:
        """Empty an unused list, and the lists in it, gradually on another thread."""
        self._overlay.free_later(items)

    def mean_bytes(self, main: int, key: bytes, end: bytes, samples: int) -> int:
        """Estimate the mean size of a KeyValue of an interval from a random sample; 0 if no key exists.

        Arguments:
            main: main revision.
            key, end: the interval (``index.py``).
            samples: KeyValues to look at, at most.
        """
        states = self._index.states(self._index.sample(key, end, samples), after(main))
        return sum([self._overlay.size_bytes(state[1]) for state in states]) // len(states) if states else 0

    def load_all(self, revisions: list[int], size_bytes_max: int) -> list[bytes]:
        """Return the first KeyValues of packed revisions: at least one, then until a size is reached.

        Arguments:
            revisions: packed revisions that the index knows.
            size_bytes_max: number of bytes after which to stop.
        """
        return self._overlay.load_all(revisions, size_bytes_max)

    def keys_at(self, pairs: Iterable[tuple[bytes, int]], bound: int) -> list[bytes]:
        """Return KeyValues without values and leases at one moment, without reading records.

        Arguments:
            pairs: keys that existed then, and their packed revisions.
            bound: packed revision; changes before it are visible.
        """
        return [_key_only(name, self._index.get(name, bound)) for name, _ in pairs]

    def select(
        self,
        bound: int,
        key: bytes,
        end: bytes,
        selection: Selection,
        *,
        count: int | None,
        check: Callable[[], None] = nothing,
        grow: Callable[[int], None] = no_limit,
    ) -> Pieces:
        """Begin to read the selected part of an interval at one moment.

        Arguments:
            bound: packed revision; changes before it are visible.
            key, end: the interval (``index.py``).
            selection: filters, order and limit.
            count: number of keys in the interval at that moment; ``None``: unknown, so that counting needs an
                iteration.
            check: called before each piece; raises when the moment is no longer readable.
            grow: called with the number of bytes that the read holds besides what it has yielded; may raise to refuse.
        """
        self.ranges_total += 1
        return Selector(self, bound, key, end, selection, count, check, grow).pieces()

    def count(self, key: bytes, end: bytes) -> int:
        """Return the number of keys of an interval that exist in the newest state of the index: two subtractions."""
        return self._index.count(key, end)

    @staticmethod
    def _limited(
        pairs: Iterator[tuple[bytes, int]] | list[tuple[bytes, int]], limit: int
    ) -> Iterator[tuple[bytes, int]] | list[tuple[bytes, int]]:
        return islice(pairs, limit) if limit > 0 else pairs


def _key_only(key: bytes, found: Found | None) -> bytes:
    # The index has all fields except value and lease; etcd 3.7 leaves both out.
    if found is None:
        raise KeyError(key)
    return encode(key, found.created, found.modified >> SUB_BITS, found.version)


def check_revision(revision: int, current: int, compacted: int) -> None:
    """Refuse a revision that cannot be read (the compacted one itself can).

    Arguments:
        revision: the requested main revision.
        current: the newest main revision.
        compacted: the compact revision, -1 if there was no compaction.

    Raises:
        FutureRevisionError: the revision is after ``current``.
        CompactedError: the revision is before ``compacted``.
    """
    if revision > current:
        raise FutureRevisionError
    if revision < compacted:
        raise CompactedError(compacted)


class PinnedView:
    """A store as it was at one moment, for a long read: later changes are not visible.

    Everything that is readable when the view is made stays readable until ``let_go``, because compactions delay their
    work (not their effect on other readers). After ``let_go`` the view can be read until a compaction drops its
    revision. When a received database replaces the store, the view is let go.

    Arguments:
        store: store to read.
        reader: reader of that store.
        hold: delays compactions; ``let_go`` ends it.
    """

    def __init__(self, store: Store, reader: Reader, hold: Hold) -> None:
        self._store = store
        self.reader = reader
        """Reads the store at any revision; ``check`` first."""
        self._hold = hold
        # Copied now, because the store changes later.
        self.revision = store.revision
        """The main revision that is the present of this view."""
        self.compact_revision = store.compact_revision
        """Oldest main revision that can be read in this view."""

    def let_go(self) -> None:
        """Let compactions continue. May be called more than once."""
        self._hold.end()

    def check(self) -> None:
        """Raise the errors of ``select`` if the present of this view is no longer readable."""
        self._check(self.revision)

    def known_count(self, key: bytes, range_end: bytes) -> int:
        """Return the number of keys of an interval that the store knows: the cost of reading it.

        Arguments:
            key, range_end: the interval, as on the wire (``index.py``).
        """
        return self.reader.known_count(key, range_end)

    def _check(self, main: int) -> None:
        compacted = self._store.compact_revision
        if not self._hold.is_held and main < compacted:
            # A client that asked for the present named no revision that could be reported as compacted.
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
        """Read an interval at once.

        Arguments:
            key, range_end, revision, limit, count_only, keys_only: as in ``Store.range``; the present is this view's.

        Raises:
            RequestTimeoutError, CompactedError: as in ``select``.
        """
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
        """Read an interval in pieces.

        Arguments:
            key, range_end, selection, revision, grow: as in ``Store.select``; the present is this view's.

        Raises:
            RequestTimeoutError, CompactedError: the view was let go, and its revision has been compacted.
        """
        main = revision if revision > 0 else self.revision
        check_revision(main, self.revision, self.compact_revision)
        # Only if nothing was written since the view was made, and no transaction is open: otherwise the index counts
        # newer keys.
        is_present = main == self._store.revision and not self._store.is_writing
        count = self.reader.count(key, range_end) if is_present else None
        check = partial(self._check, main)
        return self.reader.select(after(main), key, range_end, selection, count=count, check=check, grow=grow)

    def at(self, bound: int, count: int | None = None) -> Moment:
        """Return what was visible before a packed revision of this view's history (``Moment``)."""
        return Moment(self, bound, count)

    def check_moment(self, bound: int) -> None:
        """Raise RequestTimeoutError if the state before a packed revision is no longer readable."""
        # A compaction at a main revision also drops what its later changes replaced.
        if (bound >> SUB_BITS) - 1 < (self.compact_revision if self._hold.is_held else self._store.compact_revision):
            raise RequestTimeoutError


class Moment:
    """What a write transaction saw between two of its changes, read after its end.

    Arguments:
        view: a view of the store that was made after the transaction.
        bound: packed revision of the transaction's next change at that moment.
        count: number of keys of the interval that is read, at that moment; ``None``: unknown.
    """

    __slots__ = ("_bound", "_count", "_view", "revision")

    def __init__(self, view: PinnedView, bound: int, count: int | None) -> None:
        self._view = view
        self._bound = bound
        self._count = count
        self.revision = (bound - 1) >> SUB_BITS
        """The main revision that was the present of the transaction."""

    def record(self, revision: int) -> bytes:
        """Return the KeyValue put at a packed revision that was visible.

        Raises:
            RequestTimeoutError: as in ``select``.
        """
        self._view.check_moment(self._bound)
        return self._view.reader.record(revision)

    def select(
        self,
        key: bytes,
        range_end: bytes,
        selection: Selection,
        *,
        revision: int = 0,
        grow: Callable[[int], None] = no_limit,
    ) -> Pieces:
        """Read an interval in pieces.

        Arguments:
            key, range_end, selection, revision, grow: as in ``Store.select``; the present is this moment.

        Raises:
            RequestTimeoutError: a compaction has dropped what was visible. The transaction is applied all the same.
        """
        bound = after(revision) if 0 < revision < self.revision else self._bound
        count = self._count if bound == self._bound else None
        check = partial(self._view.check_moment, bound)
        check()
        return self._view.reader.select(bound, key, range_end, selection, count=count, check=check, grow=grow)
