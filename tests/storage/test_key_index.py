"""One key's generations: random histories against a plain list."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.errors import InvariantError
from raftkv.storage import index
from raftkv.storage.index import LISTED_FROM, Found, KeyIndex
from raftkv.storage.revision import SUB_BITS, after, from_key, is_tombstone, pack, to_key


class ListModel:
    """The history as a list of (packed revision, whether a put); everything is a search through it."""

    def __init__(self) -> None:
        self.changes: list[tuple[int, bool]] = []
        self.compacted = -1

    def is_live(self) -> bool:
        return bool(self.changes) and self.changes[-1][1]

    def get(self, main: int) -> tuple[int, int, int] | None:
        created, version, modified = 0, 0, 0
        for revision, is_put in self.changes:
            if revision >> SUB_BITS > main:
                break
            created, version = (created or revision >> SUB_BITS, version + 1) if is_put else (0, 0)
            modified = revision
        return (modified, created, version) if version else None

    def kept(self, main: int) -> set[int]:
        """What a compaction keeps: all after it, the state at it, a tombstone exactly at it."""
        later = {revision for revision, _ in self.changes if revision >> SUB_BITS > main}
        state = self.get(main)
        last = [(revision, is_put) for revision, is_put in self.changes if revision >> SUB_BITS <= main][-1:]
        at = {revision for revision, is_put in last if not is_put and revision >> SUB_BITS == main}
        return later | ({state[0]} if state else set()) | at


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 3)), min_size=1, max_size=14),
    st.lists(st.integers(0, 3), max_size=4),
    st.lists(st.booleans(), max_size=8),
    st.integers(1, 4),
    st.sampled_from([1, 2, index.LISTED_FROM]),
)
@pytest.mark.interpreted
def test_random_histories(steps, compactions, later, drops_max, listed_from):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "LISTED_FROM", listed_from)
        _random_history(steps, compactions, later, drops_max)


def _random_history(steps: list[tuple[bool, int]], compactions: list[int], later: list[bool], drops_max: int) -> None:
    key_index, model = KeyIndex(), ListModel()
    main = 1
    for wants_put, advance in steps:
        main += advance
        _change(key_index, model, main, wants_put)
    present = {revision for revision, _ in model.changes}
    compacted = 0
    for step in compactions:
        compacted = min(compacted + step, main)
        dropped = _compact_in_pieces(key_index, compacted, drops_max)
        assert dropped == present - model.kept(compacted), compacted
        present -= dropped
        assert key_index.is_empty() == (not present)
    for wants_put in later:
        main += 1
        _change(key_index, model, main, wants_put)
    for at in range(compacted, main + 1):
        assert key_index.before(after(at)) == model.get(at)
    assert key_index.is_live() == model.is_live()


def _compact_in_pieces(key_index: KeyIndex, main: int, drops_max: int) -> set[int]:
    dropped: list[int] = []
    while piece := key_index.compact(main, drops_max):
        assert len(piece) <= drops_max
        dropped += map(from_key, piece)
    assert sorted(set(dropped)) == dropped, "each once, oldest first"
    return set(dropped)


def _change(key_index: KeyIndex, model: ListModel, main: int, wants_put: bool) -> None:
    is_put = wants_put or not model.is_live()
    revision = pack(main, 0)
    model.changes.append((revision, is_put))
    if is_put:
        key_index.put(revision)
    else:
        key_index.tombstone(revision)


def test_dropped_tombstones_are_marked() -> None:
    key_index = KeyIndex()
    key_index.put(pack(1, 0))
    key_index.tombstone(pack(2, 5))
    assert [is_tombstone(key) for key in key_index.compact(3)] == [False, True]


def test_history_does_not_go_back() -> None:
    key_index = KeyIndex()
    key_index.put(pack(3, 1))
    for revision in (pack(3, 1), pack(3, 0), pack(2, 9)):
        with pytest.raises(InvariantError):
            key_index.put(revision)
        with pytest.raises(InvariantError):
            key_index.tombstone(revision)


class _Counted(tuple[int, ...]):
    """Revisions that count how often they are looked at."""

    looks = 0

    def __getitem__(self, position: Any) -> Any:
        _Counted.looks += 1
        return super().__getitem__(position)


def test_a_long_history_is_neither_copied_nor_walked() -> None:
    key_index = KeyIndex()
    pairs = 2000
    for number in range(pairs):
        key_index.put(pack(2 * number + 1, 0))
        closed = key_index.closed
        key_index.tombstone(pack(2 * number + 2, 0))
        assert not number or key_index.closed is closed, "a copy of all generations for each deletion"
    key_index.closed = [item._replace(revisions=_Counted(item.revisions)) for item in key_index.closed]
    _Counted.looks = 0
    assert key_index.before(after(1)) == Found(pack(1, 0), 1, 1)
    assert key_index.before(after(2)) is None
    assert key_index.before(after(2 * pairs - 1)) == Found(pack(2 * pairs - 1, 0), 2 * pairs - 1, 1)
    assert _Counted.looks < 100
    _Counted.looks = 0
    assert len(key_index.compact(pairs, 10)) == 10
    assert _Counted.looks < 100


def test_a_long_generation_is_not_copied() -> None:
    """Five million puts of a key, then a deletion: 0.1 s, and 0.05 s for each step of the compaction."""
    key_index = KeyIndex()
    for main in range(1, 2 * LISTED_FROM + 1):
        key_index.put(pack(main, 0))
    revisions = key_index.revisions
    key_index.tombstone(pack(2 * LISTED_FROM + 1, 0))
    dropped: list[bytes] = []
    while piece := key_index.compact(2 * LISTED_FROM, 100):
        dropped += piece
        assert key_index.closed[0].revisions is revisions
    assert dropped == [to_key(pack(main, 0)) for main in range(1, 2 * LISTED_FROM)]
    assert revisions == [pack(2 * LISTED_FROM, 0), pack(2 * LISTED_FROM + 1, 0)]
    key_index.put(pack(2 * LISTED_FROM + 2, 0))
    assert len(revisions) == 2
