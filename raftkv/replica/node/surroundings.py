"""What a node is given: its identity and timing, who sends for it, and the state that it applies to.

    NodeSettings    who it is, and how long things take
    Sender          messages to other members (``server.peer.transport``)
    Stages          hears how far requests have come (``server.tracing``), if tracing is on

And, the other way round, what services see of a node: ``MemberLoop``.

Owns also which of etcd's errors a proposal gets that was not answered in time: that depends on nothing but these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.request import Caller
from raftkv.loop.fair import Identity
from raftkv.raft.types import NONE, ConfState, Entry, Message
from raftkv.replica.node.proposals import Waiter
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


class MemberLoop(Protocol):
    """A node (``Node``), as services see it."""

    settings: NodeSettings
    conf_state: ConfState
    leader: int
    leader_elected_at: float
    term: int
    applied: int
    committed: int
    stopped: bool

    def submit(self, kind: int, body: bytes, waiter: Waiter, caller: Caller | None) -> int:
        """Put a request into the log; its request id."""

    def withdraw(self, request_id: int, *, only_unsent: bool = False) -> bool:
        """Forget the waiter of a request; return whether the request never leaves this member."""

    async def propose(
        self,
        kind: int,
        body: bytes,
        request: Any,
        caller: Caller | None,
        on_abandoned: Callable[[Outcome], None] | None = None,
        *,
        identity: Identity,
        deadline: float | None = None,
    ) -> Outcome:
        """Put a request into the log and wait until it is applied here."""

    def read(self, reader: Reader, staleness_s_max: float | None = None) -> None:
        """Call back once the applied state is recent enough."""

    async def confirm_read(self, staleness_s_max: float | None = None) -> None:
        """Wait until it is."""

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds of the node."""

    def transfer_leader(self, target: int) -> None:
        """Ask to hand leadership over."""

    def damaged(self, error: errors.CorruptionError) -> None:
        """Have done what is to be done about a damaged database."""

    def fatal(self, error: BaseException) -> None:
        """Stop for good because of an error."""


def timeout_error(node: MemberLoop, sender: Sender, started_at: float, sent: bool) -> errors.StatusError:
    """Return which of etcd's time-out errors a proposal gets (server/etcdserver/server.go, parseProposeCtxErr).

    Arguments:
        node: of this member.
        sender: knows who is connected since when.
        started_at: loop time at which the proposal came.
        sent: whether the core took it.
    """
    own_id = node.settings.member_id
    if not sent:
        return errors.ContextDeadlineExceededError()
    if node.leader_elected_at - 2 * node.settings.election_s < started_at < node.leader_elected_at:
        return errors.LeaderFailTimeoutError()
    if node.leader not in (NONE, own_id):
        since = sender.connected_since(node.leader)
        if since is None or since > started_at:
            return errors.ConnectionLostTimeoutError()
    elif node.leader == own_id and not _quorum_connected_since(node, sender, started_at):
        return errors.ConnectionLostTimeoutError()
    return errors.RequestTimeoutError()


def _quorum_connected_since(node: MemberLoop, sender: Sender, moment: float) -> bool:
    voters = node.conf_state.voters
    connected = [sender.connected_since(voter) for voter in voters if voter != node.settings.member_id]
    return 1 + sum(since is not None and since <= moment for since in connected) > len(voters) // 2
