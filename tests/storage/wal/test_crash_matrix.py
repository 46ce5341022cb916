"""Every possible image after a crash is recovered exactly; every flipped bit and truncation is recovered or refused.

The outcome of opening a damaged log is one of two: every synced entry is there, or ``WALCorruptError`` names the
file and an offset in it. ``RAFTKV_CRASH_MATRIX=full`` tries every bit of the large log too, not a sample of it.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable

import pytest

from raftkv.raft.types import Entry, HardState
from raftkv.storage.wal import WALCorruptError
from raftkv.storage.wal.record import SECTOR_BYTES, read_frame
from tests.storage.wal.helpers import (
    append_synced,
    create,
    entries,
    flips,
    indexes,
    last_segment,
    recover,
    recover_or_refuse,
)
from tests.storage.wal.simdisk import SimDisk

FULL = os.environ.get("RAFTKV_CRASH_MATRIX") == "full"


class Image:
    """A log of two segments at rest, and what must be recovered from it."""

    def __init__(self, segment_bytes: int, payloads: list[bytes]) -> None:
        self.disk = SimDisk()
        wal = create(self.disk, segment_bytes)
        append_synced(wal, 1, 2, data=b"w" * (segment_bytes // 3))
        for index, payload in enumerate(payloads, 3):
            wal.append(HardState(1, 1, index - 1), [Entry(1, index, payload)])
            wal.sync()
        self.end = wal._offset
        wal.close()
        assert len(wal.segments) == 2
        self.path = last_segment(self.disk)
        self.contents = self.disk.contents()
        self.data = self.contents[self.path]
        self.entries = recover(self.disk).entries
        assert len(self.entries) == 2 + len(payloads)

    def check(self, data: bytes, path: str | None = None) -> bool:
        """Open with ``data`` in place of a segment; whether it was refused."""
        path = path or self.path
        result = recover_or_refuse({**self.contents, path: data})
        if isinstance(result, WALCorruptError):
            assert result.path == path
            assert 0 <= result.offset <= len(self.data)
            return True
        assert result.entries == self.entries
        assert result.hard_state == HardState(1, 1, self.entries[-1].index - 1)
        return False


@pytest.fixture(scope="module")
def small() -> Image:
    """The last segment has 2 KiB: text, zeros for more than a sector, nothing, random bytes."""
    return Image(2048, [b"some text", bytes(600), b"", random.Random(1).randbytes(150)])


@pytest.fixture(scope="module")
def large() -> Image:
    """The last segment has 64 KiB, half of it a single frame."""
    rng = random.Random(2)
    return Image(1 << 16, [rng.randbytes(size) for size in (300, 30_000, 10, 2_000)] + [bytes(5_000)])


@pytest.mark.long
def test_every_flipped_bit_of_a_synced_frame_is_refused(small: Image) -> None:
    accepted = [bit for bit, data in flips(small.data, range(8 * small.end)) if not small.check(data)]
    assert accepted == []


@pytest.mark.long
def test_every_flipped_bit_of_the_unused_rest_loses_nothing(small: Image) -> None:
    for _bit, data in flips(small.data, range(8 * small.end, 8 * len(small.data))):
        small.check(data)


def test_every_flipped_bit_of_an_earlier_segment_is_refused(small: Image) -> None:
    first = min(small.contents)
    data = small.contents[first]
    accepted = [bit for bit, flipped in flips(data, range(0, 8 * len(data), 7)) if not small.check(flipped, first)]
    assert accepted == []


def test_every_truncation_is_refused(small: Image) -> None:
    """A segment has its full length from the start, so a shorter file is no trace of a crash."""
    accepted = [size for size in range(len(small.data)) if not small.check(small.data[:size])]
    assert accepted == []
    assert small.check(small.data + b"\0")


@pytest.mark.long
def test_flips_all_over_a_large_segment_lose_nothing(large: Image) -> None:
    bits: Iterable[int] = range(8 * len(large.data))
    rng = random.Random(3)
    if not FULL:
        bits = sorted(rng.sample(bits, 3000))
    refused = sum(large.check(data) for _bit, data in flips(large.data, bits))
    assert refused > 0


def test_several_flips_at_once_lose_nothing(large: Image) -> None:
    rng = random.Random(4)
    for _round in range(500):
        data = bytearray(large.data)
        for _flip in range(rng.randrange(2, 9)):
            data[rng.randrange(large.end)] ^= 1 << rng.randrange(8)
        assert large.check(bytes(data)) or bytes(data) == large.data


class Unsynced:
    """A log whose last frames were written and not synced, cut up in the ways a crash does."""

    def __init__(self, payloads: list[bytes]) -> None:
        self.disk = SimDisk()
        wal = create(self.disk, 8192)
        append_synced(wal, 1, 3)
        self.start = wal._offset
        self.seed = wal._seed
        for index, payload in enumerate(payloads, 4):
            wal.append(None, [Entry(1, index, payload)])
        self.end = wal._offset
        self.path = last_segment(self.disk)
        self.contents = self.disk.contents()
        self.data = self.contents[self.path]

    def whole_frames(self, data: bytes) -> int:
        """How many of the un-synced frames came through, from the first on."""
        offset, count = self.start, 0
        while (frame := read_frame(data, offset, self.seed)) is not None:
            offset, count = frame.header.end, count + 1
        return count

    def check(self, data: bytes) -> None:
        result = recover_or_refuse({**self.contents, self.path: data})
        assert not isinstance(result, WALCorruptError), str(result)
        assert indexes(result.entries) == list(range(1, 4 + self.whole_frames(data)))
        assert (result.repair is None) == (not any(data[self._end_of_whole(data) :]))

    def _end_of_whole(self, data: bytes) -> int:
        offset = self.start
        while (frame := read_frame(data, offset, self.seed)) is not None:
            offset = frame.header.end
        return offset


PAYLOADS = [
    [b"p" * 700, b"q" * 300, bytes(1500)],
    [b""] * 12,
    [bytes(2100)],
    [random.Random(5).randbytes(100) for _ in range(8)],
]


@pytest.mark.long
@pytest.mark.parametrize("payloads", PAYLOADS)
def test_a_write_cut_short_at_any_byte_is_cut_off(payloads: list[bytes]) -> None:
    log = Unsynced(payloads)
    for size in range(log.start, log.end + 1):
        log.check(log.data[:size].ljust(len(log.data), b"\0"))


@pytest.mark.parametrize("payloads", PAYLOADS)
def test_any_subset_of_the_unsynced_sectors_is_cut_off(payloads: list[bytes]) -> None:
    log = Unsynced(payloads)
    first = log.start // SECTOR_BYTES
    sectors = range(first, -(-log.end // SECTOR_BYTES))
    synced = log.data[: log.start].ljust(len(log.data), b"\0")
    for kept in itertools.product((False, True), repeat=len(sectors)):
        image = bytearray(synced)
        for sector in itertools.compress(sectors, kept):
            part = slice(sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES)
            image[part] = log.data[part]
        log.check(bytes(image))


@pytest.mark.long
def test_frames_at_every_place_in_a_sector_are_cut_off() -> None:
    """Headers and trailers that lie across a sector boundary, at each of the 64 places."""
    for filler in range(0, SECTOR_BYTES, 8):
        disk = SimDisk()
        wal = create(disk)
        wal.append(None, [Entry(1, 1, b"f" * filler)])
        wal.sync()
        start = wal._offset
        wal.append(None, entries(2, 2, data=b"g" * 1200))
        end = wal._offset
        path = last_segment(disk)
        whole = disk.contents()
        data = whole[path]
        boundary = -(-start // SECTOR_BYTES) * SECTOR_BYTES
        images = [data[:size].ljust(len(data), b"\0") for size in (*range(start, start + 80), *range(end - 16, end))]
        if start < boundary < end:
            images.append(data[:start] + bytes(boundary - start) + data[boundary:])
            images.append(data[:boundary].ljust(len(data), b"\0"))
            images.append(data[:boundary] + bytes(SECTOR_BYTES) + data[boundary + SECTOR_BYTES :])
        for image in images:
            result = recover_or_refuse({**whole, path: image})
            assert not isinstance(result, WALCorruptError), f"{filler}: {result}"
            assert indexes(result.entries) == [1]


def test_a_missing_sector_is_refused_when_a_later_frame_was_written_after_the_sync() -> None:
    disk = SimDisk()
    wal = create(disk, 8192)
    append_synced(wal, 1, 3)
    start = wal._offset
    append_synced(wal, 4, 6, data=b"r" * 1200)
    wal.close()
    path = last_segment(disk)
    whole = disk.contents()
    sector = -(-start // SECTOR_BYTES) * SECTOR_BYTES
    image = whole[path][:sector] + bytes(SECTOR_BYTES) + whole[path][sector + SECTOR_BYTES :]
    result = recover_or_refuse({**whole, path: image})
    assert isinstance(result, WALCorruptError)
    assert result.offset == start
    assert "was written after a sync" in result.reason


def test_a_copy_of_a_frame_in_a_value_does_not_testify() -> None:
    """A client may store the bytes of a log, at any alignment; a torn write before them still counts as torn."""
    disk = SimDisk()
    wal = create(disk, 8192)
    append_synced(wal, 1, 2)
    start = wal._offset
    frame = bytes(disk.names[last_segment(disk)].data[152:start])
    wal.append(None, [Entry(1, 3, b"t" * 1300), Entry(1, 4, b"".join(bytes(n) + frame for n in range(8)))])
    path = last_segment(disk)
    whole = disk.contents()
    sector = -(-start // SECTOR_BYTES) * SECTOR_BYTES
    image = whole[path][:sector] + bytes(SECTOR_BYTES) + whole[path][sector + SECTOR_BYTES :]
    result = recover_or_refuse({**whole, path: image})
    assert not isinstance(result, WALCorruptError), str(result)
    assert indexes(result.entries) == [1, 2]


def test_garbage_that_no_crash_explains_is_refused() -> None:
    disk = SimDisk()
    wal = create(disk)
    append_synced(wal, 1, 3)
    start = wal._offset
    wal.close()
    path = last_segment(disk)
    whole = disk.contents()
    garbage = random.Random(6).randbytes(4096 - start)
    result = recover_or_refuse({**whole, path: whole[path][:start] + garbage})
    assert isinstance(result, WALCorruptError)
    assert result.offset == start
