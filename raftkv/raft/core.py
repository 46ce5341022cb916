"""The Raft object: its fields, the rules of terms and votes, the changes of role, and where messages queue up.

Everything that is the same in every role is here; what a role does with a message or a tick is in ``follower.py``,
``candidate.py`` and ``leader.py``, what a leader sends in ``replication.py``. The object is a pure function of its
inputs: the only chance in it is the random number generator it was given.

Roles (paper section 5.2; PRE_CANDIDATE is thesis section 9.6)::

      timeout            a quorum would vote       a quorum voted
    FOLLOWER ──► PRE_CANDIDATE ──► CANDIDATE ──► LEADER
       ▲               │               │            │
       └───────────────┴───────────────┴────────────┘   higher term, a lost election, or no quorum heard from

Three queues of messages, emptied by ``RawNode.ready``

- ``messages`` may leave at once, in parallel with the disk.
- ``messages_after_append`` promise something about this member's disk: votes, answers to appends, and requests for
  votes (a candidate that forgets its term or its log in a crash must not be able to use the votes they bring).
- ``messages_to_self`` are the same promises to this member itself: its own vote, and a leader's acknowledgement of
  its own entries. They are stepped when the disk has confirmed.

Left out: leases for reads (ReadOnlyLeaseBased): clocks drift, and safe reads are batched anyway.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from . import candidate, confchange, follower, leader
from .candidate import CAMPAIGN_TRANSFER
from .confchange import Configuration
from .config import NO_LIMIT, RaftConfig
from .errors import InvariantError
from .log import RaftLog
from .memory_log import LogReader
from .read_index import ReadIndexQueue
from .tracker import Tracker
from .types import NONE, ConfChange, ConfState, HardState, Message, MessageType, ReadState, StateRole

_APPEND: Final = MessageType.APPEND
_APPEND_RESPONSE: Final = MessageType.APPEND_RESPONSE
_HEARTBEAT: Final = MessageType.HEARTBEAT
_PRE_VOTE: Final = MessageType.PRE_VOTE
_PRE_VOTE_RESPONSE: Final = MessageType.PRE_VOTE_RESPONSE
_SNAPSHOT: Final = MessageType.SNAPSHOT
_VOTE: Final = MessageType.VOTE
_VOTE_RESPONSE: Final = MessageType.VOTE_RESPONSE

_VOTE_REQUESTS: Final = frozenset((_VOTE, _PRE_VOTE))
_VOTE_ANSWERS: Final = frozenset((_VOTE_RESPONSE, _PRE_VOTE_RESPONSE))
_CANDIDATES: Final = frozenset((StateRole.CANDIDATE, StateRole.PRE_CANDIDATE))
_FROM_LEADER: Final = frozenset((_APPEND, _HEARTBEAT, _SNAPSHOT))
_AFTER_APPEND: Final = frozenset((_APPEND_RESPONSE, _VOTE, _VOTE_RESPONSE, _PRE_VOTE_RESPONSE))
# Proposals and reads are passed on to whoever leads, in whatever term: they carry none.
WITHOUT_TERM: Final = frozenset((MessageType.PROPOSE, MessageType.READ_INDEX))
"""Kinds of which a message may have term 0."""
_WITH_OWN_TERM: Final = frozenset((_VOTE, _VOTE_RESPONSE, _PRE_VOTE, _PRE_VOTE_RESPONSE))


class Raft:
    """The Raft state of one member: ``RawNode`` is its interface; tests and invariants read its fields."""

    __slots__ = (
        "append_due",
        "config",
        "election_elapsed",
        "heartbeat_due",
        "heartbeat_elapsed",
        "id",
        "leader",
        "log",
        "max_uncommitted_bytes",
        "messages",
        "messages_after_append",
        "messages_to_self",
        "pending_conf_index",
        "randomized_election_ticks",
        "read_states",
        "reads",
        "rng",
        "role",
        "step_role",
        "term",
        "term_start_index",
        "tick_role",
        "tracker",
        "transferee",
        "uncommitted_bytes",
        "vote",
    )

    step_role: Callable[[Raft, Message], None]
    tick_role: Callable[[Raft], None]

    def __init__(self, config: RaftConfig, reader: LogReader, rng: random.Random) -> None:
        self.config = config
        self.id = config.id
        self.rng = rng
        self.term = 0
        self.vote = NONE
        # Who leads this term, as far as this member knows.
        self.leader = NONE
        self.role = StateRole.FOLLOWER
        page_bytes = config.max_committed_size_per_ready_bytes or config.max_size_per_message_bytes
        self.log = RaftLog(reader, max(page_bytes, 1))
        self.tracker = Tracker(config.id, config.max_inflight_messages, config.max_inflight_bytes)
        self.reads = ReadIndexQueue()
        self.read_states: list[ReadState] = []
        self.messages: list[Message] = []
        self.messages_after_append: list[Message] = []
        self.messages_to_self: list[Message] = []
        # Leader only. Appends and heartbeats are built when a Ready is taken, so that all that happened since the
        # last one leaves in one message per follower.
        self.append_due = False
        self.heartbeat_due = False
        # Leader only: index of the first entry of its term; entries from there on are its own (Figure 8).
        self.term_start_index = 0
        # Leader only: to whom leadership is being handed (thesis section 3.10).
        self.transferee = NONE
        # Leader only: no membership change may be proposed before this index is applied.
        self.pending_conf_index = 0
        # Leader only: payload appended in this term and not yet applied; an estimate that never is too high.
        self.uncommitted_bytes = 0
        self.max_uncommitted_bytes = config.max_uncommitted_bytes or NO_LIMIT
        # Ticks since the last sign of the leader (follower), or since the last round (leader, candidate).
        self.election_elapsed = 0
        self.heartbeat_elapsed = 0
        self.randomized_election_ticks = 0
        self._load(reader)

    def _load(self, reader: LogReader) -> None:
        hard_state, conf_state = reader.initial_state()
        self.tracker.switch(confchange.restore(conf_state), self.log.last_index)
        log = self.log
        if not log.committed <= hard_state.commit <= log.last_index and hard_state != HardState():
            raise InvariantError(f"commit {hard_state.commit} is outside {log.committed}..{log.last_index}")
        self.term = hard_state.term
        self.vote = hard_state.vote
        # What is applied was committed, even if the commit index (which needs no fsync) was lost in a crash.
        log.commit_to(max(hard_state.commit, self.config.applied))
        if self.config.applied > log.applied:
            log.applied_to(self.config.applied)
        self.become_follower(self.term, NONE)

    # -- roles -------------------------------------------------------------------------------------------------------

    def _reset(self, term: int) -> None:
        if term != self.term:
            self.term = term
            self.vote = NONE
        self.leader = NONE
        self.election_elapsed = 0
        self.heartbeat_elapsed = 0
        # Drawn anew for each term, so that candidates who tied do not tie again (paper section 5.2).
        ticks = self.config.election_ticks
        self.randomized_election_ticks = ticks + self.rng.randrange(ticks)
        self.transferee = NONE
        self.tracker.reset(self.log.last_index)
        self.pending_conf_index = 0
        self.uncommitted_bytes = 0
        self.reads = ReadIndexQueue()
        self.append_due = False
        self.heartbeat_due = False
        self.term_start_index = 0

    def become_follower(self, term: int, leader_id: int) -> None:
        """Become a follower.

        Arguments:
            term: the present term or a later one; a later one takes the vote back.
            leader_id: who leads it; ``NONE`` if that is not known.
        """
        self._reset(term)
        self.step_role = follower.step
        self.tick_role = follower.tick
        self.leader = leader_id
        self.role = StateRole.FOLLOWER

    def become_pre_candidate(self) -> None:
        """Become a pre-candidate, who asks whether an election could be won; term and vote stay as they are."""
        self._forbid(StateRole.LEADER, "pre-candidate")
        self.step_role = candidate.step
        self.tick_role = follower.tick
        self.tracker.votes = {}
        self.leader = NONE
        self.role = StateRole.PRE_CANDIDATE

    def become_candidate(self) -> None:
        """Become a candidate in the next term, with the own vote."""
        self._forbid(StateRole.LEADER, "candidate")
        self._reset(self.term + 1)
        self.step_role = candidate.step
        self.tick_role = follower.tick
        self.vote = self.id
        self.role = StateRole.CANDIDATE

    def become_leader(self) -> None:
        """Become the leader of the present term, beginning with an empty entry."""
        self._forbid(StateRole.FOLLOWER, "leader")
        self._reset(self.term)
        self.step_role = leader.step
        self.tick_role = leader.tick
        self.leader = self.id
        self.role = StateRole.LEADER
        own = self.tracker.progress.get(self.id)
        if own is not None:
            own.become_replicate()
            own.recent_active = True
        # There may be a membership change among the entries taken over: wait until all of them are applied.
        self.pending_conf_index = self.log.last_index
        self.term_start_index = self.log.last_index + 1
        # Committing an entry of the own term is the only way to commit those of earlier ones (section 5.4.2).
        leader.append_noop(self)

    def _forbid(self, role: StateRole, target: str) -> None:
        if self.role == role:
            raise InvariantError(f"invalid transition {role.name.lower()} -> {target}")

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Queue a message: fill in sender and term, and hold back what promises something about the disk."""
        kind = message.type
        if message.from_ == NONE:
            message.from_ = self.id
        if kind in _WITH_OWN_TERM:
            if message.term == 0:
                raise InvariantError(f"{kind.name} needs its term set")
        elif kind not in WITHOUT_TERM:
            message.term = self.term
        if kind not in _AFTER_APPEND:
            self.messages.append(message)
        elif message.to == self.id:
            self.messages_to_self.append(message)
        else:
            self.messages_after_append.append(message)

    # -- stepping ----------------------------------------------------------------------------------------------------

    def step(self, message: Message) -> None:
        """Handle a message from another member, or a promise to this member that its disk has kept.

        Raises:
            ProposalDropped, InvalidMessage, InvariantError: as of ``RawNode.step``.
        """
        term = message.term
        # Term 0: a proposal or a read that was passed on, good in any term.
        if term != self.term and term != 0 and not self._check_term(message):
            return
        kind = message.type
        # A vote is asked for: the rule is the same in every role.
        if kind in _VOTE_REQUESTS:
            self._handle_vote(message)
            return
        # A vote is refused: whatever becomes of our campaign, learn what the voter knows.
        if kind in _VOTE_ANSWERS and message.reject:
            self._learn_commit(message)
        # Everything else is a matter of the role.
        self.step_role(self, message)

    def _check_term(self, message: Message) -> bool:
        """Apply the term rules to a message of another term. Returns whether the message is still to be handled."""
        if message.term < self.term:
            self._answer_old_term(message)
            return False
        kind = message.type
        if kind in _VOTE_REQUESTS:
            in_lease = (
                self.config.check_quorum and self.leader != NONE and self.election_elapsed < self.config.election_ticks
            )
            # We heard from a leader within the lease: a candidate is likely just cut off. Neither term nor vote moves
            # (thesis section 4.2.3), unless the leader itself handed over.
            if in_lease and message.context != CAMPAIGN_TRANSFER:
                return False
        # A request for a pre-vote never moves our term.
        if kind == _PRE_VOTE:
            return True
        # A granted pre-vote comes back with the future term it was asked for.
        if kind == _PRE_VOTE_RESPONSE and not message.reject:
            return True
        # Newer term: follow. Only a leader sends these three, so we know whom; else we will learn it.
        known = kind in _FROM_LEADER
        self.become_follower(message.term, message.from_ if known else NONE)
        return True

    def _answer_old_term(self, message: Message) -> None:
        kind = message.type
        # An old leader: with leases on, it might keep us from ever taking part again, because our higher term cannot
        # reach anybody through ignored campaigns. Answering tells it our term and makes it step down.
        if kind in (_HEARTBEAT, _APPEND) and (self.config.check_quorum or self.config.pre_vote):
            self.send(Message(_APPEND_RESPONSE, to=message.from_))
        # An old pre-candidate: tell it our term, or a cluster with mixed terms could deadlock.
        elif kind == _PRE_VOTE:
            self.send(Message(_PRE_VOTE_RESPONSE, to=message.from_, term=self.term, reject=True))
        # Anything else of an old term says nothing any more.

    def _handle_vote(self, message: Message) -> None:
        pre_vote = message.type == _PRE_VOTE
        answer = _PRE_VOTE_RESPONSE if pre_vote else _VOTE_RESPONSE
        can_vote = (
            # The same vote again, its answer may have been lost;
            self.vote == message.from_
            # or no vote given, and nobody known to lead this term;
            or (self.vote == NONE and self.leader == NONE)
            # or only a question about a later term.
            or (pre_vote and message.term > self.term)
        )
        # Learners vote too: one that was promoted may not have heard of it yet, and its vote may be needed
        # (etcd issue 7625). A candidate counts only those it knows as voters.
        if can_vote and self.log.is_up_to_date(message.index, message.log_term):
            # The term of the request, not ours: for a pre-vote they differ, and the asker would drop an old one.
            self.send(Message(answer, to=message.from_, term=message.term))
            if not pre_vote:
                self.election_elapsed = 0
                self.vote = message.from_
        else:
            log = self.log
            self.send(
                Message(
                    answer,
                    to=message.from_,
                    term=self.term,
                    reject=True,
                    commit=log.committed,
                    log_term=log.term_or_zero(log.committed),
                )
            )

    def _learn_commit(self, message: Message) -> None:
        """Take over the commit index that a rejected vote tells, if we hold the entry.

        Without this a change of membership can deadlock: a leader removes itself, everybody who knows that the change
        is committed is no voter any more, and the voters that are left cannot be elected by the old configuration,
        because the removed members' logs are longer. (raft-rs learns commits from votes for the same reason; etcd
        does not, and advises to keep removed members away from two-member clusters.) That an entry is committed is a
        fact in every term, so the sender's term does not matter.
        """
        log = self.log
        # A leader has nothing to learn: it commits by its own count.
        if self.role == StateRole.LEADER or message.commit <= log.committed:
            return
        if not log.matches(message.commit, message.log_term):
            return
        log.commit_to(message.commit)
        # The votes may have been counted by an old configuration: apply first, then campaign again.
        if self.role in _CANDIDATES and candidate.has_unapplied_conf_change(self):
            self.become_follower(self.term, NONE)

    # -- progress of this member -------------------------------------------------------------------------------------

    def promotable(self) -> bool:
        """Return whether this member may stand for election: a voter with a complete log."""
        own = self.tracker.progress.get(self.id)
        return own is not None and not own.is_learner and self.log.unstable.snapshot is None

    def applied_to(self, index: int) -> None:
        """Note that the caller has applied everything up to ``index``."""
        log = self.log
        payload = log.applied_to(max(index, log.applied))
        self.uncommitted_bytes = max(self.uncommitted_bytes - payload, 0)
        # A joint configuration that leaves by itself does so once the change that entered it is applied. The check is
        # repeated at each call, because a transfer in progress may refuse the proposal for now.
        if self.tracker.config.auto_leave and self.role == StateRole.LEADER and log.applied >= self.pending_conf_index:
            leader.leave_joint(self)

    def installed_snapshot(self, index: int) -> None:
        """Note that the snapshot at ``index`` is durable and in the caller's state machine."""
        self.log.unstable.snapshot_stable_to(index)
        self.applied_to(index)

    # -- membership --------------------------------------------------------------------------------------------------

    def apply_conf_change(self, change: ConfChange) -> ConfState:
        """Switch to the configuration after a change, and return it.

        Raises:
            ConfChangeError: the change is illegal on the present configuration.
        """
        return self.switch_to(confchange.apply(self.tracker.config, change))

    def switch_to(self, config: Configuration) -> ConfState:
        """Take over a configuration, with all that follows from it for a leader, and return it."""
        self.tracker.switch(config, self.log.last_index)
        state = config.conf_state()
        if self.role != StateRole.LEADER:
            return state
        own = self.tracker.progress.get(self.id)
        # Removed or demoted: another must lead now.
        if own is None or own.is_learner:
            if self.config.step_down_on_removal:
                self.become_follower(self.term, NONE)
            return state
        leader.after_conf_change(self)
        return state
