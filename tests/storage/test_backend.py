"""Guarantees of every engine, tested on memory and LMDB; then those of a file only."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from raftkv.errors import CorruptionError, InvariantError, MapFullError, SpaceError, StorageError
from raftkv.storage import schema
from raftkv.storage.backend import environment as environment_module
from raftkv.storage.backend.base import Backend, WriteBatch
from raftkv.storage.backend.environment import lock_path
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.failpoints import arm
from raftkv.storage.revision import pack, seal, to_key
from tests.storage.conftest import MAP_SIZE_BYTES, Engine


def records(*mains: int) -> WriteBatch:
    batch = WriteBatch()
    batch.records = {key: seal(key, b"record") for key in (to_key(pack(main, 0)) for main in mains)}
    return batch


def stored(backend: Backend, bucket: bytes = schema.KEY) -> dict[bytes, bytes]:
    read = backend.begin_read()
    found = dict(read.items(bucket))
    read.close()
    return found


def test_a_batch_is_whole_and_stays(engine: Engine) -> None:
    backend = engine.backend()
    backend.commit(records(2, 3, 4))
    batch = records(5)
    batch.deletes = [to_key(pack(3, 0))]
    batch.values = {(schema.META, b"a"): b"1", (schema.ALARM, b"a"): b"2"}
    backend.commit(batch)
    expected = records(2, 4, 5).records
    assert stored(backend) == expected
    assert stored(engine.backend()) == expected
    backend = engine.backend()
    assert (stored(backend, schema.META), stored(backend, schema.ALARM)) == ({b"a": b"1"}, {b"a": b"2"})


def test_values_are_replaced_and_deleted(backend: Backend) -> None:
    batch = WriteBatch()
    batch.values = {(schema.LEASE, b"x"): b"1", (schema.LEASE, b"y"): b"1"}
    backend.commit(batch)
    batch = WriteBatch()
    batch.values = {(schema.LEASE, b"x"): None, (schema.LEASE, b"y"): b"2", (schema.LEASE, b"none"): None}
    backend.commit(batch)
    assert stored(backend, schema.LEASE) == {b"y": b"2"}


def test_a_reader_sees_one_state(backend: Backend) -> None:
    backend.commit(records(2, 3))
    read = backend.begin_read()
    batch = records(4)
    batch.deletes = [to_key(pack(2, 0))]
    batch.values = {(schema.META, b"m"): b"1"}
    backend.commit(batch)
    assert dict(read.items(schema.KEY)) == records(2, 3).records
    assert read.get_record(to_key(pack(2, 0))) == records(2).records[to_key(pack(2, 0))]
    assert read.get(schema.KEY, to_key(pack(4, 0))) is None
    assert read.get(schema.META, b"m") is None
    read.close()
    assert stored(backend) == records(3, 4).records


def test_bounds_of_items(backend: Backend) -> None:
    backend.commit(records(2, 3, 5, 8))
    read = backend.begin_read()
    found = [key for key, _ in read.items(schema.KEY, to_key(pack(3, 0)), to_key(pack(8, 0)))]
    assert found == [to_key(pack(3, 0)), to_key(pack(5, 0))]
    assert [key for key, _ in read.items(schema.KEY, to_key(pack(4, 0)))] == [to_key(pack(5, 0)), to_key(pack(8, 0))]
    assert list(read.items(schema.AUTH)) == []
    read.close()
    read.close()


def test_records_only_grow(backend: Backend) -> None:
    backend.commit(records(2, 3))
    with pytest.raises(InvariantError):
        backend.commit(records(3, 4))
    with pytest.raises(InvariantError):
        backend.commit(records(1))


def test_readers_on_other_threads(backend: Backend) -> None:
    backend.commit(records(2, 3))
    found: list[dict[bytes, bytes]] = []
    thread = threading.Thread(target=lambda: found.append(stored(backend)))
    thread.start()
    thread.join()
    assert found == [records(2, 3).records]


def test_sizes(backend: Backend) -> None:
    empty = backend.size_in_use_bytes
    batch = WriteBatch()
    batch.records = {to_key(pack(main, 0)): b"x" * 1000 for main in range(2, 200)}
    backend.commit(batch)
    full = backend.size_in_use_bytes
    assert backend.size_bytes >= full > empty + 190_000
    batch = WriteBatch()
    batch.deletes = [to_key(pack(main, 0)) for main in range(2, 200)]
    backend.commit(batch)
    assert backend.size_in_use_bytes < full / 4


@pytest.fixture
def database(tmp_path: Path) -> LMDBBackend:
    return LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_the_files_are_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        backend = LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES)
        backend.copy_to(tmp_path / "copy")
        backend.close()
    finally:
        os.umask(before)
    for name in ("db", "db-lock", "copy"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, name
    assert lock_path(tmp_path / "db") == tmp_path / "db-lock"


def test_the_table_of_readers_has_all_its_blocks(tmp_path: Path) -> None:
    """LMDB writes the table through a map: on a full disk, a hole there would end the process with SIGBUS."""
    path = tmp_path / "db"
    LMDBBackend(path, MAP_SIZE_BYTES).close()
    lock_path(path).write_bytes(b"")
    os.truncate(lock_path(path), 8192)
    LMDBBackend(path, MAP_SIZE_BYTES).close()
    found = lock_path(path).stat()
    assert found.st_blocks * 512 >= found.st_size > environment_module.READERS_MAX * 64


def test_a_full_map_is_a_declared_error_and_not_the_end(tmp_path: Path) -> None:
    backend = LMDBBackend(tmp_path / "db", 1 << 20)
    big = WriteBatch()
    big.records = {to_key(pack(main, 0)): b"x" * 2000 for main in range(2, 1000)}
    with pytest.raises(MapFullError, match=r"no room in the map of the database .*db"):
        backend.commit(big)
    assert stored(backend) == {}
    reader = backend.begin_read()
    assert not backend.grow(), "a reader would find its pages gone"
    reader.close()
    backend.commit(records(1))
    assert stored(backend) == records(1).records
    while True:
        assert backend.grow()
        try:
            backend.commit(big)
        except MapFullError:
            continue
        break
    assert len(stored(backend)) == 999
    backend.close()
    # Opened with the size that it was made with, it is full again, and whole.
    again = LMDBBackend(tmp_path / "db", 1 << 20)
    assert len(stored(again)) == 999
    again.close()


@pytest.mark.parametrize(("name", "expected"), [("ENOSPC", SpaceError), ("EIO", StorageError)])
def test_errors_of_the_disk_are_declared(database: LMDBBackend, name: str, expected: type[Exception]) -> None:
    arm("beforeCommit", f"error({name})")
    with pytest.raises(StorageError, match=os.strerror(getattr(errno, name))) as caught:
        database.commit(records(2))
    assert type(caught.value) is expected


@pytest.mark.parametrize(("free_bytes", "expected"), [(64 * 1024, SpaceError), (1 << 30, StorageError)])
def test_an_input_output_error_on_a_full_disk_is_a_want_of_room(database, monkeypatch, free_bytes, expected):
    """LMDB says EIO where a write was cut short."""
    arm("beforeCommit", "error(EIO)")
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_bytes, f_frsize=1))
    with pytest.raises(StorageError) as caught:
        database.commit(records(2))
    assert type(caught.value) is expected


def test_an_input_output_error_after_a_want_of_room_is_tried_once_more(database, monkeypatch):
    """Room that was made between the write that was cut short and the look at the disk ended the member."""
    arm("beforeCommit", "error(EIO)")
    caught = []
    for free_bytes in (0, 1 << 30, 1 << 30):
        monkeypatch.setattr(os, "statvfs", lambda _, free=free_bytes: SimpleNamespace(f_bavail=free, f_frsize=1))
        with pytest.raises(StorageError) as error:
            database.commit(records(2))
        caught.append(type(error.value))
    assert caught == [SpaceError, SpaceError, StorageError]


def test_the_name_of_a_new_database_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(environment_module, "sync_directory", synced.append)
    for expected in ([str(tmp_path)], []):
        LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES).close()
        assert synced == expected
        synced.clear()


def test_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "db"
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(CorruptionError, match=r"the database .*db is damaged, or is no database: MDB_INVALID"):
        LMDBBackend(path, MAP_SIZE_BYTES)
    with pytest.raises(StorageError, match="cannot open the database"):
        LMDBBackend(tmp_path / "absent", read_only=True)
    assert not (tmp_path / "absent").exists()


def test_lack_of_address_space_says_what_to_raise(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"1,048,576 GiB of address space are needed \(ulimit -v\)"):
        LMDBBackend(tmp_path / "db", 1 << 50)


def test_a_copy_is_compact_and_complete(database: LMDBBackend, tmp_path: Path) -> None:
    batch = WriteBatch()
    batch.records = {key: seal(key, b"x" * 1000) for key in (to_key(pack(main, 0)) for main in range(2, 1000))}
    database.commit(batch)
    batch = WriteBatch()
    batch.deletes = [to_key(pack(main, 0)) for main in range(3, 1000)]
    database.commit(batch)
    database.copy_to(tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size < database.size_bytes / 4
    copy = LMDBBackend(tmp_path / "copy", read_only=True)
    assert stored(copy) == stored(database)
    with pytest.raises(StorageError):
        copy.commit(records(5))
    copy.close()
    with pytest.raises(StorageError):
        database.copy_to(tmp_path / "copy")


def test_open_reader_keeps_reading_replaced_database(database: LMDBBackend, tmp_path: Path) -> None:
    database.commit(records(2))
    database.copy_to(tmp_path / "copy")
    database.commit(records(9))
    read = database.begin_read()
    with pytest.raises(StorageError, match=r"cannot move .*absent"):
        database.replace(tmp_path / "absent")
    database.replace(tmp_path / "copy")
    database.commit(records(3))
    assert stored(database) == records(2, 3).records
    assert dict(read.items(schema.KEY)) == records(2, 9).records
    assert database.grow(), "a reader of the old one is none of this"
    read.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["db", "db-lock"]
