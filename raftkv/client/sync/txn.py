"""Transactions for programs without an event loop; see ``kv.txn`` for what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from raftkv.client.kv import txn as aio_txn
from raftkv.client.sync.blocking import Blocking, taskless

if TYPE_CHECKING:
    from raftkv.client.kv.compares import Compare
    from raftkv.client.kv.guards import LeaseLike
    from raftkv.client.kv.operations import Operation
    from raftkv.client.space import Space
    from raftkv.client.values import TxnResult
    from raftkv.pb import rpc_pb2

T = TypeVar("T")


class Txn(Blocking[aio_txn.Txn]):
    """A transaction to be filled and committed; each method returns it again. Made by ``Client.txn``."""

    def when(self, *conditions: Compare) -> Txn:
        """Add conditions; all must hold. Without any, ``then`` is what happens.

        Raises:
            TypeError: something that is no condition, as ``kv.version("a")`` without a relation.
        """
        self._inner.when(*conditions)
        return self

    def then(self, *operations: Operation) -> Txn:
        """Add operations for the case that the conditions hold; a txn can be one."""
        self._inner.then(*map(_plain, operations))
        return self

    def otherwise(self, *operations: Operation) -> Txn:
        """Add operations for the other case."""
        self._inner.otherwise(*map(_plain, operations))
        return self

    commit = taskless(aio_txn.Txn.commit)

    # ---- as an operation of another one, as which it is taken out of its blocking twin

    @property
    def writes(self) -> bool:
        """Whether it may change the store."""
        return self._inner.writes

    def leases(self) -> tuple[LeaseLike | None, ...]:
        """Leases that its operations rely on."""
        return self._inner.leases()

    def to_message(self, space: Space) -> rpc_pb2.RequestOp:
        """Return its message in another txn."""
        return self._inner.to_message(space)

    def from_message(self, response: rpc_pb2.ResponseOp, space: Space, revision: int) -> TxnResult:
        """Return its result from the response of another txn.

        Arguments:
            response: of the member.
            space: keys as the client sees them.
            revision: of the store after the txn.
        """
        return self._inner.from_message(response, space, revision)


def _plain(operation: Operation) -> Operation:
    return operation.target()[1] if isinstance(operation, Txn) else operation
