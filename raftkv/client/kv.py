"""Put, get, range, delete, count.

Owns the translation between Python's arguments and etcd's messages. ``put`` and ``get`` of a single key are the hot
path: a plain message, one await, one small result.

    await kv.put("jobs/a", b"1", lease=lease)
    item = await kv.get("jobs/a")                 # KeyValue or None
    for item in await kv.range("jobs/", prefix=True, limit=100): ...

A write with ``fence=lock`` is a txn on the condition that the lock is still held. Writes are repeated only if they
certainly did not happen; the ``definite`` of an error says whether that is so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Generic, TypeVar

from raftkv.client import operations
from raftkv.client.arguments import many, whole
from raftkv.client.errors import TxnConflict
from raftkv.client.operations import (
    Compare,
    Delete,
    FenceLike,
    GetRange,
    LeaseLike,
    Operation,
    Put,
    SortBy,
    fence_compares,
    lost_lease,
    mod_revision,
)
from raftkv.client.paging import read_pages
from raftkv.client.rpc import methods
from raftkv.client.rpc.retry import Backoff
from raftkv.client.scope import FROM_KEY, Part, Scope, Space, Text, prefix_end, to_bytes
from raftkv.client.values import DeleteResult, KeyValue, PutResult, RangeResult, TxnResult
from raftkv.errors import CompactedError, LeaseNotFoundError
from raftkv.pb import rpc_pb2


class KV(Part):
    """Reads and writes of keys."""

    async def put(
        self,
        key: Text,
        value: Text = b"",
        *,
        lease: LeaseLike | None = None,
        prev_kv: bool = False,
        ignore_value: bool = False,
        ignore_lease: bool = False,
        fence: FenceLike | None = None,
        timeout_s: float | None = None,
    ) -> PutResult:
        """Write a key.

        Arguments:
            key, value: text is written as UTF-8.
            lease: the key ends with it; None: it stays, and leaves the lease it had.
            prev_kv: return the key as it was before.
            ignore_value: keep the value, change the lease.
            ignore_lease: keep the lease, change the value.
            fence: write only while this lock or term is held, or this generation of a run lasts.
            timeout_s: of the call, all attempts together; None: the client's.

        Raises:
            LeaseLost: the lease cannot be relied on; nothing was written.
            FenceLost: the lock or term is over; nothing was written.
            StatusError: the cluster refused, or it is unknown what happened: see ``definite``.
        """
        scope = self.scope
        if lease is None and fence is None and not (prev_kv or ignore_value or ignore_lease):
            request = rpc_pb2.PutRequest(key=scope.space.key(key), value=to_bytes(value))
            answer = await scope.call(methods.PUT, request, timeout_s)
            return PutResult(answer.header.revision)
        operation = Put(key, value, lease, prev_kv, ignore_value, ignore_lease)
        try:
            if fence is not None:
                done: PutResult = await self._fenced(operation, fence, timeout_s)
                return done
            answer = await scope.call(methods.PUT, operation.request(scope.space), timeout_s)
        except LeaseNotFoundError:
            raise lost_lease((lease,)) or LeaseNotFoundError() from None
        return operation.result(answer, self.scope.space)

    async def get(
        self,
        key: Text,
        *,
        revision: int = 0,
        serializable: bool = False,
        max_staleness_s: float | None = None,
        timeout_s: float | None = None,
    ) -> KeyValue | None:
        """Read a key; None: it does not exist.

        Arguments:
            key: which.
            revision: as it was then; 0: as it is.
            serializable: ask one member alone: faster, and maybe old.
            max_staleness_s: the member that is asked, a learner too, may answer from what it has if that is certainly
                not older; it confirms the read with the others if it is. None: every read is confirmed.
            timeout_s: as for ``put``.

        Raises:
            Compacted: that revision is gone.
            StatusError: the cluster refused, or did not answer in time.
        """
        scope = self.scope
        request = rpc_pb2.RangeRequest(key=scope.space.key(key))
        if revision or serializable:
            request.revision, request.serializable = revision, serializable
        kvs = (await scope.call(methods.RANGE, request, timeout_s, max_staleness_s)).kvs
        return scope.space.key_value(kvs[0]) if kvs else None

    async def range(
        self,
        key: Text,
        end: Text | None = None,
        *,
        prefix: bool = False,
        limit: int = 0,
        revision: int = 0,
        sort_by: SortBy = "key",
        descending: bool = False,
        keys_only: bool = False,
        serializable: bool = False,
        min_mod_revision: int = 0,
        max_mod_revision: int = 0,
        min_create_revision: int = 0,
        max_create_revision: int = 0,
        max_staleness_s: float | None = None,
        timeout_s: float | None = None,
    ) -> RangeResult:
        """Read an interval in one answer; for a large one see ``pages``.

        Arguments:
            key: the first key, or the prefix.
            end: the first key that does not belong; ``"\\0"``: no end.
            prefix: all keys that begin with ``key``; ``""``: all keys.
            limit: at most so many; 0: all.
            revision, serializable, max_staleness_s, timeout_s: as for ``get``.
            sort_by, descending: the order; by key if not said.
            keys_only: leave the values out.
            min_mod_revision, max_mod_revision: only keys last written between these; 0: any.
            min_create_revision, max_create_revision: only keys created between these; 0: any.
        """
        bounds = (min_mod_revision, max_mod_revision, min_create_revision, max_create_revision)
        operation = GetRange(
            key, end, prefix, limit, revision, sort_by, descending, keys_only, False, serializable, *bounds
        )
        return await self._range(operation, timeout_s, max_staleness_s)

    async def count(
        self,
        key: Text,
        end: Text | None = None,
        *,
        prefix: bool = False,
        revision: int = 0,
        serializable: bool = False,
        max_staleness_s: float | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Count the keys of an interval; arguments as for ``range``.

        Arguments:
            key, end, prefix: as for ``range``.
            revision, serializable, max_staleness_s, timeout_s: as for ``get``.
        """
        operation = GetRange(key, end, prefix, revision=revision, serializable=serializable, count_only=True)
        return (await self._range(operation, timeout_s, max_staleness_s)).count

    async def delete(
        self,
        key: Text,
        end: Text | None = None,
        *,
        prefix: bool = False,
        prev_kv: bool = False,
        fence: FenceLike | None = None,
        timeout_s: float | None = None,
    ) -> DeleteResult:
        """Delete a key or an interval, in one revision.

        Arguments:
            key, end, prefix: as for ``range``.
            prev_kv: return the keys as they were.
            fence, timeout_s: as for ``put``.

        Raises:
            FenceLost: the lock or term is over; nothing was deleted.
            StatusError: as for ``put``.
        """
        operation = Delete(key, end, prefix, prev_kv)
        if fence is not None:
            done: DeleteResult = await self._fenced(operation, fence, timeout_s)
            return done
        answer = await self.scope.call(methods.DELETE_RANGE, operation.request(self.scope.space), timeout_s)
        return operation.result(answer, self.scope.space)

    async def _range(self, operation: GetRange, timeout_s: float | None, max_staleness_s: float | None) -> RangeResult:
        answer = await self.scope.call(methods.RANGE, operation.request(self.scope.space), timeout_s, max_staleness_s)
        return operation.result(answer, self.scope.space, answer.header.revision)

    async def _fenced(self, operation: Operation, fence: FenceLike, timeout_s: float | None) -> Any:
        request = rpc_pb2.TxnRequest(compare=fence_compares(fence), success=[operation.to_message(self.scope.space)])
        answer = await self.scope.call(methods.TXN, request, timeout_s)
        if not answer.succeeded:
            raise fence.broken()
        revision = answer.header.revision
        return operation.from_message(answer.responses[0], self.scope.space, revision)


# -- bulk -----------------------------------------------------------------------------------------------------------
#
# Many keys: puts and gets pipelined over the one connection, large intervals read piece by piece.
#
# ::
#
#     results = await kv.put_many({"a": b"1", "b": b"2"})
#     items = await kv.get_many(["a", "b", "missing"])                          # [KeyValue, KeyValue, None]
#     async for page in kv.pages("jobs/", prefix=True, page_size=1000): ...     # RangeResults
#     async for item in kv.scan("jobs/", prefix=True): ...                      # KeyValues
#
# Puts and gets are single calls, not a transaction: each has its own revision, and they happen in any order. The
# first failure stops the rest and is raised once those under way have ended; what was done before it stays done.
#
# The first page fixes the revision; every other is read at that one, so what is read is a snapshot however long it
# takes and whichever member answers. A page that fails is asked for again elsewhere, as every read. What is not
# bounded is time: once the cluster has compacted that revision, the next page raises ``Compacted``.

Given = TypeVar("Given")
Result = TypeVar("Result")

Pairs = (
    Mapping[Text, Text]
    | Mapping[str, str]
    | Mapping[str, bytes]
    | Mapping[bytes, str]
    | Mapping[bytes, bytes]
    | Iterable[tuple[Text, Text]]
)
"""Keys and values; spelt out because mappings are invariant in their keys."""

WINDOW = 128
"""Calls under way at once: enough to fill a member's batches, far below its limit of streams."""
WINDOW_MAX = 10_000
"""Each is a task: with more of them, making them would hold up the leases of the client."""
PAGE_SIZE = 1000
"""Keys a page: some 100 kB of short values."""


class Bulk(KV):
    """Calls for many keys."""

    async def put_many(
        self, items: Pairs, *, lease: LeaseLike | None = None, window: int = WINDOW, timeout_s: float | None = None
    ) -> list[PutResult]:
        """Write many keys; results in the order of ``items``.

        Arguments:
            items: keys and values; an iterator is drawn from as room is made.
            lease: of all of them.
            window: calls under way at once, up to ``WINDOW_MAX``.
            timeout_s: of each call; None: the client's.

        Raises:
            StatusError: of the first that failed; see ``definite``.
        """
        pairs: Iterable[tuple[Text, Text]] = items.items() if isinstance(items, Mapping) else many(items, "put_many")

        async def write(pair: tuple[Text, Text]) -> PutResult:
            if isinstance(pair, str | bytes) or len(pair) != 2:
                raise TypeError(f"put_many() takes a mapping, or pairs of a key and a value, not {pair!r}")
            return await self.put(pair[0], pair[1], lease=lease, timeout_s=timeout_s)

        return await pipelined(write, pairs, window)

    async def get_many(
        self,
        keys: Iterable[Text],
        *,
        revision: int = 0,
        serializable: bool = False,
        max_staleness_s: float | None = None,
        window: int = WINDOW,
        timeout_s: float | None = None,
    ) -> list[KeyValue | None]:
        """Read many keys, in their order; None for those that do not exist. Arguments as for ``put_many``.

        Arguments:
            keys: which; an iterator is drawn from as room is made.
            revision, serializable, max_staleness_s: as for ``get``.
            window, timeout_s: as for ``put_many``.
        """

        as_of: dict[str, Any] = {"revision": revision, "serializable": serializable, "timeout_s": timeout_s}

        async def read(key: Text) -> KeyValue | None:
            return await self.get(key, max_staleness_s=max_staleness_s, **as_of)

        return await pipelined(read, many(keys, "get_many"), window)

    async def pages(
        self,
        key: Text,
        end: Text | None = None,
        *,
        prefix: bool = False,
        page_size: int = PAGE_SIZE,
        revision: int = 0,
        keys_only: bool = False,
        serializable: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RangeResult, None]:
        """Read an interval in pages.

        Arguments:
            key, end, prefix, keys_only, serializable: as for ``range``.
            page_size: keys a page, at most: the first has 100, large values come in pages of a few MB.
            revision: as of which; 0: the present one.
            timeout_s: for each page; None: the client's.

        Raises:
            Compacted: the revision is gone.
            StatusError: a page could not be read in time.
        """
        if whole(page_size, "page_size") < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        operation = GetRange(key, end, prefix, revision=revision, keys_only=keys_only, serializable=serializable)
        request = operation.request(self.scope.space)
        call = partial(self.scope.call, methods.RANGE, timeout_s=timeout_s)
        async with aclosing(read_pages(call, request, page_size)) as answers:
            async for answer in answers:
                yield operation.result(answer, self.scope.space, request.revision)

    async def scan(
        self,
        key: Text,
        end: Text | None = None,
        *,
        prefix: bool = False,
        page_size: int = PAGE_SIZE,
        revision: int = 0,
        keys_only: bool = False,
        serializable: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[KeyValue, None]:
        """Read an interval in pages, and give out key by key; arguments and errors are those of ``pages``.

        Arguments:
            key, end, prefix, keys_only, serializable: as for ``range``.
            page_size, revision, timeout_s: as for ``pages``.
        """
        async for page in self.pages(
            key,
            end,
            prefix=prefix,
            page_size=page_size,
            revision=revision,
            keys_only=keys_only,
            serializable=serializable,
            timeout_s=timeout_s,
        ):
            for item in page.items:
                yield item


async def pipelined(call: Callable[[Given], Awaitable[Result]], given: Iterable[Given], window: int) -> list[Result]:
    """Call for each of ``given``, at most ``window`` at once; results in their order.

    Arguments:
        call: makes one call.
        given: what to call it with.
        window: calls under way at once.
    """
    if not 1 <= whole(window, "window") <= WINDOW_MAX:
        raise ValueError(f"window is a number from 1 to {WINDOW_MAX}, not {window}")
    run = _Run(call, enumerate(given))
    async with asyncio.TaskGroup() as group:
        for _ in range(window):
            group.create_task(run.work())
    if run.failure is not None:
        raise run.failure
    return [run.results[number] for number in range(len(run.results))]


class _Run(Generic[Given, Result]):
    """What the workers of one pipeline share."""

    def __init__(self, call: Callable[[Given], Awaitable[Result]], numbered: Iterator[tuple[int, Given]]) -> None:
        self.results: dict[int, Result] = {}
        self.failure: Exception | None = None
        self._call = call
        self._numbered = numbered

    async def work(self) -> None:
        """Take one after the other, until there are none or one has failed; never give up one under way."""
        while self.failure is None:
            try:
                drawn = next(self._numbered, None)
                if drawn is None:
                    return
                self.results[drawn[0]] = await self._call(drawn[1])
            except Exception as error:  # of a call, or of the iterator itself
                self.failure = self.failure or error


# -- txn ------------------------------------------------------------------------------------------------------------
#
# Transactions: conditions, what to do if they hold, what to do otherwise; all of it at one revision.
#
# ::
#
#     ok, results = await (
#         kv.txn()
#         .when(kv.version("jobs/a") == 0)
#         .then(put("jobs/a", b"1"), get_range("jobs/", prefix=True))
#         .otherwise(get("jobs/a"))
#         .commit()
#     )
#
# A txn can be an operation of another one. One that only reads is repeated at another endpoint if need be; one that
# writes is not, unless it certainly did not happen.


class Txn(Operation):
    """A transaction to be filled and committed; each method returns it again.

    Arguments:
        scope: the client or view that commits it; None for one that is only put inside another.
        fence: commit only while this lock or term is held; None: the scope's.
    """

    FIELD = "txn"

    def __init__(self, scope: Scope | None = None, fence: FenceLike | None = None) -> None:
        self._scope = scope
        self._fence = fence if fence is not None or scope is None else scope.fence
        self._compares: list[Compare] = []
        self._then: list[Operation] = []
        self._otherwise: list[Operation] = []

    def __repr__(self) -> str:
        counts = len(self._compares), len(self._then), len(self._otherwise)
        return "<Txn: {} conditions, then {}, otherwise {} operations>".format(*counts)

    def when(self, *conditions: Compare) -> Txn:
        """Add conditions; all must hold. Without any, ``then`` is what happens.

        Raises:
            TypeError: something that is no condition, as ``kv.version("a")`` without a relation.
        """
        for condition in conditions:
            if not isinstance(condition, Compare):
                raise TypeError(f"when() takes conditions as kv.version(key) == 0, not {condition!r}")
        self._compares += conditions
        return self

    def then(self, *operations: Operation) -> Txn:
        """Add operations for the case that the conditions hold.

        Raises:
            TypeError: something that is no operation.
        """
        self._then += map(_checked, operations)
        return self

    def otherwise(self, *operations: Operation) -> Txn:
        """Add operations for the other case.

        Raises:
            TypeError: something that is no operation.
        """
        self._otherwise += map(_checked, operations)
        return self

    async def commit(self, *, timeout_s: float | None = None) -> TxnResult:
        """Execute it; unpacks to ``succeeded, results``.

        Arguments:
            timeout_s: of the call, all attempts together; None: the client's.

        Raises:
            LeaseLost: a lease of an operation cannot be relied on; nothing was written.
            FenceLost: the lock or term is over; nothing was written.
            StatusError: the cluster refused, or it is unknown what happened: see ``definite``.
        """
        scope = self._scope
        if scope is None:
            raise TypeError("a txn without a client can only be an operation of another; begin with kv.txn()")
        method = methods.TXN if self.writes else methods.READ_TXN
        try:
            answer = await scope.call(method, self._guarded(scope.space), timeout_s)
        except LeaseNotFoundError:
            raise lost_lease(self.leases()) or LeaseNotFoundError() from None
        return self._unguarded(answer, scope.space)

    # A fence goes round the txn, so that its failure differs from a condition that does not hold.

    def _guarded(self, space: Space) -> rpc_pb2.TxnRequest:
        if self._fence is None:
            return self.request(space)
        inner = rpc_pb2.RequestOp(request_txn=self.request(space))
        return rpc_pb2.TxnRequest(compare=fence_compares(self._fence), success=[inner])

    def _unguarded(self, answer: rpc_pb2.TxnResponse, space: Space) -> TxnResult:
        revision = answer.header.revision
        if self._fence is None:
            return self.result(answer, space, revision)
        if not answer.succeeded:
            raise self._fence.broken()
        return self.result(answer.responses[0].response_txn, space, revision)

    # ---- as an operation

    @property
    def writes(self) -> bool:
        """Whether it may change the store; inside another txn etcd counts every one as a write."""
        operations = self._then + self._otherwise
        return any(operation.writes or isinstance(operation, Txn) for operation in operations)

    def leases(self) -> tuple[LeaseLike | None, ...]:
        """Leases that its operations rely on."""
        return tuple(lease for operation in self._then + self._otherwise for lease in operation.leases())

    def request(self, space: Space) -> rpc_pb2.TxnRequest:
        """Return the request message."""
        return rpc_pb2.TxnRequest(
            compare=[condition.to_message(space) for condition in self._compares],
            success=[operation.to_message(space) for operation in self._then],
            failure=[operation.to_message(space) for operation in self._otherwise],
        )

    def result(self, answer: rpc_pb2.TxnResponse, space: Space, revision: int) -> TxnResult:
        """Implement ``Operation.result``."""
        operations = self._then if answer.succeeded else self._otherwise
        pairs = zip(operations, answer.responses, strict=True)
        results = tuple([operation.from_message(response, space, revision) for operation, response in pairs])
        return TxnResult(answer.succeeded, results, revision, answer.header.cluster_id)


def _checked(operation: Operation) -> Operation:
    if not isinstance(operation, Operation):
        raise TypeError(f"then() and otherwise() take operations as put(key, value), not {operation!r}")
    return operation


def txn() -> Txn:
    """Make a transaction to be put inside another."""
    return Txn()


# -- stm ------------------------------------------------------------------------------------------------------------
#
# Transactions written as plain code, tried again until no other writer interfered.
#
# ::
#
#     async def move(tx):
#         a, b = int(await tx.get("a") or 0), int(await tx.get("b") or 0)
#         tx.put("a", str(a - 1))
#         tx.put("b", str(b + 1))
#
#     await kv.stm(move)
#
# Serializable: all reads are of one revision, and the writes happen only if nothing that was read has changed since.
# Else the function runs again, after a short random pause; so it must have no effects but those on the transaction.
# What was read from an interval is guarded against new keys in it, too. At most 128 keys can be read, and 128
# written.
#
# If it is unknown whether the writes happened, the error is raised as it is: it is never tried again then.


RETRIES = 100
"""Attempts before ``TxnConflict``."""
CONFLICT = "others changed what the transaction had read, {} times in a row; nothing was written"


class Transaction:
    """One attempt: what it has read, and what it will write."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._kv = KV(scope)
        self._revision = 0
        self._read: dict[bytes, KeyValue | None] = {}
        self._intervals: list[tuple[bytes, bytes]] = []
        self._writes: dict[bytes, Operation] = {}

    async def get(self, key: Text) -> bytes | None:
        """Return the value of a key, with this transaction's own writes; None: it does not exist."""
        name = to_bytes(key)
        write = self._writes.get(name)
        if write is not None:
            return to_bytes(write.value) if isinstance(write, Put) else None
        if name not in self._read:
            found = await self._kv.range(name, revision=self._revision)
            self._revision = self._revision or found.revision
            self._read[name] = found[0] if found else None
        item = self._read[name]
        return None if item is None else item.value

    async def range(self, key: Text, end: Text | None = None, *, prefix: bool = False) -> dict[bytes, bytes]:
        """Return keys and values of an interval, in order, with this transaction's own writes.

        Arguments:
            key, end, prefix: as for ``Client.range``.
        """
        found = await self._kv.range(key, end, prefix=prefix, revision=self._revision)
        self._revision = self._revision or found.revision
        self._read.update((item.key, item) for item in found)
        first, last = to_bytes(key), (prefix_end(to_bytes(key)) if prefix else to_bytes(end or b""))
        self._intervals.append((first, last))
        values = {item.key: item.value for item in found}
        for name, write in self._writes.items():
            if _is_inside(name, first, last):
                values.pop(name, None)
                if isinstance(write, Put):
                    values[name] = to_bytes(write.value)
        return dict(sorted(values.items()))

    def put(self, key: Text, value: Text, *, lease: LeaseLike | None = None) -> None:
        """Write a key, if and when the transaction is committed.

        Arguments:
            key, value: text is written as UTF-8.
            lease: the key ends with it.
        """
        self._writes[to_bytes(key)] = Put(key, value, lease)

    def delete(self, key: Text) -> None:
        """Delete a key, if and when the transaction is committed."""
        self._writes[to_bytes(key)] = Delete(key)

    def conditions(self) -> list[Compare]:
        """Return what must still hold: every key as it was read, nothing new in the intervals."""
        unchanged = [
            mod_revision(key) == (0 if item is None else item.mod_revision) for key, item in self._read.items()
        ]
        nothing_new = [mod_revision(first, last) < self._revision + 1 for first, last in self._intervals]
        return unchanged + nothing_new

    async def commit(self, fence: FenceLike | None, timeout_s: float | None) -> bool:
        """Write; False: something that was read has changed.

        Arguments:
            fence: commit only while this lock or term is held.
            timeout_s: None: the client's.
        """
        if not self._writes:
            return True  # reads of one revision need no more
        txn = Txn(self._scope, fence).when(*self.conditions()).then(*self._writes.values())
        return (await txn.commit(timeout_s=timeout_s)).succeeded


def _is_inside(key: bytes, first: bytes, last: bytes) -> bool:
    if not last:
        return key == first
    return key >= first and (last == FROM_KEY or key < last)


class Txns(Part):
    """Transactions, their conditions, and functions that run as one."""

    version = staticmethod(operations.version)
    value = staticmethod(operations.value)
    create_revision = staticmethod(operations.create_revision)
    mod_revision = staticmethod(operations.mod_revision)
    lease_of = staticmethod(operations.lease_of)

    def txn(self, *, fence: FenceLike | None = None) -> Txn:
        """Begin a transaction; ``fence`` makes it depend on a lock or term that must still be held."""
        return Txn(self.scope, fence)

    async def stm(
        self,
        function: Callable[[Transaction], Awaitable[Result]],
        *,
        retries: int = RETRIES,
        fence: FenceLike | None = None,
        timeout_s: float | None = None,
    ) -> Result:
        """Run a function as a transaction; returns what it returns.

        Arguments:
            function: reads and writes through its argument; an exception of it ends the transaction without writes.
            retries: attempts while others interfere.
            fence: commit only while this lock or term is held.
            timeout_s: of each commit; None: the client's.

        Raises:
            TxnConflict: others interfered every time; nothing was written.
            FenceLost: the lock or term is over; nothing was written.
            StatusError: the cluster refused, or it is unknown what happened: see ``definite``.
        """
        backoff = Backoff(base_s=0.001, max_s=0.1)
        for _ in range(retries):
            attempt = Transaction(self.scope)
            try:
                result = await function(attempt)
                if await attempt.commit(fence, timeout_s):
                    return result
            except CompactedError:
                pass  # it took longer to read than the cluster keeps history: from the start, then
            await backoff.wait()
        raise TxnConflict(CONFLICT.format(retries))
