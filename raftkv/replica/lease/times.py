"""When leases end: the local, volatile half of leases, which no member agrees on with another.

Owns this member's lease clock, when it saw each lease renewed, and on the leader when each lease ends. Pure but for
the clock it is given, so that time can be simulated.

    every member: entry GRANT or RENEW applied  -> renewed_at = now
    new leader:   ends_at = renewed_at + TTL + LOGGED_S      (``promote``, once all entries before its term are applied)
                  but none at once: owners that could reach no leader get time to reach this one
    keep-alive:   ends_at = now + TTL
    its owner's connection broke:  ends_at = min(ends_at, now + grace)         (``shorten``; any keep-alive undoes it,
                                                                                and ``restore``)
    sweep:        ends_at <= now -> expiring: its end is on its way into the log, nothing renews it any more

Why a new leader ends no lease early: a leader answers a keep-alive only if a RENEW of that lease was proposed less
than ``LOGGED_S`` before, and applied. Every member saw that entry later than it was proposed, hence less than
``LOGGED_S`` before the answer or after it. A restart sees all leases renewed at its start.

The lease clock is monotonic; the wall clock is never read. It runs with ``beat``, which is called every ``BEAT_S``:
when a beat is late because the process stood still, all but ``STALL_S`` of the delay is left out, because keep-alives
that came meanwhile wait in the sockets and must be read before leases end for the lack of them.

There may be a million leases, so a change of leaders touches none: what a leader knows of a lease counts under its own
leadership alone and is made anew when the next one looks at it, and those that may end are queued in steps
(``queue_some``).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final

from raftkv.apply.wire import Caller
from raftkv.histograms import Buckets, doubling

LOGGED_S: Final = 0.5
"""A renewal in the log lets the leader answer keep-alives from memory for so long."""

PATIENCE_S: Final = 1.0
"""How long a new leader ends no lease: an owner whose own clock has run out, but that has not given up, asks one member
after the other, and a round may take most of this."""

OUTAGE_GRACE_S: Final = 2.0
"""How long a new leader ends no lease after an outage in which owners were turned away: they try again every quarter of
a second, all of them."""

UNHEARD_TTLS: Final = 0.5
"""A new leader shortens a lease that it has not heard of yet to no less than this part of its TTL: an owner that went
on elsewhere, under the leader before, is heard within a third of it."""

BEAT_S: Final = 0.1
STALL_S: Final = 0.5

GONE: Final = 0
EXPIRING: Final = 1
FRESH: Final = 2
UNLOGGED: Final = 3
"""Outcome of a keep-alive: see ``LeaseTimes.renew``."""

TTL_BUCKETS_S: Final = doubling(1.0, 24)
"""Bounds of etcd's histogram of TTLs: a second to three months."""

_STALE_MAX: Final = 1_000

QUEUED_PER_STEP: Final = 5_000
"""Leases that are queued in a row: 3 ms."""

FREED_PER_STEP: Final = 50_000

RECEIVED_PER_STEP: Final = 5_000
"""Leases of a received database that are got ready in a row, and those of before that are forgotten: 4 ms."""

LOOKS_PER_STEP: Final = 2_000
"""Leases that were renewed, and whose place in the queue is put right, in a row: 4 ms. Those that were granted together
come up together, and all that were there when their member started."""


class LeaseClock:
    """Counts seconds of lease time: those in which this process was able to hear keep-alives.

    Arguments:
        monotonic: seconds that never go back.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.monotonic = monotonic
        self._before = 0.0
        self._beat_at = monotonic()

    def now(self) -> float:
        """Seconds of lease time."""
        since = self.monotonic() - self._beat_at
        return self._before + (since if since < BEAT_S + STALL_S else BEAT_S + STALL_S)

    def beat(self) -> None:
        """The process is alive: time goes on."""
        self._before = self.now()
        self._beat_at = self.monotonic()


class _Lease:
    __slots__ = ("ends_at", "is_expiring", "kept_at", "leadership", "logged_at", "queued_at", "renewed_at", "ttl_s")

    def __init__(self, ttl_s: int, now: float, leadership: int) -> None:
        self.ttl_s = ttl_s
        self.renewed_at = now
        # Under which leadership the rest was known.
        self.leadership = leadership
        self.ends_at = now + ttl_s
        # When the last RENEW that this leader saw applied was proposed, in seconds of the monotonic clock.
        self.logged_at = -math.inf
        # When this leader took the last keep-alive; likewise monotonic.
        self.kept_at = -math.inf
        # Where the heap has it; an entry of the heap that says otherwise is stale.
        self.queued_at = math.inf
        self.is_expiring = False


class LeaseTimes:
    """Knows when each lease was renewed and, on the leader, when it ends. Observes ``apply.leases.Leases``.

    Arguments:
        clock: this member's lease clock.
        on_end: called with the id of every lease that is gone.

    Attributes:
        is_primary: whether this member decides when leases end.
        granted_total, revoked_total, expired_total, renewed_total: since the start.
        ttls: of leases granted since the start, in seconds.
    """

    def __init__(self, clock: LeaseClock, on_end: Callable[[int], None]) -> None:
        self.is_primary = False
        self.granted_total = self.revoked_total = self.expired_total = self.renewed_total = 0
        self.ttls = Buckets(TTL_BUCKETS_S)
        self._clock = clock
        self._on_end = on_end
        self._leases: dict[int, _Lease] = {}
        self._leadership = 0
        # No lease ends before; and none that this leader has not heard of.
        self._earliest = self._earliest_unheard = -math.inf
        self._heap: list[tuple[float, int]] = []
        # Leases that are not in the heap yet, and heaps of earlier leaderships that are being freed.
        self._unqueued: list[int] = []
        self._old_heaps: list[list[tuple[float, int]]] = []
        # Looks left at the head of the heap in this step, and whether they were too few.
        self._looks_left = 0
        self._is_head_stale = False
        # The leases read from the database that is being received, and ids of the previous leases.
        self._received: tuple[dict[int, _Lease], list[int]] | None = None
        self._gone: list[int] = []
        self._before: list[dict[int, _Lease]] = []
        # Leases that were shortened: when they would have ended, in lease time, and on whose behalf they end before.
        self._shortened: dict[int, tuple[float, Caller | None]] = {}
        # Expiring, and to be proposed again because it is not known whether the last proposal arrived.
        self._again: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._leases)

    # -- what was applied --------------------------------------------------------------------------------------------

    def granted(self, lease_id: int, ttl_s: int) -> None:
        """Note that a lease exists now, as if just renewed.

        Arguments:
            lease_id: of the lease.
            ttl_s: its TTL in seconds.
        """
        self.granted_total += 1
        self.ttls.observe(ttl_s)
        self._shortened.pop(lease_id, None)
        lease = self._leases[lease_id] = _Lease(ttl_s, self._clock.now(), self._leadership)
        if self.is_primary:
            self._push(lease_id, lease)

    def renewed(self, lease_ids: Sequence[int]) -> None:
        """Note that a RENEW of these leases was applied."""
        now = self._clock.now()
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is not None:
                lease.renewed_at = now

    def ended(self, lease_id: int, *, expired: bool) -> None:
        """Note that a lease is gone.

        Arguments:
            lease_id: of the lease.
            expired: whether its time was over; else it was revoked.
        """
        self.revoked_total += 1
        self.expired_total += expired
        self._leases.pop(lease_id, None)
        self._shortened.pop(lease_id, None)
        self._trim_heap()
        self._on_end(lease_id)

    def receive(self, granted: dict[int, int]) -> Generator[None, None, None]:
        """Get ready, in steps, for ``reloaded`` with these leases; what is here does not change meanwhile.

        Their renewals are not known, but were before they were received.
        """
        now = self._clock.now()
        leases: dict[int, _Lease] = {}
        for number, (lease_id, ttl_s) in enumerate(granted.items(), 1):
            leases[lease_id] = _Lease(ttl_s, now, self._leadership)
            if number % RECEIVED_PER_STEP == 0:
                yield
        gone: list[int] = []
        for number, lease_id in enumerate(list(self._leases), 1):
            if lease_id not in granted:
                gone.append(lease_id)
            if number % RECEIVED_PER_STEP == 0:
                yield
        self._received = leases, gone

    def reloaded(self, granted: dict[int, int]) -> None:
        """Begin anew with these leases (TTLs in seconds by id): the database was replaced, or has just been opened.

        The listener hears of those that are gone, and what was known before is freed, in steps of ``queue_some``.
        """
        received = self._take_received()
        if received is None:
            for _ in self.receive(granted):
                pass
            received = self._take_received()
        self.demote()
        self._before.append(self._leases)
        self._leases, gone = ({}, []) if received is None else received
        self._gone += gone
        self._forget_some()

    def _take_received(self) -> tuple[dict[int, _Lease], list[int]] | None:
        received, self._received = self._received, None
        return received

    def _forget_some(self) -> None:
        """Tell of some leases that are gone with the database of before, and free some of what was known of those."""
        for lease_id in self._gone[-RECEIVED_PER_STEP:]:
            if lease_id not in self._leases:  # or it was granted anew meanwhile
                self._shortened.pop(lease_id, None)
                self._on_end(lease_id)
        del self._gone[-RECEIVED_PER_STEP:]
        if self._before:
            before = self._before[-1]
            for _ in range(min(RECEIVED_PER_STEP, len(before))):
                before.popitem()
            if not before:
                self._before.pop()

    # -- leadership --------------------------------------------------------------------------------------------------

    def promote(self, *, after_outage: bool = False) -> None:
        """Begin to decide: this member leads, and everything that leaders before it committed is applied.

        Arguments:
            after_outage: there was no leader for so long that owners were turned away, or for an unknown time because
                this member has just started: the last known renewal says nothing of the owner.
        """
        self.demote()
        self._leadership += 1
        self._earliest = -math.inf
        self._earliest_unheard = self._clock.now() + (OUTAGE_GRACE_S if after_outage else PATIENCE_S)
        self._requeue()
        self.is_primary = True

    def demote(self) -> None:
        """Decide nothing more: this member does not lead, or does not know that it does."""
        self.is_primary = False
        self._drop_heap()
        self._unqueued = []
        self._again.clear()
        self._is_head_stale = False

    def _known(self, lease_id: int) -> _Lease | None:
        """Return a lease as this leadership knows it: at first, that it lasts from its last renewal in the log."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.leadership != self._leadership:
            lease.leadership = self._leadership
            lease.ends_at = lease.renewed_at + lease.ttl_s + LOGGED_S
            lease.logged_at = lease.kept_at = -math.inf
            lease.is_expiring = False
            self._shortened.pop(lease_id, None)
        return lease

    def _end_of(self, lease: _Lease) -> float:
        """Return when it ends, in lease time, if nothing happens."""
        earliest = self._earliest_unheard if lease.kept_at == -math.inf else self._earliest
        return max(lease.ends_at, earliest, self._earliest)

    # -- what the primary decides ------------------------------------------------------------------------------------

    def renew(self, lease_id: int) -> int:
        """Renew a lease: a keep-alive came, and the leadership of this member was confirmed since.

        Returns:
            GONE: no such lease. EXPIRING: it is over and will be gone soon; nothing can save it. FRESH: renewed, and
            the log knows of it as far as is needed. UNLOGGED: renewed here; to be answered once a RENEW is applied.
        """
        lease = self._known(lease_id)
        if lease is None:
            return GONE
        now = self._clock.now()
        if lease.is_expiring or (lease.ends_at <= now and self._end_of(lease) <= now):
            return EXPIRING
        lease.ends_at = now + lease.ttl_s
        if self._shortened:
            self._shortened.pop(lease_id, None)
        # By the monotonic clock: lease time may stand still while the clocks of other members run.
        lease.kept_at = self._clock.monotonic()
        return FRESH if lease.kept_at - lease.logged_at < LOGGED_S else UNLOGGED

    def shorten(self, lease_id: int, grace_s: float, age_s: float, caller: Caller | None = None) -> float | None:
        """Let a lease end soon, because the connection of its owner broke. Never makes it last longer.

        Arguments:
            lease_id: of the lease.
            grace_s: how long it may live on.
            age_s: time since the owner got its last answer over that connection. A keep-alive that is younger came
                another way: then nothing happens.
            caller: on whose behalf the lease ends early.

        Returns:
            Seconds until it ends now, or None if nothing has changed.
        """
        lease = self._known(lease_id)
        if lease is None or lease.is_expiring or lease.kept_at > self._clock.monotonic() - age_s:
            return None
        if lease.kept_at == -math.inf:
            grace_s = max(grace_s, lease.ttl_s * UNHEARD_TTLS)
        now = self._clock.now()
        if now + grace_s >= lease.ends_at:
            return None
        would_end_at, _ = self._shortened.get(lease_id, (lease.ends_at, None))
        self._shortened[lease_id] = would_end_at, caller
        lease.ends_at = now + grace_s
        self._push(lease_id, lease)
        self._trim_heap()
        return max(grace_s, self._end_of(lease) - now)

    def is_early(self, lease_id: int) -> bool:
        """Return whether a lease that is over was shortened, and would not be over yet otherwise."""
        shortened = self._shortened.get(lease_id)
        return shortened is not None and shortened[0] > self._clock.now()

    def shortened_by(self, lease_id: int) -> Caller | None:
        """Return on whose behalf a lease was shortened."""
        shortened = self._shortened.get(lease_id)
        return None if shortened is None else shortened[1]

    def restore(self, lease_id: int) -> None:
        """Undo ``shorten``: the caller may not end the lease, which lasts its time."""
        lease = self._leases.get(lease_id)
        shortened = self._shortened.pop(lease_id, None)
        if lease is None or shortened is None:
            return
        lease.ends_at, lease.is_expiring = shortened[0], False
        self._push(lease_id, lease)

    def note_logged(self, lease_ids: Sequence[int], proposed_at: float) -> None:
        """Note that a RENEW of this leader is applied.

        Arguments:
            lease_ids: of the RENEW.
            proposed_at: when it was proposed, in seconds of the monotonic clock.
        """
        for lease_id in lease_ids:
            lease = self._known(lease_id)
            if lease is not None:
                lease.logged_at = proposed_at

    def is_ending(self, lease_id: int) -> bool:
        """Return whether a lease cannot be renewed any more: it is gone, or its end is on its way."""
        lease = self._known(lease_id)
        return lease is None or lease.is_expiring

    def postpone_expiry(self, grace_s: float) -> None:
        """Let no lease end for ``grace_s`` seconds, but those that are expiring."""
        self._earliest = max(self._earliest, self._clock.now() + grace_s)

    def has_due(self) -> bool:
        """Return whether a lease is over now, as far as is known: ``queue_some`` goes on looking."""
        self._looks_left = LOOKS_PER_STEP
        return bool(self._again) or self._due(self._clock.now()) is not None

    def take_due(self, count_max: int) -> list[int]:
        """Take at most ``count_max`` leases that are over: they are expiring, and each end must be proposed."""
        due: list[int] = []
        while self._again and len(due) < count_max:
            lease_id = self._again.popleft()
            lease = self._leases.get(lease_id)
            # Not one that was granted anew: the end of the one before was applied after all.
            if lease is not None and lease.is_expiring:
                due.append(lease_id)
        now = self._clock.now()
        self._looks_left = LOOKS_PER_STEP
        while len(due) < count_max and (first := self._due(now)) is not None:
            heapq.heappop(self._heap)
            self._leases[first].is_expiring = True
            due.append(first)
        return due

    def _due(self, now: float) -> int | None:
        """Return the lease at the head of the heap, if it is over; what the heap has wrong is put right on the way, as
        far as this step may look.
        """
        self._is_head_stale = False
        heap = self._heap
        while heap and heap[0][0] <= now:
            queued_at, lease_id = heap[0]
            lease = self._known(lease_id)
            if lease is None or lease.queued_at != queued_at or lease.is_expiring:
                heapq.heappop(heap)
            elif (ends_at := self._end_of(lease)) <= now:
                return lease_id
            else:  # renewed since
                lease.queued_at = ends_at
                heapq.heapreplace(heap, (ends_at, lease_id))
            self._looks_left -= 1
            if self._looks_left < 0:
                self._is_head_stale = True
                break
        return None

    def give_back(self, lease_ids: Sequence[int]) -> None:
        """Make leases due again whose EXPIRE failed: they stay expiring, since that may be applied yet."""
        self._again.extend(lease_ids)

    # -- questions ---------------------------------------------------------------------------------------------------

    def ttl_s(self, lease_id: int) -> int:
        """Return the seconds that a lease was granted for; 0 if it is gone."""
        lease = self._leases.get(lease_id)
        return 0 if lease is None else lease.ttl_s

    def remaining_s(self, lease_id: int) -> float:
        """Return the seconds until a lease ends, as this member sees it; 0 if it is over already.

        Raises:
            KeyError: there is no such lease.
        """
        lease = self._known(lease_id)
        if lease is None:
            raise KeyError(lease_id)
        return max(0.0, self._end_of(lease) - self._clock.now())

    def ends(self) -> Iterator[tuple[float, int]]:
        """Yield when each lease ends, and its id; for members that do not lead, as of the last renewal in the log.

        Leases may come and go while it is in use.
        """
        for lease_id in list(self._leases):
            lease = self._known(lease_id)
            if lease is not None:
                yield (self._end_of(lease) if self.is_primary else lease.renewed_at + lease.ttl_s), lease_id

    # -- the heap ----------------------------------------------------------------------------------------------------

    def queue_some(self) -> bool:
        """Queue some of the leases that may end, put some places right, and free some of an earlier leadership's queue;
        whether more is left.

        A lease that is not queued yet, or behind very many that were renewed, ends a little later.
        """
        if self._is_head_stale:
            self._looks_left = LOOKS_PER_STEP
            self._due(self._clock.now())
        for lease_id in self._unqueued[-QUEUED_PER_STEP:]:
            lease = self._known(lease_id)
            if lease is not None and not lease.is_expiring:
                self._push(lease_id, lease)
        del self._unqueued[-QUEUED_PER_STEP:]
        if self._old_heaps:
            del self._old_heaps[-1][-FREED_PER_STEP:]
            if not self._old_heaps[-1]:
                self._old_heaps.pop()
        self._forget_some()
        return bool(self._unqueued or self._old_heaps or self._is_head_stale or self._gone or self._before)

    def _push(self, lease_id: int, lease: _Lease) -> None:
        lease.queued_at = self._end_of(lease)
        heapq.heappush(self._heap, (lease.queued_at, lease_id))

    def _trim_heap(self) -> None:
        if len(self._heap) > 2 * len(self._leases) + _STALE_MAX:
            self._drop_heap()
            self._requeue()

    def _drop_heap(self) -> None:
        if self._heap:
            self._old_heaps.append(self._heap)
            self._heap = []

    def _requeue(self) -> None:
        """Queue all anew: the first at once."""
        self._unqueued = list(self._leases)
        self.queue_some()
