"""Counters of a generation: sums over what each rank has added.

    steps = run.counter("steps")
    number = await steps.add(1)        # how many there are now, this one included: no two ranks get the same
    await steps.value()

Each rank has a key of its own below ``sync/<generation>/counter/<name>/``, with all that it has added; ``add`` puts it
and reads the others' in the same txn. So ranks never get in each other's way, as they would by compare-and-set of one
key, and an ``add`` whose outcome is unknown is simply done again. The price: an answer carries a number for every rank
that has added.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from raftkv.client.kv.operations import GetRange, Put
from raftkv.client.rpc.retry import until_answered
from raftkv.training.api.generation import quoted

if TYPE_CHECKING:
    from raftkv.client.values import RangeResult
    from raftkv.training.api.generation import Generation


class Counter:
    """One counter, as one rank sees it; made by ``Run.counter``."""

    def __init__(self, generation: Generation, name: str) -> None:
        self.name = name
        self._generation = generation
        self._prefix = f"{generation.base}counter/{quoted(name)}/"
        self._key = f"{self._prefix}{generation.rank:06d}"
        self._added: int | None = None
        self._adding = asyncio.Lock()

    async def add(self, amount: int = 1) -> int:
        """Add to it; returns what it is then.

        Raises:
            GenerationOver: the generation has ended; nothing was added that anybody will see.
            StatusError: the cluster refused.
        """
        if not isinstance(amount, int):
            raise TypeError(f"counters count in whole numbers, not {type(amount).__name__}")
        async with self._adding:
            if self._added is None:
                self._added = await self._read_added()
            total = self._added + amount
            mine = Put(self._key, str(total))
            done = await self._generation.commit(lambda empty: empty.then(mine, GetRange(self._prefix, prefix=True)))
            self._added = total
            return _total(done.results[1])

    async def _read_added(self) -> int:
        mine = await self._generation.until_over(until_answered(lambda: self._generation.kv.get(self._key)))
        return 0 if mine is None else int(mine.value)

    async def value(self) -> int:
        """Return the sum.

        Raises:
            GenerationOver: the generation has ended.
        """
        read = until_answered(lambda: self._generation.kv.range(self._prefix, prefix=True))
        return _total(await self._generation.until_over(read))


def _total(page: RangeResult) -> int:
    return sum(int(item.value) for item in page)
