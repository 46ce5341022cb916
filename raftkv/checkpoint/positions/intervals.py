"""Sets of whole numbers as sorted intervals that neither touch nor overlap.

>>> united([(0, 4), (10, 12)], (4, 6))
((0, 6), (10, 12))
>>> without(((0, 6), (10, 12)), 15)
((6, 10), (12, 15))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Interval = tuple[int, int]
"""First number, and the first that does not belong."""
Intervals = tuple[Interval, ...]


def united(intervals: Iterable[Interval], *more: Interval) -> Intervals:
    """Return the union; empty intervals vanish."""
    found: list[Interval] = []
    for first, end in sorted(each for each in (*intervals, *more) if each[0] < each[1]):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return tuple(found)


def without(intervals: Sequence[Interval], length: int) -> Intervals:
    """Return the numbers from 0 to ``length`` - 1 that are in none of the intervals."""
    ends = [0, *(end for _, end in intervals)]
    firsts = [*(first for first, _ in intervals), length]
    return tuple((first, end) for first, end in zip(ends, firsts, strict=True) if first < end)


def size(intervals: Iterable[Interval]) -> int:
    """Return how many numbers there are."""
    return sum(end - first for first, end in intervals)


def overlaps(intervals: Iterable[Interval]) -> bool:
    """Return whether two of them have a number in common."""
    ordered = sorted(intervals)
    return any(later[0] < earlier[1] for earlier, later in pairwise(ordered))
