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
from typing import TYPE_CHECKING

from raftkv.client.errors import TermLost
from raftkv.client.kv.compares import create_revision
from raftkv.client.kv.kv import KV
from raftkv.client.kv.operations import Put
from raftkv.client.lease.lease import Lease
from raftkv.client.lock.contender import Contender, insist
from raftkv.client.lock.holder import Holder, Parts
from raftkv.client.space import Text, to_bytes
from raftkv.client.values import DELETE, KeyValue
from raftkv.errors import CompactedError

if TYPE_CHECKING:
    from raftkv.client.lease.session import Session


class Term(Holder):
    """One candidacy, and the term that it leads to; made by ``Client.campaign``."""

    _error = TermLost
    _not_first = "it does not lead"

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
        super().__init__(ground, name, ttl, lease, interrupt=interrupt)
        self._value = value

    @property
    def leads(self) -> bool:
        """Whether it leads, as far as this client knows."""
        return self._reliable

    async def campaign(self, timeout_s: float | None = None) -> Term:
        """Wait until it leads.

        Arguments:
            timeout_s: None: as long as it takes.

        Raises:
            LockNotFree: others led all that time.
            LeaseLost: the lease ended while waiting.
            TermLost: somebody took its key away while it waited.
            StatusError: the cluster refused, or could not be reached to begin with.
        """
        await self._enter(timeout_s)
        return self

    async def proclaim(self, value: Text) -> None:
        """Change the value that everybody sees.

        Raises:
            TermLost: it does not lead any more.
            LeaseLost: its lease is lost.
            StatusError: it is unknown whether it was changed; may be done again.
        """
        self.check()
        if not await self._write(value):
            raise self.broken()

    async def resign(self) -> None:
        """End it; does nothing if it is over.

        Raises:
            TermLost: it did not lead any more: somebody may have led meanwhile.
            StatusError: the cluster could not be told; it ends with its lease.
        """
        await self._leave()

    async def _join(self, place: Contender) -> None:
        found = await place.enqueue(self._value)
        if found is not None and found.value != to_bytes(self._value) and not await self._write(self._value):
            raise place.lost()

    async def _write(self, value: Text) -> bool:
        ours = create_revision(self.key) == self.fence
        done = await self._ground.txn().when(ours).then(Put(self.key, value, self.lease)).commit()
        if done.succeeded:
            self._value = value
        return done.succeeded


class Elections(KV, Parts):
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
