"""Helpers that create entries and logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raftkv.raft.types import Entry, HardState
from raftkv.storage.wal import WAL, Recovered, WALCorruptError
from tests.storage.wal.simdisk import SimDisk

DIRECTORY = "/wal"
METADATA = b"cluster 1 member 2"


def entries(first: int, last: int, term: int = 1, data: bytes = b"x" * 20) -> list[Entry]:
    return [Entry(term, index, data + str(index).encode()) for index in range(first, last + 1)]


def create(disk: SimDisk, segment_bytes: int = 4096) -> WAL:
    return WAL.create(DIRECTORY, METADATA, segment_bytes=segment_bytes, disk=disk)


def reopen(disk: SimDisk, segment_bytes: int = 4096, snapshot_index: int | None = None) -> tuple[WAL, Recovered]:
    return WAL.open(DIRECTORY, segment_bytes=segment_bytes, disk=disk, snapshot_index=snapshot_index)


def recover(disk: SimDisk) -> Recovered:
    wal, recovered = reopen(disk)
    wal.close()
    return recovered


def recover_or_refuse(contents: dict[str, bytes]) -> Recovered | WALCorruptError:
    """Open an image; any exception other than the declared one escapes."""
    try:
        return recover(SimDisk.holding(contents))
    except WALCorruptError as error:
        return error


def indexes(log: Iterable[Entry]) -> list[int]:
    return [entry.index for entry in log]


def last_segment(disk: SimDisk) -> str:
    return max(path for path in disk.names if path.endswith(".wal"))


def append_synced(wal: WAL, first: int, last: int, term: int = 1, data: bytes = b"x" * 20) -> None:
    """One frame and one sync for each entry."""
    for entry in entries(first, last, term, data):
        wal.append(HardState(term, 1, entry.index - 1), [entry])
        wal.sync()


def flips(data: bytes, positions: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    """``data`` with one bit flipped, for each bit position."""
    for position in positions:
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        yield position, bytes(flipped)
