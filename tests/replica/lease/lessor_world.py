"""Members that decide about leases, with simulated time, a simulated log and changing leaders.

The lease code is production code: `apply.Applier`, `LeaseTimes`, `Renewals`, `Expiry`. The log is a list; a leader's
entries may survive the leader or be lost, and proposals of a deposed leader may reach the next one.

    world = World(3)
    world.elect(0)
    world.grant(7, ttl_s=2)
    world.keep_alive(7)
    world.advance(3.0)            # beats, and everything is committed and applied at once

`ended` and `answers` are the history; `early()` and `revived()` list violations in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from raftkv import errors
from raftkv.apply import wire
from raftkv.apply.wire import Caller, Kind
from raftkv.loop.cork import Cork
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft.types import Entry
from raftkv.replica.lease.renewals import Done, Expiry, PendingKeepAlive, Renewals
from raftkv.replica.lease.times import BEAT_S, LeaseClock, LeaseTimes
from tests.apply.machine import Machine

ROUNDING_S = 1e-6


@dataclass
class LogEntry:
    """A proposal; `term` is the term of the leader that appended it."""

    kind: int
    body: bytes
    proposer: Member | None = None
    done: Done | None = None
    term: int = 0
    asked_at: float | None = None
    """When a lease was asked for whose id another one may have had."""


@dataclass
class Answer:
    """An acknowledged keep-alive or grant."""

    lease_id: int
    sent_at: float
    answered_at: float
    ttl_s: int


class Asked(PendingKeepAlive):
    """A keep-alive of a client."""

    def __init__(self, world: World, lease_id: int) -> None:
        self.world = world
        self.lease_id = lease_id
        self.deadline = 0.0
        self.sent_at = world.now
        self.ttl_s: int | None = None
        self.error: errors.StatusError | None = None

    def answer(self, ttl_s: int) -> None:
        assert self.ttl_s is None, "answered twice"
        self.ttl_s = ttl_s
        if ttl_s:
            self.world.answers.append(Answer(self.lease_id, self.sent_at, self.world.now, ttl_s))

    def fail(self, error: errors.StatusError) -> None:
        self.error = error


class Tail:
    """The log of a leading member."""

    def __init__(self, member: Member) -> None:
        self.member = member

    def applied(self) -> int:
        return self.member.applied

    def last_index(self) -> int:
        return len(self.member.world.log) + len(self.member.world.appended)

    def entries(self, first: int, last: int) -> list[Entry]:
        world = self.member.world
        found = [*world.log, *world.appended][first - 1 : last]
        return [
            Entry(entry.term, index, wire.encode(entry.kind, 0, entry.body)) for index, entry in enumerate(found, first)
        ]


class Member:
    """One member: its state machine and its view of time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.machine = Machine()
        self.applied = 0
        self.term = 0
        self.barrier: int | None = None
        self.after_outage = False
        self.clock = LeaseClock(lambda: world.now)
        self.times = LeaseTimes(self.clock, self._lease_ended)
        self.renewals = Renewals(self.times, self.clock, self._propose, world.retry, Cork(lambda flush: None))
        self.expiry = Expiry(
            self.times,
            self._propose,
            Tail(self),
            self._revoke,
            lambda: self.machine.applier.auth.is_enabled,
            self.renewals.look_again,
            lambda lease_id: self.world.keys_of.get(lease_id, 0),
        )
        self.machine.applier.leases.observer = self.times

    def _propose(self, kind: int, lease_ids: Sequence[int], done: Done) -> None:
        decision = raft_pb2.LeaseDecision(term=self.term, ids=lease_ids)
        self.world.propose(self, LogEntry(kind, decision.SerializeToString(), self, done))

    def _revoke(self, lease_id: int, caller: Caller | None, done: Done) -> None:
        if self.term != self.world.term or self.world.leader is not self:
            done(errors.NotLeaderError())
            return
        kind, body = Kind.LEASE_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=lease_id).SerializeToString()
        if caller is not None:
            kind, body = Kind.IDENTIFIED, wire.identified(caller, kind, body)
        self.world.propose(self, LogEntry(kind, body, self, done))

    def _lease_ended(self, lease_id: int) -> None:
        self.renewals.lease_ended(lease_id)

    def lead(self, term: int, barrier: int, *, after_outage: bool = False) -> None:
        """Elected; primary once everything up to `barrier` is applied."""
        self.step_down()
        self.term, self.barrier, self.after_outage = term, barrier, after_outage
        self._promote_if_ready()

    def step_down(self) -> None:
        """Notice that another member leads."""
        self.barrier = None
        self.times.demote()
        self.expiry.surrender()
        self.world.retry(self.renewals.surrender())

    def _promote_if_ready(self) -> None:
        if self.barrier is not None and self.applied >= self.barrier:
            self.barrier = None
            self.times.promote(after_outage=self.after_outage)

    def apply(self, count: int) -> None:
        """Apply the next committed entries, then tell the waiting callers."""
        entries = self.world.log[self.applied : self.applied + count]
        outcomes = []
        for entry in entries:
            self.machine.applier.term = entry.term
            outcome = self.machine.applier.apply(entry.kind, entry.body)
            self.applied += 1
            if entry.done is not None and entry.proposer is self:
                outcomes.append((entry.done, outcome.error))
        for done, error in outcomes:
            done(error)
        self.renewals.applied()
        self._promote_if_ready()

    def beat(self) -> None:
        """Run the timer's work."""
        self.clock.beat()
        self.times.queue_some()
        if self.times.is_primary:
            self.expiry.sweep()


@dataclass
class World:
    """See the module."""

    size: int = 3
    now: float = 100.0
    term: int = 0
    log: list[LogEntry] = field(default_factory=list)
    appended: list[LogEntry] = field(default_factory=list)
    stale: list[LogEntry] = field(default_factory=list)
    lost: list[LogEntry] = field(default_factory=list)
    to_retry: list[PendingKeepAlive] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    ended: dict[int, float] = field(default_factory=dict)
    last_sent_at: dict[int, float] = field(default_factory=dict)
    ttl_s: dict[int, int] = field(default_factory=dict)
    keys_of: dict[int, int] = field(default_factory=dict)
    leader: Member | None = None

    def __post_init__(self) -> None:
        self.oracle = Machine()  # applies at the moment of commit: when a lease ends is when its end is committed
        self.members = [Member(self) for _ in range(self.size)]

    # -- the log -----------------------------------------------------------------------------------------------------

    def propose(self, member: Member | None, entry: LogEntry) -> None:
        """Append to the leader's log; a deposed leader's proposal is kept for the next leader."""
        if member is None or member is self.leader:
            entry.term = self.term
            self.appended.append(entry)
        else:
            self.stale.append(entry)

    def pass_on_stale(self) -> None:
        """Deliver a deposed leader's proposals to the present leader, which appends them under its term."""
        entry = self.stale.pop(0)
        entry.term = self.term
        self.appended.append(entry)

    def commit(self, count: int) -> None:
        """Commit the next entries."""
        entries, self.appended = self.appended[:count], self.appended[count:]
        for entry in entries:
            before = set(self.oracle.applier.leases.granted)
            self.oracle.applier.term = entry.term
            outcome = self.oracle.applier.apply(entry.kind, entry.body)
            if entry.kind == Kind.LEASE_EXPIRE:
                for lease_id in before - set(self.oracle.applier.leases.granted):
                    self.ended[lease_id] = self.now
            if entry.asked_at is not None and outcome.error is None:
                self._granted_anew(rpc_pb2.LeaseGrantRequest.FromString(entry.body), entry.asked_at)
        self.log += entries

    def _granted_anew(self, request: rpc_pb2.LeaseGrantRequest, asked_at: float) -> None:
        """What was promised for the lease that had this id before counts no more."""
        lease_id = request.ID
        self.answers = [answer for answer in self.answers if answer.lease_id != lease_id]
        self.ended.pop(lease_id, None)
        self.ttl_s[lease_id] = request.TTL
        self.last_sent_at[lease_id] = max(asked_at, self.last_sent_at.get(lease_id, asked_at))
        self.answers.append(Answer(lease_id, asked_at, self.now, request.TTL))

    def elect(self, index: int, surviving: int = 0, *, after_outage: bool = False) -> None:
        """Elect a member. The first `surviving` entries of the old leader's tail are committed, the rest lost."""
        self.commit(surviving)
        self.lost += self.appended
        self.appended = []
        self.term += 1
        self.leader = self.members[index]
        self.leader.lead(self.term, len(self.log), after_outage=after_outage)

    def time_out_lost(self) -> None:
        """A caller that waits for a lost entry hears that it took too long."""
        lost, self.lost = self.lost, []
        for entry in lost:
            if entry.done is not None:
                entry.done(errors.RequestTimeoutError())

    def retry(self, pending: list[PendingKeepAlive]) -> None:
        """Keep-alives that another leader must answer."""
        self.to_retry += pending

    # -- clients -----------------------------------------------------------------------------------------------------

    def grant(self, lease_id: int, ttl_s: int) -> None:
        """Grant a lease; acknowledged when committed."""
        request = rpc_pb2.LeaseGrantRequest(ID=lease_id, TTL=ttl_s)
        self.propose(None, LogEntry(Kind.LEASE_GRANT, request.SerializeToString()))
        self.commit(len(self.appended))
        self.ttl_s[lease_id] = ttl_s
        self.last_sent_at[lease_id] = self.now
        self.answers.append(Answer(lease_id, self.now, self.now, ttl_s))

    def revoke_and_grant(self, lease_id: int, ttl_s: int, caller: Caller | None = None) -> None:
        """Ask for the end of a lease, and for a new one of its id before the answer has come."""
        body = rpc_pb2.LeaseRevokeRequest(ID=lease_id).SerializeToString()
        if caller is None:
            self.propose(None, LogEntry(Kind.LEASE_REVOKE, body))
        else:
            self.propose(None, LogEntry(wire.IDENTIFIED, wire.identified(caller, Kind.LEASE_REVOKE, body)))
        request = rpc_pb2.LeaseGrantRequest(ID=lease_id, TTL=ttl_s)
        self.propose(None, LogEntry(Kind.LEASE_GRANT, request.SerializeToString(), asked_at=self.now))

    def keep_alive(self, lease_id: int) -> Asked:
        """Ask for a renewal; `confirm` and `serve` follow."""
        self.last_sent_at[lease_id] = self.now
        return Asked(self, lease_id)

    def renew(self, lease_id: int) -> Asked:
        """A keep-alive at the present leader, with everything delivered at once."""
        asked = self.keep_alive(lease_id)
        if self.leader is not None:
            self.serve(self.leader, len(self.log), asked)
        self.settle()
        return asked

    def serve(self, member: Member, confirmed_at: int, pending: PendingKeepAlive) -> None:
        """The read that a keep-alive waited for is ready: `confirmed_at` entries were committed when it was asked."""
        member.apply(max(0, confirmed_at - member.applied))
        if member.times.is_primary:
            member.renewals.take([pending])
        else:
            self.retry([pending])

    # -- time --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Commit and apply everything, until nothing more follows from it."""
        while self.appended or any(member.applied < len(self.log) for member in self.members):
            self.commit(len(self.appended))
            for member in self.members:
                member.apply(len(self.log))

    def advance(self, seconds: float) -> None:
        """Let time pass in an undisturbed cluster."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + BEAT_S, until)
            for member in self.members:
                member.beat()
            self.settle()

    # -- what must never be ------------------------------------------------------------------------------------------

    def early(self) -> list[tuple[Answer, float]]:
        """Acknowledgements whose TTL had not passed when the lease ended."""
        return [
            (answer, self.ended[answer.lease_id])
            for answer in self.answers
            if answer.lease_id in self.ended
            and self.ended[answer.lease_id] < answer.sent_at + answer.ttl_s - ROUNDING_S
        ]

    def revived(self) -> list[Answer]:
        """Acknowledgements after the lease had ended."""
        return [
            answer
            for answer in self.answers
            if answer.lease_id in self.ended and answer.answered_at > self.ended[answer.lease_id]
        ]
