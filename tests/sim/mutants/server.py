"""Planted bugs in what surrounds the core: the loop, proposals and reads, applying, leases, watches, the store.

See ``registry``.
"""

from __future__ import annotations

from typing import Any

from raftkv import errors
from raftkv.apply import txn
from raftkv.apply.applier import Applier
from raftkv.apply.leases import Leases
from raftkv.raft.types import HardState, Ready
from raftkv.server import wiring
from raftkv.server.lease import keep_alives
from raftkv.server.lease.graces import ConnectionLost
from raftkv.server.lease.lessor import Lessor
from raftkv.server.lease.on_leader import OnLeader
from raftkv.server.lease.renewals import Renewals
from raftkv.server.lease.times import FRESH, UNLOGGED, LeaseTimes
from raftkv.server.node.applying import Applying
from raftkv.server.node.disk import Mark as MarkBatch
from raftkv.server.node.housekeeping import Housekeeping
from raftkv.server.node.node import Node
from raftkv.server.node.proposals import Proposals, Waiter
from raftkv.server.node.reads import ReadQueue
from raftkv.server.snapshots import SnapshotSender
from raftkv.server.watch import hub as hub_module
from raftkv.server.watch.catch_up import CatchUp
from raftkv.server.watch.hub import WatchHub
from raftkv.server.watch.index import Watcher
from raftkv.server.watch.stream import WatchStream
from raftkv.server.watch.turn import Events
from raftkv.storage import key_index, schema
from raftkv.storage.attachments import Attachments
from raftkv.storage.compaction import Compactor
from raftkv.storage.mvcc import Store
from raftkv.storage.overlay import Overlay
from raftkv.storage.wal import wal as wal_module
from raftkv.storage.wal.wal import WAL
from tests.sim import assembly
from tests.sim.corners import (
    compaction_corner,
    crash_corner,
    divergence_corner,
    lease_corner,
    read_corner,
    snapshot_corner,
    watch_corner,
)
from tests.sim.devices.database import Mark
from tests.sim.mutants.registry import Patches, mutant


def _nothing(*_arguments: Any, **_more: Any) -> None:
    """Do nothing."""


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
            node.log.set_hard_state(HardState(ready.hard_state.term, 0, ready.hard_state.commit))

    def submit(disk: Any, batch: Any) -> None:
        if batch.hard_state is not None and not batch.entries:
            batch.hard_state = None
        original_submit(disk, batch)

    original = patches.set(Node, "_persist", persist)
    original_submit = patches.set(assembly.Disk, "submit", submit)


@mutant("applied mark not kept", "what was shown is known after a kill (R10)", crash_corner)
def _mark_not_kept(patches: Patches) -> None:
    patches.set(Mark, "note", _nothing)


@mutant("applied mark not read", "a restart applies again what was shown (R10)", crash_corner)
def _mark_not_read(patches: Patches) -> None:
    patches.set(assembly, "take_mark", _nothing)


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
    def cut_log(housekeeping: Housekeeping) -> None:
        store = housekeeping._store
        durable, store.durable_index = store.durable_index, store.applied_index
        try:
            original(housekeeping)
        finally:
            store.durable_index = durable

    original = patches.set(Housekeeping, "_cut_log", cut_log)


@mutant("marker of a snapshot goes back", "a newer snapshot may come while one is installed", snapshot_corner)
def _marker_goes_back(patches: Patches) -> None:
    patches.set(wiring, "_mark", lambda parts, meta: parts.disk.submit(MarkBatch(meta, _nothing)))


@mutant("end of a snapshot not reported", "the core hears of every end (R10)", snapshot_corner)
def _unreported(patches: Patches) -> None:
    def ended(sender: SnapshotSender, to: int, task: Any) -> None:
        sender._report = _nothing  # type: ignore[method-assign]
        original(sender, to, task)

    original = patches.set(SnapshotSender, "_ended", ended)


# -- proposals and reads ----------------------------------------------------------------------------------------


@mutant("proposals taken twice", "what was sent is sent once (K9)")
def _taken_twice(patches: Patches) -> None:
    def take_unsent(proposals: Proposals, bytes_max: int = 1 << 30) -> list[tuple[int, bytes]]:
        taken: list[tuple[int, bytes]] = original(proposals, bytes_max)
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
    def timeout_error(node: Node, started_at: float, now: float, sent: bool) -> errors.StatusError:
        return errors.TooManyRequestsError()

    patches.set(Node, "_timeout_error", timeout_error)
    patches.set(assembly.NodeSettings, "request_timeout_s", property(lambda settings: settings.election_s / 2))


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
            reads._confirmed.append((0, now, reads._round.readers))
            reads._round = None

    original = patches.set(ReadQueue, "start", start)


# -- applying ---------------------------------------------------------------------------------------------------


@mutant("decision of a deposed leader carried out", "a decision holds under its own term alone (L2, R4)", lease_corner)
def _old_decision(patches: Patches) -> None:
    patches.set(Applier, "_check_term", _nothing)


@mutant("put with a lease that is gone", "a key is attached to a lease that exists (R4)", lease_corner)
def _lease_not_checked(patches: Patches) -> None:
    patches.set(txn, "check_put", _nothing)


@mutant("keys outlive their lease", "the end of a lease deletes its keys (L1)", lease_corner)
def _keys_stay(patches: Patches) -> None:
    patches.set(Leases, "_delete_keys", lambda leases, lease_id, changes_max: iter(()))


@mutant("keys of a lease go one by one", "the keys of a lease are deleted in one revision (L1)", lease_corner)
def _keys_go_singly(patches: Patches) -> None:
    def delete_keys(leases: Leases, lease_id: int, changes_max: int) -> Any:
        return original(leases, lease_id, 1)

    original = patches.set(Leases, "_delete_keys", delete_keys)


@mutant("deletes left out where nobody waits", "only what is read is left out (R4)")
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


# -- leases -----------------------------------------------------------------------------------------------------


@mutant("lease lasts half its TTL", "no lease ends early (L2)", lease_corner)
def _half_a_ttl(patches: Patches) -> None:
    def end_of(times: LeaseTimes, lease: Any) -> float:
        return float(original(times, lease)) - lease.ttl_s / 2

    original = patches.set(LeaseTimes, "_end_of", end_of)


@mutant("renewals seen by the leader alone", "every member notes what the log renews (L2)", lease_corner)
def _renewals_unseen(patches: Patches) -> None:
    def renewed(times: LeaseTimes, lease_ids: Any) -> None:
        if times.is_primary:
            original(times, lease_ids)

    original = patches.set(LeaseTimes, "renewed", renewed)


@mutant("keep-alives never logged", "a renewal is in the log before it is answered (L2)", lease_corner)
def _never_logged(patches: Patches) -> None:
    def renew(times: LeaseTimes, lease_id: int) -> int:
        verdict = int(original(times, lease_id))
        return FRESH if verdict == UNLOGGED else verdict

    original = patches.set(LeaseTimes, "renew", renew)


@mutant("ending lease renewed", "nothing saves a lease whose end is on its way (L2)", lease_corner)
def _renewed_while_ending(patches: Patches) -> None:
    def renew(times: LeaseTimes, lease_id: int) -> int:
        lease = times._leases.get(lease_id)
        if lease is not None and lease.is_expiring:
            return FRESH
        return int(original(times, lease_id))

    original = patches.set(LeaseTimes, "renew", renew)


@mutant("restart does not count as a renewal", "a member that starts knows of no renewal (L2)", lease_corner)
def _restart_no_renewal(patches: Patches) -> None:
    def reloaded(times: LeaseTimes, granted: dict[int, int]) -> None:
        original(times, granted)
        for lease in times._leases.values():
            lease.renewed_at = -1e9

    original = patches.set(LeaseTimes, "reloaded", reloaded)
    patches.set(LeaseTimes, "_end_of", lambda times, lease: lease.ends_at)


@mutant("leases never end", "a lease ends when its time is over (L3)", lease_corner)
def _never_end(patches: Patches) -> None:
    patches.set(LeaseTimes, "has_due", lambda times: False)


@mutant("keep-alives lost with their leader", "what waits goes to the next leader (L2)", lease_corner)
def _answered_when_deposed(patches: Patches) -> None:
    def surrender(renewals: Renewals) -> list[Any]:
        for pending in (taken := original(renewals)):
            pending.answer(60)
        return [] if taken else taken

    original = patches.set(Renewals, "surrender", surrender)


@mutant("late keep-alive taken for a new break", "any keep-alive since undoes a break (L2)", lease_corner)
def _late_break(patches: Patches) -> None:
    def kept(stream: Any, lease_id: int, grace_ms: int, ttl_s: int) -> None:
        graces = stream._service.graces
        if stream._ended and stream._call.severed and grace_ms > 0 and ttl_s > 0 and lease_id not in graces._keepers:
            graces._report([ConnectionLost(lease_id, grace_ms / 1000, graces._clock())])
        original(stream, lease_id, grace_ms, ttl_s)

    original = patches.set(keep_alives.KeepAliveStream, "kept", kept)


@mutant("followers answer keep-alives", "the leader alone decides about leases (L2)", lease_corner)
def _followers_answer(patches: Patches) -> None:
    def keep_alive(lessor: Lessor, pending: Any) -> None:
        pending.answer(lessor.times.ttl_s(pending.lease_id))

    patches.set(Lessor, "keep_alive", keep_alive)


@mutant("leadership trusted for ever", "a leader that answers at once was confirmed a moment ago (L2)", lease_corner)
def _trusted_for_ever(patches: Patches) -> None:
    patches.set(OnLeader, "is_recent", lambda on_leader, now: on_leader._is_primary())


# -- watches ----------------------------------------------------------------------------------------------------


@mutant("events dropped for a slow client", "a slow watcher loses nothing (W3, W10)", watch_corner)
def _dropped_when_slow(patches: Patches) -> None:
    def fan_out(stream: WatchStream, header: bytes, id_fields: Any, event: bytes) -> bool:
        original(stream, header, id_fields, event)
        return True

    original = patches.set(WatchStream, "fan_out", fan_out)


@mutant("history begins one revision late", "a watch goes on with the next revision (W3, W5)", watch_corner)
def _one_late(patches: Patches) -> None:
    def unsynced(hub: WatchHub, watcher: Watcher, next_revision: int) -> None:
        original(hub, watcher, next_revision + 1)

    original = patches.set(WatchHub, "_unsynced", unsynced)


@mutant("progress reported to those behind", "progress means that everything was sent (W6)", watch_corner)
def _false_progress(patches: Patches) -> None:
    def report_progress(stream: WatchStream) -> None:
        stream.unsynced_count, count = 0, stream.unsynced_count
        original(stream)
        stream.unsynced_count = count

    original = patches.set(WatchStream, "_report_progress", report_progress)


@mutant("future watch gets what comes first", "a watch gets nothing before its start (W8)", watch_corner)
def _future_early(patches: Patches) -> None:
    def wanted(events: Events, watcher: Watcher) -> Any:
        start, watcher.start_revision = watcher.start_revision, 0
        try:
            return original(events, watcher)
        finally:
            watcher.start_revision = start

    original = patches.set(Events, "wanted", wanted)


@mutant("watches not moved to a new database", "a new state reaches every watch (W3, W9)", watch_corner)
def _snapshot_untold(patches: Patches) -> None:
    def restored(hub: WatchHub) -> None:
        hub.delivered_revision = hub._store.revision

    patches.set(WatchHub, "restored", restored)


@mutant("compacted history passed over", "a watcher that lost its history is canceled (W10)", watch_corner)
def _silently_compacted(patches: Patches) -> None:
    def end(catch_up: CatchUp, watcher: Watcher) -> None:
        watcher.next_revision = catch_up._store.compact_revision
        catch_up._queue[watcher] = None

    patches.set(CatchUp, "_end", end)


@mutant("revision split over responses", "a revision is never split (W4)", watch_corner)
def _split(patches: Patches) -> None:
    def singly(batch: Any) -> Any:
        for revision, changes in batch:
            for change in changes:
                yield [(revision, [change])]

    patches.set(hub_module, "pieces", singly)


@mutant("filters forgotten", "a watcher gets only what it asked for (W7)", watch_corner)
def _unfiltered(patches: Patches) -> None:
    patches.set(Watcher, "wants", lambda watcher, is_delete: True)


@mutant("previous value left out", "a watcher gets the value before if it asked for it (W7)", watch_corner)
def _no_previous(patches: Patches) -> None:
    def everything(events: Events, prev_kv: bool, bytes_max: int) -> Any:
        return original(events, False, bytes_max)

    original = patches.set(Events, "all", everything)


@mutant("events of a turn delivered twice", "an event is delivered once (W2)", watch_corner)
def _delivered_twice(patches: Patches) -> None:
    def deliver_batch(hub: WatchHub, group: Any, batch: Any) -> None:
        original(hub, group, batch)
        original(hub, group, batch[:1])

    original = patches.set(WatchHub, "_deliver_batch", deliver_batch)


# -- the store --------------------------------------------------------------------------------------------------


@mutant(
    "forgotten in memory before it is deleted on disk", "a crash leaves no holes in a history (C2)", compaction_corner
)
def _holes(patches: Patches) -> None:
    def drop(compactor: Compactor, job: Any, dropped: list[bytes], is_on_disk: bool) -> bool:
        job.to_delete += [key for key in dropped if not compactor._overlay.discard(key)]
        return False

    patches.set(Compactor, "_drop", drop)


@mutant("compaction drops what is current", "the newest revision before it stays (C1)", compaction_corner)
def _drops_current(patches: Patches) -> None:
    def first_kept(revisions: Any, main: int) -> int:
        return min(int(original(revisions, main)) + 1, len(revisions) - 1)

    original = patches.set(key_index, "_first_kept", first_kept)


@mutant("compact revision forgotten", "a compaction is in effect after a restart too (C2)", compaction_corner)
def _compaction_forgotten(patches: Patches) -> None:
    patches.set(schema, "read_compact_revisions", lambda get: (-1, -1))


@mutant("leases of keys forgotten at restart", "what a key is attached to is read back (L1)", lease_corner)
def _attachments_forgotten(patches: Patches) -> None:
    patches.set(Attachments, "restore", _nothing)


@mutant("leases kept over a snapshot", "a new state brings its own leases (R4)", divergence_corner)
def _leases_kept(patches: Patches) -> None:
    def reload(leases: Leases) -> None:
        before = dict(leases.granted)
        original(leases)
        leases.granted.update(before)

    original = patches.set(Leases, "reload", reload)


@mutant("applied index ahead of the state", "state and applied index are one transaction (D10)", crash_corner)
def _stamp_ahead(patches: Patches) -> None:
    def fill(overlay: Overlay) -> Any:
        records = list(overlay.pending.records.items())
        if len(records) > 1 and not overlay.is_changing and overlay._committing is None:
            key, record = records[-1]
            del overlay.pending.records[key]
            batch = original(overlay)
            overlay.pending.records[key] = record
            return batch
        return original(overlay)

    original = patches.set(Overlay, "_fill", fill)


@mutant("batch closed in the middle of an entry", "an entry is in one batch, whole (K9)", compaction_corner)
def _torn_unit(patches: Patches) -> None:
    def fill(overlay: Overlay) -> Any:
        changing, overlay.is_changing = overlay.is_changing, False
        try:
            return original(overlay)
        finally:
            overlay.is_changing = changing

    original = patches.set(Overlay, "_fill", fill)


@mutant("commit lost at a crash", "a commit that was reported is durable (R5)", crash_corner)
def _commit_lost(patches: Patches) -> None:
    def set_applied(store: Store, index: int, term: int) -> None:
        original(store, index, term)
        store.durable_index = index

    original = patches.set(Store, "set_applied", set_applied)


# -- the log on disk --------------------------------------------------------------------------------------------


@mutant("a new segment forgets the hard state", "the head of a segment repeats it (D6)", crash_corner)
def _head_without_state(patches: Patches) -> None:
    def head(segment: Any, metadata: bytes, hard_state: HardState, *rest: Any) -> Any:
        return original(segment, metadata, HardState(0, 0, hard_state.commit), *rest)

    original = patches.set(wal_module, "encode_head", head)


@mutant("log released too far", "no entry behind the marker is deleted (D6)", crash_corner)
def _released_too_far(patches: Patches) -> None:
    def release(wal: WAL, index: int) -> int:
        wal.sync()
        count = 0
        while len(wal._segments) > 1:
            wal._remove_oldest()
            count += 1
        return count

    patches.set(WAL, "release", release)
