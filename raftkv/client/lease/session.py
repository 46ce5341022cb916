"""Sessions: a lease that comes back, and the keys that live by it.

::

    async with kv.session(ttl=10, on_lost=stop_work, on_established=start_work) as session:
        await session.keep("workers/1", b"10.0.0.1")      # put again whenever the session is established anew
        await kv.put("x", b"y", lease=session)

When its lease is lost (the process was paused, the cluster was away for longer than the TTL) a session tells its owner,
gets a new lease as soon as the cluster answers, puts its keys again and tells its owner that too. Between the two,
calls that rely on it raise ``LeaseLost``. ``generation`` counts leases: locks and terms do not survive a change of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from raftkv.client.arguments import limit
from raftkv.client.errors import LeaseLost
from raftkv.client.kv.kv import KV
from raftkv.client.lease.lease import Lease, checked_ttl, farewell_s, seen_through, tell
from raftkv.client.rpc.retry import Backoff
from raftkv.client.scope import Part, Scope, Text, to_bytes
from raftkv.errors import RaftKVError

OnSession = Callable[["Session"], Any]


class Session:
    """One session; made by ``Client.session``, established by ``await`` or ``async with``.

    Attributes:
        generation: how many leases it has had; 0: none yet.
        error: why it is not established at present; None while it is.
    """

    def __init__(
        self,
        scope: Scope,
        ttl: float,
        on_lost: OnSession | None,
        on_established: OnSession | None,
    ) -> None:
        self.generation = 0
        self.error: Exception | None = None
        self._scope = scope
        self._kv = KV(scope)
        self._ttl = checked_ttl(ttl)
        self._on_lost = on_lost
        self._on_established = on_established
        self._lease: Lease | None = None
        self._kept: dict[bytes, bytes] = {}
        self._changed = asyncio.Event()
        self._establishing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        if self._lease is None:
            return f"<Session: ttl {self._ttl:g} s, not established yet>"
        state = "established" if self.error is None else f"lost: {self.error}"
        return f"<Session: {state}, lease {self._lease.id:x}, ttl {self._ttl:g} s, generation {self.generation}>"

    # ---- as a lease

    @property
    def lease(self) -> Lease:
        """The present lease, which may be lost already.

        Raises:
            LeaseLost: it never had one.
        """
        if self._lease is None:
            raise LeaseLost(0, "the session was never established: await it, or enter it with async with")
        return self._lease

    @property
    def id(self) -> int:
        """Id of the present lease."""
        return self.lease.id

    @property
    def alive(self) -> bool:
        """Whether its present lease can be relied on."""
        return self._lease is not None and self._lease.alive

    def check(self) -> None:
        """Raise ``LeaseLost`` if its present lease cannot be relied on."""
        self.lease.check()

    def lose(self, reason: str) -> None:
        """Note that the cluster does not know its present lease any more."""
        self.lease.lose(reason)

    # ---- its life

    async def establish(self) -> Session:
        """Get the first lease; does nothing the second time.

        Raises:
            StatusError: the cluster did not grant one.
        """
        async with self._establishing:  # asked for by many at once, it is established once
            if self._lease is None:
                self._lease = await Lease(self._scope, self._ttl)
                self.generation = 1
                self._task = asyncio.get_running_loop().create_task(self._stay())
        return self

    def __await__(self) -> Generator[Any, None, Session]:
        return self.establish().__await__()

    async def established(self, generation: int = 1, *, timeout_s: float | None = None) -> None:
        """Wait until it is established, at least for that many times.

        Arguments:
            generation: how many times.
            timeout_s: None: as long as it takes.

        Raises:
            LeaseLost: it is over, or was never established.
            TimeoutError: it was not in time.
        """
        timeout_s = limit(timeout_s, "timeout_s")
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_established(generation)
        except TimeoutError:
            why = f": {self.error}" if self.error is not None else ""
            raise TimeoutError(f"the session was not established within {timeout_s or 0:g} s{why}") from None

    async def _wait_established(self, generation: int) -> None:
        while self.generation < generation or self.error is not None or not self.alive:
            if self._task is None or self._task.done():
                self.check()
            await self._wait_change()

    async def keep(self, key: Text, value: Text) -> None:
        """Put a key with its lease, now and after every time that it is established anew.

        Arguments:
            key, value: as for ``put``.

        Raises:
            LeaseLost: it is not established at present; the key is put when it is.
            StatusError: the put failed; see ``definite``. It is put again with the next lease.
        """
        name = to_bytes(key)
        self._kept[name] = to_bytes(value)
        await self._kv.put(name, value, lease=self.lease)

    async def drop(self, key: Text) -> None:
        """Delete a key and put it no more."""
        name = to_bytes(key)
        self._kept.pop(name, None)
        await self._kv.delete(name)

    async def close(self) -> None:
        """End it, with its keys. Its owner is not told: it was the owner's wish."""
        await self._end(None)

    async def _end(self, timeout_s: float | None) -> None:
        await seen_through(self._give_back(timeout_s))

    async def _give_back(self, timeout_s: float | None) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._lease is not None:
            try:
                await self._lease.revoke(timeout_s)
            except RaftKVError:
                return  # no keep-alive is sent any more: it ends with its TTL

    async def _stay(self) -> None:
        while True:
            await self.lease.lost.wait()
            self.error = LeaseLost(self.lease.id, "its session is being established again")
            self._tell(self._on_lost)
            if self._scope.core.closed:
                return
            await self._establish_again()
            self.error = None
            self.generation += 1
            self._tell(self._on_established)

    async def _establish_again(self) -> None:
        backoff = Backoff()
        while True:
            try:
                lease = await Lease(self._scope, self._ttl)
                try:
                    await self._put_kept(lease)
                except asyncio.CancelledError:
                    self._lease = lease  # ``close`` of the session ends it
                    raise
                except BaseException:
                    lease.stop()  # each attempt has a lease of its own
                    raise
            except RaftKVError as error:
                self.error = error
                await backoff.wait()
            else:
                self._lease = lease
                return

    async def _put_kept(self, lease: Lease) -> None:
        """Put the keys under a new lease, as they are at the end: some may be kept or dropped meanwhile."""
        there: dict[bytes, bytes] = {}
        while there != self._kept:
            for name in [name for name in there if name not in self._kept]:
                await self._kv.delete(name)
                del there[name]
            for name, value in [item for item in self._kept.items() if there.get(item[0]) != item[1]]:
                if self._kept.get(name) == value:
                    await self._kv.put(name, value, lease=lease)
                    there[name] = value

    def _tell(self, callback: OnSession | None) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if callback is not None:
            tell(callback, self)

    async def _wait_change(self) -> None:
        await self._changed.wait()

    async def __aenter__(self) -> Session:
        return await self.establish()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end(farewell_s(error))


class Sessions(Part):
    """Sessions: leases that come back."""

    def session(
        self, ttl: float = 10, *, on_lost: OnSession | None = None, on_established: OnSession | None = None
    ) -> Session:
        """Make a session, to be established by ``await`` or ``async with``.

        Arguments:
            ttl: of its leases, in seconds.
            on_lost: called on the loop, with the session, when its lease is lost.
            on_established: called when it has a new one and its keys are there again.
        """
        return Session(self.scope, ttl, on_lost, on_established)
