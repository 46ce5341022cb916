"""How far a member has applied its log, kept so that kill -9 cannot take it back.

    DATA/member/snap/applied    two slots of 64 bytes: index u64, term u64, CRC32C u32, format u32, the rest zeros

A member shows its clients what it has applied. The database follows some 100 ms behind, and the commit index goes into
the log only with the next entries; a member that starts again from those two alone would show less than it had shown,
until a leader tells it more, and for ever while there is none. So the index is noted here before anything that it
contains is shown, in a page of the kernel: a store into mapped memory, which costs half a microsecond and no system
call, and which outlives the process. At the next start everything up to it is committed (it had been applied), and in
the log (nothing is applied before it is durable there), so it is applied again before the member serves.

A power cut may lose the last writes of the page, never the log's: then the mark is older than it was, which is true
all the same, and a quorum says the rest (``replica/membership/presence``).

The format is 0, which stands for the first; a later one has its number (``datadir.format_refusal``) in both slots.

Invariants: the mark never goes back, also while a member that has started again applies older entries once more; the
slots are written in turn, each with its checksum, so that a process killed inside a store leaves the other one; a mark
is only believed where the log has that index with that term.
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
_FILE_BYTES: Final = 2 * _SLOT_BYTES
_BODY: Final = Struct("<QQ")
_SUM: Final = Struct("<I")
_FORMAT: Final = Struct("<I")
FORMAT_VERSION: Final = 1

_BODY_BYTES: Final = _BODY.size
_USED_BYTES: Final = _BODY_BYTES + _SUM.size


def check_mark_format(path: Path) -> None:
    """Refuse the mark of a later version, before anything is changed.

    No version writes a number into one slot alone: that slot is damaged, and its checksum decides.

    Arguments:
        path: of the file; there may be none.

    Raises:
        StorageError: says which raftkv reads it.
    """
    try:
        data = path.read_bytes()[:_FILE_BYTES]
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror}") from error
    if len(data) < _FILE_BYTES:
        return
    stated, other = (_FORMAT.unpack_from(data, slot + _USED_BYTES)[0] for slot in (0, _SLOT_BYTES))
    refusal = format_refusal(f"the mark {path}", stated or FORMAT_VERSION, FORMAT_VERSION)
    if refusal and stated == other:
        raise StorageError(refusal)


class AppliedMark:
    """The mark of one member. ``AppliedMark(path)`` opens it, or makes it when absent.

    Raises:
        StorageError: the file cannot be opened or made.

    Attributes:
        index, term: the newest entry noted, 0 if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.index = self.term = 0
        try:
            self._map = _open(path)
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror}") from error
        self._slot = 0
        # The slot with the newest valid mark counts; the next one goes into the other slot.
        for slot in (0, _SLOT_BYTES):
            body = self._map[slot : slot + _BODY_BYTES]
            (checksum,) = _SUM.unpack_from(self._map, slot + _BODY_BYTES)
            index, term = _BODY.unpack(body)
            if checksum == crc32c(body) and index > self.index:
                self.index, self.term = index, term
                self._slot = _SLOT_BYTES - slot

    def note(self, index: int, term: int) -> None:
        """Note that everything up to an entry is applied and about to be shown.

        Arguments:
            index: index of the entry.
            term: its term.
        """
        # Applied again after a start: the mark of the life before stands until this one gets further.
        if index <= self.index:
            return
        self.index, self.term = index, term
        # The slot that is not the newest: a process killed in mid-store leaves the other one whole.
        body = _BODY.pack(index, term)
        slot = self._slot
        # One store of 20 bytes into the page of the kernel: the kernel writes it to the disk when it likes, or never.
        self._map[slot : slot + _USED_BYTES] = body + _SUM.pack(crc32c(body))
        self._slot = _SLOT_BYTES - slot

    def forget(self) -> None:
        """Note that nothing is applied: the log has lost it, and begins anew with other entries."""
        self._map[:] = bytes(_FILE_BYTES)
        self.index = self.term = self._slot = 0

    def close(self) -> None:
        """Give the mapped page back."""
        self._map.close()


def _open(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size != _FILE_BYTES:
            # Written, not only lengthened: a store into a page without room on the disk would end the process.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, bytes(_FILE_BYTES), 0)
            os.fsync(descriptor)
            sync_directory(str(path.parent))
        return mmap.mmap(descriptor, _FILE_BYTES)
    finally:
        give_back(descriptor)
