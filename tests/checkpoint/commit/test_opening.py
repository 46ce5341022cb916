"""Ranks that join an attempt: of their own step, or an error that says which step the coordinator saves."""

from __future__ import annotations

import asyncio

import pytest

from raftkv.checkpoint.errors import AttemptOver
from raftkv.errors import ConfigError
from tests.checkpoint.world import KEYS, KIND, files_of, saved


async def test_a_rank_that_joins_another_step_than_the_coordinator_saves_ends_both(claim, registry):
    await saved(registry, claim, 50)
    aborted = await registry.begin(claim, 80, kind=KIND)
    await aborted.abort("not this one")
    joining = asyncio.create_task(registry.join(claim, 200, kind=KIND, after=0))
    other_kind = await registry.begin(claim, 90, kind="safetensors")
    for _ in range(100):
        await asyncio.sleep(0)
    assert not joining.done()
    attempt = await registry.begin(claim, 100, kind=KIND, world_size=2)
    words = "the coordinator saves step 100, and this rank step 200: all ranks save the same steps"
    with pytest.raises(ConfigError) as refused:
        await joining
    assert str(refused.value).startswith(words)
    with pytest.raises(AttemptOver, match=f"aborted, or deleted: this rank failed: ConfigError: {words}"):
        await attempt.prepared(but=[0])
    await other_kind.prepare(0, files_of(0))
    assert (await other_kind.commit()).step == 90


async def test_a_rank_is_not_misled_by_attempts_that_it_knows_or_that_are_its_own(claim, registry, world):
    known = await registry.begin(claim, 100, kind=KIND, world_size=2)
    with pytest.raises(TimeoutError):
        await registry.join(claim, 200, kind=KIND, timeout_s=0.05, after=known.record.number)
    with pytest.raises(TimeoutError):
        await registry.join(claim, 200, kind=KIND, timeout_s=0.05)
    begun = await registry.begin(claim, 200, kind=KIND, world_size=2)
    for after in (None, 0, known.record.number):
        assert (await registry.join(claim, 200, kind=KIND, after=after)).record == begun.record
    later = await registry.claim()
    with pytest.raises(TimeoutError):  # those of the generation before are of other ranks
        await registry.join(later, 300, kind=KIND, timeout_s=0.05, after=0)
    world.put(KEYS.begun, b"\xff")
    with pytest.raises(TimeoutError):
        await registry.join(later, 300, kind=KIND, timeout_s=0.05, after=0)
