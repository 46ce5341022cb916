"""Raft as one state machine: terms, votes, the four roles, and what a leader sends.

A pure function of its inputs: the only randomness comes from the random number generator that the caller passes.

Roles (paper section 5.2; PRE_CANDIDATE is thesis section 9.6)::

      timeout            a quorum would vote       a quorum voted
    FOLLOWER ──► PRE_CANDIDATE ──► CANDIDATE ──► LEADER
       ▲               │               │            │
       └───────────────┴───────────────┴────────────┘   higher term, a lost election, or no quorum heard from

A pre-candidate asks whether it *would* get votes in the next term, and raises its term only if a quorum says yes. So a
member that returns from a partition with an old log cannot depose a working leader.
A leader counts its own log like a follower's: its match index moves when its own disk has the entries, so a commit
index never depends on anything that a crash could undo. A leader commits by counting only entries of its own term
(Figure 8, section 5.4.2). A leader does not send while it handles a message or a proposal; it sets ``append_due`` or
``heartbeat_due``, and ``flush`` builds the messages when a Ready is taken, so the proposals, acknowledgements and reads
of one turn leave in one append and one heartbeat per follower. Only messages that concern one follower (a probe after a
rejection, a nudge after a heartbeat response) are queued at once. Members are visited in order of id, so that equal
inputs give equal messages.

Three queues of messages, emptied by ``RawNode.ready``

- ``messages`` may leave at once, in parallel with the disk.
- ``messages_after_append`` depend on this member's disk: votes, responses to appends, and vote requests (a candidate
  that forgets its term or its log in a crash must not be able to use the votes that it gets).
- ``messages_to_self`` are the same kinds of messages to this member itself: its own vote, and a leader's
  acknowledgement of its own entries. They are stepped when the disk has confirmed.

A linearizable read is confirmed by a round of heartbeats, or served at once while the leader's lease holds
(``read_lease``, which also holds back the commits of a new leader).

THE INTERFACE (``RawNode``)

Inputs go in as calls, work comes out as ``Ready``. The duties of the caller are the numbered list at the head of
``raftkv/raft/__init__.py``. Not thread-safe, never blocks, does no IO; equal calls in equal order give equal results.

WRITES THAT OVERLAP

Several Readys may be in flight to the disk. Each one with something for the disk, or with messages that wait for it,
gets a number; the caller confirms them in that order (``on_append_durable``). After the confirmation, entries leave the
unstable tail, and the core reads them from the ``MemoryLog``. When is that safe? Take entries 5 and 6:

    Ready 1, term 1   write 5' 6'        from leader A
    Ready 2, term 2   write 5" 6"        leader C overwrote them
    Ready 3, term 3   write 5' 6'        A leads again and sends the same entries as before

When write 1 is confirmed, index and term of the unstable tail equal those of Ready 1, yet write 2 is still going to
overwrite them on the disk. So a confirmation counts only if the *member's term* has not changed since its Ready was
taken: then the log was not truncated meanwhile. So that no entry stays in the tail for ever, each Ready confirms the
whole current tail, not only its own entries; a change of term always makes a Ready (the term must be saved).
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr

from . import confchange
from .confchange import Configuration
from .describe import Status, status_of
from .errors import (
    DROPPED_FORWARDING_DISABLED,
    DROPPED_NO_LEADER,
    DROPPED_NOT_MEMBER,
    DROPPED_TRANSFER,
    DROPPED_UNCOMMITTED_LIMIT,
    CompactedError,
    ConfChangeError,
    ForkError,
    InvalidMessage,
    InvariantError,
    ProposalDropped,
    SnapshotTemporarilyUnavailable,
    StepLocalMessage,
    StepPeerNotFound,
)
from .log import REJECTED, MemoryLog, RaftLog
from .read_lease import LEASE_NS, ReadLease
from .tracker import PROBE, REPLICATE, SNAPSHOT, Progress, ReadIndexQueue, ReadRequest, Tracker, VoteResult
from .types import (
    NO_LIMIT,
    NONE,
    ConfChange,
    ConfState,
    Entry,
    EntryType,
    HardState,
    Message,
    MessageType,
    RaftConfig,
    ReadState,
    Ready,
    SnapshotMeta,
    SoftState,
    StateRole,
)

_APPEND: Final = MessageType.APPEND
_APPEND_RESPONSE: Final = MessageType.APPEND_RESPONSE
_HEARTBEAT: Final = MessageType.HEARTBEAT
_HEARTBEAT_RESPONSE: Final = MessageType.HEARTBEAT_RESPONSE
_PRE_VOTE: Final = MessageType.PRE_VOTE
_PRE_VOTE_RESPONSE: Final = MessageType.PRE_VOTE_RESPONSE
_SNAPSHOT: Final = MessageType.SNAPSHOT
_VOTE: Final = MessageType.VOTE
_VOTE_RESPONSE: Final = MessageType.VOTE_RESPONSE
_NORMAL: Final = EntryType.NORMAL

_VOTE_REQUESTS: Final = frozenset((_VOTE, _PRE_VOTE))
_VOTE_ANSWERS: Final = frozenset((_VOTE_RESPONSE, _PRE_VOTE_RESPONSE))
_CANDIDATES: Final = frozenset((StateRole.CANDIDATE, StateRole.PRE_CANDIDATE))
_FROM_LEADER: Final = frozenset((_APPEND, _HEARTBEAT, _SNAPSHOT))
_AFTER_APPEND: Final = frozenset((_APPEND_RESPONSE, _VOTE, _VOTE_RESPONSE, _PRE_VOTE_RESPONSE))
# Proposals and reads are forwarded to the leader of any term, so they carry no term.
WITHOUT_TERM: Final = frozenset((MessageType.PROPOSE, MessageType.READ_INDEX))
"""Message kinds that may have term 0."""
_WITH_OWN_TERM: Final = frozenset((_VOTE, _VOTE_RESPONSE, _PRE_VOTE, _PRE_VOTE_RESPONSE))

CAMPAIGN_TRANSFER: Final = b"CampaignTransfer"
"""Context of the vote requests of a leadership transfer: the leader itself requested it, so voters grant it at once."""

LEASED: Final = b"Leased"
"""Context of APPEND: a read lease may depend on its entries (``read_lease``)."""

LEASE_GIVEN_UP: Final = b"LeaseGivenUp"
"""Context of TIMEOUT_NOW: the leader serves no more reads with its read lease (``read_lease``)."""


class Campaign(enum.Enum):
    """The kinds of campaign: a pre-election, an election, or an election that the leader requested (transfer)."""

    PRE_ELECTION = "pre-election"
    ELECTION = "election"
    TRANSFER = "transfer"


class Raft:
    """The Raft state of one member: ``RawNode`` is its interface; tests and invariants read its fields."""

    def __init__(
        self, config: RaftConfig, reader: MemoryLog, rng: random.Random, clock_ns: Callable[[], int] | None = None
    ) -> None:
        self.config = config
        self.id = config.id
        self.rng = rng
        self.term = 0
        self.vote = NONE
        # The leader of this term, if known.
        self.leader = NONE
        self.role = StateRole.FOLLOWER
        page_bytes = config.max_committed_size_per_ready_bytes or config.max_size_per_message_bytes
        self.log = RaftLog(reader, max(page_bytes, 1))
        self.tracker = Tracker(config.id, config.max_inflight_messages, config.max_inflight_bytes)
        self.reads = ReadIndexQueue()
        self.lease = ReadLease(clock_ns, config.starts_within_lease)
        self.read_states: list[ReadState] = []
        self.messages: list[Message] = []
        self.messages_after_append: list[Message] = []
        self.messages_to_self: list[Message] = []
        # Leader only. Appends and heartbeats are built when a Ready is taken, so that everything since the last Ready
        # leaves in one message per follower.
        self.append_due = False
        self.heartbeat_due = False
        # Leader only: index of the first entry of its term; entries from there on are its own (Figure 8).
        self.term_start_index = 0
        # Leader only: target of a leadership transfer in progress (thesis section 3.10).
        self.transferee = NONE
        # Leader only: no membership change may be proposed before this index is applied.
        self.pending_conf_index = 0
        # Leader only: payload appended in this term and not yet applied; an estimate that is never too high.
        self.uncommitted_bytes = 0
        self.max_uncommitted_bytes = config.max_uncommitted_bytes or NO_LIMIT
        # Ticks since the last message of the leader (follower), or since the last round (leader, candidate).
        self.election_elapsed = 0
        self.heartbeat_elapsed = 0
        self.randomized_election_ticks = 0
        self._load(reader)

    def _load(self, reader: MemoryLog) -> None:
        hard_state, conf_state = reader.hard_state, reader.conf_state
        self.tracker.switch(confchange.restore(conf_state), self.log.last_index)
        log = self.log
        if not log.committed <= hard_state.commit <= log.last_index and hard_state != HardState():
            raise InvariantError(f"commit {hard_state.commit} is outside {log.committed}..{log.last_index}")
        self.term = hard_state.term
        self.vote = hard_state.vote
        # Applied entries were committed, even if a crash lost the commit index (which needs no fsync).
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
        # Chosen again for each term, so that candidates who tied do not tie again (paper section 5.2).
        ticks = self.config.election_ticks
        self.randomized_election_ticks = ticks + self.rng.randrange(ticks)
        self.transferee = NONE
        self.tracker.reset(self.log.last_index, self.log.committed)
        self.pending_conf_index = 0
        self.uncommitted_bytes = 0
        self.reads = ReadIndexQueue()
        self.append_due = False
        self.heartbeat_due = False
        self.term_start_index = 0

    def become_follower(self, term: int, leader_id: int) -> None:
        """Become a follower.

        Arguments:
            term: the current term or a later one; a later one clears the vote.
            leader_id: leader of that term; ``NONE`` if unknown.
        """
        self._reset(term)
        self.leader = leader_id
        self.role = StateRole.FOLLOWER

    def become_pre_candidate(self) -> None:
        """Become a pre-candidate, which asks whether it could win an election; term and vote stay unchanged."""
        self._forbid(StateRole.LEADER, "pre-candidate")
        self.tracker.votes = {}
        self.leader = NONE
        self.role = StateRole.PRE_CANDIDATE

    def become_candidate(self) -> None:
        """Become a candidate in the next term, and vote for itself."""
        self._forbid(StateRole.LEADER, "candidate")
        self._reset(self.term + 1)
        self.vote = self.id
        self.role = StateRole.CANDIDATE

    def become_leader(self) -> None:
        """Become the leader of the current term, and append its first, empty entry."""
        self._forbid(StateRole.FOLLOWER, "leader")
        self._reset(self.term)
        self.leader = self.id
        self.role = StateRole.LEADER
        # Those of earlier terms too: else a log that no quorum stores would grow by the limit with each election.
        self.uncommitted_bytes = self.log.unreported_bytes()
        own = self.tracker.progress.get(self.id)
        if own is not None:
            own.become_replicate()
            own.recent_active = True
        # The existing log may contain a membership change: wait until all of it is applied.
        self.pending_conf_index = self.log.last_index
        self.term_start_index = self.log.last_index + 1
        self.lease.begin(self.term)
        # Entries of earlier terms can be committed only by committing an entry of the own term (section 5.4.2).
        self._append_noop()

    def _forbid(self, role: StateRole, target: str) -> None:
        if self.role == role:
            raise InvariantError(f"invalid transition {role.name.lower()} -> {target}")

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Queue a message: set sender and term, and hold it back if it depends on this member's disk."""
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

    def tick(self) -> None:
        """Let one tick of time pass."""
        if self.role == StateRole.LEADER:
            self._tick_leader()
        else:
            self._tick_follower()

    def step(self, message: Message) -> None:
        """Handle a message from another member, or one to this member itself after its disk has confirmed.

        Raises:
            ProposalDropped, InvalidMessage, InvariantError: as in ``RawNode.step``.
        """
        term = message.term
        # Term 0: a forwarded proposal or read, valid in any term.
        if term != self.term and term != 0 and not self._check_term(message):
            return
        kind = message.type
        # A vote request: the rule is the same in every role.
        if kind in _VOTE_REQUESTS:
            self._handle_vote(message)
            return
        # A refused vote: learn the voter's commit index, whether or not we win.
        if kind in _VOTE_ANSWERS and message.reject:
            self._learn_commit(message)
        # Everything else depends on the role.
        if self.role == StateRole.LEADER:
            self._step_leader(message)
        elif self.role == StateRole.FOLLOWER:
            self._step_follower(message)
        else:
            self._step_candidate(message)

    def _check_term(self, message: Message) -> bool:
        """Apply the term rules to a message of another term. Return whether the message must still be handled."""
        if message.term < self.term:
            self._answer_old_term(message)
            return False
        kind = message.type
        if kind == _VOTE or kind in _FROM_LEADER:
            self._note_vote(message)  # candidates vote for themselves
        if kind in _VOTE_REQUESTS:
            in_lease = (
                self.config.check_quorum and self.leader != NONE and self.election_elapsed < self.config.election_ticks
            )
            # We heard from a leader within the lease: the candidate was probably just cut off. Neither term nor vote
            # changes (thesis section 4.2.3), unless the leader itself handed over.
            if in_lease and message.context != CAMPAIGN_TRANSFER:
                return False
        # A pre-vote request never changes our term.
        if kind == _PRE_VOTE:
            return True
        # A granted pre-vote has the future term of its request.
        if kind == _PRE_VOTE_RESPONSE and not message.reject:
            return True
        # Newer term: follow. Only a leader sends these three kinds, so the leader is known; else we learn it later.
        known = kind in _FROM_LEADER
        self.become_follower(message.term, message.from_ if known else NONE)
        return True

    def _answer_old_term(self, message: Message) -> None:
        kind = message.type
        # An old leader: with leases on, we might never rejoin, because members ignore our campaigns and so never learn
        # our higher term. The response tells the leader our term and makes it step down.
        if kind in (_HEARTBEAT, _APPEND) and (self.config.check_quorum or self.config.pre_vote):
            self.send(Message(_APPEND_RESPONSE, to=message.from_))
        # An old pre-candidate: tell it our term, otherwise a cluster with mixed terms could deadlock.
        elif kind == _PRE_VOTE:
            self.send(Message(_PRE_VOTE_RESPONSE, to=message.from_, term=self.term, reject=True))
        # Any other message of an old term is ignored.

    # -- elections ---------------------------------------------------------------------------------------------------

    def _tick_follower(self) -> None:
        """Count one tick of a follower or candidate; campaign after the timeout."""
        self.election_elapsed += 1
        if self.election_elapsed >= self.randomized_election_ticks and self.promotable():
            self.election_elapsed = 0
            self.campaign()

    def campaign(self) -> None:
        """Campaign as after a timeout: with a pre-election first, if that is configured."""
        self._campaign_if_eligible(Campaign.PRE_ELECTION if self.config.pre_vote else Campaign.ELECTION)

    def _campaign_if_eligible(self, campaign_kind: Campaign) -> None:
        """Campaign, if this member may.

        Arguments:
            campaign_kind: kind of campaign.
        """
        # A leader need not campaign.
        if self.role == StateRole.LEADER:
            return
        # Not a voter, or waiting for a snapshot.
        if not self.promotable():
            return
        # The configuration for counting votes is out of date (etcd issue 7625): apply first.
        if self._has_unapplied_conf_change():
            return
        self._start_campaign(campaign_kind)

    def _has_unapplied_conf_change(self) -> bool:
        """Return whether a committed membership change is not applied here yet."""
        log = self.log
        low = log.applied + 1
        while low <= log.committed:
            page = log.entries(low, log.committed + 1, log.max_applying_bytes)
            if any(confchange.is_conf_change(entry) for entry in page):
                return True
            low += len(page)
        return False

    def _start_campaign(self, campaign_kind: Campaign) -> None:
        """Become a (pre-)candidate and request every voter's vote; the own vote counts once it is durable.

        Arguments:
            campaign_kind: a pre-election asks about the next term without entering it; the others enter it.
        """
        if campaign_kind is Campaign.PRE_ELECTION:
            self.become_pre_candidate()
            # The request is about the next term, which we have not entered yet.
            request, answer, term = MessageType.PRE_VOTE, _PRE_VOTE_RESPONSE, self.term + 1
        else:
            self.become_candidate()
            request, answer, term = MessageType.VOTE, _VOTE_RESPONSE, self.term
        context = CAMPAIGN_TRANSFER if campaign_kind is Campaign.TRANSFER else b""
        log = self.log
        for voter in sorted(self.tracker.config.all_voters()):
            if voter == self.id:
                self.send(Message(answer, to=voter, term=term))
            else:
                self.send(
                    Message(request, to=voter, term=term, log_term=log.last_term, index=log.last_index, context=context)
                )

    def _step_candidate(self, message: Message) -> None:
        """Handle a message of the current term (or a granted pre-vote for the next one).

        Arguments:
            message: of any kind but a request for a vote, which ``Raft.step`` answers in every role.

        Raises:
            ProposalDropped: a proposal, because there is no leader to forward it to.
        """
        kind = message.type
        is_pre_election = self.role == StateRole.PRE_CANDIDATE
        # Votes count only for the current election: a late pre-vote is not a vote, and one that was granted for this
        # term was asked for in an earlier pre-election. (etcd counts it: found by comparing traces with the
        # specification.)
        if kind == (_PRE_VOTE_RESPONSE if is_pre_election else _VOTE_RESPONSE):
            if message.reject or not is_pre_election or message.term > self.term:
                self._count_vote(message)
        # This term has a leader: follow it, and handle the message in the new role.
        elif kind in _FROM_LEADER:
            self.become_follower(message.term, message.from_)
            self._step_follower(message)
        # There is no leader to forward a proposal to.
        elif kind == MessageType.PROPOSE:
            raise ProposalDropped(DROPPED_NO_LEADER)

    def _count_vote(self, message: Message) -> None:
        self.tracker.record_vote(message.from_, not message.reject)
        if message.type == _VOTE_RESPONSE and not message.reject:
            self._note_vote(message)
        result = self.tracker.vote_result()
        if result is VoteResult.WON:
            # A quorum would vote for us: start the real election.
            if self.role == StateRole.PRE_CANDIDATE:
                self._start_campaign(Campaign.ELECTION)
            else:
                self.become_leader()
        # A quorum refused. The term is still ours: the term rule handled a rejected pre-vote with a higher one.
        elif result is VoteResult.LOST:
            self.become_follower(self.term, NONE)

    def _note_vote(self, message: Message) -> None:
        progress = self.tracker.progress.get(message.from_)
        if progress is not None:
            progress.voted_term = max(progress.voted_term, message.term)

    def promised(self, id: int) -> tuple[int, int]:
        """Return the last term in which a member voted, and the last committed entry that it acknowledged.

        Both were durable on that member. Only what this process received counts; 0 if there was nothing.
        """
        progress = self.tracker.progress.get(id)
        if progress is None:
            return 0, 0
        return progress.voted_term, max(progress.acknowledged, min(progress.match, self.log.committed))

    def _handle_vote(self, message: Message) -> None:
        pre_vote = message.type == _PRE_VOTE
        answer = _PRE_VOTE_RESPONSE if pre_vote else _VOTE_RESPONSE
        can_vote = (
            # The same vote again, because its response may have been lost;
            self.vote == message.from_
            # or no vote given, and no leader of this term known;
            or (self.vote == NONE and self.leader == NONE)
            # or only a pre-vote about a later term.
            or (pre_vote and message.term > self.term)
        )
        # Learners vote too: a promoted learner may not know of its promotion yet, and its vote may be needed
        # (etcd issue 7625). A candidate counts only the votes of members that it knows as voters.
        if can_vote and self.log.is_up_to_date(message.index, message.log_term):
            # The term of the request, not ours: for a pre-vote they differ, and the sender would drop an old term.
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
        """Take over the commit index in a rejected vote, if we hold that entry.

        Without this, a membership change can deadlock: a leader removes itself; all members that know that the change
        is committed are no longer voters; and the remaining voters cannot be elected in the old configuration, because
        the removed members' logs are longer. (raft-rs learns commits from votes for the same reason; etcd does not, and
        advises to keep removed members away from two-member clusters.) A committed entry is committed in every term, so
        the sender's term does not matter.
        """
        log = self.log
        # A leader has nothing to learn: it commits by counting itself.
        if self.role == StateRole.LEADER or message.commit <= log.committed:
            return
        if not log.matches(message.commit, message.log_term):
            return
        log.commit_to(message.commit)
        # The votes may have been counted with an old configuration: apply first, then campaign again.
        if self.role in _CANDIDATES and self._has_unapplied_conf_change():
            self.become_follower(self.term, NONE)

    # -- following ---------------------------------------------------------------------------------------------------

    def _step_follower(self, message: Message) -> None:
        """Handle a message of the current term, or one without a term.

        Arguments:
            message: of any kind but a request for a vote, which ``Raft.step`` answers in every role.

        Raises:
            ProposalDropped: a proposal that cannot be forwarded.
        """
        kind = message.type
        # The leader appends: reset the election timer, take the entries.
        if kind == _APPEND:
            self.election_elapsed = 0
            self.leader = message.from_
            self._handle_append(message)
        # The leader is alive.
        elif kind == _HEARTBEAT:
            self.election_elapsed = 0
            self.leader = message.from_
            self._handle_heartbeat(message)
        # Proposals go to the leader.
        elif kind == MessageType.PROPOSE:
            self._forward_proposal(message)
        # So do reads; without a leader they are lost, and the caller must retry.
        elif kind == MessageType.READ_INDEX:
            self._forward_to_leader(message)
        # The leader answers one of our reads.
        elif kind == MessageType.READ_INDEX_RESPONSE:
            self.read_states.append(ReadState(message.index, message.context))
        # The leader sends a snapshot.
        elif kind == MessageType.SNAPSHOT:
            self.election_elapsed = 0
            self.leader = message.from_
            self._handle_snapshot(message)
        # Only the leader can transfer leadership.
        elif kind == MessageType.TRANSFER_LEADER:
            self._forward_to_leader(message)
        # The leader hands over to us: campaign at once, without a pre-vote, because this member is not partitioned.
        elif kind == MessageType.TIMEOUT_NOW:
            if message.context == LEASE_GIVEN_UP:
                self.lease.released(self.term)
            self._campaign_if_eligible(Campaign.TRANSFER)

    def forget_leader(self) -> None:
        """Act as if no leader were known, so that a pre-vote can be granted at once (etcd's ForgetLeader)."""
        self.leader = NONE

    def _forward_proposal(self, message: Message) -> None:
        if self.leader == NONE:
            raise ProposalDropped(DROPPED_NO_LEADER)
        if self.config.disable_proposal_forwarding:
            raise ProposalDropped(DROPPED_FORWARDING_DISABLED)
        self._forward_to_leader(message)

    def _forward_to_leader(self, message: Message) -> None:
        if self.leader == NONE:
            return
        # A new message, because the caller's is never changed. It keeps the sender, to whom the leader responds.
        self.send(
            Message(message.type, to=self.leader, from_=message.from_, entries=message.entries, context=message.context)
        )

    def _handle_append(self, message: Message) -> None:
        """Append the leader's entries if they follow the log here (paper section 5.3); respond once durable.

        A quiet append without entries gets no response: the leader would learn nothing from it.

        Arguments:
            message: an APPEND.

        Raises:
            InvalidMessage: its entries are not contiguous.
            ForkError: an entry differs from a committed one.
        """
        log = self.log
        index = message.index
        # Everything up to the commit index matches already; respond with it instead of comparing all.
        if index < log.committed:
            self._check_fork(index, message.log_term)
            for entry in message.entries[: log.committed - index]:
                self._check_fork(entry.index, entry.term, entry)
            self.send(Message(_APPEND_RESPONSE, message.from_, self.id, index=log.committed))
            return
        last_new = log.maybe_append(index, message.log_term, message.entries, message.commit)
        if last_new != REJECTED:
            if message.entries and message.context == LEASED:
                self.lease.received()
            if message.quiet and not message.entries:
                return
            self.send(Message(_APPEND_RESPONSE, message.from_, self.id, index=last_new))
            return
        self._check_fork(index, message.log_term)
        # Tell the leader the latest position where the logs may match: not after index, not above the requested term.
        # So it skips the uncommitted tail of another leader term by term instead of entry by entry.
        hint, hint_term = log.find_conflict_by_term(min(index, log.last_index), message.log_term)
        self.send(
            Message(
                _APPEND_RESPONSE, message.from_, self.id, log_term=hint_term, index=index, reject=True, reject_hint=hint
            )
        )

    def _handle_heartbeat(self, message: Message) -> None:
        """Take over the commit index (which the leader limits to the matching part) and confirm the leader's reads.

        Arguments:
            message: a HEARTBEAT.
        """
        self.log.commit_to(message.commit)
        self.messages.append(Message(_HEARTBEAT_RESPONSE, message.from_, self.id, self.term, context=message.context))

    def _check_fork(self, index: int, term: int, entry: Entry | None = None) -> None:
        """Raise ForkError if the leader cannot have the entries that are committed here.

        Terms only grow along a log, so those around entries that are compacted, or not committed yet, may show it too.

        Arguments:
            index, term: index and term of the leader's entry.
            entry: that entry, if it was sent: two leaders may have had the same term if a member lost its vote.
        """
        log = self.log
        near = max(min(index, log.committed), log.first_index() - 1)
        known = log.term_or_zero(near)
        if known == 0:
            return
        is_kept = entry is not None and log.first_index() <= index == near
        differs = term != known if index == near else term > known if index < near else term < known
        if differs or (is_kept and log.entries(index, index + 1, 0) != [entry]):
            raise ForkError(
                f"entry {near} of term {known} was committed here, and {self.leader:x}, which leads in term "
                f"{self.term}, has one of term {term} at {index}: other members lost acknowledged writes, which this "
                "one may have"
            )

    def _handle_snapshot(self, message: Message) -> None:
        """Start again from the leader's snapshot, unless this member is ahead of it; respond once it is installed.

        Arguments:
            message: a SNAPSHOT whose data has arrived (duty 10 of the caller).
        """
        log = self.log
        restored = message.snapshot is not None and self._restore(message.snapshot)
        index = log.last_index if restored else log.committed
        self.send(Message(_APPEND_RESPONSE, message.from_, self.id, index=index))

    def _restore(self, snapshot: SnapshotMeta) -> bool:
        """Replace log and configuration by those of a snapshot.

        Arguments:
            snapshot: the leader's snapshot.

        Returns:
            ``False`` when the snapshot cannot be used, or not yet.

        Raises:
            InvalidMessage: no member can have made this snapshot.
            ForkError: its last entry differs from a committed one.
        """
        log = self.log
        self._check_fork(snapshot.index, snapshot.term)
        # We have committed at least as much: the snapshot has nothing new.
        if snapshot.index <= log.committed:
            return False
        if self.role != StateRole.FOLLOWER:
            raise InvariantError(f"snapshot restored by a {self.role.name.lower()}")
        try:
            config = confchange.restore(snapshot.conf_state)
        except ConfChangeError as error:
            raise InvalidMessage(f"a snapshot of members that cannot be: {error}") from None
        # We are not a member in this snapshot, so it is not for us.
        if self.id not in config.members():
            return False
        # Our log has this entry, hence all before it: commit it, and keep the rest of the log.
        if log.matches(snapshot.index, snapshot.term):
            log.commit_to(snapshot.index)
            return False
        # Membership changes that were returned in a Ready but are not applied yet must not be applied to the snapshot's
        # configuration. They will be applied soon; the leader sends the snapshot again.
        if log.applying > log.applied:
            return False
        log.restore(snapshot)
        self.lease.received()
        self.switch_to(config)
        return True

    # -- leading -----------------------------------------------------------------------------------------------------

    def _tick_leader(self) -> None:
        """Count one tick: check the quorum every election timeout, send heartbeats every heartbeat interval."""
        self.heartbeat_elapsed += 1
        self.election_elapsed += 1
        if self.election_elapsed >= self.config.election_ticks:
            self.election_elapsed = 0
            if self.config.check_quorum:
                self._check_quorum()
            # A transfer that took longer than an election timeout is cancelled: proposals are accepted again.
            if self.role == StateRole.LEADER:
                self.transferee = NONE
        if self.role == StateRole.LEADER and self.heartbeat_elapsed >= self.config.heartbeat_ticks:
            self.heartbeat_elapsed = 0
            self.heartbeat_due = True
        # All acknowledgements may have arrived while the lease of another leader held.
        if self.role == StateRole.LEADER and self.lease.wait_until_ns:
            self._maybe_commit()

    def _check_quorum(self) -> None:
        """Step down if no quorum was heard from since the last check (thesis section 6.2); start a new period."""
        if not self.tracker.quorum_active():
            self.become_follower(self.term, NONE)
        for _, progress in self.tracker.peers:
            progress.recent_active = False

    def _step_leader(self, message: Message) -> None:
        """Handle a message of the current term, or one without a term.

        Arguments:
            message: of any kind but a request for a vote, which ``Raft.step`` answers in every role.

        Raises:
            ProposalDropped: a forwarded proposal that cannot be appended now.
            InvariantError: another member leads the same term.
        """
        kind = message.type
        # A follower (or our own disk) responds to an append.
        if kind == _APPEND_RESPONSE:
            progress = self.tracker.progress.get(message.from_)
            if progress is not None:
                self._handle_append_response(message, progress)
        # A follower responds to a heartbeat.
        elif kind == _HEARTBEAT_RESPONSE:
            progress = self.tracker.progress.get(message.from_)
            if progress is not None:
                self._handle_heartbeat_response(message, progress)
        # Entries to append, forwarded by a follower.
        elif kind == MessageType.PROPOSE:
            self._propose(message.entries)
        # A read, our own or a forwarded one.
        elif kind == MessageType.READ_INDEX:
            self._begin_read(ReadRequest(message.from_, message.context))
        # A request that message.from_ becomes the leader.
        elif kind == MessageType.TRANSFER_LEADER:
            self._transfer(message.from_)
        # Anything else is for another role, or late. (Another leader's append in our term is impossible.)
        elif kind in (MessageType.APPEND, MessageType.HEARTBEAT, MessageType.SNAPSHOT):
            raise InvariantError(f"two leaders in term {self.term}: {self.id} and {message.from_}")

    def _handle_append_response(self, message: Message, progress: Progress) -> None:
        progress.recent_active = True
        log = self.log
        index = message.index
        # The logs do not match there: probe where they may match.
        if message.reject:
            self._handle_rejection(message, progress)
            return
        # A faulty follower, or one whose data is newer than that of a quorum: it stops itself when it sees the fork.
        # A leader that stopped would leave the same choice to the next one.
        if index > log.last_index:
            raise InvalidMessage(f"it acknowledges entry {index}, and this leader's log ends at {log.last_index}")
        # Nothing new, except that a probed follower at its known match shows that it is reachable again.
        if not progress.maybe_update(index) and not (progress.match == index and progress.state is PROBE):
            return
        if progress.state is REPLICATE:
            progress.inflights.free_to(index)
        elif progress.state is PROBE:
            progress.become_replicate()
        # The log reaches back to the snapshot that the follower installed (perhaps not ours), so stream again.
        elif progress.state is SNAPSHOT and progress.match + 1 >= log.first_index():
            progress.become_probe()
            progress.become_replicate()
        # Only a match beyond the commit index can move it; if it moves, send the new one to every follower.
        if index > log.committed:
            self._maybe_commit()
        if message.from_ == self.id:
            return
        # The window has room again, or the follower does not know the commit index yet.
        if progress.next <= log.last_index or progress.can_bump_commit(log.committed):
            self.append_due = True
        # The target has all entries: complete the transfer.
        if message.from_ == self.transferee and progress.match == log.last_index:
            self._send_timeout_now(message.from_)

    def _handle_rejection(self, message: Message, progress: Progress) -> None:
        probe = message.reject_hint
        # The follower names the latest position where it can match, and its term there; in our log, entries of a higher
        # term cannot match either. Together this needs at most one probe per term (etcd-io/raft pull 11964).
        if message.log_term > 0:
            probe, _ = self.log.find_conflict_by_term(probe, message.log_term)
        if progress.maybe_decrement(message.index, probe):
            if progress.state is REPLICATE:
                progress.become_probe()
            self._maybe_send_append(message.from_, progress, send_if_empty=True)

    def _handle_heartbeat_response(self, message: Message, progress: Progress) -> None:
        progress.recent_active = True
        progress.paused = False
        # The follower lags, or may have missed a probe: nudge it. With a full window the nudge is empty, and its
        # response will open the window if everything else was lost.
        if progress.match < self.log.last_index or progress.state is PROBE:
            self._maybe_send_append(message.from_, progress, send_if_empty=True)
        if message.context:
            self.reads.acknowledge(message.from_, message.context)
            self._answer_confirmed_reads()

    def _maybe_commit(self) -> bool:
        """Advance the commit index to the last entry held by a quorum; return whether it moved."""
        log = self.log
        index = self.tracker.committed()
        # Entries of earlier terms are committed only together with one of our own: counting them alone is unsafe
        # (Figure 8).
        if index <= log.committed or index < self.term_start_index:
            return False
        lease = self.lease
        if lease.wait_until_ns and lease.must_wait():
            return False
        log.commit_to(index)
        if lease.allowed:
            lease.committed(index)
        self.append_due = True
        # The first commit of the term: now we know what earlier leaders committed, and can serve reads.
        if self.reads.deferred:
            for request in self.reads.take_deferred():
                self._queue_read(request)
        return True

    def _has_committed_in_term(self) -> bool:
        """Return whether an entry of this leader's own term is committed."""
        return self.log.committed >= self.term_start_index

    # -- proposing ---------------------------------------------------------------------------------------------------

    def _append_noop(self) -> None:
        """Append the empty entry of a new leader."""
        self._append([Entry(self.term, self.log.last_index + 1)])

    def propose_datas(self, datas: list[bytes]) -> None:
        """Append one normal entry for each of ``datas``, all or none.

        Arguments:
            datas: payload of each entry.

        Raises:
            ProposalDropped: nothing was appended; ``reason`` explains why.
        """
        self._check_may_propose()
        size = sum(map(len, datas))
        self._check_uncommitted(size)
        term = self.term
        first = self.log.last_index + 1
        self._append([Entry(term, index, data) for index, data in enumerate(datas, first)])
        self.uncommitted_bytes += size

    def _propose(self, entries: list[Entry]) -> None:
        """Append copies of entries, all or none; a membership change that is not allowed now becomes an empty entry.

        Arguments:
            entries: only their data and types are used; term and index are set here.

        Raises:
            ProposalDropped: nothing was appended; ``reason`` explains why.
        """
        if not entries:
            return
        self._check_may_propose()
        term = self.term
        first = self.log.last_index + 1
        copies = [Entry(term, index, entry.data, entry.type) for index, entry in enumerate(entries, first)]
        pending = self.pending_conf_index
        for entry in [each for each in copies if each.type != _NORMAL]:
            # A change that is not allowed becomes an empty entry: its proposer sees it applied without effect.
            if self._conf_change_refusal(entry, pending):
                entry.data = b""
                entry.type = _NORMAL
            else:
                pending = entry.index
        # Count the entries as they are appended, because a refused change would never be subtracted again.
        size = sum([len(entry.data) for entry in copies])
        self._check_uncommitted(size)
        self.pending_conf_index = pending
        self._append(copies)
        self.uncommitted_bytes += size

    def _check_may_propose(self) -> None:
        # Removed while leading (and configured not to step down): the log must not grow any more.
        if self.id not in self.tracker.progress:
            raise ProposalDropped(DROPPED_NOT_MEMBER)
        # The target must catch up: nothing is appended until it leads, or the transfer is cancelled.
        if self.transferee != NONE:
            raise ProposalDropped(DROPPED_TRANSFER)

    def _check_uncommitted(self, size: int) -> None:
        # One proposal of any size is accepted when nothing is outstanding; empty entries (no-op, leaving a joint
        # configuration) always are.
        outstanding = self.uncommitted_bytes
        if outstanding > 0 and size > 0 and outstanding + size > self.max_uncommitted_bytes:
            raise ProposalDropped(DROPPED_UNCOMMITTED_LIMIT)

    def _conf_change_refusal(self, entry: Entry, pending: int) -> str:
        """Return why a membership change may not be proposed now; empty if it may."""
        try:
            change = confchange.decode(entry.data)
        except ConfChangeError as error:
            return str(error)
        if self.config.disable_conf_change_validation:
            return ""
        # One at a time: the next one only after the last is applied here (thesis section 4.1).
        if pending > self.log.applied:
            return f"possible unapplied conf change at index {pending} (applied to {self.log.applied})"
        joint = self.tracker.config.joint
        if joint and change.changes:
            return "must transition out of joint config first"
        if not joint and not change.changes:
            return "not in joint state; refusing empty conf change"
        return ""

    def _append(self, entries: list[Entry]) -> None:
        self.log.append(entries)
        if self.lease.allowed:
            self.lease.appended(self.log.last_index)
        # Our own acknowledgement, once our disk has them.
        self.messages_to_self.append(Message(_APPEND_RESPONSE, self.id, self.id, self.term, index=self.log.last_index))
        self.append_due = True

    # -- sending to followers ----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Queue the messages that have become due since the last Ready."""
        # Heartbeats first: a later append has the newer commit index, and ``sent_commit`` keeps the last one.
        if self.heartbeat_due:
            self.heartbeat_due = False
            context = self.reads.context()
            for peer, progress in self.tracker.peers:
                self._send_heartbeat(peer, progress, context)
        if self.append_due:
            self.append_due = False
            committed = self.log.committed
            for peer, progress in self.tracker.peers:
                self._send_appends(peer, progress, progress.can_bump_commit(committed))

    def _send_appends(self, id: int, progress: Progress, tell_commit: bool) -> None:
        """Send a follower everything that may be sent now, in as many messages as needed.

        Arguments:
            id: id of the follower.
            progress: progress of the follower.
            tell_commit: also send without entries, to report the commit index.
        """
        # A probe, even an empty one, asks where the logs match, so it needs a response.
        quiet = self.config.quiet_commits and progress.state is REPLICATE
        while self._maybe_send_append(id, progress, tell_commit, quiet) and progress.next <= self.log.last_index:
            tell_commit = False

    def _maybe_send_append(self, id: int, progress: Progress, send_if_empty: bool, quiet: bool = False) -> bool:
        """Send a follower one append, or a snapshot if the log no longer has the entries that it needs.

        Arguments:
            id: id of the follower.
            progress: progress of the follower.
            send_if_empty: also send without entries, to report the commit index or to probe.
            quiet: an append without entries needs no response.

        Returns:
            whether a message was sent.
        """
        log = self.log
        next_index = progress.next
        if progress.is_paused() or (next_index > log.last_index and not send_if_empty):
            return False
        entries: list[Entry] = []
        size_bytes = 0
        try:
            previous_term = log.term(next_index - 1)
            # With a full window only empty appends are sent, after heartbeat responses: if everything in flight was
            # lost, one of them will be rejected or acknowledged, and the window opens again.
            if next_index <= log.last_index and (progress.state is not REPLICATE or not progress.inflights.full()):
                entries, size_bytes = log.entries_to_send(next_index, self.config.max_size_per_message_bytes)
        except CompactedError:
            return self._maybe_send_snapshot(id, progress)
        if not entries and not send_if_empty:
            return False
        message = Message(_APPEND, id, self.id, self.term, previous_term, next_index - 1, entries, log.committed)
        message.quiet = quiet and not entries
        if entries and self.lease.marks():
            message.context = LEASED
        self.messages.append(message)
        progress.sent_entries(len(entries), size_bytes)
        progress.sent_commit = log.committed
        return True

    def _maybe_send_snapshot(self, id: int, progress: Progress) -> bool:
        # A silent member would not receive it, so do not make a snapshot for it.
        if not progress.recent_active:
            return False
        log = self.log
        try:
            snapshot = log.unstable.snapshot or log.reader.snapshot()
        except SnapshotTemporarilyUnavailable:
            return False
        if snapshot.index == 0:
            raise InvariantError(f"follower {id} needs a snapshot, but the log reader names none")
        progress.become_snapshot(snapshot.index)
        self.send(Message(_SNAPSHOT, to=id, snapshot=snapshot))
        return True

    def _send_heartbeat(self, id: int, progress: Progress, context: bytes) -> None:
        """Send a follower one heartbeat.

        Arguments:
            id: id of the follower.
            progress: progress of the follower.
            context: asks to confirm reads; empty if there are none.
        """
        # The follower may lack committed entries, or have different ones: do not send a commit index beyond the
        # matching part.
        commit = min(progress.match, self.log.committed)
        self.messages.append(Message(_HEARTBEAT, id, self.id, self.term, commit=commit, context=context))
        progress.sent_commit = commit

    # -- reads -------------------------------------------------------------------------------------------------------

    def _begin_read(self, request: ReadRequest) -> None:
        """Begin a linearizable read (thesis section 6.4).

        Arguments:
            request: the read: its member and context.
        """
        index = self.read_now()
        if index:
            request.index = index
            self._answer_read(request)
        # Before the first commit of its term a leader may not know the last commits of earlier leaders, even in a
        # single-member cluster. (etcd answers at once with one member; its commit index may be old after a crash.)
        elif not self._has_committed_in_term():
            self.reads.deferred.append(request)
        else:
            self._queue_read(request)

    def read_now(self) -> int:
        """Return the index at which an arrived linearizable read may be served without a round; 0 if a round is needed.

        Renews the lease: the entry that this may append leaves with the next Ready.
        """
        lease = self.lease
        if not lease.allowed or self.role != StateRole.LEADER:
            return 0
        left_ns = lease.left_ns()
        if left_ns < LEASE_NS // 2 and lease.may_renew() and self._may_renew():
            self._append_noop()
        return self.log.committed if left_ns > 0 else 0

    def _may_renew(self) -> bool:
        return self.transferee == NONE and self.id in self.tracker.progress and self._has_committed_in_term()

    def _queue_read(self, request: ReadRequest) -> None:
        # As the sole voter, no other member could have been elected.
        if self.tracker.is_sole_voter():
            request.index = self.log.committed
            self._answer_read(request)
            return
        self.reads.add(self.id, request, self.log.committed)
        self.heartbeat_due = True

    def _answer_confirmed_reads(self) -> None:
        for request in self.reads.take_confirmed(self.tracker.config):
            self._answer_read(request)

    def _answer_read(self, request: ReadRequest) -> None:
        if request.from_ in (NONE, self.id):
            self.read_states.append(ReadState(request.index, request.context))
        else:
            self.send(
                Message(MessageType.READ_INDEX_RESPONSE, to=request.from_, index=request.index, context=request.context)
            )

    # -- progress of this member -------------------------------------------------------------------------------------

    def promotable(self) -> bool:
        """Return whether this member may become a candidate: a voter with a complete log."""
        own = self.tracker.progress.get(self.id)
        return own is not None and not own.is_learner and self.log.unstable.snapshot is None

    def applied_to(self, index: int) -> None:
        """Record that the caller has applied everything up to ``index``."""
        log = self.log
        payload = log.applied_to(max(index, log.applied))
        self.uncommitted_bytes = max(self.uncommitted_bytes - payload, 0)
        # A joint configuration with ``auto_leave`` is left once the change that entered it is applied. This is checked
        # at each call, because a transfer in progress may refuse the proposal for now.
        if self.tracker.config.auto_leave and self.role == StateRole.LEADER and log.applied >= self.pending_conf_index:
            self._leave_joint()

    def installed_snapshot(self, index: int) -> None:
        """Record that the snapshot at ``index`` is durable and in the caller's state machine."""
        self.log.unstable.snapshot_stable_to(index)
        self.applied_to(index)

    # -- membership --------------------------------------------------------------------------------------------------

    def apply_conf_change(self, change: ConfChange) -> ConfState:
        """Switch to the configuration after a change, and return it.

        Raises:
            ConfChangeError: the change is illegal in the current configuration.
        """
        return self.switch_to(confchange.apply(self.tracker.config, change))

    def switch_to(self, config: Configuration) -> ConfState:
        """Take over a configuration, with all its consequences for a leader, and return it."""
        self.tracker.switch(config, self.log.last_index)
        state = config.conf_state()
        if self.role != StateRole.LEADER:
            return state
        own = self.tracker.progress.get(self.id)
        # Removed or demoted: another member must lead now.
        if own is None or own.is_learner:
            if self.config.step_down_on_removal:
                self.become_follower(self.term, NONE)
            return state
        self._after_conf_change()
        return state

    def _after_conf_change(self) -> None:
        """Adapt to a new configuration as its leader: commit, answer reads, send, cancel a transfer."""
        # With a smaller quorum, more entries may be committed and more reads confirmed.
        self._maybe_commit()
        self._answer_confirmed_reads()
        # Send the new commit index to the members, and probe new members, without waiting for a heartbeat.
        self.append_due = True
        # A member that is no longer a voter cannot become the leader.
        if self.transferee not in self.tracker.config.all_voters():
            self.transferee = NONE

    def _leave_joint(self) -> None:
        """Propose to leave a joint configuration with ``auto_leave``."""
        try:
            # No data, so that a size limit cannot refuse it.
            self._propose([Entry(0, 0, b"", EntryType.CONF_CHANGE_V2)])
        except ProposalDropped:
            # A transfer is in progress: the new leader will do it, or this member at the next applied entry.
            pass

    # -- transfers and reports ---------------------------------------------------------------------------------------

    def _transfer(self, id: int) -> None:
        """Hand leadership over once the other member has the whole log (thesis section 3.10); cancel after an election
        timeout.

        Arguments:
            id: id of a voter; other ids have no effect.
        """
        progress = self.tracker.progress.get(id)
        # Only a voter can lead.
        if progress is None or progress.is_learner:
            return
        if self.transferee != NONE:
            # That transfer is already in progress.
            if self.transferee == id:
                return
            # The last request counts.
            self.transferee = NONE
        # We are the leader already.
        if id == self.id:
            return
        self.election_elapsed = 0
        self.transferee = id
        if progress.match == self.log.last_index:
            self._send_timeout_now(id)
        else:
            self._maybe_send_append(id, progress, send_if_empty=True)

    def _send_timeout_now(self, id: int) -> None:
        context = b""
        # Before its first commit of the term, a leader itself may have to wait for another leader's lease.
        if self._has_committed_in_term() and self.lease.give_up():
            context = LEASE_GIVEN_UP
        self.send(Message(MessageType.TIMEOUT_NOW, to=id, context=context))

    def report_unreachable(self, id: int) -> None:
        """Probe a follower that a message did not reach: later messages to it are probably lost too.

        Arguments:
            id: id of the follower.
        """
        progress = self.tracker.progress.get(id)
        if progress is not None and progress.state is REPLICATE:
            progress.become_probe()

    def report_snapshot(self, id: int, ok: bool) -> None:
        """Continue with a follower after the transfer of a snapshot.

        Arguments:
            id: of the follower.
            ok: whether the snapshot was delivered.
        """
        progress = self.tracker.progress.get(id)
        if progress is None or progress.state is not SNAPSHOT:
            return
        # Failed: probe from the old match, not from after a snapshot that never arrived.
        if not ok:
            progress.pending_snapshot = 0
        progress.become_probe()
        # Delivered: wait for its response. Failed: wait for a heartbeat before the next try.
        progress.paused = True


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


@mypyc_attr(allow_interpreted_subclasses=True)
class RawNode:
    """The Raft core of one member of one group."""

    def __init__(
        self, config: RaftConfig, log: MemoryLog, rng: random.Random, clock_ns: Callable[[], int] | None = None
    ) -> None:
        """Start as a follower with the contents of the log.

        Arguments:
            config: settings of the member.
            log: the durable log of the member.
            rng: used only for election timeouts.
            clock_ns: monotonic nanoseconds, including suspension, for read leases (``read_lease``); ``None``: no
                leases.

        Raises:
            InvariantError, ConfChangeError: the persisted state contradicts itself.
        """
        self.raft = Raft(config, log, rng, clock_ns)
        self._soft = (self.raft.leader, self.raft.role)
        self._hard = (self.raft.term, self.raft.vote, self.raft.log.committed)
        self._unconfirmed: deque[Ready] = deque()
        self._append_number = 0

    # -- inputs ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let one tick of time pass."""
        self.raft.tick()

    def step(self, message: Message) -> None:
        """Handle a message from another member. The message is kept and must not be changed afterwards.

        Raises:
            StepLocalMessage, StepPeerNotFound, InvalidMessage: drop the message.
            ProposalDropped: a forwarded proposal was refused: drop it, the proposer tries again.
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
        """Propose one entry, like ``propose_batch``."""
        self.propose_batch([data])

    def propose_batch(self, datas: list[bytes]) -> None:
        """Propose one entry for each of ``datas``, in order, all or none; a follower forwards them to its leader.

        Success is not guaranteed without an exception: a proposal may be lost or (if forwarded) dropped elsewhere; it
        has succeeded when it is returned in ``committed_entries``.

        Raises:
            ProposalDropped: the proposal was refused.
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
        """Propose a membership change. A change that is not allowed now is returned as an empty normal entry.

        Raises:
            ProposalDropped: the proposal was refused.
        """
        entry = Entry(0, 0, confchange.encode(change), confchange.entry_type(change))
        self.raft.step(Message(MessageType.PROPOSE, from_=self.raft.id, entries=[entry]))

    def apply_conf_change(self, change: ConfChange) -> ConfState:
        """Apply a committed membership change; call this when its entry is applied, before ``on_applied``.

        Returns:
            the configuration, to be persisted with the applied index.

        Raises:
            ConfChangeError: the change is illegal in the current configuration (the same on every member).
        """
        return self.raft.apply_conf_change(change)

    def read_index(self, context: bytes) -> None:
        """Start a linearizable read. The result is a ``ReadState`` with ``context`` in a later Ready.

        There may be no result (no leader, lost messages, a change of leader): try again after a while, with a new
        context, so that a late answer to the old request is not mistaken for one to the new.
        """
        self.raft.step(Message(MessageType.READ_INDEX, from_=self.raft.id, context=context))

    def read_now(self) -> int:
        """Return the index at which an arrived linearizable read may be served, once that index is applied.

        0: there is no lease (``allow_leases``); use ``read_index`` instead. A Ready may follow in both cases.
        """
        return self.raft.read_now()

    def allow_leases(self, allowed: bool) -> None:
        """Allow this member, while leading, to serve reads with a lease, or forbid it. All members must know leases.

        Arguments:
            allowed: True to allow, False to forbid.
        """
        self.raft.lease.allow(allowed)

    def transfer_leader(self, id: int) -> None:
        """Ask the leader to hand over to ``id``. During the transfer, proposals are dropped."""
        self.raft.step(Message(MessageType.TRANSFER_LEADER, from_=id))

    def campaign(self) -> None:
        """Campaign now instead of after the timeout."""
        self.raft.campaign()

    def report_unreachable(self, id: int) -> None:
        """Report that a message to ``id`` could not be delivered."""
        if self.raft.role == StateRole.LEADER:
            self.raft.report_unreachable(id)

    def report_snapshot(self, id: int, ok: bool) -> None:
        """Report the result of a snapshot transfer. Without this report nothing more is sent to the follower.

        Arguments:
            id: of the follower.
            ok: whether the snapshot was delivered.
        """
        if self.raft.role == StateRole.LEADER:
            self.raft.report_snapshot(id, ok)

    def forget_leader(self) -> None:
        """Make a follower forget its leader, known to be dead, so that it grants pre-votes at once."""
        if self.raft.role == StateRole.FOLLOWER:
            self.raft.forget_leader()

    # -- outputs -----------------------------------------------------------------------------------------------------

    def has_ready(self) -> bool:
        """Return whether ``ready`` would return work. (Rarely a Ready turns out empty: handle it as any other.)"""
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
        """Return the accumulated work. It is returned only once: the caller must carry it out."""
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
            # What the confirmation of its write will mean.
            self._append_number += 1
            ready.append_number = self._append_number
            ready.attested = (raft.term, log.last_index, log.last_term)
            ready.to_self, raft.messages_to_self = raft.messages_to_self, ready.to_self
            self._unconfirmed.append(ready)
        return ready

    def _take_states(self, ready: Ready) -> None:
        """Put the changes of the soft and the hard state into the Ready."""
        raft = self.raft
        soft = (raft.leader, raft.role)
        if soft != self._soft:
            self._soft = soft
            ready.soft_state = SoftState(*soft)
        hard = (raft.term, raft.vote, raft.log.committed)
        if hard != self._hard:
            # Term and vote must be durable before anything that follows from them; the commit index need not be,
            # because it can be determined again.
            ready.must_sync = hard[:2] != self._hard[:2]
            self._hard = hard
            ready.hard_state = HardState(*hard)

    def on_append_durable(self, ready: Ready) -> None:
        """Confirm that everything in ``ready`` for the disk is durable, and that the ``MemoryLog`` has it.

        A snapshot must also be installed in the state machine. Call this for each Ready, in order; it does nothing for
        a Ready with ``append_number`` 0.
        """
        if ready.append_number == 0:
            return
        if not self._unconfirmed or self._unconfirmed[0] is not ready:
            raise InvariantError(f"append {ready.append_number} confirmed out of order")
        self._unconfirmed.popleft()
        raft = self.raft
        for message in ready.to_self:
            raft.step(message)
        # Counts only if the log was not truncated meanwhile; see the module docstring.
        term, last_index, last_term = ready.attested
        if term == raft.term and raft.log.unstable.entries:
            raft.log.unstable.stable_to(last_index, last_term)
        # A snapshot is committed state: it stays valid in any term.
        if ready.snapshot is not None:
            raft.installed_snapshot(ready.snapshot.index)

    def on_applied(self, index: int) -> None:
        """Confirm that the state machine contains everything up to and including ``index``."""
        self.raft.applied_to(index)

    def advance(self, ready: Ready) -> None:
        """Confirm a Ready for a caller that writes and applies at once: as durable, then as applied."""
        self.on_append_durable(ready)
        if ready.committed_entries:
            self.on_applied(ready.committed_entries[-1].index)

    def status(self) -> Status:
        """Return the current status of this member."""
        return status_of(self.raft)
