"""Attempts: what becomes of them when ranks die, wait, repeat or disagree."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy
import pytest

from raftkv.checkpoint.commit import attempt
from raftkv.checkpoint.commit import attempt as attempts
from raftkv.checkpoint.commit.attempt import Attempt
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.commit.manifest import NAME, Manifest
from raftkv.checkpoint.digest import of_bytes
from raftkv.checkpoint.errors import (
    AttemptOver,
    CheckpointExists,
    CheckpointNotFound,
    FenceBroken,
    FilesChanged,
    PrepareConflict,
    RanksMissing,
    StaleStep,
)
from raftkv.checkpoint.keys import STEP_MAX, WORLD_SIZE_MAX
from raftkv.checkpoint.records import FileRecord, Latest, Reference
from raftkv.checkpoint.registry import Registry
from raftkv.errors import ConfigError
from tests.checkpoint.world import KEYS, KIND, World, files_of, prepared, saved


class Tensor:
    """Count as torch and JAX do, whose numbers are none of Python's."""

    def __index__(self) -> int:
        return 5


async def test_steps_and_ranks_may_be_whole_numbers_of_any_library(registry: Registry) -> None:
    """Take a step as training counts it: it was refused, or ended as an error of JSON about what it is not."""
    claim = await registry.claim()
    step, ranks = numpy.int64(5), numpy.uint8(2)
    attempt = await registry.begin(claim, step, world_size=ranks)
    joined = await registry.join(claim, Tensor())
    await attempt.prepare(numpy.int32(0), files_of(0))
    await joined.prepare(numpy.int32(1), files_of(1))
    await attempt.commit(metrics={"loss": numpy.float32(0.5)})
    done = await registry.set_metrics(step, KIND, {"eval/loss": 0.25})
    assert done == await registry.at(step) == await registry.at(5)
    assert (type(done.step), done.step, done.world_size) == (int, 5, 2)
    assert (await registry.best("eval/loss")).step == 5
    for wrong in (5.0, numpy.float64(5), "5", True, None):
        with pytest.raises(ConfigError, match="a whole number from 0"):
            await registry.begin(claim, wrong)
    with pytest.raises(TypeError, match="world_size is a whole number"):
        await registry.begin(claim, 6, world_size=2.0)
    with pytest.raises(TypeError, match="rank is a whole number"):
        await attempt.prepare(0.0, files_of(0))


async def test_a_checkpoint_exists_when_all_ranks_have_prepared_and_it_is_committed(claim, registry, world):
    attempt = await registry.begin(claim, 100, world_size=3, metadata={"job": "x"})
    others = [await world.registry(seed=rank).join(claim, 100) for rank in (1, 2)]
    for rank, each in enumerate([attempt, *others]):
        with pytest.raises(CheckpointNotFound):
            await registry.at(100)
        await each.prepare(rank, files_of(rank))
        await each.prepare(rank, files_of(rank))
    waiting = [asyncio.create_task(each.outcome(10.0)) for each in others]
    committed = await attempt.commit(metrics={"loss": 0.5})
    assert await asyncio.gather(*waiting) == [committed, committed]
    assert await attempt.commit(metrics={"loss": 9.0}) == committed == await registry.latest()
    manifest = Manifest.decode(world.files[attempt.uri])
    assert manifest.digest == committed.manifest == of_bytes(world.files[attempt.uri])
    assert [file.name for _, file in manifest.files] == ["0.bin", "1.bin", "2.bin"]
    assert world.keys(KEYS.attempts) == []
    await attempt.check()
    await attempt.prepare(1, files_of(1))
    assert await attempt.abort("too late") is False


async def test_two_attempts_never_write_to_one_directory() -> None:
    """Kinds of one step, begun at the same revision of the store, and two clusters at the same revision."""
    uris = []
    for draw in (1, 2):
        world = World()
        world.random.seed(draw)
        registries = [world.registry(seed=seed) for seed in range(4)]
        claim = await registries[0].claim("all")
        kinds = ("dcp", "files", "safetensors", "orbax")
        begun = [one.begin(claim, 100, kind=kind) for one, kind in zip(registries, kinds, strict=True)]
        uris += [attempt.uri.rpartition("/")[2] for attempt in await asyncio.gather(*begun)]
    assert len(set(uris)) == 8


async def test_a_fence_that_is_over_writes_nothing(registry: Registry, world: World) -> None:
    old = await registry.claim()
    attempt = await prepared(registry, old, 100, but=(1,))
    waiting = asyncio.create_task(attempt.outcome())
    committing = asyncio.create_task(attempt.commit())
    joining = asyncio.create_task(registry.join(old, 200))
    await asyncio.sleep(0.01)
    await registry.claim()
    before = dict(world.store.items)
    for step in (
        attempt.check(), attempt.prepare(1, files_of(1)), attempt.commit(), attempt.abort("x"), waiting,
        committing, joining, registry.begin(old, 300), attempt.outcome(),
    ):  # fmt: skip
        with pytest.raises(FenceBroken):
            await step
    assert world.store.items == before
    assert world.files == {}


async def test_a_commit_just_before_the_end_of_the_claim_is_told_as_one(registry: Registry) -> None:
    attempt = await prepared(registry, await registry.claim(), 100)
    waiting = asyncio.create_task(attempt.outcome())
    await asyncio.sleep(0.01)
    committed = await attempt.commit()
    await registry.claim()
    assert await waiting == committed
    assert await attempt.outcome() == committed


async def test_ranks_that_do_not_come_are_named(registry: Registry) -> None:
    attempt = await prepared(registry, await registry.claim(), 100, ranks=4, but=(1, 3))
    with pytest.raises(RanksMissing, match=r"within 0.05 s; missing: ranks 1, 3; abort it"):
        await attempt.commit(timeout_s=0.05)
    assert (await attempt.prepared(0.05, but=(1, 3))).keys() == {0, 2}
    with pytest.raises(TimeoutError, match=r"step 100 of run 'job' \(files\) was neither committed nor given up"):
        await attempt.outcome(0.01)
    with pytest.raises(TimeoutError, match=r"no coordinator began to save step 7 of run 'job' \(files\) within"):
        await registry.join(await registry.claim(), 7, timeout_s=0.01)


async def test_waiting_for_ranks_ends_when_the_attempt_is_given_up(registry: Registry) -> None:
    attempt = await prepared(registry, await registry.claim(), 100, but=(1,))
    committing = asyncio.create_task(attempt.commit())
    await asyncio.sleep(0.01)
    assert await attempt.abort("out of time")
    assert await attempt.abort("again")
    for wait in (committing, attempt.outcome(), attempt.check(), attempt.prepare(1, files_of(1))):
        with pytest.raises(AttemptOver):
            await wait


async def test_a_rank_that_comes_again_after_the_commit_is_told(registry: Registry) -> None:
    claim = await registry.claim()
    await saved(registry, claim, 100)
    with pytest.raises(CheckpointExists):
        await registry.join(claim, 100)
    joining = asyncio.create_task(registry.join(claim, 200))
    await asyncio.sleep(0.01)
    await registry.begin(claim, 200)
    assert (await joining).record.step == 200


async def test_latest_never_goes_back(registry: Registry) -> None:
    claim = await registry.claim()
    older, same = await prepared(registry, claim, 100), await prepared(registry, claim, 200)
    await saved(registry, claim, 200)
    with pytest.raises(CheckpointExists):
        await same.commit()
    for refused in (older.commit(), registry.begin(claim, 150)):
        with pytest.raises(StaleStep, match="is not above step 200, which is the latest"):
            await refused
    with pytest.raises(CheckpointExists):
        await registry.begin(claim, 200)
    other = await saved(registry, claim, 50, kind="dcp")
    assert (other.step, (await registry.latest()).step) == (50, 200)


async def test_inconsistent_ranks_are_not_committed(registry: Registry) -> None:
    claim = await registry.claim()
    attempt = await registry.begin(claim, 100, world_size=2)
    await attempt.prepare(0, files_of(0))
    with pytest.raises(PrepareConflict, match="rank 0 has prepared other files"):
        await attempt.prepare(0, files_of(1))
    await attempt.prepare(1, files_of(0))
    with pytest.raises(PrepareConflict, match=r"rank 1 and rank 0 both have a file '0.bin'"):
        await attempt.commit()
    with pytest.raises(ConfigError, match="rank 2 does not exist"):
        await attempt.prepare(2, ())
    one = files_of(0)[0]
    bad: list[list[FileRecord]] = [
        [one, one], [FileRecord(NAME, 0, one.digest)], [FileRecord("../x", 0, one.digest)],
        [FileRecord("/x", 0, one.digest)], [FileRecord("a\0b", 0, one.digest)],
        [FileRecord("\ud800", 0, one.digest)], [FileRecord("x", -1, one.digest)], [FileRecord("x", 1, "abc")],
        [FileRecord(f"{'n' * 900}{number}", 1, one.digest) for number in range(300)],
    ]  # fmt: skip
    for files in bad:
        with pytest.raises(ConfigError):
            await attempt.prepare(0, files)


@pytest.mark.parametrize(
    "arguments",
    [
        {"step": -1},
        {"step": STEP_MAX + 1},
        {"step": True},
        {"world_size": 0},
        {"world_size": WORLD_SIZE_MAX + 1},
        {"kind": "pickle"},
        {"metadata": {"x": "y" * 70_000}},
        {"metadata": {"x": "\ud800"}},
        {"metadata": {"x": 1}},
        {"metadata": {1: "x"}},
        {"metadata": {"x": object()}},
        {"parent": Reference("job", "dcp", -1)},
        {"parent": Reference("", "dcp", 1)},
        {"parent": Reference("job", "a/b", 1)},
    ],
)
async def test_impossible_save_is_refused_at_the_beginning(claim, registry, world, arguments):
    with pytest.raises(ConfigError):
        await registry.begin(claim, **{"step": 100, **arguments})
    assert world.keys(KEYS.attempts) == []


@pytest.mark.parametrize(
    "metrics", [{"": 1.0}, {"\ud800": 1.0}, {"a\nb": 1.0}, {"x" * 201: 1.0}, {"x": "1"}, {"x": True}, {"x": None},
                {"x": object()}, {"x": 10**400}, {f"m{number}": 1.0 for number in range(61)}],
)  # fmt: skip
async def test_metrics_that_cannot_be_stored_are_refused_before_anything_is_written(registry, world, metrics):
    attempt = await prepared(registry, await registry.claim(), 100)
    with pytest.raises(ConfigError):
        await attempt.commit(metrics=metrics)
    assert world.files == {}
    assert (await attempt.commit(metrics={"eval/loss of ä": 2**60, "b": 1})).metrics == {
        "eval/loss of ä": 2.0**60, "b": 1,
    }  # fmt: skip


async def test_a_child_in_another_run_holds_its_parent(world: World) -> None:
    registry, other = world.registry(), world.registry("tuned/x")
    claim, child_claim = await registry.claim(), await other.claim()
    parent = await saved(registry, claim, 100)
    child = await saved(other, child_claim, 7, parent=parent.reference)
    assert len(world.keys(KEYS.holds_of(KIND, 100))) == 1
    assert await other.lineage(child) == [child, parent]
    orphan = await prepared(other, child_claim, 8, parent=parent.reference)
    world.delete(KEYS.record(KIND, 100))
    with pytest.raises(CheckpointNotFound, match=r"the parent job@100 \(files\) of step 8 of run 'tuned/x'"):
        await orphan.commit()


async def test_a_parent_in_the_same_run_that_was_deleted_stops_no_commit(claim, registry, world, monkeypatch):
    """It is no condition; so it is none either when the first try loses against a new metric."""
    first = await saved(registry, claim, 100, {"loss": 1.0})
    await saved(registry, claim, 150)
    attempt = await prepared(registry, claim, 200, parent=first.reference)
    original = Attempt._read
    reads = 0

    async def read(self: Attempt) -> Any:
        nonlocal reads
        seen = await original(self)
        reads += 1
        if reads == 3:  # what the first try stands on
            await registry.set_metrics(150, KIND, {"loss": 2.0})
            world.delete(KEYS.record(KIND, 100))
        return seen

    monkeypatch.setattr(Attempt, "_read", read)
    assert (await attempt.commit()).step == 200
    assert reads == 4


async def test_the_summary_stays_small_for_long_metric_names(claim: Claim, registry: Registry, world: World) -> None:
    for step in range(1, 6):
        await saved(registry, claim, step, {f"{step}/{number}": float(number) for number in range(60)})
    await registry.set_metrics(3, KIND, {"3/7": -5.0})
    latest = Latest.decode(world.store.items[KEYS.latest(KIND).encode()].value)
    assert (latest.step, latest.count, len(latest.best)) == (5, 5, 100)
    assert (await registry.best("4/59", "max")).step == 4


async def test_a_thousand_ranks_are_one_commit_of_the_usual_size(registry: Registry, world: World) -> None:
    sizes = []
    for step, ranks in enumerate((1, 1000), 1):
        attempt = await prepared(registry, await registry.claim(), step, ranks=ranks)
        before = world.txns
        await attempt.commit(metrics={"loss": 1.0})
        assert world.txns - before <= 8
        sizes.append(len(world.store.items[KEYS.record(KIND, step).encode()].value))
    assert sizes[1] - sizes[0] <= 20


async def test_undecided_attempts_are_found_beside_foreign_keys(claim: Claim, registry: Registry, world: World) -> None:
    for step in (100, 200, 300):
        await prepared(registry, claim, step, ranks=40)
    for key, value in (
        ("files", "x"), ("files/x/head", "{}"), ("files/x/rank/1", "x"), ("files/y", "x"), ("a\xff/b/head", "x"),
        ("dcp/000000000005.1.1/head", "1"),
    ):  # fmt: skip
        world.put(f"{KEYS.attempts}{key}", value)
    before = world.txns
    heads = await attempt.undecided(registry.control, KEYS)
    assert [head.step for head in heads] == [100, 200, 300]
    assert world.txns - before <= 12


async def test_ranks_prepare_no_more_than_the_committer_can_read(registry: Registry) -> None:
    claim = await registry.claim()
    one = files_of(0)[0]
    many = [FileRecord(f"{number:04d}.bin", 1, one.digest) for number in range(1500)]
    await (await registry.begin(claim, 100, world_size=1000)).prepare(0, many)
    attempt = await registry.begin(claim, 200, world_size=100_000)
    with pytest.raises(ConfigError, match="too long for one of 100000 ranks: at most 2684 bytes; write fewer"):
        await attempt.prepare(0, many)
    await attempt.prepare(99_999, many[:10])


async def test_giving_up_raises_nothing_and_ends_whether_the_cluster_answers_or_not(monkeypatch):
    monkeypatch.setattr(attempts, "GIVE_UP_S", 0.05)
    world = World()
    registry = world.registry()
    attempt = await registry.begin(await registry.claim(), 100, world_size=1)
    await attempt.give_up(ValueError("no\nroom"), "rank 0 failed")
    assert [item.value for key, item in world.store.items.items() if b'rank 0 failed: ValueError: no"' in item.value]
    later = await registry.begin(await registry.claim(), 200, world_size=1)
    await registry.claim()
    await later.give_up(ValueError("it is fenced out"))
    away = world.registry(lost=1.0).attempt(await registry.claim(), later.record)
    async with asyncio.timeout(90):
        await away.give_up(ValueError("the cluster is away"))


async def test_files_that_went_because_the_attempt_was_given_up_are_not_the_reason(registry, world):
    attempt = await prepared(registry, await registry.claim(), 100)
    world.lost.add(attempt.uri)
    with pytest.raises(FilesChanged):
        await attempt.commit()
    assert attempt.uri not in world.files
    checking = attempt.check
    attempt.check = lambda: _after(checking(), attempt.abort("a rank has failed"))
    with pytest.raises(AttemptOver):
        await attempt.commit()


async def _after(first: Awaitable[None], then: Awaitable[Any]) -> None:
    await first
    await then
