"""Transactions: conditions, what to do if they hold, what to do otherwise; all of it at one revision.

::

    ok, results = await (
        kv.txn()
        .when(kv.version("jobs/a") == 0)
        .then(put("jobs/a", b"1"), get_range("jobs/", prefix=True))
        .otherwise(get("jobs/a"))
        .commit()
    )

A txn can be an operation of another one. One that only reads is repeated at another endpoint if need be; one that
writes is not, unless it certainly did not happen.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from raftkv.client.errors import TxnConflict
from raftkv.client.kv import operations
from raftkv.client.kv.kv import KV
from raftkv.client.kv.operations import (
    Compare,
    Delete,
    FenceLike,
    LeaseLike,
    Operation,
    Put,
    fence_compares,
    lost_lease,
    mod_revision,
)
from raftkv.client.rpc import methods
from raftkv.client.rpc.retry import Backoff
from raftkv.client.scope import FROM_KEY, Part, Scope, Space, Text, prefix_end, to_bytes
from raftkv.client.values import KeyValue, TxnResult
from raftkv.errors import CompactedError, LeaseNotFoundError
from raftkv.pb import rpc_pb2


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
        return TxnResult(answer.succeeded, results, revision)


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

Result = TypeVar("Result")

RETRIES = 100
"""Attempts before ``TxnConflict``."""


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
        raise TxnConflict(
            f"others changed what the transaction had read, {retries} times in a row; nothing was written"
        )
