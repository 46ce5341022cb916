"""``RawNode``: the interface of the Raft core. Inputs go in as calls, work comes out as ``Ready``.

The caller's duties are the numbered list at the head of ``raftkv/raft/__init__.py``. Not thread-safe, never blocks,
does no IO; equal calls in equal order give equal results.

WRITES THAT OVERLAP

Several Readys may be in flight to the disk. Each that has something for the disk, or messages that wait for it, gets
a number; the caller confirms them in that order (``on_append_durable``). With the confirmation entries leave the
unstable tail, and from then on the core reads them from the ``MemoryLog``. When is that safe? Take entries 5 and 6:

    Ready 1, term 1   write 5' 6'        from leader A
    Ready 2, term 2   write 5" 6"        leader C overwrote them
    Ready 3, term 3   write 5' 6'        A leads again and sends the same entries as before

When write 1 is confirmed, index and term of the unstable tail equal those of Ready 1, yet write 2 is still going to
overwrite them on the disk. So a confirmation counts only if the *member's term* has not changed since its Ready was
taken: then the log was not truncated meanwhile. So that nothing stays in the tail for ever, each Ready attests
the whole tail as it stands, not only its own entries; a change of term always makes a Ready (the term must be saved).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from mypy_extensions import mypyc_attr

from . import confchange
from .core import Raft
from .describe import Status, status_of
from .errors import InvariantError, StepLocalMessage, StepPeerNotFound
from .log import MemoryLog
from .types import (
    ConfChange,
    ConfState,
    Entry,
    HardState,
    Message,
    MessageType,
    RaftConfig,
    Ready,
    SoftState,
    StateRole,
)

_LOCAL = frozenset(
    (
        MessageType.HUP,
        MessageType.BEAT,
        MessageType.UNREACHABLE,
        MessageType.SNAPSHOT_STATUS,
        MessageType.CHECK_QUORUM,
        MessageType.FORGET_LEADER,
    )
)
_RESPONSES = frozenset(
    (
        MessageType.APPEND_RESPONSE,
        MessageType.VOTE_RESPONSE,
        MessageType.HEARTBEAT_RESPONSE,
        MessageType.READ_INDEX_RESPONSE,
        MessageType.PRE_VOTE_RESPONSE,
    )
)


class _Append:
    """The steps to take when the write of one Ready is confirmed."""

    __slots__ = ("last_index", "last_term", "number", "snapshot_index", "term", "to_self")

    def __init__(self, number: int, raft: Raft, to_self: list[Message], snapshot_index: int) -> None:
        self.number = number
        # The member's term, and the end of its log, when the Ready was taken.
        self.term = raft.term
        self.last_index = raft.log.last_index
        self.last_term = raft.log.last_term
        self.to_self = to_self
        self.snapshot_index = snapshot_index


@mypyc_attr(allow_interpreted_subclasses=True)
class RawNode:
    """The Raft core of one member of one group."""

    def __init__(
        self, config: RaftConfig, log: MemoryLog, rng: random.Random, clock_ns: Callable[[], int] | None = None
    ) -> None:
        """Start as a follower from what the log holds.

        Arguments:
            config: settings of the member.
            log: what it has on disk.
            rng: draws election timeouts and nothing else.
            clock_ns: nanoseconds since any moment, suspension included, for read leases (``read_lease``); None: without
                them.

        Raises:
            InvariantError, ConfChangeError: what was persisted contradicts itself.
        """
        self.raft = Raft(config, log, rng, clock_ns)
        self._soft = (self.raft.leader, self.raft.role)
        self._hard = (self.raft.term, self.raft.vote, self.raft.log.committed)
        self._appends: deque[_Append] = deque()
        self._append_number = 0

    # -- inputs ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let one tick of time pass."""
        self.raft.tick()

    def step(self, message: Message) -> None:
        """Handle a message from another member. The message is kept and must not be changed afterwards.

        Raises:
            StepLocalMessage, StepPeerNotFound, InvalidMessage: drop the message.
            ProposalDropped: a proposal passed on by a follower could not be taken: drop it, the proposer asks again.
            InvariantError: stop the member.
        """
        kind = message.type
        if kind in _LOCAL:
            raise StepLocalMessage(f"{MessageType(kind).name} from outside")
        raft = self.raft
        if kind in _RESPONSES and message.from_ not in raft.tracker.progress:
            raise StepPeerNotFound(f"{MessageType(kind).name} from {message.from_}")
        raft.step(message)

    def propose(self, data: bytes) -> None:
        """Propose one entry, as ``propose_batch`` does several."""
        self.propose_batch([data])

    def propose_batch(self, datas: list[bytes]) -> None:
        """Propose one entry for each of ``datas``, in order, all or none; a follower passes them on to its leader.

        No exception is no promise: a proposal may be lost or (if it was passed on) dropped elsewhere; it is done when
        it comes back in ``committed_entries``.

        Raises:
            ProposalDropped: it was not taken.
        """
        if not datas:
            return
        raft = self.raft
        if raft.role == StateRole.LEADER:
            raft.propose_datas(datas)
        else:
            entries = [Entry(0, 0, data) for data in datas]
            raft.step(Message(MessageType.PROPOSE, from_=raft.id, entries=entries))

    def propose_conf_change(self, change: ConfChange) -> None:
        """Propose a membership change. One that is not admissible now comes back as an empty normal entry.

        Raises:
            ProposalDropped: it was not taken.
        """
        entry = Entry(0, 0, confchange.encode(change), confchange.entry_type(change))
        self.raft.step(Message(MessageType.PROPOSE, from_=self.raft.id, entries=[entry]))

    def apply_conf_change(self, change: ConfChange) -> ConfState:
        """Put a committed membership change into force; call it when its entry is applied, before ``on_applied``.

        Returns:
            the configuration, to be persisted with the applied index.

        Raises:
            ConfChangeError: the change is illegal on the present configuration (the same on every member).
        """
        return self.raft.apply_conf_change(change)

    def read_index(self, context: bytes) -> None:
        """Ask for a linearizable read. The answer is a ``ReadState`` with ``context`` in a later Ready.

        There may be no answer (no leader, lost messages, a change of leader): ask again after a while, with a fresh
        context, so that a late answer to the old question is not taken for one to the new.
        """
        self.raft.step(Message(MessageType.READ_INDEX, from_=self.raft.id, context=context))

    def read_now(self) -> int:
        """Return the index at which a linearizable read that has arrived may be served at once, once it is applied.

        0: there is no lease (``allow_leases``); ask for a round with ``read_index``. A Ready may follow either way.
        """
        return self.raft.read_now()

    def allow_leases(self, allowed: bool) -> None:
        """Allow this member, leading, to serve reads by a lease, or forbid it. All members must know of leases.

        Arguments:
            allowed: whether it may.
        """
        self.raft.lease.allow(allowed)

    def transfer_leader(self, id: int) -> None:
        """Ask the leader to hand over to ``id``. While that is under way proposals are dropped."""
        self.raft.step(Message(MessageType.TRANSFER_LEADER, from_=id))

    def campaign(self) -> None:
        """Campaign now instead of at the timeout."""
        self.raft.campaign()

    def report_unreachable(self, id: int) -> None:
        """Report that a message to ``id`` could not be delivered."""
        if self.raft.role == StateRole.LEADER:
            self.raft.report_unreachable(id)

    def report_snapshot(self, id: int, ok: bool) -> None:
        """Report how the transfer of a snapshot ended. Without this report nothing more is sent to the follower.

        Arguments:
            id: of the follower.
            ok: whether the snapshot was delivered.
        """
        if self.raft.role == StateRole.LEADER:
            self.raft.report_snapshot(id, ok)

    def forget_leader(self) -> None:
        """Let a follower forget its leader, known to be dead, so that it grants pre-votes at once."""
        if self.raft.role == StateRole.FOLLOWER:
            self.raft.forget_leader()

    # -- outputs -----------------------------------------------------------------------------------------------------

    def has_ready(self) -> bool:
        """Return whether ``ready`` would give work. (Rarely a Ready turns out empty: handle it as any other.)"""
        raft = self.raft
        log = raft.log
        unstable = log.unstable
        return bool(
            raft.append_due
            or raft.heartbeat_due
            or raft.messages
            or raft.messages_after_append
            or raft.messages_to_self
            or unstable.in_progress < unstable.offset + len(unstable.entries)
            or log.has_next_committed()
            or raft.read_states
            or unstable.next_snapshot() is not None
            or self._soft != (raft.leader, raft.role)
            or self._hard != (raft.term, raft.vote, log.committed)
        )

    def ready(self) -> Ready:
        """Take the work that has piled up. It is handed out once: the caller must carry it out."""
        raft = self.raft
        if raft.append_due or raft.heartbeat_due:
            raft.flush()
        log = raft.log
        unstable = log.unstable
        ready = Ready()
        self._take_states(ready)
        ready.entries = unstable.next_entries()
        ready.snapshot = unstable.next_snapshot()
        unstable.accept()
        ready.committed_entries = log.next_committed()
        ready.messages, raft.messages = raft.messages, ready.messages
        ready.messages_after_append, raft.messages_after_append = raft.messages_after_append, []
        ready.read_states, raft.read_states = raft.read_states, ready.read_states
        if ready.entries or ready.snapshot is not None:
            ready.must_sync = True
        if (
            ready.entries
            or ready.hard_state is not None
            or ready.snapshot is not None
            or ready.messages_after_append
            or raft.messages_to_self
        ):
            self._number(ready)
        return ready

    def _take_states(self, ready: Ready) -> None:
        """Put what changed of the soft and the hard state into the Ready."""
        raft = self.raft
        soft = (raft.leader, raft.role)
        if soft != self._soft:
            self._soft = soft
            ready.soft_state = SoftState(*soft)
        hard = (raft.term, raft.vote, raft.log.committed)
        if hard != self._hard:
            # Term and vote must be durable before anything that follows from them; the commit index need not, it
            # can be found again.
            ready.must_sync = hard[:2] != self._hard[:2]
            self._hard = hard
            ready.hard_state = HardState(*hard)

    def _number(self, ready: Ready) -> None:
        """Remember what the confirmation of this Ready's write will mean."""
        self._append_number += 1
        ready.append_number = self._append_number
        raft = self.raft
        to_self, raft.messages_to_self = raft.messages_to_self, []
        snapshot_index = 0 if ready.snapshot is None else ready.snapshot.index
        self._appends.append(_Append(self._append_number, raft, to_self, snapshot_index))

    def on_append_durable(self, ready: Ready) -> None:
        """Confirm that everything of ``ready`` that is for the disk is durable, and that the ``MemoryLog`` has it.

        A snapshot is also installed in the state machine. Call it for each Ready, in order; for one with
        ``append_number`` 0 it does nothing.
        """
        number = ready.append_number
        if number == 0:
            return
        if not self._appends or self._appends[0].number != number:
            raise InvariantError(f"append {number} confirmed out of order")
        append = self._appends.popleft()
        raft = self.raft
        for message in append.to_self:
            raft.step(message)
        # Counts only if the log was not truncated meanwhile; see the head of the module.
        if append.term == raft.term:
            raft.log.unstable.stable_to(append.last_index, append.last_term)
        # A snapshot is committed state: it stays valid in any term.
        if append.snapshot_index:
            raft.installed_snapshot(append.snapshot_index)

    def on_applied(self, index: int) -> None:
        """Confirm that the state machine holds everything up to and including ``index``."""
        self.raft.applied_to(index)

    def advance(self, ready: Ready) -> None:
        """Confirm a Ready for a caller that writes and applies at once: durable, then applied."""
        self.on_append_durable(ready)
        if ready.committed_entries:
            self.on_applied(ready.committed_entries[-1].index)

    def status(self) -> Status:
        """Return what this member knows now."""
        return status_of(self.raft)
