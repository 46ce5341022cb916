"""A cache bounded by bytes: the least recently used goes first. Usable by any thread.

cache = Memory(64 * 1024 * 1024)
cache.put(digest, blob, len(blob))
cache.get(digest)                   # None: it is not here
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class Memory(Generic[V]):
    """Keep chunks in memory, the least recently used least long.

    Arguments:
        limit_bytes: of all values together; a value that alone is larger is not kept.

    Attributes:
        size_bytes: of the values that are kept.
        hits, misses: of ``get``.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0
        self._items: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: str) -> bool:
        return key in self._items

    def get(self, key: str) -> V | None:
        """Return a value, which is now the most recently used; None: it is not here."""
        with self._lock:
            found = self._items.get(key)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._items.move_to_end(key)
            return found[0]

    def put(self, key: str, value: V, size_bytes: int) -> None:
        """Keep a value, and drop others until it fits."""
        with self._lock:
            replaced = self._items.pop(key, None)
            if replaced is not None:
                self.size_bytes -= replaced[1]
            if size_bytes > self.limit_bytes:
                return
            self._items[key] = (value, size_bytes)
            self.size_bytes += size_bytes
            while self.size_bytes > self.limit_bytes:
                _, (_, dropped_bytes) = self._items.popitem(last=False)
                self.size_bytes -= dropped_bytes
