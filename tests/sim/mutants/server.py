"""Planted bugs in the loop of a member, its proposals and reads, and in applying."""

from __future__ import annotations

from typing import Any

from raftkv import errors
from raftkv.apply import txn, wire
from raftkv.apply.applier import Applier
from raftkv.apply.leases import Leases
from raftkv.raft.types import HardState, Message, Ready
from raftkv.replica import replica
from raftkv.replica.node import node as node_module
from raftkv.replica.node.applying import Applying, Backlog
from raftkv.replica.node.disk import Marker
from raftkv.replica.node.housekeeping import LogCut
from raftkv.replica.node.node import Node
from raftkv.replica.node.proposals import Proposals, Waiter
from raftkv.replica.node.reads import ReadQueue
from raftkv.replica.node.waits import NodeSettings
from raftkv.replica.snapshots import SnapshotSender, sender
from tests.sim import assembly
from tests.sim.corners import (
    backlog_corner,
    compaction_corner,
    crash_corner,
    divergence_corner,
    late_corner,
    lease_corner,
    read_corner,
    replica_corner,
    snapshot_corner,
)
from tests.sim.devices.database import Mark
from tests.sim.mutants.registry import Patches, mutant, nothing

# -- the loop ---------------------------------------------------------------------------------------------------


@mutant("promises sent beside the disk", "messages that promise leave after the fsync (R6)", divergence_corner)
def _promises_early(patches: Patches) -> None:
    def persist(node: Node, ready: Ready) -> None:
        early, ready.messages_after_append = ready.messages_after_append, []
        if early:
            node._sender.send(early)
        original(node, ready)

    original = patches.set(Node, "_persist", persist)


@mutant("entries confirmed before they are written", "the core counts what the disk has (R6)", divergence_corner)
def _confirmed_early(patches: Patches) -> None:
    def persist(node: Node, ready: Ready) -> None:
        if ready.entries and ready.snapshot is None and node._installing is None and not node._disk.outstanding:
            node._confirm(ready)
            confirmed.add(id(ready))
        original(node, ready)

    def confirm(node: Node, ready: Ready) -> None:
        if id(ready) in confirmed:
            confirmed.discard(id(ready))
        else:
            original_confirm(node, ready)

    confirmed: set[int] = set()
    original = patches.set(Node, "_persist", persist)
    original_confirm = patches.set(Node, "_confirm", confirm)


@mutant("hard state of an unsynced Ready forgotten", "the next batch carries what was not written (R5)", crash_corner)
def _hard_state_forgotten(patches: Patches) -> None:
    def persist(node: Node, ready: Ready) -> None:
        original(node, ready)
        if ready.hard_state is not None and ready.must_sync:
            node.log.hard_state = HardState(ready.hard_state.term, 0, ready.hard_state.commit)

    def submit(disk: Any, batch: Any) -> None:
        if batch.hard_state is not None and not batch.entries:
            batch.hard_state = None
        original_submit(disk, batch)

    original = patches.set(Node, "_persist", persist)
    original_submit = patches.set(assembly.Disk, "submit", submit)


@mutant("applied mark not kept", "what was shown is known after a kill (R10)", crash_corner)
def _mark_not_kept(patches: Patches) -> None:
    patches.set(Mark, "note", nothing)


@mutant("applied mark not read", "a restart applies again what was shown (R10)", crash_corner)
def _mark_not_read(patches: Patches) -> None:
    patches.set(assembly, "take_mark", nothing)


@mutant(
    "snapshot acknowledged before it is installed",
    "the core goes on when the state is there (R4, R5)",
    divergence_corner,
)
def _acknowledged_uninstalled(patches: Patches) -> None:
    def durable(node: Node, ready: Ready) -> None:
        original(node, ready)
        if ready.snapshot is not None:
            node._installing = None
            node._confirm(ready)

    original = patches.set(Node, "_durable", durable)


@mutant("log cut beyond the database", "the log forgets only what the database has (R5)", crash_corner)
def _cut_too_far(patches: Patches) -> None:
    def step(log_cut: LogCut) -> None:
        store = log_cut._store
        durable, store.durable_index = store.durable_index, store.applied_index
        try:
            original(log_cut)
        finally:
            store.durable_index = durable

    original = patches.set(LogCut, "step", step)


@mutant("marker of a snapshot goes back", "a newer snapshot may come while one is installed", snapshot_corner)
def _marker_goes_back(patches: Patches) -> None:
    patches.set(replica, "_mark", lambda replica, meta: replica.disk.submit(Marker(meta, nothing)))


@mutant("end of a snapshot not reported", "the core hears of every end (R10)", snapshot_corner)
def _unreported(patches: Patches) -> None:
    def ended(sender: SnapshotSender, to: int, task: Any) -> None:
        sender._report = nothing
        original(sender, to, task)

    original = patches.set(SnapshotSender, "_ended", ended)


@mutant("a copy made before a member joined", "who joined is sent a database that knows it (R10)", late_corner)
def _older_copy(patches: Patches) -> None:
    patches.set(sender, "serves", lambda copy, to, index: copy.info.index >= index)


# -- proposals and reads ----------------------------------------------------------------------------------------


@mutant("proposals taken twice", "what was sent is sent once (K9)")
def _taken_twice(patches: Patches) -> None:
    def take_unsent(proposals: Proposals, *how: Any) -> list[tuple[int, bytes]]:
        taken: list[tuple[int, bytes]] = original(proposals, *how)
        again = [item for item in taken if item[0] % 8 == 0 and item[0] not in doubled]
        doubled.update(item[0] for item in again)
        return taken + again

    doubled: set[int] = set()
    original = patches.set(Proposals, "take_unsent", take_unsent)


@mutant("answer to another caller", "the request id pairs an entry with its caller (K2, D1)")
def _wrong_caller(patches: Patches) -> None:
    def pop(proposals: Proposals, request_id: int) -> Waiter | None:
        if request_id in proposals._waiters:
            return proposals._waiters.pop(next(iter(proposals._waiters)))
        return None

    patches.set(Proposals, "pop", pop)


@mutant("timed out means refused", "what was sent may still happen (K1)", crash_corner)
def _definite_timeout(patches: Patches) -> None:
    def timeout_error(*_: object) -> errors.StatusError:
        return errors.TooManyRequestsError()

    patches.set(node_module, "timeout_error", timeout_error)
    patches.set(NodeSettings, "request_timeout_s", property(lambda settings: settings.election_s / 2))


@mutant("reader joins a round under way", "a round begins after all its readers came (K3)", read_corner)
def _joins_round(patches: Patches) -> None:
    def add(reads: ReadQueue, reader: Any, now: float) -> None:
        if reads._round is not None:
            reads._round.readers.append(reader)
        else:
            original(reads, reader, now)

    original = patches.set(ReadQueue, "add", add)


@mutant("read confirmed by the member itself", "a confirmation comes from a quorum (K3)", read_corner)
def _confirms_itself(patches: Patches) -> None:
    def start(reads: ReadQueue, now: float) -> None:
        original(reads, now)
        if reads._round is not None:
            reads.confirmed.append((0, now, reads._round.readers))
            reads._round = None

    original = patches.set(ReadQueue, "start", start)


@mutant("freshness counts from the confirmation", "a state is as new as the begin of its round (K11)", replica_corner)
def _fresh_at_confirmation(patches: Patches) -> None:
    def confirm(reads: ReadQueue, context: bytes, index: int, applied: int, now: float) -> None:
        if reads._round is not None:
            reads._round.started_at = now
        original(reads, context, index, applied, now)

    original = patches.set(ReadQueue, "confirm", confirm)


@mutant("freshness before it is applied", "a confirmed index says nothing until it is applied (K11)", replica_corner)
def _fresh_unapplied(patches: Patches) -> None:
    def confirm(reads: ReadQueue, context: bytes, index: int, applied: int, now: float) -> None:
        if reads._round is not None and context in reads._round.contexts:
            reads._fresh_at = reads._round.started_at
        original(reads, context, index, applied, now)

    original = patches.set(ReadQueue, "confirm", confirm)


@mutant("freshness outlives a pause", "time in which the member stood still counts (K11)", replica_corner)
def _fresh_for_ever(patches: Patches) -> None:
    def add_within(reads: ReadQueue, reader: Any, staleness_s_max: float, now: float) -> None:
        if reads._fresh_at > 0 and staleness_s_max >= 0.1:
            reader.ready()
        else:
            original(reads, reader, staleness_s_max, now)

    original = patches.set(ReadQueue, "add_within", add_within)


# -- applying ---------------------------------------------------------------------------------------------------


@mutant("decision of a deposed leader carried out", "a decision holds under its own term alone (L2, R4)", lease_corner)
def _old_decision(patches: Patches) -> None:
    patches.set(Applier, "_check_term", nothing)


@mutant("put with a lease that is gone", "a key is attached to a lease that exists (R4)", lease_corner)
def _lease_not_checked(patches: Patches) -> None:
    patches.set(txn, "check_put", nothing)
    patches.set(wire, "check_lease", nothing)


@mutant("keys outlive their lease", "the end of a lease deletes its keys (L1)", lease_corner)
def _keys_stay(patches: Patches) -> None:
    patches.set(Leases, "_delete_keys", lambda leases, lease_id, changes_max: iter(()))


@mutant("keys of a lease go one by one", "the keys of a lease are deleted in one revision (L1)", lease_corner)
def _keys_go_singly(patches: Patches) -> None:
    def delete_keys(leases: Leases, lease_id: int, changes_max: int) -> Any:
        return original(leases, lease_id, 1)

    original = patches.set(Leases, "_delete_keys", delete_keys)


@mutant("deletes left out where no caller waits", "only what is read is left out (R4)")
def _deletes_left_out(patches: Patches) -> None:
    def delete_range(applier: Applier, request: Any) -> Any:
        if not applier._is_answered and request.range_end:
            request.range_end = b""
        return original(applier, request)

    original = patches.set(Applier, "_delete_range", delete_range)


@mutant("entries skipped after a slice", "entries are applied in order, each once (R4)", compaction_corner)
def _skipped_after_slice(patches: Patches) -> None:
    def apply_sliced(applying: Applying, under_way: Any) -> None:
        had = applying._under_way is under_way
        queue = applying._queue
        first = queue[0] if queue else None
        if had and first is not None and len(queue) > 1:
            queue.popleft()
        original(applying, under_way)

    original = patches.set(Applying, "_slice", apply_sliced)


@mutant("full for ever", "what is applied makes room for more of the log (R10)", backlog_corner)
def _full_for_ever(patches: Patches) -> None:
    def takes(backlog: Backlog, message: Message) -> bool:
        return original(backlog, message) and not (message.entries and backlog.appends_dropped)

    original = patches.set(Backlog, "takes", takes)
