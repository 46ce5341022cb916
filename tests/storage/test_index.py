"""The ordered index against plain dicts: intervals, counts, keys visited by a compaction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.errors import InvariantError
from raftkv.storage.index import Index
from raftkv.storage.revision import pack

NAMES = st.sampled_from([b"a", b"a\x00", b"ab", b"b", b"b\xff", b"c", b"\xff"])
HISTORY = st.lists(st.tuples(NAMES, st.booleans()), max_size=25)


def build(history: list[tuple[bytes, bool]]) -> tuple[Index, list[dict[bytes, int]]]:
    """An index, and the state after each revision (from 1)."""
    index, states = Index(), [{}, {}]
    for main, (name, wants_put) in enumerate(history, 2):
        state = dict(states[-1])
        if wants_put or name not in state:
            created, version, previous = index.put(name, pack(main, 0))
            assert previous == state.get(name, 0)
            assert (version == 1) == (name not in state) == (created == main)
            state[name] = pack(main, 0)
        else:
            assert index.tombstone(name, pack(main, 0)) == state.pop(name)
        states.append(state)
    return index, states


@given(HISTORY, st.data())
def test_compaction_visits_every_key_that_could_lose_something(history, draw):
    index, states = build(history)
    main = 1
    for _ in range(2):
        main = draw.draw(st.integers(main, len(states) - 1))
        for name in list(index.take_dirty()):
            index.compact_key(name, main)
        clean = {name for name, _ in history} - set(index._dirty)
        for name in clean:
            assert index.compact_key(name, len(states) + 5) == [], name
        for at in range(main, len(states)):
            assert dict(index.live_at(b"\x00", b"\x00", at)) == states[at]
    assert index.count(b"\x00", b"\x00") == len(states[-1])


def test_a_deleted_key_is_forgotten_with_its_tombstone() -> None:
    index = Index()
    index.put(b"k", pack(2, 0))
    index.tombstone(b"k", pack(3, 0))
    assert len(index) == 1
    assert index.live_count == 0
    index.compact_key(b"k", 4)
    assert len(index) == 0


def test_missing_key_cannot_be_deleted() -> None:
    index = Index()
    with pytest.raises(InvariantError, match="unknown key"):
        index.tombstone(b"k", pack(2, 0))
    index.put(b"k", pack(2, 0))
    index.tombstone(b"k", pack(3, 0))
    with pytest.raises(InvariantError):
        index.tombstone(b"k", pack(4, 0))
