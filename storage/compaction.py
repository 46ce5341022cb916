"""Compaction of the history, in short steps between other work of the owner.

``compact(revision)`` takes effect at once for readers (the store refuses older revisions from then on). The revision is
recorded as ``scheduledCompactRev`` in the batch of the log entry that requested the compaction. The work follows in
steps:

1. Visit the keys that may have something to drop, a few per step. A dropped revision that is still in memory is removed
   from the batch and never written, unless an older revision of the same key is on disk. All other dropped revisions
   are collected for deletion on disk.
2. Add these deletions to the regular batches, at most ``DELETES_PER_COMMIT`` each, oldest first, so that neighbours on
   disk are deleted together. (If deleted key by key, each record would touch its own page of the database: deleting
   1,000 records of a history of 1,000 keys would write 4 MiB instead of 0.4 MiB.)
3. Write ``finishedCompactRev`` with the last deletions. When that batch is durable, the compaction is done.

A crash loses only progress: on disk ``scheduledCompactRev`` is then ahead of ``finishedCompactRev``, the index is
rebuilt from the remaining records, and the same steps run again. They drop the same revisions, however many deletions
were done before the crash. This requires the exception in step 1: the records of a key that remain after a crash must
be the end of its history, without gaps.

    on disk: put 4        in memory: delete 9        compact(12) drops both

If 9 were removed from memory, a crash before 4 is deleted on disk would bring the key back to life. So 9 is written,
and deleted together with 4 or later.

A long read may delay the work with ``hold``: the compaction is in effect for all other readers, but no revision that
the read may need is dropped until the hold ends.

Compactions are queued in order. This module uses neither clocks nor threads. One step of 500 keys, or of 1,000
revisions of few keys, takes about 1 ms.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from raftkv.storage import schema
from raftkv.storage.failpoints import failpoint
from raftkv.storage.index import Index
from raftkv.storage.overlay import Overlay
from raftkv.storage.revision import from_key, is_tombstone, to_key, to_tombstone_key

DELETES_PER_COMMIT: Final = 1000
KEYS_PER_STEP: Final = 500
DROPS_PER_STEP: Final = 1000
"""Revisions dropped per step at most: one key may have any number of them."""
COLLECTED_MAX: Final = 2_000_000
"""Deletions collected before they are sent, 8 bytes each."""
_RUN: Final = 8_192
"""Deletions sorted at once: about 1 ms."""


class Deletions:
    """Revisions to delete on disk: added in any order, then taken oldest first until none is left.

    They are sorted in runs, and the runs are merged while they are taken, so neither adding nor taking is slow. A
    revision and its tombstone mark are stored as one integer.
    """

    __slots__ = ("_filling", "_merged", "_runs", "count")

    def __init__(self) -> None:
        self._filling: list[int] = []
        self._runs: list[array[int]] = []
        self._merged: Iterator[int] | None = None
        self.count = 0

    @property
    def takes_more(self) -> bool:
        """Whether more may be collected now."""
        return self._merged is None and self.count < COLLECTED_MAX

    def add(self, revision_key: bytes) -> None:
        """Add a revision."""
        self._filling.append(from_key(revision_key) << 1 | is_tombstone(revision_key))
        self.count += 1
        if len(self._filling) == _RUN:
            self._end_run()

    def _end_run(self) -> None:
        self._filling.sort()
        self._runs.append(array("Q", self._filling))
        self._filling = []

    def take(self, count_max: int) -> list[bytes]:
        """Remove and return the oldest revision keys; nothing may be added from the first call until all are taken."""
        if self._merged is None:
            self._end_run()
            self._merged, self._runs = heapq.merge(*self._runs), []
        taken = list(islice(self._merged, count_max))
        self.count -= len(taken)
        if not self.count:
            self._merged = None
        return [to_tombstone_key(number >> 1) if number & 1 else to_key(number >> 1) for number in taken]


class _Job:
    __slots__ = ("deletions", "dirty", "is_sent", "on_disk", "on_done", "revision")

    def __init__(self, revision: int, on_done: Callable[[], None] | None) -> None:
        self.revision = revision
        self.on_done = on_done
        self.dirty: dict[bytes, None] | None = None
        self.deletions = Deletions()
        # Partly visited keys that have revisions to delete on disk.
        self.on_disk: set[bytes] = set()
        self.is_sent = False


class Hold:
    """A long read's protection of the revisions that are readable now: later compactions do not drop them.

    ``Compactor.hold`` creates one.
    """

    __slots__ = ("_holds", "revision")

    def __init__(self, holds: dict[Hold, None], revision: int) -> None:
        self._holds = holds
        self.revision = revision

    @property
    def is_held(self) -> bool:
        """Whether everything that was readable at the creation of this hold still is."""
        return self in self._holds

    def end(self) -> None:
        """Let compactions continue. May be called more than once."""
        self._holds.pop(self, None)


class Compactor:
    """The queued compactions of one store, oldest first, and the holds of long reads."""

    def __init__(self, index: Index, overlay: Overlay) -> None:
        self._index = index
        self._overlay = overlay
        self._jobs: deque[_Job] = deque()
        self._holds: dict[Hold, None] = {}
        self.dropped_total = 0
        """Revisions dropped since the store was opened."""

    @property
    def is_idle(self) -> bool:
        """Whether all requested compactions are done and durable."""
        return not self._jobs

    def schedule(self, revision: int, on_done: Callable[[], None] | None) -> None:
        """Queue a compaction.

        Arguments:
            revision: main revision to compact at; greater than all earlier ones.
            on_done: called when the compaction is durable.
        """
        self._jobs.append(_Job(revision, on_done))

    def hold(self, compacted: int) -> Hold:
        """Protect the revisions that are readable at the store's current compact revision, ``compacted``."""
        hold = Hold(self._holds, compacted)
        self._holds[hold] = None
        return hold

    def reset(self) -> list[Callable[[], None]]:
        """Drop everything queued and end all holds; return the callbacks of the compactions that were not done."""
        # Another database is in place: the revisions that the reads protected are gone, and their views report that.
        self._holds.clear()
        waiting = [job.on_done for job in self._jobs if job.on_done is not None]
        self._jobs.clear()
        return waiting

    def step(self, keys_max: int = KEYS_PER_STEP) -> bool:
        """Do a bounded amount of work.

        Returns:
            ``False`` when there is no work, or none until a commit is reported or a hold ends.
        """
        job = next((job for job in self._jobs if not job.is_sent), None)
        # Later compactions have greater revisions, so a hold that blocks this one also blocks them.
        if job is None or self._is_held(job.revision):
            return False
        if self._visit(job, keys_max):
            return True
        return self._send(job)

    def _is_held(self, revision: int) -> bool:
        # The compact revision never goes back, so the oldest hold is the strictest.
        oldest = next(iter(self._holds), None)
        return oldest is not None and oldest.revision < revision

    def _visit(self, job: _Job, keys_max: int) -> bool:
        # Taken when the work begins: the set has every key that the compaction could shorten. Keys that change later
        # get newer revisions, which only a later compaction can drop.
        if job.dirty is None:
            job.dirty = self._index.take_dirty()
        # Enough collected: send these deletions before collecting more, or the list would grow with the database.
        if not job.dirty or not job.deletions.takes_more:
            return False
        room = DROPS_PER_STEP
        for _ in range(min(keys_max, len(job.dirty))):
            # Each key is removed from the set when it is visited, so the work can pause after any key.
            key, _none = job.dirty.popitem()
            dropped = self._index.compact_key(key, job.revision, room)
            is_on_disk = self._drop(job, dropped, key in job.on_disk)
            self.dropped_total += len(dropped)
            room -= len(dropped)
            if not room:
                job.dirty[key] = None  # the key may have more to drop
                if is_on_disk:
                    job.on_disk.add(key)
                break
        return True

    def _drop(self, job: _Job, dropped: list[bytes], is_on_disk: bool) -> bool:
        """Drop revisions of a key, oldest first; return whether any of them must be deleted on disk.

        Arguments:
            job: compaction that drops them.
            dropped: their revision keys.
            is_on_disk: whether an older revision of the key must be deleted on disk.
        """
        for revision_key in dropped:
            # The record is on disk, or in the batch that is being committed. The deletion goes into a later batch, and
            # a batch writes its records before its deletions, so the record exists when it is deleted.
            if is_on_disk or not self._overlay.discard(revision_key):
                # All following revisions must be deleted on disk too, in this order: see the module docstring.
                is_on_disk = True
                job.deletions.add(revision_key)
        return is_on_disk

    def _send(self, job: _Job) -> bool:
        batch = self._overlay.pending
        # The batch being filled already has its share of deletions; the rest waits for the next batch.
        if batch.deletes:
            return False
        batch.deletes = job.deletions.take(DELETES_PER_COMMIT)
        # These were the last deletions.
        if not job.dirty and not job.deletions.count:
            self._finish(job)
        # Do not wait for the owner's timer: a large compaction takes many commits.
        elif not self._overlay.is_busy:
            self._overlay.commit()
        return not self._overlay.is_busy

    def _finish(self, job: _Job) -> None:
        failpoint("compactBeforeSetFinishedCompact")
        job.is_sent = True
        finished = schema.encode_integer(job.revision)
        # In the batch of the last deletions, so that "finished" is never on disk before them.
        self._overlay.pending.values[schema.META, schema.META_FINISHED_COMPACT] = finished

        def done() -> None:
            failpoint("compactAfterSetFinishedCompact")
            # ``reset`` was called meanwhile: another database is in place, and ``reset`` returned the callbacks.
            if job not in self._jobs:
                return
            self._jobs.remove(job)
            if job.on_done is not None:
                job.on_done()

        self._overlay.flush(done)
