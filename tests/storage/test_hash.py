"""HashKV: equal to etcd's, equal after any compaction, and verifying records while hashing."""

from __future__ import annotations

import json
import random
from pathlib import Path

import google_crc32c
import pytest

from raftkv.errors import CompactedError, FutureRevisionError
from raftkv.storage import schema
from raftkv.storage.backend.base import Backend
from raftkv.storage.hash import KVHash, hash_database
from raftkv.storage.mvcc import Store
from raftkv.storage.revision import CorruptRecordError, pack, to_key
from tests.storage.memory import MemoryBackend
from tests.storage.test_compaction import fill, finish, hashed

ETCD = json.loads((Path(__file__).parent / "testdata" / "hash_kv_etcd.json").read_text())
"""Operations done on etcd 3.5.1, and what its HashKV answered in between."""


def test_equal_to_etcd(backend: Backend) -> None:
    store = Store.open(backend)
    checks = 0
    for verb, *arguments in ETCD:
        if verb == "hash":
            revision, expected, compacted = arguments
            found = hashed(store, revision)
            assert (found.hash, found.compact_revision) == (expected, compacted), checks
            checks += 1
        elif verb == "compact":
            store.compact(arguments[0])
            store.set_applied(store.applied_index, store.applied_term)
            finish(store)
        else:
            txn = store.begin()
            for key, value, lease in _puts(verb, arguments):
                txn.put(key.encode(), value.encode(), lease)
            if verb == "delete":
                txn.delete_range(arguments[0].encode(), arguments[1].encode())
            txn.end()
            store.set_applied(store.applied_index, store.applied_term)
    assert checks > 100
    store.close()


def _puts(verb: str, arguments: list) -> list[tuple[str, str, int]]:
    if verb == "put":
        return [tuple(arguments)]
    return [(key, value, 0) for key, value in arguments[0]] if verb == "txn" else []


def test_progress_of_compaction_does_not_show() -> None:
    """C2, D11: members before, during and after a compaction agree at every revision."""
    stores = [Store.open(MemoryBackend()) for _ in range(3)]
    for store in stores:
        fill(store, 400)
        store.commit()
        store.compact(300)
        store.set_applied(store.applied_index, store.applied_term)
        store.commit()
    stores[1].compaction_step(10)
    stores[1].commit()
    finish(stores[2])
    for revision in (300, 301, 330, 373, stores[0].revision):
        found = {hashed(store, revision) for store in stores}
        assert len(found) == 1, revision
        assert found.pop() == KVHash(hashed(stores[0], revision).hash, 300, revision)


@pytest.mark.parametrize("order", ["dp", "pd", "dpd", "pdpd"])
def test_a_txn_that_deletes_a_key_more_than_once_does_not_show_either(order: str) -> None:
    """A txn may put what it deletes by an interval without an end, before and after: it is compacted exactly there."""
    stores = [Store.open(MemoryBackend()) for _ in range(2)]
    for store in stores:
        for key, changes in ((b"a", "p"), (b"z", "p"), (b"a", order), (b"y", "p")):
            txn = store.begin()
            for change in changes:
                if change == "p":
                    txn.put(key, b"v")
                else:
                    txn.delete_range(key)
            txn.end()
            store.set_applied(store.applied_index + 1, 1)
        store.compact(4)
        store.set_applied(store.applied_index + 1, 1)
    finish(stores[1])
    assert hashed(stores[0]) == hashed(stores[1])
    again = Store.open(stores[1].backend)
    assert hashed(again) == hashed(stores[0])
    for revision in (4, 5):
        found = [store.range(b"\0", b"\0", revision=revision).kvs for store in (*stores, again)]
        assert found[0] == found[1] == found[2]


def test_every_change_counts() -> None:
    def build(seed: int) -> Store:
        store = Store.open(MemoryBackend())
        fill(store, 50)
        rng = random.Random(seed)
        txn = store.begin()
        txn.put(b"x", b"%d" % rng.randrange(10**9), seed % 3)
        txn.end()
        store.set_applied(store.applied_index, store.applied_term)
        return store

    assert len({hashed(build(seed)).hash for seed in range(20)}) == 20
    assert hashed(build(1)) == hashed(build(1))


def test_an_empty_store_and_bad_revisions(backend: Backend) -> None:
    store = Store.open(backend)
    assert hashed(store) == KVHash(google_crc32c.value(b"key"), -1, 1)
    with pytest.raises(FutureRevisionError):
        hashed(store, 2)
    fill(store, 20)
    store.compact(10)
    store.set_applied(store.applied_index, store.applied_term)
    hashed(store, 10)
    with pytest.raises(CompactedError):
        hashed(store, 9)
    jobs: list = []
    store.hash_kv(11, jobs.append)
    store.compact(12)
    store.set_applied(store.applied_index, store.applied_term)
    store.commit()
    with pytest.raises(CompactedError):
        jobs[0]()
    store.close()


def test_hash_detects_changed_record() -> None:
    backend = MemoryBackend()
    store = Store.open(backend)
    fill(store, 20)
    store.commit()
    key = to_key(pack(7, 0))
    record = backend.buckets[schema.KEY][key]
    backend.buckets[schema.KEY][key] = record[:-1] + bytes([record[-1] ^ 1])
    with pytest.raises(CorruptRecordError, match=r"revision 7\.0"):
        hashed(store)


def test_the_hash_of_the_database_covers_every_bucket(backend: Backend) -> None:
    store = Store.open(backend)
    fill(store, 5)
    seen = set()
    for bucket in (schema.ALARM, schema.AUTH, schema.LEASE, schema.MEMBERS):
        store.commit()
        seen.add(hash_database(backend))
        store.meta_put(bucket, b"k", b"v")
        store.set_applied(store.applied_index, store.applied_term)
    store.commit()
    seen.add(hash_database(backend))
    assert len(seen) == 5
    assert {revision for _, revision in seen} == {store.revision}
    store.close()


def test_the_hash_of_the_database_is_of_the_state_alone(backend: Backend) -> None:
    """Not of the log's index and term, of commits, of the slices of a compaction, nor of a restart amid one."""
    calm, hasty = Store.open(backend), Store.open(MemoryBackend(), operations_max=3)
    for number, store in enumerate((calm, hasty)):
        fill(store, 100)
        store.meta_put(schema.LEASE, b"lease", b"ttl")
        store.compact(80)
        store.set_applied(store.applied_index + 7 * number, 1 + number)
    calm.commit()
    finish(calm)
    for _ in range(2):
        hasty.compaction_step(5)
        hasty.commit()
    again = Store.open(hasty.backend)
    again.set_applied(again.applied_index + 1, 9)
    again.commit()
    assert hash_database(again.backend) != hash_database(backend), "the compaction is not finished"
    finish(again)
    assert hash_database(again.backend) == hash_database(backend)
    calm.close()
