"""Locks with fencing.

::

    async with kv.lock("name", ttl=10) as lock:
        await kv.put("x", b"y", fence=lock)        # written only while the lock is still held
        lock.fence                                 # a number that grows with every holder: hand it to other systems

    lock = kv.lock("name")
    if await lock.try_acquire(): ...

A lock cannot keep a process that was stopped from believing that it holds it; only the store that is written to can.
So writes that matter carry ``fence=lock``: the cluster checks within the write that the lock's key still has the
create revision of this holder, and refuses it otherwise (``LockLost``). Other stores can compare ``lock.fence``.

The block is interrupted with ``LeaseLost`` when the lease is lost, and raises ``LockLost`` at its end if somebody took
the key away. Each lock has a lease of its own, unless it is given one: a lease can be in the line for a name only once.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from raftkv.client.errors import LockLost, LockNotFree
from raftkv.client.lease.lease import Lease
from raftkv.client.lock.contender import Contender
from raftkv.client.lock.holder import Holder
from raftkv.client.scope import Part
from raftkv.client.space import Text

if TYPE_CHECKING:
    from raftkv.client.lease.session import Session


class Lock(Holder):
    """One lock of one holder; made by ``Client.lock``. Not reentrant, and used by one task at a time."""

    _error = LockLost

    @property
    def held(self) -> bool:
        """Whether it can be relied on, as far as this client knows."""
        return self._reliable

    async def acquire(self, timeout_s: float | None = None) -> Lock:
        """Wait for it.

        Arguments:
            timeout_s: None: as long as it takes.

        Raises:
            LockNotFree: others had it all that time.
            LeaseLost: the lease ended while waiting.
            LockLost: somebody took its key away while it waited.
            StatusError: the cluster refused, or could not be reached to begin with.
        """
        await self._enter(timeout_s)
        return self

    async def try_acquire(self) -> bool:
        """Take it if nobody has it; False: somebody has."""
        return await self._try_to_enter(wait=False)

    async def release(self) -> None:
        """Give it back; does nothing if it is not held.

        Raises:
            LockLost: it was not held any more: somebody may have had it meanwhile.
            StatusError: the cluster could not be told; it ends with its lease.
        """
        await self._leave()

    async def _join(self, place: Contender) -> None:
        # The mark tells a key of this very attempt, put by a call whose answer was lost, from another's.
        mark = secrets.token_hex(8)
        found = await place.enqueue(mark)
        if found is not None and found.value != mark.encode():
            place.fence = 0
            raise LockNotFree(self.name, None, "with the same lease")


class Locks(Part):
    """Locks."""

    def lock(
        self, name: Text, *, ttl: float = 10, lease: Lease | Session | None = None, interrupt: bool = True
    ) -> Lock:
        """Make a lock, to be taken by ``async with`` or ``acquire``.

        Arguments:
            name: those who use the same name exclude each other, also through other clients of etcd.
            ttl: seconds after which a holder that has died, or is cut off, loses it.
            lease: use this one instead of one of its own.
            interrupt: its block is interrupted when the lease is lost; else ``LeaseLost`` comes at the end.
        """
        return Lock(self.scope, name, ttl, lease, interrupt=interrupt)
