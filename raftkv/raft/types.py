"""The inputs and outputs of the Raft core: entries, messages, states, settings, and ``Ready``.

These types are shared by the core, the WAL, the transport and the simulator. All of them are plain data: ``Entry`` and
``Message`` are classes with slots because thousands are created per second; the rest are frozen dataclasses. They do
not use protobuf: the transport translates (``raftkv/replica/codec.py``).

Terms and indexes are non-negative; 0 means "none". Member ids are unsigned 64-bit and never 0.
Names follow the Raft paper (Ongaro & Ousterhout 2014) and thesis (Ongaro 2014); message kinds follow etcd-io/raft.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

NONE = 0
"""The id of no member: no leader, no vote."""

INDEX_MAX = (1 << 63) - 1
"""No log is this long: a message with an index beyond it is damaged or forged."""


class EntryType(enum.IntEnum):
    """The types of an entry's data."""

    NORMAL = 0
    CONF_CHANGE = 1
    CONF_CHANGE_V2 = 2


class Entry:
    """One slot of the replicated log."""

    __slots__ = ("data", "index", "term", "type")

    def __init__(self, term: int, index: int, data: bytes = b"", type: EntryType = EntryType.NORMAL) -> None:
        self.term = term
        self.index = index
        self.data = data
        self.type = type

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Entry)
            and self.term == other.term
            and self.index == other.index
            and self.type == other.type
            and self.data == other.data
        )

    def __hash__(self) -> int:
        return hash((self.term, self.index, self.data))

    def __repr__(self) -> str:
        return f"Entry({self.term}/{self.index} {self.type.name} {self.data!r})"


class MessageType(enum.IntEnum):
    """Kinds of messages; the comment is etcd-io/raft's name."""

    HUP = 0  # MsgHup: local, start an election
    BEAT = 1  # MsgBeat: local, leader sends heartbeats
    PROPOSE = 2  # MsgProp: forwarded to the leader
    APPEND = 3  # MsgApp
    APPEND_RESPONSE = 4  # MsgAppResp
    VOTE = 5  # MsgVote
    VOTE_RESPONSE = 6  # MsgVoteResp
    SNAPSHOT = 7  # MsgSnap
    HEARTBEAT = 8  # MsgHeartbeat
    HEARTBEAT_RESPONSE = 9  # MsgHeartbeatResp
    UNREACHABLE = 10  # MsgUnreachable: local
    SNAPSHOT_STATUS = 11  # MsgSnapStatus: local
    CHECK_QUORUM = 12  # MsgCheckQuorum: local
    TRANSFER_LEADER = 13  # MsgTransferLeader
    TIMEOUT_NOW = 14  # MsgTimeoutNow
    READ_INDEX = 15  # MsgReadIndex: forwarded to the leader
    READ_INDEX_RESPONSE = 16  # MsgReadIndexResp
    PRE_VOTE = 17  # MsgPreVote
    PRE_VOTE_RESPONSE = 18  # MsgPreVoteResp
    FORGET_LEADER = 19  # MsgForgetLeader: local


@dataclass(frozen=True, slots=True)
class HardState:
    """The state that a member must not lose: persisted before any message that depends on it is sent."""

    term: int = 0
    vote: int = NONE
    commit: int = 0


@dataclass(frozen=True, slots=True)
class ConfState:
    """The voters and learners of a group. ``voters_outgoing`` is non-empty only during joint consensus."""

    voters: tuple[int, ...] = ()
    learners: tuple[int, ...] = ()
    voters_outgoing: tuple[int, ...] = ()
    learners_next: tuple[int, ...] = ()
    auto_leave: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotMeta:
    """The log position of a snapshot. The bytes of the snapshot are transferred outside of Raft."""

    index: int = 0
    term: int = 0
    conf_state: ConfState = field(default_factory=ConfState)


class ConfChangeType(enum.IntEnum):
    """The kinds of step of a membership change."""

    ADD_NODE = 0
    REMOVE_NODE = 1
    UPDATE_NODE = 2
    ADD_LEARNER_NODE = 3


class ConfChangeTransition(enum.IntEnum):
    """The ways to make a multi-step change through joint consensus (thesis section 4.3, etcd-io/raft ConfChangeV2)."""

    AUTO = 0
    JOINT_IMPLICIT = 1
    JOINT_EXPLICIT = 2


@dataclass(frozen=True, slots=True)
class ConfChangeSingle:
    """One step of a membership change: add, remove or demote one member."""

    type: ConfChangeType
    node_id: int


@dataclass(frozen=True, slots=True)
class ConfChange:
    """A membership change. One step and ``AUTO`` is etcd's V1; an empty ``changes`` leaves a joint configuration."""

    changes: tuple[ConfChangeSingle, ...] = ()
    transition: ConfChangeTransition = ConfChangeTransition.AUTO
    context: bytes = b""


class Message:
    """One message between members (or, for the local kinds, from a member to itself).

    Fields that a kind does not use stay zero. ``entries`` is never changed after the message is created. A ``quiet``
    append has no entries, and gets a response only if it is rejected.
    """

    __slots__ = (
        "commit",
        "context",
        "entries",
        "from_",
        "index",
        "log_term",
        "quiet",
        "reject",
        "reject_hint",
        "snapshot",
        "term",
        "to",
        "type",
    )

    def __init__(
        self,
        type: MessageType,
        to: int = NONE,
        from_: int = NONE,
        term: int = 0,
        log_term: int = 0,
        index: int = 0,
        entries: list[Entry] | None = None,
        commit: int = 0,
        reject: bool = False,
        reject_hint: int = 0,
        snapshot: SnapshotMeta | None = None,
        context: bytes = b"",
        quiet: bool = False,
    ) -> None:
        self.type = type
        self.to = to
        self.from_ = from_
        self.term = term
        self.log_term = log_term
        self.index = index
        self.entries = [] if entries is None else entries
        self.commit = commit
        self.reject = reject
        self.reject_hint = reject_hint
        self.snapshot = snapshot
        self.context = context
        self.quiet = quiet


class StateRole(enum.IntEnum):
    """The role of a member."""

    FOLLOWER = 0
    CANDIDATE = 1
    LEADER = 2
    PRE_CANDIDATE = 3


@dataclass(frozen=True, slots=True)
class SoftState:
    """The state that need not be persisted: the leader, and this member's role."""

    leader: int
    role: StateRole


@dataclass(frozen=True, slots=True)
class ReadState:
    """The result of ``read_index(context)``: a read is linearizable once ``applied >= index``."""

    index: int
    context: bytes


@dataclass(slots=True)
class Ready:
    """The work that the caller must carry out, in this order (``raftkv/raft/__init__.py`` lists the caller's duties).

    ``messages`` may be sent at once, in parallel with the disk. ``messages_after_append`` (votes, append
    acknowledgements) may be sent only when ``hard_state``, ``entries`` and ``snapshot`` are durable.
    ``committed_entries`` are already durable on this member.
    """

    soft_state: SoftState | None = None
    hard_state: HardState | None = None
    entries: list[Entry] = field(default_factory=list)
    snapshot: SnapshotMeta | None = None
    messages: list[Message] = field(default_factory=list)
    messages_after_append: list[Message] = field(default_factory=list)
    committed_entries: list[Entry] = field(default_factory=list)
    read_states: list[ReadState] = field(default_factory=list)
    must_sync: bool = False
    """Whether ``messages_after_append`` need an fsync: not if only the commit index advanced."""
    append_number: int = 0
    """Position among the Readys that have something for the disk or wait for it; 0 for all others."""
    attested: tuple[int, int, int] = (0, 0, 0)
    """For the core: the term of the member, index and term of the last entry, when the Ready was taken."""
    to_self: list[Message] = field(default_factory=list)
    """For the core: messages to itself that the confirmation of the write delivers."""


# -- config ---------------------------------------------------------------------------------------------------------
#
# The settings of one Raft member: sizes in bytes, times in ticks. The caller chooses the length of a tick (etcd: 100
# ms). No setting can be changed while the member runs.

MIB = 1 << 20
NO_LIMIT = (1 << 63) - 1
"""Means "no limit" where a limit of 0 was configured."""


@dataclass(frozen=True, slots=True)
class RaftConfig:
    """The settings of one member; each field documents its unit and its danger.

    Raises:
        ValueError: fields contradict each other.
    """

    id: int
    """Id of this member: unsigned 64-bit, never 0, never reused by another member."""
    election_ticks: int = 10
    """A follower that hears nothing from a leader for this many ticks (and up to twice as many, at random)
    campaigns. Also the period of the quorum check and the time limit of a leadership transfer."""
    heartbeat_ticks: int = 1
    """Ticks between heartbeats of a leader. Must be smaller than ``election_ticks``; a tenth is usual."""
    max_size_per_message_bytes: int = MIB
    """Maximum total size of the entries in one append message. At least one entry is always sent; 0 means exactly one.
    """
    max_inflight_messages: int = 512
    """Unacknowledged append messages to one follower at which the leader pauses."""
    max_inflight_bytes: int = 256 * MIB
    """Unacknowledged payload bytes to one follower; 0 is no limit. At least the size of one message."""
    max_uncommitted_bytes: int = 256 * MIB
    """Payload bytes appended by this leader and not yet applied; further proposals are refused with
    ``ProposalDropped``. 0 is no limit. One proposal of any size is accepted when nothing is outstanding."""
    max_committed_size_per_ready_bytes: int = 16 * MIB
    """Size of the committed entries that may be returned and not yet reported by ``on_applied``, over all Readys
    in flight. 0 means ``max_size_per_message_bytes``."""
    check_quorum: bool = True
    """A leader that has not heard from a quorum for ``election_ticks`` steps down, and a member that heard from a
    leader within that time ignores campaigns (thesis sections 6.2 and 4.2.3)."""
    pre_vote: bool = True
    """Ask before raising the term, so that a member coming back from a partition does not depose the leader (thesis
    9.6).
    """
    disable_proposal_forwarding: bool = False
    """Followers drop proposals instead of sending them to the leader."""
    disable_conf_change_validation: bool = False
    """Skip the check of a membership change when it is proposed. Dangerous: only for a caller with its own check."""
    step_down_on_removal: bool = True
    """A leader that applies its own removal or demotion becomes a follower at once."""
    quiet_commits: bool = False
    """Followers do not respond to a message that only reports the commit index (an append without entries) if their
    log matches: the response has no news, and wakes up a leader with few proposals once per follower. Losses show at
    the next heartbeat. etcd-io/raft responds to each, and so do members of earlier versions."""
    starts_within_lease: bool = True
    """When this member starts, a leader may hold a read lease that depends on entries in its log. False only for a log
    that no elected leader has written to, or whose member is the only voter of a cluster without read leases."""
    applied: int = 0
    """Index up to which the caller's state machine has applied everything at start; 0 for a fresh start."""

    def __post_init__(self) -> None:
        if self.id <= 0 or self.id >= 1 << 64:
            raise ValueError(f"member id must be in 1..2**64-1, got {self.id}")
        if self.heartbeat_ticks <= 0:
            raise ValueError("heartbeat_ticks must be greater than 0")
        if self.election_ticks <= self.heartbeat_ticks:
            raise ValueError("election_ticks must be greater than heartbeat_ticks")
        if self.max_inflight_messages <= 0:
            raise ValueError("max_inflight_messages must be greater than 0")
        if min(self._sizes()) < 0 or self.applied < 0:
            raise ValueError("sizes and applied must not be negative")
        if 0 < self.max_inflight_bytes < self.max_size_per_message_bytes:
            raise ValueError("max_inflight_bytes must be at least max_size_per_message_bytes")

    def _sizes(self) -> tuple[int, ...]:
        return (
            self.max_size_per_message_bytes,
            self.max_inflight_bytes,
            self.max_uncommitted_bytes,
            self.max_committed_size_per_ready_bytes,
        )
