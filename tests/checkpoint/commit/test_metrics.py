"""Metrics: with the commit or later; the index and the summary always say what the records say."""

from __future__ import annotations

import asyncio
import json
import math
import random
from typing import Any

import pytest

from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.commit.summary import checked_metrics
from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.records import Checkpoint, Extremes, Latest
from raftkv.checkpoint.registry import Registry
from raftkv.client.records import read
from raftkv.errors import ConfigError
from tests.checkpoint.world import KEYS, KIND, World, saved


def check_summary(world: World) -> None:
    """Compare index and summary with what follows from the records."""
    prefix = KEYS.records_of(KIND).encode()
    records = [read(Checkpoint, item) for key, item in world.store.items.items() if key.startswith(prefix)]
    values = [
        (name, value, record.step)
        for record in records
        for name, value in record.metrics.items()
        if not math.isnan(value)
    ]
    index = {KEYS.metric(KIND, name, value, step) for name, value, step in values}
    assert set(world.keys(f"{KEYS.base}metric/")) == index
    best = read(Latest, world.store.items[KEYS.latest(KIND).encode()]).best
    for name in {name for name, _, _ in values}:
        own = [(value, step) for each, value, step in values if each == name]
        found: Extremes = best[name]
        assert (found.min_value, found.max_value) == (min(own)[0], max(own)[0])
        assert {(found.min_value, found.min_step), (found.max_value, found.max_step)} <= set(own)
    assert best.keys() == {name for name, _, _ in values}


async def test_index_and_summary_follow_every_metric() -> None:
    source = random.Random(1)
    world = World()
    registry = world.registry()
    claim = await registry.claim()
    values = (0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 7)
    for step in range(1, 13):
        await saved(registry, claim, step, {name: source.choice(values) for name in ("a", "b/c")})
        await registry.set_metrics(source.randint(1, step), KIND, {source.choice("abd"): source.choice(values)})
        check_summary(world)


async def test_evaluators_side_by_side_lose_nothing(claim: Claim, registry: Registry, world: World) -> None:
    await saved(registry, claim, 1, {"loss": 1.0})
    evaluators = [world.registry(seed=seed, lost=0.0) for seed in range(6)]
    await asyncio.gather(
        *(each.set_metrics(1, KIND, {f"eval{number}": number}) for number, each in enumerate(evaluators)),
        *(each.set_metrics(1, KIND, {"loss": number}) for number, each in enumerate(evaluators)),
        saved(registry, claim, 2, {"loss": 3.0}),
    )
    assert len((await registry.at(1)).metrics) == 7
    check_summary(world)


class Scalar:
    """A number of another library, as numpy's and torch's are."""

    def __float__(self) -> float:
        return 0.25


def test_numbers_of_other_libraries_are_numbers() -> None:
    assert checked_metrics({"a": Scalar(), "b": 1, "c": 2**70}, 1) == {"a": 0.25, "b": 1, "c": 2.0**70}


async def test_records_are_json_for_every_program(claim: Claim, registry: Registry, world: World) -> None:
    """JSON has no NaN and no infinity: such a number is the text that names it."""
    metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}
    await saved(registry, claim, 1, metrics)

    def refuse(word: str) -> Any:
        raise AssertionError(word)

    for item in world.store.items.values():
        if item.value.startswith(b"{"):
            json.loads(item.value, parse_constant=refuse)
    found = (await registry.at(1)).metrics
    assert math.isnan(found["a"])
    assert {name: found[name] for name in "bcd"} == {"b": math.inf, "c": -math.inf, "d": 1.0}
    assert (await registry.best("b", "max")).step == 1
    with pytest.raises(CheckpointNotFound):
        await registry.best("a")


async def test_a_checkpoint_that_is_not_there_gets_no_metrics(registry: Registry, world: World) -> None:
    with pytest.raises(CheckpointNotFound, match="run 'job' has no checkpoint of step 7 of kind files"):
        await registry.set_metrics(7, KIND, {"loss": 1.0})
    await saved(registry, await registry.claim(), 7, {f"m{number}": 1.0 for number in range(60)})
    with pytest.raises(ConfigError, match="61 metrics are too many"):
        await registry.set_metrics(7, KIND, {"loss": 1.0})
    with pytest.raises(ConfigError):
        await registry.set_metrics(7, KIND, {"m1": "x"})
    revision = world.store.revision
    await registry.set_metrics(7, KIND, {"m1": 1.0})
    assert world.store.revision == revision
