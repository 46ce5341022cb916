"""The treap of intervals against a list of intervals."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.replica.watch.index import Intervals

KEYS = st.binary(min_size=1, max_size=2)
BOUNDS = st.tuples(KEYS, KEYS).map(lambda pair: (min(pair), max(pair) + b"\x00"))
INTERVALS = st.one_of(BOUNDS, st.tuples(KEYS, st.just(b"\0")))


def _contains(interval: tuple[bytes, bytes], key: bytes) -> bool:
    start, end = interval
    return start <= key and (end == b"\0" or key < end)


@given(st.lists(st.tuples(st.booleans(), INTERVALS), max_size=60), st.lists(KEYS, max_size=10))
def test_same_as_a_list(steps: list[tuple[bool, tuple[bytes, bytes]]], keys: list[bytes]) -> None:
    intervals: Intervals[tuple[bytes, bytes]] = Intervals()
    model: set[tuple[bytes, bytes]] = set()
    for is_add, interval in steps:
        if is_add and interval not in model:
            intervals.add(*interval, interval)
            model.add(interval)
        elif not is_add and interval in model:
            intervals.remove(*interval)
            model.remove(interval)
        assert intervals.get(*interval) == (interval if interval in model else None)
        assert len(intervals) == len(model)
    for key in (*keys, *(start for start, _ in model), *(end for _, end in model)):
        found = intervals.containing(key)
        assert sorted(found) == sorted(interval for interval in model if _contains(interval, key))
        if model:
            model.remove(intervals.pop())
            assert len(intervals) == len(model)


def test_a_thousand_nested_intervals_are_searched_without_recursion_trouble() -> None:
    intervals: Intervals[int] = Intervals()
    for number in range(1000):
        intervals.add(b"%04d" % number, b"%04d" % (9999 - number), number)
    assert len(intervals.containing(b"0500")) == 501
    assert intervals.containing(b"9998") == [0]


@pytest.mark.parametrize("seed", [0, 1])
def test_chosen_keys_cannot_degrade_the_tree_to_a_list(seed: int) -> None:
    """In order of priorities, each node has one child: some thousand watches, and no event was delivered any more."""
    foreseen = random.Random(seed)
    priorities = [foreseen.random() for _ in range(3000)]
    rank = {priority: number for number, priority in enumerate(sorted(priorities))}
    intervals: Intervals[int] = Intervals()
    for priority in priorities:
        intervals.add(b"a%04d" % rank[priority], b"z", rank[priority])
    assert intervals.containing(b"m") == list(range(3000))
    assert [intervals.pop() for _ in range(3000)] == list(range(3000))
