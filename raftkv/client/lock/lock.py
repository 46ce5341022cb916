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
from typing import TYPE_CHECKING, ClassVar, Self

from raftkv.client.arguments import limit
from raftkv.client.errors import FenceLost, LockLost, LockNotFree
from raftkv.client.interrupts import Interrupt, farewell_s, seen_through
from raftkv.client.keys import Text
from raftkv.client.lease.lease import Lease, checked_ttl
from raftkv.client.lock.contender import Contender, within
from raftkv.client.rpc.retry import is_transient
from raftkv.client.scope import Part, Scope
from raftkv.errors import StatusError

if TYPE_CHECKING:
    from raftkv.client.lease.session import Session

# -- holder ---------------------------------------------------------------------------------------------------------
#
# What a lock and a term have in common: an entry of a queue, the lease it depends on, the block that it lasts.
#
# Subclasses say how they enter the queue (``_join``) and give the steps their names.


class Holder:
    """A lock or a term, held or not."""

    _error: ClassVar[type[FenceLost]] = FenceLost
    _not_first = "it is not held"

    def __init__(
        self, scope: Scope, name: Text, ttl: float, lease: Lease | Session | None, *, interrupt: bool = True
    ) -> None:
        self.name = name
        self._scope = scope
        self._ttl = checked_ttl(ttl)
        self._given = lease
        if lease is not None and not hasattr(lease, "check"):
            raise TypeError(f"lease= takes a lease or a session of this client, not {lease!r}")
        self._interrupts = interrupt
        self._lease: Lease | None = None
        self._place: Contender | None = None
        self._first = False
        self._is_entering = False
        self._block: Interrupt | None = None

    def __repr__(self) -> str:
        state = f"held, fence {self.fence}" if self._first else "waiting" if self.fence else "not held"
        return f"<{type(self).__name__} {self.name!r}: {state}>"

    # ---- what its owner sees

    @property
    def lease(self) -> Lease:
        """The lease that it lives by, or did.

        Raises:
            FenceLost: it never had one.
        """
        if self._lease is None:
            raise self._error(b"", 0, self._not_first)
        return self._lease

    @property
    def key(self) -> bytes:
        """Its key, as the client sees it; empty while it is not in the queue."""
        return self._place.key if self._place is not None else b""

    @property
    def guard_key(self) -> bytes:
        """Its key, as the store knows it; empty while it is not in the queue."""
        return self._place.guard_key if self._place is not None else b""

    @property
    def fence(self) -> int:
        """The fencing token: the create revision of its key; 0 while it is not in the queue."""
        return self._place.fence if self._place is not None else 0

    def check(self) -> None:
        """Raise ``LeaseLost`` or ``FenceLost`` if it cannot be relied on."""
        if not self._first:
            raise self._error(self.guard_key, self.fence, self._not_first)
        self.lease.check()

    def broken(self) -> FenceLost:
        """Note that the cluster has found its key gone or changed; returns the error to raise."""
        self._first = False
        return self._error(self.guard_key, self.fence)

    @property
    def _reliable(self) -> bool:
        return self._first and self._lease is not None and self._lease.alive

    # ---- into the queue and out of it

    async def _join(self, place: Contender) -> None:
        """Enter the queue."""
        raise NotImplementedError

    async def _enter(self, timeout_s: float | None) -> None:
        timeout_s = limit(timeout_s, "timeout_s")
        try:
            await within(timeout_s, self._try_to_enter(wait=True))
        except LockNotFree:
            raise
        except TimeoutError:
            raise LockNotFree(self.name, timeout_s) from None

    async def _try_to_enter(self, *, wait: bool) -> bool:
        if self._place is not None or self._is_entering:
            raise LockNotFree(self.name, None, "by this very object; make one for each thread or task that wants it")
        self._is_entering = True
        try:
            return await self._stand_in_line(wait)
        except BaseException as error:
            self._first = False
            await self._leave_quietly(self._farewell_s(error))
            raise
        finally:
            self._is_entering = False

    async def _stand_in_line(self, wait: bool) -> bool:
        self._lease = lease = await self._get_lease()
        self._place = place = Contender(self._scope, self.name, lease, self._error)
        with lease.interrupting():
            await self._join(place)
            if wait:
                await place.wait_turn()
            elif (await place.predecessor())[0] is not None:
                await self._leave_quietly()
                return False
        lease.check()
        self._first = True
        return True

    async def _get_lease(self) -> Lease:
        if self._given is None:
            return await Lease(self._scope, self._ttl)
        lease = self._given if isinstance(self._given, Lease) else self._given.lease
        lease.check()
        return lease

    async def _leave(self, timeout_s: float | None = None) -> None:
        """Give it back.

        Arguments:
            timeout_s: None: the client's.

        Raises:
            FenceLost: it was not held any more: somebody may have had it meanwhile.
            StatusError: the cluster could not be told; it ends with its lease.
        """
        place, was_first = self._place, self._first
        self._place, self._first = None, False
        if place is not None:
            await seen_through(self._give_back(place, timeout_s, was_first=was_first))

    async def _give_back(self, place: Contender, timeout_s: float | None, *, was_first: bool) -> None:
        try:
            left = await place.leave(timeout_s)
        except StatusError as error:
            if is_transient(error):  # nobody would answer now either
                self._stop_lease()
            raise
        finally:
            await self._end_lease(timeout_s)
        if was_first and not left:
            raise place.lost()

    def _farewell_s(self, error: BaseException | None) -> float | None:
        """How long to try: with a lease of its owner's, which may live on, a key that stays would block the others."""
        return farewell_s(error) if self._given is None else None

    def _stop_lease(self) -> None:
        if self._given is None and self._lease is not None:
            self._lease.stop()

    async def _end_lease(self, timeout_s: float | None) -> None:
        if self._given is None and self._lease is not None:
            try:
                await self._lease.revoke(timeout_s)
            except StatusError:
                return  # nobody keeps it alive: it ends with its TTL

    async def _leave_quietly(self, timeout_s: float | None = None) -> None:
        self._first = False
        try:
            await self._leave(timeout_s)
        except StatusError:
            return  # its lease is not kept alive any more, or it is its owner's to end

    # ---- as a block

    async def __aenter__(self) -> Self:
        await self._enter(None)
        if self._interrupts:
            self._block = self.lease.interrupting()
            self._block.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block, self._block = self._block, None
        is_lost = self._lease is not None and self._lease.lost.is_set()
        try:
            if block is not None:
                block.__exit__(kind, error, trace)
        finally:
            if kind is not None or is_lost:
                await self._leave_quietly(self._farewell_s(error))
            else:
                await self._leave()
        if is_lost and kind is None:
            self.lease.check()


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
