"""Leases on one member: the operations for services, and the decisions when leases end.

Combines the applied leases (``apply/leases``), this member's view of time (``times``), the leader's decisions
(``renewals``) and queries to the leader (``on_leader``); has the timer and handles role changes:

    leader elected here -> a read is confirmed, so all entries before this term are applied -> primary
    lease expired       -> a read is confirmed, so this member has a quorum -> its end is proposed
    leadership lost     -> every pending keep-alive goes to the next leader

A keep-alive takes the shortest safe path:

    this member leads, confirmed recently; a RENEW of the lease is in the log  answered at once, from memory
    this member leads, confirmed recently                                      answered when the next RENEW is applied
    otherwise                it joins the batch of this turn, which is confirmed by a quorum or sent to the leader

Grants and revocations go through the log like any write. For callers inside the member:

    lease_id = await lessor.grant(60, caller, identity)   # like LeaseGrant: TTL raised to the minimum, a random id
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from raftkv import errors
from raftkv.apply.applier import Applier, Outcome
from raftkv.apply.leases import TTL_MAX_S, Leases
from raftkv.apply.wire import Caller, Kind
from raftkv.loop.cork import Cork
from raftkv.loop.fair import MEMBER
from raftkv.loop.limiter import Limiter
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft.types import NO_LIMIT, Entry, StateRole
from raftkv.replica.lease.graces import ConnectionLost
from raftkv.replica.lease.on_leader import RENEW, SHORTEN, TIME_TO_LIVE, OnLeader, Question
from raftkv.replica.lease.renewals import FAILED_AT_ONCE, RENEW_MAX, Done, Expiry, PendingKeepAlive, Renewals, fail_each
from raftkv.replica.lease.times import BEAT_S, FRESH, PATIENCE_S, LeaseClock, LeaseTimes
from raftkv.replica.node.leadership import ELECTIONS
from raftkv.replica.node.node import Node
from raftkv.replica.node.proposals import Waiter
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.shares import Identity, Shares, refusal

# -- granters -------------------------------------------------------------------------------------------------------
#
# The leases that this member granted, counted by identity: each has a share (``rpc/shares``).
#
#     granters.admit(lease_id, identity)     # before the grant is proposed; ShareError: its share is used up
#     granters.ended(lease_id)               # for every lease that has ended
#
# A lease is not stored with its granter, so each member counts the leases that clients request from it, until it stops.
# Leases that other members granted, or this one before its start, count as used by others. So an identity that goes to
# each member, or returns after each restart, gets seven eighths of the rest each time, and something is left for later
# identities. No lease is taken back, because keys depend on it.
#
# Memory: one entry for each lease, and one for each grant without an outcome yet.

LEASES_MAX: Final = 1_000_000
"""Maximum number of leases of one identity alone; all together may have a seventh more. etcd is limited by memory only.
"""

UNKNOWN_MAX_S: Final = 60.0
"""Seconds after which a grant that was not applied no longer counts."""

_LOOKED_AT: Final = 2
"""Number of earlier grants checked at each new one for whether they were applied: more than arrive."""


class Granters:
    """Counts leases by the identity to which they were granted here.

    Arguments:
        leases: applied leases.
        clock: monotonic seconds.
    """

    def __init__(self, leases: Leases, clock: Callable[[], float]) -> None:
        self._leases = leases
        self._clock = clock
        self._identities: dict[int, Identity] = {}
        self._proposed: deque[tuple[float, int]] = deque()
        self.shares = Shares(LEASES_MAX)

    def admit(self, lease_id: int, identity: Identity) -> None:
        """Count a lease that is about to be granted.

        Arguments:
            lease_id: id of the lease.
            identity: requesting identity.

        Raises:
            ShareError: its share is used up.
        """
        now = self._clock()
        self._forget_unapplied(now)
        if lease_id in self._identities or lease_id in self._leases.granted:
            return  # refused when it is applied
        others = max(0, len(self._leases.granted) - self.shares.used)
        if not self.shares.has_room(identity, 1, others):
            raise errors.ShareError(refusal(identity, f"{self.shares.limit} leases that a cluster has for one client"))
        self._identities[lease_id] = identity
        self.shares.take(identity, 1)
        self._proposed.append((now, lease_id))

    def ended(self, lease_id: int) -> None:
        """Stop counting a lease, if it was counted."""
        identity = self._identities.pop(lease_id, None)
        if identity is not None:
            self.shares.give_back(identity, 1)

    def _forget_unapplied(self, now: float) -> None:
        for _ in range(_LOOKED_AT):
            if not self._proposed or now - self._proposed[0][0] < UNKNOWN_MAX_S:
                return
            _, lease_id = self._proposed.popleft()
            if lease_id not in self._leases.granted:
                self.ended(lease_id)


GATHER_MAX_S: Final = 0.02
"""Seconds for which keep-alives gather while others are being sent. A keep-alive of an ending lease is answered only
when the lease is gone, together with its batch; no other lease may end because of that."""

QUORUM_LATE_S: Final = 0.5
"""If a quorum takes this long to respond, there was probably none in the meantime."""

_TIMER_SLACK_S: Final = 0.001
"""Delay of a timer for the end of a lease, so that rounding of clocks does not make it early."""

_TIMED_MAX_S: Final = 60.0
"""Later ends have no timer of their own, of which a client could leave any number: a beat finds them."""


SHORTEN_MAX: Final = 1_000
"""Leases of lost owners reported to the leader in one call: it takes 5 us for each, and an owner may have 100,000."""

LOST_MAX: Final = 1_000_000
"""Maximum number of such leases that wait to be reported; beyond it, the oldest end with their TTL."""


class _Decision(Waiter):
    """A decision of this leader that is being proposed.

    A callback, not a coroutine, so that waiting keep-alives are answered in the turn that applied it.
    """

    __slots__ = ("done",)

    def __init__(self, request: Any, done: Done) -> None:
        super().__init__(request)
        self.done = done

    def finish(self, outcome: Outcome) -> None:
        self.done(outcome.error)

    def fail(self, error: errors.StatusError) -> None:
        self.done(error)


class _Tail:
    """The end of this member's log."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def applied(self) -> int:
        """Implement ``Tail.applied``."""
        return self._node.applied

    def last_index(self) -> int:
        """Implement ``Tail.last_index``."""
        return self._node.raw.raft.log.last_index

    def entries(self, first: int, last: int) -> Sequence[Entry]:
        """Implement ``Tail.entries``."""
        return self._node.raw.raft.log.entries(first, last + 1, NO_LIMIT)


class Lessor:
    """Handles leases on one member, and ends them while it leads; see the module docstring.

    Arguments:
        node: node of the member.
        applier: knows applied leases, users and rights.
        ttl_min_s: shortest TTL that is granted.
        channel: returns the connection to another member, ``None`` if it is unknown.
        cork: lets keep-alives of one turn share a RENEW.

    Attributes:
        times: when leases end, as this member sees it.
        granters: number of leases granted here, by identity.
        on_end: called with the id of every ended lease, in the entry that ends it.
    """

    def __init__(
        self, node: Node, applier: Applier, *, ttl_min_s: int, channel: Callable[[int], Channel | None], cork: Cork
    ) -> None:
        self._node = node
        self._auth, self._rights = applier.auth, applier.rights
        self._leases, self._store = applier.leases, applier.store
        self._ttl_min_s = ttl_min_s
        self._timeout_s = node.settings.request_timeout_s
        self._loop = asyncio.get_running_loop()
        self._clock = LeaseClock(self._loop.time)
        self.times = LeaseTimes(self._clock, self._lease_ended, lambda lease_id: self._leases.owners.get(lease_id, b""))
        self._failing = Limiter(1)
        self._failed: deque[tuple[Sequence[PendingKeepAlive], errors.StatusError]] = deque()
        self._renewals = Renewals(self.times, self._clock, self._propose, self._send_on, cork, self._fail, self._admit)
        self._expiry = Expiry(
            self.times,
            self._propose,
            _Tail(node),
            self._revoke_early,
            lambda: self._auth.is_enabled,
            self._renewals.look_again,
            self._store.attachments.count,
        )
        self._on_leader = OnLeader(node, self._is_primary, channel)
        self._random = random.SystemRandom()
        self._cork = cork
        # Timeout of the keep-alives of this turn (loop time); 0: none has arrived.
        self._deadline = 0.0
        self._is_recent = False
        self._arrived: list[PendingKeepAlive] = []
        self._gathering: asyncio.TimerHandle | None = None
        self._promotion: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._term = 0
        self._timer: asyncio.TimerHandle | None = None
        self._queueing: asyncio.Handle | None = None
        self._end_timers: set[asyncio.TimerHandle] = set()
        self._lost: deque[ConnectionLost] = deque(maxlen=LOST_MAX)
        self._is_telling = False
        self.granters = Granters(applier.leases, self._loop.time)
        self.on_end: list[Callable[[int], None]] = [self.granters.ended]
        self.times.reloaded(applier.leases.granted)

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the timer."""
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def stop(self) -> None:
        """Stop deciding, and fail all waiting requests."""
        for timer in (self._timer, self._gathering, self._queueing, *self._end_timers):
            if timer is not None:
                timer.cancel()
        self._lost.clear()
        self._cancel_confirmations()
        pending, self._arrived = self._renewals.surrender() + self._arrived, []
        for one in pending:
            one.fail(errors.StoppedError())
        self._on_leader.close()

    def _beat(self) -> None:
        self._timer = self._loop.call_later(BEAT_S, self._beat)
        self._sweep()

    def _sweep(self) -> None:
        try:
            self._clock.beat()
            if self.times.is_primary and not self._is_primary():
                self.leader_changed()  # leadership was lost and won again in between: another term
            if self.times.is_primary and self._ending is None and self._expiry.has_work() and not self._node.stopped:
                self._ending = self._on_leader.start(self._end_leases())
            self._queue_some()
        except Exception as error:
            self._node.fatal(error)

    async def _end_leases(self) -> None:
        """Propose the end of expired leases, when a quorum has answered since they were found to have expired.

        If that took long, their owners may have had no quorum either: then they get time to return. Leases whose EXPIRE
        is already being proposed are not affected.
        """
        task = asyncio.current_task()
        try:
            asked_at = self._loop.time()
            await self._node.confirm_read()
            if self._loop.time() - asked_at > QUORUM_LATE_S:
                self.times.postpone_expiry(PATIENCE_S)
                self._renewals.look_again()
            self._expiry.sweep()
        except errors.StatusError:
            pass  # no quorum has answered: the next beat tries again
        finally:
            if self._ending is task:
                self._ending = None

    def _queue_some(self) -> None:
        """Continue queueing leases after a change of leaders; a beat does so too, which is often enough."""
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
        """Answer keep-alives of leases that ended in the entries just applied; very many over several turns."""
        if self._renewals.over and self._renewals.applied():
            self._failing.add(self.applied, MEMBER)

    def leader_changed(self) -> None:
        """Start or stop deciding about leases; send waiting requests to the new leader."""
        node = self._node
        self.flush()
        self.times.demote()
        self._expiry.surrender()
        self._cancel_confirmations()
        pending = self._renewals.surrender()
        if node.role == StateRole.LEADER:
            after_outage = self._loop.time() - node.leader_lost_at > ELECTIONS * node.settings.election_s
            self._promotion = self._on_leader.start(self._promote(node.term, after_outage))
        self._on_leader.leader_changed()
        self._send_on(pending)

    def _cancel_confirmations(self) -> None:
        for task in (self._promotion, self._ending):
            if task is not None:
                task.cancel()
        self._promotion = self._ending = None

    async def _promote(self, term: int, after_outage: bool) -> None:
        """Start deciding about leases when everything before the term of this leader is applied: then its view of
        renewals is complete. Retried as long as this member considers itself the leader."""
        is_confirmed = False
        while not is_confirmed:
            if self._node.stopped:
                return
            with suppress(errors.StatusError):
                await self._node.confirm_read()
                is_confirmed = self._node.term == term
                term = self._node.term  # lost and won again: there are entries of other leaders in between
        self._term = term
        self.times.promote(after_outage=after_outage)
        self._on_leader.leader_changed()

    def _lease_ended(self, lease_id: int) -> None:
        self._renewals.lease_ended(lease_id)
        for callback in self.on_end:
            callback(lease_id)

    def _propose(self, kind: int, lease_ids: Sequence[int], done: Done) -> None:
        decision = raft_pb2.LeaseDecision(term=self._term, ids=lease_ids)
        waiter = _Decision(decision, done)
        try:
            # Entries before an end in the log were checked, so the end must be proposed before anything else.
            if kind == Kind.LEASE_EXPIRE:
                self._node.submit_ahead(kind, decision.SerializeToString(), waiter)
            else:
                self._node.submit(kind, decision.SerializeToString(), waiter, None)
        except errors.StatusError as error:
            done(error)

    def _revoke_early(self, lease_id: int, caller: Caller | None, done: Done) -> None:
        request = rpc_pb2.LeaseRevokeRequest(ID=lease_id)
        waiter = _Decision(request, done)
        try:
            self._node.submit_ahead(Kind.LEASE_REVOKE, request.SerializeToString(), waiter, caller)
        except errors.StatusError as error:
            done(error)

    # -- keep-alives -------------------------------------------------------------------------------------------------

    def _new_deadline(self) -> float:
        """Return the loop time after which a response to a request that arrives now is useless."""
        return self._loop.time() + self._timeout_s

    def renew_at_once(self, lease_id: int) -> int:
        """Renew a lease that this leader may renew from memory, so that the answer needs no turn of the loop.

        Returns:
            Its TTL in seconds; 0 if the keep-alive must wait for something (``keep_alive``), or the lease is gone.
        """
        if not self._deadline:
            self._begin_turn()
        times = self.times
        if self._is_recent and times.renew(lease_id) == FRESH:
            times.renewed_total += 1
            return times.ttl_s(lease_id)
        return 0

    def keep_alive(self, pending: PendingKeepAlive) -> None:
        """Renew a lease, and answer when that is safe."""
        if not self._deadline:
            self._begin_turn()
        pending.deadline = self._deadline
        if self._is_recent:
            self._renewals.take_one(pending)
            return
        self._arrived.append(pending)
        if self._gathering is None:
            self._begin_batch()

    def _begin_turn(self) -> None:
        """Determine once for all keep-alives of a turn whether they may be answered from memory.

        Every turn of the node ends with a flush of the cork, so the result stays valid as long as it is used.
        """
        now = self._loop.time()
        self._deadline = now + self._timeout_s
        self._is_recent = not self._arrived and self._on_leader.is_recent(now)
        self._cork.touch(self)

    def flush(self) -> None:
        """End a turn with keep-alives: the next turn is checked again."""
        self._deadline = 0.0
        self._is_recent = False

    def _begin_batch(self) -> None:
        # Until these are answered, others gather: sending many to another member costs the same as sending a few.
        self._gathering = self._loop.call_later(GATHER_MAX_S, self._next_batch)
        self._on_leader.start(self._renew_arrived())

    async def _renew_arrived(self) -> None:
        """Renew the keep-alives that have arrived when this task runs, which is in the loop's next turn."""
        # At most as many as one entry renews, to bound the message to another member and the work of its turn.
        batch, self._arrived = self._arrived[:RENEW_MAX], self._arrived[RENEW_MAX:]
        if batch:
            await self._renew(batch)
        self._next_batch()

    def _next_batch(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._arrived:
            self._begin_batch()

    def _send_on(self, pending: list[PendingKeepAlive]) -> None:
        """Send keep-alives to the current leader; those of clients here go before later arrivals."""
        arrived = [one for one in pending if one.is_local]
        passed_on = [one for one in pending if not one.is_local]
        if arrived:
            self._arrived = arrived + self._arrived
            if self._gathering is None:
                self._begin_batch()
        if passed_on:
            self._on_leader.start(self._renew(passed_on))

    def _fail(self, batch: Sequence[PendingKeepAlive], error: errors.StatusError) -> None:
        """Fail keep-alives; very many are spread over several turns."""
        self._failed.append((batch, error))
        self._failing.add(self._fail_some, MEMBER)

    def _fail_some(self) -> None:
        batch, error = self._failed.popleft()
        if len(batch) > FAILED_AT_ONCE:
            self._failed.appendleft((batch[FAILED_AT_ONCE:], error))
        fail_each(batch[:FAILED_AT_ONCE], error)
        if self._failed:
            self._failing.add(self._fail_some, MEMBER)

    async def _renew(self, batch: list[PendingKeepAlive]) -> None:
        """Answer keep-alives with one deadline, which are all from clients here or all from another member."""
        auth, deadline, is_local = self._auth, batch[0].deadline, batch[0].is_local

        def encode() -> bytes:
            nonlocal batch
            batch = self._admit(batch)
            ids = [one.lease_id for one in batch]
            return raft_pb2.LeaseRenewRequest(
                ids=ids, auth_revision=auth.revision, asks_users=auth.is_enabled
            ).SerializeToString()

        def parse(response: bytes) -> Sequence[int]:
            ttls: Sequence[int] = raft_pb2.LeaseRenewResponse.FromString(response).ttls
            if len(ttls) != len(batch):
                raise ValueError(f"{len(ttls)} answers to {len(batch)} keep-alives")
            return ttls

        try:
            ttls = await self._on_leader.ask(Question(RENEW, encode, parse, deadline, is_local))
        except errors.StatusError as error:
            self._fail(batch, error)
            return
        if ttls is None:
            self._renewals.take(self._admit(batch))
            return
        for one, ttl_s in zip(batch, ttls, strict=True):
            one.answer(ttl_s)

    def _admit(self, batch: list[PendingKeepAlive]) -> list[PendingKeepAlive]:
        """Return the keep-alives that may be renewed with the current users and roles; fail the others."""
        if not self._auth.is_enabled:
            return batch
        admitted: list[PendingKeepAlive] = []
        refused: dict[type[errors.StatusError], list[PendingKeepAlive]] = {}
        for one in batch:
            error = one.refusal()
            if error is None:
                admitted.append(one)
            else:
                refused.setdefault(type(error), []).append(one)
        for kind, ended in refused.items():
            self._fail(ended, kind())
        return admitted

    def renew_for_member(self, batch: list[PendingKeepAlive]) -> None:
        """Answer keep-alives that another member forwarded."""
        deadline = self._new_deadline()
        for one in batch:
            one.deadline = deadline
        self._send_on(batch)

    # -- connections that were lost ----------------------------------------------------------------------------------

    def connections_lost(self, lost: list[ConnectionLost]) -> None:
        """Make the leader end leases soon, in the background; if that fails, they end with their TTL."""
        self._lost += lost
        if not self._is_telling:
            self._is_telling = True
            self._on_leader.start(self._tell())

    async def _tell(self) -> None:
        """Report leases of lost owners to the leader, some at a time, however many were lost together."""
        while self._lost:
            some = [self._lost.popleft() for _ in range(min(SHORTEN_MAX, len(self._lost)))]
            with suppress(errors.StatusError):
                await self.shorten(some)
            await asyncio.sleep(0)
        self._is_telling = False

    async def shorten(self, lost: list[ConnectionLost], *, is_local: bool = True) -> None:
        """End leases soon whose owner's connection was lost.

        Arguments:
            lost: the leases.
            is_local: whether the connection was to this member.

        Raises:
            StatusError: no leader did it.
        """
        encode = partial(_encode_lost, lost, self._loop.time)
        if await self._on_leader.ask(Question(SHORTEN, encode, bytes, self._new_deadline(), is_local)) is None:
            self._shorten(lost)

    def _shorten(self, lost: list[ConnectionLost]) -> None:
        """Shorten leases, and set a timer for the first end if that is near; this member leads."""
        now = self._loop.time()
        if self._auth.is_enabled:
            lost = [one for one in lost if self._may_end(one)]
        ends = [self.times.shorten(one.lease_id, one.grace_s, now - one.answered_at, one.caller) for one in lost]
        first_s = min((end for end in ends if end is not None), default=None)
        if first_s is None or first_s > _TIMED_MAX_S:
            return

        def sweep() -> None:
            self._end_timers.discard(timer)
            self._sweep()

        timer = self._loop.call_later(first_s + _TIMER_SLACK_S, sweep)
        self._end_timers.add(timer)

    def _may_end(self, lost: ConnectionLost) -> bool:
        """Return whether an owner may write all keys of its lease now. A long check is left to applying."""
        try:
            self._rights.check_lease(lost.caller, lost.lease_id, write=True)
        except errors.StatusError:
            return False
        return True

    def may_keep(self, kept: ConnectionLost) -> bool:
        """Return whether the user of a stream may keep a lease alive now."""
        caller = kept.caller
        if caller is not None:
            kept = replace(kept, caller=Caller(caller.user, self._auth.revision))
        return not self._auth.is_enabled or self._may_end(kept)

    # -- questions ---------------------------------------------------------------------------------------------------

    async def time_to_live(
        self, request: rpc_pb2.LeaseTimeToLiveRequest, *, is_local: bool = True
    ) -> bytes | Callable[[], bytes]:
        """Return the remaining time of a lease, as the leader sees it. TTL -1: the lease does not exist.

        Arguments:
            request: the client's request.
            is_local: whether it is a client of this member.

        Returns:
            The response without its header, if another member has made it; otherwise a function that makes it, without
            the keys of the lease: a caller that adds them must read both at one time, while the store ``is_whole``.

        Raises:
            StatusError: no leader answered.
        """
        question = Question(TIME_TO_LIVE, request.SerializeToString, bytes, self._new_deadline(), is_local)
        response = await self._on_leader.ask(question)
        return response if response is not None else partial(self._time_to_live, request)

    @property
    def is_whole(self) -> bool:
        """Whether no entry is partly applied: otherwise keys of a lease that ends in slices would vanish one by one."""
        return self._node.applying.is_whole

    def _time_to_live(self, request: rpc_pb2.LeaseTimeToLiveRequest) -> bytes:
        response = rpc_pb2.LeaseTimeToLiveResponse(ID=request.ID, TTL=-1)
        granted_s = self.times.ttl_s(request.ID)
        if granted_s:
            response.TTL = int(self.times.remaining_s(request.ID))
            response.grantedTTL = granted_s
        return response.SerializeToString()

    # -- writes ------------------------------------------------------------------------------------------------------

    def grant_request(self, ttl_s: int, lease_id: int = 0, *, exact: bool = False) -> rpc_pb2.LeaseGrantRequest:
        """Return the entry that grants a lease: all choices are made before it is proposed.

        Arguments:
            ttl_s: requested TTL in seconds; raised to the minimum.
            lease_id: 0 for a random one.
            exact: do not raise the TTL to the minimum, only to 1 s: the owner tolerates an election without an answer.

        Raises:
            LeaseTTLTooLargeError: the TTL is above the maximum.
            LeaseExistsError: keys are attached to the id, as in a restored file without their lease. They would end
                with this lease, whose user may not have the right to write them.
        """
        if ttl_s > TTL_MAX_S:
            raise errors.LeaseTTLTooLargeError
        while lease_id == 0:
            lease_id = self._random.getrandbits(63)
        if self._store.attachments.count(lease_id) and not self._leases.exists(lease_id):
            raise errors.LeaseExistsError
        return rpc_pb2.LeaseGrantRequest(TTL=max(ttl_s, 1 if exact else self._ttl_min_s), ID=lease_id)

    async def grant(self, ttl_s: int, caller: Caller | None, identity: Identity) -> int:
        """Grant a lease to a recipe of this member, and return its id.

        Arguments:
            ttl_s: requested TTL in seconds.
            caller: user on whose behalf it is granted.
            identity: identity in whose share it counts.

        Raises:
            StatusError: the error that LeaseGrant would return.
        """
        request = self.grant_request(ttl_s)
        self.granters.admit(request.ID, identity)
        body = request.SerializeToString()
        outcome = await self._node.propose(Kind.LEASE_GRANT, body, request, caller, identity=identity)
        outcome.check()
        return request.ID


def _encode_lost(lost: Sequence[ConnectionLost], clock: Callable[[], float]) -> bytes:
    """Return a LeaseShortenRequest, with the age of each answer at the time of sending."""
    now = clock()
    request = raft_pb2.LeaseShortenRequest()
    for one in lost:
        request.ids.append(one.lease_id)
        request.graces_ms.append(round(one.grace_s * 1000))
        request.ages_us.append(int((now - one.answered_at) * 1_000_000))
        # Only users are named: an empty name would mean a member, which may do everything.
        request.users.append(b"" if one.caller is None else one.caller.user)
        request.auth_revisions.append(0 if one.caller is None else one.caller.auth_revision)
    return request.SerializeToString()
