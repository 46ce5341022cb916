"""Publishing and collecting: the head is moved by one txn, and no chunk that a reader needs is ever deleted."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.client.records import RecordError
from raftkv.client.sync.loop import LoopThread
from raftkv.dataset import codec
from raftkv.dataset import publish as publishing
from raftkv.dataset.dataset import Dataset
from raftkv.dataset.entry import Entry
from raftkv.dataset.errors import ChunkCorrupted, DatasetNotFound, InvalidEntry, PublishConflict, VersionGone
from raftkv.dataset.keys import VERSION_MAX, DatasetKeys
from raftkv.dataset.publish import Collected, collect
from raftkv.dataset.tree import Builder
from raftkv.errors import ConfigError, LeaseNotFoundError, NoSpaceError, RaftKVError
from tests.dataset.world import SMALL, World, entries
from tests.spoiled import FEW, spoiled


def test_a_version_is_read_as_it_was_published(data: Dataset, world: World) -> None:
    found = entries(range(500))
    head = data.publish(iter(found), cut=SMALL)
    files = data.next_pass()
    assert (head.version, head.count, head.size_bytes, len(files)) == (1, 500, 500, 500)
    assert list(files) == found
    assert codec.decode_node("d", codec.unseal(head.root, _stored(world, head.root))).level > 2
    assert files[0] == found[0]
    assert files[-1] == found[-1]
    assert files[17:99] == found[17:99]
    assert files[90:10:-3] == found[90:10:-3]
    assert files.lookup(found[123].path) == found[123]
    assert files.lookup("train") is None
    assert files.lookup("zzz") is None
    assert found[7].path in files
    assert list(files.below("train/0004/")) == found[40:50]
    assert list(files.below("nothing/")) == []
    assert list(files.below(found[45].path)) == [found[45]]  # what begins with a text may end with it
    assert list(files.below(found[0].path)) == [found[0]]
    assert list(files.below("")) == found
    with pytest.raises(IndexError):
        files[500]


def _stored(world: World, digest: str) -> bytes:
    return bytes(world.store.items[f"/raftkv/data/images/chunk/{digest}".encode()].value)


def test_one_more_file_writes_a_chunk_or_two(data: Dataset, world: World) -> None:
    data.publish(entries(range(2000)), cut=SMALL)
    before = len(world.keys(data.keys.chunks))
    data.publish(entries([*range(2000), 100_000 // 7]), cut=SMALL)
    assert len(world.keys(data.keys.chunks)) - before <= 8  # chunks, and the index above them
    assert before > 200


def test_the_same_again_is_no_version(data: Dataset) -> None:
    head = data.publish(entries(range(100)), cut=SMALL)
    assert data.publish(entries(range(100)), cut=SMALL) == head
    assert [each.version for each in data.versions()] == [1]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([], "allow_empty"),
        ([Entry("a", 1), Entry("a", 1)], "twice"),
        ([Entry("b", 1), Entry("a", 1)], "sort the entries"),
        ([Entry("a", 1), Entry("../b", 1)], "path"),
        ([("a", 1)], "not a raftkv.dataset.Entry"),
    ],
)
def test_failed_publish_leaves_the_previous_version(data: Dataset, world: World, found: list[Any], why: str) -> None:
    head = data.publish(entries(range(10)))
    with pytest.raises(InvalidEntry, match=why):
        data.publish(found)
    assert data.next_pass().head == head
    data.close()
    assert [each.version for each in data.versions()] == [1]
    assert world.keys(data.keys.publishings) == []


def test_an_empty_version_is_published_if_it_is_wanted(data: Dataset) -> None:
    data.publish([], allow_empty=True)
    files = data.next_pass()
    assert list(files) == []
    assert files.lookup("a") is None
    assert data.collect().hindered == ""


@pytest.mark.parametrize("name", ["", "..", "a/../b", "a//b", "a\nb", "x" * 201, "a\\b"])
def test_names_that_cannot_be_are_refused(world: World, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        world.dataset(name)


def test_of_two_publishers_one_wins_and_the_other_is_told(world: World) -> None:
    one, other = world.dataset(), world.dataset()

    def interrupted() -> Any:
        yield from entries(range(5))
        other.publish(entries(range(100)), cut=SMALL)
        yield from entries(range(5, 10))

    with pytest.raises(PublishConflict, match="the newest is 1; publish again"):
        one.publish(interrupted())
    assert len(one.next_pass()) == 100


def test_ctrl_c_as_a_publishing_has_begun_leaves_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the registration back: it was kept alive as long as the program, and nothing could be collected."""
    run, data = world.loop.run, world.dataset()

    def interrupted(coroutine: Any) -> None:
        monkeypatch.setattr(world.loop, "run", run)
        run(coroutine)
        assert len(world.keys(data.keys.publishings)) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(world.loop, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        data.publish(entries(range(10)), cut=SMALL)
    for _ in range(100):
        world.loop.run(asyncio.sleep(0))
    assert world.keys(data.keys.publishings) == []


def test_a_publisher_that_was_silent_for_too_long_publishes_nothing(data: Dataset, world: World) -> None:
    head = data.publish(entries(range(10)))

    def frozen() -> Any:
        yield from entries(range(50))
        world.revoke_all()

    with pytest.raises(PublishConflict, match="silent"):
        data.publish(frozen(), cut=SMALL)
    assert data.next_pass().head == head


def test_a_store_without_room_is_an_error_not_a_wait(data, world, monkeypatch):
    execute, refused = world.store.txn, [""]

    def full(compares: Any, then: Any, otherwise: Any = ()) -> Any:
        if any(refused[0] in str(each.key) and hasattr(each, "value") for each in then):
            raise NoSpaceError
        return execute(compares, then, otherwise)

    monkeypatch.setattr(world.store, "txn", full)
    for refused[0] in ("chunk/", "publishing/", "head"):
        with pytest.raises(NoSpaceError):
            data.publish(entries(range(10)))
    refused[0] = "pin."
    data.publish(entries(range(10)))
    with pytest.raises(NoSpaceError):
        data.pin(1, "job")


def test_lost_answers_publish_once(world: World) -> None:
    data = world.dataset(lost=0.1, seed=3)
    for number in range(1, 6):
        assert data.publish(entries(range(number * 10)), cut=SMALL).version == number
    reader = world.dataset()
    assert len(reader.next_pass()) == 50
    for late in list(world.world.sent):  # copies of everything that was ever sent arrive again
        with contextlib.suppress(LeaseNotFoundError):
            world._call(late)
    assert reader.at(5).head.root == reader.next_pass().head.root


def test_versions_stay_for_their_time_and_while_they_are_pinned(data: Dataset, world: World) -> None:
    for number in range(1, 7):
        data.publish(entries(range(number * 40)), cut=SMALL, keep_s=60)
    data.pin(2, "job/a")
    world.put(f"{data.keys.keeps}{'9' * 5000}/x", b"")  # no number of a version
    assert data.collect().versions == ()  # all are young
    world.revoke_all()
    assert data.collect(dry_run=True).versions == (1, 3, 4)
    assert len(data.versions()) == 6
    assert data.collect().versions == (1, 3, 4)
    assert [each.version for each in data.versions()] == [2, 5, 6]
    for version in (2, 5, 6):
        assert list(world.dataset().at(version)) == entries(range(version * 40))
    with pytest.raises(DatasetNotFound, match="no version 3"):
        data.pin(3, "late")
    data.unpin(2, "job/a")
    assert data.collect().versions == (2,)
    assert len(world.keys(data.keys.chunks)) == _needed(world, data)


def test_a_late_copy_of_unpin_takes_no_later_pin(data: Dataset, world: World) -> None:
    data.publish(entries(range(10)))
    data.pin(1, "job")
    before = len(world.world.sent)
    data.unpin(1, "job")
    data.unpin(1, "job")
    late = world.world.sent[before:]
    data.pin(1, "job")
    for send in late:
        world._call(send)
    assert world.keys(data.keys.keeps) == [data.keys.pin(1, "job")]


def _needed(world: World, data: Any) -> int:
    needed = set()
    for head in data.versions():
        open_nodes = [head.root]
        while open_nodes:
            digest = open_nodes.pop()
            needed.add(digest)
            raw = codec.unseal(digest, _stored(world, digest))
            if raw[:1] == b"N":
                open_nodes += [child.digest for child in codec.decode_node(digest, raw).children]
    return len(needed)


def test_record_below_the_versions_speaks_for_no_other_version(data: Dataset, world: World) -> None:
    """The chunks of a pinned version were collected: a planted record named another root under its number."""
    found = entries(range(200))
    first = data.publish(iter(found), cut=SMALL, keep_s=0)
    data.pin(first.version, "job")
    for last in (300, 400):
        newest = data.publish(entries(range(200, last)), cut=SMALL, keep_s=0)
    world.put(f"{data.keys.versions}x/head", replace(newest, version=first.version).encode())
    with contextlib.suppress(RecordError):
        data.collect(keep_last=1)
    assert list(world.dataset().at(first.version)) == found


def test_reader_of_a_collected_version_gets_an_error(world: World) -> None:
    data, reader = world.dataset(), world.dataset(cache_bytes=0)
    data.publish(entries(range(100)), cut=SMALL, keep_s=0)
    files = reader.next_pass()
    for number in range(3):
        data.publish(entries(range(1000 * number, 1000 * number + 100), size=2), cut=SMALL, keep_s=0)
    data.collect()
    with pytest.raises(VersionGone, match="begin a new pass"):
        list(files)
    with pytest.raises(DatasetNotFound):
        reader.at(1)
    with pytest.raises(DatasetNotFound, match="with the root"):
        reader.at(4, root="0" * 64)


def test_nothing_is_collected_during_a_publication(world: World) -> None:
    data, other = world.dataset(), world.dataset()
    data.publish(entries(range(100)), cut=SMALL, keep_s=0)
    data.publish(entries(range(200)), cut=SMALL, keep_s=0)
    data.publish(entries(range(300)), cut=SMALL, keep_s=0)

    def meanwhile() -> Any:
        yield from entries(range(50))
        collected = other.collect()
        assert "another client publishes" in collected.hindered
        assert collected.chunks == 0
        yield from entries(range(50, 100))

    data.publish(meanwhile(), cut=SMALL, keep_s=0)  # the chunks of version 1, which were garbage
    assert list(data.next_pass()) == entries(range(100))
    assert other.collect().hindered == ""
    assert list(world.dataset().next_pass()) == entries(range(100))


def test_publisher_without_a_lease_hinders_no_collection(data: Dataset, world: World) -> None:
    """A copy of its key, as a mirror of another cluster writes it, kept all chunks for ever."""
    for last in (100, 200, 300, 400):
        data.publish(entries(range(last - 100, last)), cut=SMALL, keep_s=0)
    world.put(f"{data.keys.publishings}ghost", b"{}")
    found = data.collect()
    assert (found.hindered, found.versions) == ("", (1, 2))
    assert found.chunks > 0


class Interposed:
    """A control beside which something happens after its first txn: what it has read is old by then."""

    def __init__(self, inner: Any, happens: Callable[[], object]) -> None:
        self._inner = inner
        self._happens: Callable[[], object] | None = happens

    async def txn(self, *args: Any) -> Any:
        result = await self._inner.txn(*args)
        happens, self._happens = self._happens, None
        if happens is not None:
            await asyncio.to_thread(happens)
        return result


def _collect_beside(world: World, happens: Callable[[], object]) -> Collected:
    data = world.dataset()
    local = data._local
    control: Any = Interposed(local.store.control, happens)
    return local.loop.run(collect(control, data.keys, local.source.fetch, keep_last=1))


def test_version_published_during_collection_stays(data: Dataset, world: World) -> None:
    data.publish(entries(range(100)), cut=SMALL, keep_s=0)
    for number in (200, 300):
        data.publish(entries(range(1000, 1000 + number)), cut=SMALL, keep_s=0)
    assert data.collect(keep_last=1).versions == (1, 2)  # so that no version is left to drop, and no chunk
    for digest, stored in _sealed(entries(range(100))):  # a publisher died before it moved the head
        world.put(data.keys.chunk(digest), stored)
    collected = _collect_beside(world, lambda: world.dataset().publish(entries(range(100)), cut=SMALL))
    assert "published meanwhile" in collected.hindered
    assert list(world.dataset().next_pass()) == entries(range(100))


def _sealed(found: list[Entry]) -> list[tuple[str, bytes]]:
    builder = Builder(SMALL)
    return [pair for each in found for pair in builder.add(each)] + list(builder.finish())


def test_a_pin_between_a_look_and_a_deletion_holds(data: Dataset, world: World) -> None:
    for number in (100, 200, 300):
        data.publish(entries(range(1000 * number, 1000 * number + number)), cut=SMALL, keep_s=0)
    collected = _collect_beside(world, lambda: world.dataset().pin(1, "job"))
    assert collected.versions == (2,)
    assert len(list(world.dataset().at(1))) == 100


def test_nothing_is_collected_below_an_index_that_cannot_be_read(data: Dataset, world: World) -> None:
    head = data.publish(entries(range(100)), cut=SMALL)
    world.put(data.keys.chunk(head.root), b"damaged")
    before = world.keys(data.keys.chunks)
    with pytest.raises(ChunkCorrupted, match="rewrite=True"):
        world.dataset().collect()
    assert world.keys(data.keys.chunks) == before
    data.publish(entries(range(100)), cut=SMALL, rewrite=True)
    assert list(world.dataset().next_pass()) == entries(range(100))


def test_a_dataset_that_was_never_published_has_nothing_to_collect(world: World) -> None:
    assert "nothing was published" in world.dataset().collect().hindered


@pytest.mark.long
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_publishers_that_die_anywhere_and_collectors_leave_readable_versions(loop: LoopThread, seed: int) -> None:
    """Publishers run step by step beside collectors, and stop anywhere; every version that is listed is whole."""
    world, rng = World(loop), random.Random(seed)
    contents: dict[str, list[Entry]] = {}
    data = world.dataset()
    steps = [_publisher(world, rng, contents) for _ in range(6)]
    while steps:
        at = rng.randrange(len(steps) + 1)
        if at == len(steps):
            world.dataset().collect(keep_last=1)
            continue
        try:
            next(steps[at])
            if rng.random() < 0.1:
                steps.pop(at)  # it dies here
                world.revoke_all()  # and its lease, with those of others
        except StopIteration:
            steps.pop(at)
        for head in data.versions():
            assert list(world.dataset().at(head.version)) == contents[head.root]
    world.revoke_all()
    if contents:
        assert data.collect(keep_last=1).hindered == "" or not data.versions()
        if data.versions():
            assert len(world.keys(data.keys.chunks)) == _needed(world, data)


def _publisher(world: World, rng: random.Random, contents: dict[str, list[Entry]]) -> Any:
    """A publisher in steps, so that others come between any two of its writes."""
    data = world.dataset(seed=rng.randrange(1000))
    local = data._local
    control = local.store.control
    found = entries(range(rng.randrange(3) * 8, 24 + rng.randrange(3) * 8))
    under_way = local.loop.run(publishing.begin(control, data.keys, lambda: 0.0))
    yield
    builder = Builder(SMALL)
    for sealed in [pair for each in found for pair in builder.add(each)] + list(builder.finish()):
        local.loop.run(under_way.put([sealed]))
        yield
    contents[builder.root] = found
    try:
        local.loop.run(under_way.finish(builder, lambda: 0.0, rng.choice([0, 60])))
    except PublishConflict:
        pass
    local.loop.run(under_way.close())


@pytest.mark.parametrize("where", ["head", "version"])
def test_a_spoiled_head_is_refused_in_one_line_and_touches_no_file(world: World, tmp_path: Path, where: str) -> None:
    """Plant what any user who may write below one dataset can: a root that is a path, numbers without end."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"data")
    head = world.dataset().publish(entries(range(20)), cut=SMALL)
    keys = DatasetKeys("images")
    key = keys.head if where == "head" else keys.version(1)
    stolen = [replace(head, root=root).encode() for root in (str(precious), "../precious", "locks/../../precious")]
    for value in (*stolen, replace(head, version=2, id="").encode(), *spoiled(head.encode(), FEW)):
        world.put(key, value)
        with world.dataset(directory=tmp_path / "shared") as data:
            for ask in (data.next_pass, data.versions, data.collect, lambda: data.at(1), lambda: list(data)):
                with contextlib.suppress(RaftKVError):
                    ask()
        assert precious.read_bytes() == b"data"
        assert {path.name for path in tmp_path.iterdir()} == {"precious", "shared"}
    world.put(key, head.encode())
    with world.dataset(directory=tmp_path / "shared") as data:
        assert len(data) == 20


def test_no_version_follows_the_last_number(world: World) -> None:
    """A head that no reader takes would end the dataset: planted by any user who may write below it."""
    head = world.dataset().publish(entries(range(20)), cut=SMALL)
    last = replace(head, version=VERSION_MAX)
    world.put(DatasetKeys("images").head, last.encode())
    with pytest.raises(RecordError, match=f"version {VERSION_MAX} is the last that can be"):
        world.dataset().publish(entries(range(21)), cut=SMALL)
    with world.dataset() as data:
        assert len(data) == 20


def test_unchanged_entries_do_not_hide_a_version_that_came_meanwhile(world: World) -> None:
    """Who publishes what was the newest at its beginning is not told that it still is."""
    data, other = world.dataset(), world.dataset()
    data.publish(entries(range(10)), cut=SMALL)

    def meanwhile() -> Iterator[Entry]:
        yield from entries(range(10))
        other.publish(entries(range(20)), cut=SMALL)

    with pytest.raises(PublishConflict, match="another publisher was faster"):
        data.publish(meanwhile(), cut=SMALL)
    assert data.publish(entries(range(20)), cut=SMALL).version == 2  # nothing has changed, and nothing came meanwhile
