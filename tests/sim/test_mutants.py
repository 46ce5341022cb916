"""Planted bugs show what the simulator can find: each is found, and the code without it passes the same seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.long import long_except
from tests.sim.corners import election_corner
from tests.sim.mutants import MUTANTS, hunt
from tests.sim.swarm import RunParameters, draw, run_seed

SEEDS_MAX = 200
"""Far above what any of them needs."""

DIRECTED = {
    "log keeps a tail behind a received snapshot",
    "forgotten in memory before it is deleted on disk",
    "joint configuration left before it is applied",
    "snapshot restored under a pending apply",
    "candidate goes on with an unapplied change",
    "nothing committed by a change",
    "rejection heeded while a snapshot is on its way",
}
"""Chance does not find these in time: see test_directed.py and test_rules.py."""

FOUND_BY_SEEDS = sorted(set(MUTANTS) - DIRECTED)

RARE = {
    "batch closed in the middle of an entry",
    "decision of a deposed leader carried out",
    "keys of a lease go one by one",
    "leadership trusted for ever",
    "put with a lease that is gone",
}
"""These need so many seeds that they are only looked for in `make test-all`."""

CONSEQUENCES = {
    "acknowledged before the fsync": (draw, ("R6", "K4", "invariants")),
    "vote not persisted": (election_corner, ("R6", "invariants")),
    "leader counts itself before its fsync": (draw, ("R6", "K4", "invariants")),
    "old append truncates": (draw, ("R6", "K4", "invariants")),
    "election restriction skipped": (draw, ("R3", "R6", "invariants")),
}
"""With the direct checks off, what a bug leads to must still be seen."""


@pytest.mark.parametrize("name", long_except(FOUND_BY_SEEDS, set(FOUND_BY_SEEDS[::7]) - RARE))
def test_planted_bug_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    with mutant.planted():
        report = hunt(range(1, SEEDS_MAX), mutant.parameters)
    assert report is not None, f"survived: {mutant.rule}"
    clean = run_seed(report.seed, report.parameters)
    assert clean.violation is None, clean.replay_command


@pytest.mark.parametrize("name", long_except(sorted(CONSEQUENCES), {"old append truncates"}))
def test_planted_bug_is_found_by_its_consequences(name: str) -> None:
    corner, checks_disabled = CONSEQUENCES[name]

    def blindfold(seed: int) -> RunParameters:
        base = corner(seed)
        faults = (*base.nemesis.faults, "crash", "crash_all", "isolate")
        cluster = replace(base.cluster, checks_disabled=frozenset(checks_disabled))
        return replace(base, cluster=cluster, nemesis=replace(base.nemesis, faults=faults))

    with MUTANTS[name].planted():
        report = hunt(range(1, SEEDS_MAX), blindfold)
    assert report is not None


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 60
