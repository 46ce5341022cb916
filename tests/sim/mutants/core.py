"""Planted bugs in the core and its durability; ``registry`` explains their purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raftkv.raft import confchange
from raftkv.raft import core as core_module
from raftkv.raft.core import Raft
from raftkv.raft.log import MemoryLog, RaftLog
from raftkv.raft.read_lease import ReadLease
from raftkv.raft.tracker import PROBE, SNAPSHOT, Progress, Tracker, committed_of
from raftkv.raft.types import NONE, Message, MessageType, Ready, StateRole
from raftkv.replica.node.disk import Batch, Restore
from raftkv.replica.node.node import Node
from raftkv.replica.node.reads import ReadQueue
from raftkv.storage.mvcc import Store
from raftkv.storage.wal.recovery import LogReplay
from tests.sim import assembly
from tests.sim.corners import (
    divergence_corner,
    election_corner,
    late_corner,
    membership_corner,
    read_corner,
    read_lease_corner,
    snapshot_corner,
)
from tests.sim.devices.network import Network
from tests.sim.mutants.registry import Patches, mutant
from tests.storage.wal.simdisk import SimDisk

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
    def write(batch: Batch, log: Any) -> None:
        if batch.hard_state is not None:
            batch.hard_state = replace(batch.hard_state, vote=NONE)
        original(batch, log)

    original = patches.set(Batch, "write", write)


@mutant("term not persisted", "the term is on disk before it is used (R5, R6)")
def _term_not_persisted(patches: Patches) -> None:
    def write(batch: Batch, log: Any) -> None:
        if batch.hard_state is not None:
            batch.hard_state = replace(batch.hard_state, term=1)
        original(batch, log)

    original = patches.set(Batch, "write", write)


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


@mutant("deaf leader stays", "CheckQuorum deposes a leader that hears no follower (R8)")
def _deaf_leader(patches: Patches) -> None:
    patches.set(Raft, "_check_quorum", lambda raft: None)


# -- the log ----------------------------------------------------------------------------------------------------


@mutant("log matching check skipped", "entries are appended only where the logs match (R2)", divergence_corner)
def _matching_skipped(patches: Patches) -> None:
    def maybe_append(log: RaftLog, index: int, term: int, entries: list[Any], commit: int) -> int:
        known = log.term_or_zero(index) if index <= log.last_index else term
        return int(original(log, index, known or term, entries, commit))

    original = patches.set(RaftLog, "maybe_append", maybe_append)


@mutant("old append truncates", "entries that match stay, in spite of old messages (R6)")
def _old_append_truncates(patches: Patches) -> None:
    def append_new(log: RaftLog, entries: list[Any]) -> None:
        fresh = [entry for entry in entries if entry.index > log.committed]
        if fresh:
            log.append(fresh)

    patches.set(RaftLog, "_append_new", append_new)


@mutant(
    "heartbeat carries the whole commit index",
    "a heartbeat commits no more than what is known to match (R4)",
    election_corner,
)
def _heartbeat_commit(patches: Patches) -> None:
    def send_heartbeat(raft: Raft, id: int, progress: Any, context: bytes) -> None:
        original(raft, id, progress, context)
        raft.messages[-1].commit = raft.log.committed

    original = patches.set(Raft, "_send_heartbeat", send_heartbeat)
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

    original = patches.set(Raft, "_maybe_commit", maybe_commit)


@mutant("older snapshot restored", "a snapshot never replaces newer state (R5)", snapshot_corner)
def _older_snapshot(patches: Patches) -> None:
    def restore(raft: Raft, snapshot: Any) -> bool:
        if snapshot.index > raft.log.committed or raft.role is not StateRole.FOLLOWER:
            return bool(original(raft, snapshot))
        raft.log.restore(snapshot)
        raft.switch_to(confchange.restore(snapshot.conf_state))
        return True

    original = patches.set(Raft, "_restore", restore)


@mutant(
    "rejection heeded while a snapshot is on its way",
    "a late rejection does not move next (invariants)",
    snapshot_corner,
)
def _rejection_in_snapshot(patches: Patches) -> None:
    def maybe_decrement(progress: Progress, rejected: int, match_hint: int) -> bool:
        state = progress.state
        if state is not SNAPSHOT:
            return bool(original(progress, rejected, match_hint))
        progress.state = PROBE
        changed = bool(original(progress, rejected, match_hint))
        progress.state = state
        return changed

    original = patches.set(Progress, "maybe_decrement", maybe_decrement)


# -- durability -------------------------------------------------------------------------------------------------


@mutant("acknowledged before the fsync", "what waits for the disk waits for its sync (R6)")
def _ack_before_fsync(patches: Patches) -> None:
    def persist(node: Node, ready: Ready) -> None:
        must_sync, ready.must_sync = ready.must_sync, False
        original(node, ready)
        ready.must_sync = must_sync

    original = patches.set(Node, "_persist", persist)


@mutant("snapshot acknowledged before the fsync", "a received snapshot is synced like entries (R6)", snapshot_corner)
def _snapshot_not_synced(patches: Patches) -> None:
    def write(batch: Restore, log: Any) -> None:
        log.save_snapshot(batch.meta, batch.hard_state)
        batch.must_sync = False

    patches.set(Restore, "write", write)


@mutant("leader counts itself before its fsync", "the leader's own disk is one of the quorum, not free (R6)")
def _leader_counts_early(patches: Patches) -> None:
    def append(raft: Raft, entries: list[Any]) -> None:
        original(raft, entries)
        raft.step(raft.messages_to_self.pop())

    original = patches.set(Raft, "_append", append)


@mutant("commit index forgotten at restart", "a durable commit index never goes back (R5)")
def _commit_forgotten(patches: Patches) -> None:
    def forgetful(recovered: Any, store: Store) -> MemoryLog:
        log: MemoryLog = original(recovered, store)
        state = log.hard_state
        log.hard_state = replace(state, commit=max(recovered.snapshot.index, store.applied_index))
        return log

    original = patches.set(assembly, "memory_log", forgetful)
    patches.set(assembly, "take_mark", lambda log, mark: None)


@mutant("applied index older than the state", "state and applied index are one transaction (K9)")
def _double_apply(patches: Patches) -> None:
    def stamp(store: Store, batch: Any) -> Any:
        store.applied_index -= 1
        try:
            return original(store, batch)
        finally:
            store.applied_index += 1

    original = patches.set(Store, "_stamp", stamp)


@mutant("log synced by nothing", "the log's sync is a sync (D6)")
def _sync_lies(patches: Patches) -> None:
    patches.set(SimDisk, "sync_data", lambda disk, fd: None)


@mutant("log keeps a tail behind a received snapshot", "a marker beyond or beside the log begins it anew (D6)")
def _log_keeps_tail(patches: Patches) -> None:
    patches.set(LogReplay, "_contains", lambda replay, meta: meta.index <= replay.last_index)


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

    original = patches.set(Raft, "_restore", restore)


@mutant("two membership changes at once", "one change at a time (R9)", membership_corner)
def _two_changes(patches: Patches) -> None:
    patches.set(Raft, "_conf_change_refusal", lambda raft, entry, pending: "")


@mutant("removed leader goes on", "who is removed leads no more (R9)", membership_corner)
def _removed_leads(patches: Patches) -> None:
    def switch_to(raft: Raft, config: Any) -> Any:
        role, raft.role = raft.role, StateRole.FOLLOWER
        state = original(raft, config)
        raft.role = role
        return state

    original = patches.set(Raft, "switch_to", switch_to)


@mutant("joint configuration left before it is applied", "auto-leave waits for all changes before it (R9)")
def _early_leave(patches: Patches) -> None:
    def applied_to(raft: Raft, index: int) -> None:
        pending, raft.pending_conf_index = raft.pending_conf_index, 0
        try:
            original(raft, index)
        finally:
            raft.pending_conf_index = max(pending, raft.pending_conf_index)

    original = patches.set(Raft, "applied_to", applied_to)


@mutant("candidate goes on with an unapplied change", "votes are counted by the newest configuration (R1, R9)")
def _candidate_goes_on(patches: Patches) -> None:
    patches.set(Raft, "_has_unapplied_conf_change", lambda raft: False)


@mutant("nothing committed by a change", "a smaller quorum may hold more already (R10)")
def _no_commit_after_change(patches: Patches) -> None:
    def after_conf_change(raft: Raft) -> None:
        raft._answer_confirmed_reads()
        raft.append_due = True
        if raft.transferee not in raft.tracker.config.all_voters():
            raft.transferee = NONE

    patches.set(Raft, "_after_conf_change", after_conf_change)


# -- reads ------------------------------------------------------------------------------------------------------


@mutant("read without a quorum", "a leader asks a quorum before it answers a read (K3)", read_corner)
def _read_without_quorum(patches: Patches) -> None:
    def queue_read(raft: Raft, request: Any) -> None:
        request.index = raft.log.committed
        raft._answer_read(request)

    patches.set(Raft, "_queue_read", queue_read)


@mutant(
    "read before the first commit of the term", "a new leader does not know yet what is committed (K3)", read_corner
)
def _early_read(patches: Patches) -> None:
    patches.set(Raft, "_has_committed_in_term", lambda raft: True)


@mutant("read context used again", "a late answer to an old question is not taken for one to the new (K3)", read_corner)
def _context_reused(patches: Patches) -> None:
    def ask_round(reads: ReadQueue, current: Any, now: float) -> None:
        current.contexts.add(b"again")
        current.asked_at = now
        reads._ask(b"again")

    patches.set(ReadQueue, "_ask_round", ask_round)


@mutant("read served before it is applied", "a read waits until its index is applied (K3)", read_corner)
def _read_not_applied(patches: Patches) -> None:
    patches.set(ReadQueue, "applied", _serve_all)


def _serve_all(reads: ReadQueue, index: int) -> None:
    while reads.confirmed:
        for reader in reads.confirmed.popleft()[2]:
            reader.ready()


@mutant(
    "commits of a new leader not held back", "an earlier leader may still read by its lease (K3)", read_lease_corner
)
def _commits_at_once(patches: Patches) -> None:
    patches.set(ReadLease, "must_wait", lambda lease: False)


# -- the world around -------------------------------------------------------------------------------------------


@mutant("proposal delivered twice", "the transport delivers a proposal at most once (K9)")
def _proposal_twice(patches: Patches) -> None:
    def send(network: Network, source: int, messages: list[Message]) -> None:
        original(network, source, messages)
        again = [message for message in messages if message.type is MessageType.PROPOSE]
        if again:
            original(network, source, again)

    original = patches.set(Network, "send", send)
