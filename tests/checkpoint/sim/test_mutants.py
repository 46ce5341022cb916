"""Planted bugs show what the simulator can find: each is found, and the code without it passes the same seed.

The first seeds pass in test_seeds.
"""

from __future__ import annotations

import pytest

from tests.checkpoint.sim.mutants import MUTANTS
from tests.checkpoint.sim.test_seeds import SEEDS_COUNT

SEEDS_MAX = 200
"""Far above what most of them need."""

FIRST_SEEDS = {
    "a generation's claim stands without the generation": 17, "collector beside a changed latest": 22,
    "commits before the list are passed over": 29, "every old directory is an orphan": 5,
    "holds asked for beforehand": 221, "no fence in abort": 7, "no fence in commit": 8, "no fence in prepare": 5,
    "numbers given twice": 3, "parent not held": 18, "pin of what is deleted": 4, "prepare without a head": 4,
    "record without latest": 5,
}  # fmt: skip
"""Where to look for those that chance meets late. When the simulator plays its seeds otherwise, look for them again."""


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_planted_bug_is_found(name: str) -> None:
    mutant, first = MUTANTS[name], FIRST_SEEDS.get(name, 1)
    with mutant.planted():
        outcome = mutant.hunt(range(first, first + SEEDS_MAX))
    assert outcome is not None, f"survived: {mutant.rule}"
    assert not str(outcome.violation).startswith("P0"), f"the mutant does not run: {outcome.violation}"
    if outcome.settings.seed > SEEDS_COUNT:
        clean = mutant.run(outcome.settings.seed)
        assert clean.violation is None, clean.replay_command


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 25
