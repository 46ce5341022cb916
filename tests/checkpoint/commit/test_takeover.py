"""Takeover: a later generation commits what is whole, gives up the rest, and the dead ones come too late."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from raftkv.checkpoint.commit.summary import Measured
from raftkv.checkpoint.errors import FenceBroken
from raftkv.checkpoint.keys import MEMORY, AttemptId
from raftkv.checkpoint.records import CopyRecord
from raftkv.checkpoint.registry import Registry
from raftkv.errors import ConfigError
from tests.checkpoint.world import KEYS, KIND, World, files_of, prepared, saved


async def test_takeover_commits_prepared_attempts_and_aborts_the_rest(registry: Registry, world: World) -> None:
    old = await registry.claim()
    await prepared(registry, old, 300, ranks=3, but=(2,))
    whole = await prepared(registry, old, 200, ranks=3)
    await prepared(registry, old, 100, ranks=1)
    new = await registry.claim()
    taken = await registry.take_over(new)
    assert [(each.attempt.step, each.checkpoint is not None, each.reason) for each in taken] == [
        (100, True, ""),
        (200, True, ""),
        (300, False, "2 of 3 ranks had prepared when generation 1 ended"),
    ]
    assert (await registry.latest()).id == whole.record.id
    assert await whole.outcome() == await registry.latest()
    assert world.keys(KEYS.attempts) == []
    assert len(world.keys(KEYS.deletings)) == 1
    assert await registry.take_over(new) == []
    with pytest.raises(FenceBroken):
        await registry.take_over(old)


async def test_ranks_that_all_take_over_agree() -> None:
    for seed in range(20):
        world = World()
        registry = world.registry(seed=seed)
        old = await registry.claim()
        await prepared(registry, old, 100)
        await prepared(registry, old, 200, but=(0,))
        ranks = [world.registry(seed=seed * 3 + number) for number in range(3)]
        claim = await registry.claim("all")
        results = await asyncio.gather(*(rank.take_over(claim) for rank in ranks))
        for taken in results:
            outcomes = {each.attempt.step: each.checkpoint is not None for each in taken}
            assert outcomes.items() <= {100: True, 200: False}.items()
        assert (await registry.latest()).step == 100


async def test_uncommittable_attempt_is_aborted_with_its_reason(registry: Registry, world: World) -> None:
    old = await registry.claim()
    await prepared(registry, old, 100)
    await prepared(registry, old, 150)
    await saved(registry, old, 200)
    spoilt = await prepared(registry, old, 300)
    world.put(f"{KEYS.attempt(KIND, spoilt.record.id).rank(1)}", b'{"rank":0}')
    clash = await registry.begin(old, 400, world_size=2)
    for rank in range(2):
        await clash.prepare(rank, files_of(7))
    lost = await prepared(registry, old, 450)
    world.lost.add(lost.uri)
    odd = await prepared(registry, old, 500, but=(1,))
    world.put(f"{KEYS.attempt(KIND, odd.record.id).ranks}000000x", b"{}")  # counted, but of no rank
    taken = await registry.take_over(await registry.claim())
    assert [each.checkpoint for each in taken] == [None] * 6
    reasons = [each.reason for each in taken]
    assert [reason.split(" of run")[0] for reason in reasons[:2]] == ["step 100", "step 150"]
    assert "is the record of another key" in reasons[2]
    assert "both have a file '7.bin'" in reasons[3]
    assert "0.bin, which rank 0 had prepared, is not there any more" in reasons[4]
    assert reasons[5] == "1 of 2 ranks had prepared when generation 1 ended"
    assert (await registry.latest()).step == 200


@pytest.mark.parametrize("why", ["metrics", "files"])
async def test_attempt_in_memory_that_cannot_be_committed_stops_no_later_generation(registry, world, why):
    """Every later generation failed to take it over, so the run never went on."""
    ranks = 1 if why == "metrics" else 6
    attempt = await registry.begin(await registry.claim(), 100, world_size=ranks, kind=MEMORY)
    for rank in range(ranks):
        (file,) = files_of(rank)
        copy = CopyRecord(
            MEMORY, 100, 1, attempt.record.number, file.name, file.digest, 1, "a", "host-a", "127.0.0.1:1", "0" * 64
        )
        world.put(KEYS.copy(MEMORY, attempt.record.id, file.name, "a"), copy.encode(), leased=True)
        many = [replace(file, name=f"{rank}-{number}-{'x' * 1000}") for number in range(200)]
        await attempt.prepare(rank, [file] if why == "metrics" else many, metrics={"loss": 1.0})
    claim = await registry.claim()
    (taken,) = await registry.take_over(claim)
    assert taken.checkpoint is None
    assert await registry.take_over(claim) == []


async def test_the_world_may_change_its_size_between_generations(registry: Registry) -> None:
    old = await registry.claim()
    await prepared(registry, old, 100, ranks=5)
    new = await registry.claim()
    (taken,) = await registry.take_over(new)
    assert taken.checkpoint is not None
    assert taken.checkpoint.world_size == 5
    assert (await saved(registry, new, 200, ranks=2)).world_size == 2


async def test_a_coordinator_that_slept_through_the_takeover_hears_that_its_claim_is_over(registry: Registry) -> None:
    """Not that its attempt was given up: the later claim has committed it."""
    attempt = await prepared(registry, await registry.claim(), 100)
    assert len(await attempt.prepared()) == 2
    await registry.take_over(await registry.claim())
    with pytest.raises(FenceBroken):
        await attempt.prepared()


async def test_attempt_with_a_foreign_directory_is_neither_joined_nor_committed(registry, world):
    """A key of the run says where its bytes lie: no manifest, and no file of a rank, is written outside its place."""
    old = await registry.claim()
    attempt = await prepared(registry, old, 100, ranks=1)
    head = KEYS.attempt(KIND, attempt.record.id).head
    directory = AttemptId(1, 1, 7).directory
    other = f"memory://job/{directory}"
    inside = (f"{other}/", f"{other}/.", f"{other}/sub", f"memory://job/x/../{directory}", other)
    for uri in ("memory://victim/step-000000000001.g1.1", "memory://job/../victim", "/etc", "memory://job", *inside):
        world.put(head, replace(attempt.record, uri=uri).encode())
        with pytest.raises(ConfigError, match="does not lie below memory://job"):
            await registry.join(old, 100)
    (taken,) = await registry.take_over(await registry.claim())
    assert (taken.checkpoint, world.files) == (None, {})
    assert "does not lie below memory://job" in taken.reason


async def test_registry_without_a_place_writes_nowhere_that_a_record_names(claim, registry, world):
    await prepared(registry, claim, 100)
    nowhere = world.registry(uri="")
    with pytest.raises(ConfigError, match="this registry has no place"):
        await nowhere.join(claim, 100)
    (taken,) = await nowhere.take_over(await nowhere.claim())
    assert (taken.checkpoint, world.files) == (None, {})


async def test_metrics_of_a_prepared_attempt_survive_its_coordinator(registry: Registry) -> None:
    """The best model stays the best when its coordinator dies between the last prepare and the commit."""
    old = await registry.claim()
    await saved(registry, old, 100, {"loss": 0.5})
    attempt = await registry.begin(old, 200, world_size=2)
    await attempt.prepare(1, files_of(1))
    with pytest.raises(ConfigError, match="not a number"):
        await attempt.prepare(0, files_of(0), metrics={"loss": "low"})
    await attempt.prepare(0, files_of(0), metrics={"loss": 0.1, "epoch": 2, "old": Measured(1.0, 100)})
    await attempt.prepare(0, files_of(0))  # a repetition: the same files
    taken = await registry.take_over(await registry.claim())
    assert taken[0].checkpoint is not None
    assert taken[0].checkpoint.metrics == {"loss": 0.1, "epoch": 2}
    assert (await registry.best("loss")).step == 200


async def test_metrics_of_the_commit_replace_those_that_were_prepared(registry: Registry) -> None:
    claim = await registry.claim()
    attempt = await registry.begin(claim, 100)
    await attempt.prepare(0, files_of(0), metrics={"loss": 0.5, "lr": 0.1})
    checkpoint = await attempt.commit(metrics={"loss": 0.25})
    assert checkpoint.metrics == {"loss": 0.25, "lr": 0.1}
    other = await saved(registry, claim, 200)
    third = await prepared(registry, claim, 300, ranks=1)
    assert checkpoint.root == other.root == (await third.commit()).root  # metrics are no bytes
