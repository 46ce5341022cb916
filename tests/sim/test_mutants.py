"""The simulator finds each planted bug, and the code without the bug passes the same seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.corners import election_corner
from tests.sim.mutants import MUTANTS, hunt
from tests.sim.swarm import RunParameters, draw, run_seed

pytestmark = pytest.mark.interpreted

SEEDS_MAX = 200
"""Far above what any of them needs."""

DIRECTED = {
    "a copy made before a member joined",
    "decision of a deposed leader carried out",
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

FIRST_SEEDS = {
    "an identity that rested saves up": 39,
    "answer to another caller": 3,
    "applied mark not kept": 8,
    "applied mark not read": 12,
    "batch closed in the middle of an entry": 226,
    "commits of a new leader not held back": 12,
    "compact revision forgotten": 2,
    "compacted history passed over": 5,
    "compaction drops what is current": 3,
    "deaf leader stays": 27,
    "deletes left out where no caller waits": 10,
    "end of a snapshot not reported": 193,
    "ending lease renewed": 230,
    "events dropped for a slow client": 19,
    "filters forgotten": 172,
    "freshness counts from the confirmation": 7,
    "full for ever": 2,
    "heartbeat carries the whole commit index": 119,
    "joint consensus needs one half": 5,
    "keep-alives never logged": 8,
    "keys of a lease go one by one": 18,
    "keys outlive their lease": 2,
    "late keep-alive taken for a new break": 251,
    "leadership trusted for ever": 14,
    "leases kept over a snapshot": 12,
    "leases of keys forgotten at restart": 5,
    "log matching check skipped": 14,
    "marker of a snapshot goes back": 209,
    "members that are unknown are refused": 188,
    "old append truncates": 3,
    "old term's entry committed by counting": 4,
    "older snapshot restored": 9,
    "previous value left out": 319,
    "progress reported to those behind": 2,
    "put with a lease that is gone": 187,
    "read before the first commit of the term": 8,
    "read context used again": 4,
    "read served before it is applied": 2,
    "read without a quorum": 22,
    "reader joins a round under way": 4,
    "renewals seen by the leader alone": 32,
    "restart does not count as a renewal": 21,
    "rights of a user kept when its role changes": 2,
    "stale leader obeyed": 52,
    "update promotes a learner": 41,
    "vote asked for before it is durable": 141,
    "vote given twice": 4,
    "watches not moved to a new database": 4,
}
"""Where to begin to look for those that chance does not meet at once. When the simulator plays its seeds otherwise,
they are found later: ``python -m tests.sim.mutants`` prints where they are found then."""

CONSEQUENCES = {
    "acknowledged before the fsync": (draw, ("R6", "K4", "invariants")),
    "vote not persisted": (election_corner, ("R6", "invariants")),
    "leader counts itself before its fsync": (draw, ("R6", "K4", "invariants")),
    "old append truncates": (draw, ("R6", "K4", "invariants")),
    "election restriction skipped": (draw, ("R3", "R6", "invariants")),
}
"""Bugs whose consequences must be seen also without the rules that check them directly; those are switched off."""

FIRST_CONSEQUENCES = {"vote not persisted": 141}
"""``FIRST_SEEDS`` of that test."""


@pytest.mark.long
@pytest.mark.parametrize("name", FOUND_BY_SEEDS)
def test_planted_bug_is_found(name: str) -> None:
    mutant, first = MUTANTS[name], FIRST_SEEDS.get(name, 1)
    with mutant.planted():
        report = hunt(range(first, first + SEEDS_MAX), mutant.parameters)
    assert report is not None, f"survived: {mutant.rule}"
    assert "TypeError" not in (report.violation or ""), "the planted bug no longer fits the code: any seed finds it"
    clean = run_seed(report.seed, report.parameters)
    assert clean.violation is None, clean.replay_command


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(CONSEQUENCES))
def test_planted_bug_is_found_by_its_consequences(name: str) -> None:
    corner, checks_disabled = CONSEQUENCES[name]

    def blindfold(seed: int) -> RunParameters:
        base = corner(seed)
        faults = (*base.nemesis.faults, "crash", "crash_all", "isolate")
        cluster = replace(base.cluster, checks_disabled=frozenset(checks_disabled))
        return replace(base, cluster=cluster, nemesis=replace(base.nemesis, faults=faults))

    first = FIRST_CONSEQUENCES.get(name, 1)
    with MUTANTS[name].planted():
        report = hunt(range(first, first + SEEDS_MAX), blindfold)
    assert report is not None
    assert "TypeError" not in (report.violation or ""), "the planted bug no longer fits the code: any seed finds it"


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 60
