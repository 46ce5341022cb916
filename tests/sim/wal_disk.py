"""A simulated disk whose log is the production write-ahead log, on an in-memory file system.

Owns the bytes: frames, checksums, segments, cuts, release, and what reading a torn log back gives. As in the
production loop, a batch is written when its sync begins, and nothing is written while a sync is under way.

After a crash the log that the production code reads back must be one that a crash can leave: what was durable, and
of the batch that was being written a part from its beginning. The base class's ``LogView`` is the model; another
answer is a violation (D6).
"""

from __future__ import annotations

import random

from raftkv.errors import CorruptionError
from raftkv.raft.types import Entry, HardState, SnapshotMeta
from raftkv.storage.wal import WAL, Recovered
from tests.storage.wal.simdisk import SimDisk

from .clock import Scheduler
from .disk import Disk, DiskParameters, LogView, Record, SnapshotFile, frames
from .history import ViolationError
from .machine import StateImage

_DIRECTORY = "/wal"
_METADATA = b"simulated"


class WALDisk(Disk):
    """See the head of the module."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, parameters: DiskParameters) -> None:
        super().__init__(scheduler, rng, parameters)
        self._files = SimDisk()
        self._wal = WAL.create(_DIRECTORY, _METADATA, segment_bytes=parameters.segment_bytes, disk=self._files)
        self._batch: list[list[Record]] = []

    def boot(self, image: StateImage | None, records: list[Record]) -> None:
        """Begin with these records and this state, durable."""
        super().boot(image, records)
        self._append(records)
        self._wal.sync()

    def _begin_sync(self, records: list[list[Record]]) -> None:
        self._batch = records
        for write in records:
            self._append(write)

    def _append(self, records: list[Record]) -> None:
        """One write of the member's loop, frame by frame."""
        for frame in frames(records):
            if isinstance(frame[0], SnapshotMeta):
                self._wal.save_snapshot(frame[0])
            elif not isinstance(frame[0], SnapshotFile):
                entries = [record for record in frame if isinstance(record, Entry)]
                hard_state = frame[-1] if isinstance(frame[-1], HardState) else None
                self._wal.append(hard_state, entries)

    def _end_sync(self) -> None:
        self._wal.sync()
        self._batch = []
        self._wal.release(self.log.snapshot.index)

    def _lose(self, written: list[list[Record]]) -> None:
        """Cut the power (or just kill the process) and read the log back."""
        allowed = self._allowed()
        if self.parameters.torn_tail:
            self._files.power_cut(self._rng)
        else:
            self._files.kill()
        self._batch = []
        recovered = self._reopen()
        self.torn_count += recovered.repair is not None
        for view in allowed:
            if _same(view, recovered.hard_state, recovered.snapshot, recovered.entries):
                self.log = view
                return
        raise ViolationError("D6", f"read back {recovered}, allowed was one of {list(map(_describe, allowed))}")

    def _reopen(self) -> Recovered:
        segment_bytes = self.parameters.segment_bytes
        try:
            self._wal, recovered = WAL.open(_DIRECTORY, segment_bytes=segment_bytes, disk=self._files)
        except CorruptionError as error:
            raise ViolationError("D6", f"a crash alone made the log unreadable: {error}") from error
        return recovered

    def _allowed(self) -> list[LogView]:
        """What a crash now may leave, most first."""
        views = [self.log]
        for frame in [frame for write in self._batch for frame in frames(write)]:
            view = views[-1].copy()
            for record in frame:
                view.fold(record)
            views.append(view)
        return [_settled(view) for view in reversed(views)]


def _settled(view: LogView) -> LogView:
    """A view with its hard state brought up to the marker: a snapshot stands for committed entries."""
    state, meta = view.hard_state, view.snapshot
    vote = state.vote if meta.term <= state.term else 0
    settled = view.copy()
    settled.hard_state = HardState(max(state.term, meta.term), vote, max(state.commit, meta.index))
    return settled


def _same(view: LogView, hard_state: HardState, snapshot: SnapshotMeta, entries: list[Entry]) -> bool:
    return (view.hard_state, view.snapshot, view.entries) == (hard_state, snapshot, entries)


def _describe(view: LogView) -> str:
    return f"{view.hard_state} {view.snapshot} {view.entries}"
