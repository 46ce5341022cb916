"""Storms of disks: members whose disks are full for a while, under load, are refused growth and lose nothing."""

from __future__ import annotations

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
