"""The minimal interface of the store that runs and registries use, so that the simulator can implement it.

``ClientControl`` implements it over ``raftkv.aio``, on raftkv and etcd alike. A txn with an indefinite error may have
been applied, so every txn must be safe to repeat.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from raftkv.client.errors import HistoryReplaced, is_client_closed
from raftkv.client.operations import Compare, GetRange, Operation, get_range
from raftkv.client.paging import FIRST_KEYS, PageSize
from raftkv.client.rpc import methods, retry
from raftkv.client.rpc.retry import Backoff
from raftkv.client.scope import Text, prefix_end, to_bytes
from raftkv.client.values import DELETE, PUT, Event, KeyValue, RangeResult, TxnResult
from raftkv.errors import CANCELED, CompactedError, ConfigError, FutureRevisionError, ResponseTooLargeError, StatusError
from raftkv.pb import rpc_pb2

if TYPE_CHECKING:
    from raftkv.client.lease import Lease
    from raftkv.client.library import Client
    from raftkv.client.watch import Watch

OnEvents = Callable[[int, Sequence[Event]], None]
OnLost = Callable[[Exception], None]

CALL_TIMEOUT_S: Final = 5.0
TXN_TIMEOUT_S: Final = 1.5
"""Time limit of a txn before it is sent again; about as long as an election. If a member forwards a txn to a leader
that dies, the txn is lost without a response. All txns are safe to repeat."""
TXN_TIMEOUT_MAX_S: Final = 24.0
"""Longest time limit of a patient control; a txn lost in an outage is sent again after at most this time."""


class Grant(Protocol):
    """A lease with keep-alives."""

    @property
    def id(self) -> int:
        """The lease id."""

    @property
    def ttl_s(self) -> int:
        """The TTL in seconds that the cluster granted."""

    @property
    def silent_s(self) -> float:
        """Seconds since the last confirmed keep-alive."""


class Control(Protocol):
    """The operations of a client for programs that keep state in the store."""

    async def grant(self, ttl_s: int, grace_s: float, on_lost: Callable[[], None]) -> Grant:
        """Grant a lease and keep it alive until ``end``, through outages of the store of any length.

        Arguments:
            ttl_s: minimum TTL; the cluster may grant more.
            grace_s: seconds after a broken connection of this process at which the lease may end; 0: only with the TTL.
            on_lost: called once, on the loop, when the cluster reports that the lease is gone.

        Raises:
            StatusError: the lease could not be granted.
        """

    async def grant_fixed(self, ttl_s: int) -> int:
        """Grant a lease without keep-alives, which expires after ``ttl_s``; return its id."""

    async def end(self, grant: Grant, *, revoke: bool) -> None:
        """Stop the keep-alives of a lease, and try to revoke it.

        Arguments:
            grant: lease of this control.
            revoke: False: do not revoke; the lease expires with its TTL.
        """

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """Execute one transaction.

        Arguments:
            compares: conditions; if all hold, ``then`` is executed.
            then: operations.
            otherwise: operations for when a condition does not hold.

        Raises:
            StatusError: the store refused, or no member answered; see ``definite``.
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
        """Report every change of a range from a revision on, once and in order; return a function that ends the watch.

        Arguments:
            key, end: the range; an empty end: the key alone.
            start_revision: revision of the first change.
            on_events: called on the loop with the revision up to which all changes have arrived, and the changes, which
                may be none.
            on_lost: called once if the watch cannot continue, for example after history was compacted.
            deletes: False: deletions are left out.
            cluster_id: cluster of ``start_revision``; the watch does not continue in another cluster; 0: unknown.
        """


class Patience:
    """The time limit of a txn before it is sent again; doubled after each timeout.

    When ten thousand programs write at the same moment, the last of them is answered seconds later. If each sent its
    txn again before that, the cluster would only execute duplicates whose senders no longer wait.

    Arguments:
        max_s: longest time limit.

    Attributes:
        timeout_s: time limit of the next txn.
    """

    def __init__(self, max_s: float) -> None:
        self.timeout_s = TXN_TIMEOUT_S
        self._max_s = max_s

    def late(self, timeout_s: float) -> None:
        """Record that a txn timed out with this limit; of many concurrent txns, only the first doubles the limit."""
        self.timeout_s = min(max(self.timeout_s, 2 * timeout_s), self._max_s)

    def answered(self, took_s: float) -> None:
        """Record that a txn was answered, and set the limit to four times the time it took, within the bounds."""
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
    """Return a client after checking that it sees all keys.

    Runs, registries and datasets use fixed key names, and their fences refer to these. Through a view or a namespace, a
    fenced write would not find the fence's key, and would fail as if the fence had ended.

    Raises:
        ConfigError: the client sees only the keys below a prefix.
        TypeError: the value is not a client.
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
        kv: client; for a view, all keys are those of the view.
        is_patient: whether to double the time limit of a txn after each timeout, for many simultaneous writers. If
            False, a txn is sent again as soon as an election may have lost it.
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
            await grant.lease.revoke(min(grant.ttl_s, TXN_TIMEOUT_S))  # if this fails, it expires
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
            task.cancel()  # the task may not have started

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
# Calls of a run that are repeated until the store answers: an outage delays a run but does not end it.

T = TypeVar("T")

RETRY_MIN_S: Final = 0.02
RETRY_MAX_S: Final = 0.25


OnTrouble = Callable[[StatusError | None], None]


async def until_answered(
    call: Callable[[], Awaitable[T]], limit_s: float | None = None, on_trouble: OnTrouble | None = None
) -> T:
    """Repeat a call until the store answers; the call must be safe to repeat. A store without space counts as silent.

    Arguments:
        call: starts a new attempt.
        limit_s: time after which no attempt starts; None: no limit.
        on_trouble: see ``rpc.retry.until_answered``.

    Raises:
        StatusError: the store refused, or the last attempt within the limit failed.
    """
    # No jitter: the simulator replays a run from its seed.
    return await retry.until_answered(
        call, limit_s, max_wait_s=RETRY_MAX_S, jitter=0.0, wait_for_room=True, on_trouble=on_trouble
    )


async def txn_until_answered(
    control: Control, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
) -> TxnResult:
    """Execute a txn until the store answers; the txn must be safe to repeat.

    Arguments:
        control: the store.
        compares, then, otherwise: as for ``Control.txn``.

    Raises:
        StatusError: the store refused.
    """
    return await until_answered(lambda: control.txn(compares, then, otherwise))


async def read_below(
    control: Control, prefix: str, keys_max: int, *, limit: int = 0, descending: bool = False, keys_only: bool = False
) -> AsyncIterator[Sequence[KeyValue]]:
    """Yield the keys below a prefix in order, page by page; each page is read at its own revision.

    Arguments:
        control: the store.
        prefix: beginning of the keys.
        keys_max: maximum number of keys in a page.
        limit: maximum number of keys; 0: all of them.
        descending: the last key first.
        keys_only: leave out the values; the first page is then as large as the others.

    Raises:
        StatusError: the store refused.
    """
    start, end = prefix.encode(), prefix_end(prefix.encode())
    size, left = PageSize(min(limit or keys_max, keys_max), keys_max if keys_only else FIRST_KEYS), limit or sys.maxsize
    while True:
        listing = get_range(start, end, descending=descending, keys_only=keys_only)
        page = (await read_page(control, listing, size)).results[0]
        yield page.items[:left]
        left -= len(page.items)
        if not page.more or left <= 0:
            return
        last = page.items[-1].key
        start, end = (start, last) if descending else (last + b"\0", end)


async def read_page(control: Control, listing: GetRange, size: PageSize) -> TxnResult:
    """Read the first page of a list; after a failure, retry with fewer keys.

    Arguments:
        control: the store.
        listing: read of the whole list; its limit is overwritten.
        size: size of the pages.

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
# Reflector: list a range of keys, watch it from the next revision, and report each change once, indefinitely.
#
# ::
#
#     nodes = Reflector(control, below("/raftkv/train/job/node/"), on_changes)
#     nodes.start()                            # lists, then watches
#     await nodes.ready()
#     nodes.items, nodes.revision              # the state of the range at one revision
#
#         list at 7     watch from 8                     history is compacted: list at 31, watch from 32
#         |------------>|-----------> ... ------------X  |------------>|----------->
#         PUT a, PUT b   PUT c, DELETE a                 the difference: DELETE b, PUT d
#
# All copies of keys are built on this class, so their users need not know whether a change came from a list or from
# the watch; ``raftkv.client.cache`` is one of them.
#
# Invariants:
#
# 1. ``revision`` never decreases, unless the history is replaced (``HistoryReplaced``): the cluster was restored from a
#    backup, or the endpoints lead to another cluster. Watches and lists detect this by the cluster id; a list, which is
#    linearizable, also by a revision below the known one. Then all differences from ``items`` are reported; a reflector
#    without ``items`` reports all existing keys. Any other list older than ``revision`` changes nothing.
# 2. A change is reported once: an event at or before ``revision`` is skipped, and a list reports only keys newer than
#    ``revision``, and keys deleted since.
# 3. The watch starts at the revision after the list, in the same cluster, so no change is missed in between.
# 4. Only ``close``, or the end of the client, ends a reflector. The client's watches survive member failures and
#    outages of any length. After a compaction the range is listed again. An error that waiting does not cure, such as a
#    missing permission, is passed to ``on_refused``, and the list is retried with growing pauses.
# 5. A list is read in pages at one revision, and takes effect as a whole.
#
# Not here: the meaning of values. States between two revisions are not seen when a list skips them.

_log = logging.getLogger(__name__)

Interval = tuple[Text, Text]
"""First key and end of a range; an empty end: the first key alone."""


class Sparse(NamedTuple):
    """Ranges with unrelated keys between them. One watch spans all of them, and events for other keys are skipped.

    Attributes:
        first, end: range of the watch.
        parts: the ranges.
    """

    first: Text
    end: Text
    parts: tuple[Interval, ...]

    def reads(self) -> list[Operation]:
        """Return one read operation for each part."""
        return [GetRange(first, end or None) for first, end in self.parts]

    def covers(self, key: bytes) -> bool:
        """Return whether a key lies in one of the parts."""
        return any(first <= key < end for first, end in self.bounds())

    def bounds(self) -> list[tuple[bytes, bytes]]:
        """Return the first key and the end of each part; a single key also gets an end."""
        return [(to_bytes(first), to_bytes(end) or to_bytes(first) + b"\0") for first, end in self.parts]

    @staticmethod
    def items(results: Iterable[RangeResult]) -> list[KeyValue]:
        """Return the keys in the results of ``reads``."""
        return [item for result in results for item in result]


OnChanges = Callable[[Sequence[Event]], None]
OnRefused = Callable[[Exception], None]

REFUSED_PAUSE_MAX_S: Final = 1.0
PAGE_KEYS: Final = 10_000
"""Maximum number of keys in a page of a list."""


def below(prefix: Text) -> Interval:
    """Return the range of all keys that begin with a prefix."""
    return prefix, prefix_end(to_bytes(prefix))


class Reflector:
    """A copy of a range that follows the store; see the comment above.

    Arguments:
        control: the store.
        interval: range of the keys; for a ``Sparse`` only its parts count, and each part is read in one page.
        on_changes: called on the loop after each list and each batch of the watch, with the changes, which may be none.
        deletes: False: the reflector reports no deletions and keeps no ``items``, so its memory does not grow.
        on_refused: called with each permanent error; by default the error is logged, unless the client was closed.
        on_end: called with the error after which nothing more is reported.
        outlives_restore: False: the reflector ends when the cluster is restored from a backup.
        on_restored: called when the history was replaced, before the new state is reported.
        watched: part of the range to watch; keys outside it are only updated by lists. None: the whole range.

    Attributes:
        items: keys that exist at ``revision``.
        revision: revision of the store; 0: nothing is known yet.
        cluster_id: id of the listed cluster; 0: unknown.
        epoch: number of histories before this one.
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
        """Whether a watch keeps ``items`` current; False: a list (at the start or after compaction) is in progress."""
        return self._following.is_set() and self._end is None

    def get(self, key: str) -> KeyValue | None:
        """Return the item of a key; None: the key does not exist."""
        return self.items.get(key.encode())

    def start(self, items: Iterable[KeyValue] = (), revision: int = 0, *, news_only: bool = False) -> None:
        """Start following; changes that the caller has read already are not reported.

        Arguments:
            items: content of the range at ``revision``.
            revision: revision up to which the caller knows all changes; 0: none, so the reflector lists first.
            news_only: whether to skip the keys that exist at the start; only for reflectors that keep no ``items``.
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
        """Load a list that the caller has read, report the changes in it, and follow the store from there.

        Arguments:
            items: content of the range at ``revision``.
            revision: revision of the store; a list older than the known revision changes nothing.
        """
        if self._is_closed or revision < self.revision:
            return
        known, found = self.items, {item.key: item for item in items}
        gone = [Event(DELETE, KeyValue(key, b"", 0, 0, revision, 0)) for key in known if key not in found]
        # Keys with a known mod_revision were reported already; this check also works without ``items``. After a
        # restore, revisions are not comparable, but an identical item is not a change.
        new = (item for item in found.values() if item.mod_revision > self.revision and item != known.get(item.key))
        fresh = sorted(new, key=attrgetter("mod_revision"))
        if self._unwatch is None and self._listing is None:
            self.revision = revision
            self._watch()
        self._take([*gone, *(Event(PUT, item) for item in fresh)], revision)

    async def refresh(self) -> None:
        """List the range now.

        Raises:
            StatusError: the store refused.
        """
        while True:
            known, epoch = self.revision, self.epoch
            items, result = await self._read_pages()
            if self.epoch == epoch:
                break  # else the list may show the replaced history
        if self.is_of_another(result, known):
            self._replace_history(HistoryReplaced())
        if self._is_closed or self._end is not None:
            return
        is_first, self._news_only = self._news_only, False
        self.cluster_id = result.cluster_id or self.cluster_id
        self.load(() if is_first else items, result.revision)

    def is_of_another(self, result: TxnResult, known_revision: int) -> bool:
        """Return whether a linearizable answer comes from another history than ``items``.

        Arguments:
            result: result of a txn.
            known_revision: ``revision`` when the txn was sent.
        """
        return result.revision < known_revision or 0 != result.cluster_id != self.cluster_id != 0

    async def ready(self) -> None:
        """Wait until a watch keeps ``items`` current; raise if the reflector has ended, e.g. by a closed client."""
        await self._following.wait()
        self._check()

    async def reached(self, revision: int) -> None:
        """Wait until all changes up to a revision have arrived, or until ``close``.

        Raises:
            StatusError: the client was closed first.
        """
        if self.revision < revision and not self._is_closed:
            self._check()
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((revision, future))
            await future

    def close(self) -> None:
        """Stop following; nothing is reported from now on."""
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
        """End the reflector with an error, and wake all waiters."""
        self._end = error
        self._following.set()
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(error)
        self._on_end(error)

    # -- list

    async def _read_pages(self) -> tuple[list[KeyValue], TxnResult]:
        """Read the range at one revision; return all keys, and the result of the first page."""
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
        """Raise if the items exceed a limit; overridden by reflectors of limited size."""

    def _list_again(self, pause_s: float = 0.0) -> None:
        self._following.clear()
        self._listing = asyncio.get_running_loop().create_task(self._list(pause_s))

    async def _list(self, pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.refresh()
            except CompactedError:  # compacted between two pages
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
            self._finish(error)  # closed between the list and the watch

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
            # The client retries transient errors by itself, so the next watch would fail with the same error.
            self._on_refused(error)
            pause_s = self._backoff.next_s()
        if not self._is_closed:
            self._list_again(pause_s)

    # -- state

    def _replace_history(self, error: HistoryReplaced) -> bool:
        """Forget the revision, so that the next list is accepted; return False if the reflector ends instead."""
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
        """Record that ``items`` contains all changes up to a revision."""
        self.revision = max(self.revision, revision)
        self._release(self.revision)

    def _release(self, revision: float = math.inf) -> None:
        """Wake the waiters for revisions up to this one."""
        waiting, self._waiting = self._waiting, []
        for wanted, future in waiting:
            if wanted > revision:
                self._waiting.append((wanted, future))
            elif not future.done():
                future.set_result(None)

    def _log_refusal(self, error: Exception) -> None:
        if str(error) != self._refusal and not is_client_closed(error):
            self._refusal = str(error)
            _log.warning("raftkv: cannot watch %r, retrying: %s", self._interval[0], error)
