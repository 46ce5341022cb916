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

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from raftkv.client.errors import TermLost, WatchCanceled
from raftkv.client.keys import Text, to_bytes
from raftkv.client.kv.compares import create_revision
from raftkv.client.kv.kv import KV
from raftkv.client.kv.operations import GetRange, Put
from raftkv.client.kv.txn import Txn
from raftkv.client.lease.lease import Lease
from raftkv.client.lock.contender import Contender
from raftkv.client.lock.lock import Holder
from raftkv.client.rpc import methods
from raftkv.client.rpc.retry import until_answered
from raftkv.client.scope import Part, Scope
from raftkv.client.values import KeyValue
from raftkv.client.watch.watch import responses
from raftkv.client.watch.watcher import Request, Watcher
from raftkv.errors import CompactedError, StatusError
from raftkv.pb import kv_pb2, rpc_pb2

if TYPE_CHECKING:
    from raftkv.client.lease.session import Session


class Term(Holder):
    """One candidacy, and the term that it leads to; made by ``Client.campaign``."""

    _error = TermLost
    _not_first = "it does not lead"

    def __init__(
        self,
        scope: Scope,
        name: Text,
        value: Text,
        ttl: float,
        lease: Lease | Session | None,
        *,
        interrupt: bool = True,
    ) -> None:
        super().__init__(scope, name, ttl, lease, interrupt=interrupt)
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
        done = await Txn(self._scope).when(ours).then(Put(self.key, value, self.lease)).commit()
        if done.succeeded:
            self._value = value
        return done.succeeded


class Elections(Part):
    """Elections: to campaign in, to look at, to follow."""

    def campaign(
        self,
        name: Text,
        value: Text = b"",
        *,
        ttl: float = 10,
        lease: Lease | Session | None = None,
        interrupt: bool = True,
    ) -> Term:
        """Make a candidacy, to be run by ``async with`` or ``Term.campaign``.

        Arguments:
            name: of the election.
            value: what everybody sees of the leader, e.g. its address.
            ttl, lease, interrupt: as for ``lock``.
        """
        return Term(self.scope, name, value, ttl, lease, interrupt=interrupt)

    async def leader(self, name: Text) -> KeyValue | None:
        """Return who leads at present; None: nobody."""
        found = await KV(self.scope).range(to_bytes(name) + b"/", prefix=True, limit=1, sort_by="create_revision")
        return found[0] if found else None

    async def observe(self, name: Text) -> AsyncGenerator[KeyValue, None]:
        """Follow who leads: the leader, every proclamation, every next leader; resumes as a watch does, never ends.

        Raises:
            StatusError: the cluster refuses.
        """
        async with aclosing(observations(self.scope, name)) as answers:
            async for answer in answers:
                yield self.scope.space.key_value(answer.kvs[0])


async def observations(
    scope: Scope, name: Text, *, on_trouble: Callable[[StatusError | None], None] | None = None
) -> AsyncGenerator[rpc_pb2.RangeResponse, None]:
    """Follow an election in the messages of members, as etcd's clients form them; for programs that pass them on.

    Each has the header of the message it came with and one key, that of the leader. A proclamation has ``count`` and
    ``more`` of the read that found the leader.

    Arguments:
        scope: of the client.
        name: of the election.
        on_trouble: see ``until_answered``.

    Raises:
        StatusError: the cluster refuses.
    """
    line = to_bytes(name) + b"/"
    oldest = GetRange(line, prefix=True, limit=1, sort_by="create_revision").request(scope.space)
    shown: kv_pb2.KeyValue | None = None
    while True:
        answer = await until_answered(lambda: scope.call(methods.RANGE, oldest), on_trouble=on_trouble)
        try:
            if not answer.kvs:
                later = Request(oldest.key, oldest.range_end, answer.header.revision + 1, no_delete=True)
                found = await _first_candidate(scope, later)
            else:
                found = rpc_pb2.RangeResponse(header=answer.header, kvs=answer.kvs)
            leader = found.kvs[0]
            if leader != shown:
                shown = leader
                yield found
            proclaimed = Request(leader.key, start_revision=found.header.revision + 1)
            async with aclosing(_events(scope, proclaimed)) as changes:
                async for header, event in changes:
                    if event.type == kv_pb2.Event.DELETE:
                        break
                    shown = event.kv
                    yield rpc_pb2.RangeResponse(header=header, kvs=[shown], count=answer.count, more=answer.more)
        except CompactedError:
            continue


async def _first_candidate(scope: Scope, request: Request) -> rpc_pb2.RangeResponse:
    async with aclosing(_events(scope, request)) as changes:
        async for header, event in changes:
            header.revision = event.kv.mod_revision
            return rpc_pb2.RangeResponse(header=header, kvs=[event.kv])
    raise WatchCanceled("the client is closed")


async def _events(scope: Scope, request: Request) -> AsyncGenerator[tuple[rpc_pb2.ResponseHeader, kv_pb2.Event], None]:
    async with aclosing(responses(scope.hub, Watcher(request))) as messages:
        async for message in messages:
            for event in message.events:
                yield message.header, event
