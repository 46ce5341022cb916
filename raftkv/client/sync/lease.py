"""Leases for programs without an event loop.

::

    with kv.lease(ttl=10) as lease:                 # granted, kept alive by the client's thread, revoked at the end
        kv.put("workers/1", b"here", lease=lease)
        lease.check()                               # raises LeaseLost if it cannot be relied on any more

A block is not interrupted when its lease is lost, as one with ``async`` is: a thread cannot be. So the loss shows in
every call that relies on the lease (``lease=``), by ``check()``, by ``lost`` (a ``threading.Event``), by
``on_lost`` callbacks, and in any case by ``LeaseLost`` at the end of the block.

After fork the child neither keeps alive nor gives back what its parent holds; using it there raises ``Forked``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar

from raftkv.client import lock as aio_lock
from raftkv.client.arguments import function
from raftkv.client.errors import LeaseLost
from raftkv.client.lease import lease as aio_lease
from raftkv.client.lease import session as aio_session
from raftkv.client.sync.blocking import Blocking, Held, blocking, taking
from raftkv.client.sync.loop import CallbackQueue, LoopThread


class Lease(Held[aio_lease.Lease]):
    """One lease; made by ``Client.lease``, granted by ``with`` or ``grant()``.

    Attributes:
        lost: set when it is lost; wait for it from any thread.
    """

    def __init__(self, owner: object, loop: LoopThread, inner: aio_lease.Lease) -> None:
        super().__init__(owner, loop, inner)
        self.lost = threading.Event()
        self._ask(lambda lease: lease.on_lost(lambda _: self.lost.set()))

    @property
    def id(self) -> int:
        """Its id in the cluster; 0 until it is granted."""
        return self._inner.id

    @property
    def ttl(self) -> int:
        """Seconds that the cluster has granted; until then those asked for."""
        return self._inner.ttl

    @property
    def remaining_s(self) -> float:
        """Seconds for which it certainly still lives, unless it is revoked; 0: none."""
        return self._ask(lambda lease: lease.remaining_s)

    @property
    def alive(self) -> bool:
        """Whether it can be relied on."""
        return self._ask(lambda lease: lease.alive)

    grant = taking(aio_lease.Lease.grant, aio_lease.Lease.revoke)

    revoke = blocking(aio_lease.Lease.revoke)
    info = blocking(aio_lease.Lease.info)

    def stop(self, reason: str = "it is not kept alive any more") -> None:
        """Keep it alive no longer, and leave it to its TTL."""
        self._ask(lambda lease: lease.stop(reason))

    def check(self) -> None:
        """Raise ``LeaseLost`` if it cannot be relied on, ``Forked`` in a child of its process."""
        if not self._inner.id:
            self._loop.check_usable()
            raise LeaseLost(0, "it was never granted: enter it by with, or call grant()")
        super().check()

    def lose(self, reason: str) -> None:
        """Note that the cluster does not know it any more, as a call has found that relied on it."""
        self._inner.lose(reason)

    def on_lost(self, callback: Callable[[Lease], Any]) -> Callable[[], None]:
        """Call back when it is lost (at once if it is), on a thread of its own, so it may use the client.

        Returns how to take that back.
        """

        function(callback, "on_lost")
        callbacks = CallbackQueue()
        take_back = self._ask(lambda lease: lease.on_lost(lambda _: callbacks.call_soon(callback, self)))
        return lambda: self._ask(lambda _: take_back())

    def __enter__(self) -> Self:
        return self.grant()


# -- session --------------------------------------------------------------------------------------------------------
#
# Sessions for programs without an event loop; see ``lease.session`` for what they are.
#
# ::
#
#     with kv.session(ttl=10, on_lost=stop_work, on_established=start_work) as session:
#         session.keep("workers/1", b"here")          # put again whenever the session is established anew


class Session(Held[aio_session.Session]):
    """A lease that comes back; made by ``Client.session``, established by ``with`` or ``establish()``."""

    @classmethod
    def make(
        cls,
        owner: object,
        loop: LoopThread,
        sessions: aio_session.Sessions,
        ttl: float,
        on_lost: Callable[[Session], Any] | None,
        on_established: Callable[[Session], Any] | None,
    ) -> Session:
        """Make a session whose callbacks are called with it, in order, on a thread of their own.

        Arguments:
            owner: the client.
            loop: where the session will live.
            sessions: the async client's part.
            ttl, on_lost, on_established: as for ``Client.session``.
        """
        callbacks = CallbackQueue()

        def tell(callback: Callable[[Session], Any] | None) -> Callable[[aio_session.Session], Any] | None:
            return None if callback is None else lambda _: callbacks.call_soon(callback, session)

        async def make() -> aio_session.Session:
            return sessions.session(ttl, on_lost=tell(on_lost), on_established=tell(on_established))

        session = cls(owner, loop, loop.run(make()))
        return session

    @property
    def id(self) -> int:
        """Id of the present lease."""
        return self._inner.id

    @property
    def generation(self) -> int:
        """How many leases it has had; 0: none yet. Locks and terms do not survive a change of it."""
        return self._inner.generation

    @property
    def error(self) -> Exception | None:
        """Why it is not established at present; None while it is."""
        return self._inner.error

    @property
    def alive(self) -> bool:
        """Whether its present lease can be relied on."""
        return self._ask(lambda session: session.alive)

    @property
    def lease(self) -> Lease:
        """The present lease, which may be lost already.

        Raises:
            LeaseLost: it never had one.
        """
        return Lease(self._owner, self._loop, self._inner.lease)

    def lose(self, reason: str) -> None:
        """Note that the cluster does not know its present lease any more, as a call has found that relied on it."""
        self._inner.lose(reason)

    establish = taking(aio_session.Session.establish, aio_session.Session.close)

    established = blocking(aio_session.Session.established)
    keep = blocking(aio_session.Session.keep)
    drop = blocking(aio_session.Session.drop)
    close = blocking(aio_session.Session.close)

    def __enter__(self) -> Self:
        return self.establish()


# -- lock -----------------------------------------------------------------------------------------------------------
#
# Locks for programs without an event loop.
#
# ::
#
#     with kv.lock("name", ttl=10) as lock:
#         kv.put("x", b"y", fence=lock)               # written only while the lock is held
#
# A block is not interrupted when its lease is lost (as above): every call with ``fence=`` tells it,
# ``check()`` does, ``lease.on_lost`` does, and the end of the block.

HeldInner = TypeVar("HeldInner", bound=aio_lock.Holder)


class Holder(Held[HeldInner]):
    """What a lock and a term have in common: a key in line that others wait behind."""

    def __init__(self, owner: object, loop: LoopThread, inner: HeldInner) -> None:
        super().__init__(owner, loop, inner)
        self._lease: Lease | None = None

    @property
    def key(self) -> bytes:
        """Its key, as the client sees it; empty while it is not held."""
        return self._inner.key

    @property
    def guard_key(self) -> bytes:
        """Its key, as the store knows it; empty while it is not held."""
        return self._inner.guard_key

    @property
    def fence(self) -> int:
        """The fencing token: the create revision of its key; 0 while it is not held."""
        return self._inner.fence

    @property
    def lease(self) -> Lease:
        """The lease that it lives by.

        Raises:
            FenceLost: it is not held.
        """
        inner = self._inner.lease
        if self._lease is None or self._lease.target()[1] is not inner:
            self._lease = Lease(self._owner, self._loop, inner)
        return self._lease

    def broken(self) -> Exception:
        """Note that its key is gone or changed, as a write has found that relied on it; returns the error to raise."""
        return self._inner.broken()


class Lock(Holder[aio_lock.Lock]):
    """One lock of one holder; made by ``Client.lock``. Not reentrant; threads that compete take one object each."""

    @property
    def held(self) -> bool:
        """Whether it can be relied on, as far as this client knows."""
        return self._ask(lambda lock: lock.held)

    acquire = taking(aio_lock.Lock.acquire, aio_lock.Lock.release)

    try_acquire = blocking(aio_lock.Lock.try_acquire)
    release = blocking(aio_lock.Lock.release)

    def __enter__(self) -> Self:
        return self.acquire()


def plain_lease(lease: Any) -> Any:
    """Return what the async part takes as ``lease``: the async object itself."""
    return lease.target()[1] if isinstance(lease, Blocking) else lease


# -- election -------------------------------------------------------------------------------------------------------
#
# Elections for programs without an event loop.
#
# ::
#
#     with kv.campaign("leader", b"me") as term:      # waits until it leads
#         while work_is_left():
#             kv.put("progress", step(), fence=term)  # raises TermLost or LeaseLost when it does not lead any more
#
# A block is not interrupted when its lease is lost.


class Term(Holder[aio_lock.Term]):
    """One candidacy, and the term that it leads to; made by ``Client.campaign``."""

    @property
    def leads(self) -> bool:
        """Whether it leads, as far as this client knows."""
        return self._ask(lambda term: term.leads)

    campaign = taking(aio_lock.Term.campaign, aio_lock.Term.resign)

    proclaim = blocking(aio_lock.Term.proclaim)
    resign = blocking(aio_lock.Term.resign)

    def __enter__(self) -> Self:
        return self.campaign()
