"""The lease with which a leader serves linearizable reads without asking a quorum: the log is the lease.

    leader, term 4     append 4/8 ............ 4/8 committed           may serve reads until LEASE_NS after the append
    leader, term 5                  received 4/8 ...... elected        commits nothing until WAIT_NS after the receipt

A read at the commit index is linearizable if no later leader has committed an entry that this leader does not know.
Every later leader has each committed entry in its log. So while the newest committed entry is younger than the lease,
any later leader still holds its commits back, because it received that entry after it was appended, and waits WAIT_NS
from then on. (LeaseGuard: Davis, Demirbas and Deng 2025, arXiv 2512.15659, with receipts in place of synchronized
clocks.)

Assumption: the clocks of members run at the same rate within ``RATE_ERROR``, and count the time in which a machine or a
process is suspended. They need not show the same time.

Rules

- A leader marks the entries that it sends while it may hold a lease, or while it still waits for another leader's
  lease. A new leader that has recently received marked entries waits, whether or not it serves reads by leases itself.
  So does a member that has just started, or received a snapshot: it cannot know how old its entries are.
- The age of an entry counts from before the entry leaves the leader. The clock for a receipt is read after the entry
  has arrived.
- A leader reads the clock for each read, after the read has arrived.
- A leader that hands over gives up its lease for the rest of its term and says so: its successor in the next term need
  not wait. A leader that still waits for an earlier lease cannot promise that.
- Reads renew the lease: when a read arrives and more than half of the lease has passed, the leader appends an empty
  entry. An idle leader appends none.

Not implemented: reads that a new leader could serve while it waits. It would have to know how old the entries of others
are, and a receipt gives only a lower bound of the age.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

LEASE_NS: Final = 500_000_000
"""Life of a lease by the leader's clock. Below the default election timeout, so that a lost leader's lease has ended.
"""

RATE_ERROR: Final = 0.05
"""Largest relative error of the rate of a member's clock, fast or slow."""

WAIT_NS: Final = int(LEASE_NS * (1 + RATE_ERROR) / (1 - RATE_ERROR)) + 1
"""Wait of a new leader by its own clock: long enough if its clock is fast and the old leader's is slow."""

GRAIN_NS: Final = 10_000_000
"""Entries appended less than this after the last noted one are not noted: this ends the lease earlier by at most that.
"""


class ReadLease:
    """The state of a member's own lease and of those of earlier leaders.

    Arguments:
        clock_ns: monotonic nanoseconds, including suspension; ``None``: there are no leases.
        starts_within_lease: a leader may hold a lease that depends on entries in this member's log at its start.

    Attributes:
        allowed: whether this member, while leading, may serve reads with its lease.
        wait_until_ns: end of the time in which ``must_wait`` may be true; 0: it is false for the rest of this term.
    """

    def __init__(self, clock_ns: Callable[[], int] | None, starts_within_lease: bool) -> None:
        self.allowed = False
        self._clock_ns = clock_ns
        # Upper bound of the arrival time of the newest marked entry; 0: none has arrived.
        self._received_ns = clock_ns() if clock_ns is not None and starts_within_lease else 0
        # The term in which the leader gave up its lease in favour of this member.
        self._released_term = 0
        self.wait_until_ns = 0
        self._until_ns = 0
        self._given_up = False
        # Uncommitted entries: index, and a lower bound of the time when each was appended; ascending.
        self._appended: deque[tuple[int, int]] = deque()

    # -- follower ----------------------------------------------------------------------------------------------------

    def received(self) -> None:
        """Record that marked entries, or a snapshot, have arrived."""
        if self._clock_ns is not None:
            self._received_ns = self._clock_ns()

    def released(self, term: int) -> None:
        """Record that the leader of a term hands over to this member, and serves no more reads with its lease."""
        self._released_term = term

    # -- leader ------------------------------------------------------------------------------------------------------

    def allow(self, allowed: bool) -> None:
        """Allow this member to hold a lease, or end its lease."""
        if not allowed:
            self._end()
        self.allowed = allowed and self._clock_ns is not None

    def _end(self) -> None:
        self._appended.clear()
        self._until_ns = 0

    def begin(self, term: int) -> None:
        """Start to lead a term, before its first entry is appended."""
        self._end()
        self._given_up = False
        is_free = not self._received_ns or self._released_term == term - 1
        self.wait_until_ns = 0 if is_free else self._received_ns + WAIT_NS

    def must_wait(self) -> bool:
        """Return whether the lease of an earlier leader may still hold, so that nothing may be committed."""
        if not self.wait_until_ns:
            return False
        if self._clock_ns is not None and self._clock_ns() < self.wait_until_ns:
            return True
        self.wait_until_ns = 0
        return False

    def marks(self) -> bool:
        """Return whether entries sent now are marked."""
        return self.allowed or self.wait_until_ns != 0

    def appended(self, index: int) -> None:
        """Record that this leader is about to send entries up to an index."""
        if self._clock_ns is None or not self.allowed:
            return
        now_ns = self._clock_ns()
        if not self._appended or now_ns - self._appended[-1][1] >= GRAIN_NS:
            self._appended.append((index, now_ns))

    def committed(self, index: int) -> None:
        """Record that everything up to an index is committed, by an entry of this leader's term."""
        appended = self._appended
        while appended and appended[0][0] <= index:
            self._until_ns = appended.popleft()[1] + LEASE_NS

    def left_ns(self) -> int:
        """Return the remaining time of the lease; not positive after its end."""
        if self._clock_ns is None or not self.allowed or self._given_up:
            return 0
        return self._until_ns - self._clock_ns()

    def may_renew(self) -> bool:
        """Return whether another entry would prolong the lease: it is not given up, and no such entry is in flight."""
        return not self._appended and not self._given_up

    def give_up(self) -> bool:
        """Serve no more reads with leases in this term; return whether leases are in use at all."""
        self._given_up = True
        return self._clock_ns is not None
