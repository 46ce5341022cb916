"""Planted bugs: each takes one safety rule out of the running code, and the simulator must notice.

Owns the list. A mutant is a context manager that patches a function of the production core, or of the loop that
carries out its duties, and puts it back. ``hunt`` runs seeds until one reports a violation. What the mutants say of
the simulator is the reason to believe it when it says nothing.

    with MUTANTS["vote given twice"].planted():
        report = hunt(range(100))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from raftkv.raft import confchange, follower, leader, replication
from raftkv.raft import core as core_module
from raftkv.raft.core import Raft
from raftkv.raft.log import RaftLog
from raftkv.raft.progress import SNAPSHOT, Progress
from raftkv.raft.quorum import committed_of
from raftkv.raft.raw_node import RawNode
from raftkv.raft.tracker import Tracker
from raftkv.raft.types import NONE, HardState, Message, MessageType, Ready, StateRole
from raftkv.storage.wal.replay import LogReplay
from tests.storage.wal.simdisk import SimDisk

from .corners import (
    divergence_corner,
    election_corner,
    late_corner,
    membership_corner,
    read_corner,
    snapshot_corner,
)
from .disk import Disk, LogView, Record
from .machine import StateImage
from .member import Member
from .network import Network
from .swarm import Report, RunParameters, draw, run_seed

Plant = Callable[["Patches"], None]


class Patches:
    """Replaces attributes and puts them back."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Put ``value`` in the place of ``owner.name``; returns what was there."""
        old = owner.__dict__[name]
        setattr(owner, name, value)
        self._stack.callback(setattr, owner, name, old)
        return old

    def undo(self) -> None:
        """Put everything back."""
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug. ``rule`` is the rule that it takes out."""

    name: str
    rule: str
    plant: Plant
    parameters: Callable[[int], RunParameters] = draw

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is in the code for as long as the context lasts."""
        patches = Patches()
        try:
            self.plant(patches)
            yield
        finally:
            patches.undo()


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, rule: str, parameters: Callable[[int], RunParameters] = draw) -> Callable[[Plant], Plant]:
    """Register a planted bug, with the corner of the swarm in which it shows itself soonest."""

    def register(plant: Plant) -> Plant:
        MUTANTS[name] = Mutant(name, rule, plant, parameters)
        return plant

    return register


def hunt(seeds: Iterable[int], parameters: Callable[[int], RunParameters] = draw) -> Report | None:
    """Run seeds until one finds a violation."""
    for seed in seeds:
        report = run_seed(seed, parameters(seed))
        if report.violation is not None:
            return report
    return None


# -- elections --------------------------------------------------------------------------------------------------


@mutant("vote given twice", "one vote per term (R1)")
def _vote_twice(patches: Patches) -> None:
    def handle_vote(raft: Raft, message: Message) -> None:
        if message.type is MessageType.VOTE and raft.role is StateRole.FOLLOWER:
            raft.vote = raft.leader = NONE
        original(raft, message)

    original = patches.set(Raft, "_handle_vote", handle_vote)


@mutant("vote not persisted", "a vote is on disk before it is sent (R6)")
def _vote_not_persisted(patches: Patches) -> None:
    def records(member: Member, ready: Ready) -> list[Record]:
        return [
            replace(record, vote=NONE) if isinstance(record, HardState) else record
            for record in original(member, ready)
        ]

    original = patches.set(Member, "_records", records)


@mutant("term not persisted", "the term is on disk before it is used (R5, R6)")
def _term_not_persisted(patches: Patches) -> None:
    def records(member: Member, ready: Ready) -> list[Record]:
        return [
            replace(record, term=1) if isinstance(record, HardState) else record for record in original(member, ready)
        ]

    original = patches.set(Member, "_records", records)


@mutant(
    "vote asked for before it is durable",
    "a candidate must not forget the election that it wins (R6)",
    divergence_corner,
)
def _early_vote_request(patches: Patches) -> None:
    held = core_module._AFTER_APPEND
    patches.set(core_module, "_AFTER_APPEND", held - {MessageType.VOTE})


@mutant("election restriction skipped", "only an up-to-date log wins votes (R3)", divergence_corner)
def _election_restriction(patches: Patches) -> None:
    patches.set(RaftLog, "is_up_to_date", lambda log, index, term: True)


@mutant("stale leader obeyed", "messages of an older term are refused (R2, R4)", election_corner)
def _stale_append(patches: Patches) -> None:
    def check_term(raft: Raft, message: Message) -> bool:
        if message.term < raft.term and message.type is MessageType.APPEND and raft.role is StateRole.FOLLOWER:
            return True
        return bool(original(raft, message))

    original = patches.set(Raft, "_check_term", check_term)


@mutant("pre-vote raises the term", "a pre-candidate stays in its term (R8)")
def _pre_vote_raises(patches: Patches) -> None:
    def become_pre_candidate(raft: Raft) -> None:
        original(raft)
        raft.term += 1
        raft.vote = NONE

    original = patches.set(Raft, "become_pre_candidate", become_pre_candidate)


@mutant("deaf leader stays", "CheckQuorum deposes a leader that hears nobody (R8)")
def _deaf_leader(patches: Patches) -> None:
    patches.set(leader, "check_quorum", lambda raft: None)


# -- the log ----------------------------------------------------------------------------------------------------


@mutant("log matching check skipped", "entries are appended only where the logs match (R2)", divergence_corner)
def _matching_skipped(patches: Patches) -> None:
    def maybe_append(log: RaftLog, index: int, term: int, entries: list[Any], commit: int) -> int:
        known = log.term_or_zero(index) if index <= log.last_index else term
        return int(original(log, index, known or term, entries, commit))

    original = patches.set(RaftLog, "maybe_append", maybe_append)


@mutant("old append truncates", "entries that match stay, whatever an old message holds (R6)")
def _old_append_truncates(patches: Patches) -> None:
    def append_new(log: RaftLog, index: int, entries: list[Any]) -> None:
        fresh = [entry for entry in entries if entry.index > log.committed]
        if fresh:
            log.append(fresh)

    patches.set(RaftLog, "_append_new", append_new)


@mutant(
    "heartbeat tells the whole commit index",
    "a heartbeat commits no more than what is known to match (R4)",
    election_corner,
)
def _heartbeat_commit(patches: Patches) -> None:
    def send_heartbeat(raft: Raft, id: int, progress: Any, context: bytes) -> None:
        original(raft, id, progress, context)
        raft.messages[-1].commit = raft.log.committed

    original = patches.set(replication, "send_heartbeat", send_heartbeat)
    patches.set(RaftLog, "commit_to", _commit_to_clamped)


def _commit_to_clamped(log: RaftLog, index: int) -> None:
    log.committed = max(log.committed, min(index, log.last_index))


@mutant("old term's entry committed by counting", "Figure 8: only entries of the own term commit by counting (R7)")
def _figure_eight(patches: Patches) -> None:
    def maybe_commit(raft: Raft) -> bool:
        start, raft.term_start_index = raft.term_start_index, 0
        moved = bool(original(raft))
        raft.term_start_index = start
        return moved

    original = patches.set(leader, "maybe_commit", maybe_commit)


@mutant("older snapshot restored", "a snapshot never replaces newer state (R5)")
def _older_snapshot(patches: Patches) -> None:
    def restore(raft: Raft, snapshot: Any) -> bool:
        if snapshot.index > raft.log.committed or raft.role is not StateRole.FOLLOWER:
            return bool(original(raft, snapshot))
        raft.log.restore(snapshot)
        raft.switch_to(confchange.restore(snapshot.conf_state))
        return True

    original = patches.set(follower, "restore", restore)


@mutant(
    "rejection heeded while a snapshot is on its way",
    "a late rejection does not move next (invariants)",
    snapshot_corner,
)
def _rejection_in_snapshot(patches: Patches) -> None:
    def maybe_decrement(progress: Progress, rejected: int, match_hint: int) -> bool:
        if progress.state is SNAPSHOT and progress.next - 1 == rejected:
            progress.next = max(min(rejected, match_hint + 1), progress.match + 1)
            return True
        return bool(original(progress, rejected, match_hint))

    original = patches.set(Progress, "maybe_decrement", maybe_decrement)


# -- durability -------------------------------------------------------------------------------------------------


@mutant("acknowledged before the fsync", "what waits for the disk waits for its sync (R6)")
def _ack_before_fsync(patches: Patches) -> None:
    def write(disk: Disk, records: list[Record], done: Callable[[], None], must_sync: bool = True) -> None:
        original(disk, records, lambda: None, must_sync)
        done()

    original = patches.set(Disk, "write", write)


@mutant("snapshot acknowledged before the fsync", "a received snapshot is synced like entries (R6)")
def _snapshot_not_synced(patches: Patches) -> None:
    def ready(node: RawNode) -> Ready:
        taken: Ready = original(node)
        if taken.snapshot is not None and not taken.entries:
            taken.must_sync = False
        return taken

    original = patches.set(RawNode, "ready", ready)


@mutant("leader counts itself before its fsync", "the leader's own disk is one of the quorum, not free (R6)")
def _leader_counts_early(patches: Patches) -> None:
    def append(raft: Raft, entries: list[Any]) -> None:
        original(raft, entries)
        raft.step(raft.messages_to_self.pop())

    original = patches.set(leader, "_append", append)


@mutant("commit index forgotten at restart", "a durable commit index never goes back (R5)")
def _commit_forgotten(patches: Patches) -> None:
    def recover(member: Member, view: LogView) -> None:
        state = view.hard_state
        view.hard_state = HardState(state.term, state.vote, 0)
        original(member, view)

    original = patches.set(Member, "_recover", recover)


@mutant("applied index older than the state", "state and applied index are one transaction (K9)")
def _double_apply(patches: Patches) -> None:
    def image(member: Member) -> StateImage:
        true: StateImage = original(member)
        index = max(true.applied_index - 1, member.log.first_index() - 1)
        return replace(true, applied_index=index, applied_term=member.log.term(index))

    original = patches.set(Member, "_image", image)


@mutant("log synced by nothing", "the log's sync is a sync (D6)")
def _sync_lies(patches: Patches) -> None:
    patches.set(SimDisk, "sync_data", lambda disk, fd: None)


@mutant("log keeps a tail behind a received snapshot", "a marker beyond or beside the log begins it anew (D6)")
def _log_keeps_tail(patches: Patches) -> None:
    patches.set(LogReplay, "_contains", lambda replay, meta: meta.index <= replay.last_index)


@mutant("tail of another history read back", "what a received snapshot replaced stays replaced (R2)", divergence_corner)
def _stale_tail(patches: Patches) -> None:
    def fold_marker(view: LogView, meta: Any) -> None:
        if meta.index > view.snapshot.index:
            view.entries = view.entries[meta.index - view.snapshot.index :]
            view.snapshot = meta

    patches.set(LogView, "_fold_marker", fold_marker)


# -- membership -------------------------------------------------------------------------------------------------


@mutant("learner counted", "learners are no part of a quorum (R6, R9)", membership_corner)
def _learner_counted(patches: Patches) -> None:
    def committed(tracker: Tracker) -> int:
        return committed_of([progress.match for progress in tracker.progress.values()])

    patches.set(Tracker, "committed", committed)


@mutant("joint consensus needs one half", "a joint configuration needs both majorities (R6, R9)", membership_corner)
def _one_half(patches: Patches) -> None:
    patches.set(Tracker, "committed", lambda tracker: committed_of([progress.match for progress in tracker.incoming]))


@mutant(
    "snapshot restored under a pending apply", "handed-out changes never meet a newer configuration (R9)", late_corner
)
def _restore_under_apply(patches: Patches) -> None:
    def restore(raft: Raft, snapshot: Any) -> bool:
        applied, raft.log.applied = raft.log.applied, raft.log.applying
        restored = bool(original(raft, snapshot))
        raft.log.applied = applied
        return restored

    original = patches.set(follower, "restore", restore)


@mutant("two membership changes at once", "one change at a time (R9)", membership_corner)
def _two_changes(patches: Patches) -> None:
    patches.set(leader, "_refusal", lambda raft, entry, pending: "")


@mutant("removed leader goes on", "who is removed leads no more (R9)", membership_corner)
def _removed_leads(patches: Patches) -> None:
    def switch_to(raft: Raft, config: Any) -> Any:
        role, raft.role = raft.role, StateRole.FOLLOWER
        state = original(raft, config)
        raft.role = role
        return state

    original = patches.set(Raft, "switch_to", switch_to)


# -- reads ------------------------------------------------------------------------------------------------------


@mutant("read without a quorum", "a leader asks a quorum before it answers a read (K3)", read_corner)
def _read_without_quorum(patches: Patches) -> None:
    def queue_read(raft: Raft, request: Any) -> None:
        request.index = raft.log.committed
        leader._answer_read(raft, request)

    patches.set(leader, "_queue_read", queue_read)


@mutant(
    "read before the first commit of the term", "a new leader does not know yet what is committed (K3)", read_corner
)
def _early_read(patches: Patches) -> None:
    patches.set(leader, "has_committed_in_term", lambda raft: True)


@mutant("read context used again", "a late answer to an old question is not taken for one to the new (K3)", read_corner)
def _context_reused(patches: Patches) -> None:
    patches.set(Member, "_new_context", lambda member: b"%d" % member.id)


@mutant("read served before it is applied", "a read waits until its index is applied (K3)", read_corner)
def _read_not_applied(patches: Patches) -> None:
    def serve_reads(member: Member) -> None:
        member._ready_reads = [(0, read) for _, read in member._ready_reads]
        original(member)

    original = patches.set(Member, "_serve_reads", serve_reads)


# -- the world around -------------------------------------------------------------------------------------------


@mutant("proposal delivered twice", "the transport delivers a proposal at most once (K9)")
def _proposal_twice(patches: Patches) -> None:
    def send(network: Network, message: Message, payload: Any = None) -> None:
        original(network, message, payload)
        if message.type is MessageType.PROPOSE:
            original(network, message, payload)

    original = patches.set(Network, "send", send)
