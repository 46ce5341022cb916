"""A local copy of a prefix, kept current by a watch: reads without the network, linearizable on request.

::

    owner = {"owner": lambda item: [json.loads(item.value)["owner"]]}
    async with kv.cache("jobs/", indexes=owner) as jobs:           # filled when the block starts
        await jobs.get("jobs/a")                                    # KeyValue or None, from memory
        await jobs.range("jobs/a", prefix=True)                     # RangeResult, sorted by key
        await jobs.select("owner", "alice")                         # the keys under one value of an index
        done = await kv.put("jobs/b", b"...")
        await jobs.get("jobs/b", min_revision=done.revision)        # waits until the copy contains the write
        await jobs.get("jobs/b", linearizable=True)                 # sees every write acknowledged before the call
        async for update in jobs.subscribe(): ...                   # first a snapshot, then every change

Invariants:

1. Every read, index and update shows the prefix at exactly one revision: the changes of a txn appear together.
2. The revision never decreases. Updates come in revision order, each change once. The exception is a replaced history
   (a restored cluster, or endpoints that lead to another cluster): waits for a revision of the old history then raise
   ``HistoryReplaced``, and subscribers get an update ``RESTORED`` with all differences.
3. When a compaction overtakes the watch, the prefix is listed again. The differences arrive as one update
   ``RELISTED``; the intermediate states are not seen.
4. A read never sees only a part of the prefix: above ``max_bytes`` the cache ends with ``CacheTooLarge``.
5. The cache survives an outage: plain reads use the existing copy (``revision`` tells its age); reads with a minimum
   revision or ``linearizable`` wait, and raise ``CacheBehind`` at their timeout.

Linearizable reads: all callers that wait at the same time share one linearizable count of the prefix, sent after they
called, which returns a revision and no data. Then each waits until the copy reaches that revision. If the last changes
were outside the prefix, no event tells that the copy is current, so the cache requests a progress notification of the
watch. The notification alone would not suffice: it states the knowledge of one member, which may be partitioned. Some
members cannot be trusted with it: etcd before 3.6 may answer before it has sent all events, and a member may ignore the
request while another watch of this client is behind. For these, the cache asks for the number of keys in the prefix and
for one key newer than the copy. If there is no newer key and the numbers agree, the copy is current.

Built on ``Reflector`` of ``control``. Not supported: reads of past revisions, and writes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from sortedcontainers import SortedList

from raftkv.client.arguments import function, seconds, whole
from raftkv.client.control import ClientControl, Control, Reflector, below, until_answered
from raftkv.client.errors import CacheBehind, CacheTooLarge, HistoryReplaced, WatchCanceled
from raftkv.client.operations import GetRange
from raftkv.client.paging import FIRST_KEYS
from raftkv.client.scope import FROM_KEY, Space, Text, prefix_end, to_bytes
from raftkv.client.values import DELETE, PUT, Event, KeyValue, RangeResult
from raftkv.client.watch import QUEUE_BYTES, WatchHub
from raftkv.loop.outcomes import done_before, take_outcome

if TYPE_CHECKING:
    from raftkv.client.library import Client

_log = logging.getLogger(__name__)

IndexFunction = Callable[[KeyValue], Iterable[Hashable]]
"""Returns the index values of a key; must depend only on its argument."""

MAX_BYTES: Final = 256 * 1024 * 1024
ITEM_BYTES: Final = 400
"""Approximate memory of a key besides its name and value, and of its entry in an index."""
FILL_TIMEOUT_S: Final = 60.0
_ASK_MIN_S: Final = 0.02
_ASK_MAX_S: Final = 1.0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CacheUpdate:
    """An update for a subscriber: the changes of one or more whole revisions.

    Attributes:
        kind: ``"SNAPSHOT"``: all keys, as the first update, and again for a subscriber that was too slow; ``"EVENTS"``:
            changes as they happened; ``"RELISTED"``: differences after history was compacted; ``"RESTORED"``:
            differences between the histories of two clusters.
        revision: revision of the prefix after this update; lower than before only after ``"RESTORED"``.
        events: for a snapshot, one ``PUT`` for each key in key order; otherwise events in revision order.
        cluster_id: id of the cluster; 0: unknown.
    """

    kind: Literal["SNAPSHOT", "EVENTS", "RELISTED", "RESTORED"]
    revision: int
    events: tuple[Event, ...]
    cluster_id: int = 0


def _size_bytes(item: KeyValue, extra_bytes: int = ITEM_BYTES) -> int:
    return len(item.key) + len(item.value) + extra_bytes


class _Index:
    """The keys grouped by the values of one index function."""

    def __init__(self, name: str, function: IndexFunction) -> None:
        self._name = name
        self._function = function
        self._values: dict[bytes, tuple[Hashable, ...]] = {}
        self.keys: dict[Hashable, set[bytes]] = {}

    def put(self, item: KeyValue) -> None:
        """Index the current value of a key; if the function fails for it, the key is left out."""
        self.drop(item.key)
        try:
            values = tuple(set(self._function(item)))
        except Exception as error:  # raised by the user's function
            _log.warning("the index %s skipped key %r: %s: %s", self._name, item.key, type(error).__name__, error)
            return
        if values:
            self._values[item.key] = values
        for value in values:
            self.keys.setdefault(value, set()).add(item.key)

    def drop(self, key: bytes) -> None:
        """Remove a key from the index."""
        for value in self._values.pop(key, ()):
            keys = self.keys[value]
            keys.discard(key)
            if not keys:
                del self.keys[value]


class Copy(Reflector):
    """The items with their order and indexes. A lock protects changes, so that any thread reads a whole revision.

    Arguments:
        control: the store.
        prefix: prefix of the keys.
        indexes: index functions by name.
        max_bytes: limit of the memory of all items.
        on_update: called on the loop with each change of the items.
        on_refused, on_end: as for ``Reflector``.

    Attributes:
        prefix: prefix of the keys.
        size_bytes: approximate memory of the items.
    """

    def __init__(
        self,
        control: Control,
        prefix: bytes,
        indexes: Mapping[str, IndexFunction],
        max_bytes: int,
        on_update: Callable[[CacheUpdate], None],
        on_refused: Callable[[Exception], None],
        on_end: Callable[[Exception], None],
    ) -> None:
        super().__init__(
            control, below(prefix), self._tell, on_refused=on_refused, on_end=on_end, on_restored=self._restore
        )
        self.prefix = prefix
        self.size_bytes = 0
        self._page.keys = min(self._page.keys, FIRST_KEYS)
        self._max_bytes = max_bytes
        self._item_bytes = ITEM_BYTES * (1 + len(indexes))
        self._lock = threading.Lock()
        self._keys: SortedList[bytes] = SortedList()
        self._indexes = {name: _Index(name, function(each, "an index")) for name, each in indexes.items()}
        self._on_update = on_update
        self._kind: Literal["EVENTS", "RELISTED", "RESTORED"] = "EVENTS"
        self._snapshot: weakref.ref[CacheUpdate] | None = None

    # ---- reads, on any thread

    def get_item(self, key: Text) -> KeyValue | None:
        """Return one key, as ``Cache.get``."""
        name = to_bytes(key)
        if not name.startswith(self.prefix):
            raise self._outside(name)
        with self._lock:
            self._check()
            return self.items.get(name)

    def get_range(
        self, key: Text | None = None, end: Text | None = None, *, prefix: bool = False, limit: int = 0
    ) -> RangeResult:
        """Return the keys of a range, as ``Cache.range``."""
        if key is None:
            if end is not None or prefix:
                raise ValueError("give a key together with end or prefix=True")
            key, prefix = self.prefix, True
        first, last = Space().interval(key, end, prefix=prefix)
        is_open = last == FROM_KEY
        if not first.startswith(self.prefix):
            raise self._outside(first)
        ours_end = prefix_end(self.prefix)
        if ours_end != FROM_KEY and last and (is_open or last > ours_end):
            raise self._outside(last)
        with self._lock:
            self._check()
            keys, items = self._keys, self.items
            start = keys.bisect_left(first)
            stop = len(keys) if is_open else keys.bisect_left(last or first + b"\0")
            shown = min(stop, start + limit) if limit > 0 else stop
            found = tuple([items[key] for key in keys[start:shown]])
            return RangeResult(found, max(stop - start, 0), shown < stop, self.revision)

    def select_items(self, index: str, value: Hashable) -> RangeResult:
        """Return the keys under one value of an index, in key order."""
        if index not in self._indexes:
            raise ValueError(f"the cache of {self.prefix!r} has no index {index!r}; it has {sorted(self._indexes)}")
        with self._lock:
            self._check()
            items = tuple([self.items[key] for key in sorted(self._indexes[index].keys.get(value, ()))])
            return RangeResult(items, len(items), False, self.revision)

    def _outside(self, key: bytes) -> ValueError:
        return ValueError(f"{key!r} is outside of the cache of {self.prefix!r}")

    def snapshot(self) -> CacheUpdate:
        """Return all keys as an update; must be called on the loop. Callers at the same revision share the object."""
        known = None if self._snapshot is None else self._snapshot()
        if known is None:
            events = tuple([Event(PUT, self.items[key]) for key in self._keys])
            known = CacheUpdate("SNAPSHOT", self.revision, events, self.cluster_id)
            self._snapshot = weakref.ref(known)
        return known

    # ---- changes, on the loop

    def load(self, items: Iterable[KeyValue], revision: int) -> None:
        """Implement ``Reflector.load``."""
        if self._kind == "EVENTS":
            self._kind = "RELISTED"
        super().load(items, revision)
        self._kind = "EVENTS"

    def _restore(self) -> None:
        self._kind = "RESTORED"

    def _take(self, changes: Sequence[Event], revision: int) -> None:
        with self._lock:
            is_within = self._index(changes)
            if is_within:
                super()._take(changes, revision)
        if not is_within:
            self._overflow()

    def advance(self, revision: int) -> None:
        """Implement ``Reflector.advance``."""
        if revision > self.revision:
            self._snapshot = None
        super().advance(revision)

    def _index(self, changes: Sequence[Event]) -> bool:
        """Update the order and the indexes for the changes; return False if the items would exceed the limit."""
        fresh, gone = [], []
        for key, event in {event.kv.key: event for event in changes}.items():
            before = self.items.get(key)
            if before is not None:
                self.size_bytes -= _size_bytes(before, self._item_bytes)
            if event.type == DELETE:
                if before is not None:
                    gone.append(key)
            else:
                self.size_bytes += _size_bytes(event.kv, self._item_bytes)
                if before is None:
                    fresh.append(key)
            for index in self._indexes.values():
                if event.type == DELETE:
                    index.drop(key)
                else:
                    index.put(event.kv)
        if self.size_bytes > self._max_bytes:
            return False
        for key in gone:
            self._keys.remove(key)
        self._keys.update(fresh)
        return True

    def _check_room(self, items: Sequence[KeyValue]) -> None:
        if sum(_size_bytes(item, self._item_bytes) for item in items) > self._max_bytes:
            raise self._overflow()

    def _overflow(self) -> CacheTooLarge:
        error = CacheTooLarge(self.prefix, self._max_bytes)
        with self._lock:
            self._finish(error)
            self.items, self._keys, self._indexes, self.size_bytes = {}, SortedList(), {}, 0
        self.close()
        return error

    def _tell(self, changes: Sequence[Event]) -> None:
        if changes or self._kind == "RESTORED":
            self._on_update(CacheUpdate(self._kind, self.revision, tuple(changes), self.cluster_id))


class _Queue:
    """The pending updates of one subscriber; above the limit, a snapshot replaces them."""

    def __init__(self) -> None:
        self.needs_snapshot = True
        self.changed = asyncio.Event()
        self._updates: deque[tuple[CacheUpdate, int]] = deque()
        self._bytes = 0

    def put(self, update: CacheUpdate, size_bytes: int) -> None:
        """Add an update, unless a snapshot is due, which will contain the update."""
        if not self.needs_snapshot:
            self._updates.append((update, size_bytes))
            self._bytes += size_bytes
            if self._bytes > QUEUE_BYTES:
                self._updates.clear()
                self._bytes = 0
                self.needs_snapshot = True
        self.changed.set()

    def take(self) -> CacheUpdate | None:
        """Return the oldest update; None: the queue is empty."""
        if not self._updates:
            return None
        update, size_bytes = self._updates.popleft()
        self._bytes -= size_bytes
        return update


class Cache:
    """A local copy of a prefix; created by ``Client.cache``, filled by ``async with`` or ``start()``.

    Arguments:
        kv: the client.
        prefix, indexes, max_bytes: as for ``Client.cache``.
    """

    def __init__(self, kv: Client, prefix: Text, indexes: Mapping[str, IndexFunction], max_bytes: int) -> None:
        self._control: Control = ClientControl(kv)
        self._hub: WatchHub = kv.scope.hub
        self._timeout_s = kv.scope.timeout_s
        told = self._on_update, self._on_refused, self._on_end
        self.copy = Copy(self._control, to_bytes(prefix), indexes, whole(max_bytes, "max_bytes"), *told)
        self._queues: set[_Queue] = set()
        self._refusal: Exception | None = None
        self._is_closed = False
        self._end: Exception | None = RuntimeError(f"{self!r} was not started: enter it by with, or call start()")
        self._starting: asyncio.Future[None] | None = None
        self._round: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Cache of {self.copy.prefix!r}: {len(self.copy.items)} keys at revision {self.copy.revision}>"

    @property
    def revision(self) -> int:
        """The revision of the copy: reads see all changes up to it. 0: the copy is not filled yet."""
        return self.copy.revision

    @property
    def size_bytes(self) -> int:
        """Approximate memory of the keys, limited by ``max_bytes``."""
        return self.copy.size_bytes

    @property
    def error(self) -> Exception | None:
        """Why the copy has ended, or does not follow the cluster at present; None: it follows, as far as is known."""
        return self._end or (None if self.copy.is_following else self._refusal)

    # ---- lifecycle

    async def start(self, timeout_s: float = FILL_TIMEOUT_S) -> Cache:
        """Fill the copy, and follow the cluster until ``close``.

        Arguments:
            timeout_s: limit for the first list.

        Raises:
            CacheBehind: the first list did not arrive in time; the cache is closed.
            CacheTooLarge: the prefix is larger than ``max_bytes``.
            StatusError: the cluster refuses, for example for lack of a permission.
        """
        if self._starting is not None:
            raise RuntimeError(f"{self!r} was started before: make another one")
        self._end = None
        self._starting = asyncio.get_running_loop().create_future()
        self._starting.add_done_callback(take_outcome)
        self.copy.start()
        limit_s = seconds(timeout_s, "timeout_s")
        try:
            async with asyncio.timeout(limit_s):
                ready = await done_before(self.copy.ready(), self._starting)
            (self._starting if ready is None or self._starting.done() else ready).result()
        except TimeoutError:
            self._close()
            raise self._behind("its first list", limit_s) from None
        except BaseException:
            self._close()
            raise
        return self

    async def close(self) -> None:
        """Stop following, and end all subscriptions. Safe to repeat."""
        self._close()

    def _close(self) -> None:
        self._is_closed = True
        if self._round is not None:
            self._round.cancel()
        self.copy.close()
        if self._end is None:
            self._on_end(WatchCanceled(f"{self!r} is closed"))

    async def __aenter__(self) -> Cache:
        return await self.start()

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # ---- reads

    async def get(
        self, key: Text, *, min_revision: int = 0, linearizable: bool = False, timeout_s: float | None = None
    ) -> KeyValue | None:
        """Read a key of the copy; None: it does not exist.

        Arguments:
            key: key that begins with the prefix.
            min_revision, linearizable, timeout_s: as for ``wait``.

        Raises:
            CacheBehind, HistoryReplaced, CacheTooLarge, StatusError: as for ``wait``.
            ValueError: the key is outside the prefix.
        """
        if not self.is_at(min_revision, linearizable=linearizable):
            await self.wait(min_revision, linearizable=linearizable, timeout_s=timeout_s)
        return self.copy.get_item(key)

    async def range(
        self,
        key: Text | None = None,
        end: Text | None = None,
        *,
        prefix: bool = False,
        limit: int = 0,
        min_revision: int = 0,
        linearizable: bool = False,
        timeout_s: float | None = None,
    ) -> RangeResult:
        """Read keys of the copy, in key order, all as of the revision of the result.

        Arguments:
            key, end, prefix: range as for ``Client.range``, within the prefix of the cache; None: all keys.
            limit: maximum number of keys; 0: all.
            min_revision, linearizable, timeout_s: as for ``wait``.

        Raises:
            CacheBehind, HistoryReplaced, CacheTooLarge, StatusError: as for ``wait``.
            ValueError: the range is not within the prefix.
        """
        if not self.is_at(min_revision, linearizable=linearizable):
            await self.wait(min_revision, linearizable=linearizable, timeout_s=timeout_s)
        return self.copy.get_range(key, end, prefix=prefix, limit=limit)

    async def select(
        self,
        index: str,
        value: Hashable,
        *,
        min_revision: int = 0,
        linearizable: bool = False,
        timeout_s: float | None = None,
    ) -> RangeResult:
        """Read the keys under one value of an index, in key order.

        Arguments:
            index: name of the index.
            value: value that the index function returned for the keys.
            min_revision, linearizable, timeout_s: as for ``wait``.

        Raises:
            CacheBehind, HistoryReplaced, CacheTooLarge, StatusError: as for ``wait``.
            ValueError: the index does not exist.
        """
        if not self.is_at(min_revision, linearizable=linearizable):
            await self.wait(min_revision, linearizable=linearizable, timeout_s=timeout_s)
        return self.copy.select_items(index, value)

    def is_at(self, min_revision: int = 0, *, linearizable: bool = False) -> bool:
        """Return whether a read with these arguments needs no ``wait``; safe on any thread.

        Arguments:
            min_revision, linearizable: as for ``wait``.
        """
        return not linearizable and self._end is None and self.copy.revision >= (min_revision or 1)

    async def wait(self, min_revision: int = 0, *, linearizable: bool = False, timeout_s: float | None = None) -> None:
        """Wait until reads see the given state.

        Arguments:
            min_revision: revision of the store, for example of a write, that the copy must have reached.
            linearizable: whether the copy must contain every write acknowledged to any client before this call.
            timeout_s: None: the client's.

        Raises:
            CacheBehind: the copy did not reach that state in time.
            HistoryReplaced: the revision belongs to another cluster, for example from before a restore.
            CacheTooLarge: the cache has ended because it exceeded ``max_bytes``.
            StatusError: the cluster refuses, or the cache or the client is closed.
        """
        limit_s = self._timeout_s if timeout_s is None else seconds(timeout_s, "timeout_s")
        try:
            async with asyncio.timeout(limit_s):
                await self._reach(whole(min_revision, "min_revision") or 1)
                if linearizable:
                    epoch = self.copy.epoch
                    await self._confirm()
                    await self._reach(1)  # the history may have been replaced at this moment
                    if self.copy.epoch != epoch and min_revision > 1:
                        raise HistoryReplaced
        except TimeoutError:
            raise self._behind("now" if linearizable else str(min_revision), limit_s) from None

    async def subscribe(self) -> AsyncGenerator[CacheUpdate, None]:
        """Follow the prefix: yield a snapshot, then every change, until the cache ends.

        The queue of a slow subscriber is bounded: when it overflows, the subscriber gets another snapshot instead.

        Raises:
            CacheTooLarge: the cache has ended because it exceeded ``max_bytes``.
            StatusError: the client was closed.
        """
        self._check()
        queue = _Queue()
        self._queues.add(queue)
        try:
            while True:
                queue.changed.clear()
                if self._is_closed:
                    return
                self._check()
                if queue.needs_snapshot and not self.copy.revision:
                    await self.copy.reached(1)
                elif queue.needs_snapshot:
                    queue.needs_snapshot = False
                    yield self.copy.snapshot()
                elif (update := queue.take()) is not None:
                    yield update
                else:
                    await queue.changed.wait()
        finally:
            self._queues.discard(queue)

    # ---- reports of the copy

    def _on_update(self, update: CacheUpdate) -> None:
        size_bytes = sum(_size_bytes(event.kv) for event in update.events) if self._queues else 0
        for queue in self._queues:
            queue.put(update, size_bytes)

    def _on_refused(self, error: Exception) -> None:
        self._refusal = error
        if self._starting is not None and not self._starting.done() and not self.copy.revision:
            self._starting.set_exception(error)

    def _on_end(self, error: Exception) -> None:
        self._end = error
        for queue in self._queues:
            queue.changed.set()

    def _check(self) -> None:
        if self._end is not None:
            raise self._end

    def _behind(self, wanted: str, timeout_s: float) -> CacheBehind:
        reasons = "; ".join(f"{endpoint}: {reason}" for endpoint, reason in self._hub.failures.items())
        return CacheBehind(self.copy.prefix, self.copy.revision, wanted, timeout_s, str(self.error or "") or reasons)

    async def _reach(self, revision: int) -> None:
        copy = self.copy
        self._check()
        while copy.revision < revision:
            epoch = copy.epoch
            await copy.reached(revision)
            self._check()
            if copy.epoch != epoch and revision > 1:
                raise HistoryReplaced

    # ---- linearizable reads

    async def _confirm(self) -> None:
        """Wait for a confirmation round that starts after this call; concurrent callers share one round."""
        before = self._round
        if before is not None and not before.done():
            await asyncio.wait([before])
        self._check()
        joined = self._round
        if joined is None or joined is before:
            joined = self._round = asyncio.get_running_loop().create_task(self._run_round())
            joined.add_done_callback(take_outcome)
        await asyncio.wait([joined])
        self._check()
        joined.result()

    async def _run_round(self) -> None:
        copy, pause_s = self.copy, _ASK_MIN_S
        known, epoch = copy.revision, copy.epoch
        asked = GetRange(copy.prefix or FROM_KEY, count_only=True)
        answer = await until_answered(lambda: self._control.txn((), (asked,)))
        if copy.epoch == epoch and copy.is_of_another(answer, known):
            await copy.refresh()
            return
        while copy.revision < answer.revision and copy.epoch == epoch:
            is_asked = await self._hub.ask_progress()
            if not is_asked and await self._compare():
                return
            try:
                async with asyncio.timeout(pause_s):
                    await copy.reached(answer.revision)
            except TimeoutError:
                if is_asked and await self._compare():
                    return
            pause_s = min(2 * pause_s, _ASK_MAX_S)
        if copy.epoch != epoch or copy.is_of_another(answer, 0):
            await copy.refresh()

    async def _compare(self) -> bool:
        """Compare the prefix with the copy; if they agree, advance the copy to that revision and return True."""
        copy = self.copy
        if not copy.is_following:
            return False
        known, epoch, count = copy.revision, copy.epoch, len(copy.items)
        newer = GetRange(copy.prefix, prefix=True, limit=1, keys_only=True, min_mod_revision=known + 1)
        answer = await until_answered(lambda: self._control.txn((), (newer,)))
        if copy.epoch != epoch or not copy.is_following:
            return False
        if copy.is_of_another(answer, known):
            await copy.refresh()
            return True
        page: RangeResult = answer.results[0]
        if page.items or page.count != count or copy.revision != known:
            return False
        copy.advance(answer.revision)
        return True
