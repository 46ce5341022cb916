"""Commits overlapping with writes: visibility, order, lost batches, full and failing disks."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from raftkv.errors import InvariantError, MapFullError, SpaceError, StorageError
from raftkv.storage import schema
from raftkv.storage.backend.base import Backend, WriteBatch
from raftkv.storage.backend.lmdb import LMDBBackend, ThreadWriter
from raftkv.storage.mvcc import Store
from raftkv.storage.revision import SUB_BITS, from_key
from tests.storage.memory import MemoryBackend, ScriptedWriter


def put(store: Store, key: bytes, value: bytes = b"v") -> None:
    store.begin().put(key, value)
    store._txn.end()
    store.set_applied(store.applied_index + 1, 1)


def values(store: Store) -> dict[bytes, int]:
    return {b"": store.applied_index} | {key: 1 for key in (b"a", b"b", b"c") if store.get(key)}


def test_every_write_is_readable_at_every_moment(backend: Backend) -> None:
    writer = ScriptedWriter()
    store = Store.open(backend, writer)
    put(store, b"a")
    store.commit()
    put(store, b"b")
    assert set(values(store)) == {b"", b"a", b"b"}
    store.commit()
    assert len(writer) == 1  # one batch at a time
    writer.run_next()
    assert set(values(store)) == {b"", b"a", b"b"}
    assert (store.durable_index, len(writer)) == (1, 1)  # the second went by itself
    writer.run_next()
    assert (store.durable_index, len(writer)) == (2, 0)
    assert set(values(store)) == {b"", b"a", b"b"}
    store.close()


def test_enough_operations_go_by_themselves(backend: Backend) -> None:
    writer = ScriptedWriter()
    store = Store.open(backend, writer, operations_max=3)
    for key in (b"a", b"b"):
        put(store, key)
    assert len(writer) == 0
    put(store, b"c")
    assert len(writer) == 1
    for key in (b"a", b"b", b"c"):
        put(store, key)
    assert len(writer) == 1
    writer.run_next()
    assert len(writer) == 1
    store.close()


def test_flush_reports_once_all_of_it_is_durable(backend: Backend) -> None:
    writer = ScriptedWriter()
    store = Store.open(backend, writer)
    reports: list[str] = []
    store.flush(lambda: reports.append("empty"))
    assert reports == ["empty"]
    put(store, b"a")
    store.flush(lambda: reports.append("a"))
    store.flush(lambda: reports.append("a again"))
    put(store, b"b")
    store.flush(lambda: reports.append("b"))
    assert reports == ["empty"]
    writer.run_next()
    assert reports == ["empty", "a", "a again"]
    writer.run_all()
    assert reports == ["empty", "a", "a again", "b"]
    assert store.durable_index == 2
    store.close()


def test_an_applied_entry_without_changes_is_recorded_too(backend: Backend) -> None:
    store = Store.open(backend)
    store.set_applied(9, 4)
    store.commit()
    store.close()
    again = Store.open(backend)
    assert (again.applied_index, again.applied_term, again.revision) == (9, 4, 1)
    with pytest.raises(InvariantError, match="applied index 8 after 9"):
        again.set_applied(8, 4)
    again.close()


class FailingBackend(MemoryBackend):
    """Fails commits with the errors it is given, in order; then works."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)

    def commit(self, batch: WriteBatch) -> None:
        if self.errors:
            raise self.errors.pop(0)
        super().commit(batch)


def test_a_full_disk_keeps_the_batch_and_serves_it() -> None:
    backend = FailingBackend(SpaceError("full"), SpaceError("still full"))
    store = Store.open(backend)
    put(store, b"a")
    store.commit()
    assert str(store.space_error) == "full"
    put(store, b"b")
    store.commit()
    assert str(store.space_error) == "still full"
    assert set(values(store)) == {b"", b"a", b"b"}
    assert store.durable_index == 0
    reports: list[int] = []
    store.flush(lambda: reports.append(store.durable_index))
    assert store.space_error is None
    assert reports == [2]
    store.close()
    assert set(values(Store.open(backend))) == {b"", b"a", b"b"}


def test_a_full_map_grows_once_no_other_reader_is_left(tmp_path: Path) -> None:
    backend, writer = LMDBBackend(tmp_path / "db", 1 << 20), ScriptedWriter()
    store = Store.open(backend, writer)
    put(store, b"a", bytes(5 << 20))
    hashing = backend.begin_read()
    for _ in range(5):
        store.commit()
        writer.run_all()
        assert isinstance(store.space_error, MapFullError)
        assert store.durable_index == 0
    put(store, b"b")
    hashing.close()
    store.commit()
    writer.run_all()
    assert store.space_error is None
    store.commit()
    writer.run_all()
    assert store.durable_index == 2
    assert set(values(store)) == {b"", b"a", b"b"}
    store.close()
    backend.close()


def test_a_map_that_cannot_grow_is_a_lack_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FailingBackend(*[MapFullError("full")] * 2)

    def refuse() -> bool:
        raise SpaceError("cannot map that much")

    monkeypatch.setattr(backend, "grow", refuse)
    store = Store.open(backend)
    put(store, b"a")
    store.commit()
    assert str(store.space_error) == "cannot map that much"
    assert not isinstance(store.space_error, MapFullError)
    store.close()


def test_any_other_failure_is_fatal() -> None:
    failures: list[BaseException] = []
    store = Store.open(FailingBackend(StorageError("broken")), on_fatal=failures.append)
    put(store, b"a")
    store.commit()
    assert [str(error) for error in failures] == ["broken"]
    assert store.durable_index == 0


def test_an_unexpected_failure_is_raised() -> None:
    store = Store.open(FailingBackend(StorageError("broken")))
    put(store, b"a")
    with pytest.raises(StorageError, match="broken"):
        store.commit()


def test_nothing_is_committed_inside_a_transaction(backend: Backend) -> None:
    writer = ScriptedWriter()
    store = Store.open(backend, writer)
    txn = store.begin()
    for call in (store.begin, lambda: store.set_applied(1, 1)):
        with pytest.raises(InvariantError):
            call()
    txn.put(b"k", b"v")
    store.commit()
    assert len(writer) == 0
    txn.end()
    store.set_applied(1, 1)
    assert len(writer) == 1
    with pytest.raises(InvariantError):
        txn.end()
    with pytest.raises(InvariantError):
        txn.put(b"k", b"v")
    store.close()


def test_the_backend_thread(backend: Backend) -> None:
    calls: SimpleQueue = SimpleQueue()
    store = Store.open(backend, ThreadWriter(calls.put), operations_max=10)
    for number in range(100):
        put(store, b"k%d" % number)
        while not calls.empty():
            calls.get()()
    reports: list[int] = []
    store.flush(lambda: reports.append(threading.get_ident()))
    while not reports:
        calls.get(timeout=90)()
    assert reports == [threading.get_ident()]
    assert store.durable_index == 100
    assert store.range(b"\x00", b"\x00").count == 100
    store.close()


def test_other_buckets_follow_the_same_batches(backend: Backend) -> None:
    writer = ScriptedWriter()
    store = Store.open(backend, writer)
    store.meta_put(schema.ALARM, b"1", b"x")
    store.set_applied(store.applied_index, store.applied_term)
    store.meta_put(schema.ALARM, b"2", b"x")
    store.set_applied(store.applied_index, store.applied_term)
    store.meta_put(schema.MEMBERS, b"1", b"m")
    store.set_applied(store.applied_index, store.applied_term)
    store.commit()
    store.meta_delete(schema.ALARM, b"1")
    store.set_applied(store.applied_index, store.applied_term)
    store.meta_put(schema.ALARM, b"0", b"y")
    store.set_applied(store.applied_index, store.applied_term)
    for _ in range(3):
        assert store.meta_items(schema.ALARM) == [(b"0", b"y"), (b"2", b"x")]
        assert store.meta_get(schema.ALARM, b"1") is None
        assert store.meta_get(schema.ALARM, b"2") == b"x"
        store.commit()
        writer.run_all()
    store.close()
    again = Store.open(backend)
    assert again.meta_items(schema.ALARM) == [(b"0", b"y"), (b"2", b"x")]
    assert again.meta_items(schema.MEMBERS) == [(b"1", b"m")]
    again.close()


@pytest.mark.parametrize(
    ("bucket", "key"), [(schema.KEY, b"k"), (schema.META, b"k"), (b"no", b"k"), (b"auth", b""), (b"auth", b"x" * 512)]
)
def test_keys_that_no_bucket_takes(backend: Backend, bucket: bytes, key: bytes) -> None:
    store = Store.open(backend)
    with pytest.raises(InvariantError):
        store.meta_put(bucket, key, b"")
    store.close()


def test_history_stays_complete_across_batches_and_compaction(backend: Backend) -> None:
    """Uncommitted changes are found by a list of keys that is kept between reads."""
    writer = ScriptedWriter()
    store = Store.open(backend, writer)

    def revisions() -> list[int]:
        first = max(store.compact_revision, 1) + 1
        return [from_key(key) >> SUB_BITS for key, _ in store.history(first, store.revision)]

    def check() -> None:
        assert revisions() == list(range(max(store.compact_revision, 1) + 1, store.revision + 1))

    for number in range(40):
        put(store, b"a")
        check()
        if number == 10:
            store.commit()
        if number == 20:
            store.compact(store.revision - 2)
            store.set_applied(store.applied_index + 1, 1)
            while store.compaction_step():
                pass
            check()
        if number == 30:
            writer.run_next()
    store.close()
