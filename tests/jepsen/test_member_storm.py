"""The member storm: one member grows to three and five, all are replaced, a disk is lost, the leader is removed, three
members remain."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from jepsen.db import Settings
from jepsen.faults.members import Change
from jepsen.runner import Options, run
from tests.jepsen.test_positive_controls import AcknowledgesUnsent, rules

FAST = ("--strict-reconfig-check=false",)
ONE = Settings(size=1, snapshot_count=200, flags=(*FAST, "--snapshot-catchup-entries=20"))
"""A log that is cut short, so that new members are sent the whole database."""

STORM = Options(ONE, "mixed", "member", seed=1, faults=len(Change.targets), time_s=None, quiet_every=1, rate=150.0)


@pytest.mark.long
def test_nothing_acknowledged_is_lost_while_the_members_change(tmp_runs: Path) -> None:
    report = asyncio.run(run(dataclasses.replace(STORM, compact_every=400, runs=tmp_runs)))
    print(report.figures)
    assert report.verdict.lines() == []
    # Four to grow, five to replace and one in the place of the lost one; of nine that came or were there, three stay.
    changed = {name: report.figures.get(name) for name in ("added", "wiped")}
    assert changed == {"added": 10, "wiped": 1}
    assert report.figures["replaced"] + report.figures["removed"] == 8
    assert report.figures["replaced"] in (2, 3)


@pytest.mark.long
@pytest.mark.parametrize(("workload", "used"), [("watch", "bookmarks"), ("lease", "leases_ended")])
def test_streams_and_leases_live_through_changes_of_members(workload: str, used: str, tmp_runs: Path) -> None:
    part = dataclasses.replace(STORM, workload=workload, nemesis="member-three,member-leader", faults=2, runs=tmp_runs)
    report = asyncio.run(run(part))
    print(report.figures)
    assert report.verdict.lines() == []
    assert (report.figures["added"], report.figures["removed"]) == (2, 1)
    assert report.figures[used]


@pytest.mark.long
def test_a_loss_while_the_members_change_is_caught(tmp_runs: Path) -> None:
    lying = dataclasses.replace(
        STORM, workload="register", nemesis="member-three", faults=1, client_class=AcknowledgesUnsent, runs=tmp_runs
    )
    report = asyncio.run(run(lying))
    assert report.figures["added"] == 2
    assert "duplicate revision" in rules(report)
