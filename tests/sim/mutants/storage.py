"""Planted bugs in the store, its compactions, and the log on disk."""

from __future__ import annotations

from typing import Any

from raftkv.apply.leases import Leases
from raftkv.raft.types import HardState
from raftkv.storage import index, schema
from raftkv.storage.compaction import Compactor
from raftkv.storage.mvcc import Attachments, Store
from raftkv.storage.overlay import Overlay
from raftkv.storage.wal import wal as wal_module
from raftkv.storage.wal.wal import WAL
from tests.sim.corners import (
    batch_corner,
    compaction_corner,
    crash_corner,
    defragment_corner,
    divergence_corner,
    lease_corner,
)
from tests.sim.devices.database import SimulatedDefragmentation
from tests.sim.mutants.registry import Patches, mutant, nothing

# -- the store --------------------------------------------------------------------------------------------------


@mutant(
    "forgotten in memory before it is deleted on disk", "a crash leaves no holes in a history (C2)", compaction_corner
)
def _holes(patches: Patches) -> None:
    def drop(compactor: Compactor, job: Any, dropped: list[bytes], is_on_disk: bool) -> bool:
        for key in dropped:
            if not compactor._overlay.discard(key):
                job.deletions.add(key)
        return False

    patches.set(Compactor, "_drop", drop)


@mutant("compaction drops what is current", "the newest revision before it stays (C1)", compaction_corner)
def _drops_current(patches: Patches) -> None:
    def first_kept(revisions: Any, main: int) -> int:
        return min(int(original(revisions, main)) + 1, len(revisions) - 1)

    original = patches.set(index, "_first_kept", first_kept)


@mutant("compact revision forgotten", "a compaction is in effect after a restart too (C2)", compaction_corner)
def _compaction_forgotten(patches: Patches) -> None:
    patches.set(schema, "read_compact_revisions", lambda get: (-1, -1))


@mutant("leases of keys forgotten at restart", "what a key is attached to is read back (L1)", lease_corner)
def _attachments_forgotten(patches: Patches) -> None:
    patches.set(Attachments, "restore", nothing)


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


@mutant("batch closed in the middle of an entry", "an entry is in one batch, whole (K9)", batch_corner)
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


# -- defragmentation --------------------------------------------------------------------------------------------


@mutant("copy in use without what came meanwhile", "a copy is caught up before it is used (S1)", defragment_corner)
def _not_caught_up(patches: Patches) -> None:
    patches.set(SimulatedDefragmentation, "catch_up", lambda defragmentation: 0)


@mutant("copy from before the last commits", "a copy is caught up with all that is committed (S1)", defragment_corner)
def _caught_up_too_early(patches: Patches) -> None:
    def finish(defragmentation: SimulatedDefragmentation) -> None:
        if defragmentation._database.noted:
            defragmentation._database.noted.pop()
        original(defragmentation)

    original = patches.set(SimulatedDefragmentation, "finish", finish)
