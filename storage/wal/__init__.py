"""The write-ahead log: the durable state of Raft, in segment files.

The interface is ``WAL`` (``wal.py``): ``create``, ``open``, ``append``, ``sync``, ``save_snapshot``,
``release``, ``close``.

This package manages the files below ``member/wal``. Invariants: everything appended before a successful ``sync`` is
there after any crash, or ``open`` fails; a batch is there as a whole or not at all; after a failed write or sync the
log refuses all further writes; only the tail of the last segment may be cut, and only where a crash can have torn it.

    segment 0, indexes 1..4 (full)            segment 1, first index 5
    +------+---------+--------------+ 0 0     +------+--------------+-------------------+ 0 0 0 0 ... 0 0
    | head | 1 2  hs | 3 4 marker 2 |         | head | 5 6 7   hs   | 6' 7' 8'   hs     |  not written yet
    +------+---------+--------------+         +------+--------------+-------------------+
       ^        one frame = one append           ^         ^              ^ a new leader: 6 and 7 are overwritten
       |                                         |         synced before the next frame was written
       version, metadata, hard state, marker     repeats hard state and marker 2: once a marker at 4 or later
                                                 is durable, segment 0 is deleted as a whole (``release``)

Reading order: this page, ``record.py``, ``tail.py``, ``segment.py``, ``recovery.py``,
``wal.py``; beside them ``disk.py`` (the operating system behind a protocol) and ``describe.py`` (dumps).

THE FORMAT, version 1. All numbers little-endian; checksums are CRC32C (Castagnoli).

A *segment* is a file ``<sequence>-<first index>.wal`` (16 hexadecimal digits each), allocated at its full size
(64 MiB); unwritten parts are zeros. It is a sequence of frames::

    | head frame | frame | frame | ... | zeros to the end of the file |

A *frame* has the bytes of one append, all or nothing. It begins and ends on a multiple of 8 bytes::

    offset  size
         0     4  magic a7 72 6b 57
         4     4  length of the body in bytes
         8     4  offset of this frame in the segment
        12     4  durable offset: all bytes of the segment before it were synced before this frame was written
        16     4  checksum of the previous frame (for a head frame: of the last frame of the previous segment; else 0)
        20     4  mask: 0, or the word with which the body is XORed (used for a body with long runs of zeros)
        24     4  checksum of bytes 0..24, seeded with the checksum of the segment's head frame (0 for the head)
        28     4  68 64 72 5a
        32     n  body, then 0 to 7 zeros
       end-8    4  checksum of body and zeros as they are on disk, seeded with the checksum at 24
       end-4    4  65 6e 64 5a

So the last checksum of a frame depends on every byte of the log before it: the chain.

A body is a sequence of *records*: 4 bytes length of the rest, 1 byte kind, 1 byte entry type, 2 bytes 0, the rest::

    kind 1  segment     version u32, size of the file u32, sequence u64, first index u64
    kind 2  metadata    bytes of the caller
    kind 3  hard state  term u64, vote u64, commit u64
    kind 4  entry       term u64, index u64, data
    kind 5  snapshot    index u64, term u64, four counts u16, auto_leave u64, then the member ids u64:
                        voters, learners, outgoing voters, next learners

A head frame holds kinds 1, 2, 3, 5 in this order, which is enough to read on from there without earlier segments. Other
frames hold entries then a hard state, or a snapshot marker then a hard state.

WHY FRAMES AND NOT SINGLE RECORDS (as etcd has them): one checksum per batch is several times cheaper than one per
entry, a batch is recovered as a whole or not at all, and the header has room for two fields that distinguish a torn
write from damage: its own checksum, so that a flipped bit in the length is detected at once; and the durable offset, so
that a later frame proves what had been synced. ``tail.py`` makes the decision.

Not here: when to sync, when to release, and what to do when the disk is full (see the member's loop).
"""

from raftkv.storage.wal.disk import (
    WALCorruptError,
    WALExistsError,
    WALFailedError,
    WALLockedError,
    WALNotFoundError,
    WALSpaceError,
    WALVersionError,
)

from .describe import Found, describe, describe_found, walk
from .disk import ReadingDisk
from .recovery import Recovered
from .wal import WAL

__all__ = [
    "WAL",
    "Found",
    "ReadingDisk",
    "Recovered",
    "WALCorruptError",
    "WALExistsError",
    "WALFailedError",
    "WALLockedError",
    "WALNotFoundError",
    "WALSpaceError",
    "WALVersionError",
    "describe",
    "describe_found",
    "walk",
]
