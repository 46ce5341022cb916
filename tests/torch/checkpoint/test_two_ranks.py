"""DCP on the registry with processes: two ranks save in every way, other numbers of ranks load, one rank dies."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import raftkv
from tests import forked

PATIENCE_S = 150.0


def run(what: str, cluster: raftkv.LocalCluster, directory: Path, size: int) -> list[Any]:
    """What each rank found; None: it was killed."""
    words = [sys.executable, "-m", "tests.torch.checkpoint.ranks", what, ",".join(cluster.endpoints)]
    words += [str(directory / "job"), str(directory / f"{what}-{size}")]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1"}

    def said_by(rank: int) -> Any:
        done = forked.run([*words, str(rank), str(size)], environment=environment, timeout_s=PATIENCE_S)
        return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(said_by, range(size)))


@pytest.mark.long
def test_two_ranks_save_and_any_number_loads(tmp_path):
    with raftkv.local() as cluster:
        steps = [[step, "dcp", 2] for step in (1, 2, 3)]
        assert run("save", cluster, tmp_path, 2) == [[True, "CheckpointExists", [*steps, [5, "dcp_per_rank", 2]]]] * 2
        survivor, dead = run("killed", cluster, tmp_path, 2)
        assert dead is None
        assert survivor[-1] == 3, "nothing was committed"
        assert run("load", cluster, tmp_path, 3) == [[3, [sum(range(48)) + 48 * 3, 9], 3, "1"]] * 3
        with cluster.connect() as kv:
            assert kv.count("/raftkv/checkpoint/run/two/attempt/", prefix=True) == 0, "the next start has given it up"


@pytest.mark.long
def test_ranks_that_save_different_steps_commit_none(tmp_path):
    with raftkv.local() as cluster:
        for said, steps in run("mixed", cluster, tmp_path, 2):
            assert steps == [1, 2, 3]
            assert said[1::2] == ["saved"] * 3
            assert [words.partition(":")[0] for words in said[::2]] == [
                f"the coordinator saves step {step}, and rank 1 step {step + 10}" for step in (1, 2, 3)
            ]


@pytest.mark.long
def test_a_program_that_resumes_twice_saves_with_the_plans_that_it_has_kept(tmp_path):
    with raftkv.local() as cluster:
        assert run("again", cluster, tmp_path, 2) == [[[None, 3], [1, 2, 3, 4, 5, 6]]] * 2
