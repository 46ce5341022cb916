"""One generation, as user code works in it: where its values lie, under which fence, and when it is over.

    generation = Generation(kv, world, rank=0)
    await generation.until_over(barrier())        # GenerationOver as soon as the generation ends
    generation.end("node b-1 is gone")            # called when the participant hears of the end

Everything lies below ``sync/<generation>/`` and is written in a txn with the world's fence, so a rank that slept
through the end of its generation writes nothing. The arbiter deletes it two generations later.

Leaves out: what the values mean (``collectives``, ``counter``, ``leadership``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import quote

from raftkv.client.kv.operations import Put, mod_revision
from raftkv.client.rpc.retry import until_answered
from raftkv.errors import ConfigError
from raftkv.training.errors import GenerationOver, TrainingError
from raftkv.training.keys import RunKeys

if TYPE_CHECKING:
    from raftkv.client.kv.txn import Txn
    from raftkv.client.library import Client
    from raftkv.client.values import TxnResult
    from raftkv.training.rendezvous.world import World, WorldFence

Result = TypeVar("Result")

ATTEMPT_TIMEOUT_S: Final = 1.0
"""For one attempt of a write that is made until it is answered: one that died with a leader is not waited for long."""
RESTORED: Final = "the cluster was restored from a backup, and what ranks have shared since is gone"
"""Why a generation ends that the backup knows as well: ranks would wait for what others believe to have said."""
VALUE_MAX_BYTES: Final = 256 * 1024
"""Largest value that ranks may share here: larger ones belong into a file system, and their address here."""


class BarrierTimeout(TrainingError, TimeoutError):
    """Some ranks did not come to a barrier, or did not give their value, in time; calling again goes on waiting.

    Arguments:
        what: was waited for.
        timeout_s: for so long.
        missing: those ranks; None: the cluster does not answer.

    Attributes:
        missing: those ranks; empty: not known, or all have come by now.
    """

    definite = False

    def __init__(self, what: str, timeout_s: float, missing: list[int] | None) -> None:
        self.missing = missing or []
        shown = ", ".join(map(str, self.missing[:16])) + (", ..." if len(self.missing) > 16 else "")
        who = "the cluster does not answer" if missing is None else "all have come by now"
        if missing:
            who = f"missing: rank{'s' if len(missing) > 1 else ''} {shown}"
        super().__init__(f"{what} was not complete within {timeout_s:g} s; {who}")


def quoted(name: str) -> str:
    """Quote a name that the user chose, as one part of a key.

    Raises:
        ConfigError: it is empty.
        TypeError: it is no text.
    """
    if not isinstance(name, str | bytes):
        raise TypeError(f"names are texts, not {name!r}")
    if not name:
        raise ConfigError("a name is empty; name every barrier, counter and value")
    return quote(name, safe="")


def checked_value(value: str | bytes) -> bytes:
    """Return a value to be shared, as bytes.

    Raises:
        ConfigError: it is larger than values here may be.
        TypeError: it is neither text nor bytes.
    """
    if not isinstance(value, str | bytes):
        raise TypeError(f"values are str or bytes, not {type(value).__name__}")
    data = value.encode() if isinstance(value, str) else value
    if len(data) > VALUE_MAX_BYTES:
        raise ConfigError(
            f"a value of {len(data)} bytes is too large to be shared: at most {VALUE_MAX_BYTES}; "
            "put it where all ranks can read it, and share its address"
        )
    return data


class Generation:
    """One generation, as one of its ranks works in it.

    Arguments:
        kv: whole, not a view.
        world: the generation.
        rank: which of its ranks this is; on a node with several slots not the world's own.
    """

    def __init__(self, kv: Client, world: World, rank: int) -> None:
        self.kv = kv
        self.world = world
        self.rank = rank
        self.base = RunKeys(world.run_id).sync(world.generation)
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.world_size

    @property
    def fence(self) -> WorldFence:
        """The condition of every write."""
        return self.world.fence

    @property
    def is_over(self) -> bool:
        """Whether it has ended, as far as this rank knows."""
        return self._over.done()

    def end(self, reason: str) -> None:
        """End it: everybody who waits in it is interrupted. Harmless when repeated."""
        if not self._over.done():
            self._over.set_result(reason)

    def error(self) -> GenerationOver:
        """Return what to raise when it is over."""
        reason = self._over.result() if self._over.done() else ""
        return GenerationOver(self.world.run_id, self.world.generation, reason)

    def check(self) -> None:
        """Raise ``GenerationOver`` if it is known to have ended."""
        if self._over.done():
            raise self.error()

    async def wait_over(self) -> str:
        """Wait for its end; returns why it ended."""
        return await asyncio.shield(self._over)

    async def why_over(self) -> str:
        """Ask the cluster why it has ended; empty: it lasts, as far as the records of the run say."""
        found = await self.until_over(until_answered(lambda: self.kv.range(*self.fence.watched)))
        return self.fence.why_over({item.key: item for item in found}) or ""

    async def until_over(self, waiting: Awaitable[Result]) -> Result:
        """Wait for something, but not beyond the end of the generation.

        Raises:
            GenerationOver: that came first, and what was waited for is cancelled.
        """
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait((task, self._over), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise self.error()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def put(self, key: str, value: bytes) -> None:
        """Put a value, through outages of the cluster.

        A copy of the txn that was held up somewhere finds another revision, and does not undo what was put after it.
        If that is what this call finds, its own copy was first, or somebody else, whose value counts as the later one.

        Arguments:
            key: of the value.
            value: any bytes.

        Raises:
            GenerationOver, StatusError: as for ``commit``.
        """
        self.check()
        found = await self.until_over(until_answered(lambda: self.kv.get(key)))
        unchanged = mod_revision(key) == (0 if found is None else found.mod_revision)
        await self.commit(lambda empty: empty.when(unchanged).then(Put(key, value)))

    async def commit(self, make: Callable[[Txn], Txn]) -> TxnResult:
        """Commit a fenced txn that does no harm when it is done twice, through outages of the cluster.

        Arguments:
            make: fills it; called for each attempt.

        Raises:
            GenerationOver: the generation has ended; nothing was written.
            StatusError: the cluster refused.
        """

        async def step() -> TxnResult:
            return await make(self.kv.txn(fence=self.fence)).commit(timeout_s=ATTEMPT_TIMEOUT_S)

        self.check()
        try:
            return await self.until_over(until_answered(step))
        except GenerationOver:
            self.end("")  # the cluster has said so, before the participant heard of it
            raise self.error() from None
