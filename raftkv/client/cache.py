"""A local copy of a prefix, which a watch keeps current: reads without the network, linearizable on request.

::

    owner = {"owner": lambda item: [json.loads(item.value)["owner"]]}
    async with kv.cache("jobs/", indexes=owner) as jobs:           # filled when the block begins
        await jobs.get("jobs/a")                                    # KeyValue or None, from memory
        await jobs.range("jobs/a", prefix=True)                     # RangeResult, sorted by key
        await jobs.select("owner", "alice")                         # the keys of a value of an index
        done = await kv.put("jobs/b", b"...")
        await jobs.get("jobs/b", min_revision=done.revision)        # waits until the copy has come to the write
        await jobs.get("jobs/b", linearizable=True)                 # sees every write that was answered before the call
        async for update in jobs.subscribe(): ...                   # first a snapshot, then every change

Laws:

1. Every read, index and update shows the prefix as it was at one revision: the changes of a txn are seen together.
2. The revision never goes back, and updates come in the order of revisions, each change once. Only where the history
   is another one (a restored cluster, or endpoints that lead to another) it begins anew: waits for a revision of the
   old one raise ``HistoryReplaced``, and subscribers get an update ``RESTORED`` with all that differs.
3. A compaction that overtakes the watch leads to a new list. What differs comes as one update ``RELISTED``; the states
   between are not seen.
4. A read is never of a part of the prefix: above ``max_bytes`` the cache ends with ``CacheTooLarge``.
5. An outage stops nothing: plain reads answer from what is known (``revision`` says as of when); those that ask for
   more wait, and raise ``CacheBehind`` when their time is up.

How a linearizable read works: one linearizable read of one key, which returns a revision and no data, is shared by all
callers that wait at that moment; it is asked after they have called. Then the copy has to come to that revision. If the
last changes were outside of the prefix no event says so: the member is asked for the progress of the watch. By itself
that answer would be no ground: it is what one member knows, which may have been cut off. Members that may answer before
they have sent all events (etcd before 3.6), and those that drop the question for as long as another watch of this
client is behind, are asked for the number of keys in the prefix and for one key that is newer than the copy: if there
is none, and the number is that of the copy, the copy is current.

Built on ``Reflector`` of ``control``. Leaves out past revisions, and writes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from raftkv.client.arguments import function, seconds, whole
from raftkv.client.control import ClientControl, Control, Reflector, below, until_answered
from raftkv.client.errors import CacheBehind, CacheTooLarge, HistoryReplaced, WatchCanceled
from raftkv.client.operations import GetRange
from raftkv.client.paging import FIRST_KEYS
from raftkv.client.rpc.core import take_outcome
from raftkv.client.scope import FROM_KEY, Space, Text, prefix_end, to_bytes
from raftkv.client.values import DELETE, PUT, Event, KeyValue, RangeResult
from raftkv.client.watch import QUEUE_BYTES, WatchHub

if TYPE_CHECKING:
    from raftkv.client.library import Client

_log = logging.getLogger(__name__)

IndexFunction = Callable[[KeyValue], Iterable[Hashable]]
"""The values under which an index has a key; it depends on its argument alone."""

MAX_BYTES: Final = 256 * 1024 * 1024
ITEM_BYTES: Final = 400
"""What a key takes in memory besides its name and value, and about what it takes in an index."""
SORT_KEYS_MIN: Final = 1_000
"""From so many keys on that come or go at once, all are sorted again."""
FILL_TIMEOUT_S: Final = 60.0
_ASK_MIN_S: Final = 0.02
_ASK_MAX_S: Final = 1.0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CacheUpdate:
    """What a subscriber gets: whole revisions.

    Attributes:
        kind: ``"SNAPSHOT"``: everything, as first update, and again for a subscriber that was too slow; ``"EVENTS"``:
            changes as they happened; ``"RELISTED"``: what differs since history was compacted; ``"RESTORED"``: what
            differs between the histories of two clusters.
        revision: with it the update is complete; lower than before only after ``"RESTORED"``.
        events: of a snapshot one ``PUT`` for each key, in the order of keys; else in the order of revisions.
        cluster_id: of the cluster; 0: it has not said.
    """

    kind: Literal["SNAPSHOT", "EVENTS", "RELISTED", "RESTORED"]
    revision: int
    events: tuple[Event, ...]
    cluster_id: int = 0


def _size_bytes(item: KeyValue, extra_bytes: int = ITEM_BYTES) -> int:
    return len(item.key) + len(item.value) + extra_bytes


class _Index:
    """Keys by the values of one function."""

    def __init__(self, name: str, function: IndexFunction) -> None:
        self._name = name
        self._function = function
        self._values: dict[bytes, tuple[Hashable, ...]] = {}
        self.keys: dict[Hashable, set[bytes]] = {}

    def put(self, item: KeyValue) -> None:
        """Take a key as it is now; one for which the function fails is under no value."""
        self.drop(item.key)
        try:
            values = tuple(set(self._function(item)))
        except Exception as error:  # of the program's function, over a value that another program wrote
            _log.warning(
                "the index %s leaves out the key %r: %s: %s", self._name, item.key, type(error).__name__, error
            )
            return
        if values:
            self._values[item.key] = values
        for value in values:
            self.keys.setdefault(value, set()).add(item.key)

    def drop(self, key: bytes) -> None:
        """Forget a key."""
        for value in self._values.pop(key, ()):
            keys = self.keys[value]
            keys.discard(key)
            if not keys:
                del self.keys[value]


class Copy(Reflector):
    """The items with their order and indexes, changed under a lock: readers on any thread see whole revisions.

    Arguments:
        control: the store.
        prefix: of the keys.
        indexes: functions by name.
        max_bytes: of all items.
        on_update: called on the loop with each change of the items.
        on_refused, on_end: as for ``Reflector``.

    Attributes:
        prefix: of the keys.
        size_bytes: what the items take, about.
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
        self._keys: list[bytes] = []
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
        """Return keys of an interval, as ``Cache.range``."""
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
            start = bisect_left(keys, first)
            stop = len(keys) if is_open else bisect_left(keys, last or first + b"\0")
            shown = min(stop, start + limit) if limit > 0 else stop
            found = tuple([items[key] for key in keys[start:shown]])
            return RangeResult(found, max(stop - start, 0), shown < stop, self.revision)

    def select_items(self, index: str, value: Hashable) -> RangeResult:
        """Return the keys that an index has under a value, in the order of keys."""
        if index not in self._indexes:
            raise ValueError(f"the cache of {self.prefix!r} has no index {index!r}; it has {sorted(self._indexes)}")
        with self._lock:
            self._check()
            items = tuple([self.items[key] for key in sorted(self._indexes[index].keys.get(value, ()))])
            return RangeResult(items, len(items), False, self.revision)

    def _outside(self, key: bytes) -> ValueError:
        return ValueError(f"{key!r} is outside of the cache of {self.prefix!r}")

    def snapshot(self) -> CacheUpdate:
        """Return everything; on the loop. Those who ask at one revision share it."""
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
        """Bring order and indexes to where the items will be; False: they would be too many."""
        keys, items = self._keys, self.items
        fresh, gone = [], []
        for key, event in {event.kv.key: event for event in changes}.items():
            before = items.get(key)
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
        if len(fresh) + len(gone) > SORT_KEYS_MIN:
            lost = set(gone)
            self._keys = sorted([*(key for key in keys if key not in lost), *fresh])
            return True
        for key in gone:
            del keys[bisect_left(keys, key)]
        for key in fresh:
            insort(keys, key)
        return True

    def _check_room(self, items: Sequence[KeyValue]) -> None:
        if sum(_size_bytes(item, self._item_bytes) for item in items) > self._max_bytes:
            raise self._overflow()

    def _overflow(self) -> CacheTooLarge:
        error = CacheTooLarge(self.prefix, self._max_bytes)
        with self._lock:
            self._finish(error)
            self.items, self._keys, self._indexes, self.size_bytes = {}, [], {}, 0
        self.close()
        return error

    def _tell(self, changes: Sequence[Event]) -> None:
        if changes or self._kind == "RESTORED":
            self._on_update(CacheUpdate(self._kind, self.revision, tuple(changes), self.cluster_id))


class _Queue:
    """What one subscriber has not taken: updates, or, if these were too many, that it needs a snapshot."""

    def __init__(self) -> None:
        self.needs_snapshot = True
        self.changed = asyncio.Event()
        self._updates: deque[tuple[CacheUpdate, int]] = deque()
        self._bytes = 0

    def put(self, update: CacheUpdate, size_bytes: int) -> None:
        """Take an update; of one that needs a snapshot it is a part."""
        if not self.needs_snapshot:
            self._updates.append((update, size_bytes))
            self._bytes += size_bytes
            if self._bytes > QUEUE_BYTES:
                self._updates.clear()
                self._bytes = 0
                self.needs_snapshot = True
        self.changed.set()

    def take(self) -> CacheUpdate | None:
        """Return the oldest update; None: there is none."""
        if not self._updates:
            return None
        update, size_bytes = self._updates.popleft()
        self._bytes -= size_bytes
        return update


class Cache:
    """A local copy of a prefix; made by ``Client.cache``, filled by ``async with`` or ``start()``.

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
        """The revision of the copy: all changes up to it are seen by reads. 0: it is not filled."""
        return self.copy.revision

    @property
    def size_bytes(self) -> int:
        """What the keys take in memory, about; ``max_bytes`` limits it."""
        return self.copy.size_bytes

    @property
    def error(self) -> Exception | None:
        """Why the copy does not follow the cluster at present, or has ended; None: it does, as far as is known."""
        return self._end or (None if self.copy.is_following else self._refusal)

    # ---- life

    async def start(self, timeout_s: float = FILL_TIMEOUT_S) -> Cache:
        """Fill it, and follow the cluster until ``close``.

        Arguments:
            timeout_s: for the first list.

        Raises:
            CacheBehind: no member answered in time, or the list takes longer; it is closed.
            CacheTooLarge: the prefix is larger than ``max_bytes``.
            StatusError: the cluster refuses, as without a permission.
        """
        if self._starting is not None:
            raise RuntimeError(f"{self!r} was started before: make another one")
        self._end = None
        self._starting = asyncio.get_running_loop().create_future()
        self._starting.add_done_callback(take_outcome)
        self.copy.start()
        ready = asyncio.ensure_future(self.copy.ready())
        ready.add_done_callback(take_outcome)
        limit_s = seconds(timeout_s, "timeout_s")
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.wait([ready, self._starting], return_when=asyncio.FIRST_COMPLETED)
            if self._starting.done():
                self._starting.result()
            ready.result()
        except TimeoutError:
            self._close()
            raise self._behind("its first list", limit_s) from None
        except BaseException:
            self._close()
            raise
        finally:
            ready.cancel()
        return self

    async def close(self) -> None:
        """Follow no more, and end all subscriptions. Harmless when repeated."""
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
            key: below the prefix.
            min_revision, linearizable, timeout_s: as for ``wait``.

        Raises:
            CacheBehind, HistoryReplaced, CacheTooLarge, StatusError: as for ``wait``.
            ValueError: the key is outside of the prefix.
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
        """Read keys of the copy, in the order of keys, all as of the revision of the result.

        Arguments:
            key, end, prefix: an interval as for ``Client.range``, below the prefix of the cache; None: all keys.
            limit: at most so many; 0: all.
            min_revision, linearizable, timeout_s: as for ``wait``.

        Raises:
            CacheBehind, HistoryReplaced, CacheTooLarge, StatusError: as for ``wait``.
            ValueError: the interval is not within the prefix.
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
        """Read the keys that an index has under a value, in the order of keys.

        Arguments:
            index: its name.
            value: one that its function returned.
            min_revision, linearizable, timeout_s: as for ``wait``.

        Raises:
            CacheBehind, HistoryReplaced, CacheTooLarge, StatusError: as for ``wait``.
            ValueError: there is no such index.
        """
        if not self.is_at(min_revision, linearizable=linearizable):
            await self.wait(min_revision, linearizable=linearizable, timeout_s=timeout_s)
        return self.copy.select_items(index, value)

    def is_at(self, min_revision: int = 0, *, linearizable: bool = False) -> bool:
        """Tell if a read with these arguments needs no ``wait``; on any thread.

        Arguments:
            min_revision, linearizable: as for ``wait``.
        """
        return not linearizable and self._end is None and self.copy.revision >= (min_revision or 1)

    async def wait(self, min_revision: int = 0, *, linearizable: bool = False, timeout_s: float | None = None) -> None:
        """Wait until reads see what is asked for.

        Arguments:
            min_revision: everything up to this revision of the store, as of a write.
            linearizable: everything that any client was told to be written before this call.
            timeout_s: None: the client's.

        Raises:
            CacheBehind: it did not come to that in time.
            HistoryReplaced: the revision is that of another cluster, as of before a restore.
            CacheTooLarge: it has ended, larger than ``max_bytes``.
            StatusError: the cluster refuses, or the cache or the client is closed.
        """
        limit_s = self._timeout_s if timeout_s is None else seconds(timeout_s, "timeout_s")
        try:
            async with asyncio.timeout(limit_s):
                await self._reach(whole(min_revision, "min_revision") or 1)
                if linearizable:
                    await self._confirm()
                    await self._reach(1)  # the history may have been replaced at that very moment
        except TimeoutError:
            raise self._behind("now" if linearizable else str(min_revision), limit_s) from None

    async def subscribe(self) -> AsyncGenerator[CacheUpdate, None]:
        """Follow the prefix: a snapshot, then every change; it ends with the cache.

        What waits for a slow subscriber is bounded: one that is further behind gets another snapshot instead.

        Raises:
            CacheTooLarge: the cache has ended, larger than ``max_bytes``.
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

    # ---- what the copy reports

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

    # ---- linearizable

    async def _confirm(self) -> None:
        """Wait for a round that begins after this call; all who wait for the same one share it."""
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
        """Ask if the prefix is as the copy has it; True: it is, and the copy has come to the revision of the answer."""
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
