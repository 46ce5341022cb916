"""All background work of a store on LMDB in any order: overlapping commits, full disks, compactions, defragmentations,
received databases, hashes, pinned views and restarts. The contents must always be those given by the entries.
"""

from __future__ import annotations

import contextlib
import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from raftkv.errors import CompactedError, RequestTimeoutError, SpaceError, StorageError
from raftkv.raft.types import ConfState
from raftkv.storage import schema
from raftkv.storage.backend.base import WriteBatch
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.hash import hash_kv
from raftkv.storage.mvcc import Store
from raftkv.storage.snapshot import write_snapshot
from tests.long import long_except
from tests.storage.conftest import MAP_SIZE_BYTES
from tests.storage.memory import MemoryBackend, ScriptedWriter

ALL = (b"\0", b"\0")
LEASE = 7
NUMBERS = count()


def apply(store: Store, index: int, entry: Any) -> None:
    """An entry is the revision of a compaction, or the changes of a txn and those of another bucket."""
    if isinstance(entry, int):
        with contextlib.suppress(CompactedError):
            store.compact(entry)
    else:
        changes, values = entry
        txn = store.begin()
        for change in changes:
            (txn.put if len(change) == 3 else txn.delete_range)(*change)
        txn.end()
        for key, value in values:
            store.meta_put(schema.LEASE, key, value)
    store.set_applied(index, 1)


class Member:
    """A store, the log of its entries, and chance."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.chance = random.Random(seed)
        self.entries: list[Any] = []
        self.fatal: list[BaseException] = []
        self.ends: list[BaseException | None] = []
        self.is_full = self.chance.random() < 0.4
        self.operations_max = self.chance.choice((3, 5, 20, 10_000))
        self.map_bytes = self.chance.choice((256 << 10, 1 << 20, MAP_SIZE_BYTES))
        self.steps = {
            self.enter: 45, self.commit: 10, self.written: 20, self.compact: 8, self.flush: 4, self.hash: 2,
            self.defragment: 6, self.check: 1, self.restart: 1.5, self.receive: 1, self.pin: 1.5,
        }  # fmt: skip
        self.open()

    def open(self) -> None:
        self.backend = LMDBBackend(self.path / "db", self.map_bytes)
        commit = self.backend.commit

        def fails_sometimes(batch: WriteBatch) -> None:
            if self.is_full and self.chance.random() < 0.15:
                raise SpaceError("no room")
            commit(batch)

        self.backend.commit = fails_sometimes  # type: ignore[method-assign]
        self.writer = ScriptedWriter()
        self.store = Store.open(
            self.backend, self.writer, operations_max=self.operations_max, on_fatal=self.fatal.append
        )
        self.defragmentation: Any = None
        self.is_ending = self.is_over = False
        self.pins: list[Any] = []
        for index in range(self.store.applied_index + 1, len(self.entries) + 1):
            apply(self.store, index, self.entries[index - 1])

    def run(self, steps: int) -> None:
        for step in self.chance.choices(list(self.steps), list(self.steps.values()), k=steps):
            step()
            assert not self.fatal
        self.is_full = False
        while self.store.durable_index < len(self.entries) or self.store.is_compacting or self.defragmentation:
            self.pins_end()
            self.commit()
            self.writer.run_all()
            self.store.compaction_step()
            if self.defragmentation:
                self.defragment()
        self.check()
        expected = self.expected()
        while expected.compaction_step():
            expected.commit()
        expected.commit()
        assert hash_kv(self.backend.begin_read, self.store.revision) == hash_kv(
            expected.backend.begin_read, expected.revision
        )
        self.close()

    # -- steps

    def enter(self) -> None:
        chance = self.chance
        if chance.random() < 0.12:
            entry: Any = max(1, self.store.revision - chance.randrange(8))
        else:
            changes: list[Any] = []
            for _ in range(chance.choice((1, 1, 1, 3, 8))):
                key = b"k%02d" % chance.randrange(25)
                if chance.random() < 0.25:
                    changes.append((key, chance.choice((b"", key + b"9", b"\0"))))
                else:
                    value = bytes([chance.randrange(256)]) * chance.choice((1, 1000, 6000))
                    changes.append((key, value, chance.choice((0, 0, LEASE))))
            entry = changes, [(b"%d" % chance.randrange(4), b"x")] * chance.randrange(2)
        self.entries.append(entry)
        apply(self.store, len(self.entries), entry)

    def commit(self) -> None:
        self.store.commit()

    def written(self) -> None:
        if len(self.writer):
            self.writer.run_next()

    def compact(self) -> None:
        self.store.compaction_step(self.chance.choice((1, 3, 500)))

    def flush(self) -> None:
        index = self.store.applied_index
        self.store.flush(lambda: self.at_least(index))

    def at_least(self, index: int) -> None:
        assert self.store.durable_index >= index

    def hash(self) -> None:
        def ready(job: Any) -> None:
            with contextlib.suppress(CompactedError):
                job()

        self.store.hash_kv(0, ready)

    def defragment(self) -> None:
        """The next step of one; which may find that the database was exchanged, or no room."""
        try:
            if self.defragmentation is None:
                self.defragmentation = self.backend.defragment(self.path / f"copy{next(NUMBERS)}")
                self.defragmentation.copy()
            elif self.is_over:
                self.give_up()
            elif not self.is_ending and self.chance.random() < 0.5:
                self.defragmentation.catch_up()
            elif not self.is_ending:
                self.is_ending = True
                self.store.finish_defragmentation(self.defragmentation, self.ended)
        except StorageError as error:
            self.ends.append(error)
            self.give_up()

    def ended(self, error: BaseException | None) -> None:
        self.ends.append(error)
        self.is_over = True

    def give_up(self) -> None:
        if self.defragmentation is not None:
            self.defragmentation.close()
        self.defragmentation = None
        self.is_ending = self.is_over = False

    def restart(self) -> None:
        self.close()
        self.open()
        self.check()

    def close(self) -> None:
        self.store.close()
        self.pins_end()
        self.give_up()
        self.backend.close()

    def receive(self) -> None:
        """The database of a member that has applied and committed all, and compacted some of it."""
        number = next(NUMBERS)
        other = Store.open(LMDBBackend(self.path / f"other{number}", MAP_SIZE_BYTES))
        for index, entry in enumerate(self.entries, 1):
            apply(other, index, entry)
        while self.chance.random() < 0.5 and other.compaction_step(3):
            pass
        other.set_conf_state(ConfState(voters=(1,)))
        other.set_applied(len(self.entries), 1)
        other.commit()
        write_snapshot(other.backend, self.path / f"received{number}")
        other.close()
        other.backend.close()
        for _ in self.store.install_steps(self.path / f"received{number}"):
            self.written()
        self.check()

    def pin(self) -> None:
        if not self.pins or self.chance.random() < 0.4:
            self.pins.append((self.store.pin(), self.store.range(*ALL).kvs))
            return
        view, kvs = self.pins.pop()
        with contextlib.suppress(CompactedError, RequestTimeoutError):
            assert view.range(*ALL).kvs == kvs
        view.let_go()

    def pins_end(self) -> None:
        while self.pins:
            self.pins.pop()[0].let_go()

    # -- what must hold

    def expected(self) -> Store:
        store = Store.open(MemoryBackend())
        for index, entry in enumerate(self.entries, 1):
            apply(store, index, entry)
        return store

    def check(self) -> None:
        store, expected = self.store, self.expected()
        assert (store.revision, store.compact_revision) == (expected.revision, expected.compact_revision)
        oldest = max(store.compact_revision, 1)
        for revision in {0, oldest, (oldest + store.revision) // 2}:
            assert store.range(*ALL, revision=revision).kvs == expected.range(*ALL, revision=revision).kvs
        assert store.range(*ALL, count_only=True).count == expected.range(*ALL, count_only=True).count
        assert list(store.history(oldest + 1, store.revision)) == list(expected.history(oldest + 1, store.revision))
        assert store.meta_items(schema.LEASE) == expected.meta_items(schema.LEASE)
        assert sorted(store.attachments.keys_unordered(LEASE)) == sorted(expected.attachments.keys_unordered(LEASE))


@pytest.mark.parametrize("seed", long_except(range(60), range(6)))
def test_database_equals_its_entries(tmp_path: Path, seed: int) -> None:
    member = Member(tmp_path, seed)
    member.run(steps=250)
    assert all(isinstance(end, StorageError | None) for end in member.ends)
