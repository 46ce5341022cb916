"""Leadership that is handed over: by MoveLeader, and before a leader stops.

    follower asked              -> not leader
    unknown member, learner     -> bad leader transferee
    this member itself          -> done
    anybody else                -> the core brings the target up to date and has it campaign; answered when it leads

The core gives a transfer up after an election timeout; etcd's leader goes on waiting then, until the caller gives up.
Here the wait ends after the request timeout at the latest, with etcd's text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from raftkv import errors
from raftkv.pb import rpc_pb2
from raftkv.raft.types import NONE
from raftkv.rpc.server.calls import UnaryCall
from raftkv.server.node.node import Node
from raftkv.server.services.responder import Responder, parse_or_raise, refusals

_log = logging.getLogger(__name__)
_NO_HEADER: Final = rpc_pb2.MoveLeaderResponse().SerializeToString()


class LeaderMove:
    """Handler of MoveLeader.

    Arguments:
        responder: the member's shared parts.
    """

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    async def handle(self, data: bytes, call: UnaryCall) -> bytes:
        """Move leadership; the answer has no header."""
        with refusals():
            self._responder.admission.check_read(call, serializable=False)
            request = parse_or_raise(rpc_pb2.MoveLeaderRequest, data)
            await self._move(request.targetID)
        return _NO_HEADER

    async def _move(self, target: int) -> None:
        node = self._responder.node
        if node.leader != node.settings.member_id:
            raise errors.NotLeaderError
        if target not in node.conf_state.voters:
            raise errors.BadLeaderTransfereeError
        node.transfer_leader(target)
        try:
            async with asyncio.timeout(node.settings.request_timeout_s):
                await node.wait_until(lambda: node.leader == target or node.stopped)
        except TimeoutError:
            raise errors.LeaderTransferTimeoutError from None
        if node.leader != target:
            raise errors.StoppedError


async def hand_over(node: Node, connected_since: Callable[[int], float | None]) -> None:
    """Give leadership, if this member has it, to the voter that has been connected longest, as etcd does at a stop.

    One that has all that is committed comes before one that would have to catch up first.

    Arguments:
        node: of the member.
        connected_since: loop time since when a peer is connected, None while it is not.
    """
    own_id = node.settings.member_id
    connected = {peer: since for peer in node.conf_state.voters if (since := connected_since(peer)) is not None}
    if node.leader != own_id or not connected:
        return
    committed = node.committed
    node.transfer_leader(min(connected, key=lambda peer: (not node.has_log(peer, committed), connected[peer])))
    try:
        async with asyncio.timeout(node.settings.election_s):
            await node.wait_until(lambda: node.leader not in (NONE, own_id))
    except TimeoutError:
        _log.warning("leadership was not taken over in time")
