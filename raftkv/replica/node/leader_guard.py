"""Streams that insist on a leader: ended with "no leader" once there has been none for three election timeouts.

Clients ask for it with the metadata ``hasleader: true``, so that a watch on a member that is cut off from the others
fails over instead of standing still for ever (etcd: server/etcdserver/api/v3rpc/interceptor.go, monitorLeader).

    await guard.until_leader_lost(call)      # for ever, for a call that does not insist; cancelled with its task
    guard.watch_over(call)                   # the same for a call without a task: it is aborted
    guard.forget(call)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from raftkv import errors
from raftkv.loop.limiter import Limiter
from raftkv.raft.types import NONE
from raftkv.replica.node.node import Node
from raftkv.rpc.server.calls import ServerCall
from raftkv.rpc.status import RpcError

_log = logging.getLogger(__name__)

ELECTIONS: Final = 3
ENDED_AT_ONCE: Final = 100
"""Streams that end in a turn of the loop when there is no leader: about 10 ms, and a member that is to elect one must
hear the others.
"""


class LeaderGuard:
    """Ends streams that insist on a leader while there is none, and all streams when the member stops.

    Arguments:
        node: knows the leader.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._open: dict[asyncio.Future[None], None] = {}
        self._calls: dict[ServerCall, bool] = {}
        """Calls without tasks, and whether they insist on a leader."""
        self._ending = Limiter(ENDED_AT_ONCE)
        self._timer: asyncio.TimerHandle | None = None

    def until_leader_lost(self, call: ServerCall) -> asyncio.Future[None]:
        """Return a future for the handler of a call: it ends only at the loss of the leader or of this member.

        It then raises RpcError, UNAVAILABLE; for the leader only if the call insists on one. The handler may set
        another exception to end its own waiting.
        """
        end: asyncio.Future[None] = self._loop.create_future()
        self._open[end] = None
        end.add_done_callback(lambda ended: self._open.pop(ended, None))
        if _insists(call):
            self._waiting[end] = None
            end.add_done_callback(lambda ended: self._waiting.pop(ended, None))
        return end

    def watch_over(self, call: ServerCall) -> None:
        """Abort a call when such a handler would be ended.

        Arguments:
            call: to be forgotten when it is over.
        """
        self._calls[call] = _insists(call)

    def forget(self, call: ServerCall) -> None:
        """Watch over a call no more."""
        self._calls.pop(call, None)

    def leader_changed(self) -> None:
        """Start to count the time without a leader; or stop that, and end no more streams."""
        self._ending.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._node.leader == NONE:
            self._timer = self._loop.call_later(ELECTIONS * self._node.settings.election_s, self._give_up)

    def _give_up(self) -> None:
        insisting = [call for call, insists in self._calls.items() if insists]
        streams: list[asyncio.Future[None] | ServerCall] = [*self._waiting, *insisting]
        error = errors.NoLeaderError()
        self._ending.begin(partial(_end, stream, error) for stream in streams)

    def close(self) -> None:
        """The member stops: end all streams now, so that the stop does not wait for them."""
        if self._timer is not None:
            self._timer.cancel()
        error = errors.StoppedError()
        streams: list[asyncio.Future[None] | ServerCall] = [*self._open, *self._calls]
        for stream in streams:
            _end(stream, error)


def _insists(call: ServerCall) -> bool:
    return (b"hasleader", b"true") in call.headers


def _end(stream: asyncio.Future[None] | ServerCall, error: errors.StatusError) -> None:
    status = RpcError(error.code, str(error))
    if not isinstance(stream, asyncio.Future):
        stream.abort(status)
    elif not stream.done():
        stream.set_exception(status)


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
