"""The store against the simple model, under any order of writes, reads, compactions, commits, crashes and restarts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from raftkv.errors import CompactedError, FutureRevisionError
from raftkv.storage import schema
from raftkv.storage.key_value import KeyValueView, encode
from raftkv.storage.mvcc import Store
from raftkv.storage.revision import SUB_BITS, SUB_MASK, from_key
from raftkv.storage.selection import ASCEND, DESCEND, Selection, drain
from tests.long import long_except
from tests.storage.conftest import Engine
from tests.storage.memory import ScriptedWriter
from tests.storage.model import Model

KEYS = st.sampled_from([b"a", b"b", b"ba", b"c", b"c\x00", b"z" * 130])
ENDS = st.one_of(st.sampled_from([b"", b"\x00"]), KEYS)
VALUES = st.sampled_from([b"", b"1", b"2", b"x" * 200])
LEASES = st.sampled_from([0, 0, 7, 2**63 - 1])
OPERATIONS = st.lists(st.tuples(KEYS, st.one_of(st.none(), VALUES), LEASES), max_size=4)


class StoreMachine(RuleBasedStateMachine):
    """One store on one engine."""

    on_disk = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp()) if self.on_disk else None
        self.engine = Engine(self.directory / "db" if self.directory else None)
        self.model = Model()
        self.durable = self.model.copy()
        self.sent: list[Model] = []
        self.open()

    def open(self) -> None:
        self.writer = ScriptedWriter()
        self.store = Store.open(self.engine.backend(), self.writer)

    def teardown(self) -> None:
        self.store.close()
        self.engine.close()
        if self.directory:
            shutil.rmtree(self.directory)

    @rule(operations=OPERATIONS)
    def write(self, operations: list[tuple[bytes, bytes | None, int]]) -> None:
        txn = self.store.begin()
        for key, value, lease in operations:
            if value is None:
                txn.delete_range(key)
            else:
                txn.put(key, value, lease)
        changes = txn.end()
        made = self.model.write(operations)
        assert [(key, deleted) for key, _, deleted, _ in changes] == [(c.key, c.value is None) for c in made]
        self._applied()

    @rule(key=KEYS, end=ENDS)
    def delete_range(self, key: bytes, end: bytes) -> None:
        deleted = [KeyValueView(data).key for data in self.model.range(key, end, self.model.revision)]
        expected = self.model.range(key, end, self.model.revision)
        txn = self.store.begin()
        found = txn.delete_range(key, end)
        assert [self.store.reader.record(previous) for _, previous in found] == expected
        assert txn.range(key, end).count == 0
        txn.end()
        self.model.write([(name, None, 0) for name in deleted])
        self._applied()

    @rule(key=KEYS, value=st.one_of(st.none(), VALUES))
    def meta(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            self.store.meta_delete(schema.AUTH_USERS, key)
            self.model.values.pop(key, None)
        else:
            self.store.meta_put(schema.AUTH_USERS, key, value)
            self.model.values[key] = value
        self._applied()

    def _applied(self) -> None:
        self.model.applied += 1
        self.store.set_applied(self.model.applied, 3)

    @rule(back=st.integers(0, 6))
    def compact(self, back: int) -> None:
        revision = self.model.revision - back
        if revision <= self.model.compacted:
            with pytest.raises(CompactedError):
                self.store.compact(revision)
        elif revision >= 1:
            self.store.compact(revision)
            self.model.compacted = revision
            self._applied()

    @rule(steps=st.integers(1, 3), keys_max=st.integers(1, 3))
    def compaction_steps(self, steps: int, keys_max: int) -> None:
        for _ in range(steps):
            if not self.store.compaction_step(keys_max):
                break
        self._note_sent()

    @rule()
    def send_batch(self) -> None:
        self.store.commit()
        self._note_sent()

    def _note_sent(self) -> None:
        if len(self.writer) > len(self.sent):
            self.sent.append(self.model.copy())

    @precondition(lambda self: self.sent)
    @rule()
    def batch_is_durable(self) -> None:
        self.durable = self.sent.pop(0)
        self.writer.run_next()
        self._note_sent()
        assert self.store.durable_index == self.durable.applied

    @rule()
    def crash(self) -> None:
        self.store.close()
        self.model = self.durable.copy()
        self.sent = []
        self.open()

    @rule()
    def settle(self) -> None:
        while self.store.is_compacting or self.store.durable_index < self.model.applied:
            self.store.compaction_step()
            self.store.commit()
            self.writer.run_all()
        self.sent = []
        self.durable = self.model.copy()

    @rule(key=KEYS, end=ENDS, back=st.integers(-1, 8), limit=st.integers(0, 3))
    def read(self, key: bytes, end: bytes, back: int, limit: int) -> None:
        revision = self.model.revision - back
        if revision > self.model.revision:
            with pytest.raises(FutureRevisionError):
                self.store.range(key, end, revision=revision)
        elif 0 < revision < self.model.compacted:
            with pytest.raises(CompactedError):
                self.store.range(key, end, revision=revision, count_only=True)
        else:
            self._check_read(key, end, max(revision, 0), limit)

    def _check_read(self, key: bytes, end: bytes, revision: int, limit: int) -> None:
        expected = self.model.range(key, end, revision or self.model.revision)
        result = self.store.range(key, end, revision=revision, limit=limit)
        assert result.kvs == (expected[:limit] if limit else expected)
        assert (result.count, result.revision) == (len(expected), self.model.revision)
        counted = self.store.range(key, end, revision=revision, count_only=True)
        assert (counted.kvs, counted.count) == ([], len(expected))
        names = self.store.range(key, end, revision=revision, keys_only=True).kvs
        views = [KeyValueView(data) for data in expected]
        assert names == [encode(kv.key, kv.create_revision, kv.mod_revision, kv.version) for kv in views]
        for order in (ASCEND, DESCEND):
            selected, found = drain(self.store.select(key, end, Selection(order=order), revision=revision))
            assert (selected[:: -1 if order == DESCEND else 1], found.count) == (expected, len(expected))

    @invariant()
    def same_state(self) -> None:
        assert self.store.revision == self.model.revision
        assert self.store.compact_revision == self.model.compacted
        assert self.store.applied_index == self.model.applied
        state = self.model.state()
        assert self.store.range(b"\x00", b"\x00").kvs == state
        assert self.store.key_count == len(state)
        leases = self.model.leases()
        assert self.store.attachments.of_key == leases
        for lease in {0, 1, 2, 3, *leases.values()}:
            assert sorted(self.store.attachments.keys_unordered(lease)) == sorted(
                key for key in leases if leases[key] == lease
            )
        assert dict(self.store.meta_items(schema.AUTH_USERS)) == self.model.values

    @invariant()
    def same_history(self) -> None:
        first = max(self.model.compacted, 1)
        changes = [change for change in self.model.changes() if change.main > first]
        records = list(self.store.history(first + 1, self.model.revision))
        found = [KeyValueView(data) for _, data in records]
        assert [(view.key, view.value) for view in found] == [(c.key, c.value or b"") for c in changes]
        half = records[len(records) // 2 :]
        if half:
            begin = from_key(half[0][0])
            again = self.store.history(begin >> SUB_BITS, self.model.revision, sub=begin & SUB_MASK)
            assert list(again) == half, "a reader goes on where it stopped"


class StoreMachineOnDisk(StoreMachine):
    """The same on LMDB."""

    on_disk = True


EXAMPLES = [(StoreMachine, 40), (StoreMachineOnDisk, 8), (StoreMachine, 200), (StoreMachineOnDisk, 25)]


@pytest.mark.parametrize(
    ("machine", "examples"), long_except(EXAMPLES, EXAMPLES[:2]), ids=["few in memory", "few on lmdb", "memory", "lmdb"]
)
def test_the_store_is_the_model(machine: type[StoreMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
