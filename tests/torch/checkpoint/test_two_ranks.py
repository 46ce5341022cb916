"""DCP on the registry with processes: two ranks save in every way, other numbers of ranks load, one rank dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import raftkv

ROOT = Path(__file__).resolve().parents[3]
RANK = Path(__file__).with_name("ranks.py")
PATIENCE_S = 150.0


def run(what: str, cluster: raftkv.LocalCluster, directory: Path, size: int) -> list[Any]:
    """What each rank found; None: it was killed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, str(RANK), what, ",".join(cluster.endpoints), str(directory / "job")]
    meeting = str(directory / f"{what}-{size}")
    ranks = [
        subprocess.Popen(
            [*command, meeting, str(rank), str(size)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads(lines.splitlines()[-1]) if lines else None for lines in said]


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
