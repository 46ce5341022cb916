"""Who follows the best gets the present one, then each other, and nothing at changes that make no other the best."""

from __future__ import annotations

import asyncio

import pytest

from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.find import Bests
from raftkv.checkpoint.registry import Registry
from raftkv.errors import CompactedError, ConfigError
from tests.checkpoint.world import KIND, World, saved


async def following(bests: Bests) -> int:
    return (await asyncio.wait_for(anext(bests), 90)).step


async def is_quiet(bests: Bests) -> bool:
    waiting = asyncio.ensure_future(anext(bests))
    for _ in range(100):
        await asyncio.sleep(0)
    quiet = not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])
    return quiet


@pytest.mark.parametrize("trouble", ["none", "lost watch"])
async def test_each_other_best_comes_once(claim: Claim, registry: Registry, world: World, trouble: str) -> None:
    low, high = registry.watch_best("loss"), registry.watch_best("loss", "max", kind=KIND)
    assert await is_quiet(low)
    await saved(registry, claim, 1, {"loss": 0.5})
    assert (await following(low), await following(high)) == (1, 1)
    await saved(registry, claim, 2)
    await saved(registry, claim, 3, {"loss": 0.75})
    assert await is_quiet(low)
    assert await following(high) == 3
    if trouble == "lost watch":
        world.store.compact()
        for _ in range(len(registry.control.watches)):
            registry.control.lose_watch(CompactedError())
    await registry.set_metrics(2, KIND, {"loss": 0.25})
    assert await following(low) == 2
    await registry.set_metrics(2, KIND, {"loss": 1.0})
    assert (await following(low), await following(high)) == (1, 2)
    late = registry.watch_best("loss")
    assert await following(late) == 1
    for bests in (low, high, late):
        bests.cancel()
        with pytest.raises(StopAsyncIteration):
            await anext(bests)
    with pytest.raises(ConfigError):
        registry.watch_best("loss", "least")


async def test_a_best_whose_reader_gave_up_while_it_was_looked_up_comes_to_the_next(claim, registry, monkeypatch):
    """Give up as a reader with a time limit does while the cluster elects."""
    bests = registry.watch_best("loss")
    assert await is_quiet(bests)
    look_up, asked = bests._lookup.best, asyncio.Event()

    async def never_answered(*args: object, **options: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(bests._lookup, "best", never_answered)
    waiting = asyncio.ensure_future(anext(bests))
    await saved(registry, claim, 1, {"loss": 0.5})
    await asyncio.wait_for(asked.wait(), 90)
    waiting.cancel()
    await asyncio.wait([waiting])
    monkeypatch.setattr(bests._lookup, "best", look_up)
    assert await following(bests) == 1
    bests.cancel()
