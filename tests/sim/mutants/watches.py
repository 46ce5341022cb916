"""Planted bugs in the delivery of events to watchers."""

from __future__ import annotations

from typing import Any

from raftkv.replica.watch import hub as hub_module
from raftkv.replica.watch.catch_up import CatchUp
from raftkv.replica.watch.hub import Events, WatchHub
from raftkv.replica.watch.index import Watcher
from raftkv.replica.watch.stream import WatchStream
from tests.sim.corners import watch_corner
from tests.sim.mutants.registry import Patches, mutant


@mutant("events dropped for a slow client", "a slow watcher loses nothing (W3, W10)", watch_corner)
def _dropped_when_slow(patches: Patches) -> None:
    def fan_out(stream: WatchStream, header: bytes, id_fields: Any, event: bytes, count: int) -> bool:
        original(stream, header, id_fields, event, count)
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
        catch_up._queue.add(watcher.stream.queue, watcher)

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
