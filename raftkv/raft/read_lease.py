"""The lease by which a leader serves linearizable reads without asking a quorum: the log is the lease.

    leader, term 4     append 4/8 ............ 4/8 committed           may serve reads until LEASE_NS after the append
    leader, term 5                  received 4/8 ...... elected        commits nothing until WAIT_NS after the receipt

A read is linearizable at the commit index if no later leader has committed anything that this one does not know. Every
later leader has each committed entry in its log. So while the newest committed entry is younger than the lease, any
later leader still holds its commits back, because it received that entry after it was appended, and waits from then.
(LeaseGuard: Davis, Demirbas and Deng 2025, arXiv 2512.15659, with receipts in place of synchronized clocks.)

Assumption: the clocks of members run at the same rate within ``RATE_ERROR``, and count the time in which a machine or a
process stands still. They need not show the same time.

Rules
- A leader marks the entries that it sends while it may hold a lease, or while it still waits for that of another. Who
  has received such entries lately waits as a new leader, whether or not it serves reads by leases itself. So does a
  member that has just started, or been brought a snapshot: it cannot know how old its entries are.
- The age of an entry begins before the entry leaves the leader. A receipt is read from the clock after the entry came.
- A leader looks at the clock for each read, after the read has arrived.
- A leader that hands over gives its lease up for the rest of its term and says so: its successor in the next term need
  not wait. A leader still waiting for an earlier lease cannot promise that.
- Reads keep the lease alive: a leader whose lease is half over at a read appends an empty entry. An idle leader appends
  none.

Leaves out: reads that a new leader could serve while it waits. It would have to know how old the entries of others are,
and a receipt gives only the least age.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

LEASE_NS: Final = 500_000_000
"""Life of a lease by the clock of the leader. Below the default election timeout, so that a lost leader's is over."""

RATE_ERROR: Final = 0.05
"""Largest share by which the clock of a member may run fast or slow."""

WAIT_NS: Final = int(LEASE_NS * (1 + RATE_ERROR) / (1 - RATE_ERROR)) + 1
"""How long a new leader waits by its own clock: a fast one, while the old leader's is slow."""

GRAIN_NS: Final = 10_000_000
"""Entries younger than this beside the last one noted are not noted: the lease ends that much earlier at most."""


class ReadLease:
    """What one member knows of its own lease and of those of leaders before it.

    Arguments:
        clock_ns: nanoseconds that have passed, suspension included, since any moment; None: there are no leases.
        starts_within_lease: a leader may hold a lease that rests on entries in the log with which this member starts.

    Attributes:
        allowed: whether this member, leading, may serve reads by its lease.
        wait_until_ns: until when ``must_wait`` may hold; 0: it does not in this term any more.
    """

    def __init__(self, clock_ns: Callable[[], int] | None, starts_within_lease: bool) -> None:
        self.allowed = False
        self._clock_ns = clock_ns
        # When the newest marked entry came, at the latest; 0: none came.
        self._received_ns = clock_ns() if clock_ns is not None and starts_within_lease else 0
        # The term whose leader gave its lease up in favour of this member.
        self._released_term = 0
        self.wait_until_ns = 0
        self._until_ns = 0
        self._given_up = False
        # Entries that are not committed yet: index, and when it was appended at the earliest; ascending.
        self._appended: deque[tuple[int, int]] = deque()

    # -- follower ----------------------------------------------------------------------------------------------------

    def received(self) -> None:
        """Note that marked entries, or a snapshot, have come."""
        if self._clock_ns is not None:
            self._received_ns = self._clock_ns()

    def released(self, term: int) -> None:
        """Note that the leader of a term hands over to this member, and serves no more reads by its lease."""
        self._released_term = term

    # -- leader ------------------------------------------------------------------------------------------------------

    def allow(self, allowed: bool) -> None:
        """Allow this member to hold a lease, or end the one that it holds."""
        if not allowed:
            self._end()
        self.allowed = allowed and self._clock_ns is not None

    def _end(self) -> None:
        self._appended.clear()
        self._until_ns = 0

    def begin(self, term: int) -> None:
        """Begin to lead a term, before its first entry is appended."""
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
        """Return whether entries that leave now are marked."""
        return self.allowed or self.wait_until_ns != 0

    def appended(self, index: int) -> None:
        """Note that this leader is about to send entries up to an index."""
        if self._clock_ns is None or not self.allowed:
            return
        now_ns = self._clock_ns()
        if not self._appended or now_ns - self._appended[-1][1] >= GRAIN_NS:
            self._appended.append((index, now_ns))

    def committed(self, index: int) -> None:
        """Note that everything up to an index is committed, by an entry of this leader's term."""
        appended = self._appended
        while appended and appended[0][0] <= index:
            self._until_ns = appended.popleft()[1] + LEASE_NS

    def left_ns(self) -> int:
        """Return how long the lease still holds; not positive when it does not."""
        if self._clock_ns is None or not self.allowed or self._given_up:
            return 0
        return self._until_ns - self._clock_ns()

    def may_renew(self) -> bool:
        """Return whether one more entry would prolong the lease: it is not given up, and no such entry is under way."""
        return not self._appended and not self._given_up

    def give_up(self) -> bool:
        """Serve no more reads by leases in this term; return whether there are leases at all."""
        self._given_up = True
        return self._clock_ns is not None
