"""Claims: one for a generation, for the first that asks, and none before it is of any use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.errors import FenceBroken
from raftkv.checkpoint.registry import Registry
from raftkv.client.control import Interval
from raftkv.client.operations import Compare, mod_revision
from raftkv.client.records import RecordError
from raftkv.client.values import KeyValue
from raftkv.errors import ConfigError
from tests.checkpoint.world import KEYS, World, files_of


class WorldOver(Exception):
    """The error of a run's own fence."""


@dataclass(frozen=True)
class WorldFence:
    revision: int

    @property
    def conditions(self) -> tuple[Compare, ...]:
        return (mod_revision("round") == self.revision,)

    @property
    def watched(self) -> Interval:
        return "round", ""

    def why_over(self, items: Mapping[bytes, KeyValue]) -> str | None:
        item = items.get(b"round")
        return None if item is not None and item.mod_revision == self.revision else "another has begun"

    def broken(self, reason: str = "") -> Exception:
        return WorldOver("the generation is over")


async def test_all_ranks_of_a_generation_get_one_claim(world: World) -> None:
    world.put("round", "7")
    fence = WorldFence(world.store.revision)
    ranks = [world.registry(seed=seed) for seed in range(8)]
    claims = await asyncio.gather(*(rank.claim_run(7, fence.revision, fence) for rank in ranks))
    assert {(claim.generation, claim.revision) for claim in claims} == {(7, claims[0].revision)}
    world.put("round", "8")
    later = WorldFence(world.store.revision)
    with pytest.raises(WorldOver):
        await ranks[0].claim_run(7, fence.revision, fence)
    attempt = ranks[0].begin(claims[0], 100)
    with pytest.raises(WorldOver):
        await attempt
    assert (await ranks[0].claim_run(3, later.revision, later)).generation == 8  # it always grows


async def test_a_claim_ends_all_before_and_can_be_handed_on(registry: Registry) -> None:
    first = await registry.claim("a")
    assert await registry.claim("a") == first
    second = await registry.claim()
    attempt = await registry.begin(Claim.from_token(second.token), 100)
    await attempt.prepare(0, files_of(0))
    with pytest.raises(FenceBroken, match="generation 1 of the checkpoints of run 'job' is over"):
        await registry.begin(first, 200)
    assert (await registry.claim("a")).generation == 3


async def test_a_claim_is_over_in_a_restored_cluster_that_gives_its_revision_to_another(registry, world):
    first = await registry.claim()
    lost = world.store.items.pop(KEYS.fence.encode())
    second = await registry.claim()
    there = world.store.items[KEYS.fence.encode()]
    world.store.items[KEYS.fence.encode()] = replace(there, mod_revision=lost.mod_revision)
    assert Claim.from_token(second.token) == second
    second = replace(second, revision=first.revision)
    assert second.generation == first.generation
    with pytest.raises(FenceBroken):
        await registry.begin(first, 100)
    with pytest.raises(FenceBroken):
        await registry.join(first, 100)
    await registry.begin(second, 100)


@pytest.mark.parametrize(
    "token", ["", "[]", "1", '["job",1]', '["job","1",2]', '["job",1,null,""]', '["job",1,2]', "[" * 100_000]
)
def test_a_token_that_is_none_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="is not a claim token"):
        Claim.from_token(token)


@pytest.mark.parametrize("value", [b"\xff", b'{"generation":18446744073709551615,"source":"x"}'])
async def test_a_foreign_fence_is_named(world: World, value: bytes) -> None:
    """A claim above the last number that can be read would be the last of the run."""
    world.put(KEYS.fence, value)
    with pytest.raises(RecordError, match="not a fence record: /raftkv/checkpoint/run/job/fence"):
        await world.registry().claim()
