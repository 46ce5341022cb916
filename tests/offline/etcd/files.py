"""Databases of members and snapshot files made without a member."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path

from raftkv.apply.alarms import Alarms
from raftkv.apply.leases import Leases
from raftkv.apply.quotas import Quotas
from raftkv.config import ServerConfig
from raftkv.offline.etcd.export import blobs, snapshot
from raftkv.pb import admin_pb2, rpc_pb2
from raftkv.raft.types import ConfState
from raftkv.storage import schema
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.bolt.writer import measure, write
from raftkv.storage.mvcc import Store

MAP_SIZE_BYTES = 256 << 20
LEASE_ID, NEGATIVE_LEASE_ID, TTL_S = 7, -(1 << 62), 300
MEMBER_ID = 0x8E9E05C52164694D
REVISION = 9
CONF_STATE = ConfState(voters=(MEMBER_ID, MEMBER_ID + 1), learners=(3,))


def make_database(path: Path) -> LMDBBackend:
    """A database with a bit of everything: history, deletions, a compaction, leases, an alarm, members, users."""
    backend = LMDBBackend(path, MAP_SIZE_BYTES)
    store = Store.open(backend)
    leases = Leases(store)
    for lease_id in (LEASE_ID, NEGATIVE_LEASE_ID):
        leases.grant(lease_id, TTL_S)
    for key, value, lease in (
        (b"a", b"1", 0),  # revision 2
        (b"b", b"2", 0),
        (b"a", b"3", LEASE_ID),
        (b"gone", b"4", 0),
        (b"large", b"x" * 1_500_000, NEGATIVE_LEASE_ID),
        (b"k" * 400, b"", 0),
    ):
        txn = store.begin()
        txn.put(key, value, lease)
        txn.end()
    txn = store.begin()
    txn.delete_range(b"gone")
    txn.put(b"a", b"5", LEASE_ID)
    txn.put(b"b", b"6")
    txn.end()
    txn = store.begin()
    txn.put(b"gone", b"back")
    txn.end()
    store.compact(4)
    Alarms(store, schema.ALARM).execute(
        rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=MEMBER_ID, alarm=rpc_pb2.CORRUPT)
    )
    member = rpc_pb2.Member(ID=MEMBER_ID, name="m", peerURLs=["http://a:1"], clientURLs=["http://a:2"])
    store.meta_put(schema.MEMBERS, MEMBER_ID.to_bytes(8, "big"), member.SerializeToString())
    learner = rpc_pb2.Member(ID=3, peerURLs=["http://b:1"], isLearner=True)
    store.meta_put(schema.MEMBERS, (3).to_bytes(8, "big"), learner.SerializeToString())
    store.meta_put(schema.MEMBERS_REMOVED, (0xAB).to_bytes(8, "big"), b"removed")
    store.meta_put(schema.AUTH, b"authEnabled", b"\x01")
    store.meta_put(schema.AUTH_USERS, b"root", b"\x0a\x04root")
    store.meta_put(schema.AUTH_ROLES, b"root", b"\x0a\x04root")
    for _ in Quotas(store).execute(admin_pb2.QuotaSetRequest(prefix=b"a", bytes_max=1 << 40, keys_max=0)):
        pass
    store.set_conf_state(CONF_STATE)
    store.set_applied(70, 3)
    store.commit()
    while store.is_compacting:
        if not store.compaction_step():
            store.commit()
    store.close()
    return backend


def saved(backend: LMDBBackend) -> bytes:
    """The snapshot file of a database: what a client saves."""
    with closing(backend.begin_read()) as read:
        return b"".join(blob for blob, _ in blobs(*snapshot(read)))


def file_of(contents: dict[bytes, dict[bytes, bytes]]) -> bytes:
    """A snapshot file with these buckets."""
    buckets = [(name, sorted(items.items())) for name, items in sorted(contents.items())]
    data = b"".join(write(buckets, measure(buckets)))
    return data + hashlib.sha256(data).digest()


def config(data_dir: Path, wal_dir: Path | None = None) -> ServerConfig:
    """Settings of a member that a file is restored for: one of two."""
    return ServerConfig(
        name="m",
        data_dir=str(data_dir),
        wal_dir=str(wal_dir) if wal_dir else "",
        initial_cluster="m=http://127.0.0.1:1,n=http://127.0.0.1:2",
        initial_advertise_peer_urls=("http://127.0.0.1:1",),
    )
