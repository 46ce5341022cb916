"""Decides whether the end of a log is the result of a crash or of damage.

The bytes at ``offset`` are not a valid frame. They are the end of the written data, the trace of a write that a crash
interrupted, or damage. Only in the first two cases may a member start, because a frame that was synced may have been
acknowledged: cutting it off would lose it silently.

The rule: a crash leaves *new sectors that never arrived*, and those read as zeros, since segments are allocated
anew and never reused. A frame has no sector of zeros (``record.py``). So:

    what is at offset                                    verdict
    zeros to the end of the segment                      END
    a frame with a sector of zeros in it                 TORN     a power cut
    a frame that stops, and zeros from there on          TORN     a killed process, a short write
    a sector of zeros, and remains of later writes       TORN     a power cut, sectors out of order
    any of these, and later an undamaged frame saying
      that the bytes here were synced before it          DAMAGED
    anything else: all sectors there, one is wrong       DAMAGED

    |..frame 7..|..frame 8: header ok, one sector zero..|..frame 9: ok, durable = its start..|   frame 8 was synced

One flipped bit inside a frame is always DAMAGED: it can produce neither a sector of zeros nor a zero byte at the end of
a header or trailer (both end marks end in a byte with four bits set).

Limitation: a device that loses whole synced sectors of the *last* group of frames and returns zeros for them looks like
a power cut; only the other members can know.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from raftkv.storage.wal.record import HEADER_BYTES, MAGIC, SECTOR_BYTES, Frame, Header, read_frame, read_header


class Verdict(enum.Enum):
    """A verdict on the bytes after the last good frame."""

    END = "end"
    TORN = "torn"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Tail:
    """A verdict on the end of a segment, and its reason for the user."""

    verdict: Verdict
    reason: str


_ZEROS: Final = bytes(1 << 16)
_END: Final = Tail(Verdict.END, "nothing was written from here on")


def classify_tail(data: bytes, size_bytes: int, offset: int, seed: int) -> Tail:
    """Return the verdict on an offset of a segment where ``read_frame`` found no frame.

    Arguments:
        data: the segment up to its last byte that is not zero, or any longer part.
        size_bytes: size of the whole segment.
        offset: end of the last good frame.
        seed: checksum of the segment's head frame.
    """
    if is_zero(data, offset, size_bytes):
        return _END
    # Look for a witness first: a later frame that states that these bytes were synced excludes a crash.
    witness = _synced_witness(data, offset, seed)
    if witness is not None:
        where = witness.header.offset
        return Tail(Verdict.DAMAGED, f"no valid frame, though the one at offset {where} was written after a sync")
    header = read_header(data, offset, seed)
    if header is None:
        return _classify_header(data, size_bytes, offset)
    return _classify_body(data, size_bytes, header)


def _synced_witness(data: bytes, offset: int, seed: int) -> Frame | None:
    """Return a later frame that was written after the bytes at ``offset`` were durable."""
    # Frames begin at multiples of 8, so the next one begins at least 8 bytes later.
    return next((frame for frame in intact_frames(data, offset + 8, seed) if frame.header.durable > offset), None)


def intact_frames(data: bytes, offset: int, seed: int) -> Iterator[Frame]:
    """Iterate over every undamaged frame, skipping any bytes between them.

    Arguments:
        data: the whole segment.
        offset: where to begin.
        seed: checksum of the segment's head frame.
    """
    while (offset := data.find(MAGIC, offset)) >= 0:
        frame = read_frame(data, offset, seed)
        if frame is not None:
            yield frame
        # The magic can also be part of a value, for example: continue right after it.
        offset = offset + 1 if frame is None else frame.header.end


def _classify_header(data: bytes, size_bytes: int, offset: int) -> Tail:
    sector_end = _sector_end(offset)
    if is_zero(data, offset, sector_end):
        return Tail(Verdict.TORN, "the first sector of a write is missing")
    # The header spans two sectors, and the second did not arrive.
    if sector_end < offset + HEADER_BYTES and is_zero(data, sector_end, sector_end + SECTOR_BYTES):
        return Tail(Verdict.TORN, "a write stops in its header")
    # The last byte of a header is never zero, so a completely written header cannot end in zeros.
    if offset + HEADER_BYTES <= size_bytes and is_zero(data, offset + HEADER_BYTES - 1, size_bytes):
        return Tail(Verdict.TORN, "a write stops in its header")
    return Tail(Verdict.DAMAGED, "neither a valid frame header nor the trace of a crash")


def _classify_body(data: bytes, size_bytes: int, header: Header) -> Tail:
    end = header.end
    # The header's checksum is correct, so the length is what was written, and no writer writes beyond a segment.
    if end > size_bytes:
        return Tail(Verdict.DAMAGED, f"a frame of {header.length} bytes is longer than the rest of the segment")
    # The first sector has the header, which arrived. A sector is on the disk as a whole or not at all (``disk.py``).
    sector = _sector_end(header.offset)
    while sector < end:
        if is_zero(data, sector, sector + SECTOR_BYTES):
            return Tail(Verdict.TORN, f"the sector at offset {sector} of a write is missing")
        sector += SECTOR_BYTES
    # The last byte of a trailer is never zero: the write was interrupted, by a kill or in its last sector.
    if is_zero(data, end - 1, size_bytes):
        return Tail(Verdict.TORN, "a write stops before its end")
    return Tail(Verdict.DAMAGED, "checksum mismatch in a frame that was written to its end")


def _sector_end(offset: int) -> int:
    return offset - offset % SECTOR_BYTES + SECTOR_BYTES


def is_zero(data: bytes, start: int, end: int) -> bool:
    """Return whether all bytes from ``start`` to ``end`` are zero.

    Arguments:
        data: the segment up to its last byte that is not zero, or any longer part.
        start, end: offsets in the segment; both may be beyond the data.
    """
    end = min(end, len(data))
    # With ``memcmp``, a block of zeros at a time: 1 ms for the empty rest of a segment, where counting takes 40 ms.
    while end - start > len(_ZEROS):
        if not data.startswith(_ZEROS, start):
            return False
        start += len(_ZEROS)
    return start >= end or data.startswith(_ZEROS[: end - start], start)


def written_end(data: bytes) -> int:
    """Return the offset after the last byte that is not zero."""
    return len(data.rstrip(b"\0"))
