"""Snapshots: copies made under load, installed whole or not at all; defragmentation."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from raftkv.errors import CorruptionError, InvariantError, StorageError
from raftkv.raft.types import ConfState
from raftkv.storage import schema
from raftkv.storage.backend.base import WriteBatch
from raftkv.storage.backend.environment import SEAL
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.failpoints import FailpointPanic, arm, disarm_all
from raftkv.storage.mvcc import Store
from raftkv.storage.snapshot import install_snapshot, verify_snapshot, write_snapshot
from tests.storage.conftest import MAP_SIZE_BYTES
from tests.storage.memory import ScriptedWriter
from tests.storage.test_compaction import fill, finish, hashed

CONF = ConfState(voters=(1, 2, 3), learners=(9,))


def database(path: Path, changes: int, seed: int = 1) -> Store:
    store = Store.open(LMDBBackend(path, MAP_SIZE_BYTES))
    fill(store, changes, seed)
    store.set_conf_state(CONF)
    store.set_applied(store.applied_index, store.applied_term)
    store.commit()
    return store


def closed(store: Store) -> None:
    store.close()
    store.backend.close()


def test_snapshot_describes_its_contents(tmp_path: Path) -> None:
    store = database(tmp_path / "db", 200)
    info = write_snapshot(store.backend, tmp_path / "copy")
    assert (info.index, info.term, info.conf_state) == (200, 1, CONF)
    verify_snapshot(tmp_path / "copy", info)
    assert info.size_bytes == (tmp_path / "copy").stat().st_size
    assert sorted(os.listdir(tmp_path)) == ["copy", "db", "db-lock"]
    fill(store, 5)
    store.commit()
    assert write_snapshot(store.backend, tmp_path / "later").index == 205
    closed(store)


def test_writes_continue_during_snapshot(tmp_path: Path) -> None:
    store = database(tmp_path / "db", 500)
    infos: list = []
    thread = threading.Thread(target=lambda: infos.append(write_snapshot(store.backend, tmp_path / "copy")))
    thread.start()
    while not infos:
        fill(store, 10, seed=len(infos))
        store.commit()
    thread.join()
    verify_snapshot(tmp_path / "copy", infos[0])
    copy = Store.open(LMDBBackend(tmp_path / "copy", MAP_SIZE_BYTES))
    assert copy.applied_index == infos[0].index >= 500
    assert hashed(copy, copy.revision) == hashed(store, copy.revision)
    closed(copy)
    closed(store)


def test_a_snapshot_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    store = database(tmp_path / "db", 10)
    with pytest.raises(StorageError, match="absent"):
        write_snapshot(store.backend, tmp_path / "absent" / "copy")
    assert sorted(os.listdir(tmp_path)) == ["db", "db-lock"]
    closed(store)


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "other index"])
def test_only_the_sent_snapshot_is_installed(tmp_path: Path, damage: str) -> None:
    closed(database(tmp_path / "db", 20))
    before = (tmp_path / "db").read_bytes()
    sender = database(tmp_path / "sender", 300, seed=2)
    received = tmp_path / "received"
    info = write_snapshot(sender.backend, received)
    data = bytearray(received.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 4
    elif damage == "cut":
        del data[-4096:]
    elif damage == "grow":
        data += bytes(4096)
    else:
        info = replace(info, index=info.index + 1)
    received.write_bytes(data)
    with pytest.raises(CorruptionError, match="received"):
        install_snapshot(received, tmp_path / "db", info)
    assert (tmp_path / "db").read_bytes() == before
    closed(sender)


@pytest.mark.parametrize("kind", ["later format", "another cluster", "a flipped seal"])
def test_complete_but_unusable_database_is_not_installed(tmp_path: Path, kind: str) -> None:
    """The hash of all bytes is right: only the content tells."""
    closed(database(tmp_path / "db", 20))
    before = (tmp_path / "db").read_bytes()
    sender = database(tmp_path / "sender", 300, seed=2)
    received = tmp_path / "received"
    info = write_snapshot(sender.backend, received)
    data = bytearray(received.read_bytes())
    if kind == "later format":
        closed(sender)
        backend = LMDBBackend(received, MAP_SIZE_BYTES)
        batch = WriteBatch()
        batch.values[schema.META, schema.META_FORMAT_VERSION] = schema.encode_integer(schema.FORMAT_VERSION + 1)
        backend.commit(batch)
        backend.close()
        data = bytearray(received.read_bytes())
    elif kind == "another cluster":
        other = database(tmp_path / "other", 300, seed=2)
        other.set_conf_state(ConfState(voters=(7, 8)))
        other.set_applied(other.applied_index, 1)
        other.commit()
        received.unlink()
        other.backend.copy_to(received)
        data = bytearray(received.read_bytes())
        closed(other)
    else:
        data[data.index(SEAL) + len(SEAL) + 9] ^= 1
    received.write_bytes(data)
    info = replace(info, size_bytes=len(data), sha256=hashlib.sha256(data).digest())
    with pytest.raises((CorruptionError, StorageError)):
        install_snapshot(received, tmp_path / "db", info)
    assert (tmp_path / "db").read_bytes() == before


@pytest.mark.parametrize("crash", [None, "snapshotBeforeRename"])
def test_an_installation_is_whole_or_not_at_all(tmp_path: Path, crash: str | None) -> None:
    old = database(tmp_path / "db", 20)
    before = hashed(old)
    closed(old)
    sender = database(tmp_path / "sender", 300, seed=2)
    info = write_snapshot(sender.backend, tmp_path / "received")
    if crash:
        arm(crash, "raise")
        with pytest.raises(FailpointPanic):
            install_snapshot(tmp_path / "received", tmp_path / "db", info)
        disarm_all()
        again = Store.open(LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES))
        assert hashed(again) == before
        closed(again)
    install_snapshot(tmp_path / "received", tmp_path / "db", info)
    new = Store.open(LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES))
    assert hashed(new) == hashed(sender)
    assert (new.applied_index, new.conf_state) == (info.index, CONF)
    assert not (tmp_path / "received").exists()
    closed(new)
    closed(sender)


def test_a_running_store_becomes_a_received_one(tmp_path: Path) -> None:
    sender = database(tmp_path / "sender", 300, seed=2)
    sender.compact(280)
    sender.set_applied(sender.applied_index, sender.applied_term)
    sender.commit()
    write_snapshot(sender.backend, tmp_path / "received")
    writer = ScriptedWriter()
    store = Store.open(LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES), writer)
    fill(store, 50)
    called: list[str] = []
    store.compact(40, lambda: called.append("compacted"))
    store.set_applied(store.applied_index, store.applied_term)
    store.commit()
    fill(store, 3)
    store.begin().put(b"half an entry", b"")
    store.flush(lambda: called.append("flushed"))
    for _ in store.install_steps(tmp_path / "received"):
        assert not called
        if writer:
            writer.run_next()
    assert called == ["flushed"]
    writer.run_all()
    assert (store.applied_index, store.durable_index, store.compact_revision) == (300, 300, 280)
    assert store.range(b"\x00", b"\x00").kvs == sender.range(b"\x00", b"\x00").kvs
    fill(store, 10, seed=4)
    fill(sender, 10, seed=4)
    while store.is_compacting:
        store.compaction_step()
        store.commit()
        writer.run_all()
    assert called == ["flushed", "compacted"]
    finish(sender)
    jobs: list = []
    store.hash_kv(0, lambda job: jobs.append(job()))
    writer.run_all()
    assert jobs == [hashed(sender)]
    closed(store)
    closed(sender)


def test_an_older_state_is_not_taken_over(tmp_path: Path) -> None:
    sender = database(tmp_path / "sender", 10)
    write_snapshot(sender.backend, tmp_path / "received")
    store = database(tmp_path / "db", 20)
    with pytest.raises(InvariantError, match="a snapshot of entry 10 for the state of entry 20"):
        list(store.install_steps(tmp_path / "received"))
    closed(store)
    closed(sender)


def test_until_its_last_step_an_installation_changes_nothing(tmp_path: Path) -> None:
    sender = database(tmp_path / "sender", 5000, seed=2)
    write_snapshot(sender.backend, tmp_path / "received")
    store = database(tmp_path / "db", 50)
    before = (store.revision, store.applied_index, store.range(b"\x00", b"\x00").kvs)
    file = (tmp_path / "db").stat().st_ino
    given_up = store.install_steps(tmp_path / "received")
    next(given_up)
    given_up.close()
    steps = 0
    for _ in store.install_steps(tmp_path / "received"):
        steps += 1
        assert (store.revision, store.applied_index, store.range(b"\x00", b"\x00").kvs) == before
        assert (tmp_path / "db").stat().st_ino == file
        store.commit()
    assert steps >= 5000 // 1000
    assert (store.revision, store.applied_index) == (sender.revision, sender.applied_index)
    assert store.range(b"\x00", b"\x00").kvs == sender.range(b"\x00", b"\x00").kvs
    assert hashed(store) == hashed(sender)
    assert not (tmp_path / "received").exists()
    closed(store)
    closed(sender)


@pytest.mark.parametrize("crash", ["applyBeforeOpenSnapshot", "replaceBeforeRename"])
def test_a_crash_before_the_last_step_leaves_both_databases(tmp_path: Path, crash: str) -> None:
    sender = database(tmp_path / "sender", 300, seed=2)
    write_snapshot(sender.backend, tmp_path / "received")
    store = database(tmp_path / "db", 50)
    before = hashed(store)
    arm(crash, "raise")
    with pytest.raises(FailpointPanic):
        list(store.install_steps(tmp_path / "received"))
    disarm_all()
    (tmp_path / "crash").mkdir()
    for name in ("db", "received"):
        shutil.copy(tmp_path / name, tmp_path / "crash" / name)
    again = Store.open(LMDBBackend(tmp_path / "crash" / "db", MAP_SIZE_BYTES))
    assert hashed(again) == before
    list(again.install_steps(tmp_path / "crash" / "received"))
    assert hashed(again) == hashed(sender)
    closed(again)
    closed(sender)


def test_other_reader_is_unaffected_by_installation(tmp_path: Path) -> None:
    sender = database(tmp_path / "sender", 300)
    write_snapshot(sender.backend, tmp_path / "received")
    store = database(tmp_path / "db", 20)
    read = store.backend.begin_read()
    before = list(read.items(schema.KEY))
    list(store.install_steps(tmp_path / "received"))
    assert list(read.items(schema.KEY)) == before
    read.close()
    assert hashed(store) == hashed(sender)
    closed(store)
    closed(sender)


def test_a_received_database_replaces_a_transaction_that_is_open(tmp_path: Path) -> None:
    sender = database(tmp_path / "sender", 200)
    expected = hashed(sender)
    sender.commit()
    write_snapshot(sender.backend, tmp_path / "received")
    store = database(tmp_path / "db", 100)
    store.begin().delete_range(b"\0", b"\0")
    list(store.install_steps(tmp_path / "received"))
    assert hashed(store) == expected
    assert not store.is_changing
    fill(store, 10)
