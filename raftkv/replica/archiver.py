"""The archiver of a member's log: every closed segment is copied to an archive before it may be deleted.

    each second    mark: time, applied index, revision  ->  WAL/<open segment>.marks
    closed         <segment>, <segment>.marks           ->  the archive (a directory, or a command for each)
    timeout, stop  the open segment is closed, to limit the loss if the disk fails

Invariants:

- Writes never wait for the archive: copies run on a thread or in a separate process while the log continues.
- A segment is deleted only after it is archived, or when the segments that wait for a failing archive exceed the
  budget. The archive then has a gap: an error in the log names the entries, and ``raftkv_wal_archive_gaps_total``
  counts it.
- A damaged segment is a gap too, and is found when it is archived, not when it is needed.
- Segments are archived in order. Each is retried until it succeeds, first after 1 s, later after up to 60 s.

The command is run by ``/bin/sh``. ``%p`` is replaced by the path of the file and ``%f`` by its name, each as one word
even with blanks or quotes in it, and ``%%`` by a percent sign. Exit code 0 means that the copy is durable. The command
may run twice for the same file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raftkv.config import ServerConfig
from raftkv.errors import StorageError, explain
from raftkv.loop.scheduler import on_thread
from raftkv.replica.node.disk import Batch, Disk, Log
from raftkv.storage import mvcc
from raftkv.storage.datadir import remove_unneeded
from raftkv.storage.wal import WAL, WALSpaceError
from raftkv.storage.wal.archive import MARKS_SUFFIX, ArchiveDirectory, Mark, Progress, directory_name
from raftkv.storage.wal.disk import RealDisk, WALCorruptError
from raftkv.storage.wal.segment import SegmentName, check_segment

_log = logging.getLogger(__name__)

BEAT_S: Final = 1.0
"""Seconds between two marks: the precision of a restore to a time."""

RETRY_FIRST_S: Final = 1.0
RETRY_LAST_S: Final = 60.0
LAST_SEGMENT_S: Final = 10.0
"""Time in seconds that a stopping member waits for its last segments to be archived; the next start does the rest."""

Store = Callable[[Path], Awaitable[None]]
"""Archives a file; raises ``StorageError``."""


class Cut(Batch):
    """Begins a new segment between two batches of the log."""

    __slots__ = ("_wal",)
    is_short = False

    def __init__(self, wal: WAL, done: Callable[[], None]) -> None:
        super().__init__(None, (), False, done)
        self._wal = wal

    def write(self, log: Log) -> None:
        """Begin the segment, if there is space for one."""
        with contextlib.suppress(WALSpaceError):
            self._wal.cut()


class Archiver(Collector):
    """Archives the log of one member. ``run`` works until cancelled; ``finish`` archives the rest.

    Arguments:
        wal: the open log.
        disk: writer of the log.
        applied: store whose applied state is recorded in marks.
        store: archives a file.
        timeout_s: longest time that an entry waits in the open segment; 0: until the segment is full.
        held_bytes_max: maximum size of segments that wait for the archive; beyond it the oldest are deleted.
    """

    def __init__(
        self, wal: WAL, disk: Disk, applied: mvcc.Store, store: Store, *, timeout_s: float, held_bytes_max: int
    ) -> None:
        self._wal = wal
        self._disk = disk
        self._applied = applied
        self._store = store
        self._timeout_s = timeout_s
        self._held_bytes_max = held_bytes_max
        self._directory = Path(wal.directory)
        first, last = (*wal.closed_segments, wal.open_segment)[0], wal.open_segment
        self._progress = Progress(self._directory, first.sequence, last.sequence)
        self._marked_index = -1
        self._segment = wal.open_segment
        self._segment_since = time.monotonic()
        self._gaps = self._failures = 0
        self._failing_since: float | None = None
        wal.keep(self._progress.next_sequence)

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write marks, begin segments and archive until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            group.create_task(self._archive())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._mark()
            self._cut_when_due()
            self._hold()

    async def _archive(self) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            try:
                await self._archive_waiting()
            except (StorageError, OSError) as error:
                self._failed(error, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = RETRY_FIRST_S if self._failing_since is None else min(2 * pause_s, RETRY_LAST_S)

    async def finish(self) -> None:
        """Archive everything, including the open segment: the member stops and writes no more."""
        try:
            self._mark()
            await asyncio.to_thread(self._wal.cut)
            async with asyncio.timeout(LAST_SEGMENT_S):
                await self._archive_waiting()
        except (StorageError, OSError) as error:  # a TimeoutError is one
            why = f"it took more than {LAST_SEGMENT_S:g} s" if isinstance(error, TimeoutError) else explain(error)
            _log.warning("stopped before the last segments were archived, the next start archives them: %s", why)

    # -- marks -------------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        """Record the applied state, unless it equals the last mark."""
        applied = self._applied
        if applied.applied_index == self._marked_index:
            return
        self._marked_index = applied.applied_index
        self._append_mark(self._wal.open_segment)

    def _append_mark(self, segment: SegmentName) -> None:
        applied = self._applied
        mark = Mark(time.time(), applied.applied_index, applied.revision, applied.applied_term)
        try:
            with self._marks_of(segment).open("a") as file:
                file.write(str(mark))
        except OSError as error:
            _log.warning("cannot write a time mark for the log archive: %s", explain(error))

    def _marks_of(self, segment: SegmentName) -> Path:
        return self._directory / f"{segment}{MARKS_SUFFIX}"

    # -- segments ----------------------------------------------------------------------------------------------------

    def _notice_cut(self) -> None:
        """Write the last mark of a segment that was closed since the last check: the end of what can be restored."""
        if self._wal.open_segment != self._segment:
            self._append_mark(self._segment)
            self._segment, self._segment_since = self._wal.open_segment, time.monotonic()

    def _cut_when_due(self) -> None:
        self._notice_cut()
        now = time.monotonic()
        if self._wal.last_index < self._segment.first_index:
            self._segment_since = now  # no entry yet: the timeout has not begun
        elif self._timeout_s and now - self._segment_since >= self._timeout_s:
            self._segment_since = now
            self._disk.submit(Cut(self._wal, lambda: None))

    def _waiting(self) -> list[SegmentName]:
        return [name for name in self._wal.closed_segments if name.sequence >= self._progress.next_sequence]

    async def _archive_waiting(self) -> None:
        self._notice_cut()
        for name in self._waiting():
            if name.sequence > self._progress.next_sequence:
                self._lost(name)
            marks = self._marks_of(name)
            # The marks first, so that an archived segment always has its marks.
            if marks.exists():
                await self._store(marks)
            await self._store(self._directory / str(name))
            await self._check(name)
            self._progress.note(name.sequence + 1)
            self._wal.keep(name.sequence + 1)
            remove_unneeded(marks)
            if self._failing_since is not None:
                _log.info("archiving works again, after %.0f s", time.monotonic() - self._failing_since)
                self._failing_since = None

    async def _check(self, name: SegmentName) -> None:
        """Report a segment that this disk has damaged: no restore can go through its copy."""
        given_up, directory = threading.Event(), str(self._directory)
        try:
            await on_thread(lambda: check_segment(RealDisk(), directory, name, given_up.wait), given_up.set)
        except WALCorruptError as error:
            self._gaps += 1
            _log.error(
                "the log archive has a gap: %s: back up now, because a restore cannot cross the gap, and check the "
                "disk",
                error,
            )

    def _failed(self, error: Exception, pause_s: float) -> None:
        self._failures += 1
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        waiting = self._waiting()
        _log.warning("%s; next attempt in %.0f s; %d segments to archive", explain(error), pause_s, len(waiting))

    def _hold(self) -> None:
        """Protect unarchived segments from deletion, the newest first, up to the budget."""
        kept, held_bytes = self._progress.next_sequence, 0
        for name in reversed(self._waiting()):
            held_bytes += _size_bytes(self._directory / str(name))
            if held_bytes > self._held_bytes_max:
                kept = name.sequence + 1
                break
        self._wal.keep(kept)

    def _lost(self, name: SegmentName) -> None:
        """Report that the segments before ``name`` were deleted unarchived."""
        self._gaps += 1
        _log.error(
            "the log archive has a gap: %d segments before entry %d were deleted before they were archived "
            "(--wal-archive-held-bytes is %d): back up now, because a restore cannot cross the gap",
            name.sequence - self._progress.next_sequence,
            name.first_index,
            self._held_bytes_max,
        )
        self._progress.note(name.sequence)
        for marks in self._directory.glob(f"*{MARKS_SUFFIX}"):
            segment = SegmentName.parse(marks.name.removesuffix(MARKS_SUFFIX))
            if segment is not None and segment < name:
                remove_unneeded(marks)

    # -- metrics -----------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        counters = {
            "raftkv_wal_archive_failures": ("Attempts to archive a segment that failed.", self._failures),
            "raftkv_wal_archive_gaps": (
                "Times that segments were deleted unarchived, or archived damaged.",
                self._gaps,
            ),
        }
        yield from (CounterMetricFamily(name, text, float(value)) for name, (text, value) in counters.items())
        text = "Closed segments that wait to be archived."
        yield GaugeMetricFamily("raftkv_wal_archive_waiting", text, float(len(self._waiting())))


def _size_bytes(path: Path) -> int:
    with contextlib.suppress(OSError):  # deleted; or the disk fails, which its reader reports
        return path.stat().st_size
    return 0


def store_in(directory: ArchiveDirectory) -> Store:
    """Return a function that copies files to a directory, on a thread."""

    async def store(path: Path) -> None:
        await asyncio.to_thread(directory.store, path)

    return store


def store_by(command: str) -> Store:
    """Return a function that runs a command for each file."""

    async def store(path: Path) -> None:
        await run_command(command, path)

    return store


_PIECE: Final = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\[^%]|%[pf%]""", re.DOTALL)
"""Parts of a command that the shell treats as a unit (quoted text, an escaped character), and the placeholders."""


def _filled_in(command: str, path: Path) -> str:
    """Return a command with a file's path and name filled in, quoted so that neither is ever split into words.

    >>> _filled_in("cp %p '/archive of a/%f'", Path("/data of a/1.wal"))
    "cp '/data of a/1.wal' '/archive of a/1.wal'"
    """
    words = {"%p": str(path), "%f": path.name, "%%": "%"}

    def piece(found: re.Match[str]) -> str:
        text = found[0]
        if text in ("%p", "%f"):
            return shlex.quote(words[text])
        return re.sub("%[pf%]", lambda inner: _within(words[inner[0]], text[0]), text)

    return _PIECE.sub(piece, command)


def _within(word: str, quote: str) -> str:
    """Return a word, escaped for use inside quotes of a kind."""
    if quote == "'":
        return word.replace("'", "'\\''")
    return re.sub(r'["\\$`]', r"\\\g<0>", word) if quote == '"' else word


async def run_command(command: str, path: Path) -> None:
    """Run an archive command for a file; cancelling the caller kills it.

    Arguments:
        command: with ``%p``, ``%f`` and ``%%``.
        path: file to archive.

    Raises:
        StorageError: the command cannot be run, or it failed.
    """
    try:
        process = await asyncio.create_subprocess_shell(
            _filled_in(command, path),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise StorageError(f"cannot run the archive command: {error}") from error
    try:
        _, errors = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    if process.returncode:
        said = errors.decode(errors="replace").strip().partition("\n")[0]
        raise StorageError(f"the archive command failed for {path.name} with exit code {process.returncode}: {said}")


def make_archiver(
    config: ServerConfig, wal: WAL, disk: Disk, applied: mvcc.Store, identity: tuple[int, int]
) -> Archiver | None:
    """Return the archiver for the settings; ``None`` if archiving is off.

    Arguments:
        config: configuration of the member.
        wal, disk, applied: log, writer and store of the member.
        identity: ids of the cluster and the member.
    """
    if config.wal_archive_dir:
        store = store_in(ArchiveDirectory(Path(config.wal_archive_dir) / directory_name(*identity)))
    elif config.wal_archive_command:
        store = store_by(config.wal_archive_command)
    else:
        return None
    return Archiver(
        wal, disk, applied, store, timeout_s=config.wal_archive_timeout_s, held_bytes_max=config.wal_archive_held_bytes
    )
