"""The settings of one Raft member: sizes in bytes, times in ticks.

What a tick lasts is the caller's choice (etcd: 100 ms). Nothing here can be changed while the member runs.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
NO_LIMIT = (1 << 63) - 1
"""Stands for "no limit" wherever a limit of 0 was configured."""


@dataclass(frozen=True, slots=True)
class RaftConfig:
    """The settings of one member; each field says its unit and its danger.

    Raises:
        ValueError: fields contradict each other.
    """

    id: int
    """Id of this member: unsigned 64-bit, never 0, never reused by another member."""
    election_ticks: int = 10
    """A follower that hears nothing from a leader for this many ticks (and up to twice as many, at random)
    campaigns. Also the period of the quorum check and the limit of a leadership transfer."""
    heartbeat_ticks: int = 1
    """A leader sends heartbeats every so many ticks. Must be smaller than ``election_ticks``; a tenth is usual."""
    max_size_per_message_bytes: int = MIB
    """Largest sum of entry sizes in one append message. At least one entry always goes; 0 means exactly one."""
    max_inflight_messages: int = 512
    """Append messages to one follower that may be unacknowledged before the leader pauses."""
    max_inflight_bytes: int = 256 * MIB
    """Payload bytes to one follower that may be unacknowledged; 0 is no limit. At least one message's size."""
    max_uncommitted_bytes: int = 256 * MIB
    """Payload bytes appended by this leader and not yet applied; more is refused with ``ProposalDropped``. 0 is no
    limit. One proposal of any size is taken when nothing is outstanding."""
    max_committed_size_per_ready_bytes: int = 16 * MIB
    """Size of the committed entries that may be handed out and not yet reported by ``on_applied``, over all Readys
    in flight. 0 takes ``max_size_per_message_bytes``."""
    check_quorum: bool = True
    """A leader that has not heard from a quorum for ``election_ticks`` steps down, and a member that heard from a
    leader within that time ignores campaigns (thesis sections 6.2 and 4.2.3)."""
    pre_vote: bool = True
    """Ask before raising the term, so that a member coming back from a partition disturbs nobody (thesis 9.6)."""
    disable_proposal_forwarding: bool = False
    """Followers drop proposals instead of sending them to the leader."""
    disable_conf_change_validation: bool = False
    """Skip the check of a membership change when it is proposed. Dangerous: only for a caller with its own check."""
    step_down_on_removal: bool = True
    """A leader that applies its own removal or demotion becomes a follower at once."""
    quiet_commits: bool = False
    """Followers do not answer what only tells them the commit index (an append without entries) if their log matches:
    the answer says nothing new, and costs a leader with few proposals a wake-up from each follower. What was lost
    meanwhile shows at the next heartbeat. etcd-io/raft answers each, and so do members of earlier versions."""
    applied: int = 0
    """Index up to which the caller's state machine already holds everything; set at restart, 0 for a fresh start."""

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
