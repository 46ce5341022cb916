"""A log entry is committed whole or not at all, under any call during apply and any failure in the entry."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.errors import InvariantError
from raftkv.raft.types import ConfState
from raftkv.storage import schema
from raftkv.storage.hash import KVHash
from raftkv.storage.mvcc import Store
from tests.storage.memory import MemoryBackend, ScriptedWriter

KEYS = (b"a", b"b", b"c", b"d")
Part = tuple[str, list[tuple[bytes, bytes | None]]]
Entry = list[Part]


class Broken(Exception):
    """An error in applying."""


def entries_of(rng: Random) -> list[Entry]:
    """A log: entries of one or more parts, of which each is a transaction, a value or a configuration."""
    return [
        [
            (
                rng.choice(("txn", "txn", "txn", "meta", "conf")),
                [(rng.choice(KEYS), rng.choice((None, b"1", b"2"))) for _ in range(rng.randint(1, 4))],
            )
            for _ in range(rng.choice((1, 1, 2, 3)))
        ]
        for _ in range(rng.randint(1, 25))
    ]


class Member:
    """Applies a log to a store, with interruptions."""

    def __init__(self, backend: MemoryBackend, rng: Random | None, operations_max: int) -> None:
        self.writer = ScriptedWriter()
        self.store = Store.open(backend, self.writer, operations_max=operations_max)
        self.rng = rng
        self.flushed = 0

    def interrupt(self) -> None:
        """What the loop does beside applying."""
        if self.rng is None or self.rng.random() < 0.5:
            return
        what = self.rng.choice(("commit", "flush", "write", "write", "compaction"))
        if what == "commit":
            self.store.commit()
        elif what == "flush":
            self.store.flush(lambda: None)
        elif what == "compaction":
            self.store.compaction_step(2)
        elif self.writer:
            self.writer.run_next()

    def apply_part(self, part: Part, fails: bool) -> None:
        kind, changes = part
        if kind == "txn":
            txn = self.store.begin()
            for key, value in changes:
                self.interrupt()
                if value is None:
                    txn.delete_range(key)
                else:
                    txn.put(key, value)
                if fails:
                    raise Broken
            txn.end()
        elif kind == "meta":
            self.store.meta_put(schema.ALARM, changes[0][0], b"%d" % self.store.revision)
        else:
            self.store.set_conf_state(ConfState(voters=(len(changes),)))
            if self.store.revision > self.store.compact_revision:
                self.store.compact(self.store.revision)
        if fails:
            raise Broken

    def apply(self, log: list[Entry], broken: tuple[int, int] | None = None) -> None:
        """Apply what is not applied yet, in pages; an error ends it, as it ends a member."""
        index = self.store.applied_index
        while index < len(log):
            last = len(log) if self.rng is None else min(len(log), index + self.rng.randint(1, 4))
            for position in range(index, last):
                for number, part in enumerate(log[position]):
                    self.interrupt()
                    self.apply_part(part, (position, number) == broken)
            index = last
            self.store.set_applied(index, 1)
            self.interrupt()

    def state(self) -> tuple[KVHash, object, object, int, int]:
        store = self.store
        while store.is_compacting:
            store.compaction_step()
            store.commit()
            self.writer.run_all()
        jobs = []
        store.hash_kv(0, jobs.append)
        self.writer.run_all()
        everything = store.range(b"\0", b"\0").kvs
        return jobs[0](), everything, store.meta_items(schema.ALARM), store.revision, store.conf_state.voters[-1:]


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_each_entry_is_applied_once(seed: int) -> None:
    rng = Random(seed)
    log = entries_of(rng)
    operations_max = rng.choice((1, 3, 1000))
    backend = MemoryBackend()
    member = Member(backend, rng, operations_max)
    broken_at = rng.randrange(len(log))
    broken = (broken_at, rng.randrange(len(log[broken_at]))) if rng.random() < 0.7 else None
    try:
        member.apply(log, broken)
    except Broken:
        if rng.random() < 0.5:
            member.store.poison()
        for _ in range(10):
            member.interrupt()
    member.store.close()
    again = Member(backend, None, operations_max)
    again.apply(log)
    clean = Member(MemoryBackend(), None, 1000)
    clean.apply(log)
    assert again.state() == clean.state()


def test_a_poisoned_store_commits_nothing_more() -> None:
    backend, writer = MemoryBackend(), ScriptedWriter()
    store = Store.open(backend, writer)
    store.begin().put(b"a", b"1")
    store._txn.end()
    store.set_applied(1, 1)
    store.poison()
    store.commit()
    store.flush(lambda: None)
    assert len(writer) == 0
    with pytest.raises(InvariantError):
        store.set_applied(2, 1)
    with pytest.raises(InvariantError, match="poison"):
        store.begin()


def test_commit_requested_within_an_entry_happens_at_its_end() -> None:
    backend, writer = MemoryBackend(), ScriptedWriter()
    store = Store.open(backend, writer)
    called: list[int] = []
    txn = store.begin()
    txn.put(b"a", b"1")
    store.flush(lambda: called.append(store.durable_index))
    assert (len(writer), store.is_changing) == (0, True)
    txn.end()
    assert store.is_changing
    store.set_applied(1, 1)
    assert (len(writer), store.is_changing) == (1, False)
    writer.run_all()
    assert called == [1]
