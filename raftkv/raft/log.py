"""The log of one member as the core sees it: the part on disk, the unstable tail, and the commit index.

::

    MemoryLog (on disk)          Unstable
    1 2 3 4 5 6 7 8        │ 9 10 11 12 13 14
        ▲   ▲        ▲     │         ▲  ▲      ▲
        │   applying │     │ in_progress │      last_index
        applied      committed            not yet in a Ready

``Unstable`` holds everything that no disk has confirmed: entries below ``in_progress`` were returned in a Ready and are
being written, the others wait for the next Ready. They are dropped here only when it is certain that the reader has
them and that no write in flight will overwrite them (``RawNode`` explains how that is known).

Invariants

1. ``applied <= applying <= committed <= last_index``; only ``last_index`` may go back.
2. Committed entries never change. Entries are returned for applying only when they are on this member's disk.
3. Unstable entries are contiguous from ``offset``; ``offset <= in_progress <= offset + len(entries)``.
4. With a pending snapshot no entries are returned for applying until it is installed.
5. ``last_index`` and ``last_term`` are those of the last entry (or of the snapshot, or of the last compacted entry).

THE PART ON DISK (``MemoryLog``)

The core never writes: the caller appends the entries of a ``Ready``, here and to the disk, and confirms that
(``RawNode.on_append_durable``). ``MemoryLog`` keeps the entries since the last compaction in memory; production fills
it from the WAL at start and keeps it in addition to the WAL, tests use it alone.

::

    index      1 2 3 4 5 | 6 7 8 9          compact(5) drops 1-5 but remembers the term of 5,
                         ^ first_index()    so that an append that follows 5 can still be checked

Invariants: entries are contiguous; the term of ``first_index() - 1`` is known; the snapshot is never older than the
compacted entries, because a follower that needs compacted entries gets the snapshot instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from .errors import (
    CompactedError,
    InvalidMessage,
    InvariantError,
    LogLostError,
    SnapshotOutOfDateError,
    UnavailableError,
)
from .types import INDEX_MAX, NO_LIMIT, ConfState, Entry, HardState, SnapshotMeta

ENTRY_OVERHEAD_BYTES = 16
"""Size of an entry without its data, in size limits: its term, index, type and framing."""


LOOKED_AT = 1_024
"""Number of entries examined at a time while the size limit of a message is not reached."""


def size_of(entries: Sequence[Entry]) -> int:
    """Return the size of entries for size limits, in bytes: data plus overhead."""
    return sum([len(entry.data) for entry in entries]) + ENTRY_OVERHEAD_BYTES * len(entries)


def limit_size(entries: list[Entry], max_size_bytes: int) -> list[Entry]:
    """Return the longest prefix that fits, but at least one entry.

    Arguments:
        entries: not empty; this list itself is returned if all of it fits.
        max_size_bytes: maximum size of data and overhead.
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
    """The durable part of the log, in memory. The caller appends to it, the core reads it."""

    def __init__(self, hard_state: HardState | None = None, conf_state: ConfState | None = None) -> None:
        """Create an empty log.

        Arguments:
            hard_state: the last persisted one.
            conf_state: the configuration as of the applied index with which the core starts.
        """
        self.hard_state = hard_state or HardState()
        """The persisted hard state."""
        self.conf_state = conf_state or ConfState()
        """The configuration as of the applied index, for the next start."""
        self._snapshot = SnapshotMeta(conf_state=self.conf_state)
        # Position just before the first kept entry.
        self._offset = 0
        self._offset_term = 0
        self._entries: list[Entry] = []
        self.size_bytes = 0
        """Data and overhead of the kept entries."""

    def first_index(self) -> int:
        """Return the index of the first kept entry."""
        return self._offset + 1

    def last_index(self) -> int:
        """Return the index of the last entry."""
        return self._offset + len(self._entries)

    def term(self, index: int) -> int:
        """Return the term at ``index``; raises ``CompactedError`` or ``UnavailableError`` if it is unknown."""
        at = index - self._offset
        if at <= 0:
            if at == 0:
                return self._offset_term
            raise CompactedError(f"term of {index}: the log begins at {self._offset + 1}")
        if at > len(self._entries):
            raise UnavailableError(f"term of {index}: the log ends at {self.last_index()}")
        return self._entries[at - 1].term

    def entries(self, low: int, high: int, max_size_bytes: int) -> list[Entry]:
        """Return the entries ``low <= index < high``, as many as fit, but at least one."""
        if low <= self._offset:
            raise CompactedError(f"entry {low}: the log begins at {self._offset + 1}")
        if high > self.last_index() + 1:
            raise UnavailableError(f"entry {high - 1}: the log ends at {self.last_index()}")
        start = low - self._offset - 1
        end = start + high - low
        found = self._entries[start : min(end, start + LOOKED_AT)]
        # Work in proportion to the result: a member that is far behind is sent a long log message by message.
        size = size_of(found)
        while size <= max_size_bytes and start + len(found) < end:
            more = self._entries[start + len(found) : min(end, start + len(found) + LOOKED_AT)]
            size += size_of(more)
            found += more
        return limit_size(found, max_size_bytes) if size > max_size_bytes else found

    def snapshot(self) -> SnapshotMeta:
        """Return the current snapshot."""
        return self._snapshot

    def append(self, entries: Sequence[Entry]) -> int:
        """Append entries, replacing everything from the first of them on; compacted entries are skipped.

        Returns:
            Size of the appended entries.
        """
        if not entries:
            return 0
        first, last = entries[0].index, entries[-1].index
        if last <= self._offset:
            return 0
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
        size_bytes = size_of(entries)
        self.size_bytes += size_bytes
        return size_bytes

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
        """Define a snapshot of the state after an entry, and return it.

        Arguments:
            index: index of the entry.
            conf_state: the configuration at that entry.

        Raises:
            SnapshotOutOfDateError: the current snapshot is as new or newer.
        """
        if index <= self._snapshot.index:
            raise SnapshotOutOfDateError(
                f"a snapshot at {index} is not newer than the log's, at {self._snapshot.index}"
            )
        if index > self.last_index():
            raise InvariantError(f"snapshot at {index}: the log ends at {self.last_index()}")
        self._snapshot = SnapshotMeta(index, self.term(index), conf_state)
        return self._snapshot

    def apply_snapshot(self, meta: SnapshotMeta) -> None:
        """Replace everything by a snapshot received from the leader.

        Raises:
            SnapshotOutOfDateError: the current snapshot is as new or newer.
        """
        if self._snapshot.index != 0 and meta.index <= self._snapshot.index:
            raise SnapshotOutOfDateError(
                f"a snapshot at {meta.index} is not newer than the log's, at {self._snapshot.index}"
            )
        self._snapshot = meta
        self.conf_state = meta.conf_state
        self._offset = meta.index
        self._offset_term = meta.term
        self._entries = []
        self.size_bytes = 0


REJECTED = -1
"""Result of ``maybe_append``: the logs do not match where the append begins."""


class Unstable:
    """The tail of the log, and perhaps a snapshot, that are not known to be durable."""

    def __init__(self, offset: int) -> None:
        self.entries: list[Entry] = []
        # entries[i] has index offset + i.
        self.offset = offset
        # First index that was not returned for writing yet.
        self.in_progress = offset
        self.snapshot: SnapshotMeta | None = None
        self.snapshot_in_progress = False

    def term(self, index: int) -> int | None:
        """Return the term at ``index`` if it is known here."""
        at = index - self.offset
        if 0 <= at < len(self.entries):
            return self.entries[at].term
        if self.snapshot is not None and self.snapshot.index == index:
            return self.snapshot.term
        return None

    def next_entries(self) -> list[Entry]:
        """Return the entries that were not returned for writing yet."""
        return self.entries[self.in_progress - self.offset :]

    def next_snapshot(self) -> SnapshotMeta | None:
        """Return the snapshot, if it was not returned for writing yet."""
        return None if self.snapshot_in_progress else self.snapshot

    def accept(self) -> None:
        """Record that all entries here have been returned for writing."""
        self.in_progress = self.offset + len(self.entries)
        self.snapshot_in_progress = self.snapshot is not None

    def stable_to(self, index: int, term: int) -> None:
        """Drop the entries up to ``index``: they are durable and no write in flight affects them.

        Does nothing if another entry is at ``index`` by now (it was overwritten meanwhile).

        Arguments:
            index: the last durable entry.
            term: term of that entry.
        """
        at = index - self.offset
        if not 0 <= at < len(self.entries) or self.entries[at].term != term:
            return
        del self.entries[: at + 1]
        self.offset = index + 1
        self.in_progress = max(self.in_progress, self.offset)

    def snapshot_stable_to(self, index: int) -> None:
        """Drop the snapshot at ``index``: it is installed and durable."""
        if self.snapshot is not None and self.snapshot.index == index:
            self.snapshot = None
            self.snapshot_in_progress = False

    def restore(self, snapshot: SnapshotMeta) -> None:
        """Replace everything by a snapshot."""
        self.entries = []
        self.offset = self.in_progress = snapshot.index + 1
        self.snapshot = snapshot
        self.snapshot_in_progress = False

    def truncate_and_append(self, entries: list[Entry]) -> None:
        """Append entries, replacing from the first of them on."""
        first = entries[0].index
        if first == self.offset + len(self.entries):
            self.entries.extend(entries)
            return
        if first <= self.offset:
            # Replaces entries that are already on disk: the next write truncates the log there.
            self.entries = list(entries)
            self.offset = first
        else:
            del self.entries[first - self.offset :]
            self.entries.extend(entries)
        # Later entries that are being written no longer count as returned for writing.
        self.in_progress = min(self.in_progress, first)


class RaftLog:
    """The log of one member: the part on disk, the unstable tail, and the commit index. Only the core changes it."""

    def __init__(self, reader: MemoryLog, max_applying_bytes: int) -> None:
        first, last = reader.first_index(), reader.last_index()
        self.reader = reader
        self.unstable = Unstable(last + 1)
        self.last_index = last
        self.last_term = reader.term(last)
        # Compacted entries had been applied, so they were committed.
        self.committed = self.applying = self.applied = first - 1
        self.max_applying_bytes = max_applying_bytes
        # Size of the entries returned for applying and not yet reported as applied, in total and per page:
        # (last index, size, payload). No more are returned at the limit.
        self.applying_bytes = 0
        self.applying_paused = False
        self._pages: deque[tuple[int, int, int]] = deque()
        # Size of the entries after those pages, as far as it was counted.
        self._waiting_bytes = 0
        self._counted_to = self.applying
        # The last slice made for an append message: followers at the same position share one list.
        self._slice_key = (0, 0, 0)
        self._slice_entries: list[Entry] = []
        self._slice_bytes = 0

    # -- terms -------------------------------------------------------------------------------------------------------

    def first_index(self) -> int:
        """Return the index of the first entry that can still be read."""
        snapshot = self.unstable.snapshot
        return self.reader.first_index() if snapshot is None else snapshot.index + 1

    def term(self, index: int) -> int:
        """Return the term at ``index``; raises ``CompactedError`` or ``UnavailableError`` outside what is known."""
        if index == self.last_index:
            return self.last_term
        term = self.unstable.term(index)
        if term is not None:
            return term
        if index > self.last_index:
            raise UnavailableError(f"term of {index}: the log ends at {self.last_index}")
        # The term just before the first entry is still known, for checking appends.
        if index + 1 < self.first_index():
            raise CompactedError(f"term of {index}: the log begins at {self.first_index()}")
        return self.reader.term(index)

    def term_or_zero(self, index: int) -> int:
        """Return the term at ``index``; 0 if unknown."""
        try:
            return self.term(index)
        except (CompactedError, UnavailableError):
            return 0

    def matches(self, index: int, term: int) -> bool:
        """Return whether an entry is in this log; then everything before it is equal too (paper section 5.3, Log
        Matching).

        Arguments:
            index, term: index and term of the entry.
        """
        if index == self.last_index:
            return term == self.last_term
        try:
            return self.term(index) == term
        except (CompactedError, UnavailableError):
            return False

    def is_up_to_date(self, index: int, term: int) -> bool:
        """Return whether another log is at least as up to date as this one (paper section 5.4.1).

        Arguments:
            index, term: index and term of the other log's last entry.
        """
        return term > self.last_term or (term == self.last_term and index >= self.last_index)

    def find_conflict_by_term(self, index: int, term: int) -> tuple[int, int]:
        """Return the latest position where a log with a known entry may match this one.

        Terms only grow along a log, so all indexes in between cannot match: one probe per term, not per entry. For the
        same reason only a few entries are compared, however long the log is.

        Arguments:
            index, term: index and term of the known entry of the other log.

        Returns:
            the largest index not above ``index`` whose term is not above ``term`` or unknown, and its term (0 if
                unknown).
        """
        try:
            ours = self.term(index)
        except (CompactedError, UnavailableError):
            return index, 0
        if ours <= term:
            return index, ours
        low, high = self.first_index() - 1, index
        if self.term(low) > term:
            return low - 1, 0
        while high - low > 1:
            middle = (low + high) // 2
            if self.term(middle) <= term:
                low = middle
            else:
                high = middle
        return low, self.term(low)

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, entries: list[Entry]) -> None:
        """Append contiguous entries, replacing conflicting ones; never touches committed entries.

        Raises:
            InvariantError: the entries would replace committed ones.
        """
        first = entries[0].index
        if first <= self.committed:
            raise InvariantError(f"append at {first} would replace committed entries (to {self.committed})")
        if first <= self.last_index:
            self._slice_key = (0, 0, 0)
        self.unstable.truncate_and_append(entries)
        last = entries[-1]
        self.last_index = last.index
        self.last_term = last.term

    def maybe_append(self, index: int, term: int, entries: list[Entry], commit: int) -> int:
        """Append a leader's entries, if they follow an entry of this log.

        Arguments:
            index, term: index and term of the entry that they follow.
            entries: contiguous from ``index + 1`` on; entries that are here already stay.
            commit: the leader's commit index.

        Returns:
            the last index covered, or ``REJECTED`` if this log does not have the preceding entry.

        Raises:
            InvalidMessage: the entries are not contiguous.
            InvariantError: an entry conflicts with a committed one.
        """
        if not self.matches(index, term):
            return REJECTED
        count = len(entries)
        last_new = index + count
        if count:
            self._check_contiguous(index, term, entries)
            if index == self.last_index:
                self.append(entries)
            else:
                self._append_new(entries)
        # Beyond last_new the logs may differ, even below the leader's commit index.
        self.commit_to(min(commit, last_new))
        return last_new

    def _append_new(self, entries: list[Entry]) -> None:
        # Entries that are here already stay (the message may be old: truncating would lose newer entries).
        for at, entry in enumerate(entries):
            if not self.matches(entry.index, entry.term):
                self.append(entries[at:])
                return

    @staticmethod
    def _check_contiguous(index: int, term: int, entries: list[Entry]) -> None:
        # Only the ends are compared: this costs nothing and detects a faulty sender.
        first, last = entries[0], entries[-1]
        if first.index != index + 1 or last.index != index + len(entries) or not term <= first.term <= last.term:
            raise InvalidMessage(f"append after {term}/{index} carries {first!r}..{last!r}")

    def commit_to(self, index: int) -> None:
        """Raise the commit index; a smaller one has no effect."""
        if index > self.committed:
            if index > self.last_index:
                if index > INDEX_MAX:
                    raise InvalidMessage(f"commit {index} is beyond any log")
                raise LogLostError(
                    f"the log ends at {self.last_index}, but entries up to {index} were committed with it: "
                    "it was corrupted, truncated or lost, or is an older copy"
                )
            self.committed = index

    def restore(self, snapshot: SnapshotMeta) -> None:
        """Replace the log by a snapshot; all of it is committed."""
        self.committed = snapshot.index
        self.unstable.restore(snapshot)
        self.last_index = snapshot.index
        self.last_term = snapshot.term
        self._slice_key = (0, 0, 0)

    # -- reading -----------------------------------------------------------------------------------------------------

    def entries(self, low: int, high: int, max_size_bytes: int) -> list[Entry]:
        """Return the entries ``low <= index < high`` in a new list, as many as fit, but at least one.

        Arguments:
            low, high: indexes.
            max_size_bytes: maximum size of data and overhead.

        Raises:
            CompactedError, UnavailableError: some of the entries are not here.
        """
        offset = self.unstable.offset
        if low >= offset:
            return limit_size(self.unstable.entries[low - offset : high - offset], max_size_bytes)
        if low < self.first_index():
            raise CompactedError(f"entry {low}: the log begins at {self.first_index()}")
        cut = min(high, offset)
        stable = self.reader.entries(low, cut, max_size_bytes)
        if cut == high or len(stable) < cut - low:
            return stable
        room = max_size_bytes - size_of(stable)
        tail = self.unstable.entries[: high - offset]
        # limit_size gives at least one entry, which here may be one too many.
        if len(tail[0].data) + ENTRY_OVERHEAD_BYTES > room:
            return stable
        return stable + limit_size(tail, room)

    def entries_to_send(self, low: int, max_size_bytes: int) -> tuple[list[Entry], int]:
        """Return the entries that fit in one message, and the size of their data in bytes.

        Followers at the same position get the same list object, so that the transport can encode it once.

        Arguments:
            low: index of the first entry.
            max_size_bytes: maximum size of data and overhead; at least one entry is returned.

        Raises:
            CompactedError: the first entry was compacted.
        """
        key = (low, self.last_index, self.last_term)
        if key != self._slice_key:
            entries = self.entries(low, self.last_index + 1, max_size_bytes)
            self._slice_key = key
            self._slice_entries = entries
            self._slice_bytes = sum([len(entry.data) for entry in entries])
        return self._slice_entries, self._slice_bytes

    # -- applying ----------------------------------------------------------------------------------------------------

    def max_appliable(self) -> int:
        """Return the last index that is committed and on this member's disk."""
        return min(self.committed, self.unstable.offset - 1)

    def has_next_committed(self) -> bool:
        """Return whether ``next_committed`` would return any entries."""
        return not self.applying_paused and self.unstable.snapshot is None and self.applying < self.max_appliable()

    def next_committed(self) -> list[Entry]:
        """Return the committed entries that were not returned yet, as many as the limit allows, and record that."""
        high = self.max_appliable()
        if self.applying_paused or self.unstable.snapshot is not None or self.applying >= high:
            return []
        entries = self.reader.entries(self.applying + 1, high + 1, self.max_applying_bytes - self.applying_bytes)
        if not entries:
            raise InvariantError(f"no entries in {self.applying + 1}..{high}")
        payload = sum([len(entry.data) for entry in entries])
        size = payload + ENTRY_OVERHEAD_BYTES * len(entries)
        last = entries[-1].index
        self.applying = last
        self._waiting_bytes = self._waiting_bytes - size if last < self._counted_to else 0
        self.applying_bytes += size
        self._pages.append((last, size, payload))
        # A page cut short by the limit means that the next entry does not fit until some are applied.
        self.applying_paused = self.applying_bytes >= self.max_applying_bytes or last < high
        return entries

    def unapplied_bytes(self) -> int:
        """Return the size of the entries that are committed, on this member's disk, and not applied.

        Calling this for each append costs nothing until returning entries pauses; then each entry is counted once.
        """
        if not self.applying_paused:
            return self.applying_bytes  # the next Ready returns the other committed entries
        high = self.max_appliable()
        if self._counted_to < self.applying:
            self._counted_to, self._waiting_bytes = self.applying, 0
        if self._counted_to < high:
            self._waiting_bytes += size_of(self.reader.entries(self._counted_to + 1, high + 1, NO_LIMIT))
            self._counted_to = high
        return self.applying_bytes + self._waiting_bytes

    def applied_to(self, index: int) -> int:
        """Record that the caller applied up to ``index``; return the payload bytes of the pages that this completes."""
        if index < self.applied or index > self.committed:
            raise InvariantError(f"applied {index} is outside {self.applied}..{self.committed}")
        self.applied = index
        self.applying = max(self.applying, index)
        payload = 0
        while self._pages and self._pages[0][0] <= index:
            _, size, page_payload = self._pages.popleft()
            self.applying_bytes -= size
            payload += page_payload
        self.applying_paused = self.applying_bytes >= self.max_applying_bytes
        return payload

    def unreported_bytes(self) -> int:
        """Return the payload of the entries that ``applied_to`` has not returned yet, committed or not."""
        low, high = self.applying + 1, self.last_index + 1
        rest = self.entries(low, high, NO_LIMIT) if low < high else []
        return sum([payload for _, _, payload in self._pages]) + sum([len(entry.data) for entry in rest])
