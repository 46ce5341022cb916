"""Elections within an epoch: one leader among its ranks, whose term cannot outlive the epoch.

    term = await run.elect("writer")                       # waits until this rank leads
    await run.kv.put("progress", b"7", fence=term)         # while it leads *and* the epoch lasts

The candidates' keys are the client library's own (``client.contender``), below ``sync/<epoch>/elect/<name>/``, each
with a lease of the candidate: one that dies makes room for the next without a new epoch. Every write of the campaign
and every write with ``fence=term`` carries both conditions.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from raftkv.client.kv.guards import fence_compares
from raftkv.client.lock.election import Term
from raftkv.client.space import to_bytes
from raftkv.training.api.generation import quoted
from raftkv.training.errors import EpochOver

if TYPE_CHECKING:
    from raftkv.client.space import Text
    from raftkv.client.values import KeyValue
    from raftkv.pb import rpc_pb2
    from raftkv.training.api.generation import Epoch

TTL_S = 2


class RunTerm:
    """One candidacy, and the term that it leads to; made by ``Run.elect``. Usable as ``fence=``."""

    def __init__(self, epoch: Epoch, name: str, value: Text, ttl_s: float = TTL_S) -> None:
        self.name = name
        self._epoch = epoch
        self._line = election_key(epoch, name)
        value = to_bytes(value) or str(epoch.rank).encode()
        self._term = Term(epoch.kv.scope.fenced(epoch.fence), self._line, value, ttl_s, None, interrupt=False)

    @property
    def leads(self) -> bool:
        """Whether it leads, as far as this rank knows."""
        return self._term.leads and not self._epoch.is_over

    @property
    def token(self) -> int:
        """The fencing token: grows from term to term; 0 before it leads."""
        return self._term.fence

    async def campaign(self, timeout_s: float | None = None) -> Self:
        """Wait until it leads; returns at once if it does.

        Raises:
            EpochOver: the epoch ended first.
            LockNotFree: others led all that time.
        """
        self._epoch.check()
        if self._term.leads:
            return self
        await self._epoch.until_over(self._term.campaign(timeout_s))
        return self

    async def proclaim(self, value: Text) -> None:
        """Change the value that everybody sees.

        Raises:
            TermLost: it does not lead any more.
            EpochOver: the epoch has ended.
        """
        self._epoch.check()
        await self._term.proclaim(value)

    async def resign(self) -> None:
        """End it; does nothing if it is over, with its epoch too.

        Raises:
            TermLost: it did not lead any more: somebody may have led meanwhile.
        """
        try:
            await self._term.resign()
        except EpochOver:
            return

    def compares(self) -> list[rpc_pb2.Compare]:
        """See ``client.guards.Conditions``."""
        return [*self._epoch.fence.compares(), *fence_compares(self._term)]

    def broken(self) -> Exception:
        """See ``client.guards.Conditions``."""
        return self._epoch.error() if self._epoch.is_over else self._term.broken()

    async def __aenter__(self) -> Self:
        return await self.campaign()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.resign()


def election_key(epoch: Epoch, name: str) -> str:
    """Before the keys of the candidates."""
    return f"{epoch.base}elect/{quoted(name)}"


async def leader(epoch: Epoch, name: str) -> KeyValue | None:
    """Who leads; None: nobody."""
    return await epoch.until_over(epoch.kv.leader(election_key(epoch, name)))
