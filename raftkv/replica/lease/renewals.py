"""The leader's decisions about leases, proposed through the log: renewals, and ends.

This module knows which keep-alives wait for which entry. At most one RENEW and one EXPIRE are in progress; later ones
join the next entry, so that any number of leases costs a few entries. While authentication is enabled, a lease that
ends early is revoked on behalf of the user whose connection broke: applying checks the right, and after a refusal the
lease gets its time back. This module has no clock and no socket of its own.

    keep-alive --> renewed recently and in the log?  answer from memory
               --> otherwise: joins the next RENEW; answered when that is applied
               --> lease has expired: waits until it is gone, then TTL 0

``propose(kind, ids, done)`` proposes a decision in the term of this leader, and calls ``done`` with ``None`` once it is
applied, or with the error if it is not (or perhaps not).
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
"""Leases ended by one entry: applying it must not block the loop for long."""

EXPIRE_KEYS_MAX: Final = 4_096
"""Keys of the leases of such an entry after which it takes no further lease: their deletion takes 20 ms, and other
entries wait for it."""

RENEW_MAX: Final = 4_000
"""Leases renewed by one entry, and keep-alives processed in one turn: about 20 ms."""

FAILED_AT_ONCE: Final = 100
"""Keep-alives that fail in one turn of the loop: each may end a stream."""

LOOKS_PER_SWEEP: Final = 20_000
"""Entries searched for revocations before leases are ended, which takes 3 ms; far more than arrive per beat."""

_REVOKE: Final = bytes([Kind.LEASE_REVOKE])
_IDENTIFIED: Final = bytes([wire.IDENTIFIED])

Done = Callable[[errors.StatusError | None], None]
Propose = Callable[[int, Sequence[int], Done], None]
Revoke = Callable[[int, Caller | None, Done], None]
"""Proposes the revocation of a lease, on behalf of a caller."""

_REFUSALS: Final = (errors.PermissionDeniedError, errors.UserEmptyError, errors.AuthOldRevisionError)


@mypyc_attr(allow_interpreted_subclasses=True)
class PendingKeepAlive:
    """A keep-alive that is not answered yet.

    Attributes:
        lease_id: id of the lease.
        deadline: loop time after which the answer is useless; set by the lessor.
        is_local: whether it came from a client of this member, not through another member.
    """

    __slots__ = ("deadline", "lease_id")

    is_local = True
    lease_id: int
    deadline: float

    def answer(self, ttl_s: int) -> None:
        """Answer with the remaining time of the lease in seconds; 0 if it is gone."""
        raise NotImplementedError

    def fail(self, error: errors.StatusError) -> None:
        """Report that there will be no answer."""
        raise NotImplementedError

    def refusal(self) -> errors.StatusError | None:
        """Return why it may no longer be renewed, with the current users and roles; ``None``: it may."""
        return None


def fail_each(batch: Sequence[PendingKeepAlive], error: errors.StatusError) -> None:
    """Fail keep-alives, however many there are."""
    for pending in batch:
        pending.fail(error)


class Renewals:
    """Answers keep-alives on the leader, and proposes RENEW for those that need it.

    Arguments:
        times: when leases end.
        clock: clock for the time of proposals.
        propose: see the module docstring.
        retry: takes back keep-alives that another leader must answer.
        cork: calls ``flush`` at the end of a turn with single keep-alives.
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
        """Keep-alives of leases that applied entries have ended; not answered yet."""
        # Distinguishes callbacks of proposals from an earlier leadership.
        self._leadership = 0

    def take(self, batch: Sequence[PendingKeepAlive]) -> None:
        """Answer keep-alives, now or later; this member's leadership was confirmed after they arrived."""
        for pending in batch:
            self.take_one(pending)
        self.flush()

    def take_one(self, pending: PendingKeepAlive) -> None:
        """Answer a keep-alive, now or later; this member's leadership was confirmed recently.

        If it needs a RENEW, that is proposed at the end of the turn, together with others of the turn.
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
        """Propose the next RENEW, unless one is in progress."""
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
            self._answer_logged(self._admit(batch))
        elif isinstance(error, errors.LeaderChangedError):
            self._retry(batch)
        else:
            self._fail(batch, error)
        # Some of the keep-alives that arrived meanwhile need no entry any more: these are answered, the others logged.
        # While a quorum or a disk hangs, very many arrive: no turn should process all of them.
        waiting, rest = self._unlogged[:RENEW_MAX], self._unlogged[RENEW_MAX:]
        self._unlogged = []
        for pending in self._admit(waiting):
            self.take_one(pending)
        self._unlogged += rest
        self.flush()

    def _answer_logged(self, batch: list[PendingKeepAlive]) -> None:
        """Answer keep-alives whose RENEW is applied; a lease that ended while the entry was in progress is gone."""
        for pending in batch:
            state = self._times.renew(pending.lease_id)
            if state in (lease_times.GONE, lease_times.EXPIRING):
                self._settle_over(pending, state)
            else:
                self._times.renewed_total += 1
                pending.answer(self._times.ttl_s(pending.lease_id))

    def lease_ended(self, lease_id: int) -> None:
        """Record that a lease has ended, in the entry being applied."""
        self.over += self._expiring.pop(lease_id, ())

    def applied(self) -> bool:
        """Answer some keep-alives of leases that the entries just applied have ended; return whether there are more."""
        if self.over:
            over, self.over = self.over[:RENEW_MAX], self.over[RENEW_MAX:]
            for pending in over:
                pending.answer(0)
        return bool(self.over)

    def look_again(self) -> None:
        """Let keep-alives that wait for the end of a lease renew it, if it got its time back and is not ending."""
        waiting, self._expiring = self._expiring, {}
        for lease_id, group in waiting.items():
            if self._times.is_ending(lease_id):
                self._expiring[lease_id] = group
            else:
                self._unlogged += group
        self.flush()

    def surrender(self) -> list[PendingKeepAlive]:
        """Return all waiting keep-alives, for another leader: this member no longer leads."""
        self._leadership += 1
        expiring = [pending for group in self._expiring.values() for pending in group]
        pending = self._in_flight + self._unlogged + expiring
        self._in_flight, self._unlogged = [], []
        self._expiring.clear()
        return pending


class Tail(Protocol):
    """The end of a leader's log."""

    def applied(self) -> int:
        """Return the index of the last entry applied here."""

    def last_index(self) -> int:
        """Return the index of the last entry."""

    def entries(self, first: int, last: int) -> Sequence[Entry]:
        """Return entries, both ends included; none of them may be applied."""


class Revocations:
    """The leases that are revoked by unapplied entries in the log of a leader.

    The entry that ends a lease contains only its id. After a revocation the id may be granted again; an end that is
    proposed then would end that other lease, which its owner has just received.

    Arguments:
        tail: end of the log. During one leadership it only grows, so each entry is examined once.
    """

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self._seen_to = 0
        self._indexes: dict[int, int] = {}

    def forget(self) -> None:
        """Forget the examined entries: another leader may have replaced them."""
        self._seen_to = 0
        self._indexes.clear()

    def look(self) -> bool:
        """Examine new entries, or some of them if there are very many; return whether all were examined."""
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
    """Return the lease that an entry revokes for a client; 0: none."""
    data = entry.data
    # Before anything is copied: while authentication is enabled, nearly all entries are of the kind IDENTIFIED.
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
    """Proposes the ends of leases, on the leader.

    An end that was refused, or timed out without an outcome, is proposed again, but only when everything in the log at
    that time is applied. The first end may be in the log: after it the id may be granted again, and a second end would
    end that new lease. The same applies to a lease that a client revokes at the same time (``Revocations``):
    ``propose`` must have an end in the log, or refused, when it returns.

    Arguments:
        times: when leases end.
        propose: see the module docstring.
        tail: end of the leader's log.
        revoke: proposes the early end of a lease.
        asks_users: returns whether authentication is enabled.
        restored: called when leases got their time back: keep-alives may wait for their end.
        keys_of: returns the number of keys of a lease.
    """

    def __init__(
        self,
        times: LeaseTimes,
        propose: Propose,
        tail: Tail,
        revoke: Revoke,
        asks_users: Callable[[], bool],
        restored: Callable[[], None],
        keys_of: Callable[[int], int],
    ) -> None:
        self._times = times
        self._propose = propose
        self._tail = tail
        self._revoke = revoke
        self._asks_users = asks_users
        self._restored = restored
        self._keys_of = keys_of
        # Revocations in progress, and whether one of them was refused.
        self._revoking = 0
        self._is_refused = False
        self._revocations = Revocations(tail)
        self._in_flight: list[int] = []
        # Leases whose end may be in the log, up to ``_unsure_to``.
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
        """Propose the end of expired leases, unless some are in progress; the rest follows after those."""
        if self._in_flight or self._revoking:
            return
        self._take_up_unsure()
        if not self._times.has_due() or not self._revocations.look():
            return  # the next sweep examines more entries
        due = self._times.take_due(EXPIRE_MAX, EXPIRE_KEYS_MAX, self._keys_of)
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
        """Propose nothing more for these leases until every entry now in the log is applied."""
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
        """Forget proposals in progress: this member no longer leads."""
        self._leadership += 1
        self._in_flight = []
        self._revoking = 0
        self._unsure = []
        self._revocations.forget()
