"""Where a Ready becomes durable: the write-ahead log, written inline or by a thread of its own.

Owns the only calls of ``WAL.append`` and ``WAL.sync`` while a member runs. Batches become durable in the order they
are submitted, and their callback runs on the event loop, never before the fsync that covers them returned.

A short fsync is cheaper done inline: handing a batch to a thread and back costs some twenty system calls of two
threads that want one interpreter, more than the sync itself on a fast disk. A long one would hold the loop, so while
the usual sync (the median, which a burst of slow ones does not move) is above ``INLINE_SYNC_MAX_S`` batches go to the
thread, where all that gathered during one sync share the next. Slow ones come in bursts, as when the database is
written too: after one of ``SLOW_SYNC_S`` batches go to the thread for ``SLOW_S``.

A failed write or sync is final: after fsync reported an error the kernel may have dropped the dirty pages, so trying
again could acknowledge what is not on disk. The member stops.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Protocol

from raftkv.raft.memory_log import limit_size, size_of
from raftkv.raft.types import Entry, HardState, SnapshotMeta
from raftkv.server.histograms import DISK_S, Buckets
from raftkv.storage.failpoints import failpoint

INLINE_SYNC_MAX_S: Final = 0.001
"""Usual duration of a sync up to which it is done on the event loop."""

SLOW_SYNC_S: Final = 0.005
SLOW_S: Final = 0.25

INLINE_BYTES_MAX: Final = 1024 * 1024
"""A batch above this goes to the thread however short syncs are: its own checksums and writing would hold the loop."""

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
"""A larger batch is written as several frames, of which every prefix is a log as good as any."""

_STEP_MIN_S: Final = 0.000_01
_STEP_SHARE: Final = 0.05
"""How far one sync moves the estimate of the median: this share of it, at least the minimum."""


class Log(Protocol):
    """The part of the write-ahead log used here."""

    def append(self, hard_state: HardState | None, entries: Sequence[Entry]) -> None:
        """Write records; they are not durable before ``sync``.

        Arguments:
            hard_state: None: it has not changed.
            entries: behind those written before.
        """

    def save_snapshot(self, meta: SnapshotMeta, hard_state: HardState | None = None) -> None:
        """Mark what is durable elsewhere.

        Arguments:
            meta: the point up to which it is.
            hard_state: written with the marker, unless None.
        """

    def release(self, index: int) -> int:
        """Drop segments below an index."""

    def sync(self) -> None:
        """Make everything durable."""


class Batch:
    """One Ready's records and what to do once they are durable."""

    __slots__ = ("done", "entries", "hard_state", "must_sync", "size_bytes")
    is_short: ClassVar[bool] = True
    """Whether writing it takes as long as its bytes do; if not, it is the thread's, however short syncs are."""

    def __init__(
        self, hard_state: HardState | None, entries: Sequence[Entry], must_sync: bool, done: Callable[[], None]
    ) -> None:
        self.hard_state = hard_state
        self.entries = entries
        self.must_sync = must_sync
        self.done = done
        self.size_bytes = size_of(entries)

    def write(self, log: Log) -> None:
        """Write the records."""
        entries = self.entries
        while self.size_bytes > FRAME_BYTES_MAX:
            frame = limit_size(list(entries), FRAME_BYTES_MAX)
            if len(frame) == len(entries):
                break
            log.append(None, frame)
            entries = entries[len(frame) :]
        log.append(self.hard_state, entries)


class Mark(Batch):
    """A marker that everything up to ``meta`` is durable in the database; the log before it is released."""

    __slots__ = ("meta",)
    is_short = False  # to delete a segment of 64 MiB takes some 30 ms

    def __init__(self, meta: SnapshotMeta, done: Callable[[], None]) -> None:
        super().__init__(None, (), True, done)
        self.meta = meta

    def write(self, log: Log) -> None:
        """Write the marker, then delete the segments before it."""
        log.save_snapshot(self.meta)
        failpoint("raftBeforeWALRelease")
        log.release(self.meta.index)
        failpoint("raftAfterWALRelease")


class Restore(Batch):
    """A marker that the log begins anew behind a received database, and what of the log came with it."""

    __slots__ = ("meta",)

    def __init__(
        self, meta: SnapshotMeta, hard_state: HardState, entries: Sequence[Entry], done: Callable[[], None]
    ) -> None:
        super().__init__(hard_state, entries, True, done)
        self.meta = meta

    def write(self, log: Log) -> None:
        """Write the marker, which from then on says that the received database holds."""
        failpoint("raftBeforeSaveSnap")
        log.save_snapshot(self.meta, self.hard_state if not self.entries else None)
        if self.entries:
            super().write(log)
        log.sync()
        failpoint("raftAfterSaveSnap")


class Disk:
    """Makes batches durable in order.

    Arguments:
        log: the open write-ahead log.
        loop: the member's event loop.
        on_failure: called on the loop with the error that ends the member.
        observe_sync: called with the seconds of each sync (a metric).

    Attributes:
        observer: called likewise, while somebody looks.
    """

    def __init__(
        self,
        log: Log,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[BaseException], None],
        observe_sync: Callable[[float], None],
    ) -> None:
        self._log = log
        self._loop = loop
        self._on_failure = on_failure
        self._observe_sync = observe_sync
        self.observer: Callable[[float], None] | None = None
        self._queue: queue.SimpleQueue[Batch | threading.Event | None] = queue.SimpleQueue()
        self.writes = Buckets(DISK_S)
        """Durations of writing what is synced together, in seconds."""
        self._outstanding = 0
        self._usual_s = 0.0
        self._slow_until = 0.0
        self._thread = threading.Thread(target=self._run, name="raftkv-wal", daemon=True)
        self._thread.start()

    @property
    def outstanding(self) -> int:
        """Batches handed to the thread and not yet durable."""
        return self._outstanding

    def submit(self, batch: Batch) -> None:
        """Make a batch durable, then call its ``done`` on the loop (possibly before this returns)."""
        is_short = batch.is_short and batch.size_bytes <= INLINE_BYTES_MAX
        if is_short and self._outstanding == 0 and self._is_fast():
            self._write((batch,))
            batch.done()
            return
        self._outstanding += 1
        self._queue.put(batch)

    def _is_fast(self) -> bool:
        return self._usual_s < INLINE_SYNC_MAX_S and time.perf_counter() > self._slow_until

    def drain(self) -> None:
        """Block until everything submitted is durable: before a snapshot replaces the log. Callbacks run later."""
        drained = threading.Event()
        self._queue.put(drained)
        drained.wait()

    def close(self) -> None:
        """Finish what was submitted and end the thread; callbacks still pending on the loop are not awaited."""
        self._queue.put(None)
        self._thread.join()

    def _write(self, batches: Sequence[Batch]) -> None:
        began = time.perf_counter()
        for batch in batches:
            batch.write(self._log)
        started = time.perf_counter()
        self.writes.observe(started - began)
        if any(batch.must_sync for batch in batches):
            self._log.sync()
            ended = time.perf_counter()
            seconds = ended - started
            if seconds > SLOW_SYNC_S:
                self._slow_until = ended + SLOW_S
            step_s = max(_STEP_MIN_S, self._usual_s * _STEP_SHARE)
            self._usual_s += step_s if seconds > self._usual_s else -step_s
            self._observe_sync(seconds)
            if self.observer is not None:
                self.observer(seconds)

    def _run(self) -> None:
        """The thread: take everything that waits, write it, sync once, report.

        After a failure nothing more is written, but who waits for the queue to drain must not wait for ever.
        """
        failed = False
        while True:
            batches, after = self._take()
            if batches and not failed:
                try:
                    self._write(batches)
                except Exception as error:
                    failed = True
                    self._loop.call_soon_threadsafe(self._on_failure, error)
                else:
                    self._loop.call_soon_threadsafe(self._finish, batches)
            if after is None:
                return
            after.set()

    def _take(self) -> tuple[list[Batch], threading.Event | None]:
        """All batches that wait, and what to do after them: set the event, or end the thread."""
        batches: list[Batch] = []
        item = self._queue.get()
        while isinstance(item, Batch):
            batches.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batches, threading.Event()
        return batches, item

    def _finish(self, batches: list[Batch]) -> None:
        self._outstanding -= len(batches)
        for batch in batches:
            batch.done()
