"""Reading: what is cached is not read again, a pass keeps its version, and an old head is not taken for the newest."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import subprocess
import sys
import threading
import zlib
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

import raftkv
from raftkv.dataset import codec
from raftkv.dataset.codec import Child, Node
from raftkv.dataset.dataset import Dataset, Snapshot
from raftkv.dataset.entry import Entry
from raftkv.dataset.errors import ChunkCorrupted, DatasetNotFound, StaleHead
from raftkv.dataset.keys import DatasetKeys, Head
from raftkv.errors import ConfigError
from tests.dataset.world import SMALL, World, entries
from tests.procs import ETCD, ROOT, Cluster, wait_for


def test_a_second_pass_reads_nothing_from_the_store(world: World) -> None:
    world.dataset().publish(entries(range(500)), cut=SMALL)
    data = world.dataset()
    assert list(data.next_pass()) == entries(range(500))
    first = len(world.chunk_reads)
    assert first == data.store_reads == len(world.keys(data.keys.chunks))
    assert list(data.next_pass()) == entries(range(500))
    assert data.lookup("train/0001/000015.jpg") == Entry("train/0001/000015.jpg", 1)
    assert len(world.chunk_reads) == first
    assert world.watches == 1


def test_of_a_new_version_only_what_is_new_is_read(data: Dataset, world: World) -> None:
    data.publish(entries(range(2000)), cut=SMALL)
    list(data.next_pass())
    before = len(world.chunk_reads)
    data.publish(entries([*range(2000), 10_001]), cut=SMALL)
    assert len(list(data.next_pass())) == 2001
    assert len(world.chunk_reads) - before <= 8


def test_the_memory_is_bounded(world: World) -> None:
    world.dataset().publish(entries(range(3000)), cut=SMALL)
    data = world.dataset(cache_bytes=20_000)
    for _ in range(2):
        for at, each in enumerate(data.next_pass()):
            assert each.size == 1
            if at % 100 == 0:
                assert data.resident_bytes <= 20_000
    assert data.store_reads > len(world.keys(data.keys.chunks))


def test_many_threads_that_want_a_chunk_read_it_once(world: World) -> None:
    world.dataset().publish(entries(range(300)), cut=SMALL)
    world.slow_s = 0.002
    data = world.dataset()
    files = data.next_pass()
    found: list[list[Entry]] = []
    threads = [threading.Thread(target=lambda: found.append(list(files))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [entries(range(300))] * 8
    assert data.store_reads == len(world.keys(data.keys.chunks))


def test_chunk_that_arrived_first_is_not_fetched_ahead(world: World) -> None:
    world.dataset().publish(entries(range(300)), cut=SMALL)
    data = world.dataset()
    files = data.next_pass()
    list(files)
    reads = data.store_reads
    local = data._local
    local.loop.call_soon(data._fetch_ahead, local, files._digests)  # decided before the reader had them
    local.loop.run(asyncio.sleep(0))
    local.loop.run(asyncio.sleep(0.01))
    assert data.store_reads == reads


def test_the_ranks_of_a_node_read_each_chunk_once(world: World, tmp_path: Path) -> None:
    world.dataset().publish(entries(range(500)), cut=SMALL)
    world.slow_s = 0.001
    ranks = [world.dataset(directory=tmp_path / "shared") for _ in range(8)]
    threads = [threading.Thread(target=lambda rank=rank: list(rank.next_pass())) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(world.chunk_reads) == len(set(world.chunk_reads)) == len(world.keys(ranks[0].keys.chunks))
    assert list(world.dataset(directory=tmp_path / "shared").next_pass()) == entries(range(500))
    assert sum(rank.store_reads for rank in ranks) == len(set(world.chunk_reads))


def test_a_pass_keeps_its_version_and_follow_does_not(world: World) -> None:
    publisher, keeps, follows = world.dataset(), world.dataset(), world.dataset(follow=True)
    publisher.publish(entries(range(50)), cut=SMALL)
    files = keeps.current
    assert len(follows) == 50
    publisher.publish(entries(range(90)), cut=SMALL)
    assert keeps.wait_version(2, timeout_s=90).version == 2
    wait_for(lambda: len(follows) == 90, "the version that is followed")
    assert follows[89] == entries(range(90))[89]
    assert len(keeps) == len(files) == 50
    assert keeps.current is files
    assert len(keeps.next_pass()) == 90
    assert world.watches == 2  # one for each that has read the head
    with pytest.raises(TimeoutError, match=r"version 3 of dataset 'images' was not published within 0.01 s; .* is 2"):
        keeps.wait_version(3, timeout_s=0.01)


@pytest.mark.long
def test_an_old_head_is_confirmed_before_it_is_taken_for_the_newest(world: World) -> None:
    data = world.dataset(max_staleness_s=0.2, timeout_s=2.0, follow=True)
    data.publish(entries(range(50)), cut=SMALL)
    files = data.current
    assert len(list(files)) == 50
    wait_for(lambda: data._follower(data._local).age_s > 0.2, "the head to be old")
    assert len(data.current) == 50  # the store was asked, and has confirmed it
    world.is_down = True
    wait_for(lambda: data._follower(data._local).age_s > 0.2, "the head to be old")
    with pytest.raises(StaleHead, match=r"version 1 is known, and the store has not confirmed .* see whether"):
        len(data)
    assert list(files.entries(45)) == entries(range(50))[45:]  # a version that is pinned does not grow old
    world.is_down = False
    assert len(data.next_pass()) == 50


def test_a_dataset_that_does_not_exist(world: World) -> None:
    data = world.dataset("none")
    with pytest.raises(DatasetNotFound, match="nothing was published as dataset 'none'"):
        data.next_pass()
    data.publish(entries(range(3)))
    wait_for(lambda: data._follower(data._local).head is not None, "the head")
    assert len(data.next_pass()) == 3
    data.close()
    data.close()


def test_a_head_that_is_none_is_a_typed_error(data: Dataset, world: World) -> None:
    data.publish(entries(range(3)))
    world.put(data.keys.head, b'{"root": 3}')
    with pytest.raises(raftkv.RaftKVError):
        world.dataset(timeout_s=0.1).next_pass()


@pytest.mark.parametrize("hostile", [b"", b"x" * 100, zlib.compress(b"C" + bytes(10**6)), codec.seal(b"C{}\n")[1]])
def test_a_damaged_chunk_is_a_typed_error(data: Dataset, world: World, hostile: bytes) -> None:
    data.publish(entries(range(100)), cut=SMALL)
    files = data.next_pass()
    victim = files._digests[2]
    world.put(data.keys.chunk(victim), hostile)
    reader = world.dataset()
    with pytest.raises(ChunkCorrupted, match=victim[:16]):
        list(reader.next_pass())
    assert reader.lookup(entries(range(100))[0].path) is not None  # the others can be read


def test_an_index_that_names_other_chunks_is_refused(data: Dataset, world: World) -> None:
    head = data.publish(entries(range(20)), cut=SMALL)
    raw = codec.unseal(head.root, bytes(world.store.items[data.keys.chunk(head.root).encode()].value))
    plain = json.loads(raw[1:])
    plain["counts"][0] += 1
    digest, stored = codec.seal(b"N" + json.dumps(plain).encode())
    world.put(data.keys.chunk(digest), stored)
    forged = Head(digest, 2, head.count, head.size_bytes, head.chunks, head.stored_bytes)
    world.put(data.keys.head, forged.encode())
    with pytest.raises(ChunkCorrupted, match="it is not what the index"):
        list(world.dataset().next_pass())


def test_an_index_that_names_a_node_many_times_is_not_unpacked_many_times(world: World) -> None:
    def stored(level: int, child: str, count: int) -> str:
        children = [Child(child, f"{number:06d}", count, 1) for number in range(1000)]
        digest, found = codec.seal(Node(level, tuple(children)).encode())
        world.put(DatasetKeys("images").chunk(digest), found)
        return digest

    root, count = "0" * 64, 1
    for level in (1, 2, 3, 4, 5):
        root, count = stored(level, root, count), count * 1000
    world.put(DatasetKeys("images").head, Head(root, 1, count, 1, 1, 1).encode())
    with pytest.raises(ChunkCorrupted, match="it is not what the index above says"):
        world.dataset().next_pass()


def test_settings_that_cannot_be_are_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for settings in ({"cache_bytes": -1}, {"max_staleness_s": 0}, {"directory": tmp_path / "file" / "below"}):
        with pytest.raises(ConfigError):
            world.dataset(**settings)


@pytest.mark.parametrize(("keep_s", "error"), [("1", TypeError), (math.nan, ValueError), (-1, ConfigError)])
def test_a_time_that_cannot_be_is_refused_before_anything_is_written(world, keep_s, error):
    with pytest.raises(error, match="keep_s"):
        world.dataset().publish(entries(range(10)), cut=SMALL, keep_s=keep_s)
    assert world.keys("") == []


@pytest.mark.long
def test_it_works_on_etcd(tmp_path: Path) -> None:
    with Cluster(ETCD) as cluster:
        _use(cluster.endpoints, tmp_path)


def _work(files: Snapshot, data: Dataset) -> None:
    assert list(files) == entries(range(300))
    assert files.head.version == data.current.head.version == 1
    assert data.next_pass().head.version == 2
    assert len(data) == 310


@pytest.mark.long
@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_pickled_dataset_connects_anew(tmp_path: Path, way: str) -> None:
    """Work in a data loader as Python 3.14 starts it: the version of the pass goes along, the caches do not."""
    with raftkv.local(fsync=False) as cluster, cluster.connect() as kv:
        data = Dataset(kv, "a", directory=tmp_path)
        data.publish(entries(range(300)), cut=SMALL)
        files = data.next_pass()
        assert files[0] == entries([0])[0]
        data.publish(entries(range(310)), cut=SMALL)
        worker = multiprocessing.get_context(way).Process(target=_work, args=(files, data))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
        assert len(ForkingPickler.dumps(data)) < 50_000


@pytest.mark.long
def test_against_a_real_store_and_in_forked_children(tmp_path: Path) -> None:
    with raftkv.local(fsync=False) as cluster:
        _use(cluster.endpoints, tmp_path)


USE = """
import os, sys
import raftkv
from raftkv.dataset.dataset import Dataset
from tests.dataset.world import SMALL, entries

kv = raftkv.connect(sys.argv[1])
data = raftkv.dataset.Dataset(kv, "a/b", directory=sys.argv[2], follow=True)
data.publish(entries(range(300)), cut=SMALL)
files = data.next_pass()
assert list(files) == entries(range(300))
read = data.store_reads
child = os.fork()
if not child:  # as a worker of a data loader: it opens a connection of its own when it needs one
    good = list(files) == entries(range(300)) and data.store_reads == 0
    os._exit(0 if good and len(Dataset(kv, "a/b").next_pass()) == 300 else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
data.publish(entries(range(400)), cut=SMALL, keep_s=0.5)
assert data.wait_version(2, timeout_s=60).count == 400
assert data.lookup(entries(range(400))[399].path) is not None
assert data.collect(keep_last=1).hindered == ""
assert kv.count(data.keys.publishings, prefix=True) == 0
assert kv.count(data.keys.chunks, prefix=True) > read
data.close()
kv.close()
"""


def _use(endpoints: list[str], folder: Path) -> None:
    words = [sys.executable, "-c", USE, ",".join(endpoints), str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
