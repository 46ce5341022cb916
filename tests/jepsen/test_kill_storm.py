"""The kill storm: members die by ``kill -9`` under load, and nothing that was acknowledged is lost.

The code is the command line's (``python -m jepsen run``). Every five faults of a schedule for three members kill one,
the leader, a follower, a quorum and all: eight processes. The next kill comes as soon as the cluster has acknowledged
some more writes; nothing is slept through.
"""

from __future__ import annotations

import asyncio

import pytest

from jepsen.db import Settings, require_disk
from jepsen.runner import RUNS, Options, Report, run

STORMS = {
    "mixed-3": Options(Settings(size=3), workload="mixed", faults=15, seed=1),
    "register-3": Options(Settings(size=3), workload="register", faults=10, seed=2),
    "append-3": Options(Settings(size=3), workload="append", faults=10, seed=3),
    "set-1": Options(Settings(size=1), workload="set", faults=6, seed=4),
    "mixed-1": Options(Settings(size=1), workload="mixed", faults=8, seed=5),
}
KILLS = {"mixed-3": 24, "register-3": 16, "append-3": 16, "set-1": 6, "mixed-1": 8}


def storm(options: Options) -> Report:
    """One storm, by number of faults and not by time."""
    RUNS.mkdir(parents=True, exist_ok=True)
    require_disk(RUNS)
    fields = {name: getattr(options, name) for name in ("settings", "workload", "faults", "seed")}
    return asyncio.run(run(Options(**fields, nemesis="kill", time_s=None, quiet_every=5)))


@pytest.mark.parametrize("name", STORMS)
def test_nothing_acknowledged_is_lost(name: str) -> None:
    report = storm(STORMS[name])
    print(f"{name}: {report.figures}")
    assert report.verdict.lines() == [], f"kept: {report.folder}"
    assert report.figures["kills"] == KILLS[name]


def test_the_storms_kill_sixty_times() -> None:
    assert sum(KILLS.values()) >= 60
