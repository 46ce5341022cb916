"""Keys: put, get, range, delete, count; many at once; txns, also written as plain functions.

Translates Python arguments to etcd's messages. ``put`` and ``get`` of a single key are the hot path: a plain message,
one await, one small result.

    await kv.put("jobs/a", b"1", lease=lease)
    item = await kv.get("jobs/a")                 # KeyValue or None
    for item in await kv.range("jobs/", prefix=True, limit=100): ...

A write with ``fence=lock`` is a txn whose condition is that the lock is still held. A write is retried only if it
certainly did not happen; ``definite`` of an error says whether this is certain.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

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
    """Methods that read and write keys."""

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
            key, value: key and value; text is encoded as UTF-8.
            lease: lease that the key is attached to; None: no lease, also if the key had one.
            prev_kv: whether to return the key as it was before.
            ignore_value: whether to keep the value and change the lease.
            ignore_lease: whether to keep the lease and change the value.
            fence: write only while this lock or term is held, or while this generation of a run lasts.
            timeout_s: limit for all attempts together; None: the client's.

        Raises:
            LeaseLost: the lease is no longer safe to use; nothing was written.
            FenceLost: the lock or term has ended; nothing was written.
            StatusError: the cluster refused, or the outcome is unknown: see ``definite``.
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
            key: key to read.
            revision: revision to read at; 0: the current one.
            serializable: whether to read from one member without consulting the others: faster, but possibly stale.
            max_staleness_s: the member, which may be a learner, answers from its own state if that is certainly not
                older than this; otherwise it confirms the read with the others. None: every read is confirmed.
            timeout_s: as for ``put``.

        Raises:
            Compacted: the revision is compacted.
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
        """Read a range of keys in one answer; for a large range see ``pages``.

        Arguments:
            key: first key, or the prefix.
            end: end of the range, exclusive; ``"\\0"``: no end.
            prefix: whether to read all keys that begin with ``key``; ``""``: all keys.
            limit: maximum number of keys; 0: all.
            revision, serializable, max_staleness_s, timeout_s: as for ``get``.
            sort_by, descending: order of the keys; ascending by key by default.
            keys_only: whether to leave the values out.
            min_mod_revision, max_mod_revision: bounds of the last write's revision, inclusive; 0: no bound.
            min_create_revision, max_create_revision: bounds of the create revision, inclusive; 0: no bound.
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
        """Count the keys of a range; arguments as for ``range``.

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
        """Delete a key or a range of keys, in one revision.

        Arguments:
            key, end, prefix: as for ``range``.
            prev_kv: whether to return the deleted keys.
            fence, timeout_s: as for ``put``.

        Raises:
            FenceLost: the lock or term has ended; nothing was deleted.
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
# Many keys: puts and gets pipelined over one connection, and large ranges read in pages.
#
# ::
#
#     results = await kv.put_many({"a": b"1", "b": b"2"})
#     items = await kv.get_many(["a", "b", "missing"])                          # [KeyValue, KeyValue, None]
#     async for page in kv.pages("jobs/", prefix=True, page_size=1000): ...     # RangeResults
#     async for item in kv.scan("jobs/", prefix=True): ...                      # KeyValues
#
# Puts and gets are separate calls, not a transaction: each has its own revision, and their order is undefined. The
# first failure stops the rest, and is raised when the calls in progress have ended; completed calls are not undone.
#
# The first page fixes the revision, and all other pages are read at this revision. So the result is a consistent
# snapshot, however long it takes, from any member. A failed page is retried at another endpoint, like every
# read. Only time is limited: once the cluster has compacted the revision, the next page raises ``Compacted``.

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
"""Keys and values. The union is spelt out because mappings are invariant in their keys."""

WINDOW = 128
"""Concurrent calls: enough to fill a member's batches, far below its limit of streams."""
WINDOW_MAX = 10_000
"""Each call is a task; creating more of them would delay the keep-alives of the client's leases."""
PAGE_SIZE = 1000
"""Keys in a page: some 100 kB of short values."""


class Bulk(KV):
    """Methods for many keys."""

    async def put_many(
        self, items: Pairs, *, lease: LeaseLike | None = None, window: int = WINDOW, timeout_s: float | None = None
    ) -> list[PutResult]:
        """Write many keys; return the results in the order of ``items``.

        Arguments:
            items: keys and values; an iterator is consumed as calls complete.
            lease: lease of all keys.
            window: maximum number of concurrent calls, up to ``WINDOW_MAX``.
            timeout_s: limit of each call; None: the client's.

        Raises:
            StatusError: the first error; see ``definite``.
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
        """Read many keys; return them in order, with None for those that do not exist.

        Arguments:
            keys: keys to read; an iterator is consumed as calls complete.
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
        """Read a range of keys in pages.

        Arguments:
            key, end, prefix, keys_only, serializable: as for ``range``.
            page_size: maximum number of keys in a page; the first has at most 100, large values reduce it to a few MB.
            revision: revision to read at; 0: the current one.
            timeout_s: limit for each page; None: the client's.

        Raises:
            Compacted: the revision is compacted.
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
        """Read a range of keys in pages and yield them one by one; arguments and errors are those of ``pages``.

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
    """Call a function for each item, at most ``window`` at once; return the results in order.

    Arguments:
        call: function to call.
        given: arguments, one for each call.
        window: maximum number of concurrent calls.
    """
    if not 1 <= whole(window, "window") <= WINDOW_MAX:
        raise ValueError(f"window is a number from 1 to {WINDOW_MAX}, not {window}")
    results: dict[int, Result] = {}
    failures: list[Exception] = []
    numbered = enumerate(given)

    async def work() -> None:
        while not failures:
            try:
                drawn = next(numbered, None)
                if drawn is None:
                    return
                results[drawn[0]] = await call(drawn[1])
            except Exception as error:  # from a call, or from the iterator itself
                failures.append(error)

    async with asyncio.TaskGroup() as group:
        for _ in range(window):
            group.create_task(work())
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(results))]


# -- txn ------------------------------------------------------------------------------------------------------------
#
# Transactions: conditions, operations for when they hold, and operations for when they do not; all at one revision.
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
# A txn can contain other txns as operations. A read-only txn is retried at another endpoint if necessary; one that
# writes is retried only if it certainly did not happen.


class Txn(Operation):
    """A transaction under construction; each method returns the same object.

    Arguments:
        scope: client or view that commits it; None for one that is only used inside another.
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
        """Add conditions; all must hold. Without conditions, ``then`` is executed.

        Raises:
            TypeError: an argument is not a condition, for example ``kv.version("a")`` without a comparison.
        """
        for condition in conditions:
            if not isinstance(condition, Compare):
                raise TypeError(f"when() takes conditions as kv.version(key) == 0, not {condition!r}")
        self._compares += conditions
        return self

    def then(self, *operations: Operation) -> Txn:
        """Add operations to execute if the conditions hold.

        Raises:
            TypeError: an argument is not an operation.
        """
        self._then += map(_checked, operations)
        return self

    def otherwise(self, *operations: Operation) -> Txn:
        """Add operations to execute if a condition does not hold.

        Raises:
            TypeError: an argument is not an operation.
        """
        self._otherwise += map(_checked, operations)
        return self

    async def commit(self, *, timeout_s: float | None = None) -> TxnResult:
        """Execute the transaction; the result unpacks to ``succeeded, results``.

        Arguments:
            timeout_s: limit for all attempts together; None: the client's.

        Raises:
            LeaseLost: the lease of an operation is no longer safe to use; nothing was written.
            FenceLost: the lock or term has ended; nothing was written.
            StatusError: the cluster refused, or the outcome is unknown: see ``definite``.
        """
        scope = self._scope
        if scope is None:
            raise TypeError("a txn without a client can only be an operation of another; begin with kv.txn()")
        method = methods.TXN if self.writes else methods.READ_TXN
        try:
            answer = await scope.call(method, self._guarded(scope.space), timeout_s)
        except LeaseNotFoundError:
            raise lost_lease(self.leases()) or LeaseNotFoundError() from None
        scope.keeper.heard_of(answer.header.cluster_id)
        return self._unguarded(answer, scope.space)

    # A fence wraps the txn in another one, so that its failure differs from a condition that does not hold.

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
        """Whether the txn may change the store; etcd counts every txn inside another one as a write."""
        operations = self._then + self._otherwise
        return any(operation.writes or isinstance(operation, Txn) for operation in operations)

    def leases(self) -> tuple[LeaseLike | None, ...]:
        """The leases that the operations use."""
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
    """Return a new transaction for use inside another."""
    return Txn()


# -- stm ------------------------------------------------------------------------------------------------------------
#
# Transactions written as plain code, retried until no other writer interferes.
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
# Serializable: all reads are at one revision, and the writes happen only if nothing that was read has changed since.
# Otherwise the function runs again after a short random pause, so it must have no side effects outside the
# transaction. A range that was read is also guarded against new keys. At most 128 keys can be read, and 128 written.
#
# If the outcome of the writes is unknown, the error is raised without another attempt.


RETRIES = 100
"""Attempts before ``TxnConflict``."""
CONFLICT = "others changed what the transaction had read, {} times in a row; nothing was written"


class Transaction:
    """One attempt: the keys read so far, and the pending writes."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._kv = KV(scope)
        self._revision = 0
        self._read: dict[bytes, KeyValue | None] = {}
        self._intervals: list[tuple[bytes, bytes]] = []
        self._writes: dict[bytes, Operation] = {}

    async def get(self, key: Text) -> bytes | None:
        """Return the value of a key, pending writes included; None: it does not exist."""
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
        """Return the keys and values of a range, in order, pending writes included.

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
        """Write a key when the transaction is committed.

        Arguments:
            key, value: key and value; text is encoded as UTF-8.
            lease: lease that the key is attached to.
        """
        self._writes[to_bytes(key)] = Put(key, value, lease)

    def delete(self, key: Text) -> None:
        """Delete a key when the transaction is committed."""
        self._writes[to_bytes(key)] = Delete(key)

    def conditions(self) -> list[Compare]:
        """Return the conditions of the commit: the keys read are unchanged, and the ranges have no new keys."""
        unchanged = [
            mod_revision(key) == (0 if item is None else item.mod_revision) for key, item in self._read.items()
        ]
        nothing_new = [mod_revision(first, last) < self._revision + 1 for first, last in self._intervals]
        return unchanged + nothing_new

    async def commit(self, fence: FenceLike | None, timeout_s: float | None) -> bool:
        """Commit the writes; return False if something that was read has changed.

        Arguments:
            fence: commit only while this lock or term is held.
            timeout_s: None: the client's.
        """
        if not self._writes:
            return True  # reads at one revision need no commit
        txn = Txn(self._scope, fence).when(*self.conditions()).then(*self._writes.values())
        return (await txn.commit(timeout_s=timeout_s)).succeeded


def _is_inside(key: bytes, first: bytes, last: bytes) -> bool:
    if not last:
        return key == first
    return key >= first and (last == FROM_KEY or key < last)


class Txns(Part):
    """Methods for transactions, their conditions, and functions that run as transactions."""

    version = staticmethod(operations.version)
    value = staticmethod(operations.value)
    create_revision = staticmethod(operations.create_revision)
    mod_revision = staticmethod(operations.mod_revision)
    lease_of = staticmethod(operations.lease_of)

    def txn(self, *, fence: FenceLike | None = None) -> Txn:
        """Return a new transaction; with ``fence``, it commits only while that lock or term is held."""
        return Txn(self.scope, fence)

    async def stm(
        self,
        function: Callable[[Transaction], Awaitable[Result]],
        *,
        retries: int = RETRIES,
        fence: FenceLike | None = None,
        timeout_s: float | None = None,
    ) -> Result:
        """Run a function as a transaction; return its result.

        Arguments:
            function: reads and writes through its argument; if it raises, nothing is written.
            retries: maximum number of attempts when other writers interfere.
            fence: commit only while this lock or term is held.
            timeout_s: limit of each commit; None: the client's.

        Raises:
            TxnConflict: other writers interfered at every attempt; nothing was written.
            FenceLost: the lock or term has ended; nothing was written.
            StatusError: the cluster refused, or the outcome is unknown: see ``definite``.
        """
        backoff = Backoff(base_s=0.001, max_s=0.1)
        for _ in range(retries):
            attempt = Transaction(self.scope)
            try:
                result = await function(attempt)
                if await attempt.commit(fence, timeout_s):
                    return result
            except CompactedError:
                pass  # the revision was compacted before all reads were done: start again
            await backoff.wait()
        raise TxnConflict(CONFLICT.format(retries))
