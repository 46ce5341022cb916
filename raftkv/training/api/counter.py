"""Counters of a generation: sums over what each rank has added.

    steps = run.counter("steps")
    number = await steps.add(1)        # how many there are now, this one included: no two ranks get the same
    await steps.value()

Each rank has a key of its own below ``sync/<generation>/counter/<name>/``, with all that it has added; ``add`` puts it
and reads the others' in the same txn. So ranks never get in each other's way, as they would by compare-and-set of one
key. The txn has the condition that the own key is as this rank wrote it last: a copy of it that was held up somewhere
changes nothing any more. If a copy whose answer was lost has done it, the sum is read as of its revision, for another
rank may have added since, and has been told the sum of now. The price: an answer carries a number for every rank that
has added.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from raftkv.client.arguments import whole
from raftkv.client.kv.operations import GetRange, Put, mod_revision
from raftkv.client.rpc.retry import until_answered
from raftkv.training.api.generation import RESTORED, quoted

if TYPE_CHECKING:
    from raftkv.client.values import RangeResult, TxnResult
    from raftkv.training.api.generation import Generation


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
            GenerationOver: the generation has ended; nothing was added that anybody will see.
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
