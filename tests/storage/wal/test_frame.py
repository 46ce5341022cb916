"""Frames: whole ones are read back, anything else is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.storage.wal import record, tail
from raftkv.storage.wal.record import MAGIC, SECTOR_BYTES, Frame, encode_frame, frame_size, read_frame

bodies = st.one_of(
    st.binary(max_size=2000),
    st.builds(lambda byte, size: bytes([byte]) * size, st.integers(0, 255), st.integers(0, 6000)),
    st.builds(lambda a, size, b: a + bytes(size) + b, st.binary(), st.integers(0, 3000), st.binary()),
)


def encoded(body: bytes, offset: int = 0, durable: int = 0, previous: int = 7, seed: int = 9) -> bytes:
    buffers, _crc = encode_frame(body, offset, durable, previous, seed)
    return bytes(offset) + b"".join(buffers)


def whole(data: bytes, offset: int = 0, seed: int = 9) -> Frame:
    frame = read_frame(data, offset, seed)
    assert frame is not None
    return frame


@given(bodies, st.integers(0, 200).map(lambda n: 8 * n), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_frame_reads_back(body: bytes, offset: int, previous: int, seed: int) -> None:
    data = encoded(body, offset, 8, previous, seed)
    frame = whole(data, offset, seed)
    assert frame.body == body
    assert (frame.header.durable, frame.header.previous, frame.header.offset) == (8, previous, offset)
    assert frame.header.end == len(data) == offset + frame_size(len(body))
    assert len(data) % 8 == 0


@given(bodies, st.integers(0, 200).map(lambda n: 8 * n))
def test_no_sector_of_a_frame_is_zero_and_its_last_byte_is_not(body: bytes, offset: int) -> None:
    data = encoded(body, offset)
    assert data[-1] != 0
    for sector in range(0, len(data), SECTOR_BYTES):
        part = data[max(sector, offset) : sector + SECTOR_BYTES]
        assert sector + SECTOR_BYTES <= offset or len(part) - part.count(0) >= 2


def test_a_body_of_zeros_is_masked_and_other_bodies_are_not() -> None:
    assert whole(encoded(bytes(127))).header.mask == 0
    assert whole(encoded(bytes(128))).header.mask != 0
    assert whole(encoded(b"x" * 4000)).header.mask == 0


def test_a_body_prepared_to_become_zeros_under_one_mask_gets_another() -> None:
    word = record._masked(bytes(4000), previous=7)[1]
    prepared = bytes(128) + word.to_bytes(4, "little") * 1000
    frame = whole(encoded(prepared))
    assert frame.body == prepared
    assert frame.header.mask not in {0, word}


@pytest.mark.parametrize("change", ["seed", "offset"])
def test_frame_of_other_segment_or_offset_is_ignored(change: str) -> None:
    data = encoded(b"body", 64)
    assert read_frame(data, 64, 9) is not None
    assert read_frame(data, 64, 10) is None if change == "seed" else read_frame(data[8:], 56, 9) is None


def test_every_flipped_bit_and_every_truncation_is_noticed() -> None:
    data = encoded(b"some body of 29 bytes or so..")
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        assert read_frame(bytes(flipped), 0, 9) is None, position
    for size in range(len(data)):
        assert read_frame(data[:size], 0, 9) is None, size


def test_absurd_length_with_valid_checksum_is_not_a_frame() -> None:
    for length in (record.BODY_MAX_BYTES + 1, 2**32 - 1, 5000):
        fields = record._pack_fields(MAGIC, length, 0, 0, 0, 0)
        header = fields + record._pack_check(record.extend(9, fields), record._HEADER_END)
        assert record.read_header(header, 0, 9) is not None
        assert read_frame(header + bytes(4064), 0, 9) is None


@given(st.integers(0, 40), st.lists(st.integers(0, 39), max_size=2), st.integers(0, 50), st.integers(0, 50))
def test_zeros_are_found_with_runs_of_any_length(size: int, ones: list[int], start: int, end: int) -> None:
    data = bytes(1 if position in ones else 0 for position in range(size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail, "_ZEROS", bytes(7))
        found = tail.is_zero(data, start, end)
    assert found == (not any(data[start:end]))
