"""Shuffled reading orders in which each position is computed independently, so that a pass can resume anywhere.

    order = ChunkOrder(files.chunk_counts, seed=7, epoch=3, window=16)
    order[0], order[123456]            # numbers of entries, without computing the whole order

``Permutation`` shuffles all entries, so a cache smaller than the manifest nearly always misses. ``ChunkOrder`` shuffles
the chunks, and then the entries within each window of ``window`` chunks, so at any time a reader needs only the chunks
of one window.

An order depends only on its arguments: it is the same in every process, on every machine and with every version of
Python.
"""

from __future__ import annotations

import hashlib
import operator
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Final, NamedTuple, overload

from raftkv.errors import ConfigError

_ROUNDS: Final = 4
_WORD: Final = (1 << 64) - 1


class Numbers(Sequence[int]):
    """A sequence whose numbers are computed by ``at``."""

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[int]: ...

    def __getitem__(self, position: int | slice) -> int | Sequence[int]:
        if isinstance(position, slice):
            return [self.at(at) for at in range(*position.indices(len(self)))]
        number = operator.index(position)
        if not -len(self) <= number < len(self):
            raise IndexError(position)
        return self.at(number % len(self))

    @abstractmethod
    def at(self, position: int) -> int:
        """Return the number at a position, which is not negative."""


class Permutation(Numbers):
    """The numbers from 0 to ``size`` - 1 in an order determined by a key; any position in constant time and memory.

    A Feistel network over the smallest even number of bits that holds ``size``; a number outside the range is sent
    through again (cycle walking), which happens fewer than four times on average.

    Arguments:
        size: how many numbers.
        key: any value with a text form; the same key gives the same order. Integers of numpy count as Python's.

    >>> sorted(Permutation(10, "seed 7")) == list(range(10))
    True
    """

    def __init__(self, size: int, key: object) -> None:
        self._size = size = operator.index(size)
        self._half = max((max(size - 1, 1).bit_length() + 1) // 2, 1)
        self._mask = (1 << self._half) - 1
        digest = hashlib.sha256(repr(_plain(key)).encode()).digest()
        self._keys = [int.from_bytes(digest[8 * at : 8 * at + 8], "little") | 1 for at in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._size

    def at(self, position: int) -> int:
        """Return the number at a position, which is from 0 to ``size`` - 1."""
        half, mask, keys, size = self._half, self._mask, self._keys, self._size
        while True:
            left, right = position >> half, position & mask
            for key in keys:
                mixed = ((right + 1) * key) & _WORD
                mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & _WORD
                left, right = right, left ^ ((mixed ^ (mixed >> 32)) & mask)
            position = left << half | right
            if position < size:
                return position


def _plain(key: object) -> object:
    """Return a key with Python integers, because the text form of numpy's depends on its version."""
    if isinstance(key, tuple):
        return tuple(_plain(part) for part in key)
    if isinstance(key, bool):
        return key
    return int(key) if isinstance(key, Integral) else key


class _Window(NamedTuple):
    """One window of chunks.

    Attributes:
        number: number of the window.
        begin: the first position in it.
        members: chunks of the window.
        inside: number of entries before each chunk in the window.
        inner: the order of its entries.
    """

    number: int
    begin: int
    members: Sequence[int]
    inside: Sequence[int]
    inner: Permutation


class ChunkOrder(Numbers):
    """All entries of a manifest, shuffled within windows of chunks; see the module. Usable from any thread.

    Arguments:
        counts: entries of each chunk (``Snapshot.chunk_counts``).
        seed, epoch: determine the order.
        window: number of chunks that are shuffled together.

    Raises:
        ConfigError: a window without chunks.
    """

    def __init__(self, counts: Sequence[int], *, seed: int = 0, epoch: int = 0, window: int = 16) -> None:
        if window < 1:
            raise ConfigError(f"a window has at least one chunk, not {window}")
        self._counts = counts
        self._key = (seed, epoch)
        self._window = window
        self._starts = list(accumulate(map(operator.index, counts), initial=0))
        self._chunks = list(Permutation(len(counts), ("chunks", *self._key)))
        mixed = [operator.index(counts[chunk]) for chunk in self._chunks]
        windows = [sum(mixed[at : at + window]) for at in range(0, len(mixed), window)]
        self._ends = list(accumulate(windows))
        # One object, because threads share it: a thread that reads it has a consistent window while others replace it.
        self._opened = _Window(-1, 0, (), (), Permutation(0, ""))

    def __len__(self) -> int:
        return self._starts[-1]

    def windows(self) -> Iterator[Sequence[int]]:
        """Yield the chunks of each window, in order."""
        for at in range(0, len(self._chunks), self._window):
            yield self._chunks[at : at + self._window]

    def at(self, position: int) -> int:
        """Return the entry at a position, which is from 0 to the number of entries - 1."""
        window = self._open(position)
        within = window.inner.at(position - window.begin)
        at = bisect_right(window.inside, within) - 1
        return self._starts[window.members[at]] + within - window.inside[at]

    def _open(self, position: int) -> _Window:
        number = bisect_right(self._ends, position)
        window = self._opened
        if number != window.number:
            members = self._chunks[number * self._window : (number + 1) * self._window]
            inside = list(accumulate((operator.index(self._counts[chunk]) for chunk in members), initial=0))[:-1]
            begin = self._ends[number - 1] if number else 0
            inner = Permutation(self._ends[number] - begin, ("window", *self._key, number))
            window = self._opened = _Window(number, begin, members, inside, inner)
        return window
