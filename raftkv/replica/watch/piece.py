"""A piece of history, read in small steps and matched with its watchers.

A piece stores the found events once for all watchers that want the same: watchers of one interval with the same filters
and the same request for previous values are a *view*. A piece ends with a whole revision, however large that is. Its
size is still bounded: views beyond ``REFERENCES_MAX`` and ``PIECE_MAX_BYTES`` are left to later pieces.

    piece = Piece(store, watchers, last)
    while not piece.is_read:
        piece.read()                  # a bounded step; other work may run in between
    for view in piece.views: ...      # watchers, and their events

Between steps the store may be written to, which has no effect here, or compacted: then ``is_stale`` says that the
unread rest may have gaps, and the piece is useless. Not here: the order of watchers (``catch_up``), sending.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from raftkv.errors import CompactedError
from raftkv.replica.watch import messages
from raftkv.replica.watch.index import Intervals, Watcher
from raftkv.storage.key_value import KeyValueView, encode, key_of, value_bytes
from raftkv.storage.revision import SUB_BITS, SUB_MASK, from_key, is_tombstone

if TYPE_CHECKING:
    from raftkv.storage.mvcc import Store

BYTES_PER_PIECE: Final = 1024 * 1024
"""Bytes of events in a piece for all its watchers together; at least a whole revision."""
EVENT_BYTES: Final = 200
"""Weight of an event for a watcher in addition to its bytes, because delivering it takes time too."""

UNITS_PER_STEP: Final = 2_000
"""Work of one reading step: records, and events of views. A step takes 3 to 6 ms."""
LOOKED_AT_PER_UNIT: Final = 10
"""Views whose filters are checked in the time of one unit."""
PREVIOUS_UNITS: Final = 5
"""Weight of a previous value, which is searched for in the index and read."""
BYTES_PER_STEP: Final = 4 * 1024 * 1024
"""Bytes of records, and of events with their previous values, after which a step ends."""
REFERENCES_MAX: Final = 4_000_000
"""Events of all views together (8 bytes each): above it the later half of the views waits for another piece."""
PIECE_MAX_BYTES: Final = 512 * 1024 * 1024
"""Bytes of events with the same effect; this much for one view exceeds what a connection may queue (``rpc.limits``)."""
FREED_PER_STEP: Final = 50_000
"""Events of a view freed at a time."""

_Wish = tuple[bool, bool, bool, bool, int]


class View:
    """Watchers of one interval that want the same events, and these events.

    Arguments:
        home: dictionary of the piece that contains this view.
        wish: its key there: prev_kv, no_put, no_delete, keys_only, value_bytes_max.

    Attributes:
        watchers: in order of arrival.
        size_bytes: size of all events.
        is_too_large: no client can be sent this much; the events are not stored.
    """

    __slots__ = (
        "_events",
        "_home",
        "_joined",
        "_revisions",
        "_starts",
        "_wish",
        "form",
        "is_too_large",
        "size_bytes",
        "watchers",
    )

    def __init__(self, home: dict[_Wish, View], wish: _Wish) -> None:
        self._home = home
        self._wish = wish
        self.form = (wish[0], wish[3])
        self.watchers: list[Watcher] = []
        self.size_bytes = 0
        self.is_too_large = False
        self._events: list[bytes] = []
        self._joined = b""
        self._revisions: list[int] = []
        self._starts: list[int] = []
        home[wish] = self

    def __len__(self) -> int:
        return len(self._events)

    def append(self, revision: int, event: bytes) -> None:
        """Add an event."""
        if not self._revisions or self._revisions[-1] != revision:
            self._revisions.append(revision)
            self._starts.append(len(self._events))
        self._events.append(event)
        self.size_bytes += len(event)

    def since(self, revision: int) -> list[bytes]:
        """Return the events of a revision and later ones."""
        index = bisect_left(self._revisions, revision)
        if index == 0:
            return self._events
        return self._events[self._starts[index] :] if index < len(self._starts) else []

    def size_of(self, events: list[bytes]) -> int:
        """Return the size of events returned by ``since``."""
        return self.size_bytes if events is self._events else sum(map(len, events))

    @property
    def is_joined(self) -> bool:
        """Whether all events were joined already."""
        return bool(self._joined)

    def joined(self, events: list[bytes]) -> bytes:
        """Return events returned by ``since``, joined; all events are joined only once."""
        if events is not self._events:
            return b"".join(events)
        if not self._joined:
            self._joined = b"".join(events)
        return self._joined

    def leave(self) -> None:
        """Stop receiving events."""
        self._home.pop(self._wish, None)

    def free(self) -> bool:
        """Free some of the events, because freeing very many at once takes long; return whether there are more."""
        self._joined = b""
        del self._events[-FREED_PER_STEP:]
        return bool(self._events)


class Piece:
    """Reads a piece of history in steps, and collects for each view the events that its watchers want.

    Arguments:
        store: the history.
        watchers: watchers of the piece; later ones may be left out (``left_out``).
        last: the last revision that it may contain.

    Attributes:
        last: the last revision that it contains completely, once it ``is_read``.
        views: the views with their events.
        is_abandoned: set when the database was replaced.
        left_out: watchers that must be served by another piece.
    """

    def __init__(self, store: Store, watchers: list[Watcher], last: int) -> None:
        self._store = store
        self._by_key: dict[bytes, dict[_Wish, View]] = {}
        self._ranges: Intervals[dict[_Wish, View]] = Intervals()
        self.views: list[View] = []
        for watcher in watchers:
            self._add(watcher)
        self.left_out: list[Watcher] = []
        self._first = min(watcher.next_revision for watcher in watchers)
        self._compact_revision = store.compact_revision
        self._next = max(self._first, 0) << SUB_BITS
        self._size_bytes = self._references = self._held_bytes = 0
        self.is_abandoned = False
        self.last = last
        self.is_read = False

    def _add(self, watcher: Watcher) -> None:
        key, end = watcher.key, watcher.range_end
        views = self._ranges.get(key, end) if end else self._by_key.get(key)
        if views is None:
            views = {}
            if end:
                self._ranges.add(key, end, views)
            else:
                self._by_key[key] = views
        wish = (watcher.prev_kv, watcher.no_put, watcher.no_delete, watcher.keys_only, watcher.value_bytes_max)
        view = views.get(wish)
        if view is None:
            view = View(views, wish)
            self.views.append(view)
        view.watchers.append(watcher)

    @property
    def is_stale(self) -> bool:
        """Whether a compaction has reached the unread rest, or another database is in place."""
        compacted = self._store.compact_revision
        return self.is_abandoned or (compacted != self._compact_revision and compacted > self._first)

    def read(self) -> None:
        """Read one step further."""
        units, step_bytes = UNITS_PER_STEP, BYTES_PER_STEP
        current = self._next >> SUB_BITS
        history = self._store.history(current, self.last, sub=self._next & SUB_MASK)
        for revision_key, kv in history:
            packed = from_key(revision_key)
            revision = packed >> SUB_BITS
            if revision != current:
                if self._size_bytes > BYTES_PER_PIECE:
                    self.last = current
                    break
                current = revision
            if units <= 0 or step_bytes <= 0:
                self._next = packed
                return
            used, size_bytes = self._match(revision, kv, is_tombstone(revision_key))
            units -= used
            # Records without watchers were read and checked too, so they count.
            step_bytes -= len(kv) + size_bytes
        self.is_read = True

    def _match(self, revision: int, kv: bytes, is_delete: bool) -> tuple[int, int]:
        """Add a change to its views; return its units and bytes."""
        key = key_of(kv)
        found, units = self._wanting(key, kv, is_delete)
        if not found:
            self._size_bytes += EVENT_BYTES
            return units, 0
        if is_delete:
            kv = encode(key, 0, revision, 0)
        events: dict[tuple[bool, bool], bytes] = {}
        units += len(found)
        size_bytes = 0
        for view in found:
            event = events.get(view.form)
            if event is None:
                prev_kv, keys_only = view.form
                previous = self._previous(key, revision, kv) if prev_kv else None
                event = (messages.without_values if keys_only else messages.event)(kv, is_delete, previous)
                events[view.form] = event
                units += PREVIOUS_UNITS if prev_kv else 0
                size_bytes += len(event)
            view.append(revision, event)
            self._size_bytes += (len(event) + EVENT_BYTES) * len(view.watchers)
        self._references += len(found)
        self._held_bytes += size_bytes
        if self._references > REFERENCES_MAX or self._held_bytes > PIECE_MAX_BYTES:
            self._leave_out()
        return units, size_bytes

    def _wanting(self, key: bytes, kv: bytes, is_delete: bool) -> tuple[list[View], int]:
        """Return the views that want a change of a key, and the units used to find them."""
        homes = self._ranges.containing(key) if self._ranges else []
        single = self._by_key.get(key)
        if single is not None:
            homes.append(single)
        if not homes:
            return [], 1
        which = 2 if is_delete else 1
        size_bytes = 0 if is_delete else -1
        found: list[View] = []
        looked_at = 0
        for views in homes:
            looked_at += len(views)
            for wish, view in views.items():
                if wish[which]:
                    continue
                if wish[4] and size_bytes < 0:
                    size_bytes = value_bytes(kv)
                if not 0 < wish[4] < size_bytes:
                    found.append(view)
        return found, 1 + looked_at // LOOKED_AT_PER_UNIT

    def _leave_out(self) -> None:
        """Drop the later half of the views: another piece serves their watchers, from their current revision."""
        if len(self.views) == 1:
            view = self.views[0]
            if self._held_bytes > PIECE_MAX_BYTES:
                view.is_too_large = True
                view.leave()
            return
        half = len(self.views) // 2
        for view in self.views[half:]:
            self.left_out += view.watchers
            view.leave()
        del self.views[half:]
        self._references = sum(map(len, self.views))
        self._held_bytes = sum(view.size_bytes for view in self.views)

    def _previous(self, key: bytes, revision: int, kv: bytes) -> bytes | None:
        # A created key had no previous value, even if it replaces one that the same txn has deleted.
        if KeyValueView(kv).create_revision == revision:
            return None
        try:
            return next(iter(self._store.range(key, revision=revision - 1).kvs), None)
        except CompactedError:
            return None
