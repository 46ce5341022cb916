"""The errors of the Raft core, and what the caller may do about them.

::

    RaftError
     ├── ProposalDropped            the proposal was refused: it is not in this member's log; try again later
     ├── StepLocalMessage           a message kind that only this member may produce came from outside: drop it
     ├── StepPeerNotFound           a response from a non-member: drop it
     ├── InvalidMessage             a message that contradicts itself: drop it, the sender is faulty
     ├── ConfChangeError            a membership change that is not legal in the current configuration
     ├── LogError
     │    ├── CompactedError        the index is before the first kept entry
     │    ├── UnavailableError      the index is after the last entry
     │    ├── SnapshotOutOfDateError     there already is a newer snapshot
     │    └── SnapshotTemporarilyUnavailable   a snapshot is being made; try again later
     └── InvariantError             the state contradicts itself: stop this member

The package has its own tree because it must not import the rest of the project.
"""

from __future__ import annotations


class RaftError(Exception):
    """The base of all errors that the Raft core raises."""


class ProposalDropped(RaftError):
    """The refusal of a proposal; it was not appended. ``reason`` is one of the ``DROPPED_*`` constants."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"raft proposal dropped: {reason}")
        self.reason = reason


DROPPED_NO_LEADER = "no leader"
DROPPED_FORWARDING_DISABLED = "forwarding to the leader is disabled"
DROPPED_NOT_MEMBER = "the leader is no longer a member"
DROPPED_TRANSFER = "a leadership transfer is in progress"
DROPPED_UNCOMMITTED_LIMIT = "too many uncommitted bytes"


class StepLocalMessage(RaftError):
    """The refusal of a message of a local kind passed to ``step``."""


class StepPeerNotFound(RaftError):
    """The refusal of a response from an id that is in no known configuration."""


class InvalidMessage(RaftError):
    """The refusal of a message whose fields contradict each other."""


class ConfChangeError(RaftError):
    """The refusal of a membership change that is illegal in the current configuration."""


class LogError(RaftError):
    """The base of the errors of the log (or its reader)."""


class CompactedError(LogError):
    """The error for an index before the first kept entry."""


class UnavailableError(LogError):
    """The error for an index beyond the last entry."""


class SnapshotOutOfDateError(LogError):
    """The error for a snapshot that is not newer than the current one."""


class SnapshotTemporarilyUnavailable(LogError):
    """The error while no snapshot is available; the core tries again at a later message."""


class InvariantError(RaftError):
    """A broken safety invariant. The member must stop."""


class LogLostError(InvariantError):
    """An entry is committed that the log of this member had, by the leader's count, and no longer has."""


class ForkError(InvariantError):
    """The leader has another entry where one was committed here: a quorum lost what it had acknowledged."""
