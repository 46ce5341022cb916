"""Full disks under load: members refuse growth for a while and lose nothing."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jepsen.faults.disks import Disks
from jepsen.runner import Options
from tests.jepsen.test_kill_storm import BUSY, storm


def test_a_disk_is_the_members_own_and_is_filled_and_freed(tmp_path: Path) -> None:
    disks = Disks()
    try:
        assert disks.enter(1, tmp_path)[0] == "nsenter"
        disks.fill(1)
        with pytest.raises(OSError, match="No space left"):
            (disks.path(1) / "more").write_bytes(bytes(4096))
        assert list(tmp_path.iterdir()) == [], "others see what is on it"
        disks.free(1)
        (disks.path(1) / "more").write_bytes(bytes(4096))
        disks.wipe(1)
        assert list(disks.path(1).iterdir()) == []
    finally:
        disks.close()


@pytest.mark.long
def test_nothing_is_lost_while_disks_are_full() -> None:
    settings = replace(BUSY, disks=True)
    nemesis = "full-leader,full-quorum,kill-leader"
    report = storm(Options(settings, workload="mixed", nemesis=nemesis, faults=3, seed=4, compact_every=150))
    print(report.figures)
    assert report.verdict.lines() == [], f"kept: {report.folder}"


needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None and "CI" not in os.environ, reason="needs Debian's gcc")

LIES = {
    "power": Options(BUSY, workload="mixed", nemesis="power", faults=3, seed=1, compact_every=150),
    "liar": Options(BUSY, workload="mixed", nemesis="liar", faults=2, seed=1, compact_every=150),
    "rot": Options(BUSY, workload="mixed", nemesis="rot", faults=2, seed=5),
    "erring": Options(BUSY, workload="mixed", nemesis="erring", faults=4, seed=3, compact_every=150),
}
"""A minute each at most: ``make storm`` plays all of them, longer."""


@needs_gcc
@pytest.mark.long
@pytest.mark.parametrize("name", LIES)
def test_nothing_acknowledged_is_lost_on_bad_disks(name: str) -> None:
    report = storm(LIES[name])
    print(f"{name}: {report.figures}")
    assert report.verdict.lines() == [], f"kept: {report.folder}"


@pytest.mark.long
@needs_gcc
def test_one_loss_of_power_is_outlived() -> None:
    report = storm(Options(BUSY, workload="mixed", nemesis="power-all", faults=1, seed=1, acked_min=30))
    assert report.verdict.lines() == [], f"kept: {report.folder}"


@needs_gcc
@pytest.mark.long
def test_a_loss_on_all_members_whose_syncs_were_lies_is_caught(tmp_runs: Path) -> None:
    report = storm(Options(workload="mixed", nemesis="liars", faults=1, seed=1, runs=tmp_runs))
    found = {violation.rule for violations in report.verdict.violations.values() for violation in violations}
    assert {"duplicate revision", "revision went back"} <= found
