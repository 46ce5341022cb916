"""Selections in pieces against the naive version: read all KeyValues, filter, sort, and cut."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.errors import CompactedError, FutureRevisionError, RequestTimeoutError
from raftkv.storage import selection as selections
from raftkv.storage.index import Index
from raftkv.storage.key_value import KeyValueView, encode
from raftkv.storage.mvcc import Store
from raftkv.storage.overlay import Overlay
from raftkv.storage.selection import DESCEND, KEY, MOD, NONE, VALUE, Pieces, Selected, Selection, drain
from tests.storage.memory import MemoryBackend, ScriptedWriter

NAMES = st.sampled_from([b"\x00", b"a", b"a\x00", b"ab", b"b", b"b\xff", b"c", b"\xff"])
ENDS = st.one_of(st.sampled_from([b"", b"\x00"]), NAMES)
CHANGE = st.tuples(NAMES, st.sampled_from([None, None, b"", b"1", b"2", b"2"]), st.sampled_from([0, 0, 7]))
HISTORY = st.lists(st.lists(CHANGE, min_size=1, max_size=3), max_size=14)
BOUND = st.sampled_from([0, 0, 0, 0, -1, 2, 3, 5, 7])
SELECTIONS = st.builds(
    Selection,
    limit=st.sampled_from([0, 0, -1, 1, 2, 3, 2**63 - 1]),
    count_only=st.sampled_from([False, False, False, True]),
    keys_only=st.booleans(),
    target=st.integers(0, 4),
    order=st.integers(0, 2),
    min_mod=BOUND,
    max_mod=BOUND,
    min_create=BOUND,
    max_create=BOUND,
)
SORT_VALUES = (
    lambda kv: kv.key,
    lambda kv: kv.version,
    lambda kv: kv.create_revision,
    lambda kv: kv.mod_revision,
    lambda kv: kv.value,
)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("KEYS_PER_PIECE", 2), ("KEYS_PER_PIECE_MIN", 1), ("BYTES_PER_PIECE", 9), ("RUN_ITEMS", 3)):
        monkeypatch.setattr(selections, name, number)


def change(store: Store, *changes: tuple[bytes, bytes | None, int]) -> None:
    txn = store.begin()
    for key, value, lease in changes:
        if value is None:
            txn.delete_range(key)
        else:
            txn.put(key, value, lease)
    txn.end()
    store.set_applied(store.applied_index, store.applied_term)


def compact(store: Store, revision: int) -> None:
    store.compact(revision)
    store.set_applied(store.applied_index, store.applied_term)


def dumb(stored: list[bytes], selection: Selection) -> tuple[list[bytes], Selected]:
    """The way that etcd goes: fetch, filter, sort, cut, strip."""
    if selection.count_only:
        return [], Selected(len(stored), False)
    limit = selection.limit
    kvs = [KeyValueView(kv) for kv in stored]
    if selection.order == NONE and not selection.is_filtered and 0 < limit < 2**63 - 1:
        kvs = kvs[: limit + 1]
    kvs = [
        kv
        for kv in kvs
        if not (selection.max_mod and kv.mod_revision > selection.max_mod)
        and not (selection.min_mod and kv.mod_revision < selection.min_mod)
        and not (selection.max_create and kv.create_revision > selection.max_create)
        and not (selection.min_create and kv.create_revision < selection.min_create)
    ]
    kvs.sort(key=SORT_VALUES[selection.target], reverse=selection.order == DESCEND)
    more = 0 < limit < len(kvs)
    kvs = kvs[:limit] if more else kvs
    if not selection.keys_only:
        return [kv.data for kv in kvs], Selected(len(stored), more)
    # etcd 3.7 reads keys from its index, which knows no leases, unless it sorts by value.
    has_lease = selection.target == VALUE
    stripped = [
        encode(kv.key, kv.create_revision, kv.mod_revision, kv.version, lease=kv.lease if has_lease else 0)
        for kv in kvs
    ]
    return stripped, Selected(len(stored), more)


def finish(pieces: Pieces, between: Any = None) -> tuple[list[bytes], Selected]:
    """Like ``drain``, with something done after each piece."""
    kvs: list[bytes] = []
    while True:
        try:
            kvs += next(pieces)
        except StopIteration as end:
            return kvs, end.value
        if between is not None:
            between()


@given(HISTORY, NAMES, ENDS, SELECTIONS, st.integers(0, 4))
def test_selection_equals_full_read(history, key, end, selection, back):
    store = Store.open(MemoryBackend())
    for changes in history:
        change(store, *changes)
    revision = max(store.revision - back, 1)
    expected = dumb(store.range(key, end, revision=revision).kvs, selection)
    assert drain(store.select(key, end, selection, revision=revision)) == expected


@given(HISTORY, NAMES, ENDS, st.integers(-1, 4), st.integers(1, 6), st.sampled_from([0, 40, 10_000]))
def test_a_small_range_is_the_range_or_nothing(history, key, end, limit, keys_max, size_bytes_max):
    store = Store.open(MemoryBackend())
    for changes in history:
        change(store, *changes)
    expected = store.range(key, end, limit=limit)
    found = store.small_range(key, end, limit, keys_max, size_bytes_max)
    if found is not None:
        assert (found.kvs, found.count, found.revision) == (expected.kvs, expected.count, expected.revision)
        assert store.known_count(key, end) <= keys_max
    elif store.known_count(key, end) <= keys_max:
        assert sum(map(len, expected.kvs)) > size_bytes_max - 8
    txn = store.begin()
    txn.put(b"a", b"not yet")
    assert store.small_range(key, end, limit, keys_max, size_bytes_max) is None, "the index is ahead of the present"
    txn.end()


@given(HISTORY, HISTORY, NAMES, ENDS, SELECTIONS, st.integers(0, 4))
def test_a_pinned_view_stays_as_it_was(history, later, key, end, selection, back):
    """Writes and compactions of everything come between any two pieces."""
    store = Store.open(MemoryBackend())
    for changes in history:
        change(store, *changes)
    revision = max(store.revision - back, 1)
    expected = dumb(store.range(key, end, revision=revision).kvs, selection)
    view = store.pin()
    waiting = list(later)

    def meddle() -> None:
        if waiting:
            change(store, *waiting.pop())
        if store.revision > store.compact_revision:
            compact(store, store.revision)
        while store.compaction_step():
            pass
        store.commit()

    assert finish(view.select(key, end, selection, revision=revision), meddle) == expected
    assert view.range(key, end).kvs == [] or view.revision > 1
    view.let_go()
    view.let_go()
    while store.is_compacting:
        store.compaction_step()
        store.commit()


@pytest.mark.interpreted
def test_compaction_overtakes_closed_view() -> None:
    store = Store.open(MemoryBackend())
    for number in range(8):
        change(store, (b"k%d" % number, b"v", 0))
    view = store.pin()
    present, past = (view.select(b"k", b"l", Selection(), revision=revision) for revision in (0, 5))
    untouched = view.select(b"k", b"l", Selection(), revision=9)
    for pieces in (present, past, untouched):
        next(pieces)
    change(store, (b"k1", None, 0))
    compact(store, 7)
    assert not store.compaction_step(), "the work waits for the view"
    assert store.is_compacting
    next(past)
    view.let_go()
    assert store.compaction_step()
    next(present)
    compact(store, 10)
    with pytest.raises(CompactedError):
        next(past)
    with pytest.raises(RequestTimeoutError):
        next(present)


def test_view_refuses_same_reads_as_store() -> None:
    store = Store.open(MemoryBackend())
    for number in range(5):
        change(store, (b"k", b"%d" % number, 0))
    compact(store, 3)
    view = store.pin()
    change(store, (b"k", b"later", 0))
    with pytest.raises(FutureRevisionError):
        view.select(b"k", b"", Selection(), revision=7)
    with pytest.raises(CompactedError):
        view.select(b"k", b"", Selection(), revision=2)
    assert view.range(b"k").kvs == store.range(b"k", revision=6).kvs != store.range(b"k").kvs
    assert view.range(b"k").revision == 6
    view.let_go()


def test_changes_of_an_open_transaction_are_not_counted() -> None:
    store = Store.open(MemoryBackend())
    change(store, (b"a", b"1", 0), (b"b", b"1", 0))
    view = store.pin()
    txn = store.begin()
    txn.delete_range(b"a")
    txn.put(b"c", b"1")
    for source in (view, store):
        kvs, found = drain(source.select(b"a", b"z", Selection()))
        assert (len(kvs), found.count) == (2, 2)
    assert drain(txn.select(b"a", b"z", Selection(order=DESCEND)))[1].count == 2
    txn.end()
    view.let_go()


class Work:
    """Counts what a selection costs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.visited = self.loaded = 0
        states, load_all = Index.states, Overlay.load_all

        def counted_states(index: Index, names: list[bytes], main: int) -> Any:
            self.visited += len(names)
            return states(index, names, main)

        def counted_load(overlay: Overlay, revisions: list[int], size_bytes_max: int) -> list[bytes]:
            kvs = load_all(overlay, revisions, size_bytes_max)
            self.loaded += len(kvs)
            return kvs

        monkeypatch.setattr(Index, "states", counted_states)
        monkeypatch.setattr(Overlay, "load_all", counted_load)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("selection", "visited", "loaded"),
    [
        (Selection(limit=1, target=MOD, order=DESCEND), 1000, 1),
        (Selection(limit=1, target=MOD), 2, 1),
        (Selection(limit=3, order=DESCEND), 4, 3),
        (Selection(limit=3), 4, 3),
        (Selection(count_only=True, min_mod=5), 0, 0),
        (Selection(limit=2, min_mod=500), 501, 2),
        (Selection(keys_only=True), 1000, 0),
        (Selection(limit=1, target=VALUE, order=DESCEND), 1000, 1001),
    ],
    ids=repr,
)
def test_selection_reads_only_needed_records(monkeypatch, selection, visited, loaded):
    store = Store.open(MemoryBackend())
    for number in range(1000):
        change(store, (b"k%04d" % number, b"v", 0))
    work = Work(monkeypatch)
    drain(store.select(b"k", b"l", selection))
    assert work.visited <= visited + selections.KEYS_PER_PIECE
    assert work.loaded == loaded


def test_a_piece_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    store = Store.open(MemoryBackend())
    txn = store.begin()
    for number in range(5000):
        txn.put(b"k%04d" % number, b"v" * (100_000 if number % 1000 < 5 else 10))
    txn.end()
    for selection in (
        Selection(),
        Selection(target=VALUE, order=DESCEND),
        Selection(target=MOD, order=DESCEND),
        Selection(keys_only=True, target=VALUE),
    ):
        work = Work(monkeypatch)
        seen = [(0, 0)]
        sizes = []
        pieces = store.select(b"k", b"l", selection)
        for kvs in pieces:
            seen.append((work.visited, work.loaded))
            sizes.append(sum(map(len, kvs)))
        steps = [(visited - v, loaded - d) for (v, d), (visited, loaded) in pairwise(seen)]
        assert max(visited for visited, _ in steps) <= selections.KEYS_PER_PIECE
        assert max(loaded for _, loaded in steps) <= selections.KEYS_PER_PIECE
        assert max(sizes) < selections.BYTES_PER_PIECE + 110_000
        monkeypatch.undo()


@pytest.mark.interpreted
def test_memory_that_sorting_takes_is_reported() -> None:
    store = Store.open(MemoryBackend())
    for number in range(50):
        change(store, (b"k%02d" % number, b"v" * 1000, 0))
    for selection, least, most in (
        (Selection(target=VALUE, order=DESCEND), 50 * 1000, 50 * 1300),
        (Selection(target=VALUE, order=DESCEND, limit=2), 2 * 1000, 6 * 1300),
        (Selection(target=MOD, order=DESCEND), 50 * 100, 50 * 300),
        (Selection(target=KEY, order=DESCEND), 0, 0),
    ):
        held = peak = 0

        def grow(size_bytes: int) -> None:
            nonlocal held, peak
            held += size_bytes
            peak = max(peak, held)

        drain(store.select(b"k", b"l", selection, grow=grow))
        assert least <= peak <= most, selection


@pytest.mark.interpreted
@pytest.mark.parametrize("pieces_taken", [0, 150, 10**9])
def test_sorted_keys_are_freed_beside_the_owner(pieces_taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A million sorted keys were freed at once, at the end of the read or with its client: 43 ms.
    monkeypatch.setattr(selections, "RUN_ITEMS", 10)
    writer = ScriptedWriter()
    store = Store.open(MemoryBackend(), writer=writer)
    change(store, *((b"k%06d" % number, b"", 0) for number in range(1000)))
    freed: list[list[Any]] = []
    monkeypatch.setattr(Overlay, "free_later", lambda _, items: freed.append(items))
    pieces = store.select(b"k", b"l", Selection(target=MOD, order=DESCEND))
    list(islice(pieces, pieces_taken))
    pieces.close()
    assert len(freed) == (pieces_taken > 0)
    assert sum(len(run) for runs in freed for run in runs) >= min(pieces_taken, 990)
    monkeypatch.undo()
    for runs in freed:
        store._overlay.free_later(runs)
        assert runs
        writer.run_all()
        assert runs == []
