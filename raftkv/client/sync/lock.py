"""Locks for programs without an event loop.

::

    with kv.lock("name", ttl=10) as lock:
        kv.put("x", b"y", fence=lock)               # written only while the lock is held

A block is not interrupted when its lease is lost (see ``sync.lease``): every call with ``fence=`` tells it, ``check()``
does, ``lease.on_lost`` does, and the end of the block.
"""

from __future__ import annotations

from typing import Any, Self, TypeVar

from raftkv.client.lock import election as aio_election
from raftkv.client.lock import lock as aio_holder
from raftkv.client.lock import lock as aio_lock
from raftkv.client.sync.blocking import Blocking, Held, blocking
from raftkv.client.sync.lease import Lease
from raftkv.client.sync.loop import LoopThread

Inner = TypeVar("Inner", bound=aio_holder.Holder)


class Holder(Held[Inner]):
    """What a lock and a term have in common: a key in line that others wait behind."""

    def __init__(self, owner: object, loop: LoopThread, inner: Inner) -> None:
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

    def acquire(self, timeout_s: float | None = None) -> Lock:
        """Wait for it, without a ``with`` block; give it back by ``release()``.

        Arguments:
            timeout_s: None: as long as it takes.

        Raises:
            LockNotFree: others had it all that time.
            LeaseLost: the lease ended while waiting.
            StatusError: the cluster refused, or could not be reached to begin with.
        """
        self._enter(lambda: self._inner.acquire(timeout_s), self._inner.release)
        return self

    try_acquire = blocking(aio_lock.Lock.try_acquire)
    release = blocking(aio_lock.Lock.release)

    def __enter__(self) -> Self:
        self.acquire()
        return self


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
# A block is not interrupted when its lease is lost; see ``sync.lock``.


class Term(Holder[aio_election.Term]):
    """One candidacy, and the term that it leads to; made by ``Client.campaign``."""

    @property
    def leads(self) -> bool:
        """Whether it leads, as far as this client knows."""
        return self._ask(lambda term: term.leads)

    def campaign(self, timeout_s: float | None = None) -> Term:
        """Wait until it leads, without a ``with`` block; end it by ``resign()``.

        Arguments:
            timeout_s: None: as long as it takes.

        Raises:
            LockNotFree: others led all that time.
            LeaseLost: the lease ended while waiting.
            StatusError: the cluster refused, or could not be reached to begin with.
        """
        self._enter(lambda: self._inner.campaign(timeout_s), self._inner.resign)
        return self

    proclaim = blocking(aio_election.Term.proclaim)
    resign = blocking(aio_election.Term.resign)

    def __enter__(self) -> Self:
        self.campaign()
        return self
