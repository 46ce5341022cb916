"""The hub: hands each change to the watchers of its key.

Owns the synced watchers: those that have everything up to the present. The store reports the changes of every write
txn; they are delivered once per turn, after the entries were applied, hence committed. A watcher whose stream has no
room, one that starts in the past, and all after a snapshot was installed are *unsynced*: ``catch_up`` serves them
from history until they have everything, and gives them back.

A turn has limits: changes to be matched, watchers times events, and bytes. Beyond the first all watchers fall behind,
beyond the others the group or watcher that would be too much. A group, and all of them together, fall behind at once
however many they are: they leave the index as they are, and are moved to the history in steps.

Invariants
- A watcher gets every event that it asked for, once, in order of revision; all of one revision in one response.
- Each watcher of a group gets the events of a turn as one response, encoded once for the group.
- Between turns everything up to ``revision`` was delivered to all synced watchers, so a header may say so.
- Delivery costs nothing for unwatched keys but a dictionary lookup (and one in the intervals, if any).
- No events are kept for a watcher: what it needs is in the store, and where it is in ``next_revision``.

Leaves out: sockets (``stream``, ``service``) and time (``service``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from raftkv import errors
from raftkv.loop.cork import Cork
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
# The events of one turn for a group of watchers: pieces that fit in a response, encoded once for all.
#
#     for piece in pieces(batch):
#         events = Events(piece, store.reader.record)
#         events.all((watcher.prev_kv, watcher.keys_only), bytes_max)

Batch = list[tuple[int, list[Change]]]
"""Changes by main revision, in order."""

Form = tuple[bool, bool]
"""How events are sent: with previous values, without any values."""

RESPONSE_BYTES: Final = 256 * 1024
"""Bytes of events after which the next revision of a turn goes into another response; clients limit its size."""


def pieces(batch: Batch) -> Iterator[Batch]:
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


class Events:
    """The events of a piece, encoded once for all who want them, when the first of them does.

    Arguments:
        piece: what happened.
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
        """Return all of them in a form; None when previous values make them larger than that."""
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
        """The value that a key had before a revision that put and then deleted it, as in etcd: not the one between."""
        for main, change in self._changes:
            if main == revision and change[0] == key:
                return change[3]
        return 0

    def joined(self, form: Form, events: list[bytes]) -> bytes:
        """Return all of them in a form, as one."""
        found = self._joined.get(form)
        if found is None:
            found = self._joined[form] = b"".join(events)
        return found

    def wanted(self, watcher: Watcher) -> list[int] | None:
        """Which of them a watcher wants; None for all."""
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
"""Watchers times events that a turn delivers; those of further groups fall behind and are served in steps."""

DELIVERIES_MIN: Final = 100
"""A group for which a turn has no more than this is served in it all the same: falling behind costs more."""

MATCHES_PER_TURN: Final = 10_000
"""Changes, and groups found for them, that a turn looks at; when there are more, all watchers fall behind."""

GROUPS_PER_TURN: Final = 5_000
"""Groups that a turn delivers to: 5 us each. When there are more, all watchers fall behind."""

INTERVAL_WEIGHT: Final = 2
"""Weight of the group of an interval: one that has no room, and falls behind by itself, takes 16 us."""

BYTES_PER_TURN: Final = 8 * 1024 * 1024
"""Bytes of events that a turn puts on streams, each copied twice or so; who gets no more falls behind."""

MOVES_PER_STEP: Final = 2_000
"""Watchers that a step moves, when very many fell behind or left at once."""

MOVED_BYTES_PER_STEP: Final = 16 * 1024 * 1024
"""Bytes of watchers that leave in a step: to find one on a key of 1.4 MB takes 0.3 ms."""

MEMBER_WATCHERS_MAX_BYTES: Final = 1024 * 1024 * 1024
"""Memory limit of the watchers of all streams of a member: about 960,000. etcd has no limit but its memory."""

BEHIND_MAX: Final = 500
"""Streams with watchers that are behind that a scrape looks at, 100 watchers each: 5 ms."""


def _raise(error: errors.CorruptionError) -> None:
    raise error


class WatchHub:
    """Delivers the changes of each turn to the watchers of their keys.

    Arguments:
        store: whose changes are watched.
        header: encodes a response header for a revision.
        wake: asks for ``catch_up`` to be run soon; it says then whether it wants to be run again.
        cork: flushes streams at the end of a turn.
    """

    def __init__(self, store: Store, header: Callable[[int], bytes], wake: Callable[[], None], cork: Cork) -> None:
        self._store = store
        self._encode_header = header
        self._index = WatcherIndex()
        self._catch_up = CatchUp(store, header, self._caught_up, wake)
        self._pending: Batch = []
        self._deliveries_left = self._bytes_left = 0
        self._fallen: deque[WatcherIndex] = deque()
        """Groups that fell behind: live no more, and not in the history yet; moved there in steps."""
        self._leaving: deque[list[Watcher]] = deque()
        """Watchers of streams that were closed."""
        self._wake = wake
        self.cork = cork
        self._on_change: dict[bytes, dict[Callable[[], None], None]] = {}
        self.streams: dict[WatchStream, None] = {}
        self.check_number = 0
        """Grows when rights may have changed: streams fall behind then until they are checked (``WatchStream``)."""
        self.events_total = 0
        """Events that streams were sent; they count them."""
        self.send_times: SendTimes | None = None
        """How long that takes; None: not timed."""
        self.watcher_count = 0
        """Watchers of all open streams."""
        self.shares = Shares(MEMBER_WATCHERS_MAX_BYTES)
        self.on_count: Callable[[Identity, int], None] | None = None
        """Called with a queue and how many watchers more it has (fewer, if negative)."""
        self.counts = Shares(0)
        """How many watchers each queue has, for its limit."""
        self._streams_of: dict[Identity, dict[WatchStream, None]] = {}
        self.unsynced_count = 0
        """Those that are behind."""
        self.delivered_revision = store.revision
        self.on_damage: Callable[[errors.CorruptionError], None] = _raise
        """Called with damage that a read for a watcher met; its stream is ended."""

    # -- the store's side --------------------------------------------------------------------------------------------

    def changed(self, revision: int, changes: list[Change]) -> None:
        """Note the changes of a write txn: they are delivered when its entry and those of its turn are applied.

        Arguments:
            revision: of the txn.
            changes: in order.
        """
        if self._index.size or self._on_change:
            self._pending.append((revision, changes))

    def applied(self) -> None:
        """Deliver, at the end of a turn.

        A failure here is no reason to stop the member, unless it found damage; but no watcher may miss an event
        unknowingly, so all streams are ended, and their clients watch again from where they were.
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
            _log.exception("events could not be delivered: ending all watches")
            for stream in list(self.streams):
                stream.fail(errors.StoppedError(INTERRUPTED))

    def deliver(self) -> None:
        """Deliver everything applied so far, if that has not been done."""
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
        """Return the changes of a turn for each group that wants them. A watcher is in one group, so its order is kept.

        None if there is too much to be matched in one turn.
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
        """Deliver the events of a turn to a group; it falls behind if they take too long for one turn."""
        cost = group.size * sum(len(changes) for _, changes in batch)
        if cost > max(self._deliveries_left, DELIVERIES_MIN):
            self._index.detach(group)
            self._fall_behind(group, batch[0][0])
            return
        self._deliveries_left -= cost
        for piece in pieces(batch):
            self._deliver_piece(group, piece)

    def _deliver_piece(self, group: Group, piece: Batch) -> None:
        """One response for each watcher of a group; its header has the revision of the last event."""
        header = self._encode_header(piece[-1][0])
        if group.plain:
            events = [messages.event(kv, is_delete) for _, changes in piece for _, kv, is_delete, _ in changes]
            self._fan_out(group, header, events, piece[0][0])
        if group.special:
            shared = Events(piece, self._store.reader.record)
            late = [watcher for watcher in group.special if not self._deliver_to(watcher, header, shared)]
            for watcher in late:
                # These did not get it. They go on later, from history: from here, or from where they start within it.
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
        """Deliver to one watcher what it wants; False if it must fall behind."""
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
        """A group that was taken out of the index falls behind; its watchers are moved to the history in steps."""
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
        """All that are live fall behind, in about no time however many they are."""
        fallen, self._index = self._index, WatcherIndex()
        fallen.next_revision = next_revision
        for stream in self.streams:
            stream.unsynced_count = len(stream.watchers)
        self.unsynced_count = self.watcher_count
        self._fallen.append(fallen)
        self._wake()

    def _caught_up(self, watcher: Watcher) -> None:
        """A watcher that was behind has everything."""
        self._count_unsynced(watcher.stream, -1)
        self._synced(watcher)

    def _synced(self, watcher: Watcher) -> None:
        """A watcher has everything up to the present: serve it live."""
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
        """The store was replaced by a snapshot: all watchers catch up from where they were."""
        next_revision = self.delivered_revision + 1
        self.delivered_revision = self._store.revision
        self._pending.clear()
        self._all_fall_behind(next_revision)
        self._catch_up.replaced()
        for callbacks in list(self._on_change.values()):
            for callback in list(callbacks):
                callback()

    def rights_changed(self) -> None:
        """Serve no stream of a user live until it is checked anew; meanwhile ``catch_up`` asks for each watcher."""
        self.check_number += 1

    # -- the clients' side -------------------------------------------------------------------------------------------

    def add(self, watcher: Watcher) -> None:
        """Serve a new watcher: live if it starts now or later, else from history first."""
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

    @property
    def watcher_bytes(self) -> int:
        """Memory of the watchers of all open streams."""
        return self.shares.used

    def refusal(self, identity: Identity, size_bytes: int) -> str:
        """Make room for a watcher, for which the newest of the greediest identity are cancelled; else say why not.

        Arguments:
            identity: whose it is.
            size_bytes: what it takes.
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
        """Serve a watcher no more."""
        self.watcher_count -= 1
        self.shares.give_back(watcher.stream.identity, watcher.size_bytes)
        self._count(watcher.stream.queue, -1)
        if not self._forget(watcher):
            self._count_unsynced(watcher.stream, -1)

    def _forget(self, watcher: Watcher) -> bool:
        """Take a watcher from wherever it is; whether that was among the live."""
        if self._index.remove(watcher):
            return True
        if not any(fallen.remove(watcher) for fallen in self._fallen):
            self._catch_up.remove(watcher)
        return False

    def is_live(self, watcher: Watcher) -> bool:
        """Return whether a watcher has everything so far."""
        return watcher in self._index

    def leave(self, stream: WatchStream) -> None:
        """A client is gone: nothing reaches its watchers any more. However many there are, they go step by step."""
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
        """Header with the present revision, everything up to which was delivered."""
        self.deliver()
        return self._encode_header(self._store.revision)

    @property
    def revision(self) -> int:
        """The present revision."""
        return self._store.revision

    def has_reached(self, watcher: Watcher) -> bool:
        """Return whether a watcher has everything so far, and does not start in the future."""
        return watcher in self._index and watcher.start_revision <= self._store.revision

    def on_change(self, key: bytes, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after turns in which a key was written or deleted, or may have been.

        For recipes inside the server, which read the store again then. Returns the function that ends it.

        Arguments:
            key: to be watched.
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
        """Serve some of those that are behind, for a few milliseconds; whether there is more to do now."""
        self.deliver()
        more = self._move()
        return self._catch_up.step() or more

    def _move(self) -> bool:
        """Move some of those that fell behind or left many at once; whether there are more."""
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
        """Take a watcher of a closed stream from wherever it is, its stream too: they would hold each other."""
        self._forget(watcher)
        watcher.stream.watchers.pop(watcher.watch_id, None)

    def _to_history(self, fallen: WatcherIndex, count_max: int) -> int:
        """Serve some watchers of a group that fell behind from history; how many."""
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
        """These have room again."""
        for watcher in watchers:
            self._catch_up.add(watcher)

    @property
    def pending_count(self) -> int:
        """Changes that are applied and not delivered yet."""
        return sum(len(changes) for _, changes in self._pending)

    @property
    def lag_revisions(self) -> int:
        """How far the slowest watcher is behind, of the first of those that wait for their turn or for their client."""
        behind = [stream for stream in self.streams if stream.unsynced_count][:BEHIND_MAX]
        parked = [stream.parked_revision for stream in behind]
        return max(self._store.revision + 1 - min(self._catch_up.next_revision, *parked, self._store.revision + 1), 0)


class WatchRunner:
    """Runs what the hub has to do for watchers that are behind, between other work of the loop."""

    def __init__(self) -> None:
        self.hub: WatchHub | None = None
        self._loop = asyncio.get_running_loop()
        self._scheduled = False

    def wake(self) -> None:
        """There is something to do."""
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
            # The loop does other work for as long as this took.
            self._loop.call_later(self._loop.time() - started_at, self._run)
