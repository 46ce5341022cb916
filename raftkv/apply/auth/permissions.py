"""Sets of keys: what the roles of a user let it read, or write.

    keys = KeySet.of([(b"a", b"c"), (b"k", b"")])     # the keys from a to below c, and the key k
    b"b" in keys                                      # True
    keys.covers(b"a", b"b")                           # every key of an interval, its end as on the wire

An interval is what clients write: an empty end is a single key, the end ``"\\0"`` all keys from the first one on. A set
covers an interval if the union of its parts does, as in etcd: ``[a, b)`` and ``[b, c)`` cover ``[a, c)``; what has no
end is covered only by what has none.

A set is the sorted list of the keys at which it begins and ends, in turn, so each question is one bisection: 0.1 us
with one interval, 0.3 us with 10,000. A set without end has one bound more at which it begins.

An interval that holds no key (etcd 3.5 takes such permissions, and its snapshot files bring them) adds nothing. A
request for one is covered if its first key is; etcd's answer hangs on the shape of a tree then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from raftkv.storage.index import TO_THE_LAST

Interval = tuple[bytes, bytes]
"""Key and range_end, as on the wire."""


class KeySet:
    """A set of keys; it does not change.

    Arguments:
        bounds: where it begins and ends, in turn, in order.
    """

    __slots__ = ("bounds",)

    def __init__(self, bounds: list[bytes]) -> None:
        self.bounds: Final = bounds

    @classmethod
    def of(cls, intervals: Iterable[Interval]) -> KeySet:
        """Return the union of intervals as they stand on the wire."""
        return cls._joined([each for interval in intervals if (each := _half_open(*interval)) is not None])

    @classmethod
    def union(cls, sets: Iterable[KeySet]) -> KeySet:
        """Return the keys that are in any of the sets."""
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
            # Where the set is open already, everything else lies in it.
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
            key, range_end: as on the wire.
        """
        bounds = self.bounds
        position = bisect_right(bounds, key)
        if position % 2 == 0:
            return False
        if position == len(bounds) or not range_end:
            return True
        return range_end != TO_THE_LAST and range_end <= bounds[position]

    def end_after(self, key: bytes) -> bytes | None:
        """Return where the part of the set ends that a key is in; None: nowhere.

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
    """Return the interval by its first key and the one before which it ends; None where it holds no key."""
    if not key:
        return None
    if not range_end:
        return key, key + b"\0"
    if range_end == TO_THE_LAST:
        return key, None
    return (key, range_end) if key < range_end else None
