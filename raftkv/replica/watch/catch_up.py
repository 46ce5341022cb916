"""Serves watchers that are behind from the history in the store.

They wait in a queue in which identities take turns by the bytes that they are sent (``loop/fair``). The first watcher
is served together with others at about the same revision: a piece of history is read once for all (``piece``), each
watcher is sent its events as one response (header: the store's revision, as in etcd), and unfinished watchers go to the
end of the queue. So no watcher starves behind one that is far behind, or behind thousands of another user. Nearly
always this takes one step; a revision with very many changes, or with large ones and many watchers, takes several, and
every step is short. Between steps watchers may end, streams may be closed, and the store may be compacted or replaced.

A watcher whose stream has no room is *parked* in its stream until the client has read. If the next revision of a
watcher was compacted, the watcher ends with ``compact_revision``, never silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from raftkv import errors
from raftkv.loop.fair import EQUAL, FairQueue, Weights
from raftkv.replica.watch import messages
from raftkv.replica.watch.index import Watcher
from raftkv.replica.watch.piece import EVENT_BYTES, Piece, View

if TYPE_CHECKING:
    from raftkv.storage.mvcc import Store

WATCHERS_PER_STEP: Final = 512
WATCHER_BYTES_PER_STEP: Final = 4 * 1024 * 1024
"""Size of the watchers served together, at least one: comparing interval bounds of megabytes takes long."""
REVISIONS_PER_STEP: Final = 1000
BYTES_PER_STEP: Final = 4 * 1024 * 1024
"""Bytes of responses that a step queues on streams, at least one response."""


class CatchUp:
    """Serves watchers that are behind, from the history in the store.

    Arguments:
        store: the history.
        header: encodes a response header for a revision.
        synced: receives a watcher that has all events.
        wake: requests a call of ``step``.
        weights: as in ``FairQueue``.
    """

    def __init__(
        self,
        store: Store,
        header: Callable[[int], bytes],
        synced: Callable[[Watcher], None],
        wake: Callable[[], None],
        weights: Weights = EQUAL,
    ) -> None:
        self._store = store
        self._header = header
        self._synced = synced
        self._wake = wake
        self._queue = FairQueue[Watcher](weights=weights)
        self._piece: Piece | None = None
        self._work: Iterator[int] | None = None
        """The piece in progress."""
        self._unserved: dict[Watcher, None] = {}
        """Watchers that it still has to serve."""

    def add(self, watcher: Watcher) -> None:
        """Serve a watcher from ``next_revision`` on."""
        self._add(watcher)
        self._wake()

    def _add(self, watcher: Watcher) -> None:
        self._queue.add(watcher.stream.queue, watcher)

    def remove(self, watcher: Watcher) -> None:
        """Forget a watcher, if it is here."""
        self._queue.discard(watcher.stream.queue, watcher)
        self._unserved.pop(watcher, None)

    @property
    def next_revision(self) -> int:
        """The next revision of the farthest watcher among the first few; 2**63 if there are none."""
        first = islice(chain(self._unserved, self._queue), WATCHERS_PER_STEP)
        return min((watcher.next_revision for watcher in first), default=1 << 63)

    def step(self) -> bool:
        """Do a piece of work; return whether more can be done at once."""
        if self._work is None:
            batch = self._take()
            if not batch:
                return bool(len(self._queue))
            self._unserved = dict.fromkeys(batch)
            self._work = self._serve(batch)
        left = BYTES_PER_STEP
        try:
            for used in self._work:
                left -= used
                if left <= 0:
                    return True
        except errors.CorruptionError:
            # Their history cannot be read here, and no watcher may miss an event without notice.
            failed, self._unserved = list(self._unserved), {}
            self._work = self._piece = None
            for watcher in failed:
                watcher.stream.fail(errors.DamagedError())
            raise
        self._work = self._piece = None
        return bool(len(self._queue))

    def replaced(self) -> None:
        """Handle the replacement of the store: the current piece is read again."""
        if self._piece is not None:
            self._piece.is_abandoned = True

    def _serve(self, batch: list[Watcher]) -> Iterator[int]:
        """Read a piece of history and deliver it; yield after each bit of work its amount."""
        first = min(watcher.next_revision for watcher in batch)
        piece = self._piece = Piece(self._store, batch, min(first + REVISIONS_PER_STEP - 1, self._store.revision))
        piece.read()
        while not piece.is_read:
            yield BYTES_PER_STEP
            if piece.is_stale:
                self._put_back(batch)
                return
            piece.read()
        self._put_back(piece.left_out)
        for view in piece.views:
            for watcher in view.watchers:
                if watcher in self._unserved:
                    for size_bytes in self._send(watcher, view):
                        self._queue.charge(watcher.stream.queue, size_bytes)
                        yield size_bytes
                    self._advance(watcher, piece.last)
            while view.free():
                yield BYTES_PER_STEP

    def _put_back(self, watchers: list[Watcher]) -> None:
        """Queue watchers again that must be served by another piece."""
        for watcher in watchers:
            if self._unserved.pop(watcher, self) is None:
                self._add(watcher)

    def _take(self) -> list[Watcher]:
        """Remove and return the watchers to serve next: the first in the queue, and others at about its revision."""
        batch, others = list[Watcher](), list[Watcher]()
        left_bytes = WATCHER_BYTES_PER_STEP
        for _ in range(min(len(self._queue), WATCHERS_PER_STEP)):
            if left_bytes <= 0:
                break
            queue, watcher = self._queue.pop()
            self._queue.charge(queue, watcher.size_bytes)
            if watcher.stream.is_closed:
                continue
            if watcher.next_revision < self._store.compact_revision:
                self._end(watcher)
            elif not watcher.stream.has_room:
                watcher.stream.park(watcher)
            elif not batch or abs(watcher.next_revision - batch[0].next_revision) < REVISIONS_PER_STEP:
                batch.append(watcher)
                left_bytes -= watcher.size_bytes
            else:
                others.append(watcher)
        for watcher in others:
            self._add(watcher)
        if batch:  # the others paid without being served, so the first pays as much: otherwise they would never lead
            self._queue.charge(batch[0].stream.queue, sum(one.size_bytes for one in others))
        return batch

    def _end(self, watcher: Watcher) -> None:
        """End a watcher whose history is compacted."""
        # The revision in this header is zero, as in etcd: it makes no promise about sent events.
        end = messages.compacted(self._header(0), watcher.watch_id, self._store.compact_revision)
        watcher.stream.end_compacted(watcher, end)

    def _send(self, watcher: Watcher, view: View) -> Iterator[int]:
        """Send a watcher the events of a view; a watcher that must not continue is not in ``_unserved`` afterwards."""
        stream = watcher.stream
        if stream.is_closed or view.is_too_large:
            del self._unserved[watcher]
            if not stream.is_closed:
                stream.fail(errors.ResponseTooLargeError())
            return
        if not stream.has_room:
            del self._unserved[watcher]
            stream.park(watcher)
            return
        events = view.since(watcher.next_revision)
        if not events:
            return
        header = self._header(self._store.revision)
        size_bytes = view.size_of(events)
        if not stream.is_to_be_split(watcher, header, len(events), size_bytes):
            is_large = size_bytes > BYTES_PER_STEP and not view.is_joined
            joined = view.joined(events)
            if is_large:
                yield BYTES_PER_STEP  # copying it takes long enough for a step
            if self._is_to_get(watcher):
                stream.send_joined(watcher, header, joined, len(events))
                yield size_bytes + EVENT_BYTES
            return
        # Built bit by bit, but sent together: clients expect no other response between fragments.
        fragments: list[bytes] = []
        for message in stream.fragments(watcher, header, events):
            fragments.append(message)
            yield len(message)
        if self._is_to_get(watcher):
            stream.send_fragments(watcher, fragments, len(events))

    def _is_to_get(self, watcher: Watcher) -> bool:
        """Return whether a watcher should still get the events built for it, after possible pauses."""
        stream = watcher.stream
        return watcher in self._unserved and not stream.is_closed and stream.may_go_on(watcher)

    def _advance(self, watcher: Watcher, last: int) -> None:
        """Put a watcher that has everything up to a revision in the right place, unless it ended or waits elsewhere."""
        if self._unserved.pop(watcher, self) is not None:
            return
        watcher.next_revision = max(watcher.next_revision, last + 1)
        if watcher.stream.is_closed:
            return
        if watcher.next_revision > self._store.revision:
            self._synced(watcher)
        else:
            self._add(watcher)
