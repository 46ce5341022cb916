"""The main loop of a member: Ready -> disk -> send -> apply -> respond -> advance.

This module defines the order of operations; nothing else persists, sends or applies. One *turn* handles everything that
arrived since the last: proposals become one append, the appends one write to the log, the messages of a turn one batch
per peer. For each ``Ready`` of the Raft core, in this order:

1. messages that do not depend on the disk (a leader's appends, heartbeats) are sent at once, in parallel with the disk;
2. entries and hard state go to the disk, and into the in-memory log that the core reads;
3. when they are durable, the core is notified, and the messages that depend on them (votes, acknowledgements) are sent;
4. committed entries, which are durable here by then, are applied, and their callers answered;
5. confirmed reads are served once everything up to their index is applied.

A received snapshot replaces steps 2 to 5: its marker goes to the disk, then the database is exchanged in the background
(``snapshots``) while the loop ticks and answers heartbeats; later Readys that are durable are confirmed after it.

Invariants

- No acknowledgement, to a client or a peer, before the fsync it depends on, even with one member.
- Entries are applied in index order, each once; the applied index is stored with their effects (``applying``).
- A proposal waits only for the end of the turn in which it arrived, or of the pass over the sockets (``Cork``): batches
  overlap, and grow automatically when turns take longer.
- Any exception in a turn stops the member. No error is ignored: a member that continued after one could acknowledge
  data that it does not have, or diverge from the others.

Not here: connections (``transport``, ``services``), files (``disk``, ``raftkv.storage``), meaning (``raftkv.apply``).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from typing import Final

from raftkv import errors
from raftkv.apply import wire as requests
from raftkv.apply.applier import Applier, Outcome
from raftkv.apply.membership import Decision, conf_change_of
from raftkv.apply.txn import keys_of
from raftkv.apply.wire import Caller, Kind
from raftkv.loop.cork import Cork
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft.core import RawNode
from raftkv.raft.errors import (
    ConfChangeError,
    ForkError,
    InvalidMessage,
    LogLostError,
    ProposalDropped,
    StepLocalMessage,
    StepPeerNotFound,
)
from raftkv.raft.log import MemoryLog
from raftkv.raft.types import (
    NONE,
    ConfState,
    Entry,
    EntryType,
    HardState,
    Message,
    MessageType,
    Ready,
    SnapshotMeta,
    SoftState,
    StateRole,
)
from raftkv.replica import codec
from raftkv.replica.node.applying import Applying, Backlog
from raftkv.replica.node.conf_changes import ConfChanges, has_change, hide_beginning
from raftkv.replica.node.disk import Batch, Disk, Restore
from raftkv.replica.node.proposals import Forwarded, Pace, Proposals, Waiter, answer, cost_bytes
from raftkv.replica.node.reads import Reader, ReadQueue
from raftkv.replica.node.waits import AwaitableNode, NodeSettings, Sender, Stages, timeout_error
from raftkv.rpc.shares import Uses
from raftkv.storage import failpoints
from raftkv.storage.failpoints import failpoint
from raftkv.storage.mvcc import Store

_log = logging.getLogger(__name__)

APPLY_PER_TURN_MAX: Final = 1_000
"""Number of committed entries after which a turn lets other work on the loop run."""

PROPOSE_BYTES_MAX: Final = 1024 * 1024
"""Size of requests proposed together: a follower forwards them in one message, which the leader must decode."""

PASS_ON_BACKLOG_MAX_BYTES: Final = 16 * 1024 * 1024
"""Unsent bytes of the stream to the leader above which a follower forwards nothing more: its other messages to the
leader (acknowledgements, heartbeats) share that stream."""


class Node(AwaitableNode):
    """A running member.

    Arguments:
        raw: the Raft core.
        log: the in-memory log that ``raw`` reads.
        disk: makes entries durable.
        store: the state to which entries are applied.
        applier: applies entries.
        sender: delivers messages.
        settings: timing and limits.
        ids: fresh request ids.
        conf_state, applied: the members as of the last applied entry, and its index.
        on_fatal: called once, with the error that stopped the member.
        install_snapshot: replaces the store by a received snapshot, whose marker is in the log, and calls back
            afterwards; meanwhile the loop continues, except for applying and acknowledging.
        note_applied: stores the index and term of the last applied entry so that it survives a kill, before any client
            sees its effects.
        cork: held during a turn, so that all its responses are sent together and at once when it ends.
        stages: notified of the progress of requests; ``None``: no tracing.
    """

    def __init__(
        self,
        *,
        raw: RawNode,
        log: MemoryLog,
        disk: Disk,
        store: Store,
        applier: Applier,
        sender: Sender,
        settings: NodeSettings,
        ids: Iterator[int],
        conf_state: ConfState,
        applied: int,
        on_fatal: Callable[[BaseException], None],
        install_snapshot: Callable[[SnapshotMeta, Callable[[], None]], None],
        note_applied: Callable[[int, int], None],
        cork: Cork | None = None,
        stages: Stages | None = None,
    ) -> None:
        self.raw = raw
        self.log = log
        self.store = store
        self.applier = applier
        self.settings = settings
        self.conf_state = conf_state
        self.applied = applied
        self.leader, self.role = NONE, StateRole.FOLLOWER
        state = log.hard_state
        self.term, self.committed = state.term, state.commit
        # A late heartbeat: this member, leading, sent it after more than twice the interval.
        self.leader_changes = self.late_heartbeats = self.proposals_dropped = 0
        self._ticked_at = math.inf
        self.leader_elected_at, self.leader_lost_at = 0.0, -math.inf
        self.conf_changed_at, self.stopped = 0, False
        self.on_leader_change: list[Callable[[], None]] = []
        self.on_damage: Callable[[errors.CorruptionError], None] | None = None
        self.may_hold_lease: Callable[[], bool] = lambda: False
        self.on_applied: list[Callable[[], None]] = []
        self.on_conf_change: list[Callable[[], None]] = []
        self._loop, self.uses, timeout_s = asyncio.get_running_loop(), Uses(), settings.request_timeout_s
        clock = self._loop.time
        self.proposals = Proposals(ids, timeout_s, clock, self.uses.waited, self._keys_of, self.uses.weights)
        # Membership changes that are applied and not reported yet.
        self._changes: list[tuple[Waiter | None, Outcome]] = []
        self.backlog = Backlog(raw.raft.log, settings)
        awaits = self.proposals.is_waiting
        self._conf_changes = ConfChanges(raw, awaits, self._check_way, sender.connected_since, clock, timeout_s)
        self._stages = stages
        ask = raw.read_index if stages is None else stages.asking(raw.read_index)
        self._cork = cork or Cork()
        self.reads = ReadQueue(ask, ids, timeout_s, self._wake, self._cork.expect)
        self._disk, self._sender = disk, sender
        self._on_fatal = on_fatal
        self._install_snapshot = install_snapshot
        self._note_applied = note_applied
        # Turns run in this context: a turn is for all requests, and must not use the context of one request's handler.
        self._context = copy_context()
        self._scheduled = self._in_turn = self._has_conf_changes = False
        self.applying = Applying(self, self._wake)
        self._unwritten_hard_state: HardState | None = None
        self._forwarded, self._pace = Forwarded(clock, timeout_s, self.uses.weights), Pace()
        # The core refused proposals at the last attempt; try again at the next tick or with a new leader.
        self._refused = False
        self._ticker: asyncio.TimerHandle | None = None
        self._conditions: dict[asyncio.Future[None], Callable[[], bool]] = {}
        # While a snapshot is being installed: its Ready, and the later Readys that are durable already.
        self._installing: Ready | None = None
        self._awaited: set[int] = set()
        self._behind: deque[Ready] = deque()

    # -- requests ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to tick."""
        self._ticker = self._loop.call_later(self.settings.tick_s, self._tick)
        self._wake()

    def submit(self, kind: int, body: bytes, waiter: Waiter, caller: Caller | None) -> int:
        """Propose a request with a callback, for callers that cannot afford to await ``propose``.

        Arguments:
            kind, body: the request.
            waiter: gets the outcome, or the reason why there is none, in the turn that has it.
            caller: caller of the request (``MEMBER``: this member); ``None``: unknown, so it is refused while
                authentication is enabled, unless only members propose such a kind.

        Returns:
            Its request id.

        Raises:
            TooManyRequestsError: too much is pending.
            StoppedError: the member stops.
        """
        if self.stopped:
            raise errors.StoppedError
        kind, body = self._named(kind, body, caller)
        request_id = self.proposals.add(kind, body, waiter, self._loop.time())
        if self._stages is not None:
            self._stages.submitted(request_id)
        self._wake()
        self._cork.arrived()
        return request_id

    def _keys_of(self, request: rpc_pb2.TxnRequest) -> int:
        return keys_of(self.applier.store, request)

    def _named(self, kind: int, body: bytes, caller: Caller | None) -> tuple[int, bytes]:
        """Add the caller to a request, while authentication is enabled."""
        if caller is not None and self.applier.auth.is_enabled:
            return Kind.IDENTIFIED, requests.identified(caller, kind, body)
        return kind, body

    def submit_ahead(self, kind: int, body: bytes, waiter: Waiter, caller: Caller | None = None) -> None:
        """Propose a decision of this leader now, before all waiting proposals.

        Arguments:
            kind, body, waiter, caller: as in ``submit``, which also documents the errors (too much is pending: the log
                is full).

        Raises:
            NotLeaderError: this member no longer leads. The next leader may decide otherwise, so nothing is forwarded.
        """
        if self.stopped:
            raise errors.StoppedError
        raft = self.raw.raft
        if raft.role != StateRole.LEADER or raft.term != self.term:
            raise errors.NotLeaderError
        kind, body = self._named(kind, body, caller)
        self.proposals.add_ahead(kind, body, waiter, self._loop.time(), self.raw.propose_batch)
        self._wake()

    def submit_change(self, record: raft_pb2.MembershipChange, waiter: Waiter) -> int:
        """Propose a membership change, after those in progress.

        Arguments:
            record: the change; its request id is set here.
            waiter: gets the outcome, or the reason why there is none, in the turn that has it.

        Returns:
            Its request id.

        Raises:
            TooManyRequestsError: too much is pending.
            StoppedError: the member stops.
        """
        if self.stopped:
            raise errors.StoppedError
        self._conf_changes.check_room()
        record.request_id = self.proposals.expect(waiter, self._loop.time())
        self._conf_changes.add(record.request_id, conf_change_of(record))
        self._has_conf_changes = True
        self._wake()
        return record.request_id

    def withdraw(self, request_id: int, *, only_unsent: bool = False) -> bool:
        """Forget the waiter of a request.

        Arguments:
            request_id: id returned by ``submit``.
            only_unsent: do nothing if the request is already proposed.

        Returns:
            whether the request was not proposed, and never will be.
        """
        if self.proposals.withdraw(request_id):
            return True
        if not only_unsent:
            self.proposals.pop(request_id)
        return False

    def read(self, reader: Reader, staleness_s_max: float | None = None) -> None:
        """Call ``reader.ready`` once the applied state is recent enough; perhaps at once, if it may be old.

        Arguments:
            reader: called when it may read.
            staleness_s_max: maximum age of the state, in seconds; ``None``: a linearizable read.
        """
        if self.stopped:
            raise errors.StoppedError
        index = self.raw.read_now() if self.raw.raft.lease.allowed else 0
        if index:
            # The read may have renewed the lease, which appends an entry.
            if self.raw.raft.append_due:
                self._wake()
            self.reads.add_at(reader, index, self.applied, self._loop.time())
            return
        if self._stages is not None:
            reader = self._stages.reading(reader)
        if staleness_s_max is not None:
            self.reads.add_within(reader, staleness_s_max, self._loop.time())
        else:
            self.reads.add(reader, self._loop.time())
        self._wake()
        self._cork.arrived()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on this node holds; it is checked after each turn.

        Arguments:
            condition: condition on the leader or on the applied state; must be cheap.
        """
        if condition():
            return
        holds: asyncio.Future[None] = self._loop.create_future()
        self._conditions[holds] = condition
        try:
            await holds
        finally:
            self._conditions.pop(holds, None)

    def receive(self, messages: Iterable[Message]) -> None:
        """Handle messages from another member, in the order sent."""
        if self.stopped:
            return
        try:
            for message in messages:
                if self.backlog.takes(message):
                    self._step(message)
        except Exception as error:
            self.fatal(error)
            return
        self._wake()

    def awaits_snapshot(self, index: int) -> bool:
        """Return whether the received database of an index is to be installed, or is being installed."""
        pending = self.raw.raft.log.unstable.snapshot  # the newest; there may be earlier ones
        return index in self._awaited or (pending is not None and pending.index == index)

    def _step(self, message: Message) -> None:
        if message.type == MessageType.PROPOSE and (self.raw.raft.role == StateRole.LEADER or has_change(message)):
            self._take_forwarded(message.entries)
            return
        try:
            codec.validate(message, self.raw.raft.term)
            self.raw.step(message)
        except ProposalDropped:
            # A forwarded proposal cannot be accepted now; the proposer's request times out.
            self.proposals_dropped += 1
        except StepPeerNotFound as error:
            # A late message of a removed member.
            _log.debug("dropped a %s message from member %x: %s", message.type, message.from_, error)
        except (StepLocalMessage, InvalidMessage) as error:
            _log.warning("dropped a %s message from member %x: %s", message.type, message.from_, error)

    def _take_forwarded(self, entries: list[Entry]) -> None:
        plain = [entry.data for entry in entries if entry.type == EntryType.NORMAL]
        changes = [entry for entry in entries if entry.type != EntryType.NORMAL]
        self.proposals_dropped += self._forwarded.add(plain)
        if changes:
            self.proposals_dropped += self._conf_changes.forwarded(changes)
            self._has_conf_changes = True

    def report_unreachable(self, peer_id: int) -> None:
        """Report that messages to a peer were lost."""
        if not self.stopped:
            self.raw.report_unreachable(peer_id)

    def has_log(self, peer_id: int, index: int) -> bool:
        """Return whether this leader knows that a peer has the log up to an index, or that it is no longer a member."""
        progress = self.raw.raft.tracker.progress.get(peer_id)
        return progress is None or progress.match >= index

    @property
    def durable(self) -> int | None:
        """Index up to which the log of this leader is on its disk; ``None``: it is no longer a member."""
        own = self.raw.raft.tracker.progress.get(self.settings.member_id)
        return own.match if own is not None else None

    def report_snapshot(self, peer_id: int, ok: bool) -> None:
        """Report the result of a snapshot transfer to the core.

        Arguments:
            peer_id: receiving member.
            ok: whether it was delivered.
        """
        if not self.stopped:
            self.raw.report_snapshot(peer_id, ok)
            self._wake()

    @property
    def is_leaderless(self) -> bool:
        """Whether there has been no leader for an election timeout: only then are callers that require one refused.

        A member notices at once that its leader's connection broke, and mostly has another leader within a tenth of
        that time; an etcd member notices nothing before it campaigns. Clients (etcdctl's watch among them) give up at
        the first refusal.
        """
        return self.leader == NONE and self._loop.time() - self.leader_lost_at > self.settings.election_s

    @property
    def is_transferring(self) -> bool:
        """Whether this leader is transferring leadership: another leader may be elected at any time."""
        return self.raw.raft.transferee != NONE

    def transfer_leader(self, target: int) -> None:
        """Request a transfer of leadership."""
        self.raw.transfer_leader(target)
        self._wake()

    def forget_leader(self) -> None:
        """Treat the leader as lost, as a follower: pre-votes are granted until a leader is heard from again."""
        self.raw.forget_leader()
        self._wake()

    def campaign(self) -> None:
        """Campaign now instead of after the timeout."""
        self.raw.campaign()
        self._wake()

    def stop(self) -> None:
        """Stop taking part, and fail all waiting callers."""
        if self.stopped:
            return
        self.stopped = True
        if self._ticker is not None:
            self._ticker.cancel()
        self.applying.close()
        self.proposals.close()
        self.reads.close()

    def damaged(self, error: errors.CorruptionError) -> None:
        """Handle damage of the database, which still serves everything that is not damaged."""
        if self.on_damage is None:
            self.fatal(error)
        else:
            self.on_damage(error)

    @property
    def hears_leader(self) -> bool:
        """Whether a leader has counted this member as one of its own within an election timeout, or this one leads."""
        raft = self.raw.raft
        return raft.leader != NONE and raft.election_elapsed < raft.config.election_ticks

    def fatal(self, error: BaseException) -> None:
        """Stop the member because of an error."""
        if not self.stopped:
            self.stop()
            if isinstance(error, LogLostError):
                error = errors.CorruptionError(str(error))
            elif isinstance(error, ForkError):
                error = errors.ForkedError(str(error))
            self._on_fatal(error)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            if not self._cork.defer(self._turn):
                self._loop.call_soon(self._turn, context=self._context)

    def _turn(self) -> None:
        self._scheduled = False
        if self.stopped:
            return
        self._in_turn = True
        with self._cork:
            try:
                self._do_turn(self.applying.begin_turn())
            except Exception as error:
                self.fatal(error)
            finally:
                self._in_turn = False
        if self._conditions:
            self._look_at_conditions()

    def _do_turn(self, applied: int) -> None:
        """Handle everything that has arrived; ``applied`` entries of the last turn are already applied."""
        reads = self.reads
        if reads.due or reads.failed:
            reads.serve()
        if self._forwarded.size_bytes or self.proposals.unsent_bytes:
            self._propose_unsent()
        if self._has_conf_changes:
            self._conf_changes.propose()
            self._has_conf_changes = len(self._conf_changes) > 0
        if reads.waiting:
            reads.start(self._loop.time())
        while self.raw.has_ready():
            applied += self._carry_out(self.raw.ready())
            if applied > APPLY_PER_TURN_MAX:
                self._wake()
                break
        # Refused proposals are retried at the next tick, or when applying may have made room.
        waits = self._forwarded.size_bytes or self.proposals.unsent_bytes
        if (waits and (applied or not self._refused)) or (applied and self._has_conf_changes):
            self._wake()

    def _look_at_conditions(self) -> None:
        for holds, condition in self._conditions.items():
            if not holds.done() and condition():
                holds.set_result(None)

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(self.settings.tick_s, self._tick)
        now = self._loop.time()
        if now - self._ticked_at > 2 * self.settings.tick_s and self.role == StateRole.LEADER:
            self.late_heartbeats += 1
        self._ticked_at = now
        try:
            # One tick, however late: the time in which this process was suspended must not count as silence of others.
            self.raw.tick()
            self.raw.allow_leases(self.may_hold_lease())
            self.backlog.tick()
            self.reads.tick(now)
            for waiter, sent in self.proposals.take_expired(now):
                waiter.fail(timeout_error(self, self._sender, waiter.started_at, sent))
        except Exception as error:
            self.fatal(error)
            return
        self._wake()

    def _propose_unsent(self) -> None:
        """Propose the queued requests, as many as the pace and one message allow."""
        self._refused = False
        pace = self._pace
        if pace.has_given_up(self._loop.time()):
            pace.end(self._loop.time(), is_lost=True)
        while (self._forwarded.size_bytes or self.proposals.unsent_bytes) and not self._refused:
            bytes_max = max(0, min(PROPOSE_BYTES_MAX, pace.left_bytes))
            unsent = self.proposals.take_unsent(bytes_max, pace.apply_s, pace)
            forwarded = self._forwarded.take(bytes_max, pace) if self._forwarded.size_bytes else []
            datas = [data for _, data in (*unsent, *forwarded)]
            if not datas:
                self._refused = not bytes_max  # for now: earlier proposals are applied first
                return
            try:
                if failpoints.armed:
                    failpoint("raftBeforeLeaderSend")
                self._check_way()
                is_first = self._is_over(pace.newest)
                is_shared = bool(forwarded) or len(self.proposals.shares.held) > 1
                self.raw.propose_batch(datas)
                by_index = self.raw.raft.role == StateRole.LEADER or not unsent
                mark = self.raw.raft.log.last_index if by_index else -unsent[-1][0]
                cost = cost_bytes(datas) + self.proposals.taken_work_bytes
                pace.propose(mark, cost, self._loop.time(), is_first, is_shared)
                if self._stages is not None:
                    self._stages.proposed(datas, self.role != StateRole.LEADER)
            except ProposalDropped:
                self.proposals.give_back(unsent)
                self._give_back_forwarded(forwarded)
                self._refused = True

    def _is_over(self, mark: int) -> bool:
        """Return whether a proposal is applied, or its caller has left; ``mark`` is an index, or minus a request id."""
        return self.applied >= mark if mark >= 0 else not self.proposals.is_waiting(-mark)

    def _check_way(self) -> None:
        """Raise ``ProposalDropped`` while messages forwarded by this follower would be lost, or delay others."""
        leader = self.raw.raft.leader  # may differ from the last turn's
        if leader not in (NONE, self.settings.member_id):
            backlog_bytes = self._sender.backlog_bytes(leader)
            if backlog_bytes is None or backlog_bytes > PASS_ON_BACKLOG_MAX_BYTES:
                raise ProposalDropped("the leader is overloaded")

    def _give_back_forwarded(self, items: list[tuple[int, bytes]]) -> None:
        """Queue forwarded requests again that the log refused; a member that no longer leads drops them."""
        self._forwarded.give_back(items)
        if self.role != StateRole.LEADER:
            self.proposals_dropped += self._forwarded.clear()

    def _carry_out(self, ready: Ready) -> int:
        """Do the duties of one Ready; return the number of applied entries."""
        if ready.soft_state is not None:
            self._take_soft_state(ready.soft_state)
        if self._stages is not None and ready.committed_entries:
            self._stages.committed(ready.committed_entries[-1].index)
        if ready.committed_entries and not ready.entries:
            # Nothing for the disk, so these messages are less urgent than the responses that clients wait for.
            self.applying.take(ready.committed_entries)
            self._cork.flush()
        if ready.messages:
            self._sender.send(ready.messages)
        if ready.hard_state is not None:
            self.term = ready.hard_state.term
            self.committed = ready.hard_state.commit
        self._persist(ready)
        if ready.read_states:
            now = self._loop.time()
            for state in ready.read_states:
                self.reads.confirm(state.context, state.index, self.applied, now)
        if ready.committed_entries and ready.entries:
            self.applying.take(ready.committed_entries)
        return len(ready.committed_entries)

    def _persist(self, ready: Ready) -> None:
        if ready.snapshot is not None:
            # Entries may follow at once, so the log starts again now; the state follows when the marker is durable.
            self.log.apply_snapshot(ready.snapshot)
        if ready.hard_state is not None:
            self.log.hard_state = ready.hard_state
            self._unwritten_hard_state = ready.hard_state
        size_bytes = self.log.append(ready.entries) if ready.entries else 0
        if ready.entries and self._stages is not None:
            self._stages.appended(ready.entries)
        if ready.snapshot is not None:
            self._unwritten_hard_state = None
            self._awaited.add(ready.snapshot.index)
            state = self.log.hard_state
            self._disk.submit(Restore(ready.snapshot, state, ready.entries, lambda: self._saved(ready)))
            return
        if not ready.must_sync and not self._disk.outstanding:
            # Nothing that must be durable. A commit index alone is written with the next records: after a restart
            # without it, the member learns it from the leader.
            self._durable(ready)
            return
        if failpoints.armed:
            failpoint("raftBeforeSave")
        hard_state, self._unwritten_hard_state = self._unwritten_hard_state, None
        self._disk.submit(Batch(hard_state, ready.entries, ready.must_sync, lambda: self._saved(ready), size_bytes))

    def _saved(self, ready: Ready) -> None:
        """Handle that the disk has the records of a Ready."""
        if self.stopped:
            return
        try:
            if failpoints.armed:
                failpoint("raftAfterSave")
            self._durable(ready)
        except Exception as error:
            self.fatal(error)
            return
        if not self._in_turn:
            self._wake()

    def _durable(self, ready: Ready) -> None:
        """Report to the core that everything up to this Ready is durable, and send the messages that depend on it."""
        if self._installing is not None:
            self._behind.append(ready)
            return
        if ready.snapshot is not None:
            self._installing = ready
            meta = ready.snapshot
            self.applying.replaced(meta.index)
            self._install_snapshot(meta, lambda: self._installed(ready, meta))
            return
        self._confirm(ready)

    def _confirm(self, ready: Ready) -> None:
        if failpoints.armed:
            failpoint("raftBeforeAdvance")
        if self._stages is not None and ready.entries:
            self._stages.durable(ready.entries[-1].index)
        self.raw.on_append_durable(ready)
        if ready.messages_after_append:
            if failpoints.armed:
                failpoint("raftBeforeFollowerSend")
            self._sender.send(ready.messages_after_append)

    def _installed(self, ready: Ready, meta: SnapshotMeta) -> None:
        """Continue after a received snapshot was installed."""
        if self.stopped:
            return
        try:
            self.conf_state = meta.conf_state
            self.applied = meta.index
            self._note_applied(meta.index, meta.term)
            failpoint("raftAfterApplySnap")
            self._installing = None
            self._awaited.discard(meta.index)
            self._confirm(ready)
            self._go_on_behind()
            self.reads.applied(meta.index)
            for callback in (*self.on_applied, *self.on_conf_change):
                callback()
        except Exception as error:
            self.fatal(error)
            return
        self._wake()

    def _go_on_behind(self) -> None:
        """Confirm the Readys that became durable after an installed snapshot, up to the next one."""
        while self._behind and self._installing is None:
            self._durable(self._behind.popleft())

    def _take_soft_state(self, soft: SoftState) -> None:
        self.role = soft.role
        if soft.leader == self.leader:
            return
        had_leader, self.leader = self.leader != NONE, soft.leader
        self._pace = Pace()
        if had_leader:
            self.leader_lost_at = self._loop.time()
        if soft.leader != NONE:
            self.leader_changes += had_leader or self.leader_elected_at > 0
            self.leader_elected_at = self._loop.time()
            self.reads.leader_changed(self.leader_elected_at)
            # Proposals that waited for a leader are proposed in the next turn.
            self._wake()
        for callback in self.on_leader_change:
            callback()

    # -- applying ----------------------------------------------------------------------------------------------------

    def applied_up_to(self, last: Entry, answers: list[tuple[Waiter, Outcome]]) -> None:
        """Record that everything up to an entry is applied, and answer the callers. For ``applying``.

        Arguments:
            last: the entry.
            answers: waiters and their outcomes, in order.
        """
        self.applied = last.index
        while self._pace.first and self._is_over(self._pace.first):
            self._pace.end(self._loop.time())
        # Before the store is used for anything else: the changes go to disk with this index.
        self.store.set_applied(last.index, last.term)
        self._note_applied(last.index, last.term)
        self.raw.on_applied(last.index)
        if self._stages is not None:
            self._stages.applied(last.index)
        self._cork.expect(len(answers))
        for waiter, outcome in answers:
            answer(waiter, outcome)
        if self._changes:
            self._tell_of_changes()
        if self.reads.confirmed:
            self.reads.applied(last.index)
        for callback in self.on_applied:
            callback()

    def apply_conf_change(self, entry: Entry, answers: list[tuple[Waiter, Outcome]]) -> None:
        """Apply a membership change, or refuse it as all members do. For ``applying``.

        Arguments:
            entry: entry of the change.
            answers: the change's waiter on this member and its outcome are added to it.
        """
        failpoint("beforeApplyOneConfChange")
        membership = self.applier.membership
        decision = membership.decide(entry.data)
        error = decision.error or self._switch(decision)
        if error is None:
            membership.execute(decision, self.conf_state)
            self.conf_changed_at = entry.index
            self.store.set_conf_state(self.conf_state)
            self.log.conf_state = self.conf_state
            if decision.members:
                hide_beginning(self.log, self.conf_state)
        failpoint("afterApplyOneConfChange")
        waiter = self.proposals.pop(decision.request_id)
        if error is not None:
            if waiter is not None:
                answers.append((waiter, Outcome(0, b"", error)))
            return
        members = rpc_pb2.MemberListResponse(members=membership.list())
        self._changes.append((waiter, Outcome(0, members.SerializeToString())))

    def _tell_of_changes(self) -> None:
        """Report applied membership changes once this member cannot forget that they are committed.

        An operator who learns of a change may act on it and switch off the removed member. If the surviving member had
        forgotten the commit index, which is otherwise not written on its own, it would still need the vote of that
        member.
        """
        changes, self._changes = self._changes, []
        state = self.log.hard_state
        state = HardState(state.term, state.vote, max(state.commit, self.applied))
        self._disk.submit(Batch(state, (), True, lambda: self._changed(changes)))

    def _changed(self, changes: list[tuple[Waiter | None, Outcome]]) -> None:
        """Report membership changes that are applied and known for good."""
        if self.stopped:
            return
        try:
            for waiter, outcome in changes:
                if waiter is not None:
                    answer(waiter, outcome)
            for callback in self.on_conf_change:
                callback()
        except Exception as error:
            self.fatal(error)

    def _switch(self, decision: Decision) -> errors.StatusError | None:
        """Make Raft apply a change; return why it did not (the same on every member)."""
        if decision.change is None:
            return None
        try:
            self.conf_state = self.raw.apply_conf_change(decision.change)
        except ConfChangeError as error:
            return errors.ConfChangeRefusedError(f"raftkv: the members cannot be changed like this now: {error}")
        return None
