"""The kill storm: members die by ``kill -9`` under load, and no acknowledged write is lost."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from jepsen.db import ROOT, Settings, require_disk
from jepsen.faults import failpoints
from jepsen.runner import RUNS, Options, Report, run
from raftkv.storage.failpoints import SITES

BUSY = Settings(size=3, snapshot_count=50, flags=("--snapshot-catchup-entries=10",))
"""Members that cut their log short, so that a member that was down is sent the whole database."""

ONE = Settings(size=1)

RATE = 120.0
"""Operations per second, of ten clients."""

STORMS = {
    "brief-3": Options(Settings(), workload="register", faults=5, seed=6),
    "mixed-3": Options(BUSY, workload="mixed", faults=10, seed=1, compact_every=150),
    "append-3": Options(Settings(), workload="append", faults=5, seed=3),
    "set-1": Options(ONE, workload="set", faults=6, seed=4),
}
KILLS = {"brief-3": 8, "mixed-3": 16, "append-3": 8, "set-1": 6}


def storm(options: Options) -> Report:
    """One storm, by number of faults and not by time; most of its time is for starts, and load then only costs."""
    RUNS.mkdir(parents=True, exist_ok=True)
    require_disk(RUNS)
    return asyncio.run(run(dataclasses.replace(options, time_s=None, quiet_every=5, rate=RATE)))


@pytest.mark.long
@pytest.mark.parametrize("name", STORMS)
def test_nothing_acknowledged_is_lost(name: str) -> None:
    report = storm(STORMS[name])
    print(f"{name}: {report.figures}")
    assert report.verdict.lines() == [], f"kept: {report.folder}"
    assert report.figures["kills"] == KILLS[name]


def test_every_failpoint_is_crashed_at_or_named_with_the_test_that_does() -> None:
    assert set(failpoints.Crash.targets) | set(failpoints.ELSEWHERE) == set(SITES)
    assert not set(failpoints.Crash.targets) & set(failpoints.ELSEWHERE)
    for point, place in failpoints.ELSEWHERE.items():
        text = (ROOT / place).read_text()
        assert point in text or (point.startswith("wal") and 'startswith("wal")' in text), point


OF_THE_CORE = tuple(point for point in failpoints.Crash.targets if point.startswith("raft"))
ON_THREE = tuple(dict.fromkeys((*OF_THE_CORE, *failpoints.RECEIVING)))
POINTS = {3: ON_THREE, 1: tuple(point for point in failpoints.Crash.targets if point not in ON_THREE)}
"""Where the disk is concerned a member that is alone has no peer that knows what it forgot, and costs a third."""


@pytest.mark.long
@pytest.mark.parametrize("members", POINTS)
def test_nothing_is_lost_or_applied_twice_by_a_crash_at_any_point(members: int) -> None:
    """One round of all failpoints; a few that no member reached in time may be missing."""
    points = POINTS[members]
    nemesis = ",".join(f"failpoint-{point}" for point in points)
    busy = dataclasses.replace(BUSY, size=members)
    report = storm(Options(busy, workload="mixed", nemesis=nemesis, faults=len(points), seed=6, compact_every=100))
    print(report.figures)
    assert report.verdict.lines() == [], f"kept: {report.folder}"
    assert report.figures["crash_points"] >= len(points) * 2 // 3
