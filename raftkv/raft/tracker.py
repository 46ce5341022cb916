"""The members as a leader sees them: the configuration, the progress of each member, the votes of an election, and
the reads that wait for confirmation; with the arithmetic of quorums.

Invariant: exactly the members of the configuration have a ``Progress``, and its ``is_learner`` agrees with the
configuration. ``switch`` maintains this; nothing else changes either.

The lists ``peers``, ``incoming`` and ``outgoing`` exist because the hot path iterates over them for every message; they
are rebuilt only when the configuration changes, in order of id, so that equal inputs give equal outputs.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Mapping

from .confchange import Configuration
from .errors import InvariantError

# -- progress -------------------------------------------------------------------------------------------------------
#
# A leader's knowledge of one follower, and the messages in flight to it.
#
# A follower is in one of three states (etcd-io/raft ``design.md``):
#
#         new leader                 append acknowledged
#       ────────────► PROBE ─────────────────────────────► REPLICATE
#                     ▲  │ ▲     rejected, or unreachable      │
#                     │  │ └───────────────────────────────────┤
#       snapshot done │  │ the log no longer has what          │
#         or failed   │  ▼ the follower needs                  │
#                    SNAPSHOT ◄────────────────────────────────┘
#
# - PROBE: at most one append per heartbeat interval, until it is known where the logs match.
# - REPLICATE: append optimistically, advancing ``next`` as messages leave, as far as the window allows.
# - SNAPSHOT: nothing is appended; a snapshot up to ``pending_snapshot`` is in flight.
#
# Invariants: ``0 <= match < next``; in SNAPSHOT ``next > pending_snapshot``; indexes in the window ascend.


class ProgressState(enum.Enum):
    """The ways in which a leader sends to a follower."""

    PROBE = "probe"
    REPLICATE = "replicate"
    SNAPSHOT = "snapshot"


PROBE = ProgressState.PROBE
REPLICATE = ProgressState.REPLICATE
SNAPSHOT = ProgressState.SNAPSHOT


class Inflights:
    """The window of append messages that are sent and not yet acknowledged.

    Limited by count and by bytes. The limit in bytes is soft: a message that starts below it may end above.
    """

    __slots__ = ("_window", "bytes", "max_bytes", "max_count")

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count = max_count
        # 0 means "no limit", as in RaftConfig.
        self.max_bytes = max_bytes
        self.bytes = 0
        self._window: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return len(self._window)

    def add(self, index: int, size_bytes: int) -> None:
        """Record that a message is sent. The window must not be full.

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
        """Return whether no more messages may be sent."""
        return len(self._window) >= self.max_count or (self.max_bytes != 0 and self.bytes >= self.max_bytes)

    def reset(self) -> None:
        """Drop all messages: they are considered lost."""
        self._window.clear()
        self.bytes = 0

    def indexes(self) -> list[int]:
        """Return the last index of each message in flight, oldest first."""
        return [index for index, _ in self._window]


class Progress:
    """The leader's record of one member (including itself, where ``match`` is the state of its own disk)."""

    __slots__ = (
        "acknowledged",
        "inflights",
        "is_learner",
        "match",
        "next",
        "paused",
        "pending_snapshot",
        "recent_active",
        "sent_commit",
        "state",
        "voted_term",
    )

    def __init__(self, next: int, inflights: Inflights) -> None:
        # What the member had made durable, in all terms of this process: a committed entry, and a vote.
        self.acknowledged = 0
        self.voted_term = 0
        # The follower's log is known to equal ours up to this index.
        self.match = 0
        # First entry not yet sent. Everything between match and next is in flight.
        self.next = next
        # Highest commit index in flight; falls back when messages are considered lost.
        self.sent_commit = 0
        self.state = PROBE
        # Index of the snapshot in flight, 0 for none.
        self.pending_snapshot = 0
        # Whether any message came from the member since the last quorum check. Always true for the leader.
        self.recent_active = False
        # No append is sent until a heartbeat response or an acknowledgement arrives (probe sent, or window full).
        self.paused = False
        self.inflights = inflights
        # Kept equal to the configuration by ``Tracker.switch``.
        self.is_learner = False

    def reset(self, next: int, match: int) -> None:
        """Start again for a new term.

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
        """Enter PROBE: find out where the logs match, after ``match`` or after a delivered snapshot."""
        matched = max(self.match, self.pending_snapshot)
        self._enter(PROBE)
        self.next = matched + 1
        self.sent_commit = min(self.sent_commit, matched)

    def become_replicate(self) -> None:
        """Enter REPLICATE: the logs are equal up to ``match``, so stream entries."""
        self._enter(REPLICATE)
        self.next = self.match + 1

    def become_snapshot(self, index: int) -> None:
        """Enter SNAPSHOT: a snapshot up to ``index`` is sent, and appends wait for it."""
        self._enter(SNAPSHOT)
        self.pending_snapshot = index
        self.next = index + 1
        self.sent_commit = index

    def sent_entries(self, count: int, size_bytes: int) -> None:
        """Record that an append is sent.

        Arguments:
            count: number of its entries.
            size_bytes: their payload in total.
        """
        if self.state is REPLICATE:
            if count > 0:
                self.next += count
                self.inflights.add(self.next - 1, size_bytes)
            # A message that fills the window, or is sent although it is full, is the last one until a response arrives.
            self.paused = self.inflights.full()
        elif self.state is PROBE:
            # An empty probe does not pause, as in etcd: it is sent only after a heartbeat response.
            if count > 0:
                self.paused = True
        else:
            raise InvariantError("append sent while a snapshot is pending")

    def can_bump_commit(self, committed: int) -> bool:
        """Return whether sending ``committed`` could raise the follower's commit index beyond the one in flight."""
        return committed > self.sent_commit and self.sent_commit < self.next - 1

    def maybe_update(self, index: int) -> bool:
        """Record that the follower acknowledged up to ``index``; return ``False`` when that was known."""
        if index <= self.match:
            return False
        self.match = index
        if self.next <= index:
            self.next = index + 1
        self.paused = False
        return True

    def maybe_decrement(self, rejected: int, match_hint: int) -> bool:
        """Record that the follower rejected an append.

        Arguments:
            rejected: index of the entry that the append followed.
            match_hint: latest index at which the logs may match.

        Returns:
            ``False`` when the rejection is stale (messages are reordered and duplicated) and nothing changed.
        """
        if self.state is REPLICATE:
            # A later acknowledgement has overtaken the rejection.
            if rejected <= self.match:
                return False
            self.next = self.match + 1
            self.sent_commit = min(self.sent_commit, self.next - 1)
            return True
        # A response to a probe from before the snapshot was sent.
        if self.state is SNAPSHOT:
            return False
        # Only one probe is in flight at a time; a response to another one is stale.
        if self.next - 1 != rejected:
            return False
        self.next = max(min(rejected, match_hint + 1), self.match + 1)
        self.sent_commit = min(self.sent_commit, self.next - 1)
        self.paused = False
        return True

    def is_paused(self) -> bool:
        """Return whether no append may be sent now."""
        return self.paused or self.state is SNAPSHOT


# -- quorum ---------------------------------------------------------------------------------------------------------
#
# Arithmetic on sets of voters: the index that a majority has acknowledged, and the state of an election.
#
# A configuration is one set of voters or, during joint consensus, two (``incoming`` and ``outgoing``); then every
# decision needs a majority of *each* (thesis section 4.3). An empty set never blocks a decision: its committed index is
# infinite and its elections are won, so a joint decision with one empty half is that of the other half.
#
# Example: voters {1, 2, 3} that acknowledged 9, 7 and 4 have committed 7, because two of three hold it.

INDEX_INFINITE = (1 << 64) - 1
"""Committed index of the empty set of voters."""


class VoteResult(enum.Enum):
    """The state of an election."""

    PENDING = "pending"
    LOST = "lost"
    WON = "won"


def committed_of(acked: list[int]) -> int:
    """Return the largest index that a majority has reached, given one index per voter. Sorts ``acked`` in place.

    This is the hot form: the leader calls it for each acknowledgement with the match indexes of the voters.
    """
    if not acked:
        return INDEX_INFINITE
    acked.sort()
    # The median from below: of 3 the 2nd, of 4 the 2nd, of 5 the 3rd. A majority is at or above it.
    return acked[(len(acked) - 1) // 2]


def committed_index(voters: Collection[int], acked: Mapping[int, int]) -> int:
    """Return the largest index that a majority acknowledged.

    Arguments:
        voters: their ids; without voters every index is committed.
        acked: index of each voter; a missing voter counts as 0.
    """
    return committed_of([acked.get(voter, 0) for voter in voters])


def joint_committed_index(incoming: Collection[int], outgoing: Collection[int], acked: Mapping[int, int]) -> int:
    """Return the largest index that both halves of a joint configuration have committed.

    Arguments:
        incoming, outgoing: ids of the voters of each half; the outgoing one is empty unless the configuration is joint.
        acked: index of each voter.
    """
    return min(committed_index(incoming, acked), committed_index(outgoing, acked))


def vote_result(voters: Collection[int], votes: Mapping[int, bool]) -> VoteResult:
    """Return the state of an election.

    Arguments:
        voters: their ids; an election without voters is won.
        votes: True for yes, False for no; a missing voter has not answered.
    """
    if not voters:
        return VoteResult.WON
    needed = len(voters) // 2 + 1
    granted = sum(1 for voter in voters if votes.get(voter) is True)
    silent = sum(1 for voter in voters if voter not in votes)
    if granted >= needed:
        return VoteResult.WON
    return VoteResult.PENDING if granted + silent >= needed else VoteResult.LOST


def joint_vote_result(incoming: Collection[int], outgoing: Collection[int], votes: Mapping[int, bool]) -> VoteResult:
    """Return the state of an election in a joint configuration: both halves must be won, one lost half loses it.

    Arguments:
        incoming, outgoing: ids of the voters of each half; the outgoing one is empty unless the configuration is joint.
        votes: as in ``vote_result``.
    """
    results = (vote_result(incoming, votes), vote_result(outgoing, votes))
    if VoteResult.LOST in results:
        return VoteResult.LOST
    return VoteResult.PENDING if VoteResult.PENDING in results else VoteResult.WON


def describe(voters: Collection[int], acked: Mapping[int, int]) -> str:
    """Return a small bar chart of the acknowledged indexes, one voter a line, in order of id.

    The bar of a voter is as long as the number of voters strictly behind it; ``?`` marks a voter without an index::

        1: xx>  9
        2: x>   7
        3: >    4

    Arguments:
        voters: their ids.
        acked: index of each voter.
    """
    if not voters:
        return "<empty majority quorum>\n"
    lines = []
    for voter in sorted(voters):
        index = acked.get(voter)
        if index is None:
            lines.append(f"{voter}: ?{' ' * len(voters)} 0")
            continue
        behind = sum(1 for other in voters if acked.get(other, 0) < index)
        lines.append(f"{voter}: {'x' * behind}>{' ' * (len(voters) - behind)} {index}")
    return "\n".join(lines) + "\n"


class Tracker:
    """The configuration of one Raft group at one member, with the progress and the votes of its members."""

    def __init__(self, id: int, max_inflight_messages: int, max_inflight_bytes: int) -> None:
        self.id = id
        self.max_inflight_messages = max_inflight_messages
        self.max_inflight_bytes = max_inflight_bytes
        self.config = Configuration()
        self.progress: dict[int, Progress] = {}
        # All members except this one, to which appends and heartbeats are sent.
        self.peers: list[tuple[int, Progress]] = []
        self.incoming: list[Progress] = []
        self.outgoing: list[Progress] = []
        self.votes: dict[int, bool] = {}

    def switch(self, config: Configuration, last_index: int) -> None:
        """Take over a configuration: forget members that left, create records for new ones, keep the others.

        Arguments:
            config: the configuration.
            last_index: the end of this member's log, where the first probe of a new member begins.
        """
        progress = {}
        for member in sorted(config.members()):
            known = self.progress.get(member)
            if known is None:
                known = self._new_progress(last_index)
            known.is_learner = member in config.learners
            progress[member] = known
        self.config = config
        self.progress = progress
        self.peers = [(member, each) for member, each in progress.items() if member != self.id]
        self.incoming = [progress[voter] for voter in config.voters]
        self.outgoing = [progress[voter] for voter in config.outgoing]

    def _new_progress(self, last_index: int) -> Progress:
        # First probe at the end of our log: a member that starts empty responds with a hint or needs a snapshot.
        inflights = Inflights(self.max_inflight_messages, self.max_inflight_bytes)
        progress = Progress(max(last_index, 1), inflights)
        # Counts as heard from; otherwise the quorum check could depose us before it had a chance to respond.
        progress.recent_active = True
        return progress

    def reset(self, last_index: int, committed: int) -> None:
        """Forget the known state of the members' logs and votes, for a new term.

        Arguments:
            last_index, committed: of this member's log.
        """
        self.votes = {}
        for member, progress in self.progress.items():
            progress.acknowledged = max(progress.acknowledged, min(progress.match, committed))
            progress.reset(last_index + 1, last_index if member == self.id else 0)

    def committed(self) -> int:
        """Return the largest index that a quorum has acknowledged."""
        index = committed_of([progress.match for progress in self.incoming])
        if self.outgoing:
            return min(index, committed_of([progress.match for progress in self.outgoing]))
        return index

    def quorum_active(self) -> bool:
        """Return whether a quorum was heard from since the last check."""
        config = self.config
        active = {member: progress.recent_active for member, progress in self.progress.items()}
        result = joint_vote_result(config.voters, config.outgoing, active)
        return result is VoteResult.WON

    def record_vote(self, id: int, granted: bool) -> None:
        """Count a vote; only the first one of each voter counts.

        Arguments:
            id: id of the voter.
            granted: whether the voter said yes.
        """
        self.votes.setdefault(id, granted)

    def vote_result(self) -> VoteResult:
        """Return the state of the current election."""
        return joint_vote_result(self.config.voters, self.config.outgoing, self.votes)

    def is_sole_voter(self) -> bool:
        """Return whether this member is the only voter."""
        return len(self.config.voters) == 1 and not self.config.outgoing and self.id in self.config.voters


# -- read_index -----------------------------------------------------------------------------------------------------
#
# Linearizable reads without writing to the log (thesis section 6.4, etcd's ReadOnlySafe).
#
# A read stores the commit index at its arrival and is answered once a quorum has confirmed, *after* that arrival, that
# this member still leads. Heartbeats carry the confirmations: reads get positions 1, 2, 3, ... in order of arrival, a
# heartbeat carries the last assigned position, and a member that responds to it confirms every read up to there. So one
# round serves any number of reads, and equal contexts of two requests can never be confused::
#
#     read a (1)   read b (2)   heartbeat ctx=2   answer ctx=2 from a quorum  ->  a and b are confirmed
#
# Reads that reach a leader before it has committed an entry of its own term wait separately (``deferred``): until then
# it cannot know what earlier leaders committed.
#
# Invariant: ``confirmed + len(queue)`` is the last assigned position. A queue lasts as long as one leadership, so
# responses of another term (which the term rule drops) never reach it.

_POSITION_BYTES = 8


class ReadRequest:
    """One read: the requesting member, its context, and the commit index when the read arrived."""

    __slots__ = ("context", "from_", "index")

    def __init__(self, from_: int, context: bytes, index: int = 0) -> None:
        self.from_ = from_
        self.context = context
        self.index = index


class ReadIndexQueue:
    """The reads that wait for confirmation during one leadership."""

    def __init__(self) -> None:
        self._acked: dict[int, int] = {}
        self._queue: deque[ReadRequest] = deque()
        # Reads that were confirmed and have left the queue.
        self.confirmed = 0
        # Reads that arrived before the first commit of the term.
        self.deferred: list[ReadRequest] = []

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, leader: int, request: ReadRequest, committed: int) -> None:
        """Queue a read at the current commit index. The leader confirms itself.

        Arguments:
            leader: id of this member.
            request: the read; its index is set here.
            committed: the commit index.
        """
        request.index = committed
        self._queue.append(request)
        self._acked[leader] = self.confirmed + len(self._queue)

    def context(self) -> bytes:
        """Return the heartbeat context that confirms every read in the queue; empty when there is none."""
        if not self._queue:
            return b""
        return (self.confirmed + len(self._queue)).to_bytes(_POSITION_BYTES, "big")

    def acknowledge(self, id: int, context: bytes) -> None:
        """Record that a member responded to a heartbeat.

        Arguments:
            id: id of the member.
            context: context of the response; anything but a position is ignored.
        """
        if len(context) == _POSITION_BYTES:
            position = int.from_bytes(context, "big")
            if self._acked.get(id, 0) < position <= self.confirmed + len(self._queue):
                self._acked[id] = position

    def take_confirmed(self, config: Configuration) -> list[ReadRequest]:
        """Remove and return the reads that a quorum of ``config`` has confirmed, oldest first."""
        if not self._queue:
            return []
        position = joint_committed_index(config.voters, config.outgoing, self._acked)
        count = min(position - self.confirmed, len(self._queue))
        if count <= 0:
            return []
        self.confirmed += count
        return [self._queue.popleft() for _ in range(count)]

    def take_deferred(self) -> list[ReadRequest]:
        """Remove and return the reads that waited for the first commit of the term."""
        deferred, self.deferred = self.deferred, []
        return deferred
