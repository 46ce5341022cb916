"""Snapshot files of etcd: what is in them, and what they are refused for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from raftkv.errors import CorruptionError, StorageError
from raftkv.offline.etcd import records
from raftkv.offline.etcd.export import BLOB_BYTES, blobs, snapshot
from raftkv.offline.etcd.file import Status, check_hash, opened, snapshot_status
from raftkv.storage import schema
from raftkv.storage.backend.base import WriteBatch
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.bolt.writer import Layout
from raftkv.storage.key_value import encode
from raftkv.storage.revision import seal, to_key
from raftkv.storage.schema import CLUSTER_VERSION
from tests.offline.etcd.files import (
    LEASE_ID,
    MAP_SIZE_BYTES,
    MEMBER_ID,
    NEGATIVE_LEASE_ID,
    REVISION,
    file_of,
    make_database,
    saved,
)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LMDBBackend]:
    with closing(make_database(tmp_path / "source")) as backend:
        yield backend


def contents(path: Path) -> dict[bytes, dict[bytes, bytes]]:
    with opened(path) as file:
        return {bucket: dict(file.items(bucket)) for bucket in file.buckets()}


def test_a_file_has_what_etcd_keeps_in_etcds_form(tmp_path: Path, backend: LMDBBackend) -> None:
    path = tmp_path / "file"
    path.write_bytes(saved(backend))
    found = contents(path)
    assert sorted(found) == sorted(schema.BUCKETS)
    quota = (1 << 40).to_bytes(8, "big") + bytes(8)
    assert found[b"cluster"] == {b"clusterVersion": CLUSTER_VERSION.encode(), b"raftkv_quota/a": quota}
    assert found[b"lease"] == {
        LEASE_ID.to_bytes(8, "big"): b"\x08\x07\x10\xac\x02",
        NEGATIVE_LEASE_ID.to_bytes(8, "big", signed=True): b"\x08" + b"\x80" * 8 + b"\xc0\x01" + b"\x10\xac\x02",
    }
    assert len(found[b"alarm"]) == 1
    assert found[b"members_removed"] == {b"ab": b"removed"}
    members = {key: json.loads(value) for key, value in found[b"members"].items()}
    assert members == {
        b"8e9e05c52164694d": {"id": MEMBER_ID, "name": "m", "peerURLs": ["http://a:1"], "clientURLs": ["http://a:2"]},
        b"3": {"id": 3, "peerURLs": ["http://b:1"], "isLearner": True},
    }
    assert found[b"meta"] == {
        b"consistent_index": (70).to_bytes(8, "big"),
        b"term": (3).to_bytes(8, "big"),
        b"scheduledCompactRev": to_key(4 << 24),
        b"finishedCompactRev": to_key(4 << 24),
        b"confState": b'{"voters":[%d,%d],"learners":[3],"auto_leave":false}' % (MEMBER_ID, MEMBER_ID + 1),
        b"storageVersion": CLUSTER_VERSION.encode(),
    }
    assert found[b"authUsers"] == {b"root": b"\x0a\x04root"}
    assert found[b"key"][to_key(3 << 24)] == b"\x0a\x01b\x10\x03\x18\x03\x20\x01\x2a\x012"


def test_a_file_made_during_a_downgrade_is_for_the_version_gone_back_to(tmp_path: Path, backend: LMDBBackend) -> None:
    batch = WriteBatch()
    batch.values[schema.CLUSTER, b"downgrade"] = b'{"target-version":"3.6.0","enabled":true}'
    backend.commit(batch)
    path = tmp_path / "file"
    path.write_bytes(saved(backend))
    found = contents(path)
    assert (found[b"meta"][b"storageVersion"], found[b"cluster"][b"clusterVersion"]) == (b"3.6.0", b"3.6.0")


def test_the_status_of_a_file(tmp_path: Path, backend: LMDBBackend) -> None:
    path = tmp_path / "file"
    path.write_bytes(saved(backend))
    status = snapshot_status(path)
    size_bytes = path.stat().st_size - 32
    assert status == Status(status.hash, REVISION, 5, size_bytes, "3.7.0")
    check_hash(path)


def test_pieces_are_of_one_size_and_say_how_much_follows(backend: LMDBBackend) -> None:
    with closing(backend.begin_read()) as read:
        layout, pieces = snapshot(read)
        *sent, (digest, nothing) = blobs(layout, pieces)
    data = b"".join(blob for blob, _ in sent)
    assert len(data) == layout.size_bytes
    assert {len(blob) for blob, _ in sent[:-1]} == {BLOB_BYTES}
    assert [remaining for _, remaining in sent] == [
        max(0, layout.size_bytes - BLOB_BYTES * number) for number in range(1, len(sent) + 1)
    ]
    assert (digest, nothing) == (hashlib.sha256(data).digest(), 0)
    # A file whose last piece is whole, and one of less than a piece.
    for size in (1, 2 * BLOB_BYTES // 4096):
        whole = [bytes(4096)] * size
        assert sum(len(blob) for blob, _ in blobs(Layout(size, 3), iter(whole))) == size * 4096 + 32


def test_an_empty_store_and_a_store_with_one_key(tmp_path: Path) -> None:
    for keys in (0, 1):
        with closing(LMDBBackend(tmp_path / f"{keys}", MAP_SIZE_BYTES)) as backend:
            batch = WriteBatch()
            batch.values[schema.META, schema.META_CONSISTENT_INDEX] = schema.encode_integer(0)
            for revision in range(2, 2 + keys):
                key = to_key(revision << 24)
                batch.records[key] = seal(key, encode(b"k", revision, revision, 1))
            backend.commit(batch)
            path = tmp_path / "file"
            path.write_bytes(saved(backend))
            status = snapshot_status(path)
            assert (status.keys, status.revision) == (keys, 2 * keys)


def test_a_damaged_record_is_not_sent(backend: LMDBBackend) -> None:
    batch = WriteBatch()
    batch.records[to_key(REVISION + 1 << 24)] = b"\0\0\0\0\x0a\x01k"
    backend.commit(batch)
    with pytest.raises(CorruptionError, match="checksum is wrong"):
        saved(backend)


def test_a_file_whose_hash_is_wrong_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = file_of({b"key": {}})
    path.write_bytes(data[:-1] + b"\0")
    with pytest.raises(StorageError, match=r"^expected sha256 \[\d+ .*\], got \[\d+"):
        check_hash(path)
    path.write_bytes(data[:-32])
    with pytest.raises(StorageError, match=r"^snapshot missing hash but --skip-hash-check=false$"):
        check_hash(path)
    path.write_bytes(data[:-40])
    with pytest.raises(StorageError, match="missing hash"):
        check_hash(path)
    with pytest.raises(StorageError, match=r"^stat .*/none: no such file or directory$"):
        check_hash(tmp_path / "none")
    with pytest.raises(StorageError, match="is a directory"):
        snapshot_status(tmp_path)


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ({b"key": {b"short": b""}}, "cannot parse revision key: 73686f7274"),
        ({b"key": {to_key(2 << 24): b"\xff"}}, "the value of revision 2.0 is not a key-value pair"),
    ],
)
def test_the_status_of_a_foreign_database(tmp_path, contents, reason):
    path = tmp_path / "file"
    path.write_bytes(file_of(contents))
    with pytest.raises(StorageError, match=reason):
        snapshot_status(path)


def test_small_records_there_and_back() -> None:
    for lease_id, ttl_s in ((1, 0), (-1, 9_000_000_000), ((1 << 63) - 1, 1)):
        kept = lease_id.to_bytes(8, "big", signed=True), ttl_s.to_bytes(8, "big")
        for owner in (b"", b"alice"):
            assert records.lease_from_etcd(*records.lease_to_etcd(kept[0], kept[1] + owner)) == kept
    # Kinds of alarms may be of another version.
    for kind in (1, 2, 77):
        alarm = MEMBER_ID.to_bytes(8, "big") + kind.to_bytes(4, "big")
        assert records.alarm_from_etcd(records.alarm_to_etcd(alarm)[0]) == (alarm, b"")
    assert records.compact_revision_from_etcd(records.compact_revision_to_etcd(schema.encode_integer(5))) == 5
    # The time that was left is dropped: a restart renews, as after a crash.
    assert records.lease_from_etcd(bytes(7) + b"\x01", b"\x08\x01\x10\x3c\x18\x05") == (
        bytes(7) + b"\x01",
        bytes(7) + b"\x3c",
    )


@pytest.mark.parametrize(
    "lease",
    [
        b"",
        b"\x08",
        b"\x08\x02",
        b"\x08\xff",
        b"\x08" + b"\xff" * 30,
        b"\x0a\x01k",
        b"\x08\x01\x10" + b"\xff" * 9 + b"\x01",
    ],
)
def test_value_that_is_no_lease_is_refused(lease: bytes) -> None:
    with pytest.raises(StorageError, match="not a lease"):
        records.lease_from_etcd(bytes(7) + b"\x01", lease)


def test_value_that_is_no_alarm_and_no_revision_is_refused() -> None:
    with pytest.raises(StorageError, match="not an alarm"):
        records.alarm_from_etcd(b"\xff")
    with pytest.raises(StorageError, match="not a compacted revision"):
        records.compact_revision_from_etcd(b"12345678")
