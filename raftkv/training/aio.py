"""The training API for asyncio: the same names as ``raftkv.training``, to be awaited.

run = await raftkv.training.aio.join("job", endpoints="h1:2379", min_nodes=2)
"""

from __future__ import annotations

from raftkv.training.api.async_run import Run, join
from raftkv.training.api.counter import Counter
from raftkv.training.api.generation import BarrierTimeout
from raftkv.training.api.leadership import Leadership, RunTerm

__all__ = ["BarrierTimeout", "Counter", "Leadership", "Run", "RunTerm", "join"]
