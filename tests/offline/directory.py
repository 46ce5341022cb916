"""A member's data directory, made without a member: entries go to the log and through the applier to the database."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from raftkv.apply import wire
from raftkv.apply.alarms import Alarms
from raftkv.apply.applier import Applier
from raftkv.apply.leases import Leases
from raftkv.apply.membership import Membership
from raftkv.apply.wire import Kind
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft.types import ConfState, Entry, HardState, SnapshotMeta
from raftkv.storage import schema
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.mvcc import Store
from raftkv.storage.wal import WAL

CLUSTER_ID, MEMBER_ID = 7, 8
MAP_SIZE_BYTES = 64 << 20
SEGMENT_BYTES = 4096


def put(key: bytes, value: bytes = b"v", lease: int = 0) -> tuple[int, bytes]:
    """A Put, as kind and body."""
    return Kind.PUT, rpc_pb2.PutRequest(key=key, value=value, lease=lease).SerializeToString()


class DataDirectory:
    """One member's files; ``close`` leaves them as a member that was stopped."""

    def __init__(self, path: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.path = path
        self.snapshots = path / "member" / "snap"
        self.snapshots.mkdir(parents=True, mode=0o700)
        self.backend = LMDBBackend(self.snapshots / "db", MAP_SIZE_BYTES)
        self.store = Store.open(self.backend)
        membership = Membership(self.store)
        membership.bootstrap([rpc_pb2.Member(ID=MEMBER_ID, name="m", peerURLs=["http://127.0.0.1:1"])])
        self.store.set_conf_state(ConfState(voters=(MEMBER_ID,)))
        self.applier = Applier(self.store, Alarms(self.store, schema.ALARM), membership, Leases(self.store))
        self.store.set_applied(0, 0)
        self.store.commit()
        metadata = raft_pb2.WALMetadata(cluster_id=CLUSTER_ID, member_id=MEMBER_ID).SerializeToString()
        self.wal = WAL.create(str(path / "member" / "wal"), metadata, segment_bytes=segment_bytes)
        self.term = self.index = 1
        self._log(Entry(1, 1, b""))

    def _log(self, entry: Entry) -> None:
        self.wal.append(HardState(self.term, MEMBER_ID, entry.index), [entry])
        self.wal.sync()
        self.applier.term = entry.term
        if request := wire.decode(entry.data):
            self.applier.apply(request[0], request[2], is_answered=False)
        self.store.set_applied(entry.index, entry.term)

    def write(self, items: Iterable[tuple[int, bytes]]) -> None:
        """Commit entries."""
        for kind, body in items:
            self.index += 1
            self._log(Entry(self.term, self.index, wire.encode(kind, self.index, body)))
        self.store.commit()

    def mark(self) -> None:
        """Write a marker of the present into the log, and release what is before it."""
        self.wal.save_snapshot(SnapshotMeta(self.index, self.term, self.store.conf_state))
        self.wal.release(self.index)

    def close(self) -> DataDirectory:
        """Stop."""
        self.store.commit()
        self.store.close()
        self.backend.close()
        self.wal.close()
        return self

    @property
    def segments(self) -> list[Path]:
        """The files of the log, oldest first."""
        return sorted((self.path / "member" / "wal").glob("*.wal"))
