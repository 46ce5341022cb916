"""The registry in its simulator: many seeds, and the seeds that once found something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.sim.__main__ import main, summary
from tests.checkpoint.sim.memory import run_memory_seed
from tests.checkpoint.sim.run import FAULTS
from tests.checkpoint.sim.swarm import draw, run_seed
from tests.long import long_except

ROOT = Path(__file__).resolve().parents[3]
SEEDS_COUNT = 24
CHUNK_SIZE = 2

REGRESSIONS = {
    3: "a rank that looked late heard that its attempt was given up, but it had been committed, and deleted since",
    542: "a coordinator that thawed heard that its attempt was given up, but a later claim had committed it",
    635: "the same, of a rank",
}
"""Seeds that found a bug, and which."""


@pytest.mark.parametrize("first", long_except(range(1, SEEDS_COUNT + 1, CHUNK_SIZE), range(CHUNK_SIZE)))
def test_seeds(first: int) -> None:
    outcomes = [run_seed(seed) for seed in range(first, first + CHUNK_SIZE)]
    print(summary(outcomes))
    bad = [f"{outcome.violation}\n  replay: {outcome.replay_command}" for outcome in outcomes if outcome.violation]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("first", long_except(range(1, SEEDS_COUNT + 1, CHUNK_SIZE), range(CHUNK_SIZE)))
def test_seeds_in_memory(first: int) -> None:
    outcomes = [run_memory_seed(seed) for seed in range(first, first + CHUNK_SIZE)]
    bad = [f"{outcome.violation}\n  replay: {outcome.replay_command}" for outcome in outcomes if outcome.violation]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("seed", long_except(REGRESSIONS, ()))
def test_seeds_that_found_bugs(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.violation is None, f"again: {REGRESSIONS[seed]}\n{outcome.replay_command}"


def test_seeds_reach_every_fault() -> None:
    drawn = [draw(seed) for seed in range(1, SEEDS_COUNT + 1)]
    assert {name for settings in drawn for name in settings.faults} == set(FAULTS)
    assert {settings.collectors for settings in drawn} == {1, 2}
    assert any(settings.copies and settings.weather.loss and settings.failure for settings in drawn)


@pytest.mark.long
def test_a_replay_is_the_same_under_any_hash_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "17", "--trace"]) == 0
    here = capsys.readouterr().out
    assert " PUT run/job/record/" in here
    command = [sys.executable, "-m", "tests.checkpoint.sim", "--seed", "17", "--trace"]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    there = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert there == here
