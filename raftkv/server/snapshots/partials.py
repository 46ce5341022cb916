"""What has come of a database: a file that knows how much of it is there, so that a broken stream can be gone on with.

    INDEX-TERM-SIZE-SHA256.part.tmp    | bytes of the database | 8 bytes: how many of them are there |

The name says which copy it is of: no two have one SHA-256. The number follows the bytes that it counts, so a process
that is killed finds a true one; a power cut may lose bytes that it counts, and the SHA-256 of the whole, which is
compared at the end with what the disk gives back, finds that out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from raftkv.server.snapshots.files import PARTIAL_SUFFIX, remove_soon
from raftkv.storage.backend.copying import SteadyFile
from raftkv.storage.failpoints import failpoint

KEPT_S: Final = 120.0
"""How long a part of a database waits for the rest: longer than the sender keeps the copy."""

_COUNT_BYTES: Final = 8


class Partial:
    """A database as it comes. All methods but ``close`` may wait for the disk.

    Arguments:
        path: of the file; made if there is none.
        size_bytes: of the whole database.
        offset_bytes: what is there already.

    Raises:
        OSError: the disk is full, or failed.
    """

    def __init__(self, path: Path, size_bytes: int, offset_bytes: int) -> None:
        self._size_bytes = size_bytes
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._file = SteadyFile(descriptor, offset_bytes)
        try:
            # Room for all of it first: better to find none now than in the middle, and writes here see what is left.
            os.posix_fallocate(descriptor, 0, size_bytes + _COUNT_BYTES)
            self._note()
        except BaseException:
            self.close()
            raise

    @property
    def offset_bytes(self) -> int:
        """Bytes that are there."""
        return self._file.offset_bytes

    def append(self, data: bytes) -> None:
        """Write what comes next.

        Raises:
            OSError: the disk is full, or failed.
        """
        self._file.write(data)
        self._note()
        failpoint("snapshotAfterPiece")

    def _note(self) -> None:
        os.pwrite(self._file.descriptor, self.offset_bytes.to_bytes(_COUNT_BYTES), self._size_bytes)

    def finish(self) -> None:
        """Make the file the database alone, durably.

        Raises:
            OSError: the disk is full, or failed.
        """
        os.ftruncate(self._file.descriptor, self._size_bytes)
        os.fsync(self._file.descriptor)

    def close(self) -> None:
        """Give the descriptor back."""
        self._file.close()


def partial_path(directory: Path, index: int, term: int, size_bytes: int, sha256: bytes) -> Path:
    """Return where the parts of one copy are kept.

    Arguments:
        directory: of all databases on their way.
        index, term, size_bytes, sha256: the identity of the copy.
    """
    return directory / f"{index:016x}-{term:x}-{size_bytes:x}-{sha256.hex()}{PARTIAL_SUFFIX}"


def received_bytes(path: Path, size_bytes: int) -> int:
    """Return how much of a database a file has, 0 if there is none or it says nothing that can be.

    Arguments:
        path: of the file.
        size_bytes: of the whole database.
    """
    try:
        with path.open("rb") as file:
            file.seek(size_bytes)
            count = int.from_bytes(file.read(_COUNT_BYTES + 1)[:_COUNT_BYTES])
            complete = file.tell() == size_bytes + _COUNT_BYTES
    except OSError:
        return 0
    return count if complete and count <= size_bytes else 0


class Partials:
    """The files of a directory that nobody writes to now: at most one, for a while.

    Arguments:
        directory: of all databases on their way.
        is_written: whether a file is being written to.
    """

    def __init__(self, directory: Path, is_written: Callable[[Path], bool]) -> None:
        self._directory = directory
        self._is_written = is_written
        self._expiry: asyncio.TimerHandle | None = None

    def keep(self) -> None:
        """Keep what there is for ``KEPT_S`` from now."""
        self.close()
        self._expiry = asyncio.get_running_loop().call_later(KEPT_S, self.remove)

    def remove(self, kept: Path | None = None) -> bool:
        """Remove what nobody writes to; whether there was anything.

        Arguments:
            kept: a file that stays.
        """
        paths = [path for path in self._directory.glob(f"*{PARTIAL_SUFFIX}") if path != kept]
        idle = [path for path in paths if not self._is_written(path)]
        for path in idle:
            remove_soon(path)
        return bool(idle)

    def close(self) -> None:
        """Leave the files to the next start."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
