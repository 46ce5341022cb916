"""Durations of a member's work: entries of a run together, slow entries counted, slices of compactions."""

from __future__ import annotations

from raftkv.apply.wire import Kind
from raftkv.histograms import Buckets
from raftkv.replica.metrics import OPERATIONS, work_metrics
from raftkv.replica.node.applying import SLOW_S, ApplyTimes
from raftkv.replica.node.housekeeping import CompactionTimes


def _metrics(times: ApplyTimes, compactions: CompactionTimes | None = None) -> dict[str, float]:
    metrics = work_metrics(times, Buckets((1.0,)), compactions or CompactionTimes(), 7)
    samples = [sample for family in metrics for sample in family.samples]
    return {"/".join((sample.name, *sample.labels.values())): sample.value for sample in samples}


def test_entries_are_counted_by_kind_and_outcome() -> None:
    times = ApplyTimes()
    times.run.update({Kind.PUT: 3, -Kind.TXN: 1, 77: 1})
    times.end_run(0.0)
    assert times.run == {}
    times.took(Kind.TXN, SLOW_S * 2)
    found = _metrics(times)
    count = "etcd_server_apply_duration_seconds_count/v3"
    assert (found[f"{count}/Put/true"], found[f"{count}/Txn/false"], found[f"{count}/Txn/true"]) == (3, 1, 1)
    assert times.txns == 2
    assert times.slow == 5 + 1  # a run that began at 0 took very long
    assert found["etcd_disk_wal_write_bytes_total"] == 7
    assert not any("unknown" in name for name in found), "an entry of a later version has no name"


def test_every_kind_of_entry_has_a_name() -> None:
    assert OPERATIONS.keys() == set(Kind) - {Kind.IDENTIFIED}, "what is identified counts as what it carries"


def test_a_compaction_is_its_slices_and_a_whole() -> None:
    compactions = CompactionTimes()
    compactions.over()
    for _ in range(3):
        with compactions.slice():
            pass
    assert (compactions.slices.count, compactions.wholes.count, compactions.ended_at) == (3, 0, 0.0)
    compactions.over()
    compactions.over()
    assert compactions.wholes.count == 1
    assert compactions.ended_at > 0
