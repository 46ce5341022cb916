"""What every part of a client works with: a way to the cluster, a key space, a default timeout, watches, keep-alives.

A view of a client is the same with another space, on the same connection.

    async with open_scope(core, timeout_s=5.0) as scope:       # of ``library``, which puts one together
        lease = await Lease(scope, 10)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from raftkv.client.arguments import seconds
from raftkv.client.keys import Space, Text
from raftkv.client.rpc.core import Client as Core
from raftkv.client.rpc.methods import Method, staleness_metadata

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from raftkv.client.kv.compares import FenceLike
    from raftkv.client.lease.keeper import LeaseKeeper
    from raftkv.client.watch.hub import WatchHub

T = TypeVar("T", bound="Message")


@dataclass(slots=True)
class Scope:
    """The common ground of the parts of a client.

    Attributes:
        core: calls with failover.
        space: keys as this client sees them.
        timeout_s: deadline of a call that is given none.
        hub: the watches of the connection.
        keeper: the leases of the connection.
        fence: what every txn depends on that names no other fence; None: nothing.
    """

    core: Core
    space: Space
    timeout_s: float
    hub: WatchHub
    keeper: LeaseKeeper
    fence: FenceLike | None = None

    def inside(self, prefix: Text) -> Scope:
        """Return the scope of the keys with a prefix."""
        return dataclasses.replace(self, space=self.space.inside(prefix))

    def fenced(self, fence: FenceLike) -> Scope:
        """Return the same scope with all its txns dependent on a fence."""
        return dataclasses.replace(self, fence=fence)

    def call(
        self, method: Method[T], request: Any, timeout_s: float | None = None, max_staleness_s: float | None = None
    ) -> Coroutine[Any, Any, T]:
        """Call a method at any endpoint.

        Arguments:
            method: what to call.
            request: its request message, with keys of the store.
            timeout_s: for all attempts together; None: the scope's.
            max_staleness_s: a read may be that much older than the call; None: the request says how old it may be.

        Raises:
            StatusError: the cluster refused, or could not be reached in time.
            TypeError: a time is no number.
            ValueError: a time is not finite, or the staleness is negative.
        """
        timeout_s = self.timeout_s if timeout_s is None else seconds(timeout_s, "timeout_s")
        if max_staleness_s is None:
            return self.core.call(method, request, timeout_s=timeout_s)
        return self.core.call(method, request, timeout_s=timeout_s, metadata=staleness_metadata(max_staleness_s))


class Part:
    """Methods of a client about one subject.

    Attributes:
        scope: what it works with.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
