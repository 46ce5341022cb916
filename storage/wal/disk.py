"""The few file operations that the log needs, as a protocol and its real implementation; and the errors of the log.

This is the boundary between the log and the operating system. Tests pass their own implementations: one fails at the
n-th call, another keeps files in memory and simulates what a power cut would leave.

The log relies on this contract:

- Until ``sync_data`` returns, ``write`` may have persisted any subset of the written sectors (512 bytes). A sector is
  old or new, never a mixture. An allocated sector that was never written reads as zeros.
- A new name, a rename or a removal survives a power cut only after ``sync_directory``.
- Every operation raises ``OSError`` when it fails.

SYNCS BESIDE THE LOOP (``KernelSync``): the kernel does an fdatasync beside the process, and a descriptor tells its end.

Uses one context of Linux's asynchronous IO and one eventfd. A thread could sync too, but would need the interpreter
lock twice per sync, and a busy loop releases the lock only when it waits.

    syncing = KernelSync.open()                          # None: not supported on this system
    loop.add_reader(syncing.fileno(), finished)          # calls syncing.finish(), which raises the error of the sync
    syncing.start(fd)

One sync at a time. The opcode is IOCB_CMD_FDSYNC, of Linux 4.18 (io_submit(2)). On a system, container or file system
without it, ``open`` returns None or ``start`` returns False, and the caller syncs in another way.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import sys
from collections.abc import Sequence
from typing import Final, Protocol

from raftkv.errors import CorruptionError, SpaceError, StorageError
from raftkv.storage.datadir import NO_FALLOCATE, ensure_private_directory, give_back, sync_directory

# -- errors ---------------------------------------------------------------------------------------------------------
#
# The errors of the write-ahead log, all of them below ``raftkv.errors``.
#
# CorruptionError
# +-- WALCorruptError     synced bytes are damaged: file, offset, reason
# StorageError
# +-- WALNotFoundError    no log in this directory
# +-- WALExistsError      a log exists already; it is not overwritten
# +-- WALLockedError      another process uses the log
# +-- WALVersionError     the log was written by a raftkv with another format
# +-- WALFailedError      a write or sync has failed: this process cannot use the log any more
# SpaceError
# +-- WALSpaceError       no space for the next segment; nothing was written, the log is still good


class WALCorruptError(CorruptionError):
    """The log is damaged in a way that a crash cannot cause. The member must not start from it.

    ``path`` names the file, ``offset`` the first byte of the damaged frame or record.
    """

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"write-ahead log {path} is damaged at offset {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason


class WALNotFoundError(StorageError):
    """There is no write-ahead log in the directory."""


class WALExistsError(StorageError):
    """There is already a write-ahead log in the directory."""


class WALLockedError(StorageError):
    """Another process (or another part of this one) has the log open."""


class WALVersionError(StorageError):
    """The log is intact, but has a format that this program does not know."""


class WALFailedError(StorageError):
    """A write or sync failed. The kernel may have dropped the pages and marked them clean, so a retried sync that
    succeeds proves nothing (the "fsyncgate" of 2018): from then on the log refuses everything."""


class WALSpaceError(SpaceError):
    """No space on the disk for the next segment. Raised before any byte of the batch is written; retrying is safe."""


FILE_MODE: Final = 0o600
_ZEROS: Final = bytes(1 << 20)


class Disk(Protocol):
    """The file operations of the log, by path and descriptor. Each raises ``OSError`` when it fails."""

    def ensure_directory(self, directory: str) -> None:
        """Create a directory with access for this user only, or check an existing one; ``StorageError`` in one line."""

    def list_names(self, directory: str) -> list[str]:
        """Return the names in a directory, in any order."""

    def lock(self, path: str) -> int:
        """Open a directory, or create or open a file, and lock it exclusively for this descriptor; ``BlockingIOError``
        if it is locked.
        """

    def create(self, path: str) -> int:
        """Create a new file, mode 0600, open for reading and writing; an existing file of that name is replaced."""

    def open(self, path: str) -> int:
        """Open an existing file for reading and writing."""

    def size(self, fd: int) -> int:
        """Return the length of a file in bytes."""

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Return bytes of a file; fewer than requested only at its end.

        Arguments:
            fd: descriptor of the file.
            size: number of bytes to read.
            offset: position of the first byte.
        """

    def write(self, fd: int, buffers: Sequence[bytes], offset: int) -> None:
        """Write buffers one after the other.

        Arguments:
            fd: descriptor of the file.
            buffers: data to write.
            offset: position of the first buffer in the file.
        """

    def allocate(self, fd: int, size: int) -> None:
        """Extend a file with zeros whose blocks are reserved: later writes into them cannot run out of space.

        Arguments:
            fd: descriptor of the file.
            size: new length in bytes.
        """

    def sync_data(self, fd: int) -> None:
        """Return once the contents are durable."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file.

        Arguments:
            old, new: paths; an existing file with the new name is replaced.
        """

    def remove(self, path: str) -> None:
        """Remove a file."""

    def sync_directory(self, directory: str) -> None:
        """Return once the names in the directory are durable."""

    def close(self, fd: int) -> None:
        """Close the descriptor and release its lock."""


class RealDisk:
    """The file operations of the operating system."""

    def ensure_directory(self, directory: str) -> None:
        """Implement ``Disk.ensure_directory``."""
        ensure_private_directory(directory)

    def list_names(self, directory: str) -> list[str]:
        """Implement ``Disk.list_names``."""
        return os.listdir(directory)

    def lock(self, path: str) -> int:
        """Implement ``Disk.lock`` with ``flock``, which the kernel releases however the process ends."""
        is_directory = os.path.isdir(path)
        fd = os.open(path, os.O_CLOEXEC | (os.O_RDONLY if is_directory else os.O_RDWR | os.O_CREAT), FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            # Network file systems may lock no directory (NFS: EBADF): the lock of the file must do there.
            if not is_directory or isinstance(error, BlockingIOError) or not isinstance(error, OSError):
                os.close(fd)
                raise
        return fd

    def create(self, path: str) -> int:
        """Implement ``Disk.create``."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)

    def open(self, path: str) -> int:
        """Implement ``Disk.open``."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def size(self, fd: int) -> int:
        """Implement ``Disk.size``."""
        return os.fstat(fd).st_size

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Implement ``Disk.read``."""
        chunks: list[bytes] = []
        while size > 0 and (chunk := os.pread(fd, size, offset)):
            chunks.append(chunk)
            size -= len(chunk)
            offset += len(chunk)
        return b"".join(chunks)

    def write(self, fd: int, buffers: Sequence[bytes], offset: int) -> None:
        """Implement ``Disk.write`` with one system call; after a partial write the rest is tried, to get the error with
        the reason.
        """
        size = sum(map(len, buffers))
        written = os.pwritev(fd, buffers, offset)
        if written < size:
            self._write_rest(fd, b"".join(buffers), written, offset)

    def _write_rest(self, fd: int, data: bytes, written: int, offset: int) -> None:
        while written < len(data):
            count = os.pwrite(fd, data[written:], offset + written)
            if count == 0:
                raise OSError(errno.EIO, "write made no progress")
            written += count

    def allocate(self, fd: int, size: int) -> None:
        """Implement ``Disk.allocate``; on file systems that cannot reserve space, zeros are written instead, which
        also takes the space.
        """
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in NO_FALLOCATE:
                raise
            for offset in range(0, size, len(_ZEROS)):
                self.write(fd, [_ZEROS[: size - offset]], offset)

    def sync_data(self, fd: int) -> None:
        """Implement ``Disk.sync_data`` with ``fdatasync``, which makes the length durable too, but not the times."""
        os.fdatasync(fd)

    def rename(self, old: str, new: str) -> None:
        """Implement ``Disk.rename``."""
        os.rename(old, new)

    def remove(self, path: str) -> None:
        """Implement ``Disk.remove``."""
        os.unlink(path)

    def sync_directory(self, directory: str) -> None:
        """Implement ``Disk.sync_directory``."""
        sync_directory(directory)

    def close(self, fd: int) -> None:
        """Implement ``Disk.close``."""
        give_back(fd)


class UnsyncedDisk(RealDisk):
    """The file operations of the operating system without syncs. Danger: when the machine stops, acknowledged data is
    lost.
    """

    def sync_data(self, fd: int) -> None:
        """Return at once without making anything durable."""


class ReadingDisk(RealDisk):
    """The file operations of the operating system for reading a log: nothing can be written."""

    def open(self, path: str) -> int:
        """Open an existing file for reading; a pipe in its place has nothing to read."""
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


_FDSYNC: Final = 3
_TELL_EVENTFD: Final = 1
"""IOCB_FLAG_RESFD."""

_CALLS: Final = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Numbers of io_setup, io_destroy, io_getevents and io_submit, by machine."""


class _Request(ctypes.Structure):
    """``struct iocb`` of <linux/aio_abi.h> on a little-endian machine."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("event_fd", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    """``struct io_event``."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


class KernelSync:
    """Syncs one file at a time. Use ``open`` to create one.

    Raises:
        OSError: not supported on this system.
    """

    def __init__(self) -> None:
        if sys.platform != "linux" or platform.machine() not in _CALLS:
            raise OSError(errno.ENOSYS, "asynchronous syncs need Linux on x86-64 or arm64")
        self._setup, self._destroy, self._get_events, self._submit = _CALLS[platform.machine()]
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        if self._call(self._setup, 1, ctypes.byref(self._context)) < 0:
            raise _last_error()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._request = _Request(opcode=_FDSYNC, flags=_TELL_EVENTFD, event_fd=self._event_fd)
        self._requests = (ctypes.POINTER(_Request) * 1)(ctypes.pointer(self._request))
        self._event = _Event()

    @classmethod
    def open(cls) -> KernelSync | None:
        """Return a new object; ``None`` if the system does not support it."""
        try:
            return cls()
        except OSError:
            return None

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the sync is finished."""
        return self._event_fd

    def start(self, fd: int) -> bool:
        """Start to make the contents of a file durable; return whether a sync is in progress.

        Arguments:
            fd: descriptor of the file; must stay open until ``finish`` has returned.
        """
        self._request.fd = fd
        return bool(self._call(self._submit, self._context, 1, self._requests) == 1)

    def finish(self) -> None:
        """Wait for the started sync.

        Raises:
            OSError: the sync failed; it is unknown what is durable.
        """
        while self._call(self._get_events, self._context, 1, 1, ctypes.byref(self._event), None) != 1:
            if ctypes.get_errno() != errno.EINTR:
                raise _last_error()
        os.eventfd_read(self._event_fd)
        if self._event.result < 0:
            raise OSError(-self._event.result, os.strerror(-self._event.result))

    def close(self) -> None:
        """Close the eventfd and the context; no sync may be in progress."""
        self._call(self._destroy, self._context)
        give_back(self._event_fd)


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
