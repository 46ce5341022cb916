"""The next segment, allocated before it is needed.

Owns one temporary file. Reserving 64 MiB and syncing the reservation takes milliseconds, and may find the disk full;
both are better met ahead of time, by a thread that nobody waits for, than in the middle of an append.
"""

from __future__ import annotations

import os
import threading

from .disk import Disk
from .segment import TEMPORARY_NAME, create_temporary


class SpareSegment:
    """At most one file allocated ahead. ``prepare`` may run on any thread; ``lock`` is held while the file is taken.

    Arguments:
        disk: the file operations.
        directory: of the log.
        size_bytes: size of the file.
    """

    def __init__(self, disk: Disk, directory: str, size_bytes: int) -> None:
        self.lock = threading.Lock()
        self.path = os.path.join(directory, TEMPORARY_NAME)
        self._disk = disk
        self._size_bytes = size_bytes
        self._fd: int | None = None
        self._closed = False

    @property
    def ready(self) -> bool:
        """Whether a file is waiting."""
        return self._fd is not None

    def prepare(self) -> None:
        """Allocate the file unless it is there.

        Raises:
            WALSpaceError: no room.
            OSError: the system refused an operation.
        """
        with self.lock:
            # A file made after ``close`` would be left behind.
            if self._fd is None and not self._closed:
                self._fd = create_temporary(self._disk, self.path, self._size_bytes)

    def take(self, size_bytes: int) -> int:
        """Return the descriptor of a file of ``size_bytes``, for the caller to rename. Call with ``lock`` held."""
        # One batch larger than a segment gets a segment of its own size (``segment_size_for``).
        if size_bytes != self._size_bytes:
            self._drop()
            return create_temporary(self._disk, self.path, size_bytes)
        fd = self._fd
        self._fd = None
        return create_temporary(self._disk, self.path, size_bytes) if fd is None else fd

    def close(self) -> None:
        """Remove the file, for good."""
        with self.lock:
            self._closed = True
            self._drop()

    def _drop(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._disk.close(fd)
            self._disk.remove(self.path)
