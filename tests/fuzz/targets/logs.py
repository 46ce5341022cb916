"""Write-ahead log: records, whole segments, bodies in sound frames, the end of a torn one, and the mark of time."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from raftkv.errors import StorageError
from raftkv.raft.types import ConfState, Entry, HardState, SnapshotMeta
from raftkv.storage.applied_mark import AppliedMark, check_mark_format
from raftkv.storage.wal import WAL, WALCorruptError, WALVersionError
from raftkv.storage.wal.archive import Mark
from raftkv.storage.wal.record import (
    RecordError,
    decode_records,
    encode_entries,
    encode_frame,
    encode_hard_state,
    encode_metadata,
    encode_snapshot,
)
from raftkv.storage.wal.segment import SegmentReader
from tests.fuzz.target import Parse, Target
from tests.storage.wal.helpers import DIRECTORY, append_synced, create, last_segment
from tests.storage.wal.simdisk import SimDisk

SEGMENT_BYTES = 4096
REFUSALS = (WALCorruptError, WALVersionError)


def _log() -> SimDisk:
    disk = SimDisk()
    wal = create(disk, SEGMENT_BYTES)
    append_synced(wal, 1, 6)
    wal.save_snapshot(SnapshotMeta(4, 1, ConfState(voters=(1, 2, 3))))
    append_synced(wal, 7, 9, term=2)
    wal.close()
    return disk


def _bodies() -> list[bytes]:
    parts: list[bytes] = []
    encode_entries([Entry(3, 10, b"value"), Entry(3, 11, b"")], parts)
    return [
        b"".join(parts) + encode_hard_state(HardState(3, 1, 9)),
        encode_snapshot(SnapshotMeta(8, 2, ConfState((1, 2), (3,), (1,), (), True)))
        + encode_hard_state(HardState(2, 1, 8)),
        encode_metadata(b"cluster 1 member 2"),
    ]


def _open_twice(contents: dict[str, bytes]) -> None:
    """Open a log; what was cut off its end is cut off for good: opened again, it says the same and needs no repair."""
    disk = SimDisk.holding(contents)
    wal, first = WAL.open(DIRECTORY, disk=disk, segment_bytes=SEGMENT_BYTES)
    wal.close()
    wal, again = WAL.open(DIRECTORY, disk=disk, segment_bytes=SEGMENT_BYTES)
    wal.close()
    assert again.repair is None
    assert (again.entries, again.hard_state, again.snapshot) == (first.entries, first.hard_state, first.snapshot)


def _opened(directory: Path) -> Parse:
    """Input: the last segment as it lies on the disk, without the zeros behind it."""
    disk = _log()
    contents, name = disk.contents(), last_segment(disk)
    size = len(contents[name])
    return lambda data: _open_twice(contents | {name: data[:size].ljust(size, b"\0")})


def _segments() -> list[bytes]:
    disk = _log()
    return [disk.contents()[last_segment(disk)].rstrip(b"\0")]


def _framed(directory: Path) -> Parse:
    """Input: the body of one more frame, whose checksums are right."""
    disk = _log()
    contents, name = disk.contents(), last_segment(disk)
    image = contents[name]
    reader = SegmentReader(name, image, len(image))
    for _ in reader.frames():
        pass
    at = reader.offset

    def parse(body: bytes) -> None:
        pieces, _ = encode_frame(body[: SEGMENT_BYTES - at - 64], at, at, reader.crc, reader.seed)
        frame = b"".join(pieces)
        _open_twice(contents | {name: image[:at] + frame + image[at + len(frame) :]})

    return parse


def _read_mark(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    check_mark_format(path)
    mark = AppliedMark(path)
    try:
        mark.note(mark.index + 1 if mark.index < 2**64 - 1 else 1, mark.term)
    finally:
        mark.close()


def _line(data: bytes) -> None:
    mark = Mark.parse(data.decode("utf-8", "replace"))
    if mark is None:
        raise ValueError("no mark")
    assert Mark.parse(str(mark)) == mark


def _marks() -> list[bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "mark"
        mark = AppliedMark(path)
        mark.note(7, 2)
        mark.note(8, 2)
        mark.close()
        present = later = path.read_bytes()
        for slot in (0, 64):
            later = later[: slot + 20] + b"\2" + later[slot + 21 :]
        return [present, later]


TARGETS = (
    Target(
        "wal-records",
        lambda directory: lambda data: list(decode_records(data)),
        _bodies,
        (RecordError,),
        tokens=(b"\xff\xff\xff\xff", b"\x04\0\0\0"),
    ),
    Target("wal-segment", _opened, _segments, REFUSALS, tokens=(b"\xa7rkW", b"hdr\x5a", b"end\x5a"), examples=60),
    Target("wal-body", _framed, lambda: [b"", *_bodies()], REFUSALS, tokens=(b"\xff" * 8,), examples=60),
    Target(
        "applied-mark", lambda directory: partial(_read_mark, directory / "mark"), _marks, (StorageError,), examples=30
    ),
    Target(
        "archive-mark",
        lambda directory: _line,
        lambda: [str(Mark(1.7e9, 7, 5, 2)).encode()],
        (ValueError,),
        tokens=(b"+23:59", b"Z ", b"9999-12-31T23:59:59", b"0001-01-01T00:00:00"),
        examples=60,
    ),
)
