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
from types import TracebackType
from typing import TYPE_CHECKING

from raftkv.client.contender import Contender, Ground, within
from raftkv.client.errors import LockLost, LockNotFree
from raftkv.client.interrupts import Interrupt
from raftkv.client.lease import Lease, Leases
from raftkv.client.space import Text
from raftkv.errors import StatusError

if TYPE_CHECKING:
    from raftkv.client.session import Session


class Lock:
    """One lock of one holder; made by ``Client.lock``. Not reentrant, and used by one task at a time."""

    def __init__(
        self, ground: Locks, name: Text, ttl: float, lease: Lease | Session | None, *, interrupt: bool = True
    ) -> None:
        self.name = name
        self._ground = ground
        self._ttl = ttl
        self._given = lease
        self._interrupts = interrupt
        self._lease: Lease | None = None
        self._place: Contender | None = None
        self._held = False
        self._block: Interrupt | None = None

    # ---- what a holder sees

    @property
    def lease(self) -> Lease:
        """The lease that it lives by.

        Raises:
            LockLost: it is not held.
        """
        if self._lease is None:
            raise LockLost(b"", 0, "it is not held")
        return self._lease

    @property
    def key(self) -> bytes:
        """Its key, as the client sees it; empty while it is not held."""
        return self._place.key if self._place is not None else b""

    @property
    def guard_key(self) -> bytes:
        """Its key, as the store knows it; empty while it is not held."""
        return self._place.guard_key if self._place is not None else b""

    @property
    def fence(self) -> int:
        """The fencing token: the create revision of its key; 0 while it is not held."""
        return self._place.fence if self._place is not None else 0

    @property
    def held(self) -> bool:
        """Whether it can be relied on, as far as this client knows."""
        return self._held and self._lease is not None and self._lease.alive

    def check(self) -> None:
        """Raise ``LeaseLost`` or ``LockLost`` if it cannot be relied on."""
        if not self._held:
            raise LockLost(self.guard_key, self.fence, "it is not held")
        self.lease.check()

    def broken(self) -> LockLost:
        """The cluster has found its key gone or changed: it is not held any more."""
        self._held = False
        return LockLost(self.guard_key, self.fence)

    # ---- taking and giving back

    async def acquire(self, timeout_s: float | None = None) -> Lock:
        """Wait for it.

        Arguments:
            timeout_s: None: as long as it takes.

        Raises:
            LockNotFree: others had it all that time.
            LeaseLost: the lease ended while waiting.
            StatusError: the cluster refused, or could not be reached to begin with.
        """
        try:
            await within(timeout_s, self._acquire())
        except LockNotFree:
            raise
        except TimeoutError:
            raise LockNotFree(self.name, timeout_s) from None
        return self

    async def try_acquire(self) -> bool:
        """Take it if nobody has it; False: somebody has."""
        return await self._acquire(wait=False)

    async def _acquire(self, wait: bool = True) -> bool:
        if self._place is not None:
            raise LockNotFree(self.name, None, "by this very object")
        try:
            return await self._stand_in_line(wait)
        except BaseException:
            await self._leave_quietly()
            raise

    async def _stand_in_line(self, wait: bool) -> bool:
        self._lease = lease = await self._get_lease()
        self._place = place = Contender(self._ground, self.name, lease, LockLost)
        mark = secrets.token_hex(8)
        with lease.interrupting():
            found = await place.enqueue(mark)
            if found is not None and found.value != mark.encode():
                place.fence = 0
                raise LockNotFree(self.name, None, "with the same lease")
            if wait:
                await place.wait_turn()
            elif (await place.predecessor())[0] is not None:
                await self._leave_quietly()
                return False
        lease.check()
        self._held = True
        return True

    async def _get_lease(self) -> Lease:
        if self._given is None:
            return await self._ground.lease(self._ttl)
        lease = self._given if isinstance(self._given, Lease) else self._given.lease
        lease.check()
        return lease

    async def release(self) -> None:
        """Give it back.

        Raises:
            LockLost: it was not held any more: somebody may have had it meanwhile.
            StatusError: the cluster could not be told; it ends with its lease.
        """
        place, was_held = self._place, self._held
        if place is None or self._lease is None:
            return
        self._place, self._held = None, False
        try:
            left = await place.leave()
        finally:
            await self._end_lease()
        if was_held and not left:
            raise place.lost()

    async def _leave_quietly(self) -> None:
        self._held = False
        try:
            await self.release()
        except StatusError:
            return  # its lease is not kept alive any more, or it is its owner's to end

    async def _end_lease(self) -> None:
        if self._given is None and self._lease is not None:
            try:
                await self._lease.revoke()
            except StatusError:
                return  # nobody keeps it alive: it ends with its TTL

    # ---- as a block

    async def __aenter__(self) -> Lock:
        await self.acquire()
        if self._interrupts:
            self._block = self.lease.interrupting()
            self._block.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block, self._block = self._block, None
        lease = self._lease
        try:
            if block is not None:
                block.__exit__(kind, error, trace)
        finally:
            if kind is not None or (lease is not None and lease.lost.is_set()):
                await self._leave_quietly()
            else:
                await self.release()
        if kind is None and lease is not None and lease.lost.is_set():
            lease.check()


class Locks(Leases, Ground):
    """The part of a client that locks."""

    def lock(
        self, name: Text, *, ttl: float = 10, lease: Lease | Session | None = None, interrupt: bool = True
    ) -> Lock:
        """A lock, to be taken by ``async with`` or ``acquire``.

        Arguments:
            name: those who use the same name exclude each other, also through other clients of etcd.
            ttl: seconds after which a holder that has died, or is cut off, loses it.
            lease: use this one instead of one of its own.
            interrupt: its block is interrupted when the lease is lost; else ``LeaseLost`` comes at the end.
        """
        return Lock(self, name, ttl, lease, interrupt=interrupt)
