"""What every part of the library works with: a way to the cluster, a key space, a default timeout.

A view of a client is another scope on the same connection: same core, same watch stream, same keeper of leases.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from raftkv.client.lease.keeper import LeaseKeeper
from raftkv.client.rpc.core import Client as Core
from raftkv.client.space import Space
from raftkv.client.watch.hub import WatchHub


class Scope:
    """The common ground of the parts of a client.

    Attributes:
        core: calls with failover.
        space: keys as this client sees them.
        timeout_s: deadline of a call that is given none.
        hub: the watches of the connection.
        keeper: the leases of the connection.
    """

    def __init__(self, core: Core, space: Space, timeout_s: float, hub: WatchHub, keeper: LeaseKeeper) -> None:
        self.core = core
        self.space = space
        self.timeout_s = timeout_s
        self.hub = hub
        self.keeper = keeper


@asynccontextmanager
async def open_scope(core: Core, timeout_s: float) -> AsyncIterator[Scope]:
    """Make a scope of all keys for a block, at whose end its watches and keep-alives end; the core stays open.

    Arguments:
        core: calls with failover.
        timeout_s: deadline of a call that is given none.
    """
    scope = Scope(core, Space(), timeout_s, WatchHub(core), LeaseKeeper(core))
    try:
        yield scope
    finally:
        await scope.hub.close()
        await scope.keeper.close()
