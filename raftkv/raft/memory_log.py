"""The part of the log that is on disk, as the core reads it: the ``MemoryLog`` protocol and ``MemoryLog``.

The core never writes: the caller appends what a ``Ready`` hands out, here and to the disk, and says so
(``RawNode.on_append_durable``). ``MemoryLog`` keeps the entries since the last compaction in memory; production fills
it from the WAL at start and keeps it beside the WAL, tests use it alone.

::

    index      1 2 3 4 5 | 6 7 8 9          compact(5) drops 1-5 but remembers the term of 5,
                         ^ first_index()    so that an append that follows 5 can still be checked

Invariants: entries are contiguous; the term of ``first_index() - 1`` is known; the snapshot is never older than what
was compacted, because a follower that needs compacted entries gets the snapshot instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from .errors import CompactedError, InvariantError, SnapshotOutOfDateError, UnavailableError
from .types import ConfState, Entry, HardState, SnapshotMeta

ENTRY_OVERHEAD_BYTES = 16
"""Size of an entry beside its data where sizes are limited: its term, index, type and framing."""


LOOKED_AT = 1_024
"""Entries that are looked at at a time while the limit of a message is not reached."""


def size_of(entries: Sequence[Entry]) -> int:
    """Return the size in bytes of entries where sizes are limited: data plus overhead."""
    return sum([len(entry.data) for entry in entries]) + ENTRY_OVERHEAD_BYTES * len(entries)


def limit_size(entries: list[Entry], max_size_bytes: int) -> list[Entry]:
    """Return the longest prefix that fits, but at least one entry.

    Arguments:
        entries: not empty; returned itself if all of it fits.
        max_size_bytes: limit of data and overhead.
    """
    if size_of(entries) <= max_size_bytes:
        return entries
    size = 0
    for count, entry in enumerate(entries):
        size += len(entry.data) + ENTRY_OVERHEAD_BYTES
        if size > max_size_bytes and count > 0:
            return entries[:count]
    return entries[:1] if size > max_size_bytes else entries


@mypyc_attr(allow_interpreted_subclasses=True)
class MemoryLog:
    """A ``MemoryLog`` that the caller appends to."""

    def __init__(self, hard_state: HardState | None = None, conf_state: ConfState | None = None) -> None:
        """Make an empty log.

        Arguments:
            hard_state: what was persisted last.
            conf_state: the configuration as of the applied index that the core is started with.
        """
        self._hard_state = hard_state or HardState()
        self._conf_state = conf_state or ConfState()
        self._snapshot = SnapshotMeta(conf_state=self._conf_state)
        # Position just before the first entry that is kept.
        self._offset = 0
        self._offset_term = 0
        self._entries: list[Entry] = []
        self.size_bytes = 0
        """Data and overhead of the entries that are kept; it costs nothing to ask."""

    def initial_state(self) -> tuple[HardState, ConfState]:
        """Implement ``MemoryLog.initial_state``."""
        return self._hard_state, self._conf_state

    def set_hard_state(self, hard_state: HardState) -> None:
        """Keep what was persisted."""
        self._hard_state = hard_state

    def set_conf_state(self, conf_state: ConfState) -> None:
        """Keep the configuration as of the applied index, for the next start."""
        self._conf_state = conf_state

    def first_index(self) -> int:
        """Implement ``MemoryLog.first_index``."""
        return self._offset + 1

    def last_index(self) -> int:
        """Implement ``MemoryLog.last_index``."""
        return self._offset + len(self._entries)

    def term(self, index: int) -> int:
        """Implement ``MemoryLog.term``."""
        at = index - self._offset
        if at <= 0:
            if at == 0:
                return self._offset_term
            raise CompactedError(f"term of {index}: the log begins at {self._offset + 1}")
        if at > len(self._entries):
            raise UnavailableError(f"term of {index}: the log ends at {self.last_index()}")
        return self._entries[at - 1].term

    def entries(self, low: int, high: int, max_size_bytes: int) -> list[Entry]:
        """Implement ``MemoryLog.entries``."""
        if low <= self._offset:
            raise CompactedError(f"entry {low}: the log begins at {self._offset + 1}")
        if high > self.last_index() + 1:
            raise UnavailableError(f"entry {high - 1}: the log ends at {self.last_index()}")
        start = low - self._offset - 1
        end = start + high - low
        found = self._entries[start : min(end, start + LOOKED_AT)]
        # As much work as what is returned: a member that is far behind is sent all of a long log, a message at a time.
        size = size_of(found)
        while size <= max_size_bytes and start + len(found) < end:
            more = self._entries[start + len(found) : min(end, start + len(found) + LOOKED_AT)]
            size += size_of(more)
            found += more
        return limit_size(found, max_size_bytes) if size > max_size_bytes else found

    def snapshot(self) -> SnapshotMeta:
        """Implement ``MemoryLog.snapshot``."""
        return self._snapshot

    def append(self, entries: Sequence[Entry]) -> None:
        """Append entries, replacing everything from the first of them on; what was compacted is passed over."""
        if not entries:
            return
        first, last = entries[0].index, entries[-1].index
        if last <= self._offset:
            return
        if first <= self._offset:
            entries = entries[self._offset + 1 - first :]
            first = self._offset + 1
        at = first - self._offset - 1
        if at > len(self._entries):
            raise InvariantError(f"append at {first} leaves a hole: the log ends at {self.last_index()}")
        if at < len(self._entries):
            self.size_bytes -= size_of(self._entries[at:])
            del self._entries[at:]
        self._entries.extend(entries)
        self.size_bytes += size_of(entries)

    def compact(self, index: int) -> None:
        """Drop the entries up to and including ``index``, which must have been applied."""
        if index <= self._offset:
            raise CompactedError(f"compact to {index}: the log begins at {self._offset + 1}")
        if index > self.last_index():
            raise InvariantError(f"compact to {index}: the log ends at {self.last_index()}")
        self._offset_term = self.term(index)
        self.size_bytes -= size_of(self._entries[: index - self._offset])
        del self._entries[: index - self._offset]
        self._offset = index

    def create_snapshot(self, index: int, conf_state: ConfState) -> SnapshotMeta:
        """Name a snapshot of the state after an entry, and return it.

        Arguments:
            index: of the entry.
            conf_state: the configuration of that moment.

        Raises:
            SnapshotOutOfDateError: there is one as new.
        """
        if index <= self._snapshot.index:
            raise SnapshotOutOfDateError(f"snapshot at {index}: there is one at {self._snapshot.index}")
        if index > self.last_index():
            raise InvariantError(f"snapshot at {index}: the log ends at {self.last_index()}")
        self._snapshot = SnapshotMeta(index, self.term(index), conf_state)
        return self._snapshot

    def apply_snapshot(self, meta: SnapshotMeta) -> None:
        """Replace everything by a snapshot received from the leader.

        Raises:
            SnapshotOutOfDateError: there is one as new.
        """
        if self._snapshot.index != 0 and meta.index <= self._snapshot.index:
            raise SnapshotOutOfDateError(f"snapshot at {meta.index}: there is one at {self._snapshot.index}")
        self._snapshot = meta
        self._conf_state = meta.conf_state
        self._offset = meta.index
        self._offset_term = meta.term
        self._entries = []
        self.size_bytes = 0
