"""Watchers that are behind, served from the history in the store.

Owns their queue. A step takes the first of them, with others that are about as far, reads a piece of history once for
all, sends each its events as one response (header: the store's revision, as in etcd), and puts those that are not
done at the end of the queue. So nobody starves behind a watcher that has a long way to go, and a step is short.

A watcher whose stream has no room is *parked* in its stream until the client has read. One whose next revision was
compacted is ended with ``compact_revision``, never silently.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Final

from raftkv.errors import CompactedError
from raftkv.server.watch import messages
from raftkv.server.watch.index import Watcher, WatcherIndex
from raftkv.storage.key_value import encode, key_of
from raftkv.storage.revision import SUB_BITS, from_key, is_tombstone

if TYPE_CHECKING:
    from raftkv.server.watch.hub import History

WATCHERS_PER_STEP: Final = 512
REVISIONS_PER_STEP: Final = 1000
BYTES_PER_STEP: Final = 1024 * 1024
"""Bytes of events that a step has for all its watchers together, a whole revision at least."""
EVENT_BYTES: Final = 200
"""What an event for a watcher counts beside its own bytes: handing it over takes time too."""


class CatchUp:
    """See the module.

    Arguments:
        store: the history.
        header: encodes a response header for a revision.
        synced: takes a watcher that has everything.
        wake: asks for ``step`` to be run.
    """

    def __init__(
        self,
        store: History,
        header: Callable[[int], bytes],
        synced: Callable[[Watcher], None],
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._header = header
        self._synced = synced
        self._wake = wake
        # Ordered, and not a plain dict: that one is slow to give its first when many before it are gone.
        self._queue: OrderedDict[Watcher, None] = OrderedDict()

    def add(self, watcher: Watcher) -> None:
        """Serve a watcher from ``next_revision`` on."""
        self._queue[watcher] = None
        self._wake()

    def remove(self, watcher: Watcher) -> None:
        """Forget a watcher, if it is here."""
        self._queue.pop(watcher, None)

    @property
    def next_revision(self) -> int:
        """The next revision of the watcher that is the farthest behind of the first few; 2**63 for none."""
        first = islice(self._queue, WATCHERS_PER_STEP)
        return min((watcher.next_revision for watcher in first), default=1 << 63)

    def step(self) -> bool:
        """Do a piece of work; whether more can be done at once."""
        batch = self._take()
        if batch:
            piece = _Piece(self._store, batch)
            for watcher in batch:
                self._advance(watcher, piece)
        return bool(self._queue)

    def _take(self) -> list[Watcher]:
        """The next watchers to serve together: the first in the queue, and others that are about as far."""
        batch: list[Watcher] = []
        for _ in range(min(len(self._queue), WATCHERS_PER_STEP)):
            watcher, _none = self._queue.popitem(last=False)
            if watcher.stream.is_closed:
                continue
            if watcher.next_revision < self._store.compact_revision:
                self._end(watcher)
            elif not watcher.stream.has_room:
                watcher.stream.park(watcher)
            elif not batch or abs(watcher.next_revision - batch[0].next_revision) < REVISIONS_PER_STEP:
                batch.append(watcher)
            else:
                self._queue[watcher] = None
        return batch

    def _end(self, watcher: Watcher) -> None:
        """The history that it needs is gone."""
        stream = watcher.stream
        stream.forget(watcher)
        # The revision in this header is zero, as in etcd: nothing is promised to have been sent.
        stream.send(messages.compacted(self._header(0), watcher.watch_id, self._store.compact_revision))

    def _advance(self, watcher: Watcher, piece: _Piece) -> None:
        """Send a watcher what the piece has for it, and see where it belongs then."""
        stream = watcher.stream
        if not stream.has_room:
            stream.park(watcher)
            return
        events = piece.events.get(watcher)
        if events:
            stream.send_events(watcher, self._header(self._store.revision), events)
        watcher.next_revision = max(watcher.next_revision, piece.last + 1)
        if watcher.next_revision > self._store.revision:
            self._synced(watcher)
        else:
            self._queue[watcher] = None


class _Piece:
    """A piece of history, matched with the watchers of a step.

    Attributes:
        last: the last revision that is in it whole.
        events: by watcher, the encoded events for it.
    """

    def __init__(self, store: History, batch: list[Watcher]) -> None:
        self._store = store
        self._index = WatcherIndex()
        for watcher in batch:
            self._index.add(watcher, special=True)
        self.events: dict[Watcher, list[bytes]] = {}
        first = min(watcher.next_revision for watcher in batch)
        self.last = min(first + REVISIONS_PER_STEP - 1, store.revision)
        self._read(first)

    def _read(self, first: int) -> None:
        size_bytes, current = 0, first
        for revision_key, kv in self._store.history(first, self.last):
            revision = from_key(revision_key) >> SUB_BITS
            if revision != current:
                if size_bytes > BYTES_PER_STEP:
                    self.last = current
                    return
                current = revision
            size_bytes += self._match(revision, kv, is_tombstone(revision_key))

    def _match(self, revision: int, kv: bytes, is_delete: bool) -> int:
        """Give a change to its watchers; the bytes to count for it."""
        key = key_of(kv)
        watchers = [
            watcher
            for watcher in self._index.watchers(key)
            if watcher.next_revision <= revision and watcher.wants(is_delete)
        ]
        if not watchers:
            return EVENT_BYTES
        if is_delete:
            kv = encode(key, 0, revision, 0)
        plain = messages.event(kv, is_delete)
        with_prev: bytes | None = None
        for watcher in watchers:
            if watcher.prev_kv and with_prev is None:
                with_prev = messages.event(kv, is_delete, self._previous(key, revision))
            event = with_prev if watcher.prev_kv and with_prev is not None else plain
            self.events.setdefault(watcher, []).append(event)
        return (len(plain) + EVENT_BYTES) * len(watchers)

    def _previous(self, key: bytes, revision: int) -> bytes | None:
        try:
            return next(iter(self._store.range(key, revision=revision - 1).kvs), None)
        except CompactedError:
            return None
