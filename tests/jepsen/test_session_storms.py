"""Watches, leases, locks, elections and membership changes on raftkv under faults: a short storm of each.

Longer storms run from the command line: ``python -m jepsen run --workload watch,lease,lock,election --nemesis
kill,pause,network --faults 30``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from jepsen.db import Settings
from jepsen.runner import Options, run
from tests.jepsen.test_kill_storm import RATE

BUSY = Settings(snapshot_count=50, flags=("--snapshot-catchup-entries=10",))
"""Members that cut their log short, so that one that was away gets the whole database, and watchers go on from it."""

MANY = Settings(flags=("--max-learners=60", "--strict-reconfig-check=false"))

STORMS = {
    "watch": Options(BUSY, "watch", "kill-leader,offline-follower", seed=1, compact_every=100),
    "lease": Options(Settings(), "lease", "mute-leader", seed=2),
    "lock": Options(Settings(), "lock", "cut-leader", seed=3, acked_min=30),
    "election": Options(Settings(), "election", "offline-leader", seed=4, acked_min=30),
    "roster": Options(MANY, "roster", "kill-leader", seed=5, acked_min=30),
}
USED = {"watch": "bookmarks", "lease": "leases_ended", "lock": "held", "roster": "changes_ok"}
"""Figures that show that there was something to check."""


@pytest.mark.long
@pytest.mark.parametrize("name", STORMS)
def test_guarantees_hold_under_faults(name: str, tmp_runs: Path) -> None:
    options = STORMS[name]
    faults = options.nemesis.count(",") + 1
    short = dataclasses.replace(options, faults=faults, time_s=None, quiet_every=10, rate=RATE, runs=tmp_runs)
    report = asyncio.run(run(short))
    assert report.verdict.lines() == []
    assert report.figures["faults"] == faults
    assert report.figures.get(USED.get(name, "ok"))
