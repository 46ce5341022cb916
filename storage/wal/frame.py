"""A frame: the bytes of one append, with checks that tell a torn write from damage.

Owns the framing and nothing else: what the body means is ``record.py``, where the log ends is ``tail.py``. The
layout is drawn in the package's docstring.

Invariants of a frame on disk, each of which ``tail.py`` rests on:

- it begins and ends on a multiple of 8 bytes, and lies within one segment;
- its own offset is in its header, so that a copy of a frame elsewhere (in a client's value, say) is not one;
- both checksums depend, through the seed, on the head of the segment: nothing from another log passes;
- no 512-byte sector of it is all zeros, and its header and its trailer end in a byte that is not zero: bytes
  that never reached the disk show as zeros, and a single flipped bit cannot look like that.

The last one needs help where a client stores zeros: such a body is XORed with a word that is kept in the header.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from google_crc32c import extend

HEADER_BYTES: Final = 32
TRAILER_BYTES: Final = 8
SECTOR_BYTES: Final = 512
BODY_MAX_BYTES: Final = 1 << 30
"""A longer body is a mistake of the caller; it keeps every length far from the 32 bits of the header."""

MAGIC: Final = b"\xa7rkW"
_HEADER_END: Final = b"hdr\x5a"
_TRAILER_END: Final = b"end\x5a"
_FIELDS: Final = Struct("<4s5I")  # magic, body length, offset, durable offset, previous checksum, mask
_CHECK: Final = Struct("<I4s")  # checksum, end mark
_FIELDS_BYTES: Final = _FIELDS.size

# A sector with one byte left in it still has a run of 255 zeros: by masking from half of that on, a frame keeps
# several bytes per sector, so that no flip of one bit turns a sector into zeros.
_ZERO_RUN: Final = bytes(128)
_MASK_TRIES: Final = 16

_pack_fields: Final = _FIELDS.pack
_pack_check: Final = _CHECK.pack
_PADDING: Final = tuple(bytes(-n % 8) for n in range(8))


def frame_size(body_bytes: int) -> int:
    """Return the bytes that a frame with a body of ``body_bytes`` takes in a segment."""
    return HEADER_BYTES + (body_bytes + 7 & ~7) + TRAILER_BYTES


def encode_frame(
    body: bytes, offset: int, durable: int, previous: int, seed: int
) -> tuple[tuple[bytes, bytes, bytes], int]:
    """Frame a body for its place in a segment.

    Arguments:
        body: at most ``BODY_MAX_BYTES``.
        offset: where the frame begins in the segment, a multiple of 8.
        durable: every byte of the segment below this offset was synced before now.
        previous: checksum of the frame before.
        seed: checksum of the head frame of the segment (0 for the head itself).

    Returns:
        the buffers to write in order, and the checksum of the frame.
    """
    length = len(body)
    mask = 0
    # Nearly no body has such a run, and then nothing is copied.
    if _ZERO_RUN in body:
        body, mask = _masked(body, previous)
    fields = _pack_fields(MAGIC, length, offset, durable, previous, mask)
    # The header has a checksum of its own, so that a flipped bit in the length is seen before the length is believed.
    # The checksum of the body goes on from it, so the trailer covers the whole frame.
    header_crc = extend(seed, fields)
    padding = _PADDING[length & 7]
    crc = extend(header_crc, body)
    if padding:
        crc = extend(crc, padding)
    header = fields + _pack_check(header_crc, _HEADER_END)
    # Three buffers for one ``pwritev``: the body is not copied once more.
    return (header, body, padding + _pack_check(crc, _TRAILER_END)), crc


def _masked(body: bytes, previous: int) -> tuple[bytes, int]:
    """``body`` without long runs of zeros, and the word that undoes it.

    The word depends on the checksum so far, which a client cannot foresee, so no client can prepare a value that
    turns into zeros.
    """
    masked, word = body, 0
    # A word without a zero byte turns a run of zeros into something else; it turns bytes equal to itself into zeros, so
    # the result is looked at. If every word fails the last one is used: the frame can be read all the same, only damage
    # in it might be taken for a torn write.
    for attempt in range(1, _MASK_TRIES):
        word = extend(previous, attempt.to_bytes(4, "little")) | 0x01010101
        masked = _xor(body, word)
        if _ZERO_RUN not in masked:
            break
    return masked, word


def _xor(data: bytes, word: int) -> bytes:
    # As one large integer: a loop over the bytes would run in the interpreter.
    size = len(data)
    pattern = (word.to_bytes(4, "little") * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "little") ^ int.from_bytes(pattern, "little")).to_bytes(size, "little")


class Header:
    """The header of a frame whose own checksum is right."""

    __slots__ = ("crc", "durable", "end", "length", "mask", "offset", "previous")

    def __init__(self, offset: int, length: int, durable: int, previous: int, mask: int, crc: int) -> None:
        self.offset = offset
        self.length = length
        self.durable = durable
        self.previous = previous
        self.mask = mask
        self.crc = crc
        self.end = offset + frame_size(length)


class Frame:
    """A whole frame: its header, its body as it was given to ``encode_frame``, and its checksum."""

    __slots__ = ("body", "body_offset", "crc", "header")

    def __init__(self, header: Header, body: bytes, crc: int) -> None:
        self.header = header
        self.body = body
        self.body_offset = header.offset + HEADER_BYTES
        self.crc = crc


def read_header(data: bytes, offset: int, seed: int) -> Header | None:
    """Return the header of a frame, or None if there is no undamaged one.

    Arguments:
        data: the whole segment.
        offset: where the frame begins.
        seed: checksum of the segment's head frame.
    """
    if offset + HEADER_BYTES > len(data):
        return None
    fields = data[offset : offset + _FIELDS_BYTES]
    magic, length, own_offset, durable, previous, mask = _FIELDS.unpack(fields)
    crc, end_mark = _CHECK.unpack_from(data, offset + _FIELDS_BYTES)
    # Its own offset too: the bytes of a frame inside a client's value are no frame of the log.
    if magic != MAGIC or end_mark != _HEADER_END or own_offset != offset or crc != extend(seed, fields):
        return None
    return Header(offset, length, durable, previous, mask, crc)


def read_frame(data: bytes, offset: int, seed: int) -> Frame | None:
    """Return a frame, or None if there is no undamaged one.

    It never reads or allocates by a length that its checksum does not vouch for, nor beyond ``data``.

    Arguments:
        data: the whole segment.
        offset: where the frame begins.
        seed: checksum of the segment's head frame.
    """
    header = read_header(data, offset, seed)
    # Bounds before anything is read by the length, although its checksum is right.
    if header is None or header.length > BODY_MAX_BYTES or header.end > len(data):
        return None
    start = offset + HEADER_BYTES
    trailer = header.end - TRAILER_BYTES
    crc, end_mark = _CHECK.unpack_from(data, trailer)
    if end_mark != _TRAILER_END or crc != extend(header.crc, data[start:trailer]):
        return None
    body = data[start : start + header.length]
    return Frame(header, _xor(body, header.mask) if header.mask else body, crc)
