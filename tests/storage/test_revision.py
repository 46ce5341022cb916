"""Revisions: packed, as keys, and as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.errors import InvariantError
from raftkv.storage import revision as rev

MAINS = st.integers(0, 2**62)
SUBS = st.integers(0, rev.SUB_MASK)


@given(MAINS, SUBS)
def test_keys_lead_back(main: int, sub: int) -> None:
    packed = rev.pack(main, sub)
    assert rev.from_key(rev.to_key(packed)) == packed
    assert rev.from_key(rev.to_tombstone_key(packed)) == packed
    assert rev.to_key(packed) == main.to_bytes(8, "big") + b"_" + sub.to_bytes(8, "big")
    assert rev.pack_key(main, ord("_"), sub) == rev.to_key(packed)


@given(st.tuples(MAINS, SUBS), st.tuples(MAINS, SUBS))
def test_all_forms_sort_alike(one: tuple[int, int], other: tuple[int, int]) -> None:
    first, second = rev.pack(*one), rev.pack(*other)
    assert (first < second) == (one < other) == (rev.to_key(first) < rev.to_key(second))
    assert (rev.to_tombstone_key(first) < rev.to_key(second)) == (first < second)


def test_words() -> None:
    assert rev.describe(rev.to_key(rev.pack(5, 1))) == "5.1"
    assert rev.describe(rev.to_tombstone_key(rev.pack(6, 0))) == "6.0(t)"
    assert rev.describe(rev.pack(6, 2)) == "6.2"
    assert rev.describe(b"short") == b"short".hex()


@pytest.mark.parametrize(
    "key",
    [b"", b"x" * 17, rev.to_key(1)[:-1], rev.to_key(1) + b"u", rev.to_key(1) + b"tt", b"\x00" * 8 + b"_" + b"\xff" * 8],
)
def test_other_bytes_are_refused(key: bytes) -> None:
    with pytest.raises(InvariantError):
        rev.from_key(key)


def test_sub_is_bounded() -> None:
    with pytest.raises(InvariantError, match="out of range"):
        rev.pack(1, rev.SUB_MASK + 1)
