"""A leader's knowledge of one follower, and the messages to it that are on their way.

A follower is in one of three states (etcd-io/raft ``design.md``)::

        new leader                 append acknowledged
      ────────────► PROBE ─────────────────────────────► REPLICATE
                    ▲  │ ▲     rejected, or unreachable      │
                    │  │ └───────────────────────────────────┤
      snapshot done │  │ the log no longer has what          │
        or failed   │  ▼ the follower needs                  │
                   SNAPSHOT ◄────────────────────────────────┘

- PROBE: at most one append per heartbeat interval, until it is known where the logs match.
- REPLICATE: append optimistically, advancing ``next`` as messages leave, as far as the window allows.
- SNAPSHOT: nothing is appended; a snapshot up to ``pending_snapshot`` is on its way.

Invariants: ``0 <= match < next``; in SNAPSHOT ``next > pending_snapshot``; indexes in the window ascend.
Sending itself is elsewhere (``replication.py``): this module only keeps the records.
"""

from __future__ import annotations

import enum
from collections import deque

from .errors import InvariantError


class ProgressState(enum.Enum):
    """The ways in which a leader treats a follower."""

    PROBE = "probe"
    REPLICATE = "replicate"
    SNAPSHOT = "snapshot"


PROBE = ProgressState.PROBE
REPLICATE = ProgressState.REPLICATE
SNAPSHOT = ProgressState.SNAPSHOT


class Inflights:
    """The window of append messages that were sent and not yet acknowledged.

    Limited by count and by bytes. The limit in bytes is soft: a message that starts below it may end above.
    """

    __slots__ = ("_window", "bytes", "max_bytes", "max_count")

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count = max_count
        # 0 is "no limit", as in RaftConfig.
        self.max_bytes = max_bytes
        self.bytes = 0
        self._window: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return len(self._window)

    def add(self, index: int, size_bytes: int) -> None:
        """Note that a message leaves. The window must not be full.

        Arguments:
            index: the last entry in it.
            size_bytes: payload of its entries.
        """
        if self.full():
            raise InvariantError("append sent into a full window")
        self._window.append((index, size_bytes))
        self.bytes += size_bytes

    def free_to(self, index: int) -> None:
        """Drop the messages that end at or before ``index``: they are acknowledged."""
        window = self._window
        while window and window[0][0] <= index:
            self.bytes -= window.popleft()[1]

    def full(self) -> bool:
        """Return whether no more may leave."""
        return len(self._window) >= self.max_count or (self.max_bytes != 0 and self.bytes >= self.max_bytes)

    def reset(self) -> None:
        """Drop all messages: they are taken for lost."""
        self._window.clear()
        self.bytes = 0

    def indexes(self) -> list[int]:
        """Return the last index of each message on its way, oldest first."""
        return [index for index, _ in self._window]


class Progress:
    """The leader's record of one member (itself included, whose ``match`` is what its own disk holds)."""

    __slots__ = (
        "inflights",
        "is_learner",
        "match",
        "next",
        "paused",
        "pending_snapshot",
        "recent_active",
        "sent_commit",
        "state",
    )

    def __init__(self, next: int, inflights: Inflights) -> None:
        # The follower's log is known to equal ours up to here.
        self.match = 0
        # First entry not yet sent. Everything between match and next is on its way.
        self.next = next
        # Highest commit index that is on its way; falls back when messages are taken for lost.
        self.sent_commit = 0
        self.state = PROBE
        # Index of the snapshot on its way, 0 for none.
        self.pending_snapshot = 0
        # Whether anything came from the member since the last quorum check. Always true for the leader.
        self.recent_active = False
        # No append leaves until a heartbeat response or an acknowledgement comes (probe sent, or window full).
        self.paused = False
        self.inflights = inflights
        # Kept equal to the configuration by ``Tracker.switch``.
        self.is_learner = False

    def reset(self, next: int, match: int) -> None:
        """Start anew for a new term.

        Arguments:
            next: index of the first entry to send.
            match: index up to which the logs are known to be equal.
        """
        self._enter(PROBE)
        self.match = match
        self.next = next
        self.sent_commit = 0
        self.recent_active = False

    def _enter(self, state: ProgressState) -> None:
        self.state = state
        self.paused = False
        self.pending_snapshot = 0
        self.inflights.reset()

    def become_probe(self) -> None:
        """Enter PROBE: find out where the logs match, behind ``match`` or behind a snapshot that was delivered."""
        matched = max(self.match, self.pending_snapshot)
        self._enter(PROBE)
        self.next = matched + 1
        self.sent_commit = min(self.sent_commit, matched)

    def become_replicate(self) -> None:
        """Enter REPLICATE: the logs are equal up to ``match``, so stream."""
        self._enter(REPLICATE)
        self.next = self.match + 1

    def become_snapshot(self, index: int) -> None:
        """Enter SNAPSHOT: a snapshot up to ``index`` leaves, and appends wait for it."""
        self._enter(SNAPSHOT)
        self.pending_snapshot = index
        self.next = index + 1
        self.sent_commit = index

    def sent_entries(self, count: int, size_bytes: int) -> None:
        """Note that an append leaves.

        Arguments:
            count: number of its entries.
            size_bytes: their payload in total.
        """
        if self.state is REPLICATE:
            if count > 0:
                self.next += count
                self.inflights.add(self.next - 1, size_bytes)
            # A message that fills the window, or goes although it is full, is the last one until an answer comes.
            self.paused = self.inflights.full()
        elif self.state is PROBE:
            # An empty probe does not pause, as in etcd: it only goes out in answer to a heartbeat response.
            if count > 0:
                self.paused = True
        else:
            raise InvariantError("append sent while a snapshot is pending")

    def can_bump_commit(self, committed: int) -> bool:
        """Return whether sending ``committed`` could raise the follower's commit index beyond what is on its way."""
        return committed > self.sent_commit and self.sent_commit < self.next - 1

    def maybe_update(self, index: int) -> bool:
        """Note that the follower acknowledged up to ``index``; return ``False`` when that was known."""
        if index <= self.match:
            return False
        self.match = index
        if self.next <= index:
            self.next = index + 1
        self.paused = False
        return True

    def maybe_decrement(self, rejected: int, match_hint: int) -> bool:
        """Note that the follower rejected an append.

        Arguments:
            rejected: index of the entry that the append followed.
            match_hint: index at which the logs may match at best.

        Returns:
            ``False`` when the rejection is stale (messages are reordered and duplicated) and nothing changed.
        """
        if self.state is REPLICATE:
            # Acknowledged since: the rejection was overtaken.
            if rejected <= self.match:
                return False
            self.next = self.match + 1
            self.sent_commit = min(self.sent_commit, self.next - 1)
            return True
        # Answers a probe from before the snapshot left.
        if self.state is SNAPSHOT:
            return False
        # Only one probe is on its way at a time; an answer to another one is stale.
        if self.next - 1 != rejected:
            return False
        self.next = max(min(rejected, match_hint + 1), self.match + 1)
        self.sent_commit = min(self.sent_commit, self.next - 1)
        self.paused = False
        return True

    def is_paused(self) -> bool:
        """Return whether no append may leave now."""
        return self.paused or self.state is SNAPSHOT
