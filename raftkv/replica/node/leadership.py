"""Reactions to the loss or election of a leader, and the transfer of leadership.

    LeaderGuard    ends streams that require a leader after three election timeouts without one
    LostLeader     campaigns soon after the process of the leader has ended
    StalledLeader  transfers leadership while this leader's log waits for the disk and the others commit without it
    LeaderLog      logs when leaders are found and lost
    hand_over      transfers leadership before a leader stops

Nothing here runs on the path of requests, and nothing here is needed for safety.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from raftkv import errors
from raftkv.loop.limiter import Limiter
from raftkv.raft.types import NONE, StateRole
from raftkv.replica.node.node import Node
from raftkv.rpc.server.calls import ServerCall
from raftkv.rpc.status import RpcError

_log = logging.getLogger(__name__)

ELECTIONS: Final = 3
ENDED_AT_ONCE: Final = 100
"""Number of streams that end in one turn of the loop when there is no leader: about 10 ms, because a member that takes
part in the election must process messages.
"""


class LeaderGuard:
    """Ends streams that require a leader while there is none, and all streams when the member stops.

    Clients request this with the metadata ``hasleader: true``, so that a watch on a partitioned member fails over
    instead of hanging forever (etcd: server/etcdserver/api/v3rpc/interceptor.go, monitorLeader).

        await guard.until_leader_lost(call)      # forever, if the call requires no leader; cancelled with its task
        guard.watch_over(call)                   # the same for a call without a task: it is aborted
        guard.forget(call)

    Arguments:
        node: knows the leader.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._open: dict[asyncio.Future[None], None] = {}
        self._calls: dict[ServerCall, bool] = {}
        """Calls without tasks, and whether they require a leader."""
        self._ending = Limiter(ENDED_AT_ONCE)
        self._timer: asyncio.TimerHandle | None = None

    def until_leader_lost(self, call: ServerCall) -> asyncio.Future[None]:
        """Return a future for the handler of a call, which ends only when the leader is lost or this member stops.

        It then raises RpcError, UNAVAILABLE; for the leader only if the call requires one. The handler may set another
        exception to end its own waiting.
        """
        end: asyncio.Future[None] = self._loop.create_future()
        self._open[end] = None
        end.add_done_callback(lambda ended: self._open.pop(ended, None))
        if _insists(call):
            self._waiting[end] = None
            end.add_done_callback(lambda ended: self._waiting.pop(ended, None))
        return end

    def watch_over(self, call: ServerCall) -> None:
        """Abort a call in the cases in which ``until_leader_lost`` ends.

        Arguments:
            call: call without a task; pass it to ``forget`` when it ends.
        """
        self._calls[call] = _insists(call)

    def forget(self, call: ServerCall) -> None:
        """Stop watching over a call."""
        self._calls.pop(call, None)

    def leader_changed(self) -> None:
        """Start to count the time without a leader; or stop counting, and end no more streams."""
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
        """End all streams now, because the member stops, so that the stop does not wait for them."""
        if self._timer is not None:
            self._timer.cancel()
        error = errors.StoppedError()
        streams: list[asyncio.Future[None] | ServerCall] = [*self._open, *self._calls]
        for stream in streams:
            _end(stream, error)


def _insists(call: ServerCall) -> bool:
    return (b"hasleader", b"true") in call.headers


def _end(stream: asyncio.Future[None] | ServerCall, error: errors.StatusError) -> None:
    status = RpcError(error.code, str(error), trailers=error.trailers)
    if not isinstance(stream, asyncio.Future):
        stream.abort(status)
    elif not stream.done():
        stream.set_exception(status)


async def hand_over(node: Node, connected_since: Callable[[int], float | None]) -> None:
    """Transfer leadership, if this member has it, to the voter with the longest connection, as etcd does at a stop.

    A voter that has all committed entries is preferred to one that would have to catch up first.

    Arguments:
        node: node of the member.
        connected_since: returns the loop time at which a peer was connected; ``None`` while it is not.
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
        _log.warning("no other member took over the leadership in time")


class LostLeader:
    """Campaigns soon after the leader's process has ended: within a few ticks instead of seconds.

    An election timeout is long because silence is weak evidence. A refused connection is stronger: the machine of the
    leader answers, and nothing listens on the peer port any more. So a follower whose stream to the leader broke, and
    whose next connection was refused, forgets the leader (with etcd-raft's ``ForgetLeader``, which is made for this),
    and unless it hears of a leader

        leader killed      broken, refused           +1 tick                  +2 ticks
        ---------|----------------|---------------------|------------------------|----->
                                  forgotten             1st voter campaigns      2nd voter campaigns if there is none

    it asks for pre-votes. The voters campaign one tick apart, in order of id, so that they do not split the votes.

    Invariants: nothing here is needed for safety, and a wrong report is harmless. Members that still hear from their
    leader give no pre-votes, and without a quorum of these no new term begins; the next heartbeat, at most a tick
    later, makes the leader known again. Therefore members without pre-vote or without the quorum check never do this.

    Not covered: failed machines and cut networks. No connection is refused there, and the timeout decides.

    Arguments:
        node: node of the member.
        loop: its loop.
    """

    def __init__(self, node: Node, loop: asyncio.AbstractEventLoop) -> None:
        self._node = node
        self._loop = loop

    def is_gone(self, peer_id: int) -> None:
        """Handle the report that a member's port refuses connections.

        Arguments:
            peer_id: id of that member.
        """
        node = self._node
        own_id = node.settings.member_id
        if node.stopped or node.leader != peer_id or node.role != StateRole.FOLLOWER:
            return
        config = node.raw.raft.config
        others = [voter for voter in sorted(node.conf_state.voters) if voter != peer_id]
        if own_id not in others or not (config.pre_vote and config.check_quorum):
            return
        node.forget_leader()
        # At least one tick: a leader that still exists is heard from by then, and the other members have noticed too.
        self._loop.call_later(node.settings.tick_s * (1 + others.index(own_id)), self._campaign, node.term)

    def _campaign(self, term: int) -> None:
        node = self._node
        if not node.stopped and node.leader == NONE and node.role == StateRole.FOLLOWER and node.term == term:
            node.campaign()


class StalledLeader:
    """Transfers leadership while the disk of this leader hangs, and the other members commit without it.

    A quorum needs no sync of the leader, and heartbeats need no disk. So a leader whose sync hangs would lead on, and
    its own clients, and leases, would wait for the disk. It looks once per election timeout, and transfers the
    leadership if the log on this disk has not grown since the last look, and is shorter than what is committed.

    Not covered: a sync on the loop that hangs. It stops the heartbeats too, and the others elect a leader.

    Arguments:
        node: node of the member.
        loop: its loop.
        connected_since: as for ``hand_over``.
    """

    def __init__(
        self, node: Node, loop: asyncio.AbstractEventLoop, connected_since: Callable[[int], float | None]
    ) -> None:
        self._node = node
        self._loop = loop
        self._connected_since = connected_since
        self._timer: asyncio.TimerHandle | None = None
        self._transfer: asyncio.Task[None] | None = None

    def leader_changed(self) -> None:
        """Begin to look, if this member is the new leader."""
        self.close()
        if self._node.leader == self._node.settings.member_id:
            self._look_later(None)

    def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self, durable: int | None) -> None:
        self._timer = self._loop.call_later(self._node.settings.election_s, self._look, durable)

    def _look(self, before: int | None) -> None:
        node = self._node
        durable, is_under_way = node.durable, self._transfer is not None and not self._transfer.done()
        if durable is not None and durable == before and durable < node.committed and not is_under_way:
            _log.warning("the disk of the log hangs, and other members commit without it: handing over the leadership")
            self._transfer = self._loop.create_task(hand_over(node, self._connected_since))
        self._look_later(durable)


REMINDER_FIRST_S: Final = 5.0
REMINDER_MAX_S: Final = 300.0


class LeaderLog:
    """Logs when leaders are found and lost, and how long there has been none.

    There is a line for each change of the leader and, while there is none, a reminder of what is missing, first after
    ``REMINDER_FIRST_S``, then at intervals that double each time.

    Arguments:
        node: node whose leader is logged.
        loop: loop of the node.
        name_of: returns the readable name of a member.
        is_connected: returns whether the stream to another member is connected.
        hears: returns whether the stream from another member is connected.
    """

    def __init__(
        self,
        node: Node,
        loop: asyncio.AbstractEventLoop,
        name_of: Callable[[int], str],
        is_connected: Callable[[int], bool],
        hears: Callable[[int], bool],
    ) -> None:
        self._node = node
        self._loop = loop
        self._name_of = name_of
        self._is_connected = is_connected
        self._hears = hears
        self._leader = NONE
        self._lost_at = loop.time()
        self._reminder: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the reminders."""
        if self._leader == NONE:
            self._lost_at = self._loop.time()
            self.stop()
            self._remind_in(REMINDER_FIRST_S)

    def stop(self) -> None:
        """Stop the reminders."""
        if self._reminder is not None:
            self._reminder.cancel()

    def leader_changed(self) -> None:
        """Log the leader that was found or lost."""
        node, before = self._node, self._leader
        self._leader, term = node.leader, node.raw.raft.term
        self.stop()
        if node.leader == NONE:
            self._lost_at = self._loop.time()
            self._remind_in(REMINDER_FIRST_S)
            _log.info("no leader in term %d: %s is unreachable or stepped down", term, self._name_of(before))
            return
        took_s = self._loop.time() - self._lost_at
        after = f"after {took_s:.2f} s without a leader" if before == NONE else f"in place of {self._name_of(before)}"
        if node.leader == node.settings.member_id:
            _log.info("this member became leader in term %d, %s", term, after)
        else:
            _log.info("%s became leader in term %d, %s", self._name_of(node.leader), term, after)

    def _remind_in(self, delay_s: float) -> None:
        self._reminder = self._loop.call_later(delay_s, self._remind, delay_s)

    def _remind(self, delay_s: float) -> None:
        node = self._node
        voters = node.conf_state.voters
        away = [self._name_of(voter) for voter in voters if not self._is_there(voter)]
        missing = f"; not connected: {', '.join(away)}" if away else ""
        others = [voter for voter in voters if voter != node.settings.member_id and self._is_there(voter)]
        if silent := [self._name_of(voter) for voter in others if not self._hears(voter)]:
            missing += f"; connected, but do not reach this member: {', '.join(silent)}"
        _log.warning(
            "no leader for %.0f s: writes and linearizable reads wait; %d of %d voters are connected, a quorum is %d%s",
            self._loop.time() - self._lost_at,
            len(voters) - len(away),
            len(voters),
            len(voters) // 2 + 1,
            missing,
        )
        self._remind_in(min(2 * delay_s, REMINDER_MAX_S))

    def _is_there(self, member_id: int) -> bool:
        return member_id == self._node.settings.member_id or self._is_connected(member_id)
