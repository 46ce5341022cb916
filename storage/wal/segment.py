"""One file of the log: its name, its head, and reading it from end to end.

A new segment file is created under a temporary name at its full size, gets its head frame, is synced, and only then
gets its real name. So a file with that name is complete, and its length, which the head repeats, never changes again. A
file of another length is damaged, so frames cannot be lost unnoticed by truncating a file.

    directory/
      lock                                        held by the process that has the log open
      0000000000000000-0000000000000001.wal       sequence 0, first index 1
      0000000000000001-00000000000186a1.wal       sequence 1: entries from 100,001 on
      next.tmp                                    the next segment, allocated ahead
      0000000000000001-00000000000186a1.wal.broken   bytes that a repair cut off

``first index`` is one more than the last index of the log when the segment was created. Every entry in earlier segments
is below it, so ``release`` can delete them by name.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from raftkv.raft.types import HardState, SnapshotMeta
from raftkv.storage.datadir import format_refusal
from raftkv.storage.wal.record import Frame, encode_frame, frame_size, read_frame

from .disk import Disk, WALCorruptError, WALSpaceError, WALVersionError
from .record import (
    FORMAT_VERSION,
    Metadata,
    Record,
    RecordError,
    SegmentHead,
    decode_records,
    encode_hard_state,
    encode_metadata,
    encode_segment_head,
    encode_snapshot,
)
from .tail import Tail, Verdict, classify_tail

SEGMENT_BYTES: Final = 64 << 20
SEGMENT_MIN_BYTES: Final = 1 << 10
SEGMENT_MAX_BYTES: Final = 2 << 30
LOCK_NAME: Final = "lock"
TEMPORARY_NAME: Final = "next.tmp"

_NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})\.wal")
NO_SPACE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""System error numbers for a full disk or quota."""


@dataclass(frozen=True, order=True, slots=True)
class SegmentName:
    """The name of a segment; sorts in the order of the log."""

    sequence: int
    first_index: int

    def __str__(self) -> str:
        return f"{self.sequence:016x}-{self.first_index:016x}.wal"

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        """Return the parsed file name; ``None`` if it is not the name of a segment."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1], 16), int(match[2], 16)) if match else None


def list_segments(disk: Disk, directory: str) -> list[SegmentName]:
    """Return the segments of a log in order.

    Arguments:
        disk: the file operations.
        directory: directory of the log.

    Raises:
        WALCorruptError: a segment in the middle is missing.
    """
    names = sorted(name for name in map(SegmentName.parse, disk.list_names(directory)) if name)
    for before, after in itertools.pairwise(names):
        # ``release`` removes the oldest first and syncs each removal, so a crash leaves no gap.
        if after.sequence != before.sequence + 1:
            path = os.path.join(directory, str(after))
            raise WALCorruptError(path, 0, f"the segment between {before} and this one is missing or doubled")
    return names


def create_temporary(disk: Disk, path: str, size_bytes: int) -> int:
    """Allocate a new file of zeros under a temporary name, durably; return its descriptor.

    Arguments:
        disk: the file operations.
        path: the file; an existing file of that name is replaced.
        size_bytes: size of the file.

    Raises:
        WALSpaceError: no space for the file or its name; the file is removed again.
        OSError: a file operation failed for another reason.
    """
    try:
        fd = disk.create(path)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise WALSpaceError(f"no room for one more file, of the write-ahead log, at {path}") from error
        raise
    try:
        disk.allocate(fd, size_bytes)
        # Sync now: otherwise the first sync of a batch would also have to write the allocation.
        disk.sync_data(fd)
    except OSError as error:
        disk.close(fd)
        # The allocated part takes space that is needed.
        if error.errno in NO_SPACE:
            disk.remove(path)
            raise WALSpaceError(f"no room for {size_bytes} bytes of write-ahead log at {path}") from error
        raise
    return fd


def encode_head(
    head: SegmentHead, metadata: bytes, hard_state: HardState, snapshot: SnapshotMeta, previous: int
) -> tuple[tuple[bytes, bytes, bytes], int]:
    """Return the head frame, with everything needed to read on from here without earlier segments.

    Arguments:
        head, metadata, hard_state, snapshot: records of the frame.
        previous: checksum of the last frame of the previous segment, 0 for the first segment.

    Returns:
        the buffers to write in order, and the checksum of the frame.
    """
    body = b"".join(
        (encode_segment_head(head), encode_metadata(metadata), encode_hard_state(hard_state), encode_snapshot(snapshot))
    )
    return encode_frame(body, 0, 0, previous, 0)


def head_size(metadata: bytes, snapshot: SnapshotMeta) -> int:
    """Return the size of the head frame in bytes.

    Arguments:
        metadata, snapshot: records of variable size.
    """
    (header, body, trailer), _crc = encode_head(SegmentHead(0, 0, 0), metadata, HardState(), snapshot, 0)
    return len(header) + len(body) + len(trailer)


class SegmentReader:
    """A segment in memory, read frame by frame up to the first position without a valid frame.

    After the iteration, ``offset`` is where it stopped and ``crc`` the checksum of the last good frame.

    Arguments:
        path: the file, for error messages.
        data: the segment up to its last byte that is not zero, or any longer part.
        size_bytes: size of the file.

    Raises:
        WALCorruptError: the head is invalid, or frames do not follow each other.
        WALVersionError: the segment has another format.
    """

    def __init__(self, path: str, data: bytes, size_bytes: int) -> None:
        self.path = path
        self.data = data
        self.size_bytes = size_bytes
        frame = read_frame(data, 0, 0)
        # A file gets a segment's name only after its head is durable: no crash leaves a segment without a head.
        if frame is None:
            raise WALCorruptError(path, 0, "the head of the segment is damaged")
        self.head_frame = frame
        self.seed = self.crc = frame.crc
        self.previous = frame.header.previous
        self.offset = frame.header.end
        self.head, self.metadata, self.head_state = self._read_head()

    def _read_head(self) -> tuple[SegmentHead, bytes, list[HardState | SnapshotMeta]]:
        records = [record for _offset, record in self.records(self.head_frame)]
        match records:
            case [SegmentHead() as head, Metadata(data), HardState() as hard_state, SnapshotMeta() as snapshot]:
                self._check_head(head)
                return head, data, [hard_state, snapshot]
        raise WALCorruptError(self.path, 0, "the head of the segment lacks its records")

    def _check_head(self, head: SegmentHead) -> None:
        if refusal := format_refusal(f"the write-ahead log {self.path}", head.version, FORMAT_VERSION):
            raise WALVersionError(refusal)
        # A segment under the name of another would be read at the wrong position in the log.
        name = str(SegmentName(head.sequence, head.first_index))
        if name != os.path.basename(self.path):
            raise WALCorruptError(self.path, 0, f"its head says that it is {name}")
        # A truncated file must not pass for a log that ends earlier.
        if head.size_bytes != self.size_bytes:
            reason = f"the file has {self.size_bytes} bytes where its head says {head.size_bytes}"
            raise WALCorruptError(self.path, min(self.size_bytes, head.size_bytes), reason)

    def frames(self) -> Iterator[Frame]:
        """Iterate over the frames after the head, in order."""
        while (frame := read_frame(self.data, self.offset, self.seed)) is not None:
            # The chain: the frame is undamaged, but was written after a different frame.
            if frame.header.previous != self.crc:
                raise WALCorruptError(self.path, self.offset, "this frame does not follow the one before it")
            yield frame
            self.crc = frame.crc
            self.offset = frame.header.end

    def tail(self) -> Tail:
        """Return the verdict on the bytes from ``offset`` on, after the iteration."""
        return classify_tail(self.data, self.size_bytes, self.offset, self.seed)

    def records(self, frame: Frame) -> Iterator[tuple[int, Record]]:
        """Iterate over the records of a frame, each with its offset in the file."""
        try:
            for offset, record in decode_records(frame.body):
                yield frame.body_offset + offset, record
        except RecordError as error:
            raise WALCorruptError(self.path, frame.body_offset + error.offset, error.reason) from error


def load_segment(disk: Disk, directory: str, name: SegmentName) -> SegmentReader:
    """Read a segment into memory.

    Arguments:
        disk: the file operations.
        directory: directory of the log.
        name: name of the segment.

    Raises:
        WALCorruptError: as in ``SegmentReader``; also if the file is too long for a segment.
    """
    path = os.path.join(directory, str(name))
    fd = disk.open(path)
    try:
        size = disk.size(fd)
        # Checked before the file is read into memory.
        if size > SEGMENT_MAX_BYTES:
            raise WALCorruptError(path, SEGMENT_MAX_BYTES, f"a file of {size} bytes is not a segment")
        return SegmentReader(path, _read_written(disk, fd, size), size)
    finally:
        disk.close(fd)


_ZEROS: Final = bytes(1 << 16)


def _read_written(disk: Disk, fd: int, size_bytes: int) -> bytes:
    """Return a file without the zeros at its end, all of them but the last few.

    Small reads put the reserved rest of a segment, zeros, into the same memory again and again: with 64 MiB at once the
    kernel takes 50 to 150 ms for pages that are looked at once, so 10.
    """
    pieces: list[bytes] = []
    for offset in range(0, size_bytes, len(_ZEROS)):
        piece = disk.read(fd, len(_ZEROS), offset)
        pieces.append(_ZEROS if piece == _ZEROS else piece)
    while pieces and pieces[-1] is _ZEROS:
        pieces.pop()
    return b"".join(pieces)


CHECK_S: Final = 0.001
CHECK_REST_S: Final = 0.004
"""Seconds of work, and of rest, in turn during a check: it holds the interpreter lock, which other threads need."""


def check_segment(disk: Disk, directory: str, name: SegmentName, rest: Callable[[float], bool]) -> None:
    """Read all of a closed segment, with pauses.

    Arguments:
        disk: the file operations.
        directory: directory of the log.
        name: name of the segment.
        rest: waits the given number of seconds; returns whether to stop.

    Raises:
        WALCorruptError: the segment is damaged.
    """
    reader = load_segment(disk, directory, name)
    until = time.perf_counter() + CHECK_S
    for _ in reader.frames():
        if time.perf_counter() > until:
            if rest(CHECK_REST_S):
                return
            until = time.perf_counter() + CHECK_S
    tail = reader.tail()
    if tail.verdict is not Verdict.END:
        raise WALCorruptError(reader.path, reader.offset, tail.reason)


def segment_size_for(body_bytes: int, head_bytes: int, segment_bytes: int) -> int:
    """Return the size of a segment for a frame: the usual size, or a larger one if the frame does not fit.

    Arguments:
        body_bytes: size of the frame's body.
        head_bytes: size of the head frame.
        segment_bytes: the usual size.
    """
    return max(segment_bytes, head_bytes + frame_size(body_bytes))


# -- spare ----------------------------------------------------------------------------------------------------------
#
# The next segment is allocated before it is needed, in one temporary file: reserving 64 MiB and syncing the reservation
# takes milliseconds and may find the disk full, so a background thread does it and no append waits for it.


class SpareSegment:
    """At most one file allocated ahead. ``prepare`` may run on any thread; hold ``lock`` while taking the file.

    Arguments:
        disk: the file operations.
        directory: directory of the log.
        size_bytes: size of the file.
    """

    def __init__(self, disk: Disk, directory: str, size_bytes: int) -> None:
        self.lock = threading.Lock()
        self.path = os.path.join(directory, TEMPORARY_NAME)
        self._disk = disk
        self._size_bytes = size_bytes
        self._fd: int | None = None
        self._closed = False

    @property
    def ready(self) -> bool:
        """Whether a file is ready to be taken."""
        return self._fd is not None

    def prepare(self) -> None:
        """Allocate the file unless it exists.

        Raises:
            WALSpaceError: no space.
            OSError: a file operation failed.
        """
        with self.lock:
            # A file created after ``close`` would be left behind.
            if self._fd is None and not self._closed:
                self._fd = create_temporary(self._disk, self.path, self._size_bytes)

    def take(self, size_bytes: int) -> int:
        """Return the descriptor of a file of ``size_bytes``, for the caller to rename. Call with ``lock`` held."""
        # A batch larger than a segment gets a segment of its own size (``segment_size_for``).
        if size_bytes != self._size_bytes:
            self._drop()
            return create_temporary(self._disk, self.path, size_bytes)
        fd = self._fd
        self._fd = None
        return create_temporary(self._disk, self.path, size_bytes) if fd is None else fd

    def close(self) -> None:
        """Remove the file; no further file can be prepared."""
        with self.lock:
            self._closed = True
            self._drop()

    def _drop(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._disk.close(fd)
            self._disk.remove(self.path)
