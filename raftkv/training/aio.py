"""The training API for asyncio: the same names as ``raftkv.training``, with awaitable methods.

run = await raftkv.training.aio.join("job", endpoints="h1:2379", min_nodes=2)
"""

from __future__ import annotations

from raftkv.training.api.async_run import Run, join
from raftkv.training.api.generation import Counter, Leadership
from raftkv.training.errors import BarrierTimeout, warn_deprecated

__all__ = ["BarrierTimeout", "Counter", "Leadership", "Run", "join"]


def __getattr__(name: str) -> type[Leadership]:
    if name != "RunTerm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_deprecated(name, "Leadership")
    return Leadership
