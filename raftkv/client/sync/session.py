"""Sessions for programs without an event loop; see ``lease.session`` for what they are.

::

    with kv.session(ttl=10, on_lost=stop_work, on_established=start_work) as session:
        session.keep("workers/1", b"here")          # put again whenever the session is established anew
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from raftkv.client.lease import session as aio_session
from raftkv.client.sync.blocking import Held, blocking
from raftkv.client.sync.callbacks import CallbackQueue
from raftkv.client.sync.lease import Lease
from raftkv.client.sync.loop import LoopThread


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

    def establish(self) -> Session:
        """Get the first lease, without a ``with`` block; ends by ``close()`` or with the client.

        Raises:
            StatusError: the cluster did not grant one.
        """
        self._enter(self._inner.establish, self._inner.close)
        return self

    established = blocking(aio_session.Session.established)
    keep = blocking(aio_session.Session.keep)
    drop = blocking(aio_session.Session.drop)
    close = blocking(aio_session.Session.close)

    def __enter__(self) -> Self:
        self.establish()
        return self
