"""The errors of the Raft core, and what the caller may do about them.

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
    """The root of everything that the Raft core raises."""


class ProposalDropped(RaftError):
    """The refusal of a proposal, which was not appended. ``reason`` is one of the ``DROPPED_*`` constants."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"raft proposal dropped: {reason}")
        self.reason = reason


DROPPED_NO_LEADER = "no leader"
DROPPED_FORWARDING_DISABLED = "forwarding to the leader is disabled"
DROPPED_NOT_MEMBER = "the leader is no longer a member"
DROPPED_TRANSFER = "a leadership transfer is in progress"
DROPPED_UNCOMMITTED_LIMIT = "too many uncommitted bytes"


class StepLocalMessage(RaftError):
    """The refusal of a message of a local kind that was handed to ``step``."""


class StepPeerNotFound(RaftError):
    """The refusal of a response from an id that is in no configuration this member knows."""


class InvalidMessage(RaftError):
    """The refusal of a message whose own fields contradict each other."""


class ConfChangeError(RaftError):
    """The refusal of a membership change that must not be applied to the present configuration."""


class LogError(RaftError):
    """The root of what the log (or its reader) raises when it cannot answer."""


class CompactedError(LogError):
    """An index before the first entry that is kept."""


class UnavailableError(LogError):
    """An index beyond the last entry."""


class SnapshotOutOfDateError(LogError):
    """A snapshot that is not newer than the one in place."""


class SnapshotTemporarilyUnavailable(LogError):
    """No snapshot can be named now; the core asks again at a later message."""


class InvariantError(RaftError):
    """A broken rule that safety rests on. There is no recovery but to stop this member."""


class LogLostError(InvariantError):
    """An entry is committed that the log of this member had, by the leader's count, and no longer has.

    Arguments:
        index: index of the entry.
        last_index: index of the last entry of the log.
    """

    def __init__(self, index: int, last_index: int) -> None:
        super().__init__(
            f"the log ends at {last_index}, but entries up to {index} were committed with it: "
            "it was corrupted, truncated or lost, or is an older copy"
        )
