"""A compact copy replaces a database during writes: nothing is lost, and no deleted data comes back."""

from __future__ import annotations

import errno
import random
import shutil
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from queue import SimpleQueue

import pytest

from raftkv.errors import InvariantError, SpaceError, StorageError
from raftkv.storage import schema
from raftkv.storage.backend import defragmentation as module
from raftkv.storage.backend import environment
from raftkv.storage.backend.lmdb import LMDBBackend, ThreadWriter
from raftkv.storage.failpoints import FailpointPanic, arm, disarm_all
from raftkv.storage.mvcc import Store
from raftkv.storage.snapshot import write_snapshot
from tests.storage.conftest import MAP_SIZE_BYTES
from tests.storage.memory import ScriptedWriter
from tests.storage.test_compaction import fill, finish, hashed
from tests.storage.test_overlay import put
from tests.storage.test_snapshot import closed, database

NUMBERS = count()
POINTS = ["defragBeforeCopy", "defragAfterCopy", "defragBeforeRename", "defragAfterRename"]


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    disarm_all()


def buckets(store: Store) -> list[list[tuple[bytes, bytes]]]:
    """All that is on disk."""
    read = store.backend.begin_read()
    try:
        return [list(read.items(bucket)) for bucket in schema.BUCKETS]
    finally:
        read.close()


def defragment(store: Store, between: Callable[[], object] = lambda: None) -> list[BaseException | None]:
    """Defragment, with something done after the copy and between the first and the second round of catching up."""
    # A name of its own each time: LMDB refuses one that it has open still, and the last is closed on a thread.
    defragmentation = store.backend.defragment(store.backend.path.with_name(f"copy{next(NUMBERS)}"))
    ends: list[BaseException | None] = []
    try:
        defragmentation.copy()
        between()
        defragmentation.catch_up()
        between()
        store.finish_defragmentation(defragmentation, ends.append)
    finally:
        defragmentation.close()
    return ends


def files(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


@pytest.mark.parametrize("seed", range(5))
def test_copy_contains_concurrent_commits(tmp_path: Path, seed: int) -> None:
    """Puts, deletions, compactions, leases and other values, beside a store that is never defragmented."""
    stores = [Store.open(LMDBBackend(tmp_path / name, MAP_SIZE_BYTES)) for name in ("db", "other")]
    rng = random.Random(seed)
    changes = iter(range(100))

    def change() -> None:
        number, compact = next(changes), rng.random() < 0.6
        for store in stores:
            fill(store, 300, seed=1000 * seed + number)
            store.meta_put(schema.LEASE, b"%d" % (number % 3), b"%d" % number)
            store.meta_delete(schema.LEASE, b"%d" % ((number + 1) % 3))
            if compact:
                store.compact(store.revision - 20)
            store.set_applied(store.applied_index + 1, 1)
            if compact:
                finish(store)
            store.commit()

    for _ in range(3):
        change()
        before = stores[0].backend.size_bytes
        assert defragment(stores[0], change) == [None]
        assert buckets(stores[0]) == buckets(stores[1])
        assert stores[0].backend.size_bytes < before + 400_000
        change()
    assert hashed(stores[0]) == hashed(stores[1])
    for store in stores:
        closed(store)
    again = Store.open(LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES))
    closed(again)
    assert [name for name in files(tmp_path) if name.startswith(("db", "copy"))] == ["db", "db-lock"]


def test_space_is_given_back_and_readers_of_the_old_file_read_on(tmp_path: Path) -> None:
    store = database(tmp_path / "db", 4000)
    store.compact(store.revision)
    store.set_applied(store.applied_index, store.applied_term)
    finish(store)
    before, read = store.backend.size_bytes, store.backend.begin_read()
    expected = list(read.items(schema.KEY))
    assert defragment(store) == [None]
    assert store.backend.size_bytes < before / 2
    assert (tmp_path / "db").stat().st_size == store.backend.size_bytes
    fill(store, 50, seed=9)
    store.commit()
    assert list(read.items(schema.KEY)) == expected
    read.close()
    closed(store)


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_each_step_leaves_one_whole_database(tmp_path: Path, point: str) -> None:
    store = database(tmp_path / "db", 200)
    arm(point, "raise")

    def write() -> None:
        fill(store, 100, seed=2)
        store.commit()

    def run() -> None:
        defragmentation = store.backend.defragment(tmp_path / "copy")
        defragmentation.copy()
        write()
        defragmentation.catch_up()
        write()
        store.finish_defragmentation(defragmentation, lambda _: None)

    with pytest.raises(FailpointPanic):
        run()
    disarm_all()
    crash = tmp_path / "crash"
    crash.mkdir()
    for name in files(tmp_path):
        if (tmp_path / name).is_file():
            shutil.copy(tmp_path / name, crash / name)
    again = Store.open(LMDBBackend(crash / "db", MAP_SIZE_BYTES))
    assert hashed(again) == hashed(store)
    assert (again.revision, again.applied_index) == (store.revision, store.applied_index)
    assert (crash / "copy").exists() == (point in POINTS[1:3])
    closed(again)


@pytest.mark.parametrize("step", ["copy", "catch_up", "finish"])
def test_a_full_disk_leaves_everything_as_before(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = database(tmp_path / "db", 200)
    before = hashed(store)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    defragmentation = store.backend.defragment(tmp_path / "copy")
    ends: list = []
    if step == "copy":
        monkeypatch.setattr("os.pwrite", full)
        with pytest.raises(SpaceError):
            defragmentation.copy()
    else:
        defragmentation.copy()
        fill(store, 20, seed=3)
        store.commit()
        before = hashed(store)
        monkeypatch.setattr(module.LMDBDefragmentation, "_bring_records", full)
        if step == "catch_up":
            with pytest.raises(SpaceError):
                defragmentation.catch_up()
        else:
            store.finish_defragmentation(defragmentation, ends.append)
            assert isinstance(ends[0], SpaceError)
    monkeypatch.undo()
    defragmentation.close()
    assert files(tmp_path) == ["db", "db-lock"]
    fill(store, 20, seed=4)
    assert hashed(store) != before
    assert defragment(store) == [None]
    closed(store)


def test_defragmentation_is_exclusive_and_can_be_cancelled(tmp_path: Path) -> None:
    store = database(tmp_path / "db", 3000)
    defragmentation = store.backend.defragment(tmp_path / "copy")
    with pytest.raises(StorageError, match="already"):
        store.backend.defragment(tmp_path / "other")
    defragmentation.copy()
    fill(store, 20, seed=3)
    store.commit()
    defragmentation.give_up()
    with pytest.raises(StorageError, match="given up"):
        defragmentation.catch_up()
    defragmentation.close()
    assert files(tmp_path) == ["db", "db-lock"]
    closed(store)


def test_notes_of_changes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftkv.storage.backend.lmdb.NOTED_MAX", 10)
    store = database(tmp_path / "db", 300)
    defragmentation = store.backend.defragment(tmp_path / "copy")
    defragmentation.copy()
    store.compact(store.revision)
    store.set_applied(store.applied_index, store.applied_term)
    finish(store)
    with pytest.raises(StorageError, match="more than 10"):
        defragmentation.catch_up()
    defragmentation.close()
    closed(store)


def test_uncertain_rename_stops_all_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fatal: list = []
    store = Store.open(LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES), on_fatal=fatal.append)
    fill(store, 50)

    def broken(_: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    defragmentation = store.backend.defragment(tmp_path / "copy")
    defragmentation.copy()
    monkeypatch.setattr("raftkv.storage.backend.environment.sync_directory", broken)
    ends: list = []
    store.finish_defragmentation(defragmentation, ends.append)
    assert ends == fatal
    assert isinstance(ends[0], InvariantError)
    durable = store.durable_index
    fill(store, 50, seed=2)
    store.commit()
    assert store.durable_index == durable


@pytest.mark.parametrize("moment", ["before the copy", "before the end"])
def test_a_received_database_ends_it(tmp_path: Path, moment: str) -> None:
    sender = database(tmp_path / "sender", 300, seed=2)
    write_snapshot(sender.backend, tmp_path / "received")
    store = database(tmp_path / "db", 50)
    defragmentation = store.backend.defragment(tmp_path / "copy")
    if moment == "before the end":
        defragmentation.copy()
    list(store.install_steps(tmp_path / "received"))
    ends: list = []
    if moment == "before the copy":
        defragmentation.copy()
    store.finish_defragmentation(defragmentation, ends.append)
    defragmentation.close()
    assert "was exchanged" in str(ends[0])
    assert not isinstance(ends[0], InvariantError)
    assert hashed(store) == hashed(sender)
    closed(store)
    closed(sender)


def test_writes_are_read_while_the_end_is_on_the_writers_thread(tmp_path: Path) -> None:
    calls: SimpleQueue = SimpleQueue()
    store = Store.open(LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES), ThreadWriter(calls.put))
    fill(store, 500)
    defragmentation = store.backend.defragment(tmp_path / "copy")
    defragmentation.copy()
    ends: list = []
    store.finish_defragmentation(defragmentation, ends.append)
    fill(store, 30, seed=3)
    expected = store.range(b"\0", b"\0").kvs
    while not ends:
        calls.get(timeout=90)()
        assert store.range(b"\0", b"\0").kvs == expected
    assert ends == [None]
    defragmentation.close()
    done: list = []
    store.flush(lambda: done.append(None))
    while not done:
        calls.get(timeout=90)()
    closed(store)
    again = Store.open(LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES))
    assert again.range(b"\0", b"\0").kvs == expected
    closed(again)


def test_a_full_batch_waits_while_the_copy_takes_the_place(tmp_path: Path) -> None:
    """The end of a run has waited for a commit, during which enough was written for another."""
    writer = ScriptedWriter()
    store = Store.open(LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES), writer, operations_max=3)
    defragmentation = store.backend.defragment(tmp_path / "copy")
    defragmentation.copy()
    put(store, b"a")
    ends: list = []
    store.finish_defragmentation(defragmentation, ends.append)
    for key in (b"b", b"c", b"d", b"e"):
        put(store, key)
    writer.run_all()
    assert ends == [None]
    assert store.durable_index == store.applied_index
    defragmentation.close()
    before = hashed(store)
    closed(store)
    again = Store.open(LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES))
    assert hashed(again) == before
    closed(again)


def test_a_file_with_the_inode_of_one_that_is_being_closed_can_be_opened(tmp_path, monkeypatch):
    """The copy is opened just after the last one was closed, before the LMDB binding has noticed."""

    class Late(threading.Thread):
        def start(self) -> None:
            """Run when a caller waits for the end."""

        def join(self, timeout: float | None = None) -> None:
            self.run()

    monkeypatch.setattr(environment.threading, "Thread", Late)
    old = environment.Environment(tmp_path / "db", MAP_SIZE_BYTES)
    (tmp_path / "copy").hardlink_to(tmp_path / "db")
    with pytest.raises(StorageError, match="already open"):
        environment.Environment(tmp_path / "copy", MAP_SIZE_BYTES)
    old.retire()
    environment.Environment(tmp_path / "copy", MAP_SIZE_BYTES).raw.close()
