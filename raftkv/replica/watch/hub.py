"""The hub: delivers each change to the watchers of its key.

The hub has the synced watchers, which have all events up to now. The store reports the changes of every write txn; they
are delivered once per turn, after the entries were applied, hence committed. A watcher whose stream has no room, one
that starts in the past, and all watchers after a snapshot was installed are *unsynced*: ``catch_up`` serves them from
history until they have all events, and returns them.

A turn has limits: changes to be matched, watchers times events, and bytes. Above the first limit all watchers fall
behind; above the others, the group or watcher that would exceed it. A group, and all of them together, fall behind in
constant time: they leave the index as they are, and are moved to the history in steps.

Invariants

- A watcher gets every matching event once, in order of revision; all events of one revision in one response.
- Each watcher of a group gets the events of a turn as one response, encoded once for the group.
- Between turns everything up to ``revision`` was delivered to all synced watchers, so a header may say so.
- Delivery costs only a dictionary lookup for unwatched keys (and one in the intervals, if any).
- No events are stored for a watcher: the store has the events, and ``next_revision`` the position.

Not here: sockets (``stream``) and timers (``server.streams.watch``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from raftkv import errors
from raftkv.loop.cork import Cork
from raftkv.loop.fair import EQUAL, Weights
from raftkv.replica.watch import messages
from raftkv.replica.watch.catch_up import CatchUp
from raftkv.replica.watch.index import LOOK_BYTES, Group, Watcher, WatcherIndex
from raftkv.replica.watch.stream import INTERRUPTED, SendTimes, WatchStream
from raftkv.rpc.shares import Identity, Shares, name_of, refusal
from raftkv.storage.key_value import value_bytes
from raftkv.storage.mvcc import Change, Store
from raftkv.storage.revision import SUB_BITS

# -- turn -----------------------------------------------------------------------------------------------------------
#
# The events of one turn for a group of watchers: pieces that fit in a response, encoded once for all watchers.
#
#     for piece in pieces(batch):
#         events = Events(piece, store.reader.record)
#         events.all((watcher.prev_kv, watcher.keys_only), bytes_max)

Batch = list[tuple[int, list[Change]]]
"""Changes by main revision, in order."""

Form = tuple[bool, bool]
"""Form of events: with previous values, without any values."""

RESPONSE_BYTES: Final = 256 * 1024
"""Bytes of events after which the next revision of a turn goes into another response; clients limit its size."""


def pieces(batch: Batch) -> Iterator[Batch]:
    """Split a batch into pieces that fit in a response; a revision is never split."""
    piece: Batch = []
    size_bytes = 0
    for revision, changes in batch:
        if size_bytes > RESPONSE_BYTES:
            yield piece
            piece, size_bytes = [], 0
        piece.append((revision, changes))
        size_bytes += sum(len(change[1]) for change in changes)
    yield piece


class Events:
    """The events of a piece, encoded once for all watchers, when the first watcher needs them.

    Arguments:
        piece: the changes.
        record: reads a previous value.
    """

    __slots__ = ("_changes", "_encoded", "_joined", "_record", "_value_bytes", "first")

    def __init__(self, piece: Batch, record: Callable[[int], bytes]) -> None:
        self.first = piece[0][0]
        self._changes = [(revision, change) for revision, changes in piece for change in changes]
        self._record = record
        self._encoded: dict[Form, list[bytes]] = {}
        self._joined: dict[Form, bytes] = {}
        self._value_bytes: list[int] = []

    def all(self, form: Form, bytes_max: int) -> list[bytes] | None:
        """Return all events in a form; ``None`` if previous values make them larger than ``bytes_max``."""
        events = self._encoded.get(form)
        if events is None:
            prev_kv, keys_only = form
            encode = messages.without_values if keys_only else messages.event
            if prev_kv:
                events = self._encode_with_prev(encode, bytes_max)
            else:
                events = [encode(kv, is_delete, None) for _, (_, kv, is_delete, _) in self._changes]
            self._encoded[form] = events
        return events or None

    def _encode_with_prev(self, encode: Callable[[bytes, bool, bytes | None], bytes], bytes_max: int) -> list[bytes]:
        events: list[bytes] = []
        for revision, (key, kv, is_delete, previous) in self._changes:
            if bytes_max < 0:
                return []
            if previous >> SUB_BITS == revision:
                previous = self._before(revision, key)
            record = self._record(previous) if previous else None
            events.append(encode(kv, is_delete, record))
            bytes_max -= max(len(events[-1]), 0 if record is None else len(record))
        return events

    def _before(self, revision: int, key: bytes) -> int:
        """Return the value of a key before a revision that put and then deleted it, as in etcd: not the one between."""
        for main, change in self._changes:
            if main == revision and change[0] == key:
                return change[3]
        return 0

    def joined(self, form: Form, events: list[bytes]) -> bytes:
        """Return all events in a form, joined."""
        found = self._joined.get(form)
        if found is None:
            found = self._joined[form] = b"".join(events)
        return found

    def wanted(self, watcher: Watcher) -> list[int] | None:
        """Return which events a watcher wants; ``None`` for all."""
        if watcher.start_revision <= self.first and not watcher.is_filtered:
            return None
        if watcher.value_bytes_max and not self._value_bytes:
            self._value_bytes = [value_bytes(change[1]) for _, change in self._changes]
        sizes = self._value_bytes or [0] * len(self._changes)
        return [
            number
            for number, (revision, change) in enumerate(self._changes)
            if revision >= watcher.start_revision and watcher.wants(change[2], sizes[number])
        ]


_log = logging.getLogger(__name__)


DELIVERIES_PER_TURN: Final = 20_000
"""Watchers times events delivered in one turn; further groups fall behind and are served in steps."""

DELIVERIES_MIN: Final = 100
"""A group with no more deliveries than this is still served in the turn: falling behind would cost more."""

MATCHES_PER_TURN: Final = 10_000
"""Changes, and groups found for them, processed in one turn; with more, all watchers fall behind."""

GROUPS_PER_TURN: Final = 5_000
"""Groups served in one turn: 5 us each. With more, all watchers fall behind."""

INTERVAL_WEIGHT: Final = 2
"""Weight of an interval's group: if it has no room and falls behind separately, that takes 16 us."""

BYTES_PER_TURN: Final = 8 * 1024 * 1024
"""Bytes of events queued on streams in one turn, each copied about twice; further watchers fall behind."""

MOVES_PER_STEP: Final = 2_000
"""Watchers moved in one step, when very many fell behind or left at once."""

MOVED_BYTES_PER_STEP: Final = 16 * 1024 * 1024
"""Size of watchers removed in one step: finding one with a key of 1.4 MB takes 0.3 ms."""

MEMBER_WATCHERS_MAX_BYTES: Final = 1024 * 1024 * 1024
"""Memory limit of the watchers of all streams of a member: about 960,000. etcd is limited only by its memory."""

BEHIND_MAX: Final = 500
"""Streams with watchers that are behind examined in one scrape, 100 watchers each: 5 ms."""


def _raise(error: errors.CorruptionError) -> None:
    raise error


class WatchHub:
    """Delivers the changes of each turn to the watchers of their keys.

    Arguments:
        store: store whose changes are watched.
        header: encodes a response header for a revision.
        wake: requests a call of ``catch_up`` soon; its result says whether to call it again.
        cork: flushes streams at the end of a turn.
        weights: as in ``FairQueue``.
    """

    def __init__(
        self,
        store: Store,
        header: Callable[[int], bytes],
        wake: Callable[[], None],
        cork: Cork,
        weights: Weights = EQUAL,
    ) -> None:
        self._store = store
        self._encode_header = header
        self._index = WatcherIndex()
        self._catch_up = CatchUp(store, header, self._caught_up, wake, weights)
        self._pending: Batch = []
        self._deliveries_left = self._bytes_left = 0
        self._fallen: deque[WatcherIndex] = deque()
        """Groups that fell behind: no longer live, and not in the history yet; moved there in steps."""
        self._leaving: deque[list[Watcher]] = deque()
        """Watchers of closed streams."""
        self._wake = wake
        self.cork = cork
        self._on_change: dict[bytes, dict[Callable[[], None], None]] = {}
        self.streams: dict[WatchStream, None] = {}
        self.check_number = 0
        """Incremented when rights may have changed: streams then fall behind until checked (``WatchStream``)."""
        self.events_total = 0
        """Number of events sent, counted by the streams."""
        self.send_times = SendTimes()
        self.watcher_count = 0
        """Number of watchers of all open streams."""
        self.shares = Shares(MEMBER_WATCHERS_MAX_BYTES)
        self.on_count: Callable[[Identity, int], None] | None = None
        """Called with a queue and the change in its number of watchers."""
        self.counts = Shares(0)
        """Number of watchers of each queue, for its limit."""
        self._streams_of: dict[Identity, dict[WatchStream, None]] = {}
        self.unsynced_count = 0
        """Number of watchers that are behind."""
        self.delivered_revision = store.revision
        self.on_damage: Callable[[errors.CorruptionError], None] = _raise
        """Called with damage found by a read for a watcher; its stream is ended."""

    # -- the store's side --------------------------------------------------------------------------------------------

    def changed(self, revision: int, changes: list[Change]) -> None:
        """Record the changes of a write txn; they are delivered when all entries of the turn are applied.

        Arguments:
            revision: revision of the txn.
            changes: the changes, in order.
        """
        if self._index.size or self._on_change:
            self._pending.append((revision, changes))

    def applied(self) -> None:
        """Deliver, at the end of a turn.

        A failure here does not stop the member, unless it found damage. But no watcher may miss an event without
        notice, so all streams are ended, and their clients watch again from their last revision.
        """
        try:
            self.deliver()
        except errors.CorruptionError as error:
            self.on_damage(error)
            for stream in list(self.streams):
                stream.fail(errors.DamagedError())
        except errors.InvariantError:
            raise
        except Exception:
            _log.exception("delivering watch events failed: cancelling all watches")
            for stream in list(self.streams):
                stream.fail(errors.StoppedError(INTERRUPTED))

    def deliver(self) -> None:
        """Deliver all applied changes that are not delivered yet."""
        revision = self._store.revision
        if revision == self.delivered_revision:
            return
        self.delivered_revision = revision
        if self._pending:
            pending, self._pending = self._pending, []
            self._deliveries_left, self._bytes_left = DELIVERIES_PER_TURN, BYTES_PER_TURN
            batches = self._by_group(pending) if self._index.size else {}
            if batches is None:
                self._all_fall_behind(pending[0][0])
            else:
                for group, batch in batches.items():
                    self._deliver_batch(group, batch)
            if self._on_change:
                self._call_recipes(pending)

    def _by_group(self, pending: Batch) -> dict[Group, Batch] | None:
        """Return the changes of a turn for each matching group. A watcher is in one group, so its order is preserved.

        ``None`` if matching is too much work for one turn.
        """
        batches: dict[Group, Batch] = {}
        left, groups_left = MATCHES_PER_TURN, GROUPS_PER_TURN
        for revision, changes in pending:
            left -= len(changes)
            if left < 0:
                return None
            for change in changes:
                weight = 1 if len(change[0]) < LOOK_BYTES else self._index.weight(change[0])
                most = min(DELIVERIES_PER_TURN, groups_left // (INTERVAL_WEIGHT * weight))
                groups = self._index.groups(change[0], most)
                if left < 0 or len(groups) > most:
                    return None
                left -= len(groups)
                if weight > 1:
                    groups_left -= weight * len(groups)
                for group in groups:
                    batch = batches.get(group)
                    if batch is None:
                        batch = batches[group] = []
                        groups_left -= INTERVAL_WEIGHT if group.interval[1] else 1
                    if batch and batch[-1][0] == revision:
                        batch[-1][1].append(change)
                    else:
                        batch.append((revision, [change]))
        return batches

    def _deliver_batch(self, group: Group, batch: Batch) -> None:
        """Deliver the events of a turn to a group; the group falls behind if that takes too long for one turn."""
        cost = group.size * sum(len(changes) for _, changes in batch)
        if cost > max(self._deliveries_left, DELIVERIES_MIN):
            self._index.detach(group)
            self._fall_behind(group, batch[0][0])
            return
        self._deliveries_left -= cost
        for piece in pieces(batch):
            self._deliver_piece(group, piece)

    def _deliver_piece(self, group: Group, piece: Batch) -> None:
        """Send one response to each watcher of a group; its header has the revision of the last event."""
        header = self._encode_header(piece[-1][0])
        if group.plain:
            events = [messages.event(kv, is_delete) for _, changes in piece for _, kv, is_delete, _ in changes]
            self._fan_out(group, header, events, piece[0][0])
        if group.special:
            shared = Events(piece, self._store.reader.record)
            late = [watcher for watcher in group.special if not self._deliver_to(watcher, header, shared)]
            for watcher in late:
                # These did not get the events. They continue from history: from here, or from their start revision.
                self._index.remove(watcher)
                self._unsynced(watcher, max(shared.first, watcher.start_revision))

    def _fan_out(self, group: Group, header: bytes, events: list[bytes], first: int) -> None:
        joined, count = b"".join(events), len(events)
        size_bytes, bytes_left = len(joined), self._bytes_left
        full: list[WatchStream] = []
        for stream, id_fields in group.plain.items():
            if bytes_left >= 0 and stream.fan_out(header, id_fields, joined, count):
                bytes_left -= len(id_fields) * size_bytes
            else:
                full.append(stream)
        self._bytes_left = bytes_left
        for stream in full:
            self._fall_behind(self._index.detach_stream(group, stream), first)

    def _deliver_to(self, watcher: Watcher, header: bytes, events: Events) -> bool:
        """Deliver matching events to one watcher; return False if it must fall behind."""
        wanted, stream = events.wanted(watcher), watcher.stream
        if (wanted is not None and not wanted) or stream.is_closed:
            return True
        if self._bytes_left < 0 or not stream.is_checked or not stream.has_room:
            return False
        form = (watcher.prev_kv, watcher.keys_only)
        chosen = events.all(form, self._bytes_left)
        if chosen is None:
            return False
        if wanted is None:
            joined = events.joined(form, chosen)
            self._bytes_left -= len(joined)
            if stream.is_to_be_split(watcher, header, len(chosen), len(joined)):
                stream.send_events(watcher, header, chosen)
            else:
                stream.send_joined(watcher, header, joined, len(chosen))
        else:
            chosen = [chosen[number] for number in wanted]
            self._bytes_left -= sum(map(len, chosen))
            stream.send_events(watcher, header, chosen)
        return True

    def _call_recipes(self, pending: Batch) -> None:
        called: dict[Callable[[], None], None] = {}
        if sum(len(changes) for _, changes in pending) > MATCHES_PER_TURN:
            for callbacks in self._on_change.values():
                called.update(callbacks)
        else:
            for _, changes in pending:
                for change in changes:
                    called.update(self._on_change.get(change[0], ()))
        for callback in called:
            callback()

    def _unsynced(self, watcher: Watcher, next_revision: int) -> None:
        self._count_unsynced(watcher.stream, 1)
        watcher.next_revision = next_revision
        self._catch_up.add(watcher)

    def _count_unsynced(self, stream: WatchStream, change: int) -> None:
        stream.unsynced_count += change
        self.unsynced_count += change

    def _fall_behind(self, group: Group, next_revision: int) -> None:
        """Make a group that was removed from the index fall behind; its watchers are moved to the history in steps."""
        group.next_revision = next_revision
        for stream, ids in group.plain.items():
            if not stream.is_closed:
                self._count_unsynced(stream, len(ids))
        for watcher in group.special:
            if not watcher.stream.is_closed:
                self._count_unsynced(watcher.stream, 1)
        if not self._fallen or not self._fallen[-1].attach(group):
            fallen = WatcherIndex()
            fallen.attach(group)
            self._fallen.append(fallen)
        self._wake()

    def _all_fall_behind(self, next_revision: int) -> None:
        """Make all live watchers fall behind, in nearly constant time."""
        fallen, self._index = self._index, WatcherIndex()
        fallen.next_revision = next_revision
        for stream in self.streams:
            stream.unsynced_count = len(stream.watchers)
        self.unsynced_count = self.watcher_count
        self._fallen.append(fallen)
        self._wake()

    def _caught_up(self, watcher: Watcher) -> None:
        """Handle a watcher that has caught up."""
        self._count_unsynced(watcher.stream, -1)
        self._synced(watcher)

    def _synced(self, watcher: Watcher) -> None:
        """Serve a watcher live that has all events up to now."""
        is_special = (
            watcher.is_filtered
            or watcher.prev_kv
            or watcher.keys_only
            or watcher.fragment
            or watcher.progress_notify
            or watcher.start_revision > self._store.revision + 1
        )
        self._index.add(watcher, special=is_special)

    def restored(self) -> None:
        """Handle the replacement of the store by a snapshot: all watchers catch up from their revision."""
        next_revision = self.delivered_revision + 1
        self.delivered_revision = self._store.revision
        self._pending.clear()
        self._all_fall_behind(next_revision)
        self._catch_up.replaced()
        for callbacks in list(self._on_change.values()):
            for callback in list(callbacks):
                callback()

    def rights_changed(self) -> None:
        """Serve no stream of a user live until it is checked again; meanwhile ``catch_up`` checks each watcher."""
        self.check_number += 1

    # -- the clients' side -------------------------------------------------------------------------------------------

    def add(self, watcher: Watcher) -> None:
        """Serve a new watcher: live if it starts now or later, otherwise from history first."""
        self.deliver()
        stream = watcher.stream
        if stream not in self.streams:
            self.streams[stream] = None
            self._streams_of.setdefault(stream.identity, {})[stream] = None
        self.watcher_count += 1
        self.shares.take(stream.identity, watcher.size_bytes)
        self._count(stream.queue, 1)
        if watcher.start_revision == 0 or watcher.start_revision > self._store.revision:
            self._synced(watcher)
        else:
            self._unsynced(watcher, watcher.start_revision)

    def _count(self, queue: Identity, more: int) -> None:
        if more > 0:
            self.counts.take(queue, more)
        else:
            self.counts.give_back(queue, -more)
        if self.on_count is not None:
            self.on_count(queue, more)

    def refusal(self, identity: Identity, size_bytes: int) -> str:
        """Make room for a watcher by cancelling the newest of the identity with the most; return why not if impossible.

        Arguments:
            identity: identity of the watcher.
            size_bytes: memory of the watcher.
        """
        if self.shares.make_room(identity, size_bytes, self._cancel_newest):
            return ""
        return refusal(identity, f"{self.shares.limit} bytes that the watchers of one member may take")

    def _cancel_newest(self, identity: Identity) -> bool:
        for stream in reversed(self._streams_of[identity]):
            if stream.watchers:
                stream.cancel_newest(f"raftkv: {name_of(identity)} has most of the watchers, and others ask for theirs")
                return True
        return False

    def remove(self, watcher: Watcher) -> None:
        """Stop serving a watcher."""
        self.watcher_count -= 1
        self.shares.give_back(watcher.stream.identity, watcher.size_bytes)
        self._count(watcher.stream.queue, -1)
        if not self._forget(watcher):
            self._count_unsynced(watcher.stream, -1)

    def _forget(self, watcher: Watcher) -> bool:
        """Remove a watcher from wherever it is; return whether it was live."""
        if self._index.remove(watcher):
            return True
        if not any(fallen.remove(watcher) for fallen in self._fallen):
            self._catch_up.remove(watcher)
        return False

    def is_live(self, watcher: Watcher) -> bool:
        """Return whether a watcher has all events so far."""
        return watcher in self._index

    def leave(self, stream: WatchStream) -> None:
        """Handle a client that has left: nothing reaches its watchers any more. They are removed step by step."""
        if stream in self.streams:
            del self.streams[stream]
            others = self._streams_of[stream.identity]
            del others[stream]
            if not others:
                del self._streams_of[stream.identity]
            self.watcher_count -= len(stream.watchers)
            if stream.watcher_bytes:
                self.shares.give_back(stream.identity, stream.watcher_bytes)
                self._count(stream.queue, -len(stream.watchers))
            self._count_unsynced(stream, -stream.unsynced_count)
            self._leaving.append(list(stream.watchers.values()))
            if self._move():
                self._wake()

    def header(self) -> bytes:
        """Response header with the current revision, up to which everything was delivered."""
        self.deliver()
        return self._encode_header(self._store.revision)

    @property
    def revision(self) -> int:
        """The current revision."""
        return self._store.revision

    def has_reached(self, watcher: Watcher) -> bool:
        """Return whether a watcher has all events so far, and does not start in the future."""
        return watcher in self._index and watcher.start_revision <= self._store.revision

    def on_change(self, key: bytes, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after turns in which a key was written or deleted, or may have been.

        For recipes inside the server, which then read the store again. Returns the function that stops it.

        Arguments:
            key: key to watch.
            callback: reads the store again.
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
        """Serve some of the watchers that are behind, for a few milliseconds; return whether more is to be done."""
        self.deliver()
        more = self._move()
        return self._catch_up.step() or more

    def _move(self) -> bool:
        """Move some of the watchers that fell behind or left together; return whether there are more."""
        if self._leaving:
            watchers = self._leaving[0]
            left_bytes = MOVED_BYTES_PER_STEP
            for _ in range(MOVES_PER_STEP):
                if not watchers or left_bytes < 0:
                    break
                watcher = watchers.pop()
                left_bytes -= watcher.size_bytes
                self._let_go(watcher)
            if not watchers:
                self._leaving.popleft()
        left = MOVES_PER_STEP
        while self._fallen and left > 0:
            left -= self._to_history(self._fallen[0], left)
            if not self._fallen[0]:
                self._fallen.popleft()
        return bool(self._leaving or self._fallen)

    def _let_go(self, watcher: Watcher) -> None:
        """Remove a watcher of a closed stream from wherever it is, and drop its stream, because they form a cycle."""
        self._forget(watcher)
        watcher.stream.watchers.pop(watcher.watch_id, None)

    def _to_history(self, fallen: WatcherIndex, count_max: int) -> int:
        """Serve some watchers of a group that fell behind from history; return their number."""
        if not fallen:
            return 0
        group, count = fallen.pop(), 0
        next_revision = group.next_revision or fallen.next_revision
        while group and count < count_max:
            watcher = group.pop()
            count += 1
            if not watcher.stream.is_closed:
                watcher.next_revision = max(next_revision, watcher.start_revision)
                self._catch_up.add(watcher)
        if group:
            fallen.attach(group)
        return count

    def resume(self, watchers: list[Watcher]) -> None:
        """Continue with watchers whose streams have room again."""
        for watcher in watchers:
            self._catch_up.add(watcher)

    @property
    def pending_count(self) -> int:
        """Number of applied changes that are not delivered yet."""
        return sum(len(changes) for _, changes in self._pending)

    @property
    def lag_revisions(self) -> int:
        """Lag of the slowest watcher, among the first of those that wait for their turn or for their client."""
        behind = [stream for stream in self.streams if stream.unsynced_count][:BEHIND_MAX]
        parked = [stream.parked_revision for stream in behind]
        return max(self._store.revision + 1 - min(self._catch_up.next_revision, *parked, self._store.revision + 1), 0)


class WatchRunner:
    """Runs the hub's work for watchers that are behind, between other work of the loop."""

    def __init__(self) -> None:
        self.hub: WatchHub | None = None
        self._loop = asyncio.get_running_loop()
        self._scheduled = False

    def wake(self) -> None:
        """Schedule a run."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        if self.hub is None:
            return
        more = True
        started_at = self._loop.time()
        try:
            more = self.hub.catch_up()
        except errors.CorruptionError as error:
            self.hub.on_damage(error)
        if more and not self._scheduled:
            self._scheduled = True
            # Let the loop do other work for as long as this took.
            self._loop.call_later(self._loop.time() - started_at, self._run)
