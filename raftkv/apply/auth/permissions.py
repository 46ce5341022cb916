"""Sets of keys: the keys that the roles of a user let it read, or write.

    keys = KeySet.of([(b"a", b"c"), (b"k", b"")])     # the keys from a to below c, and the key k
    b"b" in keys                                      # True
    keys.covers(b"a", b"b")                           # every key of an interval, its end as on the wire

Intervals are as on the wire: an empty end means a single key, the end ``"\\0"`` all keys from the first one on. A set
covers an interval if the union of its parts does, as in etcd: ``[a, b)`` and ``[b, c)`` cover ``[a, c)``; only an
interval without an end covers an interval without an end.

A set is the sorted list of its bounds, begins and ends in turn, so each query is one binary search: 0.1 us with one
interval, 0.3 us with 10,000. A set without an end has one begin more than ends.

An empty interval (etcd 3.5 accepts such permissions, and its snapshot files contain them) adds nothing. A request for
an empty interval is covered if its first key is; etcd's result depends on the shape of a tree then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from raftkv.storage.index import TO_THE_LAST

Interval = tuple[bytes, bytes]
"""Key and range_end, as on the wire."""


class KeySet:
    """An immutable set of keys.

    Arguments:
        bounds: begins and ends of its intervals, in turn, in order.
    """

    __slots__ = ("bounds",)

    def __init__(self, bounds: list[bytes]) -> None:
        self.bounds: Final = bounds

    @classmethod
    def of(cls, intervals: Iterable[Interval]) -> KeySet:
        """Return the union of intervals in wire form."""
        return cls._joined([each for interval in intervals if (each := _half_open(*interval)) is not None])

    @classmethod
    def union(cls, sets: Iterable[KeySet]) -> KeySet:
        """Return the union of the sets."""
        intervals: list[tuple[bytes, bytes | None]] = []
        for each in sets:
            bounds = each.bounds
            intervals.extend(zip(bounds[::2], bounds[1::2], strict=False))
            if len(bounds) % 2:
                intervals.append((bounds[-1], None))
        return cls._joined(intervals)

    @classmethod
    def _joined(cls, intervals: list[tuple[bytes, bytes | None]]) -> KeySet:
        bounds: list[bytes] = []
        for low, high in sorted(intervals, key=_low):
            # The set has no end from here on, so it contains all further intervals.
            if len(bounds) % 2:
                break
            if bounds and low <= bounds[-1]:
                end = bounds.pop()
                if high is not None:
                    bounds.append(max(high, end))
            else:
                bounds.append(low)
                if high is not None:
                    bounds.append(high)
        return cls(bounds)

    def __contains__(self, key: bytes) -> bool:
        return bisect_right(self.bounds, key) % 2 == 1

    def covers(self, key: bytes, range_end: bytes) -> bool:
        """Return whether every key of an interval is in the set.

        Arguments:
            key, range_end: the interval, as on the wire.
        """
        bounds = self.bounds
        position = bisect_right(bounds, key)
        if position % 2 == 0:
            return False
        if position == len(bounds) or not range_end:
            return True
        return range_end != TO_THE_LAST and range_end <= bounds[position]

    def end_after(self, key: bytes) -> bytes | None:
        """Return the end of the interval of the set that contains a key; ``None``: no end.

        Raises:
            KeyError: the key is not in the set.
        """
        position = bisect_right(self.bounds, key)
        if position % 2 == 0:
            raise KeyError(key)
        return None if position == len(self.bounds) else self.bounds[position]

    def __len__(self) -> int:
        return (len(self.bounds) + 1) // 2


EMPTY: Final = KeySet([])


def is_interval(key: bytes, range_end: bytes) -> bool:
    """Return whether key and range_end, as on the wire, are an interval that can hold a key."""
    return _half_open(key, range_end) is not None


def _low(interval: tuple[bytes, bytes | None]) -> bytes:
    return interval[0]


def _half_open(key: bytes, range_end: bytes) -> tuple[bytes, bytes | None] | None:
    """Return the interval as its first key and the key before which it ends; ``None`` if it is empty."""
    if not key:
        return None
    if not range_end:
        return key, key + b"\0"
    if range_end == TO_THE_LAST:
        return key, None
    return (key, range_end) if key < range_end else None
