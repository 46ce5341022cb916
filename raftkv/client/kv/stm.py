"""Transactions written as plain code, tried again until nobody interfered.

::

    async def move(tx):
        a, b = int(await tx.get("a") or 0), int(await tx.get("b") or 0)
        tx.put("a", str(a - 1))
        tx.put("b", str(b + 1))

    await kv.stm(move)

Serializable: all reads are of one revision, and the writes happen only if nothing that was read has changed since. Else
the function runs again, after a short random pause; so it must have no effects but those on the transaction. What was
read from an interval is guarded against new keys in it, too. At most 128 keys can be read, and 128 written.

If it is unknown whether the writes happened, the error is raised as it is: it is never tried again then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from raftkv.client.errors import TxnConflict
from raftkv.client.keys import FROM_KEY, Text, prefix_end, to_bytes
from raftkv.client.kv import compares
from raftkv.client.kv.compares import Compare, FenceLike, LeaseLike, mod_revision
from raftkv.client.kv.kv import KV
from raftkv.client.kv.operations import Delete, Operation, Put
from raftkv.client.kv.txn import Txn
from raftkv.client.rpc.retry import Backoff
from raftkv.client.scope import Part, Scope
from raftkv.client.values import KeyValue
from raftkv.errors import CompactedError

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

    version = staticmethod(compares.version)
    value = staticmethod(compares.value)
    create_revision = staticmethod(compares.create_revision)
    mod_revision = staticmethod(compares.mod_revision)
    lease_of = staticmethod(compares.lease_of)

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
