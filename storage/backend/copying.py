"""A compact copy of an LMDB file, written slowly enough that other syncs do not wait for it.

LMDB writes a copy as fast as it can, and a gigabyte of unwritten pages would then delay every sync of the log on the
same disk. So LMDB writes into a pipe, and this module writes from the pipe to the file: a few megabytes, a sync, a
pause. This also makes a copy cancellable, for which LMDB has no call.

    LMDB (on a separate thread) --pipe--> write 4 MiB, sync, pause --> the file, durable on return
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Final

import lmdb

from raftkv.errors import CorruptionError, StorageError
from raftkv.storage.backend.environment import FILE_MODE
from raftkv.storage.datadir import give_back

PIPE_BYTES: Final = 1024 * 1024
SYNC_BYTES: Final = 4 * 1024 * 1024
"""Maximum of unsynced bytes."""
_DAMAGE: Final = (
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)
"""LMDB's errors for pages that it cannot follow."""
REST_S: Final = 0.001
"""Pause between two syncs, so that others can use the disk."""


class SteadyFile:
    """A file that is synced while it is written. Used by one thread at a time.

    Arguments:
        descriptor: file open for writing; closed with this object.
        offset_bytes: where to begin.
    """

    def __init__(self, descriptor: int, offset_bytes: int = 0) -> None:
        self.descriptor = descriptor
        self.offset_bytes = offset_bytes
        self._unsynced_bytes = 0

    def write(self, data: bytes) -> bool:
        """Append data; return whether everything is synced now.

        Raises:
            OSError: the disk is full, or failed.
        """
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self.descriptor, rest, self.offset_bytes)
            self.offset_bytes += written
            rest = rest[written:]
        self._unsynced_bytes += len(data)
        if self._unsynced_bytes < SYNC_BYTES:
            return False
        self.sync()
        return True

    def sync(self) -> None:
        """Make the written data durable.

        Raises:
            OSError: the disk is full, or failed.
        """
        os.fdatasync(self.descriptor)
        self._unsynced_bytes = 0

    def close(self) -> None:
        """Close the descriptor."""
        give_back(self.descriptor)


def create(path: Path) -> SteadyFile:
    """Create a new file for a copy.

    Raises:
        OSError: the file exists (and may be in use), or cannot be created.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
    try:
        os.fchmod(descriptor, FILE_MODE)
    except OSError:
        give_back(descriptor)
        raise
    return SteadyFile(descriptor)


def copy_compact(environment: lmdb.Environment, path: Path, given_up: threading.Event) -> None:
    """Write the last committed state to a new file; durable on return. Writers continue meanwhile.

    Arguments:
        environment: environment to copy; must not be closed before the return.
        path: new file; it must not exist.
        given_up: event that cancels the copy.

    Raises:
        StorageError: the copy was cancelled.
        OSError, lmdb.Error: the copy could not be written.
    """
    with closing(create(path)) as file, closing(pieces(environment)) as copied:
        for piece in copied:
            if file.write(piece) and given_up.wait(REST_S):
                raise StorageError("the copy of the database was aborted")
        os.fsync(file.descriptor)


def pieces(environment: lmdb.Environment) -> Generator[bytes, None, None]:
    """Iterate over the bytes of a compact copy of the last committed state. LMDB writes only as fast as they are read.

    Close the iterator on the same thread.

    Arguments:
        environment: environment to copy; must not be closed before the end.

    Raises:
        CorruptionError: its pages are damaged.
        OSError, lmdb.Error: the state could not be read.
    """
    source, sink = os.pipe2(os.O_CLOEXEC)
    failures: list[Exception] = []

    def copy() -> None:
        try:
            environment.copyfd(sink, compact=True)
        except (lmdb.Error, OSError) as error:
            failures.append(error)
        finally:
            give_back(sink)

    thread = threading.Thread(target=copy, name="database-copy", daemon=True)
    thread.start()
    try:
        with contextlib.suppress(OSError):  # the system's limit may be lower
            fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        while data := os.read(source, PIPE_BYTES):
            yield data
    finally:
        # If the writer still writes into the pipe, it gets an error and ends.
        give_back(source)
        thread.join()
    for error in failures:
        # A damaged page may claim to continue after the end of the file, which is not an address to write from.
        if isinstance(error, _DAMAGE) or getattr(error, "code", None) == errno.EFAULT:
            raise CorruptionError(f"it cannot be copied: {error}")
        raise error
