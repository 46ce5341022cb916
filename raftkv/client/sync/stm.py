"""Transactions written as plain code, for programs without an event loop; see ``stm`` for what they guarantee.

::

    def move(tx):
        a, b = int(tx.get("a") or 0), int(tx.get("b") or 0)
        tx.put("a", str(a - 1))
        tx.put("b", str(b + 1))

    kv.stm(move)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from raftkv.client.errors import TxnConflict
from raftkv.client.kv import stm as aio_stm
from raftkv.client.kv.stm import RETRIES
from raftkv.client.rpc.retry import Backoff
from raftkv.client.sync.blocking import Blocking, blocking
from raftkv.errors import CompactedError

if TYPE_CHECKING:
    from raftkv.client.kv.guards import FenceLike, LeaseLike
    from raftkv.client.scope import Scope
    from raftkv.client.space import Text
    from raftkv.client.sync.loop import LoopThread

T = TypeVar("T")

__all__ = ["RETRIES", "Transaction", "run_stm"]


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
            result = _plain(function(Transaction(owner, loop, attempt)))
            if loop.run(attempt.commit(fence, timeout_s)):
                return result
        except CompactedError:
            pass  # it took longer to read than the cluster keeps history: from the start, then
        loop.run(backoff.wait())
    raise TxnConflict(f"others changed what the transaction had read, {retries} times in a row; nothing was written")


def _plain(result: T) -> T:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("stm() takes a plain function here; one with async is for the stm() of raftkv.aio")
    return result
