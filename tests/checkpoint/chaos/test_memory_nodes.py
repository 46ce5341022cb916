"""Nodes that keep state in memory are killed at named points; what is restored is never wrong, stale or mixed."""

from __future__ import annotations

import pytest

from tests.checkpoint.chaos.memory_nodes import SAVE_POINTS
from tests.checkpoint.chaos.memory_trial import MemoryJob
from tests.procs import RAFTKV, Cluster


@pytest.mark.long
def test_a_killed_node_costs_no_committed_state() -> None:
    with Cluster(RAFTKV, 3) as cluster, MemoryJob(cluster.endpoints, seed=1) as job:
        for point in SAVE_POINTS:
            job.kill_one(point)
    assert job.tally.problems == []
    assert job.tally.restored > 0
    assert job.tally.kills.keys() >= {*SAVE_POINTS}
