"""A member stopped after the marker of a received database, now damaged, keeps its own database."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from raftkv.config import ServerConfig
from raftkv.errors import CorruptionError, StorageError
from raftkv.raft.types import ConfState, Entry, EntryType, HardState, SnapshotMeta
from raftkv.replica.snapshots import Installer, snapshot_path
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.mvcc import Store
from raftkv.storage.snapshot import write_snapshot
from raftkv.storage.wal import WAL
from tests.replica.node.durable import close, opened
from tests.rpc.loop import until

NEEDLE = b"needle-" * 10
INDEX = 50


def apply(store: Store, key: bytes, index: int, value: bytes = b"v") -> None:
    txn = store.begin()
    txn.put(key, value)
    txn.end()
    store.set_applied(index, 1)


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    """A member that has applied 5 entries of 9, and has the marker and the database of entry 50."""
    settings: dict[str, Any] = {"name": "default", "data_dir": str(tmp_path / "data"), "insecure_peers": True}
    config = ServerConfig(**settings)
    durable = opened(config)
    conf, directory = durable.store.conf_state, durable.snapshots
    durable.wal.append(HardState(1, 0, 5), [Entry(1, index, b"", EntryType.NORMAL) for index in range(1, 10)])
    for index in range(1, 6):
        apply(durable.store, b"own %d" % index, index)
    durable.store.commit()
    durable.backend.copy_to(tmp_path / "leader")
    close(durable)
    with closing(LMDBBackend(tmp_path / "leader")) as backend:
        leader = Store.open(backend)
        apply(leader, b"theirs", INDEX, NEEDLE)
        leader.set_conf_state(ConfState(voters=conf.voters))
        leader.set_applied(INDEX, 1)
        leader.commit()
        write_snapshot(backend, snapshot_path(directory, INDEX))
        leader.close()
    wal, _ = WAL.open(str(tmp_path / "data" / "member" / "wal"))
    wal.save_snapshot(SnapshotMeta(INDEX, 1, conf), HardState(4, 0, INDEX))
    wal.close()
    return config


def received(config: ServerConfig) -> Path:
    return snapshot_path(Path(config.data_dir) / "member" / "snap", INDEX)


def test_a_whole_one_is_installed(config: ServerConfig) -> None:
    durable = opened(config)
    assert durable.store.applied_index == INDEX
    assert durable.store.get(b"theirs") is not None
    close(durable)


@pytest.mark.long
@pytest.mark.parametrize("damage", ["a record", "cut short", "a page", "another entry"])
def test_damaged_received_database_is_dropped(config: ServerConfig, damage: str) -> None:
    path = received(config)
    data = bytearray(path.read_bytes())
    if damage == "a record":
        data[data.index(NEEDLE) + 3] ^= 1
    elif damage == "cut short":
        del data[-4096:]
    elif damage == "a page":
        data[-4096 + 10] ^= 0xFF
    else:
        data[data.index(b"consistent_index") + len(b"consistent_index") + 7] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        durable = opened(config)
        assert (durable.store.applied_index, durable.log.last_index()) == (5, 9)
        assert durable.log.hard_state == HardState(4, 0, 5)
        assert durable.store.get(b"own 5") is not None
        assert durable.store.get(b"theirs") is None
        assert not path.exists()
        close(durable)


def test_missing_installed_database_is_reported_as_corruption(config: ServerConfig) -> None:
    """An operator has exchanged the installed database for an older one."""
    received(config).unlink()
    with pytest.raises(CorruptionError, match="the log says that the database has entries up to 50"):
        opened(config)


async def test_snapshot_damaged_after_receipt_stops_member_with_advice(tmp_path: Path) -> None:
    with closing(LMDBBackend(tmp_path / "other")) as backend:
        other = Store.open(backend)
        apply(other, b"theirs", 7, NEEDLE)
        other.commit()
        write_snapshot(backend, snapshot_path(tmp_path, 7))
        other.close()
    path = snapshot_path(tmp_path, 7)
    data = bytearray(path.read_bytes())
    data[data.index(NEEDLE) + 3] ^= 1
    path.write_bytes(data)
    with closing(LMDBBackend(tmp_path / "db")) as backend:
        store = Store.open(backend)
        failures: list[BaseException] = []
        installer = Installer(store, tmp_path, failures.append)
        installer.install(SnapshotMeta(7, 1, ConfState((1,))), lambda: None)
        await until(lambda: bool(failures))
        assert isinstance(failures[0], StorageError)
        assert str(path) in str(failures[0])
        assert str(failures[0]).endswith("start the member again: it goes on with its own, and asks for another")
        await installer.close()
        store.close()
