"""The best model stays: random saves, evaluations, resumed runs and policies, as long as these name its metric."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.checkpoint.commit.summary import Measured
from raftkv.checkpoint.keys import FILES
from raftkv.checkpoint.retention.policy import Best, Policy
from tests.checkpoint.retention.kept import Kept
from tests.checkpoint.world import play

BESTS = (Best("loss", "min"), Best("loss", "max"), Best("acc", "max", 2), Best("acc", "min", 2))

_number = st.sampled_from([0.0, -0.0, 1.0, 2.0, 3.0, -1.0, math.nan, math.inf, -math.inf])
_metrics = st.dictionaries(st.sampled_from(["loss", "acc"]), st.tuples(_number, st.sampled_from([0, 0, 0, 1, 2])))
"""Metric to its value, and how many steps ago it was measured."""
_policy = st.builds(
    Policy,
    keep_last=st.integers(0, 2),
    keep_every=st.sampled_from([0, 4]),
    keep_best=st.sets(st.sampled_from(BESTS), min_size=1, max_size=2).map(tuple),
    max_bytes=st.sampled_from([None, 0, 2500]),
)
_acts = st.lists(
    st.one_of(
        st.tuples(st.just("save"), _metrics),
        st.tuples(st.just("evaluate"), st.integers(0, 3), _metrics),
        st.tuples(st.just("resume")),
        st.tuples(st.just("collect"), _policy),
    ),
    max_size=25,
)


class Model:
    """What was measured of each step's own model, of those that are there."""

    def __init__(self) -> None:
        self.own: dict[int, dict[str, float]] = {}

    def note(self, step: int, metrics: dict[str, tuple[float, int]]) -> dict[str, Any]:
        """Note what is of the step itself; returns all as a framework that remembers old values hands it over."""
        self.own.setdefault(step, {}).update({name: value for name, (value, age) in metrics.items() if age == 0})
        return {name: Measured(value, step - age) for name, (value, age) in metrics.items()}

    def best_values(self, best: Best, steps: list[int]) -> list[float]:
        """The best values of some steps, as many as are kept."""
        values = [self.own[step][best.metric] for step in steps if best.metric in self.own[step]]
        return sorted((v for v in values if not math.isnan(v)), reverse=best.mode == "max")[: best.count]


async def _play(acts: list[tuple[Any, ...]], path: Path) -> None:
    world, model, step = Kept(path), Model(), 0
    for act, *words in acts:
        if act == "save":
            step += 1
            await world.save(step, model.note(step, words[0]))
        elif act == "evaluate" and world.steps():
            back, metrics = words
            measured = world.steps()[-1 - min(back, len(world.steps()) - 1)]
            await world.registry().set_metrics(measured, FILES, model.note(measured, metrics))
        elif act == "resume":
            await world.next_generation()
        elif act == "collect":
            before, policy = world.steps(), words[0]
            await world.collect(policy)
            after = world.steps()
            for best in policy.keep_best:
                assert model.best_values(best, after) == model.best_values(best, before)
                if values := model.best_values(best, before)[:1]:
                    found = await world.registry().best(best.metric, best.mode)
                    assert model.own[found.step][best.metric] == values[0]
                else:
                    assert after == before


@settings(max_examples=45, deadline=None)
@given(_acts)
def test_best_by_metrics_of_its_own_step_is_never_deleted(tmp_path_factory: Any, acts: list[tuple[Any, ...]]) -> None:
    play(_play(acts, tmp_path_factory.mktemp("place")))
