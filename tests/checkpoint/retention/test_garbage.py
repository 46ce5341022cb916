"""What dead attempts have left: which bytes belong to no checkpoint, and which only look like it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from raftkv.checkpoint.errors import StorageError
from raftkv.checkpoint.keys import DCP, FILES, AttemptId, RegistryKeys
from raftkv.checkpoint.records import Checkpoint, Deleting
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.retention import ownership
from raftkv.checkpoint.retention.policy import Best, Policy
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.verify import verify
from tests.checkpoint.retention.kept import Kept
from tests.checkpoint.world import KEYS, RUN

OLD = AttemptId(4, 0, 77)


def _orphan(world: Kept, name: str = OLD.directory) -> str:
    Place(f"{world.uri}/{name}").write("late.bin", b"of a zombie")
    return f"{world.uri}/{name}"


async def test_the_bytes_of_an_attempt_that_was_given_up_go(world: Kept) -> None:
    whole, file = await world.begin(1)
    await whole.prepare(0, [file])
    half, file = await world.begin(2, world_size=2)
    await half.prepare(0, [file])
    assert (await world.collect()).given_up == []  # not decided yet
    await world.next_generation()
    live, _ = await world.begin(3)
    done = await world.collect()
    assert (done.given_up, world.steps()) == ([half.uri], [1])
    assert world.directories() == sorted(attempt.uri.rpartition("/")[2] for attempt in (whole, live))
    assert world.keys(KEYS.attempts) == [KEYS.attempt(FILES, live.record.id).head]


async def test_a_late_copy_of_a_beginning_is_not_committed_when_its_bytes_are_gone(world: Kept) -> None:
    attempt, file = await world.begin(1)
    keys = KEYS.attempt(FILES, attempt.record.id)
    await attempt.prepare(0, [file])
    prepared = world.store.items[keys.rank(0).encode()].value
    await attempt.abort("changed its mind")
    world.put(keys.head, attempt.record.encode())
    world.put(keys.rank(0), prepared)
    await world.collect()
    assert (world.keys(KEYS.attempts), world.keys(KEYS.deletings), world.directories()) == ([], [], [])


async def test_bytes_of_a_checkpoint_stay_despite_a_false_deletion_record(world: Kept) -> None:
    saved = await world.save(1)
    world.put(KEYS.deleting(FILES, saved.id), Deleting(saved.uri, "wrong").encode())
    await world.collect()
    assert Place(saved.uri).exists("sub/a.bin")
    assert world.keys(KEYS.deletings) == []


async def test_a_deletion_of_anything_but_the_attempts_own_directory_deletes_nothing(world: Kept) -> None:
    await world.save(1)
    for uri in (world.uri, f"{world.uri}/{OLD.directory}/..", "memory://", "", _orphan(world, "precious")):
        world.put(KEYS.deleting(FILES, OLD), Deleting(uri).encode())
        done = await world.collect()
        assert (done.kept_bytes, world.keys(KEYS.deletings)) == ([uri], [])
    assert Place(world.uri).names()[-2:] == [
        "raftkv-run-" + world.store.items[KEYS.mark.encode()].value.decode(),
        world.directories()[0],
    ]
    assert Place(f"{world.uri}/precious").exists("late.bin")


async def test_late_files_of_a_zombie_are_removed(world: Kept) -> None:
    saved = await world.save(1)
    orphan = _orphan(world)
    planned = await world.collect(dry_run=True)
    assert (planned.orphans, len(world.directories())) == ([orphan], 2)
    assert (await world.collect()).orphans == [orphan]
    assert world.directories() == [saved.uri.rpartition("/")[2]]


@pytest.mark.parametrize(
    "name",
    [
        AttemptId(4, 1, 77).directory,  # of the present generation: its head may be written in a moment
        AttemptId(4, 9, 77).directory,
        "step-000000000004.g0.077",
        "step-4.g0.77",
        f"{OLD.directory}.backup",
        f"copy-of-{OLD.directory}",
        "step-000000000004",
        "notes",
    ],
)
async def test_directories_that_are_not_surely_ours_stay(world: Kept, name: str) -> None:
    await world.save(1)
    orphan = _orphan(world, name)
    assert (await world.collect()).orphans == []
    assert Place(orphan).exists("late.bin")


async def test_directories_that_a_key_names_stay(world: Kept) -> None:
    saved = await world.save(1)
    undecided, _ = await world.begin(2)
    for _ in range(2):
        await world.registry().claim()  # another generation, which has not taken over yet
    assert (await world.collect()).orphans == []
    assert world.directories() == sorted(each.uri.rpartition("/")[2] for each in (saved, undecided))


async def test_where_no_fence_is_left_no_directory_is_taken_for_an_orphan(world: Kept) -> None:
    """Keep all files: the fence alone says which attempts are over, and a store that lacks it may be a restored one."""
    await world.save(1)
    orphan = _orphan(world)
    world.delete(KEYS.fence)
    done = await world.collect()
    assert (done.orphans, done.failures) == ([], [])
    assert Place(orphan).exists("late.bin")


async def test_where_others_write_too_no_directory_is_taken_for_an_orphan(tmp_path: Path) -> None:
    """Another run, or another cluster, with the same place: what it has saved is not ours to delete."""
    world, other = Kept(tmp_path), Kept(tmp_path)
    theirs = await other.save(1)
    for _ in range(3):
        await world.next_generation()
    await world.save(2)
    assert (await world.collect()).orphans == []
    assert Place(theirs.uri).exists("sub/a.bin")


async def test_where_no_mark_is_left_no_directory_is_taken_for_an_orphan(world: Kept) -> None:
    await world.save(1)
    orphan = _orphan(world)
    world.delete(KEYS.mark)
    assert (await world.collect()).orphans == []
    world.put(KEYS.mark, b"other")
    assert (await world.collect()).orphans == []
    assert Place(orphan).exists("late.bin")


async def test_run_that_claims_the_mark_of_another_takes_none_of_its_directories_for_orphans(world: Kept) -> None:
    """Who may write the keys of a run may not have the collector delete what another run is writing."""
    await world.save(1)
    theirs = _orphan(world)  # of another run, as its mark says
    (mark,) = ownership.read_marks(world.uri)
    Place(world.uri).delete(ownership.PREFIX + mark)
    Place(world.uri).write(ownership.PREFIX + mark, b"another\n")
    assert (await world.collect()).orphans == []
    assert Place(theirs).exists("late.bin")


@pytest.mark.parametrize("run_id", [" ", "job ", "\u00a0job", "job\u2028"])
async def test_white_space_around_a_run_id_is_a_part_of_it(world: Kept, run_id: str) -> None:
    """No checkpoint of such a run was ever deleted: its mark seemed to be that of another."""
    for step in (1, 2):
        await world.save(step, run_id=run_id)
    done = await world.registry(run_id).collect(Policy(keep_last=1))
    assert (done.failures, [each.step for each in done.deleted]) == ([], [1])


@pytest.mark.parametrize("value", [b"", b"../../evil", b"a/b", b"\xff", b"n" * 5000])
async def test_mark_that_raftkv_did_not_write_gives_way_to_another(world: Kept, value: bytes) -> None:
    """An empty one had every save of the run ask the cluster without end, others failed it."""
    world.put(KEYS.mark, value)
    await world.save(1)
    (mark,) = ownership.read_marks(world.uri)
    assert world.store.items[KEYS.mark.encode()].value.decode() == mark != value


async def test_a_whole_checkpoint_that_the_store_does_not_know_stays(world: Kept) -> None:
    """Play a restore of the store from a backup: what was committed since can still be imported."""
    await world.save(1)
    lost = [await world.save(step) for step in (2, 3)]
    for each in lost:
        world.delete(KEYS.record(FILES, each.step))
    await world.next_generation()
    Place(lost[1].uri).delete("sub/a.bin")  # not whole any more
    done = await world.collect()
    assert (done.unknown, done.orphans) == ([lost[0].uri], [lost[1].uri])
    assert Place(lost[0].uri).exists("sub/a.bin")
    assert not Place(lost[1].uri).list()


@pytest.mark.parametrize(
    ("policy", "gone", "kept"),
    [
        (Policy(keep_last=1), [4], [3, 4]),
        (Policy(keep_last=2), [3, 4], [1, 2, 3, 4]),
        (Policy(keep_best=(Best("loss"),)), [2], [2, 3, 4]),
        (Policy(keep_every=2), [2], [1, 2, 3, 4]),
        (Policy(max_age_s=0), [4], [2, 3, 4]),
        (Policy(keep_last=1), [], [4]),
    ],
)
async def test_a_checkpoint_whose_files_are_gone_takes_no_place_of_another(world, policy, gone, kept):
    """Play a restore of the store from a backup: what was deleted since has records again, but no files."""
    saved = {step: await world.save(step, {"loss": loss}) for step, loss in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.3))}
    for step in gone:
        Place(saved[step].uri).delete_tree()
    assert [each.step for each in (await world.collect(policy, dry_run=True)).deleted] == [
        step for step in saved if step not in kept
    ]
    await world.collect(policy)
    assert world.steps() == kept


async def test_a_mark_is_left_before_anything_else_is_written(world: Kept) -> None:
    attempt = await world.registry().begin(await world.registry().claim(), 1)
    (mark,) = Place(world.uri).names()
    assert mark == ownership.PREFIX + world.store.items[KEYS.mark.encode()].value.decode()
    assert Place(world.uri).read(mark) == b"job\n"
    await world.registry().begin(await world.registry().claim(), 2)
    assert Place(world.uri).names() == [mark]
    assert not Place(attempt.uri).list()


async def test_undeletable_file_is_named_and_tried_again(world: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        await world.save(step)
    delete_tree = Place.delete_tree

    def refuse(place: Place) -> None:
        if "step-000000000001" in place.uri:
            raise StorageError(f"cannot delete {place.uri}: Permission denied")
        delete_tree(place)

    monkeypatch.setattr(Place, "delete_tree", refuse)
    registry = world.registry()
    done = await registry.collect(Policy(keep_last=1))
    assert [each.step for each in done.deleted] == [1, 2]
    assert [line.rpartition(": ")[2] for line in done.failures] == ["Permission denied"]
    assert (world.steps(), len(world.directories())) == ([3], 2)
    monkeypatch.undo()
    assert len((await registry.collect(Policy(keep_last=1))).given_up) == 1
    assert (len(world.directories()), world.keys(KEYS.deletings)) == (1, [])


async def test_foreign_values_stop_no_collection(world: Kept) -> None:
    for step in (1, 2, 3):
        await world.save(step)
    hostile = [
        f"{KEYS.deletings}files", f"{KEYS.deletings}files/1.2", KEYS.deleting(FILES, OLD), f"{KEYS.attempts}x",
        KEYS.record(FILES, 9), f"{KEYS.records_of(FILES)}x", KEYS.latest("dcp"), f"{KEYS.holds}x/y", KEYS.tag("x"),
    ]  # fmt: skip
    for key in hostile:
        world.put(key, b"[]")
    hostile.append(KEYS.record(FILES, 8))
    world.put(hostile[-1], world.store.items[KEYS.record(FILES, 1).encode()].value)  # a record of another step
    done = await world.collect(Policy(keep_last=1))
    assert ([each.step for each in done.deleted], len(done.failures)) == ([1, 2], 3)
    assert world.latest().count == 1
    assert set(hostile) <= set(world.keys(""))


async def test_a_planted_deletion_of_anothers_directory_deletes_nothing(world: Kept) -> None:
    """Plant what any user who may write below one run can plant: the name of another run's directory."""
    await world.save(1)
    theirs = await world.save(7, run_id="victim")
    world.put(KEYS.deleting(FILES, theirs.id), Deleting(theirs.uri).encode())
    done = await world.collect()
    assert done.failures == [
        f"{theirs.uri} stays: it does not lie below {world.uri}; collect with its place to delete it"
    ]
    assert verify(theirs).is_whole
    shared = world.registry("victim")  # the operator collects with the place of the victim
    shared.run_id, shared.keys = RUN, KEYS
    done = await shared.collect()
    assert (len(done.failures), "has no mark of run 'job'" in done.failures[0]) == (1, True)
    assert verify(theirs).is_whole


async def test_in_a_shared_place_each_run_deletes_its_own(world: Kept) -> None:
    first, theirs = await world.save(1), await _saved_beside(world, "victim", 7)
    world.put(KEYS.deleting(FILES, theirs.id), Deleting(theirs.uri).encode())
    done = await world.collect()
    assert len(done.failures) == 1
    assert done.failures[0].startswith(theirs.uri)
    assert verify(theirs).is_whole
    world.delete(KEYS.deleting(FILES, theirs.id))
    await world.save(2)
    assert (await world.collect(Policy(keep_last=1))).deleted == [first]
    assert not Place(first.uri).exists("sub/a.bin")
    Place(world.uri).write(f"{ownership.PREFIX}0123456789abcdef", b"victim\n")  # of another cluster
    await world.save(3)
    done = await world.collect(Policy(keep_last=1))
    assert (done.deleted, len(done.failures), world.steps()) == ([], 1, [2, 3])
    assert "this cluster does not know its mark; delete that file if the run is gone" in done.failures[0]


async def _saved_beside(world: Kept, run_id: str, step: int) -> Checkpoint:
    """Save a checkpoint of another run in the same place."""
    registry = Registry.from_parts(world.registry()._means, run_id, uri=world.uri)
    attempt = await registry.begin(await registry.claim(), step)
    await attempt.prepare(0, [Place(attempt.uri).write("sub/a.bin", b"theirs")])
    return await attempt.commit()


async def test_a_record_that_names_another_lets_go_of_no_hold_of_another(world: Kept) -> None:
    parent = await world.save(1, run_id="victim")
    child = await world.save(1, run_id="tuned", parent=parent.reference)
    last = await world.save(5)
    for planted in (
        child, replace(child, run_id=RUN, step=0), replace(last, parent=parent.reference, step=2),
        replace(last, run_id="tuned", step=3, parent=parent.reference), replace(last, kind="tuned@files", step=4),
    ):  # fmt: skip
        world.put(KEYS.record(FILES, planted.step), planted.encode())
    await world.collect(Policy(keep_last=1))
    held = RegistryKeys("victim").holds_of(FILES, 1)
    assert world.keys(held) == [f"{held}child/tuned%40files%401"]


@pytest.mark.parametrize("damage", ["later version", "metric without a key", "too many metrics"])
async def test_bytes_of_a_checkpoint_whose_record_cannot_be_read_stay(world: Kept, damage: str) -> None:
    saved = [await world.save(step, {"loss": 1.0}) for step in (1, 2)]
    await world.next_generation()
    key = KEYS.record(saved[0].kind, 1)
    spoilt = {
        "later version": b'{"step":1,"format":2}',
        "metric without a key": saved[0].encode().replace(b'"loss"', b'"\\ud800"'),
        "too many metrics": replace(saved[0], metrics={f"m{number}": 1.0 for number in range(200)}).encode(),
    }
    world.put(key, spoilt[damage])
    world.put(KEYS.deleting(saved[0].kind, saved[0].id), Deleting(saved[0].uri).encode())
    done = await world.collect(Policy(keep_last=1))
    assert "the record of its step cannot be read" in done.failures[0]
    world.delete(KEYS.deleting(saved[0].kind, saved[0].id))
    Place(saved[0].uri).delete("sub/a.bin")  # no whole checkpoint, which would stay anyway
    done = await world.collect(Policy(keep_last=1))
    assert (done.orphans, len(world.directories())) == ([], 2)


async def test_summary_below_a_foreign_key_ends_no_collection(world: Kept) -> None:
    for step in (1, 2):
        await world.save(step)
    world.put(f"{KEYS.latest_all}x/{FILES}", world.latest().encode())
    await world.collect(Policy(keep_last=1))
    assert world.steps() == [2]
    assert [each.kind for each in await world.registry().runs()] == [FILES]


async def test_deletion_that_names_another_kind_deletes_no_committed_bytes(world: Kept) -> None:
    """Who may write what is to be deleted gives the attempt of a checkpoint under another kind than its own."""
    await world.save(1)
    begun, _ = await world.begin(2)
    for attempt in ((await world.registry().latest()).id, begun.record.id):
        gone = Deleting(f"{world.uri}/{attempt.directory}")
        world.put(KEYS.deleting(DCP, attempt), gone.encode())
    done = await world.collect()
    assert [line.partition(": ")[2] for line in done.failures] == ["it is that of a checkpoint of kind files"] * 2
    assert len(world.directories()) == 2
    assert verify(await world.registry().latest()).is_whole
