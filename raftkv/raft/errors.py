"""What calls of the Raft core raise, and what the caller may do about it.

::

    RaftError
     ├── ProposalDropped            the proposal was not taken: certainly not in this member's log; try again later
     ├── StepLocalMessage           a kind that only this member may produce came from outside: drop it
     ├── StepPeerNotFound           an answer from someone who is not a member: drop it
     ├── InvalidMessage             a message that contradicts itself: drop it, the sender is broken
     ├── ConfChangeError            a membership change that is not legal on the current configuration
     ├── LogError
     │    ├── CompactedError        the index lies before the first entry that is kept
     │    ├── UnavailableError      the index lies behind the last entry
     │    ├── SnapshotOutOfDateError     there already is a newer snapshot
     │    └── SnapshotTemporarilyUnavailable   ask again later, a snapshot is being made
     └── InvariantError             the state contradicts itself: stop this member, never go on

The package keeps its own tree because it may see nothing else of the project.
"""

from __future__ import annotations


class RaftError(Exception):
    """Root of everything that the Raft core raises."""


class ProposalDropped(RaftError):
    """The proposal was not appended. ``reason`` is a short text, one of the ``DROPPED_*`` constants."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"raft proposal dropped: {reason}")
        self.reason = reason


DROPPED_NO_LEADER = "no leader"
DROPPED_FORWARDING_DISABLED = "forwarding to the leader is disabled"
DROPPED_NOT_MEMBER = "the leader is no longer a member"
DROPPED_TRANSFER = "a leadership transfer is in progress"
DROPPED_UNCOMMITTED_LIMIT = "too many uncommitted bytes"


class StepLocalMessage(RaftError):
    """A message of a local kind was handed to ``step``."""


class StepPeerNotFound(RaftError):
    """A response came from an id that is in no configuration this member knows."""


class InvalidMessage(RaftError):
    """A message whose own fields contradict each other."""


class ConfChangeError(RaftError):
    """A membership change that must not be applied to the current configuration."""


class LogError(RaftError):
    """The log (or its reader) cannot answer."""


class CompactedError(LogError):
    """The index predates the first entry that is kept."""


class UnavailableError(LogError):
    """The index lies beyond the last entry."""


class SnapshotOutOfDateError(LogError):
    """A newer or equal snapshot is already in place."""


class SnapshotTemporarilyUnavailable(LogError):
    """No snapshot can be named now; the core asks again at a later message."""


class InvariantError(RaftError):
    """A rule that safety rests on is broken. There is no recovery but to stop this member."""
