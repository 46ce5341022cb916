"""Checkers that run after every turn of a member's loop: R1-R10 of the reliability bar, and the state compared with
the replay of the log, each as a few cheap comparisons.

Owns the global ledgers: every entry ever written by any member, the committed entries, the membership at each index,
and the replay (``replay.py``) of applied entries. Because the ledgers are global, a check costs O(1) per change instead
of comparing members pairwise:

    R1  one leader (one *incarnation* of one member) per term
    R2  an (index, term) has one content and one predecessor: with induction, log matching
    R3  a new leader of term T holds the newest entry that was committed in a term below T
    R4  one entry per committed index; one list of changes per revision, as the replay has it; one revision, compact
        revision and number of leases per applied index (also K9: a double apply changes them)
    R5  term, commit, applied and revision never go back; after a restart not behind what was durable
    R6  the promises of a message are durable on its sender; committed entries are durable on a quorum
    R7  a leader's commit index stands on an entry of its own term
    R8  with PreVote a tick raises no term; with CheckQuorum a leader that hears no quorum steps down in time
    R9  learners and non-members neither campaign nor lead; a membership step keeps old and new quorums overlapping
    R10 a killed member serves no client before it has applied as much as in any earlier life; after a power loss, not
        before a quorum has confirmed that index, or its time limit has passed
    L2  no lease ends before its owner's clock says so (in ``state_checks``, like all comparisons with the replay)

Checkers are independent of the faults and change nothing. The first violation is kept and raised again at the end of
the turn, because an exception inside production code stops the member, not the simulation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raftkv.raft.errors import InvariantError
from raftkv.raft.types import ConfState, Entry, EntryType, Message, MessageType, Ready, StateRole
from tests.raft import invariants
from tests.sim.state_checks import StateChecks

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.member import Member

_INVARIANTS_EVERY = 4
"""Turns of which one is looked at in depth although neither term, role nor log has moved: heartbeats, most of them."""

_LEADER_KINDS = frozenset((MessageType.APPEND, MessageType.HEARTBEAT, MessageType.SNAPSHOT, MessageType.TIMEOUT_NOW))
_CAMPAIGN_ROLES = frozenset((StateRole.LEADER, StateRole.CANDIDATE, StateRole.PRE_CANDIDATE))


@dataclass(slots=True)
class _Seen:
    """Last observed state of one incarnation of a member."""

    term: int = 0
    commit: int = 0
    applied: int = 0
    taken: int = 0
    role: StateRole = StateRole.FOLLOWER
    ticks: int = 0
    heard: dict[int, int] = field(default_factory=dict)
    heard_default: int = 0
    transfer_tick: int = -1_000_000
    position: tuple[int, ...] = ()
    invariants: invariants.Checker | None = None


@dataclass(slots=True)
class _Durable:
    """Highest state that has been durable on one disk."""

    term: int = 0
    commit: int = 0
    applied: int = 0


def is_quorum(conf: ConfState, ids: Collection[int]) -> bool:
    """Whether ``ids`` holds a majority of the voters; in joint consensus, of both halves."""
    return all(
        2 * sum(1 for voter in half if voter in ids) > len(half) for half in (conf.voters, conf.voters_outgoing) if half
    )


class Checkers(StateChecks):
    """Raises ``ViolationError`` at the first event after which a property does not hold."""

    def __init__(self, cluster: Cluster, disabled: frozenset[str] = frozenset()) -> None:
        super().__init__(cluster, disabled)
        self._seen: dict[int, _Seen] = {}
        self._durable: dict[int, _Durable] = {}
        self._leaders: dict[int, tuple[int, int]] = {}
        self._entries: dict[tuple[int, int], tuple[int | None, EntryType, bytes]] = {}
        self._committed: dict[int, int] = {}
        self._committed_in_term: dict[int, int] = {}
        # The highest index that each member has applied: in all its lives, in those before the present one, and of
        # these in those since its power was cut.
        self._reached: dict[int, int] = {}
        self._reached_before: dict[int, int] = {}
        self._kept_before: dict[int, int] = {}
        self._reached_since: dict[int, int] = {}
        self._confs: dict[int, ConfState] = {}
        self._members: dict[int, tuple[tuple[bytes, ...], frozenset[int]]] = {}
        self.checks_count = 0
        self.leaders_count = 0
        self.conf_changes_count = 0

    # -- a member starts ------------------------------------------------------------------------------------

    def started(self, member: Member) -> None:
        """Check that a started member remembers at least its durable state (R5)."""
        raft, store = member.core, member.store
        durable = self._durable.setdefault(member.id, _Durable())
        for name, now, before in (
            ("term", raft.term, durable.term),
            ("commit", raft.log.committed, durable.commit),
            ("applied", store.applied_index, durable.applied),
        ):
            if now < before:
                self.fail("R5", f"{member.id} restarted with {name} {now}, {before} was durable")
        reached = self._reached.get(member.id, 0)
        if member.lost_power:
            self._kept_before[member.id] = 0
        else:
            kept, since = self._kept_before.get(member.id, 0), self._reached_since.get(member.id, 0)
            self._kept_before[member.id] = max(kept, since)
        self._reached_before[member.id] = reached
        self._reached_since[member.id] = 0
        applied = store.applied_index
        self._seen[member.id] = _Seen(raft.term, applied, applied, invariants=invariants.Checker(raft))
        self._seen[member.id].taken = applied
        if applied:
            self._note_applied(member, applied)
            self._check_database(member, applied)
        self._check_log(member)
        self.after_event(member)

    def _check_log(self, member: Member) -> None:
        """Check that every entry read back follows the predecessor that it was written after (R2)."""
        log = member.memory_log
        term = log.term(log.first_index() - 1)
        for entry in log.entries(log.first_index(), log.last_index() + 1, 1 << 40):
            known = self._entries.get((entry.index, entry.term))
            if entry.term < term or known is None or known[0] not in (term, None):
                self.fail("R2", f"{member.id} reads back {entry} after term {term}, written was {known}")
            term = entry.term

    # -- after every event ----------------------------------------------------------------------------------

    def after_event(self, member: Member) -> None:
        """Check everything visible from outside a member after one event."""
        if member.node is None:
            return
        self.checks_count += 1
        seen, raft = self._seen[member.id], member.core
        term, commit, role = raft.term, raft.log.committed, raft.role
        position = (term, commit, role, raft.vote, raft.log.last_index, raft.log.applied)
        if position != seen.position or self.checks_count % _INVARIANTS_EVERY == 0:
            seen.position = position
            self._check_invariants(seen)
        if term < seen.term or commit < seen.commit:
            self.fail("R5", f"{member.id} went back from {seen.term}/{seen.commit} to {term}/{commit}")
        if role is StateRole.LEADER and (seen.role is not role or seen.term != term):
            self._became_leader(member, term)
        if role in _CAMPAIGN_ROLES:
            self._check_may_campaign(member, role)
        seen.term, seen.role = term, role
        if commit > seen.commit:
            self._committed_more(member, seen, commit, role)
        self._note_durable(member)

    def _check_invariants(self, seen: _Seen) -> None:
        try:
            if seen.invariants is not None:
                seen.invariants.check()
        except InvariantError as error:
            self.fail("invariants", str(error))

    def _note_durable(self, member: Member) -> None:
        durable, hard_state = self._durable[member.id], member.log.view.hard_state
        durable.term = max(durable.term, hard_state.term)
        durable.commit = max(durable.commit, hard_state.commit)
        durable.applied = max(durable.applied, member.store.durable_index)

    def _became_leader(self, member: Member, term: int) -> None:
        me = (member.id, member.incarnation)
        other = self._leaders.setdefault(term, me)
        self.leaders_count += other is me
        if other != me:
            self.fail("R1", f"term {term} has two leaders (member, incarnation): {other} and {me}")
        seen = self._seen[member.id]
        seen.heard.clear()
        seen.heard_default = seen.ticks
        index = max((i for t, i in self._committed_in_term.items() if t < term), default=0)
        if index and self._term(member, index) not in (self._committed[index], None):
            self.fail("R3", f"leader {member.id} of term {term} lacks the committed entry {index}")
        if index > member.last_index():
            self.fail("R3", f"leader {member.id} of term {term} ends before the committed entry {index}")

    def _check_may_campaign(self, member: Member, role: StateRole) -> None:
        conf = member.conf_state
        if member.id not in conf.voters and member.id not in conf.voters_outgoing:
            self.fail("R9", f"{member.id} is {role.name}, but no voter of {conf}")

    def _term(self, member: Member, index: int) -> int | None:
        """Term of an entry in the member's log; None: compacted or absent."""
        return member.term_at(index)

    def _committed_more(self, member: Member, seen: _Seen, commit: int, role: StateRole) -> None:
        term_at_commit = self._term(member, commit)
        if role is StateRole.LEADER:
            self._check_commit_of_leader(member, commit, term_at_commit)
        for index in range(seen.commit + 1, commit + 1):
            term = self._term(member, index)
            if term is not None and self._committed.setdefault(index, term) != term:
                known = self._committed[index]
                self.fail("R4", f"{member.id} commits {index} of term {term}, committed was term {known}")
        seen.commit = commit

    def _check_commit_of_leader(self, member: Member, commit: int, term: int | None) -> None:
        if term != member.core.term:
            self.fail("R7", f"leader {member.id} of term {member.core.term} commits {commit} of term {term}")
        if term is None:
            return
        holders = [other.id for other in self._cluster.members.values() if self._holds(other, commit, term)]
        conf = member.conf_state
        if not is_quorum(conf, holders):
            self.fail("R6", f"{member.id} commits {commit}, durable only on {holders} of {conf}")
        previous = self._committed_in_term.get(term, 0)
        self._committed_in_term[term] = max(previous, commit)

    @staticmethod
    def _holds(member: Member, index: int, term: int) -> bool:
        log = member.log.view
        return log.snapshot.index >= index or log.term(index) == term

    # -- entries, application, membership -------------------------------------------------------------------

    def ready(self, member: Member, ready: Ready) -> None:
        """Record new entries (R2), and check that a leader has at most one membership change in progress (R9)."""
        if member.is_leader():
            self._check_one_conf_change(member, ready)
        previous_term = self._term(member, ready.entries[0].index - 1) if ready.entries else None
        for entry in ready.entries:
            content = (previous_term, entry.type, entry.data)
            known = self._entries.setdefault((entry.index, entry.term), content)
            same_before = None in (known[0], previous_term) or known[0] == previous_term
            if known[1:] != content[1:] or not same_before:
                self.fail("R2", f"{member.id} has {entry} after term {previous_term}, elsewhere {known}")
            previous_term = entry.term

    def _check_one_conf_change(self, member: Member, ready: Ready) -> None:
        for entry in ready.entries:
            if entry.type is EntryType.NORMAL or entry.term != member.term:
                continue
            log = member.core.log
            for earlier in log.entries(member.node.applied + 1, entry.index, 1 << 40):
                if earlier.type is not EntryType.NORMAL:
                    self.fail("R9", f"{member.id} appends {entry} while {earlier} is not applied")

    def handed_out(self, member: Member, entries: list[Entry]) -> None:
        """Check entries handed out for apply: contiguous (R5), durable here (K4), the same on all members (R4)."""
        seen, committed = self._seen[member.id], member.core.log.committed
        for entry in entries:
            if entry.index != seen.taken + 1:
                self.fail("R5", f"{member.id} is to apply {entry.index} after {seen.taken}")
            if entry.index > committed:
                self.fail("R4", f"{member.id} is to apply {entry.index}, which it has not committed")
            if not self._holds(member, entry.index, entry.term):
                self.fail("K4", f"{member.id} is to apply {entry.index} before it is durable there")
            known = self.log.setdefault(entry.index, entry)
            if known is not entry and known != entry:
                self.fail("R4", f"{member.id} is to apply {entry}, others have applied {known}")
            seen.taken = entry.index

    def applied(self, member: Member, index: int) -> None:
        """Check a member that has applied all entries up to an index."""
        if index < self._seen[member.id].applied:
            self.fail("R5", f"{member.id} applies {index} after {self._seen[member.id].applied}")
        if index > self._seen[member.id].taken:
            self.fail(
                "R5", f"{member.id} has applied {index}, it was given entries up to {self._seen[member.id].taken}"
            )
        self._note_applied(member, index)

    def _note_applied(self, member: Member, index: int) -> None:
        self._seen[member.id].applied = index
        self._reached[member.id] = max(self._reached.get(member.id, 0), index)
        self._reached_since[member.id] = index
        self.check_state(member, index)

    def serves(self, member: Member, *, confirmed: bool) -> None:
        """Check that a member accepting clients lacks nothing that it served in an earlier life (R10)."""
        applied = member.store.applied_index
        before = (self._reached_before if confirmed else self._kept_before)[member.id]
        if applied < before:
            self.fail("R10", f"{member.id} serves clients at {applied}, it was at {before} before it crashed")

    def installed(self, member: Member) -> None:
        """Check a member whose state was replaced by a snapshot."""
        index = member.store.applied_index
        if index < self._seen[member.id].applied:
            self.fail("R5", f"{member.id} installed a snapshot older than its state")
        self._seen[member.id].taken = index
        self._note_applied(member, index)
        self._check_database(member, index)

    def _check_database(self, member: Member, index: int) -> None:
        """Check all keys and the membership of a member that has just read its database."""
        self.check_contents(member)
        expected = self._confs[max(i for i in self._confs if i <= index)]
        if member.store.conf_state != expected:
            self.fail("R9", f"{member.id} has {member.store.conf_state} at {index}, others {expected}")

    def conf_applied(self, member: Member, index: int) -> None:
        seen = self._seen[member.id]
        seen.heard.clear()
        seen.heard_default = seen.ticks
        conf = member.conf_state
        if index in self._confs:
            if self._confs[index] != conf:
                self.fail("R9", f"{member.id} has {conf} at {index}, others {self._confs[index]}")
            return
        before = self._confs[max((i for i in self._confs if i < index), default=0)]
        self._confs[index] = conf
        self.conf_changes_count += 1
        if not _overlaps(before, conf):
            self.fail("R9", f"from {before} to {conf} two majorities need not overlap")

    def members_applied(self, member: Member, index: int) -> None:
        """Check that the members shown to clients are equal everywhere and match Raft's configuration (R9)."""
        if not self._cluster.parameters.is_managed:
            return
        membership, conf = member.applier.membership, member.conf_state
        shown = (tuple(each.SerializeToString() for each in membership.list()), frozenset(membership.removed))
        if self._members.setdefault(index, shown) != shown:
            self.fail("R9", f"{member.id:x} has members {shown} at {index}, others {self._members[index]}")
        if not membership.removed.isdisjoint(membership.members):
            self.fail("R9", f"{member.id:x}: an id that had left is back: {shown}")
        gone = max((at for at in self._members if at < index), default=0)
        if gone and not self._members[gone][1] <= shown[1]:
            self.fail("R9", f"{member.id:x} has forgotten who left: {shown}, at {gone} {self._members[gone]}")
        voters = {each.ID for each in membership.list() if not each.isLearner}
        known = {*conf.voters, *conf.voters_outgoing, *conf.learners}
        if membership.members.keys() != known or not voters >= {*conf.voters} or voters & {*conf.learners}:
            self.fail("R9", f"{member.id:x} shows {membership.list()} with {conf}")

    def bootstrapped(self, conf: ConfState) -> None:
        """Record the initial membership."""
        self._confs[0] = conf

    # -- messages -------------------------------------------------------------------------------------------

    def sent(self, member: Member, message: Message) -> None:
        """Check that the promises of a message are already on the sender's disk (R6)."""
        durable = member.log.view
        kind = message.type
        if kind in _LEADER_KINDS and durable.hard_state.term < message.term:
            self.fail("R6", f"{member.id} leads term {message.term}, durable is {durable.hard_state}")
        if kind is MessageType.VOTE_RESPONSE and not message.reject:
            self._check_vote(member, message)
        if kind is MessageType.APPEND_RESPONSE and not message.reject:
            self._check_acknowledgement(member, message)

    def _check_vote(self, member: Member, message: Message) -> None:
        hard_state = member.log.view.hard_state
        if (hard_state.term, hard_state.vote) != (message.term, message.to) and hard_state.term <= message.term:
            self.fail("R6", f"{member.id} votes for {message.to} in {message.term}, durable is {hard_state}")

    def _check_acknowledgement(self, member: Member, message: Message) -> None:
        durable = member.log.view
        if durable.last_index() < message.index and durable.hard_state.term <= message.term:
            self.fail("R6", f"{member.id} acknowledges {message.index}, durable is {durable.last_index()}")

    # -- R8 -------------------------------------------------------------------------------------------------

    def ticked(self, member: Member, term_before: int) -> None:
        """Check that ticks raise no term (PreVote), and that a leader without a quorum steps down (CheckQuorum)."""
        seen, raft, parameters = self._seen[member.id], member.core, self._cluster.parameters.member
        seen.ticks += 1
        conf = member.conf_state
        if parameters.pre_vote and raft.term > term_before and len(conf.voters) > 1:
            self.fail("R8", f"{member.id} raised its term to {raft.term} by a tick")
        if not parameters.check_quorum or raft.role is not StateRole.LEADER or seen.role is not raft.role:
            return
        oldest = seen.ticks - 2 * parameters.election_ticks - 1
        if seen.transfer_tick > oldest:  # a transfer begins the period anew, as in etcd
            return
        voters = {*conf.voters, *conf.voters_outgoing}
        heard = [v for v in voters if v == member.id or seen.heard.get(v, seen.heard_default) >= oldest]
        if not is_quorum(conf, heard):
            self.fail("R8", f"{member.id} still leads and has heard only {heard} of {conf} for long")

    def transferring(self, member: Member) -> None:
        """Note a leadership transfer, for which the leader has one election timeout."""
        self._seen[member.id].transfer_tick = self._seen[member.id].ticks

    def delivered(self, member: Member, message: Message, term_before: int) -> None:
        """Note the sender; check that a pre-vote request does not raise the receiver's term."""
        seen, raft = self._seen[member.id], member.core
        if message.type in (MessageType.APPEND_RESPONSE, MessageType.HEARTBEAT_RESPONSE):
            seen.heard[message.from_] = seen.ticks
        if message.type is MessageType.TRANSFER_LEADER:
            self.transferring(member)
        if message.type is MessageType.PRE_VOTE and raft.term > term_before:
            self.fail("R8", f"{member.id} raised its term to {raft.term} by a pre-vote of {message.from_}")


def _overlaps(before: ConfState, after: ConfState) -> bool:
    """Whether every majority of ``before`` meets every majority of ``after`` by the rules of thesis section 4."""
    if not before.voters_outgoing and not after.voters_outgoing:
        return len(set(before.voters) ^ set(after.voters)) <= 1
    if not before.voters_outgoing:
        return after.voters_outgoing == before.voters
    if not after.voters_outgoing:
        return after.voters == before.voters
    return (after.voters, after.voters_outgoing) == (before.voters, before.voters_outgoing)
