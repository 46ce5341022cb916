"""A seed gives the same events after other runs in a process, and in processes that hash strings differently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.swarm import run_seed

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from tests.sim.swarm import run_seed
for seed in (21, 22):
    report = run_seed(seed)
    print(report.digest, report.events_count, report.acknowledged_count)
"""


@pytest.mark.long
def test_digest_is_a_function_of_the_seed_however_strings_are_hashed() -> None:
    reports = {seed: run_seed(seed) for seed in (22, 21)}
    here = [f"{each.digest} {each.events_count} {each.acknowledged_count}" for _, each in sorted(reports.items())]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", PROGRAM]
    there = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert there.stdout.splitlines() == here
    assert len(reports[21].digest) == 16
    assert reports[21].digest != reports[22].digest
