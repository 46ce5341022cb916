"""When a member that starts may serve clients: not before it is as far as it has ever shown itself to be.

    a configuration with voters                 always waited for: who joins has none before the leader's database
    applied again what was committed here       always waited for: the log and the mark beside the database say how far
    a quorum confirmed a read after that, and
    the cluster knows this member's URLs        waited for at most ``--wait-cluster-ready-timeout``, as in etcd

The first is enough after a kill: what a member shows, it has applied, and the mark keeps how far that was. The second
covers a power cut, which may have cost the mark its last moments: all that this member had applied was committed, so
the index that a quorum confirms is not before it. A member that finds no quorum in that time serves what it has, to
callers that ask for no more (serializable reads, Status); all else waits for the quorum as at any other time.

Until then the client port is bound and connections queue in the kernel, as with etcd: a client waits for its first
answer instead of being refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from raftkv.errors import StatusError
from raftkv.replica.node.node import Node

_log = logging.getLogger(__name__)


class Readiness:
    """Decides the moment, once.

    Arguments:
        node: of the member.
        publish: returns when the cluster knows the member's client URLs.
        timeout_s: longest wait for a quorum.

    Attributes:
        is_ready: whether the moment has come.
    """

    def __init__(self, node: Node, publish: Callable[[], Awaitable[None]], timeout_s: float) -> None:
        self.is_ready = False
        self._node = node
        self._publish = publish
        self._timeout_s = timeout_s

    async def wait(self) -> None:
        """Return when clients may be served."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        node, committed = self._node, self._node.committed
        await node.wait_until(lambda: node.applied >= committed and bool(node.conf_state.voters))
        try:
            async with asyncio.timeout_at(deadline):
                await self._publish()
                await self._confirm()
        except TimeoutError:
            _log.warning(
                "%s within %g s: clients are served from what is known here (applied %d, revision %d)",
                "no quorum" if node.is_leaderless else "not caught up with the leader",
                self._timeout_s,
                self._node.applied,
                self._node.store.revision,
            )
        self.is_ready = True

    @staticmethod
    def announce() -> None:
        """Say that connections are accepted: etcd's line and nothing else in it, since scripts wait for it."""
        _log.info("ready to serve client requests")

    async def _confirm(self) -> None:
        while not self._node.stopped:
            with contextlib.suppress(StatusError):
                await self._node.confirm_read()
                return
