"""Metrics of runs and queues, out of folded histories; of checkpoints, out of what was watched."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from raftkv.checkpoint.records import Checkpoint, Latest
from raftkv.training.history import fold, read_change
from raftkv.training.metrics import SETTLED_S, CheckpointMetrics, QueueMetrics, RunMetrics
from raftkv.training.records import Fault
from raftkv.training.scheduling.ledger import ClusterView, GrantView, HostView, WaitingView
from tests.training.scripted_run import GENERATION_2_RUNS, KEYS, SCRIPT, Script, encoded

RUN = "jobs/a"


def _samples(collector: Collector) -> dict[str, float]:
    """Values by ``name/label value/label value``, without prefix."""
    return {
        "/".join((sample.name.removeprefix("raftkv_"), *sample.labels.values())): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def _after(script: Script, now: float) -> dict[str, float]:
    metrics = RunMetrics(lambda: now)
    changes = [
        read_change(KEYS, (KEYS.base + name).encode(), encoded(content), revision)
        for revision, (name, content) in enumerate(script, 2)
    ]
    metrics.folds[RUN] = fold(KEYS, [change for change in changes if change is not None])
    return _samples(metrics)


def test_a_running_generation() -> None:
    found = _after(SCRIPT[:GENERATION_2_RUNS], 115.0)
    assert (found[f"run_generation/{RUN}"], found[f"run_world_size/{RUN}"], found[f"run_members/{RUN}"]) == (2, 2, 2)
    assert found[f"run_without_world_seconds/{RUN}"] == 0
    assert found[f"run_lost_seconds_total/{RUN}"] == 0.5
    assert found[f"run_phase/{RUN}/running"] == 1
    assert found[f"run_faults_total/{RUN}/signal"] == found[f"run_faults_total/{RUN}/exit"] == 1
    assert found[f"run_faults_total/{RUN}/partition"] == 0, "every cause is there from the start"


def test_causes_that_no_node_reports_share_one_label() -> None:
    """Each text that a user of the run wrote was one more time series of the exporter."""
    faults: Script = [
        (f"fault/2/{rank:06d}", Fault(2, "a-1", rank=rank, cause=f"cause {rank}", time=111.0)) for rank in range(100)
    ]
    usual, found = (_after([*SCRIPT[:GENERATION_2_RUNS], *more], 115.0) for more in ([], faults))
    assert found.pop(f"run_faults_total/{RUN}/other") == 100
    assert found == usual


def test_a_run_whose_world_broke() -> None:
    found = _after(SCRIPT, 150.0)
    assert (found[f"run_world_size/{RUN}"], found[f"run_nodes/{RUN}"], found[f"run_waiting_nodes/{RUN}"]) == (0, 1, 1)
    assert found[f"run_without_world_seconds/{RUN}"] == 30
    assert found[f"run_lost_seconds_total/{RUN}"] == 30.5
    assert found[f"run_phase/{RUN}/broken"] == 1


def test_a_run_that_never_had_a_world() -> None:
    found = _after(SCRIPT[:4], 160.0)
    assert found[f"run_without_world_seconds/{RUN}"] == 60, "since its first node came"
    assert found[f"run_lost_seconds_total/{RUN}"] == 0
    idle = _after(SCRIPT[:3][1:], 160.0)
    assert idle[f"run_without_world_seconds/{RUN}"] == 0, "no node waits"


def test_lost_time_never_goes_back() -> None:
    now = [150.0]
    metrics = RunMetrics(lambda: now[0])
    changes = [read_change(KEYS, (KEYS.base + n).encode(), encoded(c), r) for r, (n, c) in enumerate(SCRIPT, 2)]
    metrics.folds[RUN] = fold(KEYS, [change for change in changes if change is not None])
    assert _samples(metrics)[f"run_lost_seconds_total/{RUN}"] == 30.5
    now[0] = 110.0
    assert _samples(metrics)[f"run_lost_seconds_total/{RUN}"] == 30.5
    metrics.forget(RUN)
    assert _samples(metrics) == {"runs": 0.0}


def _checkpoint(step: int) -> Checkpoint:
    return Checkpoint(RUN, step, 1, step, "files", 2, "memory://", "", "", 3, 500, duration_s=2.5, time=90.0)


def test_attempts_are_committed_or_given_up() -> None:
    now = [100.0]
    metrics = CheckpointMetrics(lambda: now[0])
    metrics.began(RUN, "files", b"one")
    metrics.began(RUN, "files", b"two")
    metrics.began(RUN, "files", b"three")
    metrics.ended(RUN, "files", b"one", 10)
    metrics.ended(RUN, "files", b"two", 11)
    found = _samples(metrics)
    assert (found[f"checkpoint_attempts/{RUN}/files"], found[f"checkpoint_attempts_aborted_total/{RUN}/files"]) == (
        1,
        0,
    )
    metrics.committed(_checkpoint(7), 10)
    metrics.committed(_checkpoint(7), 10)  # its metrics have changed
    now[0] += SETTLED_S
    found = _samples(metrics)
    assert found[f"checkpoint_attempts_aborted_total/{RUN}/files"] == 1
    assert found[f"checkpoint_commit_seconds_count/{RUN}/files"] == 1
    assert found[f"checkpoint_commit_seconds_sum/{RUN}/files"] == 2.5
    assert found[f"checkpoint_last_size_bytes/{RUN}/files"] == 500


def test_the_newest_checkpoint() -> None:
    metrics = CheckpointMetrics(lambda: 100.0)
    metrics.summed_up(RUN, "files", Latest(7, 3, count=2, size_bytes=900, time=90.0), 55)
    found = _samples(metrics)
    for name, value in (
        ("last_step", 7),
        ("last_generation", 3),
        ("last_revision", 55),
        ("age_seconds", 10),
        ("size_bytes", 900),
        ("committed", 2),
    ):
        assert found[f"checkpoint_{name}/{RUN}/files"] == value
    assert f"checkpoint_last_size_bytes/{RUN}/files" not in found
    metrics.summed_up(RUN, "files", None, 56)
    assert _samples(metrics) == {}


def test_queues() -> None:
    metrics = QueueMetrics()
    waiting = WaitingView(1, "b", 1, 2, 2, 2, ("h1",), 3, False, "", True)
    grant = GrantView("a", 1, {"h1": 6}, 1, 1, 1, 1, True)
    metrics.views["gpu"] = ClusterView(
        "gpu", 9, (HostView("h1", 8, "host", {"a": 6}), HostView("h2", 8, "host", denied="bad")), (grant,), (waiting,)
    )
    found = _samples(metrics)
    assert found == {
        "run_cluster_slots/gpu": 16,
        "run_cluster_free_slots/gpu": 10,
        "run_cluster_admitted/gpu": 1,
        "run_cluster_queued/gpu": 1,
        "run_cluster_denied_hosts/gpu": 1,
        "run_queue_place/gpu/b": 1,
    }


def test_they_are_text_for_prometheus() -> None:
    registry = CollectorRegistry()
    for collector in (RunMetrics(lambda: 0.0), CheckpointMetrics(lambda: 0.0), QueueMetrics()):
        registry.register(collector)
    assert b"raftkv_runs 0.0\n" in generate_latest(registry)
