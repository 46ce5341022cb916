"""The applied mark: the newest applied index of a member, kept in a file that survives kill -9.

    DATA/member/snap/applied    two slots of 64 bytes: index u64, term u64, CRC32C u32, format u32, the rest zeros

Clients of a member see everything that it has applied. After a restart, the member could show less than before: the
database is about 100 ms behind, and the commit index reaches the log only with the next entries. It would catch up only
when a leader sends the commit index, so never while the cluster has no leader. Therefore the member writes each applied
index to this file before clients can see the effects of that entry. The write is a store into memory-mapped file pages:
it costs half a microsecond, needs no system call, and survives the process. At the next start, every entry up to the
mark is known to be committed (it was applied) and to be in the log (entries are durable there before they are applied),
so the member applies these entries again before it serves.

A power cut may lose the last stores into the page, but never the synced log. The mark is then too low but still
correct, and a quorum supplies the rest (``replica/membership/presence``).

Format number 0 means the first format. A later format writes its number (``datadir.format_refusal``) into both slots.

Invariants: the mark never goes back, even while a restarted member applies older entries again. The slots are written
alternately, each with its checksum, so a process killed during a store leaves the other slot intact. A mark is used
only if the log has an entry with that index and term.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from struct import Struct
from typing import Final

from google_crc32c import value as crc32c

from raftkv.errors import StorageError
from raftkv.storage.datadir import format_refusal, give_back, sync_directory

MARK_NAME: Final = "applied"
"""Name of the file, beside the database."""

_SLOT_BYTES: Final = 64
MARK_BYTES: Final = 2 * _SLOT_BYTES
_BODY: Final = Struct("<QQ")
_SUM: Final = Struct("<I")
_FORMAT: Final = Struct("<I")
FORMAT_VERSION: Final = 1

_BODY_BYTES: Final = _BODY.size
_USED_BYTES: Final = _BODY_BYTES + _SUM.size


def check_mark_format(path: Path) -> None:
    """Refuse a mark file of a later version, before anything is changed.

    Every version writes its format number into both slots. If only one slot has it, that slot is damaged, and its
    checksum decides.

    Arguments:
        path: mark file; it may be missing.

    Raises:
        StorageError: the format is newer; the message names the raftkv version that reads it.
    """
    try:
        data = path.read_bytes()[:MARK_BYTES]
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror}") from error
    if len(data) < MARK_BYTES:
        return
    stated, other = (_FORMAT.unpack_from(data, slot + _USED_BYTES)[0] for slot in (0, _SLOT_BYTES))
    refusal = format_refusal(f"the mark {path}", stated or FORMAT_VERSION, FORMAT_VERSION)
    if refusal and stated == other:
        raise StorageError(refusal)


class AppliedMark:
    """The mark of one member. ``AppliedMark(path)`` opens the file, or creates it.

    Raises:
        StorageError: the file cannot be opened or created.

    Attributes:
        index, term: the newest entry noted, 0 if there is none.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._map = _open(path)
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror}") from error
        self.index, self.term, self._slot = _newest(self._map[:])

    def note(self, index: int, term: int) -> None:
        """Note that everything up to an entry is applied and about to become visible.

        Arguments:
            index: index of the entry.
            term: term of the entry.
        """
        # After a restart, entries are applied again: the earlier mark stays until this index passes it.
        if index <= self.index:
            return
        self.index, self.term = index, term
        # Write the older slot: a process killed during the store leaves the newer one intact.
        body = _BODY.pack(index, term)
        slot = self._slot
        # One store of 20 bytes into a page of the file; the kernel writes it to the disk at some later time.
        self._map[slot : slot + _USED_BYTES] = body + _SUM.pack(crc32c(body))
        self._slot = _SLOT_BYTES - slot

    def forget(self) -> None:
        """Reset the mark to 0: the log has lost its entries and starts again with other ones."""
        self._map[:] = bytes(MARK_BYTES)
        self.index = self.term = self._slot = 0

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


def _newest(data: bytes) -> tuple[int, int, int]:
    """Return index and term of the newest valid mark, and the slot for the next one: the other one."""
    found, at, next_slot = 0, 0, 0
    for slot in (0, _SLOT_BYTES):
        body = data[slot : slot + _BODY_BYTES]
        (checksum,) = _SUM.unpack_from(data, slot + _BODY_BYTES)
        index, term = _BODY.unpack(body)
        if checksum == crc32c(body) and index > found:
            found, at, next_slot = index, term, _SLOT_BYTES - slot
    return found, at, next_slot


def _open(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size != MARK_BYTES:
            # Write zeros instead of only extending the file: a store into a page without disk space kills the process.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, bytes(MARK_BYTES), 0)
            os.fsync(descriptor)
            sync_directory(str(path.parent))
        return mmap.mmap(descriptor, MARK_BYTES)
    finally:
        give_back(descriptor)
