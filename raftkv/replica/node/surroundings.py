"""What a node is given: its identity and timing, who sends for it, and the state that it applies to.

    NodeSettings    who it is, and how long things take
    Sender          messages to other members (``server.peer.transport``)
    Stages          hears how far requests have come (``server.tracing``), if tracing is on

What services see of a node, the other way round, is ``waits.AwaitableNode``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from raftkv.raft.types import Entry, Message
from raftkv.replica.node.reads import Reader

UNAPPLIED_MAX: Final = 5_000
"""Entries; etcd's number (maxGapBetweenApplyAndCommitIndex)."""

UNAPPLIED_MAX_BYTES: Final = 256 * 1024 * 1024
UNWRITTEN_MAX_BYTES: Final = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Identity, timing and limits of a node.

    Attributes:
        member_id: of this member.
        tick_s: length of a Raft tick (etcd: heartbeat-interval).
        election_s: election timeout.
        unapplied_max: entries that are committed for a tick and not applied, above which clients' writes are refused.
        unapplied_max_bytes: likewise of all that is committed; above it, no more is taken from the leader either.
        unwritten_max_bytes: keys and values that the database does not have yet, above which no entry is begun. One
            adds at most what its puts bring and keep (``apply.check.KEPT_VALUES_MAX``).
    """

    member_id: int
    tick_s: float
    election_s: float
    unapplied_max: int = UNAPPLIED_MAX
    unapplied_max_bytes: int = UNAPPLIED_MAX_BYTES
    unwritten_max_bytes: int = UNWRITTEN_MAX_BYTES

    @property
    def request_timeout_s(self) -> float:
        """Longest wait for an answer: as in etcd 5 s and two elections, which outlasts the loss of a leader."""
        return 5.0 + 2.0 * self.election_s


class Sender(Protocol):
    """Where messages to other members go."""

    def send(self, messages: Iterable[Message]) -> None:
        """Send, or drop: Raft repairs any loss."""

    def backlog_bytes(self, peer_id: int) -> int | None:
        """Return the messages that are not sent to a peer yet; None while it is away."""

    def connected_since(self, peer_id: int) -> float | None:
        """Loop time since when a peer is connected."""


class Stages(Protocol):
    """Hears how far requests have come. It changes nothing, and must not raise."""

    def submitted(self, request_id: int) -> None:
        """A proposal is in the queue, in the name of the call whose handler runs."""

    def proposed(self, datas: Iterable[bytes], passed_on: bool) -> None:
        """The core took these, perhaps for the leader on another member."""

    def appended(self, entries: Sequence[Entry]) -> None:
        """These are in the log in memory, on their way to the disk."""

    def durable(self, index: int) -> None:
        """Everything up to an entry is in this member's log for good."""

    def committed(self, index: int) -> None:
        """Everything up to an entry is committed."""

    def applied(self, index: int) -> None:
        """Everything up to an entry is in the state; callers are answered next."""

    def reading(self, reader: Reader) -> Reader:
        """A reader waits for a recent state; return the waiter in its place."""

    def asking(self, ask: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return what begins read rounds in place of ``ask``."""
