"""The write-ahead log of a member: append, sync, cut, release.

Makes the state of Raft durable. The guarantee: everything appended before a successful ``sync`` is there after any
crash, or ``open`` fails; what was not synced may be missing, but only from the end.

    wal = WAL.create(directory, metadata)
    wal.append(ready.hard_state, ready.entries)      # one system call
    wal.sync()                                       # one fdatasync; only now may the member acknowledge

    wal, recovered = WAL.open(directory)             # after a restart

Invariants:

- ``append`` writes one frame with one system call, in a segment with space for it: disk space is reserved one segment
  at a time, so a full disk shows when a new segment is begun, before any byte of the batch is written.
- Most syncs write only the frames: from time to time a frame is written with ``FILL_BYTES`` of zeros after it. A file
  system records for each block of reserved space that it was written for the first time, and this record is one more
  write in each sync of such a block. On ext4 this reduces the sync of a 3 KB batch from 0.18 ms to 0.13 ms.
- After a failed write or sync this object never writes or syncs again (``WALFailedError``); the next ``open`` rewrites
  the frames that are not known to be durable.
- A segment is synced before the next one gets its name; the head of each segment repeats hard state and last marker, so
  that earlier segments can be deleted.

Called from one thread at a time, except ``prepare_next``, which may run in any. Not here: when to sync, when to
release, and what to do when the disk is full (see the member's loop).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NoReturn

from raftkv.errors import ConfigError, InvariantError, explain
from raftkv.raft.types import Entry, HardState, SnapshotMeta
from raftkv.storage import failpoints
from raftkv.storage.failpoints import failpoint
from raftkv.storage.wal.disk import (
    Disk,
    RealDisk,
    WALCorruptError,
    WALExistsError,
    WALFailedError,
    WALLockedError,
    WALNotFoundError,
    WALSpaceError,
)
from raftkv.storage.wal.record import (
    BODY_MAX_BYTES,
    SegmentHead,
    encode_entries,
    encode_frame,
    encode_hard_state,
    encode_snapshot,
)
from raftkv.storage.wal.recovery import Recovered, Recovery, ReplayError
from raftkv.storage.wal.segment import (
    LOCK_NAME,
    SEGMENT_BYTES,
    SEGMENT_MAX_BYTES,
    SEGMENT_MIN_BYTES,
    TEMPORARY_NAME,
    SegmentName,
    SpareSegment,
    encode_head,
    head_size,
    list_segments,
    segment_size_for,
)

_log = logging.getLogger(__name__)

REAL_DISK: Final = RealDisk()
FILL_BYTES: Final = 128 * 1024
"""Zeros written after a frame that reaches unwritten space. With twice as much, some writes take a millisecond longer;
half as much saves less with batches of 32 KB."""
_ZEROS: Final = bytes(FILL_BYTES)
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)


class WAL:
    """The open log of one member. Use ``create`` or ``open`` to get one, never the constructor."""

    def __init__(self, disk: Disk, directory: str, locks: tuple[int, int], metadata: bytes, segment_bytes: int) -> None:
        self._disk = disk
        self.directory = directory
        """Directory of the segments."""
        self._locks = locks
        self._metadata = metadata
        self._segment_bytes = segment_bytes
        self.written_bytes = 0
        """Bytes of frames written since the log was opened."""
        self._spare = SpareSegment(disk, directory, segment_bytes)
        self._failure: str | None = None
        """Reason why the log refuses everything; also set by ``close``."""
        self._removed = False
        """Whether a segment was removed and the removal is not yet durable."""
        self._closed = False
        self._segments: list[SegmentName] = []
        self._kept_from: int | None = None
        # the segment being written: descriptor, size, offset of the next frame, synced offset, and the checksums
        self._fd = -1
        self._size = 0
        self._offset = 0
        self._filled = 0
        """Offset up to which the segment was written once, if only with zeros."""
        self._durable = 0
        self._syncing = 0
        """Offset that will be durable when the started sync has ended."""
        self._crc = 0
        self._seed = 0
        # the log as it stands
        self._hard_state = HardState()
        self._snapshot = SnapshotMeta()
        self.last_index = 0
        """Index of the last appended entry, or of the last marker if there are no entries after it."""

    @staticmethod
    def exists(directory: str, disk: Disk = REAL_DISK) -> bool:
        """Return whether a directory has a log; a ``create`` that a crash interrupted does not count.

        Arguments:
            directory: directory of the log.
            disk: the file operations.
        """
        try:
            return bool(list_segments(disk, directory))
        except (FileNotFoundError, NotADirectoryError):
            return False

    @classmethod
    def create(
        cls,
        directory: str,
        metadata: bytes,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        disk: Disk = REAL_DISK,
        prepare: Callable[[], None] | None = None,
    ) -> WAL:
        """Create a new log; durable on return.

        Arguments:
            directory: directory of the log; created if it does not exist.
            metadata: bytes of the caller (cluster and member id), returned by every ``open``.
            segment_bytes: size of each segment.
            disk: the file operations.
            prepare: called before the log exists, while its lock is held: of several concurrent creators, only one
                calls it.

        Raises:
            WALExistsError: there is already a log.
            WALLockedError: another process uses the directory.
            WALSpaceError: no space for the first segment.
            StorageError: the directory cannot be used.
        """
        with _failure_named("create", directory):
            disk.ensure_directory(directory)
            _check_segment_bytes(segment_bytes)
            wal = cls(disk, directory, _lock(disk, directory), metadata, segment_bytes)
            # Under the lock: two concurrent creators must not both find the directory empty.
            with wal._closed_on_failure():
                if cls.exists(directory, disk):
                    raise WALExistsError(f"there is a write-ahead log in {directory} already")
                if prepare is not None:
                    prepare()
                wal._begin_segment(0)
        return wal

    @classmethod
    def open(
        cls,
        directory: str,
        *,
        snapshot_index: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        disk: Disk = REAL_DISK,
    ) -> tuple[WAL, Recovered]:
        """Lock and read a log; cut a tail that a crash has torn; continue at its end.

        Arguments:
            directory: directory of the log.
            snapshot_index: marker of the caller's state; entries after it are returned (``None``: the last marker,
                0: from the first entry).
            segment_bytes: size of new segments.
            disk: the file operations.

        Returns:
            the log, and its contents.

        Raises:
            WALNotFoundError: there is no log.
            WALLockedError: another process uses it.
            WALCorruptError: the log is damaged in a way that a crash cannot cause.
            WALFailedError: a file operation failed.
        """
        with _failure_named("open", directory):
            if not cls.exists(directory, disk):
                raise WALNotFoundError(f"there is no write-ahead log in {directory}")
            disk.ensure_directory(directory)
            _check_segment_bytes(segment_bytes)
            # Locked before the first segment is read: the files must not change while they are read and perhaps cut.
            wal = cls(disk, directory, _lock(disk, directory), b"", segment_bytes)
            with wal._closed_on_failure():
                return wal, wal._recover(snapshot_index)

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # So that ``close`` releases files and lock but does not sync.
            self._failure = self._failure or explain(error)
            self.close()
            raise

    def _recover(self, snapshot_index: int | None) -> Recovered:
        names = list_segments(self._disk, self.directory)
        recovery = Recovery(self._disk, self.directory, names, all_segments=snapshot_index is not None)
        recovered = recovery.finish(snapshot_index)
        self._metadata = recovery.metadata
        self._segments = names
        self._size, self._offset = recovery.size_bytes, recovery.offset
        self._filled = self._offset
        self._crc, self._seed = recovery.crc, recovery.seed
        self._hard_state, self._snapshot = recovered.hard_state, recovery.replay.snapshot
        # After a marker beyond the log there are no entries: the log continues after the marker.
        self.last_index = max(recovery.replay.last_index, self._snapshot.index)
        self._fd = self._disk.open(recovery.path)
        self._settle(recovery.unsure, recovery.unsure_offset)
        return recovered

    def _settle(self, unsure: bytes, offset: int) -> None:
        """Make the contents durable: they may have come from the page cache of a killed process.

        Otherwise a member could acknowledge an entry that this ``open`` returned, and lose it in a power cut.
        """
        # Only the last segment can have unsynced data: the earlier ones were synced when the next one was begun. If the
        # earlier process ended because a sync failed, the kernel may consider those pages written: write them again.
        if unsure:
            self._disk.write(self._fd, [unsure], offset)
        self._disk.sync_data(self._fd)
        # From here on, frames of this process may state that the bytes before them are durable.
        self._durable = self._offset
        # A segment allocated ahead by the last run, or left by a crash before it got its name: it has no contents.
        if TEMPORARY_NAME in self._disk.list_names(self.directory):
            self._disk.remove(self._spare.path)
        self._disk.sync_directory(self.directory)

    # -- writing ------------------------------------------------------------------------------------------------

    def append(self, hard_state: HardState | None, entries: Sequence[Entry]) -> None:
        """Write a batch, all or nothing, as one frame; durable after the next ``sync``.

        Arguments:
            hard_state: term, vote and commit index from now on; ``None``: unchanged.
            entries: contiguous, beginning at most one after the last index; an earlier beginning overwrites.

        Raises:
            WALSpaceError: no space for the next segment; nothing was written, and the call may be repeated.
            WALFailedError: this write failed, or an earlier one.
            InvariantError: no correct Raft makes this batch (and ``open`` would refuse it); nothing was written.
        """
        if self._failure is not None:
            self._refuse()
        # Check everything before writing the first byte; otherwise the log would have to be repaired.
        last_index = self._check_batch(hard_state, entries)
        if entries or hard_state is not None:
            self._write(None, entries, hard_state)
            self.last_index = last_index
            if hard_state is not None:
                self._hard_state = hard_state

    def save_snapshot(self, meta: SnapshotMeta, hard_state: HardState | None = None) -> None:
        """Record that the state up to a snapshot is durable elsewhere; a marker beyond the log starts the log again.

        Arguments:
            meta: the snapshot.
            hard_state: hard state of the same Ready, so that no crash comes between the two; ``None``: unchanged.

        Raises:
            WALSpaceError, WALFailedError, InvariantError: as in ``append``.
        """
        if self._failure is not None:
            self._refuse()
        if meta.index < self._snapshot.index:
            raise InvariantError(f"snapshot marker {meta.index} follows marker {self._snapshot.index}")
        last_index = max(self.last_index, meta.index)
        if hard_state is not None:
            self._check_hard_state(hard_state, last_index)
        # One frame: after a crash either both are there or neither is.
        self._write(meta, (), hard_state)
        self._snapshot = meta
        self.last_index = last_index
        if hard_state is not None:
            self._hard_state = hard_state

    def sync(self) -> None:
        """Make everything appended so far durable.

        Raises:
            WALFailedError: this sync failed, or an earlier operation; failures are permanent (see the class).
        """
        if self._failure is not None:
            self._refuse()
        offset = self._offset
        # A turn of the loop that only sent messages needs no sync.
        if offset == self._durable:
            return
        try:
            if failpoints.armed:
                failpoint("walBeforeSync")
            self._disk.sync_data(self._fd)
            self._durable = offset
            if failpoints.armed:
                failpoint("walAfterSync")
        # Also after an interrupt: it is then unknown whether the sync happened.
        except BaseException as error:
            self._fail("sync", error)

    def start_sync(self, start: Callable[[int], bool]) -> bool:
        """Start to make everything appended so far durable; then no method may be called before ``end_sync``.

        Arguments:
            start: starts the sync of a descriptor; returns whether a sync is in progress.

        Returns:
            Whether a sync is in progress; if not, everything is already durable.

        Raises:
            WALFailedError: as in ``sync``.
        """
        if self._failure is not None:
            self._refuse()
        if self._offset == self._durable:
            return False
        if not start(self._fd):
            self.sync()
            return False
        self._syncing = self._offset
        return True

    def end_sync(self, finish: Callable[[], None]) -> None:
        """End the started sync: everything appended before it is durable.

        Arguments:
            finish: waits for the sync; raises its error.

        Raises:
            WALFailedError: as in ``sync``.
        """
        try:
            finish()
            self._durable = self._syncing
        except BaseException as error:
            self._fail("sync", error)

    def _check_batch(self, hard_state: HardState | None, entries: Sequence[Entry]) -> int:
        """Return the last index after the batch. Takes the same time for any number of entries."""
        last_index = self.last_index
        if entries:
            first, last_index = entries[0].index, entries[-1].index
            # Checking the ends is enough: the core numbers entries consecutively, and ``open`` checks each.
            if last_index - first != len(entries) - 1 or first > self.last_index + 1:
                raise InvariantError(
                    f"entries {first}..{last_index} ({len(entries)}) do not follow entry {self.last_index}"
                )
            # Raft overwrites entries of an earlier leader, never one that is committed or in a snapshot.
            if first <= self.last_index and first <= max(self._hard_state.commit, self._snapshot.index):
                raise InvariantError(f"entry {first} overwrites what is committed")
        if hard_state is not None:
            self._check_hard_state(hard_state, last_index)
        return last_index

    def _check_hard_state(self, state: HardState, last_index: int) -> None:
        # Terms and commit indexes only grow; stop a faulty caller before it harms the log.
        if state.term < self._hard_state.term or state.commit < self._hard_state.commit:
            raise InvariantError(f"{state} follows {self._hard_state}")
        if state.commit > last_index:
            raise InvariantError(f"commit index {state.commit} is beyond the last entry {last_index}")

    def _write(self, meta: SnapshotMeta | None, entries: Sequence[Entry], hard_state: HardState | None) -> None:
        parts: list[bytes] = [] if meta is None else [encode_snapshot(meta)]
        encode_entries(entries, parts)
        if hard_state is not None:
            parts.append(encode_hard_state(hard_state))
        body = b"".join(parts)
        # Each frame states what was durable when it was written, which distinguishes a torn write from damage
        # (``tail.py``).
        buffers, crc = encode_frame(body, self._offset, self._durable, self._crc, self._seed)
        size = sum(map(len, buffers))
        # A frame never spans two segments, so that each segment can be checked and deleted separately.
        if self._offset + size > self._size:
            self._cut(len(body))
            buffers, crc = encode_frame(body, self._offset, self._durable, self._crc, self._seed)
        try:
            if failpoints.armed:
                failpoint("walBeforeWrite")
            end = self._offset + size
            whole = buffers if end <= self._filled else self._with_zeros(buffers, end)
            self._disk.write(self._fd, whole, self._offset)
            self._offset = end
            self.written_bytes += size
            self._crc = crc
            if failpoints.armed:
                failpoint("walAfterWrite")
        # It is unknown how much of the frame reached the file, so nothing may be written after it.
        except BaseException as error:
            self._fail("write", error)

    def _with_zeros(self, buffers: Sequence[bytes], end: int) -> Sequence[bytes]:
        """Return the buffers, followed by zeros to write after them."""
        self._filled = min(end + FILL_BYTES, self._size)
        return [*buffers, _ZEROS[: self._filled - end]]

    # -- segments -----------------------------------------------------------------------------------------------

    @property
    def needs_next(self) -> bool:
        """Whether the segment is more than half full and its successor not allocated: call ``prepare_next``."""
        # At half, so that the other thread has the time of filling the other half for the allocation.
        return self._offset * 2 > self._size and not self._spare.ready

    def prepare_next(self) -> None:
        """Allocate the next segment, so that switching to it does not wait for the disk. Runs on any thread.

        Does nothing while no file can be opened because of the limits of this process or machine.

        Raises:
            WALSpaceError: the disk is full; this segment still has space.
            WALFailedError: the allocation failed for another reason.
        """
        if self._failure is not None:
            self._refuse()
        try:
            self._spare.prepare()
        except OSError as error:
            # This segment has space, and a descriptor may become free before it is full: ``needs_next`` stays true.
            if error.errno not in _NO_DESCRIPTOR:
                self._fail("allocate", error)

    def cut(self) -> bool:
        """Begin a new segment, if the current one has entries, so that it can be archived; return whether it had.

        Raises:
            WALSpaceError: no space for the next segment; nothing was written.
            WALFailedError: a file operation failed, now or earlier.
        """
        if self._failure is not None:
            self._refuse()
        if self.last_index < self._segments[-1].first_index:
            return False
        self._cut(0)
        return True

    def _cut(self, body_bytes: int) -> None:
        """Begin a new segment, with space for a frame of ``body_bytes``."""
        if body_bytes > BODY_MAX_BYTES:
            raise InvariantError(f"a batch of {body_bytes} bytes is larger than {BODY_MAX_BYTES}")
        # Sync the old segment first: recovery treats a torn tail in any segment but the last as damage.
        self.sync()
        failpoint("walBeforeCut")
        old_fd = self._fd
        self._begin_segment(body_bytes)
        self._disk.close(old_fd)
        failpoint("walAfterCut")

    def _begin_segment(self, body_bytes: int, body: bytes = b"") -> None:
        sequence = self._segments[-1].sequence + 1 if self._segments else 0
        size = segment_size_for(body_bytes, head_size(self._metadata, self._snapshot), self._segment_bytes)
        # Every entry so far has a lower index, so ``release`` can go by the names alone.
        name = SegmentName(sequence, self.last_index + 1)
        # ``prepare_next`` may be allocating the same temporary file on another thread.
        with self._spare.lock:
            try:
                fd = self._spare.take(size)
                self._name_segment(fd, name, size, body)
            except WALSpaceError:
                raise  # nothing was written: the old segment is intact, and the caller may retry
            except BaseException as error:
                self._fail("cut", error)
        self._fd = fd
        self._segments.append(name)

    def _name_segment(self, fd: int, name: SegmentName, size: int, body: bytes) -> None:
        """Write the head and perhaps a first frame of a new segment, then name it; each step is durable before the
        next.
        """
        head = SegmentHead(name.sequence, name.first_index, size)
        buffers, crc = encode_head(head, self._metadata, self._hard_state, self._snapshot, self._crc)
        self._size = size
        self._disk.write(fd, self._with_zeros(buffers, sum(map(len, buffers))), 0)
        # A named segment must have a complete head: sync the contents, then rename, then use.
        self._disk.sync_data(fd)
        self._offset = self._durable = sum(map(len, buffers))
        # The checksum of the head seeds those of all frames in the segment: frames of another log are not accepted.
        self._crc = self._seed = crc
        if body:
            buffers, self._crc = encode_frame(body, self._offset, self._durable, self._crc, self._seed)
            self._disk.write(fd, buffers, self._offset)
            self._disk.sync_data(fd)
            self._offset = self._durable = self._offset + sum(map(len, buffers))
        failpoint("walBeforeCutRename")
        self._disk.rename(self._spare.path, os.path.join(self.directory, str(name)))
        self._disk.sync_directory(self.directory)

    def rewind(self, meta: SnapshotMeta) -> Recovered:
        """Remove all markers beyond a state, and everything after them, except the current term and vote.

        For a member that received a database that it cannot install: it has acknowledged nothing since. The remaining
        log is written into a new segment, which replaces all others in one step and is durable on return.

        Arguments:
            meta: the state that the member has instead.

        Raises:
            WALCorruptError: the log lacks the entries after that state.
            WALSpaceError, WALFailedError: as in ``append``.
        """
        if self._failure is not None:
            self._refuse()
        replay = Recovery(self._disk, self.directory, self._segments, marker_max=meta.index).replay
        try:
            if replay.last_index < meta.index:
                raise ReplayError(f"the log ends at entry {replay.last_index}, the state at entry {meta.index}")
            entries = replay.entries_after(meta)
        except ReplayError as error:
            raise WALCorruptError(os.path.join(self.directory, str(self._segments[0])), 0, str(error)) from error
        last_index = meta.index + len(entries)
        commit = min(max(replay.hard_state.commit, meta.index), last_index)
        self._hard_state = HardState(self._hard_state.term, self._hard_state.vote, commit)
        self._snapshot, self.last_index = meta, meta.index
        parts: list[bytes] = []
        encode_entries(entries, parts)
        old_fd = self._fd
        self._begin_segment(sum(map(len, parts)), b"".join(parts))
        self.last_index = last_index
        self._disk.close(old_fd)
        try:
            while len(self._segments) > 1:
                self._remove_oldest()
        except BaseException as error:
            self._fail("rewind", error)
        return Recovered(self._metadata, self._hard_state, entries, meta)

    def release(self, index: int) -> int:
        """Delete the segments that hold only entries below ``index``, oldest first; return their number.

        Entries after the last snapshot marker are never deleted, for any ``index``, nor are segments that ``keep``
        protects.

        A failed removal is logged as a warning and retried by the next call: the extra file only takes space.

        Raises:
            WALFailedError: a sync of the log failed.
        """
        self.sync()  # the marker that makes the entries unnecessary must be durable before they are deleted
        limit = min(index, self._snapshot.index + 1)
        count = 0
        try:
            if self._removed:
                self._disk.sync_directory(self.directory)
                self._removed = False
            # The first index of the next segment is above all entries of this one.
            while len(self._segments) > 1 and self._segments[1].first_index <= limit and not self._is_kept():
                self._remove_oldest()
                count += 1
        except OSError as error:
            _log.warning("cannot delete old segments of %s, retrying later: %s", self.directory, explain(error))
        except BaseException as error:
            self._fail("release", error)
        return count

    def keep(self, sequence: int) -> None:
        """Protect all segments from a sequence number on from ``release``; called from any thread."""
        self._kept_from = sequence

    def _is_kept(self) -> bool:
        return self._kept_from is not None and self._segments[0].sequence >= self._kept_from

    def _remove_oldest(self) -> None:
        failpoint("walBeforeUnlink")
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(os.path.join(self.directory, str(self._segments[0])))
        del self._segments[0]
        self._removed = True
        # Each removal is durable before the next: out of order they could leave a gap in the sequence.
        self._disk.sync_directory(self.directory)
        self._removed = False
        failpoint("walAfterUnlink")

    # -- end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Sync the appended data, unless something failed; close files and release the lock. May be called repeatedly.

        Raises:
            WALFailedError: this last sync failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            # After a failure, a successful sync would prove nothing (``WALFailedError``).
            if self._failure is None and self._fd >= 0:
                self.sync()
        finally:
            self._failure = self._failure or "it is closed"
            self._give_back()

    def _give_back(self) -> None:
        try:
            self._spare.close()
        except OSError:
            pass  # the next open removes the file
        if self._fd >= 0:
            self._disk.close(self._fd)
        for fd in self._locks:
            self._disk.close(fd)

    def _fail(self, step: str, error: BaseException) -> NoReturn:
        """Refuse all further calls because of ``error``."""
        self._failure = f"{step} failed: {explain(error)}"
        if isinstance(error, OSError):
            raise WALFailedError(f"write-ahead log in {self.directory}: {self._failure}") from error
        # A bug or the end of the process is not reported as a disk failure.
        raise error

    def _refuse(self) -> NoReturn:
        raise WALFailedError(f"write-ahead log in {self.directory} is not usable: {self._failure}")

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of the segment files, oldest first."""
        return tuple(map(str, self._segments))

    @property
    def closed_segments(self) -> list[SegmentName]:
        """Return the segments that are no longer written, oldest first; called from any thread."""
        return self._segments[:-1]

    @property
    def open_segment(self) -> SegmentName:
        """Return the segment being written; called from any thread."""
        return self._segments[-1]


def _check_segment_bytes(segment_bytes: int) -> None:
    if not SEGMENT_MIN_BYTES <= segment_bytes <= SEGMENT_MAX_BYTES // 2:
        raise ConfigError(f"a log cannot have segments of {segment_bytes} bytes")


@contextlib.contextmanager
def _failure_named(step: str, directory: str) -> Iterator[None]:
    """Turn system errors into one line that names the failed step and the directory."""
    try:
        yield
    except OSError as error:
        raise WALFailedError(f"cannot {step} the write-ahead log in {directory}: {explain(error)}") from error


def _lock(disk: Disk, directory: str) -> tuple[int, int]:
    """Lock the lock file, which other versions and tools look at, and the directory, as the file may be deleted."""
    try:
        of_file = disk.lock(os.path.join(directory, LOCK_NAME))
        try:
            return of_file, disk.lock(directory)
        except BaseException:
            disk.close(of_file)
            raise
    except BlockingIOError as error:
        raise WALLockedError(f"the write-ahead log in {directory} is in use by another process") from error
