"""A store in memory in which nodes of several runs register, for tests of what arbiters share."""

from __future__ import annotations

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
