"""The text form of a log on disk, one line a record: for dumps, tests, and looking at a damaged log.

Reads without the lock and changes nothing. Where the log stops being readable, the last line says why.
"""

from __future__ import annotations

from collections.abc import Iterator

from raftkv.raft.types import Entry, HardState, SnapshotMeta

from .disk import Disk, RealDisk
from .errors import WALCorruptError
from .record import Metadata, Record, SegmentHead
from .segment import SegmentName, list_segments, load_segment
from .tail import classify_tail

_REAL_DISK = RealDisk()


def describe(directory: str, disk: Disk = _REAL_DISK) -> Iterator[str]:
    """Iterate over a line for every segment, frame and record of a log, in order.

    Arguments:
        directory: of the log.
        disk: the file operations.
    """
    try:
        for name in list_segments(disk, directory):
            yield from _describe_segment(disk, directory, name)
    except WALCorruptError as error:
        yield f"damaged: {error}"


def _describe_segment(disk: Disk, directory: str, name: SegmentName) -> Iterator[str]:
    reader = load_segment(disk, directory, name)
    yield f"segment {name}: {len(reader.data)} bytes"
    for offset, record in reader.records(reader.head_frame):
        yield f"{offset:>10} {_describe_record(record)}"
    for frame in reader.frames():
        header = frame.header
        yield f"{header.offset:>10} frame: {header.length} bytes, durable {header.durable}, crc {frame.crc:08x}"
        for offset, record in reader.records(frame):
            yield f"{offset:>10} {_describe_record(record)}"
    tail = classify_tail(reader.data, reader.offset, reader.seed)
    yield f"{reader.offset:>10} {tail.verdict.value}: {tail.reason}"


def _describe_record(record: Record) -> str:
    match record:
        case Entry():
            return f"entry {record.term}/{record.index} {record.type.name} {len(record.data)} bytes"
        case HardState():
            return f"hard state: term {record.term}, vote {record.vote:x}, commit {record.commit}"
        case SnapshotMeta():
            return f"snapshot {record.term}/{record.index} voters {_ids(record.conf_state.voters)}"
        case Metadata():
            return f"metadata: {record.data.hex()}"
        case SegmentHead():
            return f"head: sequence {record.sequence}, first index {record.first_index}, version {record.version}"


def _ids(ids: tuple[int, ...]) -> str:
    return ",".join(f"{member:x}" for member in ids) or "none"
