"""Elections within a generation: one leader among its ranks, no longer than the generation lasts.

    leadership = await run.elect("writer")                 # waits until this rank leads
    await run.kv.put("progress", b"7", fence=leadership)   # while it leads *and* the generation lasts

The candidates' keys are the client library's own (``client.lock``), below
``sync/<generation>/elect/<name>/``, each with a lease of the candidate: one that dies makes room for the next without
a new generation. Every write of the campaign and every write with ``fence=leadership`` carries both conditions.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from raftkv.client.kv.operations import fence_compares
from raftkv.client.lock import Term
from raftkv.client.scope import to_bytes
from raftkv.training.api.generation import quoted
from raftkv.training.errors import GenerationOver

if TYPE_CHECKING:
    from raftkv.client.scope import Text
    from raftkv.client.values import KeyValue
    from raftkv.pb import rpc_pb2
    from raftkv.training.api.generation import Generation

TTL_S = 2


class Leadership:
    """One candidacy, and the leadership that follows from it; made by ``Run.elect``. Usable as ``fence=``.

    Arguments:
        generation: in which it is.
        name: of the election.
        value: what everybody sees of the leader; empty: its rank.
        ttl_s: of the candidate's lease.
    """

    def __init__(self, generation: Generation, name: str, value: Text, ttl_s: float = TTL_S) -> None:
        self.name = name
        self._generation = generation
        self._key = election_key(generation, name)
        value = to_bytes(value) or str(generation.rank).encode()
        self._term = Term(generation.kv.scope.fenced(generation.fence), self._key, value, ttl_s, None, interrupt=False)

    @property
    def leads(self) -> bool:
        """Whether it leads, as far as this rank knows."""
        return self._term.leads and not self._generation.is_over

    @property
    def token(self) -> int:
        """The fencing token: grows from leader to leader; 0 before it leads."""
        return self._term.fence

    async def campaign(self, timeout_s: float | None = None) -> Self:
        """Wait until it leads; returns at once if it does.

        Raises:
            GenerationOver: the generation ended first.
            LockNotFree: others led all that time.
        """
        self._generation.check()
        if self._term.leads:
            return self
        await self._generation.until_over(self._term.campaign(timeout_s))
        return self

    async def proclaim(self, value: Text) -> None:
        """Change the value that everybody sees.

        Raises:
            TermLost: it does not lead any more.
            GenerationOver: the generation has ended.
        """
        self._generation.check()
        await self._term.proclaim(value)

    async def resign(self) -> None:
        """End it; does nothing if it is over, with its generation too.

        Raises:
            TermLost: it did not lead any more: somebody may have led meanwhile.
        """
        try:
            await self._term.resign()
        except GenerationOver:
            return

    def compares(self) -> list[rpc_pb2.Compare]:
        """Implement ``client.guards.Conditions.compares``."""
        return [*self._generation.fence.compares(), *fence_compares(self._term)]

    def broken(self) -> Exception:
        """Implement ``client.guards.Conditions.broken``."""
        return self._generation.error() if self._generation.is_over else self._term.broken()

    async def __aenter__(self) -> Self:
        return await self.campaign()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.resign()


RunTerm = Leadership
"""Alias."""


def election_key(generation: Generation, name: str) -> str:
    """Before the keys of the candidates.

    Arguments:
        generation: in which it is.
        name: of the election.
    """
    return f"{generation.base}elect/{quoted(name)}"


async def leader(generation: Generation, name: str) -> KeyValue | None:
    """Return the leader's key; None: nobody leads.

    Arguments:
        generation: in which it is.
        name: of the election.
    """
    return await generation.until_over(generation.kv.leader(election_key(generation, name)))
