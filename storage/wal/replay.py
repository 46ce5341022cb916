"""Replay of a log: the fold of its records, in order, into hard state, entries and snapshot markers.

Owns the meaning of the sequence, as pure code: no file, no offset. ``wal.py`` feeds it every record and gives the
place to the errors it raises.

    records                                  log afterwards
    entry 1, entry 2, entry 3                1 2 3
    entry 2'                                 1 2'           an overwrite truncates what was after it
    marker at 2', entry 3'                   1 2' 3'        a marker on the log: state up to 2' is saved elsewhere
    marker at 9                              (9 | nothing)  a snapshot from the leader: the log begins anew
    entry 10                                 (9 | 10)

Refused, because no correct member writes it: an index with a gap before it, an entry at or below the commit index or
a marker, a term that falls, a marker or commit index that goes back.
"""

from __future__ import annotations

from raftkv.raft.types import Entry, HardState, SnapshotMeta

from .record import Metadata, Record, SegmentHead


class ReplayError(Exception):
    """An error that says why a record cannot follow those before it."""


class LogReplay:
    """The state of a log after the records fed so far.

    Invariants: ``entries`` is contiguous and begins at ``first_index``; ``last_index`` is the index of its last entry,
    or, while it is empty, of the marker or of the log before ``first_index``.

    Arguments:
        first_index: of the first entry that may come.
        marker_max: the log ends before the first marker beyond this index; None: it goes to its end.
    """

    def __init__(self, first_index: int, marker_max: int | None = None) -> None:
        self._marker_max = marker_max
        self._is_over = False
        self.first_index = first_index
        self.last_index = first_index - 1
        self.entries: list[Entry] = []
        self.hard_state = HardState()
        self.snapshot = SnapshotMeta()
        self.markers: list[SnapshotMeta] = []

    def feed(self, record: Record) -> None:
        """Fold one record in.

        Raises:
            ReplayError: it cannot follow those before it.
        """
        if self._marker_max is not None and isinstance(record, SnapshotMeta) and record.index > self._marker_max:
            self._is_over = True
        if self._is_over:
            return
        if isinstance(record, Entry):
            self._entry(record)
        elif isinstance(record, HardState):
            self._hard_state(record)
        elif isinstance(record, SnapshotMeta):
            self._marker(record)
        elif isinstance(record, SegmentHead | Metadata):
            raise ReplayError("a record of a segment's head is not at its head")

    def _entry(self, entry: Entry) -> None:
        index, entries = entry.index, self.entries
        # A leader had this member overwrite what another one had it append (paper section 5.3).
        if index != self.last_index + 1:
            self._truncate(index)
        # Terms never fall along a log (Log Matching, paper section 5.3).
        if entry.term < (entries[-1].term if entries else self._term_before_first(index)):
            raise ReplayError(f"entry {index} has term {entry.term}, below the term of the entry before it")
        entries.append(entry)
        self.last_index = index

    def _truncate(self, index: int) -> None:
        """Make the log end before ``index``."""
        if index > self.last_index + 1:
            raise ReplayError(f"entry {index} follows entry {self.last_index}")
        if index <= max(self.hard_state.commit, self.snapshot.index):
            raise ReplayError(f"entry {index} overwrites what is committed")
        self._drop_from(index)

    def _drop_from(self, index: int) -> None:
        del self.entries[max(index - self.first_index, 0) :]
        self.first_index = min(self.first_index, index)
        self.last_index = index - 1

    def _term_before_first(self, index: int) -> int:
        # The entry before the first one behind a marker is the last one of the snapshot.
        return self.snapshot.term if index == self.snapshot.index + 1 else 0

    def _hard_state(self, state: HardState) -> None:
        if state.term < self.hard_state.term or state.commit < self.hard_state.commit:
            raise ReplayError(f"{state} follows {self.hard_state}")
        self.hard_state = state

    def _marker(self, meta: SnapshotMeta) -> None:
        if meta.index < self.snapshot.index:
            raise ReplayError(f"the snapshot marker {meta.index} follows the marker {self.snapshot.index}")
        # The leader's snapshot is from beyond this log, or this log diverged before it: nothing of it is of use.
        if not self._contains(meta):
            self.entries.clear()
            self.first_index = meta.index + 1
            self.last_index = meta.index
        # The head of every segment repeats the last marker: it is listed once.
        if meta != self.snapshot:
            self.markers.append(meta)
        self.snapshot = meta

    def _contains(self, meta: SnapshotMeta) -> bool:
        """Return whether the log as it is goes through the marker; a leader's snapshot may replace a diverged log."""
        # The marker in the head of the first kept segment lies before the entries of it: the log goes through it.
        if meta.index < self.first_index:
            return meta.index <= self.last_index
        position = meta.index - self.first_index
        return position < len(self.entries) and self.entries[position].term == meta.term

    def entries_after(self, meta: SnapshotMeta) -> list[Entry]:
        """Return the entries behind a marker.

        Raises:
            ReplayError: entries between the marker and the log are missing.
        """
        if meta.index + 1 < self.first_index:
            raise ReplayError(f"the log begins at entry {self.first_index}, the state ends at entry {meta.index}")
        return self.entries[meta.index + 1 - self.first_index :]

    def final_hard_state(self) -> HardState:
        """Return the hard state, brought up to the last marker: a snapshot stands for committed entries.

        The two may have been appended apart, with the crash between them. A vote belongs to its term.

        Raises:
            ReplayError: more was committed than the log holds: its tail is lost.
        """
        state, meta = self.hard_state, self.snapshot
        if state.commit > max(self.last_index, meta.index):
            raise ReplayError(f"the log ends at entry {self.last_index}, but entry {state.commit} was committed")
        # A vote of an earlier term than the snapshot's says nothing about the snapshot's term.
        vote = state.vote if meta.term <= state.term else 0
        return HardState(max(state.term, meta.term), vote, max(state.commit, meta.index))
