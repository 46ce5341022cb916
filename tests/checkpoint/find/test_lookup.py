"""Lookups: what is there is found among any other files, however many."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from itertools import permutations

import pytest

from raftkv.checkpoint import find as lookup_module
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.find import MAX, MIN
from raftkv.checkpoint.keys import RegistryKeys
from raftkv.checkpoint.records import Extremes, Latest, Reference
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.retention.collector import load
from raftkv.client import paging as paging_module
from raftkv.client.errors import UnknownStatus
from raftkv.client.records import RecordError
from raftkv.client.values import RangeResult, TxnResult
from raftkv.errors import RESOURCE_EXHAUSTED, ConfigError
from raftkv.rpc.server.budget import CONNECTION_FULL
from tests.checkpoint.world import KEYS, KIND, World, saved


async def test_latest_by_kind_step_and_tag(claim: Claim, registry: Registry, world: World) -> None:
    for kind, steps in (("dcp", (100, 300)), ("safetensors", (200, 300))):
        for step in steps:
            await saved(registry, claim, step, kind=kind)
    world.put(KEYS.tag("a/b"), Reference("job", "dcp", 100).encode())
    newest = await registry.latest(), await registry.latest("safetensors")
    assert [(found.kind, found.step) for found in newest] == [("dcp", 300), ("safetensors", 300)]
    assert (await registry.at(200)).kind == "safetensors"
    assert (await registry.tagged("a/b")).step == 100
    for missing in (registry.at(100, "safetensors"), registry.tagged("c"), registry.latest("orbax"), registry.at(7)):
        with pytest.raises(CheckpointNotFound):
            await missing
    with pytest.raises(CheckpointNotFound, match="run 'other' has no checkpoint"):
        await world.registry("other").latest()


async def test_the_clock_does_not_decide_which_is_the_latest(claim: Claim, registry: Registry, world: World) -> None:
    await saved(registry, claim, 100, kind="dcp")
    world.time_s = 1.0
    await saved(registry, claim, 200, kind="dcp")
    world.time_s = 2_000_000_000.0
    await saved(registry, claim, 150, kind="orbax")
    await saved(registry, claim, 200, kind="safetensors")
    assert (await registry.latest()).kind == "dcp"
    assert (await registry.latest()).duration_s == 0.0


async def test_many_are_found_a_page_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "PAGE", 7)
    world = World()
    registry = world.registry()
    claim = await registry.claim()
    steps = list(range(1, 41))
    for step in steps:
        await saved(registry, claim, step, {"loss": float(step % 10)})
    found = registry.checkpoints
    assert [each.step for each in await found()] == steps
    assert [each.step for each in await found(newest_first=True)] == steps[::-1]
    assert [each.step for each in await found(limit=15)] == steps[:15]
    assert [each.step for each in await found(KIND, limit=15, newest_first=True)] == steps[:-16:-1]
    best = await registry.lookup.best("job", "loss", MIN, count=200)
    assert [each.metrics["loss"] for each in best] == sorted(float(step % 10) for step in steps)
    assert (await registry.best("loss", MAX)).step == 39
    for number in range(20):
        other = world.registry(f"run/{number}")
        await saved(other, await other.claim(), number + 1, {"loss": -number})
    assert len(await registry.runs()) == 21
    assert (await registry.runs())[5].run_id.startswith("run/")
    assert [each.run_id for each in await registry.lookup.best_of_all("loss", MIN, count=2)] == ["run/19", "run/18"]


async def test_records_that_are_too_large_for_one_answer_are_read_in_parts(claim, registry, world, monkeypatch):
    """A list of 500 records of 1.1 MB is more than a member sends: it was asked for again for ever."""
    first = await saved(registry, claim, 1)
    for step in range(2, 301):
        world.put(KEYS.record(KIND, step), replace(first, step=step).encode())
    control, original, asked = registry.control, type(registry.control).txn, list[int]()

    async def limited(self: object, compares: object, then: list[object], otherwise: object = ()) -> TxnResult:
        result = await original(control, compares, then, otherwise)
        asked.append(max((len(found) for found in result.results if isinstance(found, RangeResult)), default=0))
        assert len(asked) < 100, "it is asked for again and again"
        if asked[-1] > 30:
            raise UnknownStatus(RESOURCE_EXHAUSTED, CONNECTION_FULL)
        return result

    monkeypatch.setattr(type(control), "txn", limited)
    monkeypatch.setattr(paging_module, "PAGE_BYTES", 10_000)
    assert len(await registry.checkpoints(KIND)) == 300
    state = await load(control, "job")
    assert len(state.kinds[KIND].records) == 300


async def test_more_than_a_txn_may_hold_is_read_in_several(claim, registry, world, monkeypatch):
    first = await saved(registry, claim, 1, {"loss": 1.0})
    for step in range(2, 251):
        world.put(KEYS.record(KIND, step), replace(first, step=step).encode())
        world.put(KEYS.metric(KIND, "loss", 1.0, step), b"")
    control, original = registry.control, type(registry.control).txn

    async def limited(self: object, compares: object, then: list[object], otherwise: object = ()) -> object:
        assert len(then) <= 128, "etcdserver: too many operations in txn request"
        return await original(control, compares, then, otherwise)

    monkeypatch.setattr(type(control), "txn", limited)
    assert len(await registry.lookup.best("job", "loss", MIN, count=250)) == 250


async def test_deletion_between_two_reads_hides_nothing_else(claim: Claim, registry: Registry, world: World) -> None:
    for step in range(1, 6):
        await saved(registry, claim, step, {"loss": float(step)})
    for step in (1, 2):
        world.delete(KEYS.record(KIND, step))  # the index is as it was read before
    assert (await registry.best("loss")).step == 3
    other = world.registry("other")
    await saved(other, await other.claim(), 9, {"loss": 7.0})
    assert [each.step for each in await registry.lookup.best_of_all("loss", MIN, count=9)] == [3, 9]


async def test_best_is_decided_by_records_and_not_by_the_index(claim: Claim, registry: Registry, world: World) -> None:
    for step in (1, 2, 3):
        await saved(registry, claim, step, {"loss": float(step), "error": float(step)})
    for value, step in ((0.0, 3), (9.0, 1)):  # an index of a moment ago, or forged
        world.put(KEYS.metric(KIND, "loss", value, step), b"")
    best = await registry.lookup.best("job", "loss", MIN, count=3)
    assert [each.step for each in best] == [1, 2, 3]
    assert (await registry.best("loss")).step == 1
    assert (await registry.best("loss", MAX)).step == 3


@pytest.mark.long
@pytest.mark.parametrize("forger", ["a", "b", "c", "d"])
async def test_run_whose_summary_says_nan_changes_no_order_of_the_others(forger: str) -> None:
    """Compare nothing with it: who may write one run gave all others a wrong best of all runs."""
    for losses in permutations((0.1, 0.2, 0.3, 0.4)):
        world = World()
        for run_id, loss in zip("abcd", losses, strict=True):
            registry = world.registry(run_id)
            claim = await registry.claim()
            await saved(registry, claim, 1, {"loss": loss})
            if run_id == forger:
                forged = Latest(1, claim.generation, 1, best={"loss": Extremes(math.nan, 1, math.nan, 1)})
                world.put(RegistryKeys(run_id).latest(KIND), forged.encode())
        for mode in (MIN, MAX):
            found = await world.registry().lookup.best_of_all("loss", mode, count=4)
            ordered = sorted(losses, reverse=mode == MAX)
            assert [each.metrics["loss"] for each in found] == ordered
        registry = world.registry(forger)
        await saved(registry, await registry.claim(), 2, {"loss": 0.5})
        summary = (await registry.lookup.summary(forger))[0].latest
        assert summary.best["loss"].max_value == 0.5


async def test_best_of_all_runs_has_the_metric_in_its_record(world: World) -> None:
    for run_id, loss in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
        registry = world.registry(run_id)
        await saved(registry, await registry.claim(), 1, {"loss": loss})
    forged, keys = world.registry("a"), RegistryKeys("a")
    found = await forged.latest()
    for metrics in ({}, {"loss": math.nan}, {"loss": 5.0}):
        world.put(keys.record(KIND, 1), replace(found, metrics=metrics).encode())
        assert (await forged.lookup.best_of_all("loss", MIN))[0].run_id == "b"


async def test_index_of_a_metric_with_no_number_changes_no_extremes(claim, registry, world):
    for step in (1, 2, 3):
        await saved(registry, claim, step, {"loss": float(step)})
    for text in ("fff8000000000000", "-000000000000001"):
        world.put(f"{KEYS.metric_of(KIND, 'loss')}{text}/000000000009", b"")
    await registry.set_metrics(2, KIND, {"loss": 2.5})
    (summary,) = await registry.lookup.summary("job")
    assert summary.latest.best == {"loss": Extremes(1.0, 1, 3.0, 3)}


async def test_an_unreadable_record_hides_no_other(claim, registry, world, caplog):
    for step in (1, 2, 3):
        await saved(registry, claim, step, {"loss": float(step)})
    bad = RegistryKeys("bad")
    for key, value in (
        (bad.latest(KIND), b"{"), (bad.latest("x"), b"[]"), (f"{bad.latest_all}\udcff", b"null"),
        ("/raftkv/checkpoint/latest/%", b"1"), ("/raftkv/checkpoint/latest/", b"1"),
        ("/raftkv/checkpoint/latest/x/y/z", b'{"step":"1"}'),
        (KEYS.record(KIND, 2), b'{"step":1e999}'), (f"{KEYS.records_of(KIND)}x", b"\xff"),
        (f"{KEYS.metric_of(KIND, 'loss')}zz/000000000001", b""), (f"{KEYS.metric_of(KIND, 'loss')}0/x", b""),
    ):  # fmt: skip
        world.put(key.encode(errors="surrogateescape"), value)
    with caplog.at_level(logging.WARNING):
        assert [found.run_id for found in await registry.runs()] == ["job"]
        assert [found.step for found in await registry.checkpoints()] == [1, 3]
        assert (await registry.best("loss")).step == 1
        assert (await registry.lookup.best_of_all("loss", MAX))[0].step == 3
        await registry.set_metrics(3, KIND, {"loss": 0.5})
    assert "/raftkv/checkpoint/latest/bad/files" in caplog.text
    with pytest.raises(RecordError, match="/raftkv/checkpoint/run/job/record/files/000000000002"):
        await registry.at(2, KIND)
    with pytest.raises(RecordError, match="/raftkv/checkpoint/latest/bad/files"):
        await registry.lookup.summary("bad", KIND)


async def test_a_pointer_to_nothing_is_an_answer_and_no_loop(registry: Registry, world: World) -> None:
    await saved(registry, await registry.claim(), 1)
    world.delete(KEYS.record(KIND, 1))
    with pytest.raises(CheckpointNotFound):
        await registry.latest()


@pytest.mark.parametrize("run_id", ["", "..", "a/..", "a//b", "/a", "a\0b", "a\nb", "\ud800", "x" * 201, "a\\b"])
def test_a_run_id_that_cannot_be_used_is_refused(run_id: str) -> None:
    with pytest.raises(ConfigError):
        World().registry(run_id)


async def test_names_that_are_no_text_are_refused_by_lookups(registry: Registry) -> None:
    for look in (registry.tagged("\ud800"), registry.lookup.latest("\ud800"), registry.lookup.at("a\udcff", 1)):
        with pytest.raises(ConfigError):
            await look


async def test_lineage_ends_where_nothing_is_left(claim: Claim, registry: Registry, world: World) -> None:
    first = await saved(registry, claim, 1)
    second = await saved(registry, claim, 2, parent=first.reference)
    third = await saved(registry, claim, 3, parent=second.reference)
    assert await registry.lineage(third) == [third, second, first]
    world.put(KEYS.record(KIND, 1), replace(first, parent=third.reference).encode())  # a circle
    assert len(await registry.lineage(third)) == 3
    world.delete(KEYS.record(KIND, 2))
    assert await registry.lineage(third) == [third]
