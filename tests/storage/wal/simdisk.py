"""An in-memory disk that simulates power cuts and scripted failures.

Unsynced contents survive a crash sector by sector at random; so does each new name, rename and removal since the last
sync of the directory, in any combination. ``kill`` models the death of the process only: the page cache stays. After a
failed sync the page cache holds pages that count as written but are not on the disk.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence

SECTOR = 512
PAGE = 4096


class Inode:
    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = b""
        self.given_up: set[int] = set()
        """Pages that a failed sync has left clean: no later one writes them."""

    def write(self, data: bytes, offset: int) -> None:
        if len(self.data) < offset + len(data):
            self.data.extend(bytes(offset + len(data) - len(self.data)))
        self.data[offset : offset + len(data)] = data
        if self.given_up:
            self.given_up.difference_update(range(offset // PAGE, -(-(offset + len(data)) // PAGE)))

    def sync(self) -> None:
        self.durable = self.written()

    def written(self) -> bytes:
        """What a sync makes durable."""
        image = bytearray(self.data)
        for page in self.given_up:
            part = slice(page * PAGE, min((page + 1) * PAGE, len(image)))
            image[part] = self.durable[part].ljust(part.stop - part.start, b"\0")
        return bytes(image)

    def fail_sync(self) -> None:
        """Simulate a device error: the kernel reports it once and then treats the pages as written."""
        for at in range(0, len(self.data), PAGE):
            if self.data[at : at + PAGE] != self.durable[at : at + PAGE]:
                self.given_up.add(at // PAGE)

    def after_power_cut(self, rng: random.Random) -> bytes:
        written, self.given_up = self.written(), set()
        if written == self.durable:
            return self.durable
        size = rng.choice((len(written), len(self.durable)))
        keep = rng.choice((0.0, 0.5, 0.9, 1.0))
        old, new = self.durable.ljust(size, b"\0")[:size], written.ljust(size, b"\0")[:size]
        return b"".join((new if rng.random() < keep else old)[at : at + SECTOR] for at in range(0, size, SECTOR))


class SimDisk:
    def __init__(self) -> None:
        self.names: dict[str, Inode] = {}
        self.durable_names: dict[str, Inode] = {}
        self.pending: list[tuple[str | None, str | None, Inode]] = []  # each: name gone, name new, file
        self.open_files: dict[int, Inode] = {}
        self.locks: dict[int, str] = {}
        self.next_fd = 1000
        self.calls: list[str] = []
        self.faults: dict[str, tuple[int, int]] = {}

    # -- faults -------------------------------------------------------------------------------------------------

    def fail(self, operation: str, number: int, after: int = 0) -> None:
        """Let ``operation`` fail with errno ``number``, once ``after`` further calls of it have passed."""
        self.faults[operation] = (number, after)

    def heal(self) -> None:
        self.faults.clear()

    def _call(self, operation: str) -> None:
        self.calls.append(operation)
        if operation in self.faults:
            number, after = self.faults[operation]
            if after == 0:
                raise OSError(number, os.strerror(number))
            self.faults[operation] = (number, after - 1)

    def kill(self) -> None:
        """Kill the process; the machine keeps running."""
        self.open_files.clear()
        self.locks.clear()

    def power_cut(self, rng: random.Random) -> None:
        self.kill()
        names = dict(self.durable_names)
        for change in self.pending:
            if rng.random() < 0.5:
                self._apply(names, *change)
        for inode in dict.fromkeys(names[name] for name in sorted(names)):  # in an order that a seed decides
            inode.durable = inode.after_power_cut(rng)
            inode.data = bytearray(inode.durable)
        self.names, self.durable_names, self.pending = dict(names), dict(names), []

    def contents(self) -> dict[str, bytes]:
        return {name: bytes(inode.data) for name, inode in self.names.items()}

    @classmethod
    def holding(cls, contents: dict[str, bytes]) -> SimDisk:
        disk = cls()
        for name, data in contents.items():
            inode = disk.names[name] = Inode()
            inode.data, inode.durable = bytearray(data), data
        disk.durable_names = dict(disk.names)
        return disk

    # -- the protocol -------------------------------------------------------------------------------------------

    def ensure_directory(self, directory: str) -> None:
        self._call("ensure_directory")

    def list_names(self, directory: str) -> list[str]:
        self._call("list_names")
        return [os.path.basename(path) for path in self.names if os.path.dirname(path) == directory]

    def lock(self, path: str) -> int:
        self._call("lock")
        if path in self.locks.values():
            raise BlockingIOError(errno.EAGAIN, "locked")
        self.next_fd += 1
        self.locks[self.next_fd] = path
        return self.next_fd

    def create(self, path: str) -> int:
        self._call("create")
        self._change(None, path, Inode())
        return self.open(path)

    def open(self, path: str) -> int:
        self._call("open")
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        self.next_fd += 1
        self.open_files[self.next_fd] = self.names[path]
        return self.next_fd

    def size(self, fd: int) -> int:
        return len(self.open_files[fd].data)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        self._call("read")
        return bytes(self.open_files[fd].data[offset : offset + size])

    def write(self, fd: int, buffers: Sequence[bytes], offset: int) -> None:
        data = b"".join(buffers)
        try:
            self._call("write")
        except OSError:
            data = data[: len(data) // 2]
            raise
        finally:
            self.open_files[fd].write(data, offset)

    def allocate(self, fd: int, size: int) -> None:
        self._call("allocate")
        self.open_files[fd].data.extend(bytes(size - len(self.open_files[fd].data)))

    def sync_data(self, fd: int) -> None:
        inode = self.open_files[fd]
        try:
            self._call("sync_data")
        except OSError:
            inode.fail_sync()
            raise
        inode.sync()

    def rename(self, old: str, new: str) -> None:
        self._call("rename")
        self._change(old, new, self.names[old])

    def remove(self, path: str) -> None:
        self._call("remove")
        self._change(path, None, self.names[path])

    def _change(self, gone: str | None, new: str | None, inode: Inode) -> None:
        self._apply(self.names, gone, new, inode)
        self.pending.append((gone, new, inode))

    @staticmethod
    def _apply(names: dict[str, Inode], gone: str | None, new: str | None, inode: Inode) -> None:
        if gone is not None:
            names.pop(gone, None)
        if new is not None:
            names[new] = inode

    def sync_directory(self, directory: str) -> None:
        self._call("sync_directory")
        self.durable_names, self.pending = dict(self.names), []

    def close(self, fd: int) -> None:
        if fd in self.locks:
            del self.locks[fd]
        else:
            del self.open_files[fd]
