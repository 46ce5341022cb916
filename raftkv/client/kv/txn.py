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

from raftkv.client.keys import Space
from raftkv.client.kv.compares import Compare, FenceLike, LeaseLike, fence_compares, lost_lease
from raftkv.client.kv.operations import Operation
from raftkv.client.rpc import methods
from raftkv.client.scope import Scope
from raftkv.client.values import TxnResult
from raftkv.errors import LeaseNotFoundError
from raftkv.pb import rpc_pb2


class Txn:
    """A transaction to be filled and committed; each method returns it again.

    Arguments:
        scope: the client or view that commits it; None for one that is only put inside another.
        fence: commit only while this lock or term is held; None: the scope's.
    """

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
        """Return the result of the answer.

        Arguments:
            answer: of the member.
            space: keys as the client sees them.
            revision: of the store after the txn.
        """
        operations = self._then if answer.succeeded else self._otherwise
        pairs = zip(operations, answer.responses, strict=True)
        results = tuple([operation.from_message(response, space, revision) for operation, response in pairs])
        return TxnResult(answer.succeeded, results, revision)

    def to_message(self, space: Space) -> rpc_pb2.RequestOp:
        """Return its message in another txn."""
        return rpc_pb2.RequestOp(request_txn=self.request(space))

    def from_message(self, response: rpc_pb2.ResponseOp, space: Space, revision: int) -> TxnResult:
        """Return its result from the response of another txn.

        Arguments:
            response: of the member.
            space: keys as the client sees them.
            revision: of the store after the txn.
        """
        return self.result(response.response_txn, space, revision)


def _checked(operation: Operation) -> Operation:
    if not hasattr(operation, "to_message"):
        raise TypeError(f"then() and otherwise() take operations as put(key, value), not {operation!r}")
    return operation


def txn() -> Txn:
    """Make a transaction to be put inside another."""
    return Txn()
