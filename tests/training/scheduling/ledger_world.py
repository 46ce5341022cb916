"""A store in memory in which nodes of several runs register, for tests of what arbiters share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from raftkv.client.operations import Put
from raftkv.training.records import RunKeys
from tests.virtual_store.direct import StoreWorld


class LedgerWorld(StoreWorld):
    """The store, and the nodes in it."""

    def arrive(self, run: str, node: str) -> int:
        """A node registers; its lease."""
        lease = self.store.grant(1)
        self.store.txn((), (Put(RunKeys(run).node(node), b"{}", lease),))
        return lease


async def until(condition: Callable[[], object]) -> None:
    """Give the loop turns until a condition holds."""
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise TimeoutError("it never came")
