"""A node as services see it, with what its loop reports to callbacks, to be awaited.

    outcome = await node.propose(kind, data, request, caller, identity=user)    # applied; outcome.error: how refused
    await node.confirm_read()                                 # the state here is now at least as new as the call

Two ways lead into the log, with one meaning. ``Node.submit`` hands the outcome to a ``Waiter`` in the turn that
applied it: no task, no future, no further turn of the loop. That is for what comes ten thousand times a second (writes
of clients, the keep-alives that wait for a RENEW). Everything else awaits ``propose``, which costs some 20 us more.

Owns also which of etcd's errors a proposal gets that was not answered in time.

A NODE IS GIVEN its identity and timing, and who sends for it:

    NodeSettings    who it is, and how long things take
    Sender          messages to other members (``server.peer.transport``)
    Stages          hears how far requests have come (``server.tracing``), if tracing is on

"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from mypy_extensions import mypyc_attr

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.wire import Caller
from raftkv.loop.fair import MEMBER
from raftkv.pb import raft_pb2
from raftkv.raft.types import NONE, ConfState, Entry, Message
from raftkv.replica.node.proposals import Waiter
from raftkv.replica.node.reads import Reader
from raftkv.rpc.shares import Identity

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


@mypyc_attr(allow_interpreted_subclasses=True)
class AwaitableNode:
    """What services see of ``Node``, which says what each method does; stand-ins of tests are subclasses, too."""

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
        raise NotImplementedError

    def submit_change(self, record: raft_pb2.MembershipChange, waiter: Waiter) -> int:
        """Put a change of members into the log; its request id."""
        raise NotImplementedError

    def withdraw(self, request_id: int, *, only_unsent: bool = False) -> bool:
        """Forget the waiter of a request; return whether the request never leaves this member."""
        raise NotImplementedError

    def read(self, reader: Reader, staleness_s_max: float | None = None) -> None:
        """Call back once the applied state is as new as now, or as the bound allows."""
        raise NotImplementedError

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds of the node."""
        raise NotImplementedError

    def transfer_leader(self, target: int) -> None:
        """Ask to hand leadership over."""
        raise NotImplementedError

    def damaged(self, error: errors.CorruptionError) -> None:
        """Have done what is to be done about a damaged database."""
        raise NotImplementedError

    def fatal(self, error: BaseException) -> None:
        """Stop for good because of an error."""
        raise NotImplementedError

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
        """Put a request into the log and wait until it is applied here.

        Arguments:
            kind: of the request (``raftkv.apply.wire.Kind``).
            body: its bytes.
            request: the same parsed, so that applying need not parse it again.
            caller: who causes it, as for ``Node.submit``.
            on_abandoned: called with the outcome if the caller was cancelled before it had it. A request that is not
                under way yet when the caller is cancelled never will be.
            identity: in whose share it waits (``rpc/shares``); ``fair.MEMBER``: in the member's own.
            deadline: loop time after which it is not to be proposed any more; None: it always is.

        Returns:
            The outcome, with the error of a request that applying refused.

        Raises:
            TooManyRequestsError: too much is pending; it was not proposed.
            StoppedError: the member stops.
            StatusError: it was not applied in time. It may be applied yet.
        """
        waiter = _Awaited(request, on_abandoned, identity, deadline)
        request_id = self.submit(kind, body, waiter, caller)
        try:
            return await waiter.outcome
        except asyncio.CancelledError:
            if not self.withdraw(request_id, only_unsent=on_abandoned is not None):
                waiter.abandon()
            raise

    async def change_members(self, record: raft_pb2.MembershipChange) -> Outcome:
        """Put a change of members into the log and wait until it is applied here.

        Arguments:
            record: what is to change; it waits in the share of its caller, else in the member's own.

        Returns:
            The outcome: as its body the members after the change (a ``MemberListResponse``), or the error of a change
            that is not valid by then.

        Raises:
            TooManyRequestsError: too much is pending; it was not proposed.
            StoppedError: the member stops.
            StatusError: it was not applied in time. It may be applied yet.
        """
        waiter = _Awaited(record, None, record.caller.user or MEMBER, None)
        request_id = self.submit_change(record, waiter)
        try:
            return await waiter.outcome
        except asyncio.CancelledError:
            self.withdraw(request_id)
            raise

    async def confirm_read(self, staleness_s_max: float | None = None) -> None:
        """Wait until the state applied here is at least as new as the moment of the call.

        Arguments:
            staleness_s_max: how much older it may be, in seconds; None: not at all.

        Raises:
            RequestTimeoutError, StoppedError: it was not in time.
        """
        reader = _Read()
        self.read(reader, staleness_s_max)
        await reader.done


class _Awaited(Waiter):
    """A proposal that a coroutine awaits."""

    __slots__ = ("_on_abandoned", "outcome")

    def __init__(
        self,
        request: Any,
        on_abandoned: Callable[[Outcome], None] | None,
        identity: Identity,
        deadline: float | None,
    ) -> None:
        super().__init__(request, identity, deadline)
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._on_abandoned = on_abandoned

    @property
    def is_over(self) -> bool:
        return self.outcome.cancelled()

    def finish(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)
        elif self._on_abandoned is not None:
            self._on_abandoned(outcome)

    def fail(self, error: errors.StatusError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def abandon(self) -> None:
        """Take note that the coroutine was cancelled: perhaps when the outcome was there, and it had not run since."""
        outcome = self.outcome
        if self._on_abandoned is not None and outcome.done() and not outcome.cancelled() and not outcome.exception():
            self._on_abandoned(outcome.result())


class _Read:
    """A confirmation that a coroutine awaits."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        return self.done.done()

    def ready(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: errors.StatusError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def timeout_error(node: AwaitableNode, sender: Sender, started_at: float, sent: bool) -> errors.StatusError:
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


def _quorum_connected_since(node: AwaitableNode, sender: Sender, moment: float) -> bool:
    voters = node.conf_state.voters
    connected = [sender.connected_since(voter) for voter in voters if voter != node.settings.member_id]
    return 1 + sum(since is not None and since <= moment for since in connected) > len(voters) // 2
