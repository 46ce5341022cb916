"""The collector: what goes, what stays, and that it can be cut off anywhere."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.checkpoint.commit.summary import advanced
from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.keys import DCP, FILES, AttemptId
from raftkv.checkpoint.records import Checkpoint, Latest
from raftkv.checkpoint.retention.collector import Collected, KindState
from raftkv.checkpoint.retention.policy import Best, Policy
from raftkv.checkpoint.storage.place import Place
from raftkv.client.operations import Compare, Operation
from raftkv.client.values import TxnResult
from tests.checkpoint.retention.kept import FILE_BYTES, Kept
from tests.checkpoint.world import KEYS, play
from tests.long import long_except
from tests.virtual_store.direct import FakeControl

LAST = Policy(keep_last=1)


async def test_unkept_checkpoint_loses_its_bytes_and_keys(world: Kept) -> None:
    saved = [await world.save(step, {"loss": step % 8}) for step in range(1, 9)]
    planned = await world.collect(Policy(keep_last=2, keep_best=(Best("loss", "max"),)), dry_run=True)
    assert world.steps() == [*range(1, 9)]
    done = await world.collect(Policy(keep_last=2, keep_best=(Best("loss", "max"),)))
    assert planned == done
    assert (done.deleted, done.failures) == ([*saved[:6]], [])
    assert done.freed_bytes == 6 * FILE_BYTES
    assert {each.checkpoint.step: each.why for each in done.decisions if each.is_kept} == {
        7: ("last 2", "best 1 by loss"),
        8: ("latest", "last 2"),
    }
    assert world.directories() == [Path(each.uri).name for each in saved[6:]]
    assert world.keys(KEYS.deletings) == []
    assert [key.rpartition("/")[2] for key in world.keys(f"{KEYS.base}metric/")] == ["000000000008", "000000000007"]
    latest = world.latest()
    assert (latest.step, latest.count, latest.size_bytes) == (8, 2, 2 * FILE_BYTES)
    loss = latest.best["loss"]
    assert (loss.min_value, loss.min_step, loss.max_value, loss.max_step) == (0, 8, 7, 7)


async def test_without_rules_nothing_goes(world: Kept) -> None:
    for step in (1, 2, 3):
        await world.save(step)
    done = await world.collect()
    assert (world.steps(), done.deleted) == ([1, 2, 3], [])
    assert {each.why for each in done.decisions[:2]} == {("no rule deletes it",)}


async def test_the_latest_of_each_kind_and_what_is_held_stays(world: Kept) -> None:
    saved = {step: await world.save(step, kind=DCP if step % 2 else FILES) for step in range(1, 9)}
    child = await world.save(1, run_id="tuned", parent=saved[1].reference)
    registry = world.registry()
    await registry.tag("release", saved[2])
    await registry.pin_for(saved[3], "reader", 0)
    done = await world.collect(Policy(max_bytes=0))
    assert (world.steps(DCP), world.steps(FILES)) == ([1, 3, 7], [2, 8])
    assert {each.checkpoint.step: each.why for each in done.decisions if each.is_kept} == {
        1: ("held: child tuned@files@1",), 2: ("held: tag release",), 3: ("held: pin reader",),
        7: ("latest",), 8: ("latest",),
    }  # fmt: skip
    # With its holds gone, each may go; the child lets go of its parent when it is deleted.
    await registry.untag("release")
    assert await registry.unpin(saved[3], "reader") == 1
    await world.save(2, run_id="tuned")
    assert (await world.registry("tuned").collect(LAST)).deleted == [child]
    await world.collect(Policy(max_bytes=0))
    assert (world.steps(DCP), world.steps(FILES)) == ([7], [8])
    assert world.keys(KEYS.holds) == []


async def test_a_reader_learns_that_a_checkpoint_is_gone(world: Kept) -> None:
    first = await world.save(1)
    await world.save(2)
    await world.collect(LAST)
    for take in (world.registry().pin_for(first, "late", 0), world.registry().tag("late", first)):
        with pytest.raises(CheckpointNotFound, match="deleted, or about to be"):
            await take
    assert world.keys(KEYS.holds) == []


@pytest.mark.parametrize("seed", long_except(range(12), range(4)))
async def test_a_pin_and_a_deletion_never_both_succeed(world: Kept, seed: int) -> None:
    """Pins, tags and collectors at once, with lost answers: what is held at the end has its record and its bytes."""
    saved = [await world.save(step) for step in range(1, 6)]

    async def hold(number: int, checkpoint: Checkpoint) -> Checkpoint | None:
        registry = world.registry(seed=seed * 100 + number, lost=0.04)
        try:
            if number % 2:
                await registry.pin_for(checkpoint, "reader", 0)
            else:
                await registry.tag("tag", checkpoint)
        except CheckpointNotFound:
            return None
        return checkpoint

    async def collect(number: int) -> Collected:
        return await world.registry(seed=seed * 1000 + number, lost=0.04).collect(LAST)

    held, *collected = await asyncio.gather(
        asyncio.gather(*(hold(number, each) for number, each in enumerate(saved[:4]))), collect(1), collect(2)
    )
    tagged = (await world.registry().tags()).get("tag")
    for number, each in enumerate(held):
        if each is not None and (number % 2 or each.reference == tagged):
            assert each.step in world.steps()
            assert Place(each.uri).exists("sub/a.bin")
    assert len(world.directories()) == len(world.steps())
    gone = sorted(each.step for result in collected for each in result.deleted)
    # Seed 10: the answer of a deletion was lost, and the other collector finished that deletion: it tells of it.
    finished = [each.step for each in saved for result in collected if each.uri in result.given_up]
    assert sorted({*gone, *finished, *world.steps()}) == [1, 2, 3, 4, 5]
    assert len(gone) == len(set(gone))  # each was deleted by one of them
    assert (world.latest().count, world.latest().step) == (len(world.steps()), 5)


@pytest.mark.parametrize("seed", range(6))
async def test_commits_and_metrics_beside_a_collection_keep_the_summary_right(world: Kept, seed: int) -> None:
    for step in range(1, 6):
        await world.save(step, {"loss": step})

    async def evaluate() -> None:
        registry = world.registry(seed=seed, lost=0.04)
        for step in (1, 4, 5):
            try:
                await registry.set_metrics(step, FILES, {"loss": -step, "acc": step})
            except CheckpointNotFound:
                pass  # it was deleted before

    async def save() -> None:
        await world.save(6, {"loss": 0.5})
        await world.save(7, {"loss": 9})

    policy = Policy(keep_last=2, keep_best=(Best("loss"),))
    collector = world.registry(seed=seed + 77, lost=0.04)
    await asyncio.gather(evaluate(), save(), collector.collect(policy), world.registry(seed=seed).collect(policy))
    _check_summary(world)


def _check_summary(world: Kept) -> None:
    """The summary, and the index of metrics, say what the records say."""
    records = [Checkpoint.decode(world.store.items[key.encode()].value) for key in world.keys(KEYS.records)]
    latest: Latest = world.latest()
    assert (latest.count, latest.size_bytes) == (len(records), sum(each.size_bytes for each in records))
    for name in ("loss", "acc"):
        values = [(each.metrics[name], each.step) for each in records if name in each.metrics]
        index = world.keys(KEYS.metric_of(FILES, name))
        assert index == sorted(KEYS.metric(FILES, name, value, step) for value, step in values)
        if values:
            found = latest.best[name]
            assert (found.min_value, found.max_value) == (min(values)[0], max(values)[0])
            assert {found.min_step, found.max_step} <= {step for _, step in values}
        else:
            assert name not in latest.best


class Crash(Exception):
    """The collector's process is killed."""


class Killed(FakeControl):
    """A control whose process is killed around one of its txns."""

    def __init__(self, world: Kept, number: int, *, is_done: bool) -> None:
        control = world.control()
        super().__init__(world, control._rng, 0.0)
        self._left = number
        self._is_done = is_done

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        self._left -= 1
        if self._left:
            return await super().txn(compares, then, otherwise)
        if self._is_done:
            await super().txn(compares, then, otherwise)
        raise Crash


async def _all_sorts_of_garbage(world: Kept) -> None:
    """Checkpoints to delete, an aborted attempt, prepared ranks without a head, an orphan."""
    for step in (1, 2, 3):
        await world.save(step, {"loss": step})
    attempt, file = await world.begin(4, world_size=2)
    await attempt.prepare(0, [file])
    await world.next_generation()  # gives it up
    saved = await world.save(5)
    world.put(KEYS.attempt(FILES, saved.id).rank(0), b"{}")  # killed before it cleaned up
    Place(f"{world.uri}/{AttemptId(4, 0, 77).directory}").write("late.bin", b"of a zombie")


@pytest.mark.long
@pytest.mark.parametrize("is_done", [False, True])
def test_cut_off_at_any_txn_the_next_collection_ends_it(is_done: bool, tmp_path: Path) -> None:
    async def whole(path: Path, number: int) -> tuple[bool, tuple[Any, ...]]:
        world = Kept(path)
        await _all_sorts_of_garbage(world)
        try:
            await world.collect(LAST, control=Killed(world, number, is_done=is_done))
        except Crash:
            was_killed = True
            done = await world.collect(LAST)
            assert done.failures == []
        else:
            was_killed = False
        return was_killed, (world.keys(""), len(world.directories()), world.latest().encode())

    _, wanted = play(whole(tmp_path / "0", 10_000))
    assert len(wanted[0]) == 5  # fence, begun, mark, latest, record, and no metric, attempt or deletion
    assert wanted[1] == 1
    number = 0
    while True:
        number += 1
        was_killed, found = play(whole(tmp_path / str(number), number))
        assert found == wanted
        if not was_killed:
            break
    assert number > 20


@pytest.mark.parametrize("after", [0, 1])
async def test_cut_off_between_bytes_the_next_collection_ends_it(world, after, monkeypatch):
    await _all_sorts_of_garbage(world)
    delete_tree, calls = Place.delete_tree, 0

    def stumble(place: Place) -> None:
        nonlocal calls
        calls += 1
        place.delete("sub/a.bin")
        if after:
            delete_tree(place)
        raise Crash

    for number in range(1, 5):  # the attempt, and three checkpoints
        monkeypatch.setattr(Place, "delete_tree", stumble)
        with pytest.raises(Crash):
            await world.collect(LAST)
        assert calls == number
        monkeypatch.setattr(Place, "delete_tree", delete_tree)
        await world.collect()  # what was begun is ended, the rest waits
    await world.collect(LAST)
    assert (world.steps(), len(world.directories()), world.keys(KEYS.deletings)) == ([5], 1, [])


_saved = st.dictionaries(
    st.integers(0, 30),
    st.dictionaries(st.sampled_from(["loss", "acc"]), st.sampled_from([-math.inf, -1.0, 0.0, 1.0, math.inf, math.nan])),
    max_size=8,
)


@settings(max_examples=60)
@given(_saved, st.randoms())
def test_the_summary_of_what_is_left_is_that_of_its_commits(saved: dict[int, dict[str, float]], random: Any) -> None:
    kind = KindState(Latest(99, 1), 1)
    every = {
        step: Checkpoint("job", step, 1, step, FILES, 1, "", "", "", 1, step + 5, None, metrics)
        for step, metrics in sorted(saved.items())
    }
    for checkpoint in every.values():
        kind.latest = advanced(kind.latest, checkpoint)
        kind.records[checkpoint.step] = (checkpoint, 1)
    left = list(every)
    random.shuffle(left)
    while left:
        found = kind.remove(left.pop())
        wanted = Latest(found.step, 1)
        for step in sorted(left):
            wanted = advanced(wanted, every[step])
        assert (found.count, found.size_bytes) == (wanted.count, wanted.size_bytes)
        assert dict(found.best) == dict(wanted.best)
