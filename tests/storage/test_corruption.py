"""Flipped bits in the file are found before clients are served, at open and at every read (D8)."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from raftkv.errors import CorruptionError, StorageError
from raftkv.storage import schema
from raftkv.storage.backend.base import WriteBatch
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.key_value import encode
from raftkv.storage.mvcc import Store
from raftkv.storage.revision import CorruptRecordError, pack, seal, to_key, to_tombstone_key
from raftkv.storage.selection import Selection, drain
from tests.storage.conftest import MAP_SIZE_BYTES
from tests.storage.memory import MemoryBackend

KEYS = 40


def written(path: Path) -> bytes:
    """The bytes of a database with known contents."""
    backend = LMDBBackend(path, MAP_SIZE_BYTES)
    store = Store.open(backend)
    for number in range(KEYS):
        txn = store.begin()
        txn.put(b"key %02d" % number, b"value %02d " % number * 10)
        txn.end()
        store.set_applied(store.applied_index, store.applied_term)
    store.commit()
    store.close()
    backend.close()
    return path.read_bytes()


@pytest.mark.parametrize("part", ["revision key", "seal", "key value"])
def test_a_flipped_bit_in_a_record_is_never_served(tmp_path: Path, part: str) -> None:
    rng = random.Random(part)
    path = tmp_path / "db"
    clean = written(path)
    for _ in range(25):
        number = rng.randrange(KEYS)
        revision_key = to_key(pack(number + 2, 0))
        record = seal(
            revision_key, encode(b"key %02d" % number, number + 2, number + 2, 1, b"value %02d " % number * 10)
        )
        start = clean.index(revision_key + record)
        first, last = {"revision key": (0, 17), "seal": (17, 21), "key value": (21, 17 + len(record))}[part]
        flipped = bytearray(clean)
        flipped[start + rng.randrange(first, last)] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        backend = LMDBBackend(path, MAP_SIZE_BYTES)
        with pytest.raises(CorruptionError, match=rf"revision {number + 2}\.0 is corrupt" if first else "revision"):
            Store.open(backend)
        backend.close()


def damage_page(damaged: bytearray, needle: bytes, kind: str) -> None:
    """Let the page with this in the newest state name one of its records twice, or one fewer."""
    # Later pages are newer: earlier ones are of states before it, without readers.
    page = damaged.rindex(needle) // 4096 * 4096
    if kind == "one twice":
        damaged[page + 16 : page + 18] = damaged[page + 18 : page + 20]
    else:
        (end_of_pointers,) = struct.unpack_from("<H", damaged, page + 12)
        struct.pack_into("<H", damaged, page + 12, end_of_pointers - 2)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one twice", "^the records behind revision .* are not in order"),
        ("one fewer", f"^the bucket key has {KEYS - 1} records, and should have {KEYS}"),
    ],
)
def test_a_page_that_no_longer_names_a_record_is_refused(tmp_path: Path, kind: str, message: str) -> None:
    """All remaining records are intact; the missing record went unnoticed."""
    path = tmp_path / "db"
    damaged = bytearray(written(path))
    damage_page(damaged, to_key(pack(KEYS + 1, 0)), kind)
    path.write_bytes(damaged)
    backend = LMDBBackend(path, MAP_SIZE_BYTES)
    with pytest.raises(CorruptionError, match=message):
        Store.open(backend)
    backend.close()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one twice", "/db is damaged: the records of the bucket authUsers are not in order"),
        ("one fewer", "/db is damaged: the bucket authUsers has 1 records, and should have 2"),
    ],
)
def test_a_page_that_no_longer_names_a_small_record_is_refused(tmp_path: Path, kind: str, message: str) -> None:
    path = tmp_path / "db"
    backend = LMDBBackend(path, MAP_SIZE_BYTES)
    batch = WriteBatch()
    batch.values = {(schema.AUTH_USERS, name): b"who they are" for name in (b"first user", b"second user")}
    backend.commit(batch)
    backend.close()
    damaged = bytearray(path.read_bytes())
    damage_page(damaged, b"second user", kind)
    path.write_bytes(damaged)
    with pytest.raises(CorruptionError, match=message):
        LMDBBackend(path, MAP_SIZE_BYTES)


def test_a_page_that_no_longer_names_a_bucket_is_refused(tmp_path: Path) -> None:
    """Otherwise the bucket would be recreated empty; without users everything is allowed."""
    path = tmp_path / "db"
    damaged = bytearray(written(path))
    damage_page(damaged, schema.MEMBERS_REMOVED, "one fewer")
    path.write_bytes(damaged)
    with pytest.raises(CorruptionError, match=f"has {len(schema.BUCKETS)} top entries, and should have"):
        LMDBBackend(path, MAP_SIZE_BYTES)


def test_a_record_that_changes_after_open_is_refused_at_the_read() -> None:
    backend = MemoryBackend()
    store = Store.open(backend)
    for key in (b"a", b"b"):
        txn = store.begin()
        txn.put(key, b"value")
        txn.end()
        store.set_applied(store.applied_index, store.applied_term)
    store.commit()
    records = backend.buckets[schema.KEY]
    one, other = to_key(pack(2, 0)), to_key(pack(3, 0))
    records[one], records[other] = records[other], records[one]  # whole records, in each other's place
    for call in (
        lambda: store.get(b"a"),
        lambda: store.range(b"b"),
        lambda: store.range(b"a", b"\x00"),
        lambda: list(store.history(2, 3)),
        lambda: drain(store.select(b"a", b"\x00", Selection())),
    ):
        with pytest.raises(CorruptRecordError, match="is corrupt"):
            call()
    del records[one]
    with pytest.raises(CorruptRecordError, match=r"record of revision 2\.0 is missing"):
        store.get(b"a")
    assert store.range(b"a", count_only=True).count == 1


@pytest.mark.parametrize(
    ("revision_key", "data", "message"),
    [
        (to_key(pack(4, 0)), encode(b"k", 3, 5, 2), "claims revision 5"),
        (to_tombstone_key(pack(4, 0)), b"", "tombstone"),
        (to_key(pack(4, 0)), b"\x0a\x05k", "not a KeyValue"),
    ],
)
def test_sealed_nonsense_is_refused_too(revision_key: bytes, data: bytes, message: str) -> None:
    backend = MemoryBackend()
    batch = WriteBatch()
    batch.records = {to_key(pack(3, 0)): seal(to_key(pack(3, 0)), encode(b"k", 3, 3, 1))}
    batch.records[revision_key] = seal(revision_key, data)
    backend.commit(batch)
    if message == "tombstone":  # of no key: unknown, and so only a deletion
        Store.open(backend).close()
        return
    with pytest.raises(CorruptRecordError, match=message):
        Store.open(backend)


def test_another_format_is_refused() -> None:
    backend = MemoryBackend()
    batch = WriteBatch()
    batch.values = {(schema.META, schema.META_FORMAT_VERSION): schema.encode_integer(2)}
    backend.commit(batch)
    with pytest.raises(
        StorageError,
        match=r"^the database has format 2, and raftkv .* reads format 1: run the raftkv that wrote it, or a later one",
    ):
        Store.open(backend)
