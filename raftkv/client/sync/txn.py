"""Transactions for programs without an event loop; see ``kv.txn`` for what they mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from raftkv.client.errors import TxnConflict
from raftkv.client.kv import stm as aio_stm
from raftkv.client.kv import txn as aio_txn
from raftkv.client.rpc.retry import Backoff
from raftkv.client.sync.blocking import Blocking, blocking, taskless
from raftkv.errors import CompactedError

if TYPE_CHECKING:
    from raftkv.client.keys import Space, Text
    from raftkv.client.kv.compares import Compare, FenceLike, LeaseLike
    from raftkv.client.kv.operations import Operation
    from raftkv.client.scope import Scope
    from raftkv.client.sync.loop import LoopThread
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


# -- stm ------------------------------------------------------------------------------------------------------------
#
# Transactions written as plain code, for programs without an event loop; see ``stm`` for what they guarantee.
#
# ::
#
#     def move(tx):
#         a, b = int(tx.get("a") or 0), int(tx.get("b") or 0)
#         tx.put("a", str(a - 1))
#         tx.put("b", str(b + 1))
#
#     kv.stm(move)


class Transaction(Blocking[aio_stm.Transaction]):
    """One attempt: what it has read, and what it will write."""

    get = blocking(aio_stm.Transaction.get)
    range = blocking(aio_stm.Transaction.range)

    def put(self, key: Text, value: Text, *, lease: LeaseLike | None = None) -> None:
        """Write a key, if and when the transaction is committed.

        Arguments:
            key, value: text is written as UTF-8.
            lease: the key ends with it.
        """
        self._inner.put(key, value, lease=lease)

    def delete(self, key: Text) -> None:
        """Delete a key, if and when the transaction is committed."""
        self._inner.delete(key)


def run_stm(
    owner: object,
    loop: LoopThread,
    scope: Scope,
    function: Callable[[Transaction], T],
    retries: int,
    fence: FenceLike | None,
    timeout_s: float | None,
) -> T:
    """``Client.stm``: the function runs on the caller's thread, so the attempts are counted here.

    Arguments:
        owner: the client.
        loop, scope: where the transaction runs.
        function, retries, fence, timeout_s: as for ``Client.stm``.

    Raises:
        TypeError: the function is a coroutine function, nothing of which would be run.
    """
    backoff = Backoff(base_s=0.001, max_s=0.1)
    for _ in range(retries):
        attempt = aio_stm.Transaction(scope)
        try:
            result = _awaited_result(function(Transaction(owner, loop, attempt)))
            if loop.run(attempt.commit(fence, timeout_s)):
                return result
        except CompactedError:
            pass  # it took longer to read than the cluster keeps history: from the start, then
        loop.run(backoff.wait())
    raise TxnConflict(f"others changed what the transaction had read, {retries} times in a row; nothing was written")


def _awaited_result(result: T) -> T:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("stm() takes a plain function here; one with async is for the stm() of raftkv.aio")
    return result
