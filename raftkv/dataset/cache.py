"""Copies of chunks: in the memory of a process, and in a directory that the processes of a machine share.

    memory      limited in bytes; the least recently used chunk is dropped first
    directory   files named by digest; the first process reads the store, the others wait for the file

Cached bytes never change, so nothing is ever invalidated.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final, Generic, TypeVar

from raftkv.dataset.codec import BLOB_BYTES_MAX, digest_of, is_digest
from raftkv.errors import ConfigError

# ---- in memory: limited in bytes, the least recently used value is dropped first; usable from any thread

V = TypeVar("V")


class Memory(Generic[V]):
    """A cache of chunks in memory that drops the least recently used first.

    Arguments:
        limit_bytes: limit for all values together; a larger value is not cached.

    Attributes:
        size_bytes: size of the cached values.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._items: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: str) -> bool:
        return key in self._items

    def get(self, key: str) -> V | None:
        """Return a value and mark it as used; None: absent."""
        with self._lock:
            found = self._items.get(key)
            if found is None:
                return None
            self._items.move_to_end(key)
            return found[0]

    def put(self, key: str, value: V, size_bytes: int) -> None:
        """Add a value, and drop others until it fits."""
        with self._lock:
            replaced = self._items.pop(key, None)
            if replaced is not None:
                self.size_bytes -= replaced[1]
            if size_bytes > self.limit_bytes:
                return
            self._items[key] = (value, size_bytes)
            self.size_bytes += size_bytes
            while self.size_bytes > self.limit_bytes:
                _, (_, dropped_bytes) = self._items.popitem(last=False)
                self.size_bytes -= dropped_bytes


# ---- in a directory: the processes of a machine read each chunk from the store once
#
# A file is named by the digest of its content, created atomically (written under another name, then renamed), and
# verified when it is read: a truncated or forged file is deleted, and the chunk is read from the store. A process that
# finds no file takes a lock, so that the others wait for its file, at most ``WAIT_S``; the kernel frees the lock if the
# holder dies. The oldest files are deleted when there are too many bytes; an open file stays readable. On tmpfs or a
# local disk the calls take microseconds to a few milliseconds, so they run on the loop.

_log = logging.getLogger(__name__)

WAIT_S: Final = 5.0
"""How long to wait for another process that reads a chunk from the store; then this process reads it too."""
_POLL_S: Final = 0.005
_LEFT_OVER_S: Final = 3600.0
"""Age after which a file that was not renamed belongs to a dead process."""
_TRIM_SHARE: Final = 16
"""The directory is trimmed whenever a process has written one part in this many of its limit."""


class SharedDirectory:
    """A cache of chunks as files, shared by the processes of a node.

    Arguments:
        path: directory; created, accessible only to this user, if it does not exist.
        limit_bytes: limit for all files together; each writing process may exceed it by at most a sixteenth.

    Raises:
        ConfigError: the directory cannot be created or written.
    """

    def __init__(self, path: str | os.PathLike[str], limit_bytes: int) -> None:
        self.path = Path(path)
        self.limit_bytes = limit_bytes
        self._written_bytes = limit_bytes  # trim the directory at the first write
        self._failure = ""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.path / "locks").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot keep chunks in {str(path)!r}: {error.strerror}; name another directory"
            ) from None

    async def once(self, digest: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the bytes of a digest from its file, or from ``read``, which only one process at a time calls.

        Arguments:
            digest: digest of the bytes.
            read: reads the verified bytes from the store.
        """
        if not is_digest(digest):  # no other name is ever opened, written or deleted here
            return await read()
        if (blob := self.get(digest)) is not None:
            return blob
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + WAIT_S
        with self._lock_file(digest) as descriptor:
            while not _try_lock(descriptor) and loop.time() < give_up_at:
                await asyncio.sleep(_POLL_S)
                if (blob := self.get(digest)) is not None:
                    return blob
            if (blob := self.get(digest)) is not None:
                return blob
            blob = await read()
            self.put(digest, blob)
        return blob

    def get(self, digest: str) -> bytes | None:
        """Return the verified bytes of a file; None: there is no valid file."""
        path = self.path / digest
        try:
            # A pipe or device in its place must not block the loop.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            blob = os.read(descriptor, BLOB_BYTES_MAX + 1) if is_file else b""
        except OSError:
            blob = b""
        finally:
            os.close(descriptor)
        if digest_of(blob) != digest:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return blob

    def put(self, digest: str, blob: bytes) -> None:
        """Write the bytes of a digest to a file, if there is space."""
        beside = self.path / f".{digest}.{os.getpid()}-{os.urandom(4).hex()}"  # of containers each has its own numbers
        try:
            with beside.open("xb") as file:
                file.write(blob)
            beside.rename(self.path / digest)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            self._log_failure(error)
            return
        self._written_bytes += len(blob)
        if self._written_bytes >= self.limit_bytes // _TRIM_SHARE:
            self._written_bytes = 0
            self.trim()

    def trim(self) -> None:
        """Delete the least recently used files until the rest fits, and files of dead processes."""
        now = time.time()
        found: list[tuple[float, int, str]] = []
        with contextlib.suppress(OSError), os.scandir(self.path) as items:
            for item in items:
                with contextlib.suppress(OSError):
                    self._look_at(item, now, found)
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.limit_bytes:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size

    @staticmethod
    def _look_at(item: os.DirEntry[str], now: float, found: list[tuple[float, int, str]]) -> None:
        status = item.stat(follow_symlinks=False)
        if is_digest(item.name):
            found.append((status.st_mtime, status.st_size, item.path))
        elif is_digest(item.name[1:].partition(".")[0]) and now - status.st_mtime > _LEFT_OVER_S:
            os.unlink(item.path)

    @contextlib.contextmanager
    def _lock_file(self, digest: str) -> Iterator[int]:
        """Open the lock file for a digest, which is shared with other digests; -1: it cannot be opened, continue
        without."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(self.path / "locks" / digest[:3], flags, 0o600)
        except OSError as error:
            self._log_failure(error)
            yield -1
            return
        try:
            yield descriptor
        finally:
            with contextlib.suppress(OSError):
                # Said, for a child that was forked meanwhile has the file open too, as long as it lives.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _log_failure(self, error: OSError) -> None:
        if str(error) != self._failure:
            self._failure = str(error)
            _log.warning("raftkv: cannot share dataset chunks in %s: %s", self.path, error.strerror)


def _try_lock(descriptor: int) -> bool:
    if descriptor < 0:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # the file system has no locks, as some shared ones: each process reads for itself
    return True
