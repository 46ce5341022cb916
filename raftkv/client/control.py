"""The part of the store that runs and registries use, and no more: so that the simulator can stand in for it.

``ClientControl`` is the real one, over ``raftkv.aio``; it works on raftkv and on etcd alike. A txn that fails
indefinitely may have been applied: so each is safe to repeat.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from raftkv.client.errors import HistoryReplaced, is_client_closed
from raftkv.client.operations import Compare, GetRange, Operation
from raftkv.client.paging import PageSize
from raftkv.client.rpc import methods, retry
from raftkv.client.rpc.retry import Backoff
from raftkv.client.scope import Text, prefix_end, to_bytes
from raftkv.client.values import DELETE, PUT, Event, KeyValue, RangeResult, TxnResult
from raftkv.errors import (
    CANCELED,
    CompactedError,
    ConfigError,
    FutureRevisionError,
    ResponseTooLargeError,
    StatusError,
)
from raftkv.pb import rpc_pb2

if TYPE_CHECKING:
    from raftkv.client.lease import Lease
    from raftkv.client.library import Client
    from raftkv.client.watch import Watch

OnEvents = Callable[[int, Sequence[Event]], None]
OnLost = Callable[[Exception], None]

CALL_TIMEOUT_S: Final = 5.0
TXN_TIMEOUT_S: Final = 1.5
"""A txn that a member has passed on to a leader which died is lost, and not told: it is sent again, as all of them may
be. About as long as an election takes."""
TXN_TIMEOUT_MAX_S: Final = 24.0
"""Longest time limit of a patient control: a txn that was lost in an outage is sent again that much later, at worst."""


class Grant(Protocol):
    """A lease that is kept alive."""

    @property
    def id(self) -> int:
        """Its id in the cluster."""

    @property
    def ttl_s(self) -> int:
        """Seconds, as the cluster has granted them."""

    @property
    def silent_s(self) -> float:
        """Seconds since the last keep-alive that was confirmed."""


class Control(Protocol):
    """The part of a client that programs with state in the store use."""

    async def grant(self, ttl_s: int, grace_s: float, on_lost: Callable[[], None]) -> Grant:
        """Grant a lease and keep it alive until ``end``, through outages of the store of any length.

        Arguments:
            ttl_s: at least; the cluster may grant more.
            grace_s: it may end so long after this process' connection broke; 0: only with the TTL.
            on_lost: called once, on the loop, when the cluster says that it is gone.

        Raises:
            StatusError: it could not be granted.
        """

    async def grant_fixed(self, ttl_s: int) -> int:
        """Grant a lease without keep-alives, which ends after ``ttl_s``; return its id."""

    async def end(self, grant: Grant, *, revoke: bool) -> None:
        """Keep a lease alive no longer, and end it now if that can be told to the store.

        Arguments:
            grant: of this control.
            revoke: False: the lease ends with its TTL.
        """

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """Execute one transaction.

        Arguments:
            compares: all must hold for ``then``.
            then: operations.
            otherwise: operations if a condition does not hold.

        Raises:
            StatusError: refused, or no member answered; see ``definite``.
        """

    def watch(
        self,
        key: Text,
        end: Text,
        start_revision: int,
        on_events: OnEvents,
        on_lost: OnLost,
        *,
        deletes: bool = True,
        cluster_id: int = 0,
    ) -> Callable[[], None]:
        """Watch an interval: every change from a revision on, each once, in order; returns how to end it.

        Arguments:
            key, end: the interval; an empty end: the key alone.
            start_revision: of the first change.
            on_events: called on the loop with the revision up to which everything has come now, and the changes,
                perhaps none.
            on_lost: called once if it cannot go on, as when history was compacted.
            deletes: False: deletions are left out.
            cluster_id: whose revision the first one is: it cannot go on in another cluster; 0: not known.
        """


class Patience:
    """How long a txn may take before it is sent again: twice as long each time that it was not answered in time.

    When ten thousand programs write at the same moment, the last of them is answered seconds later. If each sent its
    txn again before that, the cluster would only ever execute copies whose senders have given them up.

    Arguments:
        max_s: of the timeout.

    Attributes:
        timeout_s: of the next txn.
    """

    def __init__(self, max_s: float) -> None:
        self.timeout_s = TXN_TIMEOUT_S
        self._max_s = max_s

    def late(self, timeout_s: float) -> None:
        """Take note that a txn was not answered in this time; of many that were sent together the first counts."""
        self.timeout_s = min(max(self.timeout_s, 2 * timeout_s), self._max_s)

    def answered(self, took_s: float) -> None:
        """Take note that a txn was answered."""
        self.timeout_s = min(max(TXN_TIMEOUT_S, 4 * took_s), self._max_s)


class _ClientGrant:
    """A lease of the client library."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    @property
    def id(self) -> int:
        return self.lease.id

    @property
    def ttl_s(self) -> int:
        return self.lease.ttl

    @property
    def silent_s(self) -> float:
        return self.lease.silent_s


def check_whole(kv: Client) -> Client:
    """Return a client that sees all keys.

    What runs, registries and datasets keep has names of its own in the store, and their fences name these: through a
    view, or a namespace, a write under a fence would find nothing there, and be told that the fence is over.

    Raises:
        ConfigError: it sees only the keys below a prefix.
        TypeError: it is no client.
    """
    if not hasattr(kv, "scope"):
        raise TypeError(f"kv is a client made by raftkv.aio.connect, not {kv!r}")
    if prefix := kv.scope.space.prefix:
        below = prefix.decode(errors="backslashreplace")
        raise ConfigError(
            f"kv sees the keys below {below!r} alone; give the client that connect() makes without namespace=, and no "
            "view of it"
        )
    return kv


class ClientControl:
    """The store through a client.

    Arguments:
        kv: the client; of a view, all keys are those of the view.
        is_patient: wait longer for the answer of a txn each time that it did not come in time: for writers that are
            many at the same moment. Else it is sent again as soon as an election may have lost it.
    """

    def __init__(self, kv: Client, *, is_patient: bool = False) -> None:
        if not hasattr(kv, "scope"):
            raise TypeError(f"kv is a client made by raftkv.aio.connect, not {kv!r}")
        self._kv = kv
        self._patience = Patience(TXN_TIMEOUT_MAX_S if is_patient else TXN_TIMEOUT_S)
        self._watches: set[asyncio.Task[None]] = set()

    async def grant(self, ttl_s: int, grace_s: float, on_lost: Callable[[], None]) -> Grant:
        """Implement ``Control.grant``."""
        lease = self._kv.lease(ttl_s, disconnect_grace_s=grace_s, patient=True, on_lost=lambda _: on_lost())
        return _ClientGrant(await lease.grant())

    async def grant_fixed(self, ttl_s: int) -> int:
        """Implement ``Control.grant_fixed``."""
        answer = await self._kv.scope.core.call(
            methods.LEASE_GRANT, rpc_pb2.LeaseGrantRequest(TTL=ttl_s), timeout_s=CALL_TIMEOUT_S
        )
        return int(answer.ID)

    async def end(self, grant: Grant, *, revoke: bool) -> None:
        """Implement ``Control.end``."""
        if not isinstance(grant, _ClientGrant):
            raise TypeError("a grant of another control")
        if revoke:
            await grant.lease.revoke(min(grant.ttl_s, TXN_TIMEOUT_S))  # else it ends by itself
        else:
            grant.lease.stop()

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """Implement ``Control.txn``."""
        txn = self._kv.txn().when(*compares).then(*then).otherwise(*otherwise)
        clock, timeout_s = asyncio.get_running_loop().time, self._patience.timeout_s
        began = clock()
        try:
            result = await txn.commit(timeout_s=timeout_s)
        except StatusError:
            if clock() - began >= timeout_s:
                self._patience.late(timeout_s)
            raise
        self._patience.answered(clock() - began)
        return result

    def watch(
        self,
        key: Text,
        end: Text,
        start_revision: int,
        on_events: OnEvents,
        on_lost: OnLost,
        *,
        deletes: bool = True,
        cluster_id: int = 0,
    ) -> Callable[[], None]:
        """Implement ``Control.watch``."""
        watch = self._kv.watch(key, end or None, start_revision=start_revision, no_delete=not deletes)
        watch.expect(cluster_id)
        task = asyncio.get_running_loop().create_task(_read(watch, on_events, on_lost))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

        def cancel() -> None:
            watch.cancel()
            task.cancel()  # which may not have begun

        return cancel


async def _read(watch: Watch, on_events: OnEvents, on_lost: OnLost) -> None:
    try:
        while (events := await watch.next_step()) is not None:
            on_events(watch.revision, events)
    except Exception as error:
        watch.cancel()
        on_lost(error)


# -- retries --------------------------------------------------------------------------------------------------------
#
# Calls of a run that are made again until the store answers: an outage delays a run, it ends nothing.

T = TypeVar("T")

RETRY_MIN_S: Final = 0.02
RETRY_MAX_S: Final = 0.25


OnTrouble = Callable[[StatusError | None], None]


async def until_answered(
    call: Callable[[], Awaitable[T]], limit_s: float | None = None, on_trouble: OnTrouble | None = None
) -> T:
    """Make a call that is safe to repeat until the store answers; one without room counts as one that does not.

    Arguments:
        call: makes it anew each time.
        limit_s: no attempt begins later than that; None: however long it takes.
        on_trouble: see ``rpc.retry.until_answered``.

    Raises:
        StatusError: the store refused, or the last attempt within the limit failed.
    """
    # Without jitter: the simulator replays a run from its seed.
    return await retry.until_answered(
        call, limit_s, max_wait_s=RETRY_MAX_S, jitter=0.0, wait_for_room=True, on_trouble=on_trouble
    )


async def txn_until_answered(
    control: Control, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
) -> TxnResult:
    """Execute a txn that is safe to repeat until the store answers.

    Arguments:
        control: the store.
        compares, then, otherwise: as for ``Control.txn``.

    Raises:
        StatusError: the store refused.
    """
    return await until_answered(lambda: control.txn(compares, then, otherwise))


async def read_page(control: Control, listing: GetRange, size: PageSize) -> TxnResult:
    """Read the first keys of a list, as many as one answer should have; fewer, if it is too large or takes too long.

    Arguments:
        control: the store.
        listing: all of it; its limit is set here.
        size: of its pages.

    Raises:
        StatusError: the store refused.
    """

    async def ask() -> TxnResult:
        try:
            return await control.txn((), (replace(listing, limit=size.keys),))
        except StatusError as error:
            size.failed(error)
            raise

    while True:
        before = size.keys
        try:
            result = await until_answered(ask)
        except ResponseTooLargeError:
            if before == 1:
                raise
            continue
        size.took(result.results[0].items)
        return result


# -- reflector ------------------------------------------------------------------------------------------------------
#
# Reflector: list an interval of keys, watch it from the next revision, and report each change once, for ever.
#
# ::
#
#     nodes = Reflector(control, below("/raftkv/train/job/node/"), on_changes)
#     nodes.start()                            # lists, then watches
#     await nodes.ready()
#     nodes.items, nodes.revision              # the state of the interval at one revision
#
#         list at 7     watch from 8                     history is compacted: list at 31, watch from 32
#         |------------>|-----------> ... ------------X  |------------>|----------->
#         PUT a, PUT b   PUT c, DELETE a                 the difference: DELETE b, PUT d
#
# Everything that keeps a copy of keys uses this class, so its users need not know whether a change came from a list or
# from the watch. ``raftkv.client.cache`` is built on it.
#
# Invariants:
#
# 1. ``revision`` never goes back, unless the history is another one (``HistoryReplaced``): the cluster was restored
#    from a backup, or the endpoints lead to another one. Watches and lists tell by the cluster's id, a list also by a
#    revision before the known one, for it is linearizable. Then everything that differs from ``items`` is reported; a
#    reflector that keeps no ``items`` reports everything that is there. Any other list that is older than ``revision``
#    changes nothing.
# 2. A change is reported once: an event at or before ``revision`` is passed over, and a list reports only what is newer
#    than ``revision``, and the keys that have gone since.
# 3. The watch begins right behind the revision of the list, in the same cluster, so nothing falls between the two.
# 4. Nothing but ``close``, or the end of the client, ends a reflector. The client's watches survive members and outages
#    of any length; a compaction leads to a new list; an error for which waiting is no cure, as a missing permission, is
#    handed to ``on_refused``, and the list is tried again ever more slowly.
# 5. A list is read in pages of one revision, and takes effect whole.
#
# Leaves out what values mean, and states between two revisions that a list has passed over.

_log = logging.getLogger(__name__)

Interval = tuple[Text, Text]
"""First key and end; an empty end: the first key alone."""


class Sparse(NamedTuple):
    """Intervals with other keys between them, perhaps of strangers: one watch spans them, and passes those over.

    Attributes:
        first, end: of the watch.
        parts: the intervals.
    """

    first: Text
    end: Text
    parts: tuple[Interval, ...]

    def reads(self) -> list[Operation]:
        """Return what reads the parts, one by one."""
        return [GetRange(first, end or None) for first, end in self.parts]

    def covers(self, key: bytes) -> bool:
        """Return whether a key lies in one of the parts."""
        return any(first <= key < end for first, end in self.bounds())

    def bounds(self) -> list[tuple[bytes, bytes]]:
        """Return first key and end of each part, also of one that is a single key."""
        return [(to_bytes(first), to_bytes(end) or to_bytes(first) + b"\0") for first, end in self.parts]

    @staticmethod
    def items(results: Iterable[RangeResult]) -> list[KeyValue]:
        """Return the keys that ``reads`` has found."""
        return [item for result in results for item in result]


OnChanges = Callable[[Sequence[Event]], None]
OnRefused = Callable[[Exception], None]

REFUSED_PAUSE_MAX_S: Final = 1.0
PAGE_KEYS: Final = 10_000
"""Limit of the keys of a list that are read at once."""


def below(prefix: Text) -> Interval:
    """Return the interval of all keys that begin with a prefix."""
    return prefix, prefix_end(to_bytes(prefix))


class Reflector:
    """A copy of an interval that follows the store; see the module.

    Arguments:
        control: the store.
        interval: of the keys; of a ``Sparse`` one the parts count, and each is read at once.
        on_changes: called on the loop after each list and each batch of the watch, with what is new: possibly nothing.
        deletes: False: the reflector reports no deletion and keeps no ``items``, so its memory does not grow.
        on_refused: called with each error that does not pass by itself; the default writes a line into the log,
            unless it is that the client was closed.
        on_end: called with that error: nothing will be reported any more.
        outlives_restore: False: that the cluster was restored is the end too.
        on_restored: called when the history is another one, before what it holds now is reported.
        watched: the part of the interval that is watched; what is in the rest is known from lists. None: all of it.

    Attributes:
        items: the keys that exist, as of ``revision``.
        revision: of the store; 0: nothing is known yet.
        cluster_id: of the cluster that was listed; 0: not known.
        epoch: how many histories there were before this one.
    """

    def __init__(
        self,
        control: Control,
        interval: Interval | Sparse,
        on_changes: OnChanges,
        *,
        deletes: bool = True,
        on_refused: OnRefused | None = None,
        on_end: OnRefused = lambda error: None,
        outlives_restore: bool = True,
        on_restored: Callable[[], None] = lambda: None,
        watched: Interval | None = None,
    ) -> None:
        self.items: dict[bytes, KeyValue] = {}
        self.revision = 0
        self.cluster_id = 0
        self.epoch = 0
        self._control = control
        self._interval = interval[0], interval[1]
        self._watched = watched or self._interval
        self._page = PageSize(PAGE_KEYS, PAGE_KEYS)
        self._sparse = interval if isinstance(interval, Sparse) else None
        self._parts = self._sparse.bounds() if self._sparse is not None else []
        self._on_changes = on_changes
        self._deletes = deletes
        self._outlives_restore = outlives_restore
        self._on_restored = on_restored
        self._on_refused = on_refused or self._log_refusal
        self._on_end = on_end
        self._refusal = ""
        self._news_only = False
        self._is_closed = False
        self._end: Exception | None = None
        self._unwatch: Callable[[], None] | None = None
        self._listing: asyncio.Task[None] | None = None
        self._backoff = Backoff(max_s=REFUSED_PAUSE_MAX_S)
        self._following = asyncio.Event()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def is_following(self) -> bool:
        """Whether a watch keeps ``items`` current; False: the first list, or one after a compaction, is under way."""
        return self._following.is_set() and self._end is None

    def get(self, key: str) -> KeyValue | None:
        """Return one of the items; None: the key does not exist."""
        return self.items.get(key.encode())

    def start(self, items: Iterable[KeyValue] = (), revision: int = 0, *, news_only: bool = False) -> None:
        """Begin to follow; of what the caller has read already nothing is reported.

        Arguments:
            items: what the interval held at ``revision``.
            revision: everything up to it is known to the caller; 0: nothing is, and the reflector lists first.
            news_only: what is there at the start is neither read nor reported; for one that keeps no ``items``.
        """
        self._news_only = news_only
        if not revision:
            self._list_again()
            return
        if self._deletes:
            self.items = {item.key: item for item in items}
        self.revision = revision
        self._watch()

    def load(self, items: Iterable[KeyValue], revision: int) -> None:
        """Take a list that the caller has read, report what is new in it, and follow the store from there.

        Arguments:
            items: what the interval held at ``revision``.
            revision: of the store; a list that is older than what is known changes nothing.
        """
        if self._is_closed or revision < self.revision:
            return
        known, found = self.items, {item.key: item for item in items}
        gone = [Event(DELETE, KeyValue(key, b"", 0, 0, revision, 0)) for key in known if key not in found]
        # Keys written at or before the known revision were reported already: that takes no memory of keys.
        # After a restore nothing is known by its revision, but what is as it was is no change.
        new = (item for item in found.values() if item.mod_revision > self.revision and item != known.get(item.key))
        fresh = sorted(new, key=attrgetter("mod_revision"))
        if self._unwatch is None and self._listing is None:
            self.revision = revision
            self._watch()
        self._take([*gone, *(Event(PUT, item) for item in fresh)], revision)

    async def refresh(self) -> None:
        """List now.

        Raises:
            StatusError: the store refused.
        """
        while True:
            known, epoch = self.revision, self.epoch
            items, result = await self._read_pages()
            if self.epoch == epoch:
                break  # else it began before the history was replaced, and may be of the one that is gone
        if self.is_of_another(result, known):
            self._replace_history(HistoryReplaced())
        if self._is_closed or self._end is not None:
            return
        is_first, self._news_only = self._news_only, False
        self.cluster_id = result.cluster_id or self.cluster_id
        self.load(() if is_first else items, result.revision)

    def is_of_another(self, result: TxnResult, known_revision: int) -> bool:
        """Tell if a linearizable answer comes from another history than ``items``.

        Arguments:
            result: of a txn.
            known_revision: ``revision`` when the txn was sent.
        """
        return result.revision < known_revision or 0 != result.cluster_id != self.cluster_id != 0

    async def ready(self) -> None:
        """Wait until a watch keeps ``items`` current; raises why that will never be, as when the client was closed."""
        await self._following.wait()
        self._check()

    async def reached(self, revision: int) -> None:
        """Wait until everything up to a revision is known here, or ``close``.

        Raises:
            StatusError: the client was closed before.
        """
        if self.revision < revision and not self._is_closed:
            self._check()
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((revision, future))
            await future

    def close(self) -> None:
        """Follow no more; nothing is reported from now on."""
        self._is_closed = True
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if self._listing is not None:
            self._listing.cancel()
        self._release()

    def _check(self) -> None:
        if self._end is not None:
            raise self._end

    def _finish(self, error: Exception) -> None:
        """Tell all waiters that the client was closed."""
        self._end = error
        self._following.set()
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(error)
        self._on_end(error)

    # -- list

    async def _read_pages(self) -> tuple[list[KeyValue], TxnResult]:
        """Read the interval as of one revision; the answer is that of the first page."""
        if self._sparse is not None:
            reads = self._sparse.reads()
            result = await until_answered(lambda: self._control.txn((), reads))
            return self._sparse.items(result.results), result
        start = self._interval[0]
        items: list[KeyValue] = []
        first: TxnResult | None = None
        while True:
            try:
                result = await self._read_page(start, first.revision if first else 0)
            except (CompactedError, FutureRevisionError):
                if first is None:
                    raise
                items, first, start = [], None, self._interval[0]
                continue
            first = first or result
            if result.cluster_id != first.cluster_id:
                items, first, start = [], None, self._interval[0]
                continue
            page: RangeResult = result.results[0]
            items += page
            self._check_room(items)
            if not page.more or self._news_only:
                return items, first
            start = page.items[-1].key + b"\0"

    async def _read_page(self, start: Text, revision: int) -> TxnResult:
        size = PageSize(1) if self._news_only else self._page
        return await read_page(self._control, GetRange(start, self._interval[1] or None, revision=revision), size)

    def _check_room(self, items: Sequence[KeyValue]) -> None:
        """Raise what forbids to take so many; for a reflector of limited size."""

    def _list_again(self, pause_s: float = 0.0) -> None:
        self._following.clear()
        self._listing = asyncio.get_running_loop().create_task(self._list(pause_s))

    async def _list(self, pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.refresh()
            except CompactedError:  # between two pages
                pause_s = self._backoff.next_s()
            except Exception as error:
                self._on_refused(error)
                if self._end is not None:
                    return
                if isinstance(error, StatusError) and error.code == CANCELED and error.definite:
                    self._finish(error)
                    return
                pause_s = self._backoff.next_s()
            else:
                break
        self._listing = None
        if not self._is_closed:
            self._watch()

    # -- watch

    def _watch(self) -> None:
        self._following.set()
        first, end = self._watched
        try:
            self._unwatch = self._control.watch(
                first,
                end,
                self.revision + 1,
                self._on_events,
                self._on_lost,
                deletes=self._deletes,
                cluster_id=self.cluster_id,
            )
        except StatusError as error:
            self._on_refused(error)
            if not is_client_closed(error):
                raise
            self._finish(error)  # it was closed between the list and the watch

    def _on_events(self, revision: int, events: Sequence[Event]) -> None:
        if self._is_closed:
            return
        self._backoff.reset()
        fresh = [event for event in events if event.kv.mod_revision > self.revision]
        if self._parts:
            fresh = [event for event in fresh if any(first <= event.kv.key < end for first, end in self._parts)]
        if events:
            self._take(fresh, max(revision, self.revision))
        else:
            self.advance(revision)

    def _on_lost(self, error: Exception) -> None:
        if self._is_closed:
            return
        self._unwatch = None
        pause_s = 0.0
        if isinstance(error, HistoryReplaced) and not self._replace_history(error):
            return
        if not isinstance(error, CompactedError):
            # The client has waited for all that passes by itself: this error would be the same on the next watch.
            self._on_refused(error)
            pause_s = self._backoff.next_s()
        if not self._is_closed:
            self._list_again(pause_s)

    # -- what is known

    def _replace_history(self, error: HistoryReplaced) -> bool:
        """Begin with the next list, at any revision: the store is another one; False: that is the end."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if not self._outlives_restore:
            self._finish(error)
            return False
        self.revision = self.cluster_id = 0
        self.epoch += 1
        self._release()
        self._on_restored()
        return True

    def _take(self, changes: Sequence[Event], revision: int) -> None:
        for event in changes if self._deletes else ():
            if event.type == DELETE:
                self.items.pop(event.kv.key, None)
            else:
                self.items[event.kv.key] = event.kv
        self.advance(revision)
        self._on_changes(changes)

    def advance(self, revision: int) -> None:
        """Note that there is no change up to a revision that is not in ``items``."""
        self.revision = max(self.revision, revision)
        self._release(self.revision)

    def _release(self, revision: float = math.inf) -> None:
        """Let those go on who wait for a revision up to this one."""
        waiting, self._waiting = self._waiting, []
        for wanted, future in waiting:
            if wanted > revision:
                self._waiting.append((wanted, future))
            elif not future.done():
                future.set_result(None)

    def _log_refusal(self, error: Exception) -> None:
        if str(error) != self._refusal and not is_client_closed(error):
            self._refusal = str(error)
            _log.warning("raftkv: %r cannot be followed, it is tried again: %s", self._interval[0], error)
