"""Where a Ready becomes durable: the write-ahead log, synced inline, by the kernel, or by a thread of its own.

Owns the only calls of ``WAL.append`` and ``WAL.sync`` while a member runs. Batches become durable in the order they
are submitted, and their callback runs on the event loop, never before the fsync that covers them returned.

A short fsync is cheapest done inline. A long one would hold the loop, so while the usual sync (the median, which a
burst of slow ones does not move) is above ``INLINE_SYNC_MAX_S`` the kernel syncs beside the loop (``KernelSync``), and
all that gathered meanwhile shares the next sync. Slow syncs come in bursts, as when the database is written too. So
after one that took ``SLOW_SYNC_S`` the kernel syncs for ``SLOW_S``; each time that the loop then tries again and soon
meets another slow one, that time doubles (``SyncTimes``). The kernel also syncs while a commit of the database has
gone on for ``BUSY_S``, because a sync would wait for megabytes of another file.

The thread does what takes long to write, however short syncs are: batches of megabytes, deletions of segments. It also
does everything else on systems where the kernel cannot sync in this way, and while a failpoint is armed, which must act
in the place where it is passed. A thread costs more than the kernel: some twenty system calls, and two threads that
want one interpreter. With the kernel a put takes 0.78 of the processor time that it takes with a thread at one client,
0.88 at 100 clients, 0.96 at 100 connections with 10 clients each.

A failed write or sync is final: after fsync reported an error the kernel may have dropped the dirty pages, so trying
again could acknowledge what is not on disk. The member stops.
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
"""Usual duration of a sync up to which it is done on the event loop."""

SLOW_SYNC_S: Final = 0.005
"""A sync that takes longer is slow."""

SLOW_S: Final = 0.25
"""How long syncs are left to the kernel after a slow one, at first."""

SLOW_MAX_S: Final = 16.0
"""And at most: the time doubles while slow syncs come again soon."""

RELAPSE_S: Final = 2.0
"""A slow sync so soon after that time means that they go on."""

BUSY_S: Final = 0.01
"""How long a commit of the database may have gone on before syncs are left to the kernel."""

INLINE_BYTES_MAX: Final = 64 * 1024
"""A batch above this is not synced inline however short syncs are: so much can take a disk a hundred times as long."""

SHORT_BYTES_MAX: Final = 1024 * 1024
"""Batches above this in total go to the thread: checksums and writing would hold the loop."""

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

    def start_sync(self, start: Callable[[int], bool]) -> bool:
        """Begin to make everything durable; whether that is under way, or done.

        Arguments:
            start: begins to sync a descriptor; whether that is under way.
        """

    def end_sync(self, finish: Callable[[], None]) -> None:
        """End what was begun.

        Arguments:
            finish: waits for it, and raises its failure.
        """


class BesideSync(Protocol):
    """The part of ``KernelSync`` used here."""

    def fileno(self) -> int:
        """Return a descriptor that can be read when the sync is finished."""

    def start(self, fd: int) -> bool:
        """Begin to sync a descriptor; whether that is under way."""

    def finish(self) -> None:
        """Wait for the sync, and raise its failure."""

    def close(self) -> None:
        """Give back what it holds."""


@mypyc_attr(allow_interpreted_subclasses=True)
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


class Marker(Batch):
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
    is_short = False  # writing it syncs

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


class SyncTimes:
    """What is known of how long syncs take: whether the loop may wait for the next."""

    def __init__(self) -> None:
        self._usual_s = 0.0
        self._slow_until = -math.inf
        self._slow_s = SLOW_S

    def is_fast(self, now: float) -> bool:
        """Return whether a sync that begins now should be short."""
        return self._usual_s < INLINE_SYNC_MAX_S and now > self._slow_until

    def note(self, started: float, ended: float) -> None:
        """Learn from a sync.

        Arguments:
            started, ended: of one clock, as the others.
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
        observer: called likewise, while the dashboard is open.
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
        """Durations of writing what is synced together, in seconds."""
        self._outstanding = 0
        self._beside = beside
        self._is_refused = False
        """The kernel has refused a sync: it is not asked again, or the loop would do each one."""
        self._syncing: list[Batch] | None = None
        """Batches that are written and that the kernel syncs; nothing is written meanwhile."""
        self._gathered: list[Batch] = []
        """Batches that came since."""
        self._sync_started = 0.0
        if beside is not None:
            loop.add_reader(beside.fileno(), self._synced)
        self._times = SyncTimes()
        self._worker = threading.Thread(target=self._run, name="raftkv-wal", daemon=True)
        self._worker.start()

    @property
    def outstanding(self) -> int:
        """Batches submitted and not yet durable."""
        return self._outstanding

    def submit(self, batch: Batch) -> None:
        """Make a batch durable, then call its ``done`` on the loop (possibly before this returns)."""
        is_small = batch.is_short and batch.size_bytes <= INLINE_BYTES_MAX
        if self._outstanding == 0 and is_small and self._is_fast():
            self._write((batch,))
            batch.done()
            return
        self._outstanding += 1
        if self._syncing is not None:
            self._gathered.append(batch)
        # What the thread has comes first: the log is written by one of them at a time.
        elif self._outstanding > 1 or not self._go_beside([batch]):
            self._leave_to_thread([batch])

    def _is_fast(self) -> bool:
        return self._times.is_fast(time.perf_counter()) and time.monotonic() - self._busy_since_s() <= BUSY_S

    def _go_beside(self, batches: list[Batch]) -> bool:
        """Write batches and have the kernel sync them, if that suits them; whether so."""
        if self._beside is None or self._is_refused or failpoints.armed or not _are_short(batches):
            return False
        self._write_to_log(batches)
        self._syncing = batches
        self._sync_started = time.perf_counter()
        if not any(batch.must_sync for batch in batches) or not self._log.start_sync(self._start):
            self._report()
        return True

    def _start(self, fd: int) -> bool:
        self._is_refused = self._beside is None or not self._beside.start(fd)
        return not self._is_refused

    def _synced(self) -> None:
        """The kernel has synced: report, and go on with what gathered."""
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
        """What is under way is durable. What its callbacks submit comes behind what has gathered."""
        for batch in self._syncing or ():
            self._outstanding -= 1
            batch.done()
        gathered, self._gathered, self._syncing = self._gathered, [], None
        if gathered and not self._go_beside(gathered):
            self._leave_to_thread(gathered)

    def _leave_to_thread(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._queue.put(batch)

    def close(self) -> None:
        """Finish what was submitted and end the thread; callbacks still pending on the loop are not awaited."""
        if self._beside is not None:
            self._loop.remove_reader(self._beside.fileno())
            if self._syncing is not None:
                self._end(self._beside)
            self._beside.close()
        self._queue.put(None)
        self._worker.join()

    def _end(self, beside: BesideSync) -> None:
        """Wait for what the kernel syncs; what gathered is the thread's."""
        try:
            self._log.end_sync(beside.finish)
        except Exception as error:
            self._on_failure(error)
        else:
            self._leave_to_thread(self._gathered)

    def _write(self, batches: Sequence[Batch]) -> None:
        self._write_to_log(batches)
        if any(batch.must_sync for batch in batches):
            started = time.perf_counter()
            self._log.sync()
            self.note_sync(started)

    def _write_to_log(self, batches: Sequence[Batch]) -> None:
        began = time.perf_counter()
        for batch in batches:
            batch.write(self._log)
        self.writes.observe(time.perf_counter() - began)

    def note_sync(self, started: float) -> None:
        """Count a sync that has ended, and learn from it how long they take.

        Arguments:
            started: of ``time.perf_counter``.
        """
        ended = time.perf_counter()
        seconds = ended - started
        self._times.note(started, ended)
        self._observe_sync(seconds)
        if self.observer is not None:
            self.observer(seconds)

    def _run(self) -> None:
        """The thread: take everything that waits, write it, sync once, report; after a failure write nothing more."""
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
        """Take all batches that wait, and return whether the thread ends behind them."""
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
                self._outstanding -= 1
                batch.done()
        except Exception as error:
            self._on_failure(error)


def _are_short(batches: Sequence[Batch]) -> bool:
    """Return whether writing them, one after the other, does not hold the loop for long."""
    return all(batch.is_short for batch in batches) and sum(batch.size_bytes for batch in batches) <= SHORT_BYTES_MAX
