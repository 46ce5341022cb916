"""What a turn has for a group of watchers: pieces that fit in a response, and their events, encoded once for all.

    for piece in pieces(batch):
        events = Events(piece, store.record)
        events.all(watcher.prev_kv, bytes_max)

Leaves out: who watches (``index``) and who falls behind (``hub``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from raftkv.server.watch import messages
from raftkv.server.watch.index import Watcher
from raftkv.storage.mvcc_txn import Change
from raftkv.storage.revision import SUB_BITS

Batch = list[tuple[int, list[Change]]]
"""Changes by main revision, in order."""

RESPONSE_BYTES: Final = 256 * 1024
"""Bytes of events after which the next revision of a turn goes into another response; clients limit its size."""


def pieces(batch: Batch) -> Iterator[Batch]:
    """A batch in pieces that fit in a response; a revision is never split."""
    piece: Batch = []
    size_bytes = 0
    for revision, changes in batch:
        if size_bytes > RESPONSE_BYTES:
            yield piece
            piece, size_bytes = [], 0
        piece.append((revision, changes))
        size_bytes += sum(len(change[1]) for change in changes)
    yield piece


class Events:
    """The events of a piece, encoded once for all who want them, when the first of them does.

    Arguments:
        piece: what happened.
        record: reads a previous value.
    """

    __slots__ = ("_changes", "_is_too_large", "_joined", "_plain", "_record", "_with_prev", "first")

    def __init__(self, piece: Batch, record: Callable[[int], bytes]) -> None:
        self.first = piece[0][0]
        self._changes = [(revision, change) for revision, changes in piece for change in changes]
        self._record = record
        self._plain: list[bytes] = []
        self._with_prev: list[bytes] = []
        self._is_too_large = False
        self._joined: dict[bool, bytes] = {}

    def all(self, prev_kv: bool, bytes_max: int) -> list[bytes] | None:
        """Return all of them; None when previous values make them larger than that."""
        if not prev_kv:
            if not self._plain:
                self._plain = [messages.event(kv, is_delete) for _, (_, kv, is_delete, _) in self._changes]
            return self._plain
        if not self._with_prev and not self._is_too_large:
            self._with_prev = self._encode_with_prev(bytes_max)
            self._is_too_large = not self._with_prev
        return self._with_prev or None

    def _encode_with_prev(self, bytes_max: int) -> list[bytes]:
        events: list[bytes] = []
        for revision, (key, kv, is_delete, previous) in self._changes:
            if bytes_max < 0:
                return []
            if previous >> SUB_BITS == revision:
                previous = self._before(revision, key)
            events.append(messages.event(kv, is_delete, self._record(previous) if previous else None))
            bytes_max -= len(events[-1])
        return events

    def _before(self, revision: int, key: bytes) -> int:
        """The value that a key had before a revision that put and then deleted it, as in etcd: not the one between."""
        for main, change in self._changes:
            if main == revision and change[0] == key:
                return change[3]
        return 0

    def joined(self, prev_kv: bool, events: list[bytes]) -> bytes:
        """Return all of them, as one."""
        found = self._joined.get(prev_kv)
        if found is None:
            found = self._joined[prev_kv] = b"".join(events)
        return found

    def wanted(self, watcher: Watcher) -> list[int] | None:
        """Which of them a watcher wants; None for all."""
        if watcher.start_revision <= self.first and not (watcher.no_put or watcher.no_delete):
            return None
        return [
            number
            for number, (revision, change) in enumerate(self._changes)
            if revision >= watcher.start_revision and watcher.wants(change[2])
        ]
