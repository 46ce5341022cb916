"""One generation, as user code works in it: where its values lie, under which fence, and when it is over.

    generation = Generation(kv, world, rank=0)
    await generation.until_over(barrier())        # GenerationOver as soon as the generation ends
    generation.end("node b-1 is gone")            # called when the participant hears of the end

Everything lies below ``sync/<generation>/`` and is written in a txn with the world's fence, so a rank that slept
through the end of its generation writes nothing. The arbiter deletes it two generations later.

Below it: ``Counter`` and ``Leadership``, which work in one generation too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar
from urllib.parse import quote

from raftkv.client.arguments import whole
from raftkv.client.lock import Term
from raftkv.client.operations import GetRange, Put, fence_compares, mod_revision
from raftkv.client.rpc.retry import until_answered
from raftkv.client.scope import to_bytes
from raftkv.errors import ConfigError
from raftkv.training.errors import GenerationOver
from raftkv.training.keys import RunKeys

if TYPE_CHECKING:
    from raftkv.client.kv import Txn
    from raftkv.client.library import Client
    from raftkv.client.scope import Text
    from raftkv.client.values import KeyValue, RangeResult, TxnResult
    from raftkv.pb import rpc_pb2
    from raftkv.training.rendezvous.world import World, WorldFence

Result = TypeVar("Result")

ATTEMPT_TIMEOUT_S: Final = 1.0
"""For one attempt of a write that is made until it is answered: one that died with a leader is not waited for long."""
RESTORED: Final = "the cluster was restored from a backup, and what ranks have shared since is gone"
"""Why a generation ends that the backup knows as well: ranks would wait for what others believe to have said."""
VALUE_MAX_BYTES: Final = 256 * 1024
"""Largest value that ranks may share here: larger ones belong into a file system, and their address here."""


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
        """End it and interrupt all waits in it. Harmless when repeated."""
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
        If that is what this call finds, its own copy was first, or another writer, whose value counts as the later one.

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


# -- counter --------------------------------------------------------------------------------------------------------
#
# Counters of a generation: sums over what each rank has added.
#
#     steps = run.counter("steps")
#     number = await steps.add(1)        # how many there are now, this one included: no two ranks get the same
#     await steps.value()
#
# Each rank has a key of its own below ``sync/<generation>/counter/<name>/``, with all that it has added; ``add`` puts
# it and reads the others' in the same txn. So ranks never get in each other's way, as they would by compare-and-set of
# one key. The txn has the condition that the own key is as this rank wrote it last: a copy of it that was held up
# somewhere changes nothing any more. If a copy whose answer was lost has done it, the sum is read as of its revision,
# for another rank may have added since, and has been told the sum of now. The price: an answer carries a number for
# every rank that has added.


class Counter:
    """One counter, as one rank sees it; made by ``Run.counter``."""

    def __init__(self, generation: Generation, name: str) -> None:
        self.name = name
        self._generation = generation
        self._prefix = f"{generation.base}counter/{quoted(name)}/"
        self._key = f"{self._prefix}{generation.rank:06d}"
        self._mine: tuple[int, int] | None = None  # what this rank has added, and the revision of its key
        self._adding = asyncio.Lock()

    async def add(self, amount: int = 1) -> int:
        """Add to it; returns what it is then.

        Raises:
            GenerationOver: the generation has ended; nothing visible was added.
            StatusError: the cluster refused.
        """
        amount = whole(amount, "what is added to a counter")
        async with self._adding:
            if self._mine is None:
                self._mine = await self._read_mine()
            while True:
                added, revision = self._mine
                total = added + amount
                done = await self._commit(total, revision)
                if done.succeeded:
                    self._mine = total, done.revision
                    return _total(done.results[1])
                self._mine = self._found(done.results[0])
                if self._mine[1] < revision:
                    # Numbers that were given out would be given out again. Or the run was closed, and its keys went.
                    self._generation.end(await self._generation.why_over() or RESTORED)
                    raise self._generation.error()
                if self._mine[0] == total:
                    return await self._sum(self._mine[1])

    async def _commit(self, total: int, revision: int) -> TxnResult:
        put, read = Put(self._key, str(total)), GetRange(self._prefix, prefix=True)
        unchanged = mod_revision(self._key) == revision
        return await self._generation.commit(lambda empty: empty.when(unchanged).then(put, read).otherwise(read))

    async def _read_mine(self) -> tuple[int, int]:
        mine = await self._generation.until_over(until_answered(lambda: self._generation.kv.get(self._key)))
        return (0, 0) if mine is None else (int(mine.value), mine.mod_revision)

    def _found(self, page: RangeResult) -> tuple[int, int]:
        mine = next((item for item in page if item.key == self._key.encode()), None)
        return (0, 0) if mine is None else (int(mine.value), mine.mod_revision)

    async def _sum(self, revision: int = 0) -> int:
        kv = self._generation.kv
        read = until_answered(lambda: kv.range(self._prefix, prefix=True, revision=revision))
        return _total(await self._generation.until_over(read))

    async def value(self) -> int:
        """Return the sum.

        Raises:
            GenerationOver: the generation has ended.
        """
        return await self._sum()


def _total(page: RangeResult) -> int:
    return sum(int(item.value) for item in page)


# -- leadership -----------------------------------------------------------------------------------------------------
#
# Elections within a generation: one leader among its ranks, no longer than the generation lasts.
#
#     leadership = await run.elect("writer")                 # waits until this rank leads
#     await run.kv.put("progress", b"7", fence=leadership)   # while it leads *and* the generation lasts
#
# The candidates' keys are the client library's own (``client.lock.contender``), below
# ``sync/<generation>/elect/<name>/``, each with a lease of the candidate: one that dies makes room for the next without
# a new generation. Every write of the campaign and every write with ``fence=leadership`` carries both conditions.

TTL_S = 2


class Leadership:
    """One candidacy, and the leadership that follows from it; made by ``Run.elect``. Usable as ``fence=``.

    Arguments:
        generation: in which it is.
        name: of the election.
        value: what all ranks see of the leader; empty: its rank.
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
        """Change the value that all ranks see.

        Raises:
            TermLost: it does not lead any more.
            GenerationOver: the generation has ended.
        """
        self._generation.check()
        await self._term.proclaim(value)

    async def resign(self) -> None:
        """End it; does nothing if it is over, with its generation too.

        Raises:
            TermLost: it did not lead any more: another rank may have led meanwhile.
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


def election_key(generation: Generation, name: str) -> str:
    """Before the keys of the candidates.

    Arguments:
        generation: in which it is.
        name: of the election.
    """
    return f"{generation.base}elect/{quoted(name)}"


async def leader(generation: Generation, name: str) -> KeyValue | None:
    """Return the leader's key; None: no rank leads.

    Arguments:
        generation: in which it is.
        name: of the election.
    """
    return await generation.until_over(generation.kv.leader(election_key(generation, name)))
