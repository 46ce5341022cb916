"""The leader's decisions about leases, on their way through the log: renewals, and ends.

Owns which keep-alives wait for which entry. At most one RENEW and one EXPIRE are under way; what comes meanwhile goes
into the next, so that any number of leases costs a few entries. No clock and no socket of its own.

    keep-alive --> renewed lately and in the log?  answer from memory
               --> else: joins the next RENEW; answered when that is applied
               --> lease is over: waits until it is gone, then TTL 0

``propose(kind, ids, done)`` puts a decision into the log under the term of this leader, and calls ``done`` with None
once it is applied or with the error when it is not (or may not be).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from raftkv import errors
from raftkv.apply.request import Kind
from raftkv.server.lease import times as lease_times
from raftkv.server.lease.times import LeaseClock, LeaseTimes

EXPIRE_MAX: Final = 100
"""Leases that one entry ends: applying it must not hold the loop for long."""

RENEW_MAX: Final = 10_000
"""Leases that one entry renews."""

Done = Callable[[errors.StatusError | None], None]
Propose = Callable[[int, Sequence[int], Done], None]


class Ticket:
    """One keep-alive.

    Attributes:
        lease_id: of the lease.
        deadline: monotonic time after which nobody wants the answer; set by the lessor.
        is_local: whether it came from a client of this member, not by way of another member.
    """

    __slots__ = ("deadline", "lease_id")

    is_local = True
    lease_id: int
    deadline: float

    def answer(self, ttl_s: int) -> None:
        """The lease lives for so long from now; 0 if it is gone."""
        raise NotImplementedError

    def fail(self, error: errors.StatusError) -> None:
        """There will be no answer."""
        raise NotImplementedError


class Renewals:
    """Keep-alives at the leader.

    Arguments:
        times: when leases end.
        clock: for the time of proposals.
        propose: see the module.
        retry: takes keep-alives back that another leader must answer.
    """

    def __init__(
        self, times: LeaseTimes, clock: LeaseClock, propose: Propose, retry: Callable[[list[Ticket]], None]
    ) -> None:
        self._times = times
        self._clock = clock
        self._propose = propose
        self._retry = retry
        self._unlogged: list[Ticket] = []
        self._in_flight: list[Ticket] = []
        self._dying: dict[int, list[Ticket]] = {}
        self._over: list[Ticket] = []
        # Proposals of an earlier reign may still call back.
        self._reign = 0

    def take(self, tickets: list[Ticket]) -> None:
        """Answer keep-alives, now or later; the leadership of this member was confirmed after they came."""
        times, unlogged = self._times, self._unlogged
        renew, ttl_s = times.renew, times.ttl_s
        for ticket in tickets:
            lease_id = ticket.lease_id
            verdict = renew(lease_id)
            if verdict == lease_times.FRESH:
                times.renewed_total += 1
                ticket.answer(ttl_s(lease_id))
            elif verdict == lease_times.UNLOGGED:
                unlogged.append(ticket)
            else:
                self._settle_over(ticket, verdict)
        if not self._in_flight:
            self._log()

    def _settle_over(self, ticket: Ticket, verdict: int) -> None:
        if verdict == lease_times.GONE:
            ticket.answer(0)
        else:
            self._dying.setdefault(ticket.lease_id, []).append(ticket)

    def _log(self) -> None:
        """Put the next RENEW into the log."""
        tickets, self._unlogged = self._unlogged[:RENEW_MAX], self._unlogged[RENEW_MAX:]
        if tickets:
            self._in_flight = tickets
            ids = list(dict.fromkeys(ticket.lease_id for ticket in tickets))
            done = partial(self._logged, self._reign, ids, self._clock.monotonic())
            self._propose(Kind.LEASE_RENEW, ids, done)

    def _logged(self, reign: int, lease_ids: list[int], proposed_at: float, error: errors.StatusError | None) -> None:
        if reign != self._reign:
            return
        tickets, self._in_flight = self._in_flight, []
        if error is None:
            self._times.note_logged(lease_ids, proposed_at)
            self._answer_logged(tickets)
        elif isinstance(error, errors.LeaderChangedError):
            self._retry(tickets)
        else:
            for ticket in tickets:
                ticket.fail(error)
        # Of those that came meanwhile, some may be answered by now.
        waiting, self._unlogged = self._unlogged, []
        self.take(waiting)

    def _answer_logged(self, tickets: list[Ticket]) -> None:
        """Their RENEW is applied; a lease lives from now on, unless it ended while the entry was on its way."""
        for ticket in tickets:
            verdict = self._times.renew(ticket.lease_id)
            if verdict in (lease_times.GONE, lease_times.DYING):
                self._settle_over(ticket, verdict)
            else:
                self._times.renewed_total += 1
                ticket.answer(self._times.ttl_s(ticket.lease_id))

    def lease_ended(self, lease_id: int) -> None:
        """A lease is gone, in the entry being applied."""
        tickets = self._dying.pop(lease_id, None)
        if tickets is not None:
            self._over += tickets

    def applied(self) -> None:
        """The entries that ended leases are applied: tell those who waited for it."""
        if self._over:
            over, self._over = self._over, []
            for ticket in over:
                ticket.answer(0)

    def surrender(self) -> list[Ticket]:
        """This member leads no more: all keep-alives that wait, for another leader."""
        self._reign += 1
        tickets = self._in_flight + self._unlogged + [ticket for group in self._dying.values() for ticket in group]
        self._in_flight, self._unlogged = [], []
        self._dying.clear()
        return tickets


class Expiry:
    """Ends of leases at the leader.

    Arguments:
        times: when leases end.
        propose: see the module.
    """

    def __init__(self, times: LeaseTimes, propose: Propose) -> None:
        self._times = times
        self._propose = propose
        self._in_flight: list[int] = []
        self._reign = 0

    def has_work(self) -> bool:
        """Whether ``sweep`` would do something."""
        return not self._in_flight and self._times.has_due()

    def sweep(self) -> None:
        """Propose the end of leases that are over, unless some are on their way; the rest follows when they are."""
        if self._in_flight:
            return
        due = self._times.take_due(EXPIRE_MAX)
        if due:
            self._in_flight = due
            self._propose(Kind.LEASE_EXPIRE, due, partial(self._ended, self._reign))

    def _ended(self, reign: int, error: errors.StatusError | None) -> None:
        if reign != self._reign:
            return
        ids, self._in_flight = self._in_flight, []
        if error is not None:
            self._times.give_back(ids)  # for the next sweep: whatever refused it now may refuse it again at once
        else:
            self.sweep()

    def surrender(self) -> None:
        """This member leads no more."""
        self._reign += 1
        self._in_flight = []
