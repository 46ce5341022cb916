"""Leases on one member: what services ask for, and when leases end.

Puts together the applied leases (``apply/leases``), this member's view of time (``lease.times``), the leader's
decisions (``lease.renewals``) and the way to the leader (``lease.routing``); owns the timer and the change of roles:

    leader elected here -> a read is confirmed, so all entries before this term are applied -> primary
    lease over          -> a read is confirmed, so this member has a quorum -> its end is proposed
    leadership lost     -> every keep-alive that waits goes to the next leader

Grants and revocations travel through the log like any write. For callers inside the member:

    lease_id = await lessor.grant(60)         # as LeaseGrant: TTL raised to the least, a random id
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.leases import TTL_MAX_S, Leases
from raftkv.apply.request import Kind
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft.types import StateRole
from raftkv.rpc.client.channel import Channel
from raftkv.server.lease.forwarded import Renewal, Shortening, TimeToLive
from raftkv.server.lease.graces import Orphan
from raftkv.server.lease.renewals import RENEW_MAX, Done, Expiry, Renewals, Ticket
from raftkv.server.lease.routing import Router
from raftkv.server.lease.times import BEAT_S, PATIENCE_S, LeaseClock, LeaseTimes
from raftkv.server.node.node import Node
from raftkv.server.node.proposals import Waiter
from raftkv.server.services.leader_guard import ELECTIONS

GATHER_MAX_S: Final = 0.02
"""How long keep-alives gather while others are on their way: one of a lease that is ending is answered when it is gone,
and those with it; no other lease may end because of that."""

QUORUM_LATE_S: Final = 0.5
"""A quorum that takes so long to answer was not there meanwhile, or hardly."""

_TIMER_SLACK_S: Final = 0.001
"""A timer that is set for the end of a lease comes when it is over, whatever the rounding of clocks."""


class _Decision(Waiter):
    """A decision of this leader on its way through the log.

    A callback and no coroutine: what keep-alives wait for is answered in the turn that applied it.
    """

    __slots__ = ("done",)

    def __init__(self, request: raft_pb2.LeaseDecision, done: Done) -> None:
        self.request = request
        self.done = done

    def finish(self, outcome: Outcome) -> None:
        self.done(outcome.error)

    def fail(self, error: errors.StatusError) -> None:
        self.done(error)


class _Barrier:
    """Waits until everything before the term of a new leader is applied."""

    def __init__(self, lessor: Lessor) -> None:
        self.lessor = lessor

    def ready(self) -> None:
        self.lessor.barrier_passed(self)

    def fail(self, error: errors.StatusError) -> None:
        self.lessor.barrier_failed(self)


class _Confirmation:
    """Waits until a quorum has said that this leader leads: what it ends then is over for all."""

    def __init__(self, lessor: Lessor, asked_at: float) -> None:
        self.lessor = lessor
        self.asked_at = asked_at

    def ready(self) -> None:
        self.lessor.may_end_leases(self)

    def fail(self, error: errors.StatusError) -> None:
        self.lessor.may_not_end_leases(self)


class Lessor:
    """See the module.

    Arguments:
        node: of the member.
        leases: as applied.
        ttl_min_s: shortest TTL that is granted.
        channel, introduction: see ``Router``.
    """

    def __init__(
        self,
        node: Node,
        leases: Leases,
        *,
        ttl_min_s: int,
        channel: Callable[[int], Channel | None],
        introduction: Callable[[int], tuple[tuple[str, str], ...]],
    ) -> None:
        self._node = node
        self._ttl_min_s = ttl_min_s
        self._loop = asyncio.get_running_loop()
        self._clock = LeaseClock(self._loop.time)
        self.times = LeaseTimes(self._clock, self._lease_ended)
        self._renewals = Renewals(self.times, self._clock, self._propose, self._send_on)
        self._expiry = Expiry(self.times, self._propose)
        self._router = Router(node, self._is_primary, channel, introduction)
        self._random = random.SystemRandom()
        self._deadline = 0.0
        self._arrived: list[Ticket] = []
        self._arrived_elsewhere: list[Ticket] = []
        self._gathering: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._barrier: _Barrier | None = None
        self._confirmation: _Confirmation | None = None
        self._term = 0
        self._after_outage = False
        self._timer: asyncio.TimerHandle | None = None
        self._queueing: asyncio.Handle | None = None
        self._end_timers: set[asyncio.TimerHandle] = set()
        self.on_end: list[Callable[[int], None]] = []
        """Told of every lease that is gone, in the entry that ends it."""
        self.times.reloaded(leases.granted)

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Let time pass."""
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def stop(self) -> None:
        """Decide nothing more; whoever waits is told."""
        for timer in (self._timer, self._gathering, self._queueing, *self._end_timers):
            if timer is not None:
                timer.cancel()
        for ticket in self._renewals.surrender() + self._arrived + self._arrived_elsewhere:
            ticket.fail(errors.StoppedError())
        self._arrived.clear()
        self._arrived_elsewhere.clear()
        self._router.close()

    def _beat(self) -> None:
        self._timer = self._loop.call_later(BEAT_S, self._beat)
        self._sweep()

    def _sweep(self) -> None:
        try:
            self._clock.beat()
            if self.times.is_primary and not self._is_primary():
                self.leader_changed()  # lost and won again between two looks: another term
            if self.times.is_primary and self._confirmation is None and self._expiry.has_work():
                self._ask_to_end_leases()
            self._router.tick()
            self._queue_some()
        except Exception as error:
            self._node.fatal(error)

    def _ask_to_end_leases(self) -> None:
        if not self._node.stopped:
            self._confirmation = _Confirmation(self, self.clock())
            self._node.read(self._confirmation)

    def _queue_some(self) -> None:
        """Go on with what a change of leaders has left to be queued; a beat does so too, which is often enough."""
        if self.times.queue_some() and self._queueing is None:
            self._queueing = self._loop.call_soon(self._queue_more)

    def _queue_more(self) -> None:
        self._queueing = None
        try:
            self._queue_some()
        except Exception as error:
            self._node.fatal(error)

    # -- roles -------------------------------------------------------------------------------------------------------

    def _is_primary(self) -> bool:
        return self.times.is_primary and self._node.term == self._term

    def applied(self) -> None:
        """Answer keep-alives of leases that ended in the entries just applied."""
        self._renewals.applied()

    def leader_changed(self) -> None:
        """Take up or lay down the decisions about leases; hand what waits to whoever leads now."""
        self.times.demote()
        self._expiry.surrender()
        self._barrier = self._confirmation = None
        tickets = self._renewals.surrender()
        if self._node.role == StateRole.LEADER:
            node = self._node
            self._after_outage = self._loop.time() - node.leader_lost_at > ELECTIONS * node.settings.election_s
            self._raise_barrier()
        self._router.retry_all()
        self._send_on(tickets)

    def _raise_barrier(self) -> None:
        self._barrier = _Barrier(self)
        if not self._node.stopped:
            self._node.read(self._barrier)

    def barrier_passed(self, barrier: _Barrier) -> None:
        """Everything before this leader's term is applied, so its view of renewals is complete."""
        if barrier is self._barrier:
            self._barrier = None
            self._term = self._node.term
            self.times.promote(after_outage=self._after_outage)
            self._router.retry_all()

    def may_end_leases(self, confirmation: _Confirmation) -> None:
        """A quorum has answered since leases were found to be over. If that took long, it may not have been there for
        their owners either; what is doomed may be on its way into the log and stays so."""
        if confirmation is not self._confirmation:
            return
        self._confirmation = None
        if self.clock() - confirmation.asked_at > QUORUM_LATE_S:
            self.times.forgive(PATIENCE_S)
        self._expiry.sweep()

    def may_not_end_leases(self, confirmation: _Confirmation) -> None:
        """No quorum has answered: the next beat asks again."""
        if confirmation is self._confirmation:
            self._confirmation = None

    def barrier_failed(self, barrier: _Barrier) -> None:
        """No quorum answered: try again for as long as this member takes itself for the leader."""
        if barrier is self._barrier:
            self._raise_barrier()

    def _lease_ended(self, lease_id: int) -> None:
        self._renewals.lease_ended(lease_id)
        for callback in self.on_end:
            callback(lease_id)

    def _propose(self, kind: int, lease_ids: Sequence[int], done: Done) -> None:
        decision = raft_pb2.LeaseDecision(term=self._term, ids=lease_ids)
        try:
            self._node.submit(kind, decision.SerializeToString(), _Decision(decision, done))
        except errors.StatusError as error:
            done(error)

    # -- keep-alives and questions -----------------------------------------------------------------------------------

    def new_deadline(self) -> float:
        """Until when a request that comes now is worth an answer (loop time)."""
        return self._loop.time() + self._node.settings.request_timeout_s

    def keep_alive(self, ticket: Ticket) -> None:
        """Renew a lease; all that comes in a turn of the loop travels together, under one deadline."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._dispatch)
            self._deadline = self.new_deadline()
        ticket.deadline = self._deadline
        (self._arrived if ticket.is_local else self._arrived_elsewhere).append(ticket)

    def _dispatch(self) -> None:
        self._scheduled = False
        elsewhere, self._arrived_elsewhere = self._arrived_elsewhere, []
        if elsewhere:
            self._router.route(Renewal(self._renewals, elsewhere))
        if self._arrived and self._gathering is None:
            # No more than one entry renews: neither the message to another member nor a turn of it grows without bound.
            arrived, self._arrived = self._arrived[:RENEW_MAX], self._arrived[RENEW_MAX:]
            # Until these are answered, others gather: to another member they cost the same, few or many.
            self._gathering = self._loop.call_later(GATHER_MAX_S, self._passed_on)
            self._router.route(Renewal(self._renewals, arrived, self._passed_on))

    def _passed_on(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._arrived and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._dispatch)

    def _send_on(self, tickets: list[Ticket]) -> None:
        """To whoever leads now."""
        for is_local in (True, False):
            group = [ticket for ticket in tickets if ticket.is_local is is_local]
            if group:
                self._router.route(Renewal(self._renewals, group))

    def ask(self, errand: TimeToLive | Shortening) -> None:
        """Have something done by the leader."""
        self._router.route(errand)

    def clock(self) -> float:
        """Loop time."""
        return self._loop.time()

    def orphaned(self, orphans: list[Orphan]) -> None:
        """The connection of the owner of these leases to this member broke: tell the leader."""
        self._router.route(Shortening(self, orphans, is_local=True))

    def shorten(self, orphans: list[Orphan]) -> None:
        """Let leases end soon, and see to it that the first ends in time; this member leads."""
        now = self.clock()
        ends = [self.times.shorten(one.lease_id, one.grace_s, now - one.answered_at) for one in orphans]
        first_s = min((end for end in ends if end is not None), default=None)
        if first_s is None:
            return

        def sweep() -> None:
            self._end_timers.discard(timer)
            self._sweep()

        timer = self._loop.call_later(first_s + _TIMER_SLACK_S, sweep)
        self._end_timers.add(timer)

    def when_whole(self, callback: Callable[[], None]) -> None:
        """Call back when no entry is half applied: at once, nearly always."""
        self._node.applying.when_whole(callback)

    def time_to_live(self, request: rpc_pb2.LeaseTimeToLiveRequest) -> rpc_pb2.LeaseTimeToLiveResponse:
        """The answer of this member, which must be the confirmed leader, but for keys. TTL -1: no such lease."""
        response = rpc_pb2.LeaseTimeToLiveResponse(ID=request.ID, TTL=-1)
        granted_s = self.times.ttl_s(request.ID)
        if granted_s:
            response.TTL = int(self.times.remaining_s(request.ID))
            response.grantedTTL = granted_s
        return response

    # -- writes ------------------------------------------------------------------------------------------------------

    def grant_request(self, ttl_s: int, lease_id: int = 0, *, exact: bool = False) -> rpc_pb2.LeaseGrantRequest:
        """The entry that grants a lease: all that is chosen is chosen before it goes into the log.

        Arguments:
            ttl_s: asked for; raised to the least.
            lease_id: 0 for a random one.
            exact: grant as little as a second: the owner can stand an election without an answer.

        Raises:
            LeaseTTLTooLargeError: above what is granted to anybody.
        """
        if ttl_s > TTL_MAX_S:
            raise errors.LeaseTTLTooLargeError
        while lease_id == 0:
            lease_id = self._random.getrandbits(63)
        return rpc_pb2.LeaseGrantRequest(TTL=max(ttl_s, 1 if exact else self._ttl_min_s), ID=lease_id)

    async def grant(self, ttl_s: int) -> int:
        """Grant a lease to a caller inside this member; its id.

        Raises:
            StatusError: as LeaseGrant answers.
        """
        request = self.grant_request(ttl_s)
        await self._through_log(Kind.LEASE_GRANT, request)
        return request.ID

    async def revoke(self, lease_id: int) -> None:
        """End a lease for a caller inside this member.

        Raises:
            StatusError: as LeaseRevoke answers.
        """
        await self._through_log(Kind.LEASE_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=lease_id))

    async def _through_log(self, kind: int, request: Any) -> None:
        outcome = await self._node.propose(kind, request.SerializeToString(), request)
        if outcome.error is not None:
            raise outcome.error
