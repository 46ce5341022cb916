"""Key sets give the same results as trying every key, and as etcd's interval trees."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from raftkv.apply.auth.permissions import KeySet, is_interval

ALPHABET = b"\0a\xff"
KEYS = [bytes(key) for size in (1, 2, 3) for key in product(ALPHABET, repeat=size)]
keys = st.sampled_from(KEYS)
ends = st.sampled_from([b"", b"\0", *KEYS])
intervals = st.tuples(keys, ends)
BEYOND = b"\xff" * 9
"""A key above all others: only what has no end reaches it."""


def holds(interval: tuple[bytes, bytes], key: bytes) -> bool:
    """The model: whether an interval as on the wire holds a key."""
    first, end = interval
    if not end:
        return key == first
    return first <= key and (end == b"\0" or key < end)


@given(st.lists(intervals, max_size=8), st.lists(intervals, max_size=4))
def test_a_set_holds_the_keys_that_one_of_its_intervals_holds(one, two):
    union = KeySet.union([KeySet.of(one), KeySet.of(two)])
    assert union.bounds == sorted(set(union.bounds)) == KeySet.of(one + two).bounds
    for key in [*KEYS, BEYOND]:
        assert (key in union) == any(holds(interval, key) for interval in one + two)


@given(st.lists(intervals, max_size=8), keys, ends)
def test_a_set_covers_an_interval_if_it_holds_all_its_keys(parts, key, end):
    keys = KeySet.of(parts)
    if not is_interval(key, end):
        assert keys.covers(key, end) == (key in keys)
        return
    # Between two keys of the alphabet there are others: the least above each tells whether the set goes on.
    tried = [
        each
        for each in {*KEYS, *(one + b"\0" for one in KEYS), *(one + b"\0\0" for one in KEYS), BEYOND}
        if holds((key, end), each)
    ]
    assert keys.covers(key, end) == all(each in keys for each in tried)


@given(st.lists(intervals, max_size=8), keys)
def test_a_part_ends_where_the_set_does(parts: list[tuple[bytes, bytes]], key: bytes) -> None:
    keys = KeySet.of(parts)
    try:
        end = keys.end_after(key)
    except KeyError:
        assert key not in keys
        return
    assert key in keys
    assert keys.covers(key, b"\0" if end is None else end)
    assert end is None or end not in keys


def test_adjacent_and_endless_ranges_cover_together() -> None:
    keys = KeySet.of([(b"a", b"b"), (b"b", b"c"), (b"k", b""), (b"k\0", b"")])
    assert keys.covers(b"a", b"c")
    assert keys.covers(b"k", b"k\0\0")
    assert not keys.covers(b"a", b"c\0")
    assert not keys.covers(b"a", b"\0")
    assert KeySet.of([(b"\0", b"\0")]).covers(b"\0", b"\0")
    assert KeySet.of([(b"a", b"\0")]).covers(b"b", b"\0")
    assert not KeySet.of([(b"b", b"\0")]).covers(b"a", b"\0")
