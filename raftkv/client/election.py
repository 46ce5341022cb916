"""Elections: one leader among those who campaign, and everybody who wants to know who it is.

::

    async with kv.campaign("leader", b"10.0.0.1:80", ttl=10) as term:      # waits until it leads
        await term.proclaim(b"10.0.0.1:81")
        await kv.put("x", b"y", fence=term)                                # only while it leads

    async for leader in kv.observe("leader"): print(leader.value)

A term ends by ``resign``, with its lease, or when somebody deletes its key. As with locks, a block is interrupted when
the lease is lost, and only ``fence=term`` keeps a leader that was stopped from writing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING

from raftkv.client.compares import create_revision
from raftkv.client.contender import Contender, Ground, insist, within
from raftkv.client.errors import LockNotFree, TermLost
from raftkv.client.interrupts import Interrupt
from raftkv.client.kv import KV
from raftkv.client.lease import Lease, Leases
from raftkv.client.operations import Put
from raftkv.client.space import Text, to_bytes
from raftkv.client.values import DELETE, KeyValue
from raftkv.errors import CompactedError, StatusError

if TYPE_CHECKING:
    from raftkv.client.session import Session


class Term:
    """One candidacy, and the term that it leads to; made by ``Client.campaign``."""

    def __init__(
        self,
        ground: Elections,
        name: Text,
        value: Text,
        ttl: float,
        lease: Lease | Session | None,
        *,
        interrupt: bool = True,
    ) -> None:
        self.name = name
        self._ground = ground
        self._value = value
        self._ttl = ttl
        self._given = lease
        self._interrupts = interrupt
        self._lease: Lease | None = None
        self._place: Contender | None = None
        self._leads = False
        self._block: Interrupt | None = None

    @property
    def lease(self) -> Lease:
        """The lease that it lives by.

        Raises:
            TermLost: it has not begun.
        """
        if self._lease is None:
            raise TermLost(b"", 0, "it has not begun")
        return self._lease

    @property
    def key(self) -> bytes:
        """Its key, as the client sees it; empty while it does not run."""
        return self._place.key if self._place is not None else b""

    @property
    def guard_key(self) -> bytes:
        """Its key, as the store knows it; empty while it does not run."""
        return self._place.guard_key if self._place is not None else b""

    @property
    def fence(self) -> int:
        """The fencing token: the create revision of its key; 0 while it does not run."""
        return self._place.fence if self._place is not None else 0

    @property
    def leads(self) -> bool:
        """Whether it leads, as far as this client knows."""
        return self._leads and self._lease is not None and self._lease.alive

    def check(self) -> None:
        """Raise ``LeaseLost`` or ``TermLost`` if it does not lead."""
        if not self._leads:
            raise TermLost(self.guard_key, self.fence, "it does not lead")
        self.lease.check()

    def broken(self) -> TermLost:
        """The cluster has found its key gone: it does not lead any more."""
        self._leads = False
        return TermLost(self.guard_key, self.fence)

    async def campaign(self, timeout_s: float | None = None) -> Term:
        """Wait until it leads.

        Arguments:
            timeout_s: None: as long as it takes.

        Raises:
            LockNotFree: others led all that time.
            LeaseLost: the lease ended while waiting.
            StatusError: the cluster refused, or could not be reached to begin with.
        """
        if self._place is not None:
            raise LockNotFree(self.name, None, "by this very object")
        try:
            await within(timeout_s, self._stand_in_line())
        except TimeoutError:
            await self._resign_quietly()
            raise LockNotFree(self.name, timeout_s) from None
        except BaseException:
            await self._resign_quietly()
            raise
        return self

    async def _stand_in_line(self) -> None:
        if self._given is None:
            self._lease = await self._ground.lease(self._ttl)
        else:
            self._lease = self._given if isinstance(self._given, Lease) else self._given.lease
        self._place = Contender(self._ground, self.name, self._lease, TermLost)
        with self._lease.interrupting():
            found = await self._place.enqueue(self._value)
            if found is not None and found.value != to_bytes(self._value):
                await self._write(self._value)
            await self._place.wait_turn()
        self._lease.check()
        self._leads = True

    async def proclaim(self, value: Text) -> None:
        """Change the value that everybody sees.

        Raises:
            TermLost: it does not lead any more.
            LeaseLost: its lease is lost.
            StatusError: it is unknown whether it was changed; may be done again.
        """
        self.check()
        await self._write(value)

    async def _write(self, value: Text) -> None:
        ours = create_revision(self.key) == self.fence
        done = await self._ground.txn().when(ours).then(Put(self.key, value, self.lease)).commit()
        if not done.succeeded:
            raise self.broken()
        self._value = value

    async def resign(self) -> None:
        """End it; does nothing if it is over.

        Raises:
            StatusError: the cluster could not be told; it ends with its lease.
        """
        place, self._place, self._leads = self._place, None, False
        if place is None:
            return
        try:
            await place.leave()
        finally:
            if self._given is None and self._lease is not None:
                await self._lease.revoke()

    async def _resign_quietly(self) -> None:
        try:
            await self.resign()
        except StatusError:
            return  # its lease is not kept alive any more, or it is its owner's to end

    async def __aenter__(self) -> Term:
        await self.campaign()
        if self._interrupts:
            self._block = self.lease.interrupting()
            self._block.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block, self._block = self._block, None
        try:
            if block is not None:
                block.__exit__(kind, error, trace)
        finally:
            await self._resign_quietly()
        if kind is None and self.lease.lost.is_set():
            self.lease.check()


class Elections(KV, Leases, Ground):
    """The part of a client that elects."""

    def campaign(
        self,
        name: Text,
        value: Text = b"",
        *,
        ttl: float = 10,
        lease: Lease | Session | None = None,
        interrupt: bool = True,
    ) -> Term:
        """A candidacy, to be run by ``async with`` or ``Term.campaign``.

        Arguments:
            name: of the election.
            value: what everybody sees of the leader, e.g. its address.
            ttl, lease, interrupt: as for ``lock``.
        """
        return Term(self, name, value, ttl, lease, interrupt=interrupt)

    async def leader(self, name: Text) -> KeyValue | None:
        """Who leads at present; None: nobody."""
        found = await self.range(to_bytes(name) + b"/", prefix=True, limit=1, sort_by="create_revision")
        return found[0] if found else None

    async def observe(self, name: Text) -> AsyncGenerator[KeyValue, None]:
        """Who leads, then every proclamation and every next leader; resumes as a watch does, never ends.

        Raises:
            StatusError: the cluster refuses.
        """
        line = to_bytes(name) + b"/"
        told: KeyValue | None = None
        while True:
            found = await insist(lambda: self.range(line, prefix=True, limit=1, sort_by="create_revision"))
            if found and found[0] != told:
                told = found[0]
                yield told
            try:
                changes = self._changes(line, found[0].key if found else None, found.revision + 1)
                async with aclosing(changes):
                    async for leader in changes:
                        told = leader
                        yield leader
            except CompactedError:
                continue

    async def _changes(self, line: bytes, leader: bytes | None, start_revision: int) -> AsyncGenerator[KeyValue, None]:
        """Proclamations of a leader until its key is deleted; without a leader ends when there is a candidate."""
        if leader is None:
            watch = self.watch(line, prefix=True, start_revision=start_revision, no_delete=True)
        else:
            watch = self.watch(leader, start_revision=start_revision)
        try:
            async for event in watch:
                if leader is None or event.type == DELETE:
                    return
                yield event.kv
        finally:
            watch.cancel()
