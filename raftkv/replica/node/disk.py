"""Makes Readys durable: writes the log, and syncs it inline, by the kernel in the background, or on a thread.

This module has the only calls of ``WAL.append`` and ``WAL.sync`` while a member runs. Batches become durable in the
order of their submission, and their callback runs on the event loop, never before the fsync that covers them returned.

A short fsync is cheapest inline. A long one would block the loop. So while the usual sync (the median, which a burst of
slow syncs does not change) takes longer than ``INLINE_SYNC_MAX_S``, the kernel syncs in the background
(``KernelSync``), and all batches that arrive meanwhile share the next sync. Slow syncs come in bursts, for example
while the database is written too. So after a sync that took ``SLOW_SYNC_S`` the kernel syncs for ``SLOW_S``; each time
that the loop then tries again and soon meets another slow sync, that time doubles (``SyncTimes``). The kernel also
syncs while a commit of the database has taken longer than ``BUSY_S``, because a sync would wait for megabytes of
another file.

The thread does what takes long to write, however short syncs are: batches of megabytes, deletions of segments. It also
does everything else on systems where the kernel cannot sync in this way, and while a failpoint is armed, which must act
at the place where it is reached. A thread costs more than the kernel: about twenty system calls, and two threads that
compete for one interpreter. With the kernel a put takes 0.78 of the processor time that it takes with a thread at one
client, 0.88 at 100 clients, 0.96 at 100 connections with 10 clients each.

A failed write or sync is final: after fsync reported an error the kernel may have dropped the dirty pages, so a retry
could acknowledge data that is not on disk. The member stops.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Protocol

from mypy_extensions import mypyc_attr

from raftkv.histograms import DISK_S, Buckets
from raftkv.raft.log import limit_size, size_of
from raftkv.raft.types import Entry, HardState, SnapshotMeta
from raftkv.storage import failpoints
from raftkv.storage.failpoints import failpoint

INLINE_SYNC_MAX_S: Final = 0.001
"""Usual duration of a sync, in seconds, up to which it runs on the event loop."""

SLOW_SYNC_S: Final = 0.005
"""Duration in seconds above which a sync is slow."""

SLOW_S: Final = 0.25
"""Seconds for which the kernel does the syncs after a slow one, at first."""

SLOW_MAX_S: Final = 16.0
"""Maximum of that time, which doubles while slow syncs soon repeat."""

RELAPSE_S: Final = 2.0
"""A slow sync within this time after the end of that period means that slow syncs continue."""

BUSY_S: Final = 0.01
"""Duration of a database commit, in seconds, after which the kernel does the syncs."""

INLINE_BYTES_MAX: Final = 64 * 1024
"""Maximum size of a batch that is synced inline: a larger one can take a disk a hundred times as long."""

SHORT_BYTES_MAX: Final = 1024 * 1024
"""Total size above which batches go to the thread: checksums and writing would block the loop."""

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
"""A larger batch is written as several frames; every prefix of them is a valid log."""

_STEP_MIN_S: Final = 0.000_01
_STEP_SHARE: Final = 0.05
"""Fraction by which one sync moves the estimate of the median (with a minimum step)."""


class Log(Protocol):
    """The part of the write-ahead log used here."""

    def append(self, hard_state: HardState | None, entries: Sequence[Entry]) -> None:
        """Write records; they are not durable before ``sync``.

        Arguments:
            hard_state: ``None``: unchanged.
            entries: entries after those written before.
        """

    def save_snapshot(self, meta: SnapshotMeta, hard_state: HardState | None = None) -> None:
        """Record what is durable elsewhere.

        Arguments:
            meta: the position up to which everything is durable.
            hard_state: written with the marker, unless ``None``.
        """

    def release(self, index: int) -> int:
        """Drop segments below an index."""

    def sync(self) -> None:
        """Make everything durable."""

    def start_sync(self, start: Callable[[int], bool]) -> bool:
        """Start to make everything durable; return whether a sync is in progress (otherwise it is done).

        Arguments:
            start: starts to sync a descriptor; returns whether a sync is in progress.
        """

    def end_sync(self, finish: Callable[[], None]) -> None:
        """End the started sync.

        Arguments:
            finish: waits for the sync, and raises its error.
        """


class BesideSync(Protocol):
    """The part of ``KernelSync`` used here."""

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the sync is finished."""

    def start(self, fd: int) -> bool:
        """Start to sync a descriptor; return whether a sync is in progress."""

    def finish(self) -> None:
        """Wait for the sync, and raise its error."""

    def close(self) -> None:
        """Release its resources."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Batch:
    """The records of one Ready, and the actions after they are durable.

    Arguments:
        hard_state, entries: the records.
        must_sync: whether they must be durable.
        done: called when they are.
        size_bytes: size of the entries, if the caller has counted them.
    """

    __slots__ = ("done", "entries", "hard_state", "must_sync", "size_bytes")
    is_short: ClassVar[bool] = True
    """Whether the time to write it depends only on its size; otherwise it goes to the thread, however short syncs are.
    """

    def __init__(
        self,
        hard_state: HardState | None,
        entries: Sequence[Entry],
        must_sync: bool,
        done: Callable[[], None],
        size_bytes: int | None = None,
    ) -> None:
        self.hard_state = hard_state
        self.entries = entries
        self.must_sync = must_sync
        self.done = done
        self.size_bytes = size_of(entries) if size_bytes is None else size_bytes

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


class Marker(Batch):
    """A marker that everything up to ``meta`` is durable in the database; the earlier log is released."""

    __slots__ = ("meta",)
    is_short = False  # deleting a segment of 64 MiB takes about 30 ms

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
    """A marker that starts the log again after a received database, and the log entries that came with it."""

    __slots__ = ("meta",)
    is_short = False  # writing it syncs

    def __init__(
        self, meta: SnapshotMeta, hard_state: HardState, entries: Sequence[Entry], done: Callable[[], None]
    ) -> None:
        super().__init__(hard_state, entries, True, done)
        self.meta = meta

    def write(self, log: Log) -> None:
        """Write the marker, after which the received database is valid."""
        failpoint("raftBeforeSaveSnap")
        log.save_snapshot(self.meta, self.hard_state if not self.entries else None)
        if self.entries:
            super().write(log)
        log.sync()
        failpoint("raftAfterSaveSnap")


class SyncTimes:
    """Statistics of sync durations, which decide whether the loop may wait for the next sync."""

    def __init__(self) -> None:
        self._usual_s = 0.0
        self._slow_until = -math.inf
        self._slow_s = SLOW_S

    def is_fast(self, now: float) -> bool:
        """Return whether a sync that starts now should be short."""
        return self._usual_s < INLINE_SYNC_MAX_S and now > self._slow_until

    def note(self, started: float, ended: float) -> None:
        """Record the duration of a sync.

        Arguments:
            started, ended: times of one clock, the same for all calls.
        """
        seconds = ended - started
        if seconds > SLOW_SYNC_S:
            if started > self._slow_until:  # it should have been short
                is_relapse = started < self._slow_until + RELAPSE_S
                self._slow_s = min(2 * self._slow_s, SLOW_MAX_S) if is_relapse else SLOW_S
            self._slow_until = ended + self._slow_s
        step_s = max(_STEP_MIN_S, self._usual_s * _STEP_SHARE)
        self._usual_s += step_s if seconds > self._usual_s else -step_s


class Disk:
    """Makes batches durable in order.

    Arguments:
        log: the open write-ahead log.
        loop: the member's event loop.
        on_failure: called on the loop with the error that ends the member.
        observe_sync: called with the seconds of each sync (a metric).
        beside: syncs while the loop goes on; None: the thread does. ``close`` closes it. Such a sync is taken to last
            until the loop hears of its end.
        busy_since_s: when a write of something large to the same device began, by ``time.monotonic``; infinity: none
            is under way.

    Attributes:
        observer: called in the same way, while the dashboard is open.
    """

    def __init__(
        self,
        log: Log,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[BaseException], None],
        observe_sync: Callable[[float], None],
        beside: BesideSync | None = None,
        busy_since_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._log = log
        self._busy_since_s = busy_since_s
        self._loop = loop
        self._on_failure = on_failure
        self._observe_sync = observe_sync
        self.observer: Callable[[float], None] | None = None
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self.writes = Buckets(DISK_S)
        """Durations of writing the batches of one sync, in seconds."""
        self.outstanding = 0
        """Number of batches submitted and not yet durable."""
        self._beside = beside
        self._is_refused = False
        """Whether the kernel has refused a sync: it is not tried again, because the loop would do each one."""
        self._syncing: list[Batch] | None = None
        """Written batches that the kernel is syncing; nothing is written meanwhile."""
        self._gathered: list[Batch] = []
        """Batches that arrived since."""
        self._sync_started = 0.0
        if beside is not None:
            loop.add_reader(beside.fileno(), self._synced)
        self._times = SyncTimes()
        self._worker = threading.Thread(target=self._run, name="raftkv-wal", daemon=True)
        self._worker.start()

    def submit(self, batch: Batch) -> None:
        """Make a batch durable, then call its ``done`` on the loop (possibly before this returns)."""
        is_small = batch.is_short and batch.size_bytes <= INLINE_BYTES_MAX
        if self.outstanding == 0 and is_small and self._is_fast():
            self._write((batch,))
            batch.done()
            return
        self.outstanding += 1
        if self._syncing is not None:
            self._gathered.append(batch)
        # Batches of the thread come first: only one of the two writes the log at a time.
        elif self.outstanding > 1 or not self._go_beside([batch]):
            self._leave_to_thread([batch])

    def _is_fast(self) -> bool:
        return self._times.is_fast(time.perf_counter()) and time.monotonic() - self._busy_since_s() <= BUSY_S

    def _go_beside(self, batches: list[Batch]) -> bool:
        """Write batches and let the kernel sync them, if they are suitable; return whether it does."""
        if self._beside is None or self._is_refused or failpoints.armed or not _are_short(batches):
            return False
        must_sync = self._write_to_log(batches)
        self._syncing = batches
        self._sync_started = time.perf_counter()
        if not must_sync or not self._log.start_sync(self._start):
            self._report()
        return True

    def _start(self, fd: int) -> bool:
        self._is_refused = self._beside is None or not self._beside.start(fd)
        return not self._is_refused

    def _synced(self) -> None:
        """Handle the end of the kernel's sync: report, and continue with the gathered batches."""
        if self._syncing is None or self._beside is None:
            return
        try:
            self._log.end_sync(self._beside.finish)
            self.note_sync(self._sync_started)
            self._report()
        except Exception as error:
            self._syncing, self._gathered = None, []
            self._on_failure(error)

    def _report(self) -> None:
        """Report the synced batches. Batches that their callbacks submit come after the gathered ones."""
        for batch in self._syncing or ():
            self.outstanding -= 1
            batch.done()
        gathered, self._gathered, self._syncing = self._gathered, [], None
        if gathered and not self._go_beside(gathered):
            self._leave_to_thread(gathered)

    def _leave_to_thread(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._queue.put(batch)

    def close(self) -> None:
        """Finish the submitted batches and end the thread; callbacks still pending on the loop are not awaited."""
        if self._beside is not None:
            self._loop.remove_reader(self._beside.fileno())
            if self._syncing is not None:
                self._end(self._beside)
            self._beside.close()
        self._queue.put(None)
        self._worker.join()

    def _end(self, beside: BesideSync) -> None:
        """Wait for the kernel's sync; the thread writes the gathered batches."""
        try:
            self._log.end_sync(beside.finish)
        except Exception as error:
            self._on_failure(error)
        else:
            self._leave_to_thread(self._gathered)

    def _write(self, batches: Sequence[Batch]) -> None:
        if self._write_to_log(batches):
            started = time.perf_counter()
            self._log.sync()
            self.note_sync(started)

    def _write_to_log(self, batches: Sequence[Batch]) -> bool:
        """Write batches; return whether one of them must be durable."""
        began, must_sync = time.perf_counter(), False
        for batch in batches:
            batch.write(self._log)
            must_sync = must_sync or batch.must_sync
        self.writes.observe(time.perf_counter() - began)
        return must_sync

    def note_sync(self, started: float) -> None:
        """Count a finished sync, and record its duration.

        Arguments:
            started: start of the sync, by ``time.perf_counter``.
        """
        ended = time.perf_counter()
        seconds = ended - started
        self._times.note(started, ended)
        self._observe_sync(seconds)
        if self.observer is not None:
            self.observer(seconds)

    def _run(self) -> None:
        """Run the thread: take all waiting batches, write them, sync once, report; after a failure write no more."""
        is_last = failed = False
        while not is_last:
            batches, is_last = self._take()
            if not batches or failed:
                continue
            try:
                self._write(batches)
            except Exception as error:
                failed = True
                self._loop.call_soon_threadsafe(self._on_failure, error)
            else:
                self._loop.call_soon_threadsafe(self._finish, batches)

    def _take(self) -> tuple[list[Batch], bool]:
        """Take all waiting batches; return them, and whether the thread ends after them."""
        batches: list[Batch] = []
        item = self._queue.get()
        while item is not None:
            batches.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batches, False
        return batches, True

    def _finish(self, batches: list[Batch]) -> None:
        try:
            for batch in batches:
                self.outstanding -= 1
                batch.done()
        except Exception as error:
            self._on_failure(error)


def _are_short(batches: Sequence[Batch]) -> bool:
    """Return whether writing the batches, one after the other, blocks the loop only briefly."""
    return all(batch.is_short for batch in batches) and sum(batch.size_bytes for batch in batches) <= SHORT_BYTES_MAX
