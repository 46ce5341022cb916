"""The leader's decisions about leases, on their way through the log: renewals, and ends.

Owns which keep-alives wait for which entry. At most one RENEW and one EXPIRE are under way; what comes meanwhile goes
into the next, so that any number of leases costs a few entries. Where users are asked for, a lease that ends before its
time is revoked on behalf of the user whose connection broke: applying checks the right, and a refusal gives the lease
its time back. No clock and no socket of its own.

    keep-alive --> renewed lately and in the log?  answer from memory
               --> else: joins the next RENEW; answered when that is applied
               --> lease is over: waits until it is gone, then TTL 0

``propose(kind, ids, done)`` puts a decision into the log under the term of this leader, and calls ``done`` with None
once it is applied or with the error when it is not (or may not be).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from google.protobuf.message import DecodeError
from mypy_extensions import mypyc_attr

from raftkv import errors
from raftkv.apply import wire
from raftkv.apply.wire import Caller, Kind
from raftkv.loop.cork import Cork
from raftkv.pb import rpc_pb2
from raftkv.raft.types import Entry, EntryType
from raftkv.replica.lease import times as lease_times
from raftkv.replica.lease.times import LeaseClock, LeaseTimes

EXPIRE_MAX: Final = 100
"""Leases that one entry ends: applying it must not hold the loop for long."""

RENEW_MAX: Final = 4_000
"""Leases that one entry renews, and keep-alives that one turn looks at: about 20 ms."""

FAILED_AT_ONCE: Final = 100
"""Keep-alives that fail in a turn of the loop: each may end a stream."""

LOOKS_PER_SWEEP: Final = 20_000
"""Entries that are searched for revocations before leases are ended, which takes 3 ms; a beat never brings so many."""

_REVOKE: Final = bytes([Kind.LEASE_REVOKE])
_IDENTIFIED: Final = bytes([wire.IDENTIFIED])

Done = Callable[[errors.StatusError | None], None]
Propose = Callable[[int, Sequence[int], Done], None]
Revoke = Callable[[int, Caller | None, Done], None]
"""Puts the revocation of a lease into the log, on behalf of a caller."""

_REFUSALS: Final = (errors.PermissionDeniedError, errors.UserEmptyError, errors.AuthOldRevisionError)


@mypyc_attr(allow_interpreted_subclasses=True)
class PendingKeepAlive:
    """A keep-alive that has not been answered.

    Attributes:
        lease_id: of the lease.
        deadline: loop time after which the answer is not wanted; set by the lessor.
        is_local: whether it came from a client of this member, not by way of another member.
    """

    __slots__ = ("deadline", "lease_id")

    is_local = True
    lease_id: int
    deadline: float

    def answer(self, ttl_s: int) -> None:
        """Say that the lease lives for so long from now, in seconds; 0 if it is gone."""
        raise NotImplementedError

    def fail(self, error: errors.StatusError) -> None:
        """Say that there will be no answer."""
        raise NotImplementedError

    def refusal(self) -> errors.StatusError | None:
        """Return why it may not be renewed any more, by the users and roles of now; None: it may."""
        return None


def fail_each(batch: Sequence[PendingKeepAlive], error: errors.StatusError) -> None:
    """Fail keep-alives, however many they are."""
    for pending in batch:
        pending.fail(error)


class Renewals:
    """Answers keep-alives at the leader, and puts RENEW into the log for those that need it.

    Arguments:
        times: when leases end.
        clock: for the time of proposals.
        propose: see the module.
        retry: takes keep-alives back that another leader must answer.
        cork: calls ``flush`` at the end of a turn that brought keep-alives one by one.
        fail: fails keep-alives.
        admit: returns the keep-alives that may still be renewed, and fails the others.
    """

    def __init__(
        self,
        times: LeaseTimes,
        clock: LeaseClock,
        propose: Propose,
        retry: Callable[[list[PendingKeepAlive]], None],
        cork: Cork,
        fail: Callable[[Sequence[PendingKeepAlive], errors.StatusError], None] = fail_each,
        admit: Callable[[list[PendingKeepAlive]], list[PendingKeepAlive]] = lambda batch: batch,
    ) -> None:
        self._times = times
        self._clock = clock
        self._propose = propose
        self._retry = retry
        self._cork = cork
        self._fail = fail
        self._admit = admit
        self._unlogged: list[PendingKeepAlive] = []
        self._in_flight: list[PendingKeepAlive] = []
        self._expiring: dict[int, list[PendingKeepAlive]] = {}
        self.over: list[PendingKeepAlive] = []
        """Keep-alives of leases that the entries applied have ended; they are not answered yet."""
        # Proposals of an earlier leadership may still call back.
        self._leadership = 0

    def take(self, batch: Sequence[PendingKeepAlive]) -> None:
        """Answer keep-alives, now or later; the leadership of this member was confirmed after they came."""
        for pending in batch:
            self.take_one(pending)
        self.flush()

    def take_one(self, pending: PendingKeepAlive) -> None:
        """Answer a keep-alive, now or later; the leadership of this member was confirmed a moment ago.

        The RENEW that it may need is proposed at the end of the turn, for all that the turn brings.
        """
        times, lease_id = self._times, pending.lease_id
        state = times.renew(lease_id)
        if state == lease_times.FRESH:
            times.renewed_total += 1
            pending.answer(times.ttl_s(lease_id))
        elif state == lease_times.UNLOGGED:
            if not self._unlogged:
                self._cork.touch(self)
            self._unlogged.append(pending)
        else:
            self._settle_over(pending, state)

    def _settle_over(self, pending: PendingKeepAlive, state: int) -> None:
        if state == lease_times.GONE:
            pending.answer(0)
        else:
            self._expiring.setdefault(pending.lease_id, []).append(pending)

    def flush(self) -> None:
        """Put the next RENEW into the log, unless one is under way."""
        if self._in_flight or not self._unlogged:
            return
        self._in_flight, self._unlogged = self._unlogged[:RENEW_MAX], self._unlogged[RENEW_MAX:]
        ids = list(dict.fromkeys(pending.lease_id for pending in self._in_flight))
        done = partial(self._logged, self._leadership, ids, self._clock.monotonic())
        self._propose(Kind.LEASE_RENEW, ids, done)

    def _logged(
        self, leadership: int, lease_ids: list[int], proposed_at: float, error: errors.StatusError | None
    ) -> None:
        if leadership != self._leadership:
            return
        batch, self._in_flight = self._in_flight, []
        if error is None:
            self._times.note_logged(lease_ids, proposed_at)
            self._answer_logged(batch)
        elif isinstance(error, errors.LeaderChangedError):
            self._retry(batch)
        else:
            self._fail(batch, error)
        # Some of the keep-alives that came meanwhile need no entry any more: they are answered, the others are logged.
        # While a quorum or a disk stands still very many come: no turn is to look at all of them.
        waiting, rest = self._unlogged[:RENEW_MAX], self._unlogged[RENEW_MAX:]
        self._unlogged = []
        for pending in self._admit(waiting):
            self.take_one(pending)
        self._unlogged += rest
        self.flush()

    def _answer_logged(self, batch: list[PendingKeepAlive]) -> None:
        """Their RENEW is applied; a lease lives from now on, unless it ended while the entry was on its way."""
        for pending in batch:
            state = self._times.renew(pending.lease_id)
            if state in (lease_times.GONE, lease_times.EXPIRING):
                self._settle_over(pending, state)
            else:
                self._times.renewed_total += 1
                pending.answer(self._times.ttl_s(pending.lease_id))

    def lease_ended(self, lease_id: int) -> None:
        """Note that a lease is gone, in the entry being applied."""
        self.over += self._expiring.pop(lease_id, ())

    def applied(self) -> bool:
        """Answer some keep-alives of leases that the entries just applied have ended; whether there are more."""
        if self.over:
            over, self.over = self.over[:RENEW_MAX], self.over[RENEW_MAX:]
            for pending in over:
                pending.answer(0)
        return bool(self.over)

    def look_again(self) -> None:
        """Let keep-alives that wait for the end of a lease renew it, as leases were given time; not if it is ending."""
        waiting, self._expiring = self._expiring, {}
        for lease_id, group in waiting.items():
            if self._times.is_ending(lease_id):
                self._expiring[lease_id] = group
            else:
                self._unlogged += group
        self.flush()

    def surrender(self) -> list[PendingKeepAlive]:
        """Give up all keep-alives that wait, for another leader: this member leads no more."""
        self._leadership += 1
        expiring = [pending for group in self._expiring.values() for pending in group]
        pending = self._in_flight + self._unlogged + expiring
        self._in_flight, self._unlogged = [], []
        self._expiring.clear()
        return pending


class Tail(Protocol):
    """The end of a leader's log."""

    def applied(self) -> int:
        """Return the index of the last entry that is applied here."""

    def last_index(self) -> int:
        """Return the index of the last entry."""

    def entries(self, first: int, last: int) -> Sequence[Entry]:
        """Return entries, both ends included; none of them is applied."""


class Revocations:
    """Which leases are revoked by entries that are in the log of a leader, and not applied here.

    The end of a lease names its id alone. Behind a revocation the id may be granted anew, so an end that is put into
    the log then would be the end of another lease, which its owner has just been given.

    Arguments:
        tail: of the log. Under one leadership it only grows, so each entry is looked at once.
    """

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self._seen_to = 0
        self._indexes: dict[int, int] = {}

    def forget(self) -> None:
        """Forget what was seen: another leader may have replaced those entries."""
        self._seen_to = 0
        self._indexes.clear()

    def look(self) -> bool:
        """Look at the entries that have come since, or at some of very many; return whether all were seen."""
        applied, last_index = self._tail.applied(), self._tail.last_index()
        if self._indexes:
            self._indexes = {lease_id: index for lease_id, index in self._indexes.items() if index > applied}
        first = max(self._seen_to, applied) + 1
        last = min(last_index, first + LOOKS_PER_SWEEP - 1)
        for entry in self._tail.entries(first, last) if first <= last else ():
            lease_id = _revoked(entry)
            if lease_id:
                self._indexes[lease_id] = entry.index
        self._seen_to = max(last, applied)
        return last >= last_index

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._indexes


def _revoked(entry: Entry) -> int:
    """Return the lease that an entry ends because a client asks for it; 0: none."""
    data = entry.data
    # Before anything is copied: where users are asked for, nearly all entries are identified ones.
    kind_at = wire.INNER_KIND_AT if data[:1] == _IDENTIFIED else 0
    if data[kind_at : kind_at + 1] != _REVOKE or entry.type != EntryType.NORMAL:
        return 0
    try:
        request = wire.decode(data)
        if request is None:
            return 0
        kind, _, body = request
        if kind == wire.IDENTIFIED:
            body = wire.decode_identified(body)[2]
        return rpc_pb2.LeaseRevokeRequest.FromString(body).ID
    except (DecodeError, errors.MalformedEntryError):
        return 0


class Expiry:
    """Puts the ends of leases into the log, at the leader.

    An end that was refused, or of which nothing was heard in time, is proposed again; but only when everything that is
    in the log by then is applied. It may be there: behind it the id may be granted anew, and a second end would be the
    end of that lease. So it is with a lease that a client revokes at the same time (``Revocations``): ``propose`` must
    have an end in the log, or refused, when it returns.

    Arguments:
        times: when leases end.
        propose: see the module.
        tail: of the leader's log.
        revoke: puts the end of a lease before its time into the log.
        asks_users: whether users are asked for.
        restored: called when leases got their time back: keep-alives may wait for their end.
    """

    def __init__(
        self,
        times: LeaseTimes,
        propose: Propose,
        tail: Tail,
        revoke: Revoke,
        asks_users: Callable[[], bool],
        restored: Callable[[], None],
    ) -> None:
        self._times = times
        self._propose = propose
        self._tail = tail
        self._revoke = revoke
        self._asks_users = asks_users
        self._restored = restored
        # Revocations under way, and whether one of them was refused.
        self._revoking = 0
        self._is_refused = False
        self._revocations = Revocations(tail)
        self._in_flight: list[int] = []
        # Leases whose end may be in the log, up to which entry.
        self._unsure: list[int] = []
        self._unsure_to = 0
        self._leadership = 0

    def has_work(self) -> bool:
        """Return whether ``sweep`` would do something."""
        if self._in_flight or self._revoking:
            return False
        self._take_up_unsure()
        return self._times.has_due()

    def _take_up_unsure(self) -> None:
        if self._unsure and self._tail.applied() >= self._unsure_to:
            self._times.give_back(self._unsure)
            self._unsure = []

    def sweep(self) -> None:
        """Propose the end of leases that are over, unless some are on their way; the rest follows when they are."""
        if self._in_flight or self._revoking:
            return
        self._take_up_unsure()
        if not self._times.has_due() or not self._revocations.look():
            return  # the next sweep looks at more
        due = self._times.take_due(EXPIRE_MAX)
        revoked = [lease_id for lease_id in due if lease_id in self._revocations]
        if revoked:
            self._doubt(revoked)
            due = [lease_id for lease_id in due if lease_id not in self._revocations]
        if self._asks_users():
            due = self._end_early(due)
        if due:
            self._in_flight = due
            self._propose(Kind.LEASE_EXPIRE, due, partial(self._ended, self._leadership))

    def _end_early(self, due: list[int]) -> list[int]:
        """Revoke the leases that end before their time; return the others."""
        early = [lease_id for lease_id in due if self._times.is_early(lease_id)]
        self._revoking += len(early)
        for lease_id in early:
            done = partial(self._revoked, self._leadership, lease_id)
            self._revoke(lease_id, self._times.shortened_by(lease_id), done)
        return [lease_id for lease_id in due if lease_id not in early]

    def _revoked(self, leadership: int, lease_id: int, error: errors.StatusError | None) -> None:
        if leadership != self._leadership:
            return
        self._revoking -= 1
        if isinstance(error, _REFUSALS):
            self._times.restore(lease_id)
            self._is_refused = True
        elif error is not None and not isinstance(error, errors.LeaseNotFoundError):
            self._doubt([lease_id])
        if self._revoking:
            return
        if self._is_refused:
            self._is_refused = False
            self._restored()
        if error is None:
            self.sweep()

    def _doubt(self, lease_ids: Sequence[int]) -> None:
        """Propose nothing more for these leases until every entry that is in the log by now is applied."""
        self._unsure += lease_ids
        self._unsure_to = self._tail.last_index()

    def _ended(self, leadership: int, error: errors.StatusError | None) -> None:
        if leadership != self._leadership:
            return
        ids, self._in_flight = self._in_flight, []
        if error is not None:
            # For the next sweep: the same cause may refuse it again at once.
            self._doubt(ids)
        else:
            self.sweep()

    def surrender(self) -> None:
        """Forget what is under way: this member leads no more."""
        self._leadership += 1
        self._in_flight = []
        self._revoking = 0
        self._unsure = []
        self._revocations.forget()
