"""When leases end: the local, volatile state of leases, which differs between members.

This module has the member's lease clock, the time when it saw each lease renewed and, on the leader, the end of each
lease. It is pure except for the clock that is passed to it, so that time can be simulated.

    every member: entry GRANT or RENEW applied  -> renewed_at = now
    new leader:   ends_at = renewed_at + TTL + LOGGED_S      (``promote``, once all entries before its term are applied)
                  but none at once: owners that could reach no leader get time to reach this one
    keep-alive:   ends_at = now + TTL
    its owner's connection broke:  ends_at = min(ends_at, now + grace)         (``shorten``; any keep-alive undoes it,
                                                                                and ``restore``)
    sweep:        ends_at <= now -> expiring: its end is being proposed, it can no longer be renewed

Why a new leader ends no lease early: a leader answers a keep-alive only if a RENEW of that lease was proposed less than
``LOGGED_S`` before, and applied. Every member saw that entry after it was proposed, hence less than ``LOGGED_S`` before
the answer or after it. After a restart all leases count as renewed at the start.

The lease clock is monotonic; the wall clock is never read. It advances with ``beat``, which is called every ``BEAT_S``.
When a beat is late because the process was suspended, only ``STALL_S`` of the delay counts, because keep-alives that
arrived meanwhile wait in the sockets and must be read before leases end for lack of them.

There may be a million leases, so a change of leaders modifies none: what a leader knows of a lease is valid only during
its own leadership and is computed again when the next leader accesses it. Leases that may end are queued in steps
(``queue_some``). Each owner has a queue of its own: when very many leases of one owner expire together, those of other
owners end in between.
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
"""Seconds for which a renewal in the log lets the leader answer keep-alives from memory."""

PATIENCE_S: Final = 1.0
"""Seconds for which a new leader ends no lease: an owner whose own clock has run out, but that has not given up, asks
one member after the other, and a round may take most of this time."""

OUTAGE_GRACE_S: Final = 2.0
"""Seconds for which a new leader ends no lease after an outage in which owners were refused: all of them retry every
quarter of a second."""

UNHEARD_TTLS: Final = 0.5
"""Minimum fraction of its TTL to which a new leader shortens a lease that it has had no keep-alive for: an owner that
moved to another connection under the previous leader sends one within a third of the TTL."""

BEAT_S: Final = 0.1
STALL_S: Final = 0.5

GONE: Final = 0
EXPIRING: Final = 1
FRESH: Final = 2
UNLOGGED: Final = 3
"""Outcome of a keep-alive: see ``LeaseTimes.renew``."""

TTL_BUCKETS_S: Final = doubling(1.0, 24)
"""Bounds of etcd's histogram of TTLs: one second to three months."""

_STALE_MAX: Final = 1_000

QUEUED_PER_STEP: Final = 5_000
"""Leases queued at a time: 3 ms."""

FREED_PER_STEP: Final = 50_000

RECEIVED_PER_STEP: Final = 5_000
"""Leases of a received database that are prepared at a time, and previous leases that are freed: 4 ms."""

LOOKS_PER_STEP: Final = 2_000
"""Renewed leases whose place in the queue is corrected at a time: 4 ms. Leases that were granted together come up
together, and so do all that existed when their member started."""


class LeaseClock:
    """Counts seconds of lease time: time in which this process was able to receive keep-alives.

    Arguments:
        monotonic: monotonic seconds.
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
        """Advance the clock: the process is running."""
        self._before = self.now()
        self._beat_at = self.monotonic()


class _Lease:
    __slots__ = ("ends_at", "is_expiring", "kept_at", "leadership", "logged_at", "queued_at", "renewed_at", "ttl_s")

    def __init__(self, ttl_s: int, now: float, leadership: int) -> None:
        self.ttl_s = ttl_s
        self.renewed_at = now
        # The leadership in which the following values are valid.
        self.leadership = leadership
        self.ends_at = now + ttl_s
        # When the last RENEW that this leader saw applied was proposed, in seconds of the monotonic clock.
        self.logged_at = -math.inf
        # When this leader received the last keep-alive; also monotonic.
        self.kept_at = -math.inf
        # Position in the heap; a heap entry with another value is stale.
        self.queued_at = math.inf
        self.is_expiring = False


class LeaseTimes:
    """Knows when each lease was renewed and, on the leader, when it ends. Observes ``apply.leases.Leases``.

    Arguments:
        clock: this member's lease clock.
        on_end: called with the id of every ended lease.
        owner_of: returns the user to whom a lease was granted; empty: none.

    Attributes:
        is_primary: whether this member decides when leases end.
        granted_total, revoked_total, expired_total, renewed_total: numbers since the start.
        ttls: TTLs of leases granted since the start, in seconds.
    """

    def __init__(
        self, clock: LeaseClock, on_end: Callable[[int], None], owner_of: Callable[[int], bytes] = lambda lease_id: b""
    ) -> None:
        self.is_primary = False
        self.granted_total = self.revoked_total = self.expired_total = self.renewed_total = 0
        self.ttls = Buckets(TTL_BUCKETS_S)
        self._clock = clock
        self._on_end = on_end
        self._owner_of = owner_of
        self._leases: dict[int, _Lease] = {}
        self._leadership = 0
        # No lease ends before ``_earliest``, and none without a keep-alive to this leader before the other.
        self._earliest = self._earliest_unheard = -math.inf
        # By owner, the next one to be served first; and the number of their entries.
        self._heaps: dict[bytes, list[tuple[float, int]]] = {}
        self._queued = 0
        # Leases that are not in a heap yet, and heaps of earlier leaderships that are being freed.
        self._unqueued: list[int] = []
        self._old_heaps: list[list[tuple[float, int]]] = []
        # Entries at the heads of the heaps that may still be examined in this step, and whether that was not enough.
        self._looks_left = 0
        self._is_head_stale = False
        # The leases read from the database that is being received, and ids of the previous leases.
        self._received: tuple[dict[int, _Lease], list[int]] | None = None
        self._gone: list[int] = []
        self._before: list[dict[int, _Lease]] = []
        # Shortened leases: their original end, in lease time, and the caller on whose behalf they end early.
        self._shortened: dict[int, tuple[float, Caller | None]] = {}
        # Expiring leases to be proposed again, because it is unknown whether the last proposal arrived.
        self._again: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._leases)

    # -- what was applied --------------------------------------------------------------------------------------------

    def granted(self, lease_id: int, ttl_s: int) -> None:
        """Record that a lease was granted, as if just renewed.

        Arguments:
            lease_id: id of the lease.
            ttl_s: its TTL in seconds.
        """
        self.granted_total += 1
        self.ttls.observe(ttl_s)
        self._shortened.pop(lease_id, None)
        lease = self._leases[lease_id] = _Lease(ttl_s, self._clock.now(), self._leadership)
        if self.is_primary:
            self._push(lease_id, lease)

    def renewed(self, lease_ids: Sequence[int]) -> None:
        """Record that a RENEW of these leases was applied."""
        now = self._clock.now()
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is not None:
                lease.renewed_at = now

    def ended(self, lease_id: int, *, expired: bool) -> None:
        """Record that a lease has ended.

        Arguments:
            lease_id: id of the lease.
            expired: whether its time has passed; otherwise it was revoked.
        """
        self.revoked_total += 1
        self.expired_total += expired
        self._leases.pop(lease_id, None)
        self._shortened.pop(lease_id, None)
        self._trim_heap()
        self._on_end(lease_id)

    def receive(self, granted: dict[int, int]) -> Generator[None, None, None]:
        """Prepare, in steps, for ``reloaded`` with these leases; the current leases do not change meanwhile.

        The times of their renewals are unknown, but were before they were received.
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
        """Start again with these leases (TTLs in seconds by id): the database was replaced, or has just been opened.

        ``queue_some`` reports ended leases to ``on_end`` and frees the previous state, in steps.
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
        """Report some leases that ended with the previous database, and free some of its state."""
        for lease_id in self._gone[-RECEIVED_PER_STEP:]:
            if lease_id not in self._leases:  # or the id was granted again meanwhile
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
        """Start deciding: this member leads, and everything that earlier leaders committed is applied.

        Arguments:
            after_outage: there was no leader for so long that owners were refused, or for an unknown time because this
                member has just started: the last known renewal says nothing about the owner.
        """
        self.demote()
        self._leadership += 1
        self._earliest = -math.inf
        self._earliest_unheard = self._clock.now() + (OUTAGE_GRACE_S if after_outage else PATIENCE_S)
        self._requeue()
        self.is_primary = True

    def demote(self) -> None:
        """Stop deciding: this member does not lead, or does not know that it does."""
        self.is_primary = False
        self._drop_heaps()
        self._unqueued = []
        self._again.clear()
        self._is_head_stale = False

    def _known(self, lease_id: int) -> _Lease | None:
        """Return a lease as this leadership knows it: at first, it lasts from its last renewal in the log."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.leadership != self._leadership:
            lease.leadership = self._leadership
            lease.ends_at = lease.renewed_at + lease.ttl_s + LOGGED_S
            lease.logged_at = lease.kept_at = -math.inf
            lease.is_expiring = False
            self._shortened.pop(lease_id, None)
        return lease

    def _end_of(self, lease: _Lease) -> float:
        """Return its end in lease time, without further events."""
        earliest = self._earliest_unheard if lease.kept_at == -math.inf else self._earliest
        return max(lease.ends_at, earliest, self._earliest)

    # -- what the primary decides ------------------------------------------------------------------------------------

    def renew(self, lease_id: int) -> int:
        """Renew a lease: a keep-alive arrived, and this member's leadership was confirmed since.

        Returns:
            GONE: no such lease. EXPIRING: it has expired and will end soon, regardless of keep-alives. FRESH: renewed,
            and the log has a recent enough RENEW. UNLOGGED: renewed here; to be answered once a RENEW is applied.
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
        """End a lease soon, because the connection of its owner broke. Never makes it last longer.

        Arguments:
            lease_id: id of the lease.
            grace_s: how long it may live on, in seconds.
            age_s: time since the owner got its last answer over that connection. If there was a later keep-alive, it
                came another way: then nothing happens.
            caller: on whose behalf the lease ends early.

        Returns:
            Seconds until it ends now, or ``None`` if nothing has changed.
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
        """Return whether an expired lease was shortened, and would not have expired otherwise."""
        shortened = self._shortened.get(lease_id)
        return shortened is not None and shortened[0] > self._clock.now()

    def shortened_by(self, lease_id: int) -> Caller | None:
        """Return the caller on whose behalf a lease was shortened."""
        shortened = self._shortened.get(lease_id)
        return None if shortened is None else shortened[1]

    def restore(self, lease_id: int) -> None:
        """Undo ``shorten``: the caller may not end the lease, which lasts its original time."""
        lease = self._leases.get(lease_id)
        shortened = self._shortened.pop(lease_id, None)
        if lease is None or shortened is None:
            return
        lease.ends_at, lease.is_expiring = shortened[0], False
        self._push(lease_id, lease)

    def note_logged(self, lease_ids: Sequence[int], proposed_at: float) -> None:
        """Record that a RENEW of this leader is applied.

        Arguments:
            lease_ids: leases of the RENEW.
            proposed_at: when it was proposed, in seconds of the monotonic clock.
        """
        for lease_id in lease_ids:
            lease = self._known(lease_id)
            if lease is not None:
                lease.logged_at = proposed_at

    def is_ending(self, lease_id: int) -> bool:
        """Return whether a lease can no longer be renewed: it is gone, or its end is being proposed."""
        lease = self._known(lease_id)
        return lease is None or lease.is_expiring

    def postpone_expiry(self, grace_s: float) -> None:
        """End no lease for ``grace_s`` seconds, except those that are expiring."""
        self._earliest = max(self._earliest, self._clock.now() + grace_s)

    def has_due(self) -> bool:
        """Return whether a lease has expired, as far as known: ``queue_some`` continues the search."""
        self._looks_left, self._is_head_stale = LOOKS_PER_STEP, False
        now = self._clock.now()
        is_due = any(self._due(heap, now) is not None for heap in self._heaps.values())
        return is_due or bool(self._again)

    def take_due(
        self, count_max: int, keys_max: int = 1, keys_of: Callable[[int], int] = lambda lease_id: 0
    ) -> list[int]:
        """Take some expired leases, of all owners in turn: they are expiring now, and each end must be proposed.

        Arguments:
            count_max: maximum number of leases.
            keys_max: number of keys after which no further lease is taken.
            keys_of: returns the number of keys of a lease.
        """
        due: list[int] = []
        while self._again and len(due) < count_max and keys_max > 0:
            lease_id = self._again.popleft()
            lease = self._leases.get(lease_id)
            # Not one that was granted again: the end of the previous one was applied after all.
            if lease is not None and lease.is_expiring:
                due.append(lease_id)
                keys_max -= keys_of(lease_id)
        now = self._clock.now()
        self._looks_left, self._is_head_stale = LOOKS_PER_STEP, False
        owners = deque(self._heaps)
        while owners and len(due) < count_max and keys_max > 0:
            owner = owners.popleft()
            heap = self._heaps.pop(owner)
            first = self._due(heap, now)
            if first is not None:
                heapq.heappop(heap)
                self._queued -= 1
                self._leases[first].is_expiring = True
                due.append(first)
                keys_max -= keys_of(first)
            if heap:
                self._heaps[owner] = heap  # behind those of all others
                if first is not None:
                    owners.append(owner)
        return due

    def _due(self, heap: list[tuple[float, int]], now: float) -> int | None:
        """Return the lease at the head of a heap, if it has expired; wrong entries of the heap are corrected on the
        way, as far as this step allows.
        """
        while heap and heap[0][0] <= now:
            queued_at, lease_id = heap[0]
            lease = self._known(lease_id)
            if lease is None or lease.queued_at != queued_at or lease.is_expiring:
                heapq.heappop(heap)
                self._queued -= 1
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
        """Make leases due again whose EXPIRE failed: they stay expiring, because that may still be applied."""
        self._again.extend(lease_ids)

    # -- questions ---------------------------------------------------------------------------------------------------

    def ttl_s(self, lease_id: int) -> int:
        """Return the granted TTL of a lease in seconds; 0 if it is gone."""
        lease = self._leases.get(lease_id)
        return 0 if lease is None else lease.ttl_s

    def remaining_s(self, lease_id: int) -> float:
        """Return the seconds until a lease ends, as this member sees it; 0 if it has expired.

        Raises:
            KeyError: the lease does not exist.
        """
        lease = self._known(lease_id)
        if lease is None:
            raise KeyError(lease_id)
        return max(0.0, self._end_of(lease) - self._clock.now())

    def ends(self) -> Iterator[tuple[float, int]]:
        """Yield the end of each lease, and its id; on members that do not lead, as of the last renewal in the log.

        Leases may come and go while it is in use.
        """
        for lease_id in list(self._leases):
            lease = self._known(lease_id)
            if lease is not None:
                yield (self._end_of(lease) if self.is_primary else lease.renewed_at + lease.ttl_s), lease_id

    # -- the heap ----------------------------------------------------------------------------------------------------

    def queue_some(self) -> bool:
        """Queue some of the leases that may end, correct some places, and free some of an earlier leadership's queue;
        return whether more is left.

        A lease that is not queued yet, or is behind very many renewed ones, ends a little later.
        """
        if self._is_head_stale:
            self.has_due()
        for lease_id in self._unqueued[-QUEUED_PER_STEP:]:
            lease = self._known(lease_id)
            if lease is not None and not lease.is_expiring:
                self._push(lease_id, lease)
        del self._unqueued[-QUEUED_PER_STEP:]
        left = FREED_PER_STEP
        while self._old_heaps and left > 0:
            heap = self._old_heaps[-1]
            size = len(heap)
            del heap[-left:]
            left -= size + 1
            if not heap:
                self._old_heaps.pop()
        self._forget_some()
        return bool(self._unqueued or self._old_heaps or self._is_head_stale or self._gone or self._before)

    def _push(self, lease_id: int, lease: _Lease) -> None:
        lease.queued_at = self._end_of(lease)
        owner = self._owner_of(lease_id)
        heap = self._heaps.get(owner)
        if heap is None:
            heap = self._heaps[owner] = []
        heapq.heappush(heap, (lease.queued_at, lease_id))
        self._queued += 1

    def _trim_heap(self) -> None:
        if self._queued > 2 * len(self._leases) + _STALE_MAX:
            self._drop_heaps()
            self._requeue()

    def _drop_heaps(self) -> None:
        self._old_heaps += self._heaps.values()
        self._heaps, self._queued = {}, 0

    def _requeue(self) -> None:
        """Queue all leases again: the first ones at once."""
        self._unqueued = list(self._leases)
        self.queue_some()
