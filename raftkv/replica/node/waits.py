"""A node as services see it: the results that its loop reports to callbacks can be awaited.

    outcome = await node.propose(kind, data, request, caller, identity=user)    # applied; outcome.error: the refusal
    await node.confirm_read()                                 # the state here is now at least as new as the call

There are two ways to propose, with the same effect. ``Node.submit`` passes the outcome to a ``Waiter`` in the turn that
applied it: no task, no future, no further turn of the loop. It is for requests that come ten thousand times a second
(writes of clients, keep-alives that wait for a RENEW). Everything else awaits ``propose``, which costs about 20 us
more.

This module also decides which of etcd's errors a proposal gets when it times out.

A NODE IS GIVEN its identity and timing, and who sends for it:

    NodeSettings    identity, timing and limits
    Sender          messages to other members (``server.peer.transport``)
    Stages          notified of the progress of requests (``server.tracing``), if tracing is on

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


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Identity, timing and limits of a node.

    Attributes:
        member_id: id of this member.
        tick_s: length of a Raft tick (etcd: heartbeat-interval).
        election_s: election timeout.
        unapplied_max: number of entries committed for at least a tick and not applied, above which clients' writes are
            refused.
        unapplied_max_bytes: size of the committed entries that are not applied, above which clients' writes are refused
            and no entries are accepted from the leader.
        unwritten_max_bytes: keys and values that the database does not have yet, above which no entry is begun. One
            entry adds at most the values that its puts bring and keep (``apply.check.KEPT_VALUES_MAX``).
    """

    member_id: int
    tick_s: float
    election_s: float
    unapplied_max: int = UNAPPLIED_MAX
    unapplied_max_bytes: int = UNAPPLIED_MAX_BYTES
    unwritten_max_bytes: int = UNAPPLIED_MAX_BYTES

    @property
    def request_timeout_s(self) -> float:
        """Longest wait for a response: as in etcd, 5 s and two elections, which outlasts the loss of a leader."""
        return 5.0 + 2.0 * self.election_s


class Sender(Protocol):
    """Sends messages to other members."""

    def send(self, messages: Iterable[Message]) -> None:
        """Send messages, or drop them: Raft repairs any loss."""

    def backlog_bytes(self, peer_id: int) -> int | None:
        """Return the size of the unsent messages to a peer; ``None`` while it is disconnected."""

    def connected_since(self, peer_id: int) -> float | None:
        """Return the loop time at which a peer was connected; ``None`` while it is disconnected."""


class Stages(Protocol):
    """Notified of the progress of requests. It changes nothing, and must not raise."""

    def submitted(self, request_id: int) -> None:
        """Called when a proposal is queued, within the call whose handler runs."""

    def proposed(self, datas: Iterable[bytes], passed_on: bool) -> None:
        """Called when the core has accepted proposals, or (``passed_on``) forwarded them to the leader."""

    def appended(self, entries: Sequence[Entry]) -> None:
        """Called when entries are in the log in memory, and are being written to disk."""

    def durable(self, index: int) -> None:
        """Called when everything up to an entry is durable in this member's log."""

    def committed(self, index: int) -> None:
        """Called when everything up to an entry is committed."""

    def applied(self, index: int) -> None:
        """Called when everything up to an entry is applied; callers are answered next."""

    def reading(self, reader: Reader) -> Reader:
        """Called when a reader waits for a recent state; return the reader to use in its place."""

    def asking(self, ask: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return the function to use in place of ``ask``, which begins read rounds."""


@mypyc_attr(allow_interpreted_subclasses=True)
class AwaitableNode:
    """The methods of ``Node`` for services (see ``Node`` for their documentation); test doubles are subclasses too."""

    settings: NodeSettings
    conf_state: ConfState
    leader: int
    leader_elected_at: float
    term: int
    applied: int
    committed: int
    stopped: bool

    def submit(self, kind: int, body: bytes, waiter: Waiter, caller: Caller | None) -> int:
        """Propose a request; return its request id."""
        raise NotImplementedError

    def submit_change(self, record: raft_pb2.MembershipChange, waiter: Waiter) -> int:
        """Propose a membership change; return its request id."""
        raise NotImplementedError

    def withdraw(self, request_id: int, *, only_unsent: bool = False) -> bool:
        """Forget the waiter of a request; return whether the request will never be proposed."""
        raise NotImplementedError

    def read(self, reader: Reader, staleness_s_max: float | None = None) -> None:
        """Call back once the applied state is as new as now, or as the bound allows."""
        raise NotImplementedError

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the node holds."""
        raise NotImplementedError

    def transfer_leader(self, target: int) -> None:
        """Request a transfer of leadership."""
        raise NotImplementedError

    def damaged(self, error: errors.CorruptionError) -> None:
        """Handle damage of the database."""
        raise NotImplementedError

    def fatal(self, error: BaseException) -> None:
        """Stop the member because of an error."""
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
        work: int = 0,
    ) -> Outcome:
        """Propose a request and wait until it is applied here.

        Arguments:
            kind: of the request (``raftkv.apply.wire.Kind``).
            body: its bytes.
            request: the parsed request, so that applying need not parse it again.
            caller: caller of the request, as in ``Node.submit``.
            on_abandoned: called with the outcome if the caller was cancelled before it got the outcome. A request that
                is not yet proposed when the caller is cancelled never will be.
            identity: identity in whose share it waits (``rpc/shares``); ``fair.MEMBER``: the member's own share.
            deadline: loop time after which it must not be proposed; ``None``: no deadline.
            work: keys that applying it looks at or changes (``Waiter``).

        Returns:
            The outcome, with an error if applying refused the request.

        Raises:
            TooManyRequestsError: too much is pending; it was not proposed.
            StoppedError: the member stops.
            StatusError: it was not applied in time. It may still be applied.
        """
        waiter = _Awaited(request, on_abandoned, identity, deadline)
        waiter.work = work
        request_id = self.submit(kind, body, waiter, caller)
        try:
            return await waiter.outcome
        except asyncio.CancelledError:
            if not self.withdraw(request_id, only_unsent=on_abandoned is not None):
                waiter.abandon()
            raise

    async def change_members(self, record: raft_pb2.MembershipChange) -> Outcome:
        """Propose a membership change and wait until it is applied here.

        Arguments:
            record: the change; it waits in the share of its caller, otherwise in the member's own.

        Returns:
            The outcome: its body has the members after the change (a ``MemberListResponse``), or it has the error of a
            change that is no longer valid.

        Raises:
            TooManyRequestsError: too much is pending; it was not proposed.
            StoppedError: the member stops.
            StatusError: it was not applied in time. It may still be applied.
        """
        waiter = _Awaited(record, None, record.caller.user or MEMBER, None)
        request_id = self.submit_change(record, waiter)
        try:
            return await waiter.outcome
        except asyncio.CancelledError:
            self.withdraw(request_id)
            raise

    async def confirm_read(self, staleness_s_max: float | None = None) -> None:
        """Wait until the state applied here is at least as new as the time of the call.

        Arguments:
            staleness_s_max: how much older it may be, in seconds; ``None``: not at all.

        Raises:
            RequestTimeoutError, StoppedError: the state was not confirmed in time.
        """
        reader = _Read()
        self.read(reader, staleness_s_max)
        await reader.done


class _Awaited(Waiter):
    """A proposal that a coroutine awaits."""

    __slots__ = ("_on_abandoned", "outcome")

    def __init__(
        self, request: Any, on_abandoned: Callable[[Outcome], None] | None, identity: Identity, deadline: float | None
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
        """Handle the cancellation of the coroutine, perhaps after the outcome arrived and before the coroutine ran."""
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
    """Return the timeout error of etcd for a proposal (server/etcdserver/server.go, parseProposeCtxErr).

    Arguments:
        node: node of this member.
        sender: knows the connection times of peers.
        started_at: loop time at which the proposal arrived.
        sent: whether the core accepted it.
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
