"""An fdatasync in the background: the kernel does it beside the process, and a descriptor tells when it is done.

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
import os
import platform
import sys
from typing import Final

from raftkv.storage.datadir import give_back

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
