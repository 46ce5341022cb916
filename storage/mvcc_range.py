"""Reads: from an interval and a revision to serialized KeyValues.

The index answers where, the overlay and the disk answer what. At the current revision the count of an interval is two
subtractions and keys-only answers never touch a value; at an older revision the interval is walked.

``RangePages`` reads a large interval in bounded pieces at one revision, so that neither memory nor the loop of the
owner is held for long; between two pieces anything may happen to the store, a compaction included.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from raftkv.errors import CompactedError, FutureRevisionError
from raftkv.storage.index import Index
from raftkv.storage.key_value import KeyValueView, encode, key_of
from raftkv.storage.overlay import Overlay
from raftkv.storage.revision import SUB_BITS, SUB_MASK, pack_key

_SEPARATOR = ord("_")


class RangeResult:
    """What a read found."""

    __slots__ = ("count", "kvs", "revision")

    def __init__(self, kvs: list[bytes], count: int, revision: int) -> None:
        self.kvs = kvs
        """Serialized ``mvccpb.KeyValue``, in order of key."""
        self.count = count
        """Number of keys in the interval, whatever the limit."""
        self.revision = revision
        """Main revision of the store (or of the transaction) when it was read."""


class Reader:
    """Reads one store. Holds no state of its own but a count."""

    __slots__ = ("_index", "_leases", "_overlay", "ranges_total")

    def __init__(self, index: Index, overlay: Overlay, leases: dict[bytes, int]) -> None:
        self._index = index
        self._overlay = overlay
        self._leases = leases
        self.ranges_total = 0

    def get(self, key: bytes) -> bytes | None:
        """The current KeyValue of a key."""
        revision = self._index.latest(key)
        return self.record(revision) if revision else None

    def record(self, revision: int) -> bytes:
        """The KeyValue put at a packed revision that the index knows."""
        return self._overlay.load(pack_key(revision >> SUB_BITS, _SEPARATOR, revision & SUB_MASK))

    def latest(self, key: bytes, end: bytes, limit: int, count_only: bool, keys_only: bool) -> tuple[list[bytes], int]:
        """KeyValues and count of what exists now."""
        self.ranges_total += 1
        if not end:
            revision = self._index.latest(key)
            if not revision:
                return [], 0
            if count_only:
                return [], 1
            return [self._key_only(key) if keys_only else self.record(revision)], 1
        count = self._index.count(key, end)
        if count_only or not count:
            return [], count
        pairs = self._limited(self._index.live(key, end), limit)
        if keys_only:
            return [self._key_only(name) for name, _ in pairs], count
        return self._overlay.load_all(revision for _, revision in pairs), count

    def at(
        self, main: int, key: bytes, end: bytes, limit: int, count_only: bool, keys_only: bool
    ) -> tuple[list[bytes], int]:
        """KeyValues and count of what existed at an older revision."""
        self.ranges_total += 1
        pairs = list(self._index.live_at(key, end, main))
        if count_only:
            return [], len(pairs)
        kvs = self._overlay.load_all(revision for _, revision in self._limited(pairs, limit))
        return [KeyValueView(kv).without_value() for kv in kvs] if keys_only else kvs, len(pairs)

    def page(self, main: int, key: bytes, end: bytes, keys_max: int, size_bytes_max: int) -> list[bytes]:
        """The first KeyValues of an interval at a revision, at least one if there is one."""
        kvs: list[bytes] = []
        size_bytes = 0
        for _, revision in self._index.live_at(key, end, main):
            kvs.append(self.record(revision))
            size_bytes += len(kvs[-1])
            if len(kvs) >= keys_max or size_bytes >= size_bytes_max:
                break
        return kvs

    @staticmethod
    def _limited(
        pairs: Iterator[tuple[bytes, int]] | list[tuple[bytes, int]], limit: int
    ) -> Iterator[tuple[bytes, int]] | list[tuple[bytes, int]]:
        return islice(pairs, limit) if limit > 0 else pairs

    def _key_only(self, key: bytes) -> bytes:
        found = self._index.get_latest(key)
        if found is None:
            raise KeyError(key)
        return encode(key, found.created, found.modified >> SUB_BITS, found.version, lease=self._leases.get(key, 0))


def check_revision(revision: int, current: int, compacted: int) -> None:
    """Refuse a revision that cannot be read (the compacted one itself can).

    Raises:
        FutureRevisionError: it is after ``current``.
        CompactedError: it is before ``compacted``.
    """
    if revision > current:
        raise FutureRevisionError
    if revision < compacted:
        raise CompactedError(compacted)


class RangePages:
    """An interval at one revision, read piece by piece; made by ``Store.pages``."""

    def __init__(self, reader: Reader, key: bytes, end: bytes, revision: int, count: int) -> None:
        self._reader = reader
        self._key = key
        self._end = end
        self.revision = revision
        """Main revision that every piece is read at."""
        self.count = count
        """Number of keys in the interval at that revision."""
        self._left = count

    def next_page(self, compacted: int, keys_max: int, size_bytes_max: int) -> list[bytes]:
        """The next KeyValues: at most ``keys_max``, and no more once they exceed ``size_bytes_max``.

        Raises:
            CompactedError: the revision was compacted since the last piece (``compacted`` is the store's).
        """
        if self.done:
            return []
        if self.revision < compacted:
            raise CompactedError(compacted)
        kvs = self._reader.page(self.revision, self._key, self._end, keys_max, size_bytes_max)
        self._left -= len(kvs)
        if self._left:
            self._key = key_of(kvs[-1]) + b"\x00"
        return kvs

    @property
    def done(self) -> bool:
        """Whether the interval is read to its end."""
        return self._left == 0
