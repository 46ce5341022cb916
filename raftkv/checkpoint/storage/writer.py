"""A file that is digested while it is written.

::

    with place.open_writer("model.bin") as file:
        torch.save(model, file)
    file.record                              # FileRecord("model.bin", 104857600, "sha256:...")

A second thread digests what the first one writes: both let the other run (hashlib and ``write`` release the
interpreter), so a file costs the slower of the two, not their sum. Small pieces are gathered into blocks first. On
local disks it reads back what was written, while that is in memory still: the writer neither waits for it nor copies
anything, and the last digests are made while the disk syncs. Elsewhere a piece is digested while it is sent.

On local disks, contents, name and directories are synced by ``close``; on object stores the upload is complete then.
A block that ends with an error leaves no file. The position cannot be changed: what is written is digested once.
"""

from __future__ import annotations

import functools
import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import IO, Any, Final, Protocol

from raftkv.checkpoint.digest import Digest
from raftkv.checkpoint.errors import StorageError
from raftkv.checkpoint.records import FileRecord

BLOCK_BYTES: Final = 1 << 20
"""Smaller writes are gathered into one of this size."""
THREADS: Final = 4


class Target(Protocol):
    """What a writer needs of its ``Place``."""

    fs: Any
    is_local: bool

    def path(self, name: str) -> str:
        """Return the path of a file."""
        ...

    def make_durable(self, name: str) -> None:
        """Make the name of a file durable."""
        ...

    def named(self, what: str, name: str = "") -> AbstractContextManager[None]:
        """Turn errors into those of this package."""
        ...


@functools.lru_cache(maxsize=1)
def _threads(process_id: int) -> ThreadPoolExecutor:
    """Return the threads that digest; a forked child has none of its parent's, and makes its own."""
    return ThreadPoolExecutor(THREADS, f"raftkv-digest-{process_id}")


class _Follower:
    """Digests a local file behind its writer.

    Arguments:
        descriptor: of the file, to read too.
        digest: to be updated.
    """

    def __init__(self, descriptor: int, digest: Digest) -> None:
        self._descriptor = descriptor
        self._digest = digest
        self._buffer = memoryview(bytearray(BLOCK_BYTES))
        self._lock = threading.Lock()
        self._written = 0
        self._digested = 0
        self._running: Future[None] | None = None

    def advance(self, size_bytes: int) -> None:
        """Have everything digested that is written now.

        Arguments:
            size_bytes: of the file.
        """
        with self._lock:
            self._written = size_bytes
            if self._running is None:
                self._running = _threads(os.getpid()).submit(self._run)

    def wait(self) -> None:
        """Wait until everything is digested. Raises OSError: it could not be read back."""
        running = self._running
        if running is not None:
            running.result()

    def _run(self) -> None:
        while True:
            with self._lock:
                left = self._written - self._digested
                if not left:
                    self._running = None
                    return
            count = os.preadv(self._descriptor, [self._buffer[: min(left, BLOCK_BYTES)]], self._digested)
            if not count:
                raise OSError("what was just written cannot be read back: somebody else has cut the file")
            self._digest.update(self._buffer[:count])
            self._digested += count


class Writer(io.BufferedIOBase):
    """A binary file; made by ``Place.open_writer``.

    Arguments:
        place: where it lies.
        name: of the file, below the place.
        file: opened.
        digest: that of its algorithm, empty; None: the usual one.
    """

    def __init__(self, place: Target, name: str, file: IO[bytes], digest: Digest | None = None) -> None:
        super().__init__()
        self.name = name
        self._file: IO[bytes] | None = file
        self._place = place
        self._process_id = os.getpid()
        self._digest = digest or Digest()
        self._block = bytearray()
        self._size_bytes = 0
        self._digesting: Future[None] | None = None
        self._follower = _Follower(file.fileno(), self._digest) if place.is_local else None
        self._put_bytes = 0
        self._record: FileRecord | None = None

    def __repr__(self) -> str:
        return f"<Writer of {self.name}: {self._size_bytes} bytes>"

    @property
    def record(self) -> FileRecord:
        """Name, size and digest of the finished file; for ``Attempt.prepare``.

        Raises:
            StorageError: it is not finished, or could not be.
        """
        if self._record is None:
            raise StorageError(f"{self.name} is not finished; close it first, and use what close() left without error")
        return self._record

    # ---- as a file

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._size_bytes

    def fileno(self) -> int:
        """Return the descriptor of a local file. Raises OSError for any other."""
        return self._opened().fileno()

    def write(self, data: Any) -> int:
        """Write bytes, or anything with a buffer; it may be changed again when this returns.

        Raises:
            StorageError: as on a full disk; the file cannot be finished any more.
        """
        view = memoryview(data).cast("B")
        self._opened()
        if view.nbytes < BLOCK_BYTES:
            self._block += view
            if len(self._block) >= BLOCK_BYTES:
                self._write_block()
        else:
            self._write_block()
            self._put(view, is_constant=isinstance(data, bytes))
        self._size_bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Hand what was written to the file system; only ``close`` makes it durable."""
        if self._file is not None:
            self._write_block()
            self._guarded(self._file.flush)

    def close(self) -> None:
        """Finish the file: it is durable, and has a ``record``. Does nothing the second time.

        Raises:
            StorageError: it could not be finished, and is no more.
        """
        if self._file is None:
            return
        self._write_block()
        self._guarded(self._finish)
        self._file = None
        super().close()
        self._record = FileRecord(self.name, self._size_bytes, str(self._digest))

    def abort(self) -> None:
        """Give the file up; what was written of it is deleted as far as that is possible."""
        file, self._file = self._file, None
        if file is None:
            return
        if os.getpid() != self._process_id:
            self._leave_to_parent(file)
            return
        with suppress(Exception):
            self._wait_for_digest()
        # Whatever is left is in no list of files: it does no harm, and the error that led here is the one to tell.
        with suppress(Exception):
            if hasattr(file, "discard") and not self._place.is_local:
                file.discard()
                file.__dict__["_closed"] = True  # fsspec would finish it otherwise, when it is collected
            else:
                file.close()
        with suppress(Exception):
            self._place.fs.rm_file(self._place.path(self.name))
        super().close()

    def _leave_to_parent(self, file: IO[bytes]) -> None:
        """Give up the copy of a forked child: the file, and the thread that digests it, are the parent's."""
        with suppress(Exception):
            if self._place.is_local:
                file.close()
            else:
                file.__dict__["_closed"] = True  # fsspec would finish the parent's upload
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        self.abort()

    # ---- its parts

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            raise StorageError(f"{self.name} is closed, or could not be written; open it anew to write it again")
        return self._file

    def _write_block(self) -> None:
        if self._block:
            block, self._block = self._block, bytearray()
            self._put(memoryview(block), is_constant=True)

    def _put(self, view: memoryview, *, is_constant: bool) -> None:
        """Digest and write side by side; what the caller may change is digested, or written, when this returns."""
        if self._follower is not None:
            self._guarded(lambda: self._write_all(view))
            self._put_bytes += view.nbytes
            self._follower.advance(self._put_bytes)
            return
        self._wait_for_digest()
        self._digesting = _threads(os.getpid()).submit(self._digest.update, view)
        self._guarded(lambda: self._write_all(view))
        if not is_constant:
            self._wait_for_digest()

    def _write_all(self, view: memoryview) -> None:
        file = self._opened()
        while view.nbytes:
            written = file.write(view)  # the system takes 2 GiB at most; a full disk takes less and then fails
            view = view[written:]

    def _wait_for_digest(self) -> None:
        digesting, self._digesting = self._digesting, None
        if digesting is not None:
            digesting.result()
        if self._follower is not None:
            self._follower.wait()

    def _finish(self) -> None:
        file = self._opened()
        if self._place.is_local:
            os.fsync(file.fileno())
            self._wait_for_digest()
        file.close()
        self._place.make_durable(self.name)
        self._wait_for_digest()

    def _guarded(self, step: Callable[[], None]) -> None:
        """Take a step that gives the file up when it fails."""
        try:
            with self._place.named("write", self.name):
                step()
        except BaseException:
            self.abort()
            raise
