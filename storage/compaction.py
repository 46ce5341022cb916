"""Compaction of the history, in slices that the owner fits between other work.

``compact(revision)`` takes effect at once for readers (the store refuses older revisions from then on) and is recorded
as ``scheduledCompactRev`` in the batch of the log entry that asked for it. The work follows in steps:

1. Visit the keys from which something could be dropped, some per step. What the index drops and is still in memory is
   forgotten there and never written, unless something older of the same key is on disk; the rest is collected for
   deletion on disk.
2. Send deletions along with the regular batches, at most ``DELETES_PER_COMMIT`` each, oldest first: neighbours on disk
   go together. (Key by key, each commit would change a page of the database for every record that it deletes: 1,000
   deletions of a history of 1,000 keys write 4 MiB instead of 0.4.)
3. With the last of them write ``finishedCompactRev``; when that is durable the compaction is done.

A crash loses nothing but progress: on disk ``scheduledCompactRev`` is ahead of ``finishedCompactRev``, the index is
rebuilt from what is left, and the same steps are gone through again. Deletions are the same whichever were done.
Hence the rule of step 1: what a crash leaves of a key must be the end of its history, without a hole.

    on disk: put 4        in memory: delete 9        compact(12) drops both

If 9 were forgotten in memory, a crash before 4 is deleted on disk would leave a key that exists again. So 9 is written,
and deleted after 4 or with it.

A read that takes long may hold the work back, for what was readable when it began (``hold``): the compaction is in
effect for all others, but nothing that the read may need is dropped until it lets go.

Compactions queue up in order; nothing here knows time or threads. One step of 500 keys, or of 1,000 revisions of few
keys, takes about 1 ms.
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
"""Revisions that a step drops: one key may have any number of them."""
COLLECTED_MAX: Final = 2_000_000
"""Deletions that are collected before they are sent, of 8 bytes each."""
_RUN: Final = 8_192
"""Deletions that are sorted at once: about 1 ms."""


class Deletions:
    """Revisions to delete on disk: collected in any order, then taken oldest first until none is left.

    They are sorted in runs, which are merged as they are taken, so neither end takes long. A revision and the mark of a
    tombstone are one integer.
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
        """Collect one."""
        self._filling.append(from_key(revision_key) << 1 | is_tombstone(revision_key))
        self.count += 1
        if len(self._filling) == _RUN:
            self._end_run()

    def _end_run(self) -> None:
        self._filling.sort()
        self._runs.append(array("Q", self._filling))
        self._filling = []

    def take(self, count_max: int) -> list[bytes]:
        """Return the revision keys of the oldest; from the first call to the last nothing is collected."""
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
        # Keys that were visited in part, and of which something is to be deleted on disk.
        self.on_disk: set[bytes] = set()
        self.is_sent = False


class Hold:
    """The right of a long read to what is readable now: compactions later than a revision wait with their work.

    ``Compactor.hold`` makes one.
    """

    __slots__ = ("_holds", "revision")

    def __init__(self, holds: dict[Hold, None], revision: int) -> None:
        self._holds = holds
        self.revision = revision

    @property
    def is_held(self) -> bool:
        """Whether everything readable when it was made still is."""
        return self in self._holds

    def end(self) -> None:
        """Let compactions go on; harmless when repeated."""
        self._holds.pop(self, None)


class Compactor:
    """The compactions of one store, oldest first, and the reads that hold them back."""

    def __init__(self, index: Index, overlay: Overlay) -> None:
        self._index = index
        self._overlay = overlay
        self._jobs: deque[_Job] = deque()
        self._holds: dict[Hold, None] = {}
        self.dropped_total = 0
        """Revisions dropped since the store was opened."""

    @property
    def is_idle(self) -> bool:
        """Whether everything asked for is done (and durable)."""
        return not self._jobs

    def schedule(self, revision: int, on_done: Callable[[], None] | None) -> None:
        """Queue a compaction.

        Arguments:
            revision: main revision to compact at, later than all before.
            on_done: called when the compaction is durable.
        """
        self._jobs.append(_Job(revision, on_done))

    def hold(self, compacted: int) -> Hold:
        """Keep what is readable with this compact revision, the store's, from being dropped."""
        hold = Hold(self._holds, compacted)
        self._holds[hold] = None
        return hold

    def reset(self) -> list[Callable[[], None]]:
        """Drop everything queued and end all holds; return the callbacks of the compactions that were not done."""
        # Another database is in place: what a read wanted to keep is gone anyway, and its view says so.
        self._holds.clear()
        waiting = [job.on_done for job in self._jobs if job.on_done is not None]
        self._jobs.clear()
        return waiting

    def step(self, keys_max: int = KEYS_PER_STEP) -> bool:
        """Do a bounded piece of work.

        Returns:
            ``False`` when there is nothing to do before a commit is reported or a hold ended, or at all.
        """
        job = self._next_job()
        # A later compaction has the greater revision, so what holds this one back holds that one too.
        if job is None or self._is_held(job.revision):
            return False
        if self._visit(job, keys_max):
            return True
        return self._send(job)

    def _is_held(self, revision: int) -> bool:
        # The compact revision never goes back, so the oldest hold is the strictest.
        oldest = next(iter(self._holds), None)
        return oldest is not None and oldest.revision < revision

    def _next_job(self) -> _Job | None:
        return next((job for job in self._jobs if not job.is_sent), None)

    def _visit(self, job: _Job, keys_max: int) -> bool:
        # Taken when the work begins: every key that the compaction could shorten is among them. Keys that change later
        # have newer revisions, which only a later compaction can drop.
        if job.dirty is None:
            job.dirty = self._index.take_dirty()
        # Enough collected: all of that is sent before more is, or it would grow with the database.
        if not job.dirty or not job.deletions.takes_more:
            return False
        room = DROPS_PER_STEP
        for _ in range(min(keys_max, len(job.dirty))):
            # Popped as it is visited: the work may pause after any key, and begins where it stopped.
            key, _none = job.dirty.popitem()
            dropped = self._index.compact_key(key, job.revision, room)
            is_on_disk = self._drop(job, dropped, key in job.on_disk)
            self.dropped_total += len(dropped)
            room -= len(dropped)
            if not room:
                job.dirty[key] = None  # there may be more of it
                if is_on_disk:
                    job.on_disk.add(key)
                break
        return True

    def _drop(self, job: _Job, dropped: list[bytes], is_on_disk: bool) -> bool:
        """Drop revisions of a key, oldest first; whether any of them has to be deleted on disk.

        Arguments:
            job: what they are dropped for.
            dropped: their revision keys.
            is_on_disk: whether something older of the key has to be deleted there.
        """
        for revision_key in dropped:
            # On disk, or on its way there in the batch that is being committed. Deletions go with a later batch, and a
            # batch appends before it deletes, so the record is there when its deletion comes.
            if is_on_disk or not self._overlay.discard(revision_key):
                # From here on all of them, in this order: see the head of the module.
                is_on_disk = True
                job.deletions.add(revision_key)
        return is_on_disk

    def _send(self, job: _Job) -> bool:
        batch = self._overlay.pending
        # The batch being filled has its share; the next share waits for the next batch.
        if batch.deletes:
            return False
        batch.deletes = job.deletions.take(DELETES_PER_COMMIT)
        # That was the last share.
        if not job.dirty and not job.deletions.count:
            self._finish(job)
        # Do not wait for the owner's timer: a large compaction is many commits.
        elif not self._overlay.is_busy:
            self._overlay.commit()
        return not self._overlay.is_busy

    def _finish(self, job: _Job) -> None:
        failpoint("compactBeforeSetFinishedCompact")
        job.is_sent = True
        finished = schema.encode_integer(job.revision)
        # In the batch of the last deletions, so "finished" is never on disk before them.
        self._overlay.pending.values[schema.META, schema.META_FINISHED_COMPACT] = finished

        def done() -> None:
            failpoint("compactAfterSetFinishedCompact")
            # ``reset`` came between: another database is in place, and its callbacks were handed over.
            if job not in self._jobs:
                return
            self._jobs.remove(job)
            if job.on_done is not None:
                job.on_done()

        self._overlay.flush(done)
