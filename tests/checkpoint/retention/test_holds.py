"""Tags and pins: what they keep, how they move, what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import raftkv
from raftkv.checkpoint import Policy, Registry
from raftkv.checkpoint.errors import CheckpointNotFound, PinLost
from raftkv.checkpoint.keys import FILES, PIN, TAG
from raftkv.checkpoint.records import Checkpoint, Reference
from raftkv.checkpoint.storage.place import Place
from raftkv.errors import ConfigError
from tests.checkpoint.retention.kept import Kept
from tests.checkpoint.world import KEYS, RUN
from tests.long import long_except

PATIENCE_S = 90.0


async def test_a_tag_moves_with_its_hold(world: Kept) -> None:
    one, two = [await world.save(step) for step in (1, 2)]
    registry = world.registry()
    for checkpoint in (one, one, two):
        await registry.tag("release candidate", checkpoint)
        assert await registry.tags() == {"release candidate": checkpoint.reference}
        assert await registry.tagged("release candidate") == checkpoint
        held = [(info.checkpoint, info.why, info.name) for info in await registry.holds()]
        assert held == [(checkpoint.reference, TAG, "release candidate")]
    assert [await registry.untag("release candidate") for _ in range(2)] == [True, False]
    assert (world.keys(KEYS.holds), world.keys(KEYS.tags)) == ([], [])


async def test_pin_and_tag_on_an_attempt_that_is_gone_leave_those_of_its_successor(world: Kept) -> None:
    present = await world.save(1)
    gone = replace(present, number=present.number - 1)
    registry = world.registry()
    await registry.pin_for(present, "evaluator", 0)
    await registry.tag("release", present)
    before = world.keys(KEYS.base)
    for refused in (registry.pin_for(gone, "evaluator", 0), registry.tag("other", gone)):
        with pytest.raises(CheckpointNotFound, match="is deleted, or about to be"):
            await refused
    assert world.keys(KEYS.base) == before


@pytest.mark.parametrize("seed", long_except(range(20), range(6)))
async def test_tags_that_move_at_once_leave_one_hold(world: Kept, seed: int) -> None:
    saved = [await world.save(step) for step in (1, 2, 3)]
    moving = (world.registry(seed=seed * 10 + each.step, lost=0.03).tag("a", each) for each in saved)
    await asyncio.gather(*moving, world.registry(seed=seed).untag("a"))
    tags = await world.registry().tags()
    assert [info.checkpoint for info in await world.registry().holds()] == list(tags.values())


async def test_a_tag_may_be_on_a_checkpoint_of_another_run(world: Kept) -> None:
    one = await world.save(1)
    await world.save(2)
    registry = world.registry("served")
    await registry.tag("live", one)
    await world.registry().tag("live", one)
    assert await registry.tagged("live") == one
    await world.registry().untag("live")
    assert (await world.collect(Policy(keep_last=1))).deleted == []
    await registry.untag("live")
    assert (await world.collect(Policy(keep_last=1))).deleted == [one]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\nb", "x" * 201])
async def test_names_that_cannot_be_used_are_refused(world: Kept, name: str) -> None:
    saved = await world.save(1)
    registry = world.registry()
    for use in (
        registry.tag(name, saved), registry.untag(name), registry.pin_for(saved, name, 0),
        registry.unpin(saved, name),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="cannot be used"):
            await use
    with pytest.raises(ConfigError, match="cannot be used"):
        registry.pin(saved, name)
    assert world.keys(KEYS.holds) == []


async def test_a_pin_that_many_take_at_once_is_taken_once(world: Kept) -> None:
    registry, saved = world.registry(), await world.save(1)
    pin = registry.pin(saved, "reader")
    await asyncio.gather(*(pin.take() for _ in range(5)))
    assert [info.name for info in await registry.pins()] == ["reader"]
    await pin.release()
    assert await registry.pins() == []


async def test_pins_of_one_reader_hold_each_for_itself(world: Kept) -> None:
    saved = await world.save(1)
    registry = world.registry()
    await registry.pin_for(saved, "reader", 0)
    await registry.pin_for(saved, "reader", 60)
    await registry.pin_for(saved, "reader2", 60)
    assert [(info.name, info.lease > 0) for info in await registry.pins()] == [
        ("reader", False), ("reader", True), ("reader2", True),
    ]  # fmt: skip
    world.store.revoke((await registry.pins())[1].lease)
    assert [(info.name, info.lease > 0) for info in await registry.pins()] == [("reader", False), ("reader2", True)]
    assert await registry.unpin(saved.reference, "reader") == 1
    assert [(info.name, info.why) for info in await registry.pins()] == [("reader2", PIN)]
    with pytest.raises(ConfigError, match="not -1 s"):
        await registry.pin_for(saved, "reader", -1)
    await registry.pin_for(saved, "reader3", 0.5)
    assert world.store.leases[(await registry.pins())[-1].lease].ttl_s == 1
    with pytest.raises(TypeError, match="duration_s is a number of seconds"):
        await registry.pin_for(saved, "reader", "60")


async def test_unpin_takes_no_pin_of_a_reader_whose_name_goes_on_behind_an_at(world: Kept) -> None:
    """Know readers apart: what served at a host was unpinned by what served, and then deleted under it."""
    saved = await world.save(1)
    registry = world.registry()
    for reader in ("eval", "eval@host-1", "eval@", "eval@ab"):
        await registry.pin_for(saved, reader, 60)
        await registry.pin_for(saved, reader, 0)
    assert await registry.unpin(saved, "eval") == 2
    assert await registry.unpin(saved, "eval") == 0
    assert {info.name for info in await registry.pins()} == {"eval@host-1", "eval@", "eval@ab"}
    assert await registry.unpin(saved, "eval@") == 2
    assert {info.name for info in await registry.pins()} == {"eval@host-1", "eval@ab"}


async def test_many_pins_of_one_reader_go_at_once(world: Kept) -> None:
    saved = await world.save(1)
    registry = world.registry()
    for _ in range(130):
        await registry.pin_for(saved, "reader", 60)
    assert await registry.unpin(saved, "reader") == 130
    assert await registry.pins() == []


async def test_a_late_copy_of_unpin_takes_no_later_pin(world: Kept) -> None:
    saved = await world.save(1)
    registry = world.registry()
    await registry.pin_for(saved, "reader", 0)
    before = len(world.sent)
    assert await registry.unpin(saved, "reader") == 1
    copies = list(world.sent[before:])
    await registry.pin_for(saved, "reader", 0)
    for copy in copies:
        copy()
    assert [info.name for info in await registry.pins()] == ["reader"]


async def test_a_pin_on_another_checkpoint_of_the_step_is_refused(world: Kept) -> None:
    saved = await world.save(1)
    other = Checkpoint(RUN, 1, 1, saved.number + 1, FILES, 1, "", "", "", 0, 0)
    with pytest.raises(CheckpointNotFound):
        await world.registry().pin_for(other, "reader", 0)
    assert world.keys(KEYS.holds) == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[raftkv.LocalCluster]:
    with raftkv.local(size=1) as one:
        yield one


def _save(registry: Registry, step: int) -> Checkpoint:
    attempt = registry.begin(registry.claim(), step)
    attempt.prepare(0, [Place(attempt.uri).write("a", b"1")])
    return attempt.commit()


@pytest.mark.long
def test_a_pin_holds_while_its_block_lasts(cluster: raftkv.LocalCluster, tmp_path: Path) -> None:
    with raftkv.connect(cluster.endpoints) as kv:
        registry = Registry(kv, "pinned", uri=str(tmp_path))
        one, _ = _save(registry, 1), _save(registry, 2)
        with registry.pin(one, "reader", 5) as pin:
            pin.check()
            assert registry.collect(Policy(keep_last=1)).deleted == []
            assert [(info.checkpoint, info.name) for info in registry.pins()] == [
                (Reference("pinned", FILES, 1), "reader")
            ]
        assert registry.collect(Policy(keep_last=1)).deleted == [one]
        with pytest.raises(CheckpointNotFound):
            registry.pin(one, "reader").take()
        assert kv.leases() == []


def test_a_lost_pin_is_known_to_its_reader(cluster: raftkv.LocalCluster, tmp_path: Path) -> None:
    def read(registry: Registry, checkpoint: Checkpoint, kv: raftkv.Client) -> None:
        with registry.pin(checkpoint, "reader", 1) as pin:
            (info,) = registry.pins()
            kv.revoke(info.lease)  # as the cluster does when this process was frozen for longer than the TTL
            assert pin.lost.wait(PATIENCE_S)
            for use in (pin.check, pin.take):
                with pytest.raises(PinLost, match="read it again"):
                    use()

    with raftkv.connect(cluster.endpoints) as kv:
        registry = Registry(kv, "lost", uri=str(tmp_path))
        one, _ = _save(registry, 1), _save(registry, 2)
        with pytest.raises(PinLost, match="this process was away for longer than 1 s"):
            read(registry, one, kv)
        assert registry.collect(Policy(keep_last=1)).deleted == [one]
