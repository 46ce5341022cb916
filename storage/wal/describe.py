"""A log on disk as one sequence of located records, and as text: for dumps, tests, and inspecting damaged logs.

Reads without the lock and changes nothing (with ``ReadingDisk``). Where the log becomes unreadable, ``walk`` raises,
and the last line of ``describe`` gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raftkv.raft.types import Entry, HardState, SnapshotMeta
from raftkv.storage.wal.disk import WALCorruptError
from raftkv.storage.wal.record import Frame

from .disk import Disk, RealDisk
from .record import Metadata, Record, SegmentHead
from .segment import SegmentName, list_segments, load_segment
from .tail import Tail

_REAL_DISK = RealDisk()


@dataclass(frozen=True, slots=True)
class Found:
    """One item of a log and its position: a segment's size in bytes, a frame (its records follow), a record, a tail."""

    segment: SegmentName
    offset: int
    what: int | Frame | Record | Tail


def walk(directory: str, disk: Disk = _REAL_DISK) -> Iterator[Found]:
    """Iterate over every segment, frame and record of a log, in order, each segment with its tail last.

    Arguments:
        directory: directory of the log.
        disk: the file operations.

    Raises:
        WALCorruptError: the rest of the log cannot be read.
    """
    for name in list_segments(disk, directory):
        yield from _walk_segment(disk, directory, name)


def _walk_segment(disk: Disk, directory: str, name: SegmentName) -> Iterator[Found]:
    reader = load_segment(disk, directory, name)
    yield Found(name, 0, reader.size_bytes)
    for offset, record in reader.records(reader.head_frame):
        yield Found(name, offset, record)
    for frame in reader.frames():
        yield Found(name, frame.header.offset, frame)
        for offset, record in reader.records(frame):
            yield Found(name, offset, record)
    yield Found(name, reader.offset, reader.tail())


def describe(directory: str, disk: Disk = _REAL_DISK) -> Iterator[str]:
    """Iterate over a line for every segment, frame and record of a log, in order.

    Arguments:
        directory: directory of the log.
        disk: the file operations.
    """
    try:
        for found in walk(directory, disk):
            yield describe_found(found)
    except WALCorruptError as error:
        yield f"damaged: {error}"


def describe_found(found: Found) -> str:
    """Return the line for one item of a log."""
    match found.what:
        case int(size_bytes):
            return f"segment {found.segment}: {size_bytes} bytes"
        case Frame(header=header, crc=crc):
            text = f"frame: {header.length} bytes, durable {header.durable}, crc {crc:08x}"
        case Entry() as entry:
            text = f"entry {entry.term}/{entry.index} {entry.type.name} {len(entry.data)} bytes"
        case HardState() as state:
            text = f"hard state: term {state.term}, vote {state.vote:x}, commit {state.commit}"
        case SnapshotMeta() as meta:
            text = f"snapshot {meta.term}/{meta.index} voters {_ids(meta.conf_state.voters)}"
        case Metadata(data):
            text = f"metadata: {data.hex()}"
        case SegmentHead() as head:
            text = f"head: sequence {head.sequence}, first index {head.first_index}, version {head.version}"
        case Tail(verdict, reason):
            text = f"{verdict.value}: {reason}"
    return f"{found.offset:>10} {text}"


def _ids(ids: tuple[int, ...]) -> str:
    return ",".join(f"{member:x}" for member in ids) or "none"
