"""The hub: hands each change to whoever watches its key.

Owns the synced watchers: those that have everything up to the present. The store reports the changes of every write
txn; they are delivered once per turn, after the entries were applied, hence committed. A watcher whose stream has no
room, one that starts in the past, and everybody after a snapshot was installed are *unsynced*: ``catch_up`` serves them
from history until they have everything, and gives them back.

Invariants
- A watcher gets every event that it asked for, once, in order of revision; all of one revision in one response.
- What a turn has for a group of watchers is one response for each of them, put together once.
- Between turns everything up to ``revision`` was delivered to all synced watchers, so a header may say so.
- Delivery costs nothing for keys that nobody watches but a dictionary lookup (and one in the intervals, if any).
- No events are kept for a watcher: what it needs is in the store, and where it is in ``next_revision``.

Leaves out: sockets (``stream``, ``service``) and time (``service``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from raftkv import errors
from raftkv.server.watch import messages
from raftkv.server.watch.catch_up import CatchUp
from raftkv.server.watch.index import Group, Watcher, WatcherIndex
from raftkv.server.watch.stream import WatchStream
from raftkv.storage.mvcc_range import RangeResult
from raftkv.storage.mvcc_txn import Change

_log = logging.getLogger(__name__)


class History(Protocol):
    """The part of the store that watching needs."""

    revision: int
    compact_revision: int
    on_changes: Callable[[int, list[Change]], None] | None

    def history(self, first: int, last: int) -> Iterator[tuple[bytes, bytes]]:
        """Revision key and KeyValue of every change of main revisions ``first..last``."""

    def record(self, revision: int) -> bytes:
        """The KeyValue put at a packed revision."""

    def range(self, key: bytes, *, revision: int) -> RangeResult:
        """Read one key at a revision."""


Batch = list[tuple[int, list[Change]]]
"""Changes by main revision, in order."""

DELIVERIES_PER_TURN: Final = 20_000
"""Watchers times events that a turn delivers; those of further groups fall behind and are served in steps."""

DELIVERIES_MIN: Final = 100
"""A group for which a turn has no more than this is served in it all the same: falling behind costs more."""

MOVES_PER_STEP: Final = 2_000
"""Watchers that a step moves, when very many fell behind or left at once."""

RESPONSE_BYTES: Final = 256 * 1024
"""Bytes of events after which the next revision of a turn goes into another response; clients limit its size."""


def _pieces(batch: Batch) -> Iterator[Batch]:
    """A batch in pieces that fit in a response; a revision is never split."""
    piece: Batch = []
    size_bytes = 0
    for revision, changes in batch:
        if size_bytes > RESPONSE_BYTES:
            yield piece
            piece, size_bytes = [], 0
        piece.append((revision, changes))
        size_bytes += sum(len(change[1]) for change in changes)
    yield piece


class WatchHub:
    """See the module.

    Arguments:
        store: whose changes are watched.
        header: encodes a response header for a revision.
        wake: asks for ``catch_up`` to be run soon; it says then whether it wants to be run again.
    """

    def __init__(self, store: History, header: Callable[[int], bytes], wake: Callable[[], None]) -> None:
        self._store = store
        self._encode_header = header
        self._index = WatcherIndex()
        self._catch_up = CatchUp(store, header, self._caught_up, wake)
        self._pending: Batch = []
        self._deliveries_left = 0
        self._falling: deque[list[Watcher]] = deque()
        """Watchers that fell behind many at once: in no index any more, and not in the history yet."""
        self._leaving: deque[list[Watcher]] = deque()
        """Watchers of streams that were closed."""
        self._wake = wake
        self._touched: list[WatchStream] = []
        self._on_change: dict[bytes, dict[Callable[[], None], None]] = {}
        self.streams: set[WatchStream] = set()
        self.events_total = 0
        self.watcher_count = 0
        self.watcher_bytes = 0
        """Watchers of all open streams."""
        self.unsynced_count = 0
        """Those that are behind."""
        self.delivered_revision = store.revision
        store.on_changes = self._changed

    # -- the store's side --------------------------------------------------------------------------------------------

    def _changed(self, revision: int, changes: list[Change]) -> None:
        if self._index.size or self._on_change:
            self._pending.append((revision, changes))

    def applied(self) -> None:
        """Deliver, at the end of a turn.

        A failure here is no reason to stop the member, unless it found damage; but no watcher may miss an event
        unknowingly, so all streams are ended, and their clients watch again from where they were.
        """
        try:
            self.deliver()
        except errors.InvariantError:
            raise
        except Exception:
            _log.exception("events could not be delivered: ending all watches")
            for stream in list(self.streams):
                stream.fail(errors.StoppedError("raftkv: the watch was interrupted: watch again"))

    def deliver(self) -> None:
        """Deliver everything applied so far, if that has not been done."""
        revision = self._store.revision
        if revision == self.delivered_revision:
            return
        self.delivered_revision = revision
        if self._pending:
            pending, self._pending = self._pending, []
            self._deliveries_left = DELIVERIES_PER_TURN
            for group, batch in self._by_group(pending).items():
                self._deliver_batch(group, batch)
            self.flush()
            if self._on_change:
                self._call_recipes(pending)

    def _by_group(self, pending: Batch) -> dict[Group, Batch]:
        """The changes of a turn for each group that wants them. A watcher is in one group, so its order is kept."""
        batches: dict[Group, Batch] = {}
        for revision, changes in pending:
            for change in changes:
                for group in self._index.groups(change[0]):
                    batch = batches.setdefault(group, [])
                    if batch and batch[-1][0] == revision:
                        batch[-1][1].append(change)
                    else:
                        batch.append((revision, [change]))
        return batches

    def _deliver_batch(self, group: Group, batch: Batch) -> None:
        """What a turn has for a group, unless so many watch and so much happened that it takes too long for one."""
        cost = group.size * sum(len(changes) for _, changes in batch)
        if cost > max(self._deliveries_left, DELIVERIES_MIN):
            self._fall(self._index.take(group), batch[0][0])
            return
        self._deliveries_left -= cost
        for piece in _pieces(batch):
            self._deliver_piece(group, piece)

    def _deliver_piece(self, group: Group, piece: Batch) -> None:
        """One response for each watcher of a group; its header has the revision of the last event."""
        header = self._encode_header(piece[-1][0])
        late: list[Watcher] = []
        if group.plain:
            events = [messages.event(kv, is_delete) for _, changes in piece for _, kv, is_delete, _ in changes]
            self._fan_out(group, header, events, piece[0][0])
        for watcher in group.special:
            self._deliver_to(watcher, header, piece, late)
        for watcher in late:
            # These did not get it: they go on from there later, from history.
            self._index.remove(watcher)
            self._unsynced(watcher, piece[0][0])

    def _fan_out(self, group: Group, header: bytes, events: list[bytes], first: int) -> None:
        joined = b"".join(events)
        full: list[WatchStream] = []
        for stream, id_fields in group.plain.items():
            if stream.fan_out(header, id_fields, joined):
                self.events_total += len(id_fields) * len(events)
            else:
                full.append(stream)
        for stream in full:
            self._fall(self._index.take_stream(group, stream), first)

    def _deliver_to(self, watcher: Watcher, header: bytes, piece: Batch, late: list[Watcher]) -> None:
        wanted = [
            change
            for revision, changes in piece
            if revision >= watcher.start_revision
            for change in changes
            if watcher.wants(change[2])
        ]
        if not wanted:
            return
        if not watcher.stream.has_room:
            late.append(watcher)
            return
        if watcher.stream.is_closed:
            return
        record = self._store.record
        events = [
            messages.event(kv, is_delete, record(previous) if watcher.prev_kv and previous else None)
            for _, kv, is_delete, previous in wanted
        ]
        watcher.stream.send_events(watcher, header, events)
        self.events_total += len(events)

    def _call_recipes(self, pending: Batch) -> None:
        called: dict[Callable[[], None], None] = {}
        for _, changes in pending:
            for change in changes:
                called.update(self._on_change.get(change[0], ()))
        for callback in called:
            callback()

    def _unsynced(self, watcher: Watcher, next_revision: int) -> None:
        self._count_unsynced(watcher.stream, 1)
        watcher.is_synced = False
        watcher.next_revision = next_revision
        self._catch_up.add(watcher)

    def _count_unsynced(self, stream: WatchStream, change: int) -> None:
        stream.unsynced_count += change
        self.unsynced_count += change

    def _fall(self, watchers: list[Watcher], next_revision: int) -> None:
        """Watchers that were taken out of the index fall behind; the rest of the work is done in steps."""
        watchers = [watcher for watcher in watchers if not watcher.stream.is_closed]
        for watcher in watchers:
            watcher.is_synced = False
            watcher.next_revision = max(next_revision, watcher.start_revision)
            watcher.stream.unsynced_count += 1
        self.unsynced_count += len(watchers)
        self._falling.append(watchers)
        self._wake()

    def _caught_up(self, watcher: Watcher) -> None:
        """A watcher that was behind has everything."""
        self._count_unsynced(watcher.stream, -1)
        self._synced(watcher)

    def _synced(self, watcher: Watcher) -> None:
        """A watcher has everything up to the present: serve it live."""
        watcher.is_synced = True
        is_special = (
            watcher.no_put
            or watcher.no_delete
            or watcher.prev_kv
            or watcher.fragment
            or watcher.progress_notify
            or watcher.start_revision > self._store.revision + 1
        )
        self._index.add(watcher, special=is_special)

    def restored(self) -> None:
        """The store was replaced by a snapshot: everybody catches up from where they were."""
        next_revision = self.delivered_revision + 1
        self.delivered_revision = self._store.revision
        self._pending.clear()
        for group in self._index.all_groups():
            self._fall(self._index.take(group), next_revision)
        for callbacks in list(self._on_change.values()):
            for callback in list(callbacks):
                callback()

    # -- the clients' side -------------------------------------------------------------------------------------------

    def add(self, watcher: Watcher) -> None:
        """Serve a new watcher: live if it starts now or later, else from history first."""
        self.deliver()
        self.streams.add(watcher.stream)
        self.watcher_count += 1
        self.watcher_bytes += watcher.size_bytes
        if watcher.start_revision == 0 or watcher.start_revision > self._store.revision:
            self._synced(watcher)
        else:
            self._unsynced(watcher, watcher.start_revision)

    def remove(self, watcher: Watcher) -> None:
        """Serve a watcher no more."""
        self.watcher_count -= 1
        self.watcher_bytes -= watcher.size_bytes
        if not self._forget(watcher):
            self._count_unsynced(watcher.stream, -1)

    def _forget(self, watcher: Watcher) -> bool:
        """Take a watcher from wherever it is; whether that was among the live."""
        if watcher.is_synced:
            return self._index.remove(watcher)
        self._catch_up.remove(watcher)
        return False

    def leave(self, stream: WatchStream) -> None:
        """A client is gone: nothing reaches its watchers any more. However many there are, they go step by step."""
        if stream in self.streams:
            self.streams.remove(stream)
            self.watcher_count -= len(stream.watchers)
            self.watcher_bytes -= stream.watcher_bytes
            self._count_unsynced(stream, -stream.unsynced_count)
            self._leaving.append(list(stream.watchers.values()))
            if self._move():
                self._wake()

    def header(self) -> bytes:
        """Header with the present revision, everything up to which was delivered."""
        self.deliver()
        return self._encode_header(self._store.revision)

    @property
    def revision(self) -> int:
        """The present revision."""
        return self._store.revision

    def has_reached(self, watcher: Watcher) -> bool:
        """Whether a watcher has everything so far, and does not start in the future."""
        return watcher.is_synced and watcher.start_revision <= self._store.revision

    def touched(self, stream: WatchStream) -> None:
        """A stream has something to send."""
        self._touched.append(stream)

    def flush(self) -> None:
        """Send what the streams have gathered."""
        touched, self._touched = self._touched, []
        for stream in touched:
            stream.flush()

    def on_change(self, key: bytes, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after turns in which a key was written or deleted, or may have been.

        For recipes inside the server, which read the store again then. Returns the function that ends it.
        """
        self._on_change.setdefault(key, {})[callback] = None

        def cancel() -> None:
            callbacks = self._on_change.get(key, {})
            callbacks.pop(callback, None)
            if not callbacks:
                self._on_change.pop(key, None)

        return cancel

    # -- behind ------------------------------------------------------------------------------------------------------

    def catch_up(self) -> bool:
        """Serve some of those that are behind, for a few milliseconds; whether there is more to do now."""
        self.deliver()
        more = self._move()
        more = self._catch_up.step() or more
        self.flush()
        return more

    def _move(self) -> bool:
        """Move some of those that fell behind or left many at once; whether there are more."""
        for queue, move in ((self._leaving, self._let_go), (self._falling, self._to_history)):
            if queue:
                watchers = queue[0]
                for watcher in watchers[-MOVES_PER_STEP:]:
                    move(watcher)
                del watchers[-MOVES_PER_STEP:]
                if not watchers:
                    queue.popleft()
        return bool(self._leaving or self._falling)

    def _let_go(self, watcher: Watcher) -> None:
        """Take a watcher of a closed stream from wherever it is, its stream too: they would hold each other."""
        self._forget(watcher)
        watcher.stream.watchers.pop(watcher.watch_id, None)

    def _to_history(self, watcher: Watcher) -> None:
        """Serve a watcher that fell behind, unless it has ended since."""
        if watcher.stream.watchers.get(watcher.watch_id) is watcher:
            self._catch_up.add(watcher)

    def resume(self, watchers: list[Watcher]) -> None:
        """These have room again."""
        for watcher in watchers:
            self._catch_up.add(watcher)

    @property
    def lag_revisions(self) -> int:
        """How far the slowest watcher is behind, of those that wait for their turn or for their client."""
        parked = (stream.parked_revision for stream in self.streams if stream.unsynced_count)
        return max(self._store.revision + 1 - min(self._catch_up.next_revision, *parked, self._store.revision + 1), 0)
