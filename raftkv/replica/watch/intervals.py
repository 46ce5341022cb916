"""Intervals of keys, and which of them contain a key: a treap ordered by start, with the greatest end of each subtree.

    intervals.add(b"a", b"c", group)
    intervals.containing(b"b") -> [group]

Adding, removing and asking cost O(log n), asking O(log n) more for each interval found. An end of ``b"\\0"`` is open,
as on the wire; open intervals are kept apart, in order of start, since no key is greater than their end.

Clients cannot foresee priorities: otherwise they could choose intervals that make the tree a list, which is searched to
its end, and deeper than a stack. No answer depends on the shape that they give the tree.
"""

from __future__ import annotations

import random
from itertools import islice
from typing import Final, Generic, TypeVar

from sortedcontainers import SortedDict

T = TypeVar("T")
_SEED: Final = random.SystemRandom().getrandbits(64)
OPEN_END = b"\0"
_LENGTHS: Final = 40
ALL: Final = 1 << 62
"""More than there can be."""


class _Node(Generic[T]):
    __slots__ = ("end", "end_max", "left", "priority", "right", "start", "value")

    def __init__(self, start: bytes, end: bytes, value: T, priority: float) -> None:
        self.start = start
        self.end = end
        self.value = value
        self.priority = priority
        self.left: _Node[T] | None = None
        self.right: _Node[T] | None = None
        self.end_max = end

    def update(self) -> None:
        end_max = self.end
        if self.left is not None and self.left.end_max > end_max:
            end_max = self.left.end_max
        if self.right is not None and self.right.end_max > end_max:
            end_max = self.right.end_max
        self.end_max = end_max


class Intervals(Generic[T]):
    """Values by interval; each interval has at most one value."""

    def __init__(self) -> None:
        self._root: _Node[T] | None = None
        self._open: SortedDict[bytes, T] = SortedDict()
        self._random = random.Random(_SEED)
        self._size = 0
        # How many bounds have so many bits in their length.
        self._lengths = [0] * _LENGTHS

    def __len__(self) -> int:
        return self._size + len(self._open)

    @property
    def longest_bytes(self) -> int:
        """About the length of the longest bound of a bounded interval, or more: what a search compares at each look."""
        return max([1 << bits for bits, count in enumerate(self._lengths) if count], default=0)

    def get(self, start: bytes, end: bytes) -> T | None:
        """Return the value of exactly this interval."""
        if end == OPEN_END:
            found: T | None = self._open.get(start)
            return found
        node = self._root
        while node is not None and (node.start, node.end) != (start, end):
            node = node.left if (start, end) < (node.start, node.end) else node.right
        return None if node is None else node.value

    def add(self, start: bytes, end: bytes, value: T) -> None:
        """Add an interval that is not there yet."""
        if end == OPEN_END:
            self._open[start] = value
            return
        self._count(start, end, 1)
        new = _Node(start, end, value, self._random.random())
        # Down to where its priority puts it: what is below is little, and alone is taken apart.
        above: _Node[T] | None = None
        is_left = False
        node = self._root
        while node is not None and node.priority > new.priority:
            if node.end_max < end:
                node.end_max = end
            is_left = (start, end) < (node.start, node.end)
            above, node = node, node.left if is_left else node.right
        new.left, new.right = _split(node, start, end)
        new.update()
        self._hang(above, is_left, new)

    def _count(self, start: bytes, end: bytes, change: int) -> None:
        self._size += change
        self._lengths[max(len(start), len(end)).bit_length()] += change

    def _hang(self, above: _Node[T] | None, is_left: bool, node: _Node[T] | None) -> None:
        """Put a subtree in the place of one of the children of a node; None: of the root."""
        if above is None:
            self._root = node
        elif is_left:
            above.left = node
        else:
            above.right = node

    def remove(self, start: bytes, end: bytes) -> None:
        """Remove an interval that is there."""
        if end == OPEN_END:
            del self._open[start]
            return
        path: list[_Node[T]] = []
        is_left = False
        node = self._root
        while node is not None and (node.start, node.end) != (start, end):
            path.append(node)
            is_left = (start, end) < (node.start, node.end)
            node = node.left if is_left else node.right
        if node is None:
            raise KeyError((start, end))
        self._count(start, end, -1)
        self._hang(path[-1] if path else None, is_left, _merge(node.left, node.right))
        for above in reversed(path):
            above.update()

    def pop(self) -> T:
        """Remove the first of the intervals, bounded ones before open ones, and return its value; there must be one."""
        node = self._root
        if node is None:
            value: T = self._open.popitem(0)[1]
            return value
        above: _Node[T] | None = None
        while node.left is not None:
            above, node = node, node.left
        # The ends noted above it may be greater now than what is left below: a search looks in vain, but misses nothing
        # of it.
        self._hang(above, True, node.right)
        self._count(node.start, node.end, -1)
        return node.value

    def containing(self, key: bytes, most: int = ALL) -> list[T]:
        """Return the values of all intervals that contain a key: bounded ones in order of start, then open ones.

        Arguments:
            key: to be looked for.
            most: when there are more than so many, one more than that is returned.
        """
        found: list[T] = []
        _collect(self._root, key, found, most)
        if self._open and len(found) <= most:
            left = most + 1 - len(found)
            found += [self._open[start] for start in islice(self._open.irange(None, key), left)]
        return found


def _collect(node: _Node[T] | None, key: bytes, found: list[T], most: int) -> None:
    while node is not None and node.end_max > key:
        if node.left is not None:
            _collect(node.left, key, found, most)
        if node.start > key or len(found) > most:
            return
        if node.end > key:
            found.append(node.value)
        node = node.right


def _split(node: _Node[T] | None, start: bytes, end: bytes) -> tuple[_Node[T] | None, _Node[T] | None]:
    """Return the intervals that sort before one, and the others."""
    if node is None:
        return None, None
    if (node.start, node.end) < (start, end):
        node.right, above = _split(node.right, start, end)
        node.update()
        return node, above
    below, node.left = _split(node.left, start, end)
    node.update()
    return below, node


def _merge(below: _Node[T] | None, above: _Node[T] | None) -> _Node[T] | None:
    if below is None or above is None:
        return below or above
    if below.priority > above.priority:
        below.right = _merge(below.right, above)
        below.update()
        return below
    above.left = _merge(below, above.left)
    above.update()
    return above
