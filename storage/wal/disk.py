"""The few file operations that the log needs, behind a protocol, and the real ones; and the errors of the log.

Owns the boundary between the log and the operating system. Tests pass their own: one that fails at the n-th call, one
that keeps files in memory and knows what a power cut would leave.

Contract, which the log's promises rest on:

- ``write`` may persist any subset of the written sectors (512 bytes) until ``sync_data`` has returned; a sector is
  old or new, never a mixture; an allocated sector that was never written reads as zeros.
- A new name, a rename or a removal survives a power cut only after ``sync_directory``.
- Every operation raises ``OSError`` when it fails.

SYNCS BESIDE THE LOOP (``KernelSync``): the kernel does an fdatasync beside the process, and a descriptor tells its end.

Owns one context of Linux's asynchronous IO and one eventfd. A thread that syncs does the same, but it wants the
interpreter twice for each sync, and a busy loop gives it up only when it waits.

    syncing = KernelSync.open()                          # None: not on this system
    loop.add_reader(syncing.fileno(), finished)          # calls syncing.finish(), which raises what the sync raised
    syncing.start(fd)

One sync at a time. The opcode is IOCB_CMD_FDSYNC, of Linux 4.18 (io_submit(2)); a system, container or file system
without it is met by ``open`` or ``start``, and its callers sync in another way.
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
from raftkv.storage.datadir import ensure_private_directory, give_back, sync_directory

# -- errors ---------------------------------------------------------------------------------------------------------
#
# The errors of the write-ahead log, all of them below ``raftkv.errors``.
#
# CorruptionError
# +-- WALCorruptError     bytes that were synced are not what was written: file, offset, reason
# StorageError
# +-- WALNotFoundError    no log in this directory
# +-- WALExistsError      a log is already there, it is not overwritten
# +-- WALLockedError      another process uses the log
# +-- WALVersionError     the log was written by a raftkv with another format
# +-- WALFailedError      a write or sync failed once: this log is of no more use to this process
# SpaceError
# +-- WALSpaceError       no room for the next segment; nothing was written, the log is still good


class WALCorruptError(CorruptionError):
    """The log is damaged where a crash cannot have damaged it. The member must not start from it.

    ``path`` names the file, ``offset`` the first byte of the frame (or record) that is not what was written.
    """

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"write-ahead log {path} is damaged at offset {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason


class WALNotFoundError(StorageError):
    """There is no write-ahead log in the directory."""


class WALExistsError(StorageError):
    """There is a write-ahead log in the directory already."""


class WALLockedError(StorageError):
    """Another process (or another part of this one) has the log open."""


class WALVersionError(StorageError):
    """The log is whole, and of a format that this program does not know."""


class WALFailedError(StorageError):
    """A write or sync failed. The kernel may have dropped the pages and called them clean, so a retried sync that
    succeeds proves nothing (the "fsyncgate" of 2018): the log refuses everything from then on."""


class WALSpaceError(SpaceError):
    """No room on the disk for the next segment. Raised before any byte of the batch is written; a retry is safe."""


FILE_MODE: Final = 0o600
_NO_FALLOCATE: Final = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_ZEROS: Final = bytes(1 << 20)


class Disk(Protocol):
    """The file operations of the log, by path and descriptor. Each raises ``OSError`` when it fails."""

    def ensure_directory(self, directory: str) -> None:
        """Make a directory for this user alone, or check that it is one; ``StorageError`` in one line."""

    def list_names(self, directory: str) -> list[str]:
        """Return the names in a directory, in any order."""

    def lock(self, path: str) -> int:
        """Make or open ``path`` and lock it for this descriptor alone; ``BlockingIOError`` if it is locked."""

    def create(self, path: str) -> int:
        """Make a new file, mode 0600, open for reading and writing; an old one of that name is replaced."""

    def open(self, path: str) -> int:
        """Open an existing file for reading and writing."""

    def size(self, fd: int) -> int:
        """Return the length of a file in bytes."""

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Return bytes of a file; fewer than asked for only at its end.

        Arguments:
            fd: its descriptor.
            size: bytes to read.
            offset: where to begin.
        """

    def write(self, fd: int, buffers: Sequence[bytes], offset: int) -> None:
        """Write buffers one after the other.

        Arguments:
            fd: descriptor of the file.
            buffers: what to write.
            offset: where the first of them goes.
        """

    def allocate(self, fd: int, size: int) -> None:
        """Lengthen a file with zeros whose blocks are reserved: later writes into it cannot lack space.

        Arguments:
            fd: its descriptor.
            size: its length then, in bytes.
        """

    def sync_data(self, fd: int) -> None:
        """Return once the contents are durable."""

    def rename(self, old: str, new: str) -> None:
        """Give a file another name.

        Arguments:
            old, new: paths; a file of the new name is replaced.
        """

    def remove(self, path: str) -> None:
        """Remove a file."""

    def sync_directory(self, directory: str) -> None:
        """Return once the names in the directory are durable."""

    def close(self, fd: int) -> None:
        """Give the descriptor (and its lock) back."""


class RealDisk:
    """The file operations of the operating system."""

    def ensure_directory(self, directory: str) -> None:
        """Implement ``Disk.ensure_directory``."""
        ensure_private_directory(directory)

    def list_names(self, directory: str) -> list[str]:
        """Implement ``Disk.list_names``."""
        return os.listdir(directory)

    def lock(self, path: str) -> int:
        """Implement ``Disk.lock`` with ``flock``, which the kernel gives back when the process dies in any way."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
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
        """Implement ``Disk.write`` with one system call; after a short one the rest is tried, for the error that says
        why.
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
        """Implement ``Disk.allocate``; file systems that cannot reserve get zeros written, which takes the space as
        well.
        """
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            for offset in range(0, size, len(_ZEROS)):
                self.write(fd, [_ZEROS[: size - offset]], offset)

    def sync_data(self, fd: int) -> None:
        """Implement ``Disk.sync_data`` with ``fdatasync``, which also makes the length durable, and skips the times."""
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
    """The file operations of the operating system without syncs. Danger: what was acknowledged is lost when the machine
    stops.
    """

    def sync_data(self, fd: int) -> None:
        """Return at once and promise nothing."""


class ReadingDisk(RealDisk):
    """The file operations of the operating system, for a log that is only looked at: nothing can be written."""

    def open(self, path: str) -> int:
        """Open an existing file for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


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
    """Syncs one file at a time. ``open`` makes it.

    Raises:
        OSError: the system does not do this.
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
        """Return one; None where the system does not do this."""
        try:
            return cls()
        except OSError:
            return None

    def fileno(self) -> int:
        """Return a descriptor that can be read when the sync is finished."""
        return self._event_fd

    def start(self, fd: int) -> bool:
        """Begin to make the contents of a file durable; return whether that is under way.

        Arguments:
            fd: its descriptor, open until ``finish`` has returned.
        """
        self._request.fd = fd
        return bool(self._call(self._submit, self._context, 1, self._requests) == 1)

    def finish(self) -> None:
        """Wait for the sync that was started.

        Raises:
            OSError: it failed; nothing is known of what is durable.
        """
        while self._call(self._get_events, self._context, 1, 1, ctypes.byref(self._event), None) != 1:
            if ctypes.get_errno() != errno.EINTR:
                raise _last_error()
        os.eventfd_read(self._event_fd)
        if self._event.result < 0:
            raise OSError(-self._event.result, os.strerror(-self._event.result))

    def close(self) -> None:
        """Give both back; no sync is under way."""
        self._call(self._destroy, self._context)
        give_back(self._event_fd)


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
