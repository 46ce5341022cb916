"""What comes from files and other members as a whole: databases of etcd, records of a database, copies on a stream."""

from __future__ import annotations

import hashlib
import shutil
import struct
import tempfile
from contextlib import closing
from pathlib import Path

from raftkv.apply.alarms import Alarms
from raftkv.apply.membership import Downgrade, Membership
from raftkv.apply.quotas import Quotas
from raftkv.errors import ConfigError, CorruptionError, StorageError
from raftkv.offline.etcd import records
from raftkv.offline.etcd.file import hash_snapshot_file, snapshot_status
from raftkv.offline.etcd.restore import restore
from raftkv.pb import admin_pb2, rpc_pb2
from raftkv.raft.types import ConfState
from raftkv.storage import schema
from raftkv.storage.mvcc import Store
from tests.fuzz.target import Parse, Target
from tests.offline.etcd.files import config, file_of, make_database, saved
from tests.storage.memory import MemoryBackend

Content = list[tuple[bytes, bytes, bytes]]
BUCKETS = sorted(schema.BUCKETS)


def _small_file() -> bytes:
    """A snapshot file with one record in each bucket that a member reads."""
    with tempfile.TemporaryDirectory() as directory, closing(make_database(Path(directory) / "db")) as backend:
        data = saved(backend)
    # Without the large value: most of the input should be what is parsed.
    path = Path(tempfile.mkdtemp())
    try:
        (path / "file").write_bytes(data)
        from raftkv.offline.etcd.file import opened

        with opened(path / "file") as file:
            contents = {
                name: {key: value for key, value in file.items(name) if len(value) < 1000} for name in file.buckets()
            }
        return file_of(contents)
    finally:
        shutil.rmtree(path)


def _file(directory: Path) -> Parse:
    """Input: a snapshot file without its hash; the hash is made to fit."""
    path = directory / "file"

    def parse(data: bytes) -> None:
        data = data[: len(data) // 512 * 512]
        path.write_bytes(data + hashlib.sha256(data).digest())
        snapshot_status(path)
        hash_snapshot_file(path)

    return parse


def _pack(content: Content) -> bytes:
    return b"".join(
        struct.pack(">BHH", BUCKETS.index(bucket), len(key), len(value)) + key + value for bucket, key, value in content
    )


def _unpack(data: bytes) -> Content:
    content, at = [], 0
    while at + 5 <= len(data):
        bucket, key_size, value_size = struct.unpack_from(">BHH", data, at)
        key = data[at + 5 : at + 5 + key_size]
        value = data[at + 5 + key_size : at + 5 + key_size + value_size]
        content.append((BUCKETS[bucket % len(BUCKETS)], key or b"k", value))
        at += 5 + key_size + value_size
    return content


def _rows() -> Content:
    backend = MemoryBackend()
    store = Store.open(backend)
    for key, value, lease in ((b"a", b"1", 0), (b"b", b"2", 7), (b"a", b"3", 0)):
        txn = store.begin()
        txn.put(key, value, lease)
        txn.end()
    txn = store.begin()
    txn.delete_range(b"b")
    txn.end()
    store.compact(2)
    store.set_conf_state(ConfState(voters=(1, 2), learners=(3,)))
    Membership(store).bootstrap([rpc_pb2.Member(ID=1, name="m", peerURLs=["http://a:1"])])
    alarm = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=1, alarm=rpc_pb2.NOSPACE)
    Alarms(store, schema.ALARM).execute(alarm)
    for _ in Quotas(store).execute(admin_pb2.QuotaSetRequest(prefix=b"q", bytes_max=1 << 40)):
        pass
    Downgrade(store).execute(rpc_pb2.DowngradeInfo(enabled=True, targetVersion="3.5.0"))
    store.meta_put(schema.LEASE, (7).to_bytes(8, "big"), (60).to_bytes(8, "big"))
    store.set_applied(9, 2)
    store.commit()
    with closing(backend.begin_read()) as read:
        return [(bucket, key, value) for bucket in BUCKETS for key, value in read.items(bucket)]


def _restored(directory: Path) -> Parse:
    """Input: rows of a snapshot file of etcd, put in order and into a sound file; restored as a member would be."""
    path = directory / "file"
    target = directory / "data"

    def parse(data: bytes) -> None:
        contents: dict[bytes, dict[bytes, bytes]] = {name: {} for name in BUCKETS}
        for bucket, key, value in _unpack(data):
            contents[bucket][key] = value
        path.write_bytes(file_of(contents))
        try:
            restore(path, config(target))
        finally:
            shutil.rmtree(target, ignore_errors=True)

    return parse


def _etcd_rows() -> list[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        path.write_bytes(_small_file())
        from raftkv.offline.etcd.file import opened

        with opened(path) as file:
            return [_pack([(name, key, value) for name in file.buckets() for key, value in file.items(name)])]


def _record(data: bytes) -> None:
    kind, size = data[:1], data[1] if len(data) > 1 else 0
    key, value = data[2 : 2 + size], data[2 + size :]
    if kind == b"l":
        records.lease_from_etcd(key, value)
    elif kind == b"a":
        records.alarm_from_etcd(key)
    elif kind == b"q":
        records.quota_from_etcd(key, value)
    else:
        records.compact_revision_from_etcd(value)


def _records() -> list[bytes]:
    lease_key, lease = records.lease_to_etcd((7).to_bytes(8, "big"), (60).to_bytes(8, "big"))
    alarm, _ = records.alarm_to_etcd(struct.pack(">Qi", 5, 1))
    revision = records.compact_revision_to_etcd((9).to_bytes(8, "big"))
    return [
        b"l" + bytes((len(lease_key),)) + lease_key + lease,
        b"a" + bytes((len(alarm),)) + alarm,
        b"c\0" + revision,
        b"q\x03" + b"abc" + struct.pack(">QQ", 1, 2),
    ]


TARGETS = (
    Target("etcd-file", _file, lambda: [_small_file()[:-32]], (StorageError, CorruptionError), examples=60),
    Target(
        "etcd-restore", _restored, _etcd_rows, (StorageError, CorruptionError, ConfigError), examples=8, cpu_max_s=5.0
    ),
    Target("etcd-records", lambda directory: _record, _records, (StorageError,)),
)
