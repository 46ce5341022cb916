"""Copies of txns that arrive late: all that was sent may be applied again at any later moment, and changes nothing."""

from __future__ import annotations

import pytest

from raftkv.checkpoint.errors import AttemptOver
from raftkv.checkpoint.registry import Registry
from tests.checkpoint.world import KEYS, KIND, World, prepared, saved


async def test_copies_of_everything_change_nothing_after_any_step(registry: Registry, world: World) -> None:
    first = await registry.claim("first")
    await saved(registry, first, 100, {"loss": 0.5}, ranks=3)
    await registry.set_metrics(100, KIND, {"loss": 0.25, "eval": 1.0})
    await registry.set_metrics(100, KIND, {"loss": 0.75})
    await prepared(registry, first, 200)
    await prepared(registry, first, 300, but=(1,))
    given_up = await prepared(registry, first, 250)
    await given_up.abort("too slow")
    second = await registry.claim("second")
    await registry.take_over(second)
    assert (await registry.latest()).step == 200
    await saved(registry, second, 400, parent=(await registry.at(100)).reference)
    before = dict(world.store.items)
    world.repeat_everything()
    assert {key: item.value for key, item in world.store.items.items()} == {
        key: item.value for key, item in before.items()
    }


async def test_a_late_copy_of_a_beginning_brings_no_attempt_back(claim, registry, world):
    """Its ranks had prepared: the next generation would commit a checkpoint whose bytes are being deleted."""
    attempt = await prepared(registry, claim, 100)
    assert await attempt.abort("the disk was slow")
    world.repeat_everything()
    assert world.keys(KEYS.attempts) == []
    with pytest.raises(AttemptOver):
        await attempt.commit()
    assert await registry.take_over(await registry.claim()) == []


@pytest.mark.parametrize("lost", [0.3, 0.6])
@pytest.mark.parametrize("seed", range(6))
async def test_calls_whose_answers_are_lost_happen_once(lost, seed, monkeypatch):
    monkeypatch.setattr("raftkv.client.control.RETRY_MAX_S", 0.0)
    world = World()
    registry = world.registry(seed=seed, lost=lost)
    claim = await registry.claim()
    parent = await saved(registry, claim, 100, {"loss": 0.5})
    other = world.registry("child", seed=seed + 50, lost=lost)
    await saved(other, await other.claim(), 7, {"loss": 0.5}, ranks=2, parent=parent.reference)
    aborted = await prepared(registry, claim, 200)
    assert await aborted.abort("no room")
    await registry.set_metrics(100, KIND, {"loss": 0.1})
    assert [found.latest.count for found in await registry.runs()] == [1, 1]
    assert [found.latest.best["loss"].min_value for found in await registry.runs()] == [0.5, 0.1]
    assert world.keys(KEYS.attempts) == []
    assert len(world.keys(KEYS.deletings)) == 1
    assert len(world.keys(f"{KEYS.base}metric/")) == 1
