"""Compaction: the remaining data, also on disk; a crash at every step; queued compactions; slices."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.storage import compaction, schema
from raftkv.storage.backend.base import Backend
from raftkv.storage.compaction import DELETES_PER_COMMIT, DROPS_PER_STEP, Deletions
from raftkv.storage.failpoints import FailpointPanic, arm, disarm_all, hits
from raftkv.storage.hash import KVHash
from raftkv.storage.mvcc import Store
from raftkv.storage.revision import SUB_BITS, describe, pack, to_key, to_tombstone_key
from tests.storage.conftest import Engine
from tests.storage.memory import MemoryBackend, ScriptedWriter

STEPS = [
    "compactBeforeCommitScheduledCompact",
    "compactAfterCommitScheduledCompact",
    "compactBeforeCommitBatch",
    "compactAfterCommitBatch",
    "compactBeforeSetFinishedCompact",
    "compactAfterSetFinishedCompact",
]


def fill(store: Store, changes: int, seed: int = 1) -> None:
    """A history with many overwritten and some deleted keys."""
    rng = random.Random(seed)
    for number in range(changes):
        txn = store.begin()
        key = b"k%02d" % rng.randrange(40)
        if rng.random() < 0.2:
            txn.delete_range(key)
        else:
            txn.put(key, b"value %d" % number)
        txn.end()
        store.set_applied(store.applied_index + 1, 1)


def finish(store: Store) -> None:
    while store.is_compacting:
        store.compaction_step()
        store.commit()


def hashed(store: Store, revision: int = 0) -> KVHash:
    jobs: list[KVHash] = []
    store.hash_kv(revision, lambda job: jobs.append(job()))
    return jobs[0]


def on_disk(backend: Backend) -> list[str]:
    read = backend.begin_read()
    keys = [describe(key) for key, _ in read.items(schema.KEY)]
    read.close()
    return keys


def test_disk_contents_after_compaction(backend: Backend) -> None:
    store = Store.open(backend)
    for key, value in ((b"a", b"1"), (b"a", b"2"), (b"b", b"1"), (b"b", None), (b"a", b"3"), (b"c", b"1")):
        txn = store.begin()
        txn.delete_range(key) if value is None else txn.put(key, value)
        txn.end()
        store.set_applied(store.applied_index, store.applied_term)
    store.commit()
    assert on_disk(backend) == ["2.0", "3.0", "4.0", "5.0(t)", "6.0", "7.0"]
    done: list[str] = []
    store.compact(5, lambda: done.append("5"))
    store.set_applied(store.applied_index, store.applied_term)
    finish(store)
    assert (on_disk(backend), done) == (["3.0", "5.0(t)", "6.0", "7.0"], ["5"])
    store.compact(6)
    store.set_applied(store.applied_index, store.applied_term)
    finish(store)
    assert on_disk(backend) == ["6.0", "7.0"]
    store.close()
    again = Store.open(backend)
    assert (again.compact_revision, again.revision, again.is_compacting) == (6, 7, False)
    again.close()


def test_compacted_overlay_is_never_written() -> None:
    backend = MemoryBackend()
    written: list[bytes] = []
    commit = backend.commit
    backend.commit = lambda batch: (written.extend(batch.records), commit(batch))[1]
    store = Store.open(backend)
    fill(store, 200)
    store.compact(store.revision)
    store.set_applied(store.applied_index, store.applied_term)
    finish(store)
    assert store.key_count <= len(written) <= store.key_count + 1
    assert len(on_disk(backend)) == len(written)
    store.close()


def test_deletions_go_oldest_first_so_that_neighbours_on_disk_go_together() -> None:
    backend = MemoryBackend()
    batches: list[list[bytes]] = []
    commit = backend.commit
    backend.commit = lambda batch: (batches.append(batch.deletes), commit(batch))[1]
    store = Store.open(backend)
    fill(store, 3500)
    store.commit()
    store.compact(store.revision)
    store.set_applied(store.applied_index, store.applied_term)
    finish(store)
    deleted = [key for batch in batches for key in batch]
    assert max(map(len, batches)) <= DELETES_PER_COMMIT
    assert len(deleted) > 2 * DELETES_PER_COMMIT
    assert deleted == sorted(deleted)
    store.close()


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 1 << 38), st.booleans()), max_size=60), max_size=4), st.integers(1, 9)
)
def test_deletions_are_processed_in_key_order(batches: list[list[tuple[int, bool]]], taken_at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "_RUN", 7)
        patch.setattr(compaction, "COLLECTED_MAX", 50)
        deletions = Deletions()
        for batch in batches:
            keys = [to_tombstone_key(pack(main, 3)) if dead else to_key(pack(main, 3)) for main, dead in batch]
            for key in keys:
                deletions.add(key)
            assert deletions.takes_more == (len(keys) < 50)
            taken: list[bytes] = []
            while deletions.count:
                taken += (some := deletions.take(taken_at_once))
                assert 0 < len(some) <= taken_at_once
                assert not (deletions.count and deletions.takes_more)
            assert taken == sorted(keys)


def test_no_more_deletions_are_collected_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a compaction would hold 8 bytes in memory for each revision that it drops, however many they are."""
    monkeypatch.setattr(compaction, "COLLECTED_MAX", 50)
    store = Store.open(MemoryBackend())
    fill(store, 3500)
    store.commit()
    store.compact(store.revision)
    store.set_applied(store.applied_index, store.applied_term)
    job = store._compactor._jobs[0]
    collected: list[int] = []
    while store.is_compacting:
        store.compaction_step(1)
        collected.append(job.deletions.count)
        store.commit()
    assert sum(1 for before, now in pairwise(collected) if now < before) > 10
    assert max(collected) < 50 + max(count - before for before, count in pairwise(collected)) <= 50 + DROPS_PER_STEP


def test_a_view_holds_up_the_compactions_that_come_after_it_alone(backend: Backend) -> None:
    store = Store.open(backend)
    fill(store, 100)
    store.compact(50)
    after = store.pin()
    store.set_applied(store.applied_index, store.applied_term)
    assert store.compaction_step(), "the view is of what this compaction leaves"
    finish(store)
    fill(store, 100, 2)
    store.compact(120)
    store.set_applied(store.applied_index, store.applied_term)
    assert not store.compaction_step()
    after.let_go()
    finish(store)
    store.close()


def test_a_step_is_bounded(backend: Backend) -> None:
    store = Store.open(backend, ScriptedWriter())
    fill(store, 300)
    store.compact(store.revision)
    store.set_applied(store.applied_index, store.applied_term)
    assert store.compaction_step(4)
    job = store._compactor._jobs[0]
    assert job.dirty is not None
    left = len(job.dirty)
    for _ in range(2):
        assert store.compaction_step(4)
    assert len(job.dirty) == left - 8
    store.close()


def test_a_step_is_bounded_on_a_key_of_many_revisions() -> None:
    store = Store.open(MemoryBackend())
    for _ in range(2 * DROPS_PER_STEP):
        txn = store.begin()
        txn.put(b"k", b"v")
        txn.end()
        store.set_applied(store.applied_index, store.applied_term)
        txn = store.begin()
        txn.delete_range(b"k")
        txn.end()
        store.set_applied(store.applied_index, store.applied_term)
    store.compact(store.revision)
    store.set_applied(store.applied_index, store.applied_term)
    dropped, now = 0, 0
    while store.compaction_step():
        now = store._compactor.dropped_total
        assert now - dropped <= DROPS_PER_STEP
        dropped = now
    finish(store)
    assert now == 4 * DROPS_PER_STEP - 1
    assert (store.range(b"k").count, _known(store)) == (0, {store.revision << SUB_BITS})


def _known(store: Store) -> set[int]:
    known: set[int] = set()
    for key in store._index.keys(b"\x00", b"\x00"):
        entry = store._index._entries[key]
        known |= {entry} if isinstance(entry, int) else set(entry.since(0))
    return known


@cache
def _uninterrupted() -> tuple[KVHash, KVHash, list[bytes]]:
    store = Store.open(MemoryBackend())
    fill(store, 1500)
    store.compact(1200)
    store.set_applied(store.applied_index, store.applied_term)
    finish(store)
    return hashed(store), hashed(store, 1200), store.range(b"\x00", b"\x00").kvs


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("hit", [0, 1])
def test_a_crash_at_any_step_is_resumed(engine: Engine, name: str, hit: int) -> None:
    expected = _uninterrupted()
    store = Store.open(engine.backend())
    fill(store, 1500)
    store.commit()
    arm(name, f"after-{hit} raise")
    crashed = False
    try:
        store.compact(1200)
        store.set_applied(store.applied_index, store.applied_term)
        store.commit()
        assert hashed(store) == expected[0]
        finish(store)
    except FailpointPanic:
        crashed = True
    assert crashed == (hits(name) > hit)
    assert hit or crashed, "the point was not reached"
    disarm_all()
    again = Store.open(engine.backend())
    assert again.revision == store.revision
    if again.compact_revision < 0:  # lost with its batch: the log has it
        again.compact(1200)
        again.set_applied(again.applied_index, again.applied_term)
    assert again.compact_revision == 1200
    assert hashed(again) == expected[0]
    finish(again)
    assert (hashed(again), hashed(again, 1200), again.range(b"\x00", b"\x00").kvs) == expected
    again.close()


def test_the_revision_never_goes_back(engine: Engine) -> None:
    """etcd issue 17780: everything up to the compact revision may be gone, the last record too."""
    store = Store.open(engine.backend())
    for delete in (False, True):
        txn = store.begin()
        txn.delete_range(b"k") if delete else txn.put(b"k", b"v")
        txn.end()
        store.set_applied(store.applied_index, store.applied_term)
    store.commit()
    store.compact(3)
    store.set_applied(store.applied_index, store.applied_term)
    finish(store)
    backend = store.backend
    store.close()
    batch = type(store._overlay.pending)()
    batch.deletes = [key for key, _ in _items(backend)]
    backend.commit(batch)
    assert on_disk(backend) == []
    again = Store.open(engine.backend())
    assert (again.revision, again.compact_revision) == (3, 3)
    again.close()


def _items(backend: Backend) -> list[tuple[bytes, bytes]]:
    read = backend.begin_read()
    items = list(read.items(schema.KEY))
    read.close()
    return items


@pytest.mark.parametrize("collected_max", [1, compaction.COLLECTED_MAX], ids=["in parts", "at once"])
@pytest.mark.parametrize("drops_per_step", [1, 1000])
def test_a_crash_between_forgetting_and_deleting_leaves_no_holes(backend, drops_per_step, collected_max, monkeypatch):
    """Memory is compacted at once and the disk later; a crash may come in between."""
    monkeypatch.setattr(compaction, "DROPS_PER_STEP", drops_per_step)
    monkeypatch.setattr(compaction, "COLLECTED_MAX", collected_max)
    store = Store.open(backend)
    write(store, (b"a", b"1"), (b"b", b"1"), (b"c", b"1"), (b"c", None), (b"d", b"1"))  # these reach the disk
    store.commit()
    write(store, (b"a", b"2"), (b"a", b"3"), (b"b", None), (b"b", b"2"), (b"c", b"2"), (b"c", None), (b"d", None))
    write(store, (b"e", b"1"), (b"e", b"2"))
    store.compact(store.revision)
    store.set_applied(store.applied_index, store.applied_term)
    while store._compactor._visit(store._compactor._jobs[0], 1):
        pass
    store.commit()
    again = Store.open(backend)  # the first one dies here
    assert again.range(b"\x00", b"\x00").kvs == store.range(b"\x00", b"\x00").kvs
    for each in (store, again):
        write(each, (b"a", b"4"), (b"b", b"3"), (b"c", b"3"), (b"d", b"2"))
    assert again.range(b"\x00", b"\x00").kvs == store.range(b"\x00", b"\x00").kvs
    assert "14.0" not in on_disk(backend), "nothing of it was on disk: it is never written"
    finish(again)
    assert on_disk(backend) == ["8.0", "10.0", "15.0", "16.0", "17.0", "18.0", "19.0"]
    store.close()
    again.close()


def write(store: Store, *changes: tuple[bytes, bytes | None]) -> None:
    for key, value in changes:
        txn = store.begin()
        txn.delete_range(key) if value is None else txn.put(key, value)
        txn.end()
        store.set_applied(store.applied_index + 1, 1)
