"""A directory of chunks that the processes of a machine share: the ranks of a node read each chunk from the store once.

    directory = SharedDirectory("/dev/shm/manifests", limit_bytes=1 << 30)
    blob = await directory.once(digest, read_from_the_store)

A file has the digest of its content as its name, appears whole (written beside, then renamed), and is verified when it
is read: one that was cut off by a full disk, or planted, is deleted and read from the store. Who finds no file takes a
lock, so that the others wait for its file; the kernel gives the lock back if the holder dies, and nobody waits for one
longer than ``WAIT_S``. The oldest files go when there are too many bytes; a file that somebody reads stays readable.

On tmpfs or a local disk the calls take microseconds to a few milliseconds, so they are made on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

from raftkv.dataset.codec.blob import BLOB_BYTES_MAX, digest_of, is_digest
from raftkv.errors import ConfigError

_log = logging.getLogger(__name__)

WAIT_S: Final = 5.0
"""For the process that reads a chunk from the store; then it is read here too."""
_POLL_S: Final = 0.005
_LEFT_OVER_S: Final = 3600.0
"""After so long a file that was not renamed is that of a process that died."""
_TRIM_SHARE: Final = 16
"""The directory is looked through whenever a process has written this share of its limit."""


class SharedDirectory:
    """Keep chunks as files that processes of a node share.

    Arguments:
        path: of the directory; it is made, for this user alone, if it does not exist.
        limit_bytes: of all files together; passed by at most a sixteenth for each process that writes.

    Raises:
        ConfigError: it cannot be made or written.
    """

    def __init__(self, path: str | os.PathLike[str], limit_bytes: int) -> None:
        self.path = Path(path)
        self.limit_bytes = limit_bytes
        self._written_bytes = limit_bytes  # look through it at the first write
        self._failure = ""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.path / "locks").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot keep chunks in {str(path)!r}: {error.strerror}; name another directory"
            ) from None

    async def once(self, digest: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the bytes of a digest: from its file, else by ``read``, called by one process at a time.

        Arguments:
            digest: of the bytes.
            read: reads them from the store, verified.
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
        """Return the verified bytes of a file; None: there is none that can be used."""
        path = self.path / digest
        try:
            # Whatever somebody has put there, as a pipe, must not hold the loop up.
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
        """Keep the bytes of a digest; without room they are not kept."""
        beside = self.path / f".{digest}.{os.getpid()}"
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
        """Delete the files that were not used for longest, until the rest fits; and what dead processes have left."""
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
        elif item.name.startswith(".") and now - status.st_mtime > _LEFT_OVER_S:
            os.unlink(item.path)

    @contextlib.contextmanager
    def _lock_file(self, digest: str) -> Iterator[int]:
        """Open the file whose lock stands for a digest, and for others; -1: it cannot be opened, go on without."""
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
            _log.warning("raftkv: chunks cannot be shared in %s: %s", self.path, error.strerror)


def _try_lock(descriptor: int) -> bool:
    if descriptor < 0:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
