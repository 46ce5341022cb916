"""Files below the directory of a checkpoint, on any file system of fsspec.

::

    place = Place("s3://bucket/job/step-000000000100.g7.1")
    place.write("config.json", data)                # durable when it returns; returns its FileRecord
    with place.open_writer("model.bin") as file:    # digested while it is written, durable at the end of the block
        torch.save(model, file)
    file.record                                     # name, size and digest, for ``Attempt.prepare``
    place.list(), place.read("model.bin"), place.delete_tree()

Blocking: programs with an event loop call it on a thread (``asyncio.to_thread``). Every error of a file system becomes
a one-line ``StorageError``.

An unfinished file has no effect, because no rank has prepared it. Symbolic links to files are followed when reading
(the digest is verified), but links to directories are never entered, so ``list`` and ``delete_tree`` stay in the
directory.
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import IO, Any, ClassVar, Final, NamedTuple, cast

from raftkv.checkpoint.digest import SHA256, Digest
from raftkv.checkpoint.errors import StorageError
from raftkv.checkpoint.keys import AttemptId, check_file_name
from raftkv.checkpoint.records import FileRecord
from raftkv.checkpoint.storage.filesystems import absolute, describe, open_file, open_url, sync
from raftkv.errors import ConfigError

# ---- a file that is digested while it is written
#
# A second thread digests what the first one writes; both release the interpreter, so a file costs the slower of the
# two, not their sum. Small pieces are gathered into blocks first. On local disks the second thread reads back from
# memory what was written, and the last digests are made while the disk syncs. Elsewhere a piece is digested while it
# is sent.

BLOCK_BYTES: Final = 1 << 20
"""Size up to which small writes are buffered."""
THREADS: Final = 4


@functools.lru_cache(maxsize=1)
def _threads(process_id: int) -> ThreadPoolExecutor:
    """Return the digest threads; a forked child creates new ones."""
    return ThreadPoolExecutor(THREADS, f"raftkv-digest-{process_id}")


class _Follower:
    """Digests a local file while it is written.

    Arguments:
        descriptor: descriptor of the file, also readable.
        digest: digest to update.
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
        """Digest everything written so far.

        Arguments:
            size_bytes: file size.
        """
        with self._lock:
            self._written = size_bytes
            if self._running is None:
                self._running = _threads(os.getpid()).submit(self._run)

    def wait(self) -> None:
        """Wait until everything is digested. Raises OSError if the file could not be read back."""
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
                raise OSError("what was just written cannot be read back: another program has cut the file")
            self._digest.update(self._buffer[:count])
            self._digested += count


class Writer(io.BufferedIOBase):
    """A binary file; made by ``Place.open_writer``.

    Arguments:
        place: place of the files.
        name: file name below the place.
        file: opened.
        digest: new digest of the algorithm; None: the default algorithm.
    """

    def __init__(self, place: Place, name: str, file: IO[bytes], digest: Digest | None = None) -> None:
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
            StorageError: the file is not finished, or could not be finished.
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
        """Write bytes, or any buffer, which may be changed after the return.

        Raises:
            StorageError: the write failed, as on a full disk; the file cannot be finished.
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
        """Flush to the file system; only ``close`` makes the file durable."""
        if self._file is not None:
            self._write_block()
            self._guarded(self._file.flush)

    def close(self) -> None:
        """Finish the file: make it durable and set ``record``. Idempotent.

        Raises:
            StorageError: the file could not be finished, and is abandoned.
        """
        if self._file is None:
            return
        self._write_block()
        self._guarded(self._finish)
        self._file = None
        super().close()
        self._record = FileRecord(self.name, self._size_bytes, str(self._digest))

    def abort(self) -> None:
        """Abandon the file, and delete the written part if possible."""
        file, self._file = self._file, None
        if file is None:
            return
        if os.getpid() != self._process_id:
            self._leave_to_parent(file)
            return
        with suppress(Exception):
            self._wait_for_digest()
        is_there = self._is_there(file)
        # The rest is in no list of files and does no harm; the error that led here is the one to report.
        with suppress(Exception):
            if hasattr(file, "discard") and not self._place.is_local:
                file.discard()
                file.__dict__["_closed"] = True  # fsspec would finish it otherwise, when it is collected
            else:
                file.close()
        if is_there:
            with suppress(Exception):
                self._place.fs.rm_file(self._place.path(self.name))
        super().close()

    def _is_there(self, file: IO[bytes]) -> bool:
        """Return whether the name is that of this file, and not of one that a later writer has opened."""
        if not self._place.is_local:
            return True
        with suppress(OSError, ValueError):
            return os.path.samestat(os.fstat(file.fileno()), os.lstat(self._place.path(self.name)))
        return False

    def _leave_to_parent(self, file: IO[bytes]) -> None:
        """Abandon the copy in a forked child, because file and digest thread belong to the parent."""
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
        """Digest and write in parallel; buffers of the caller are not used after the return."""
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
        """Run a block; abandon the file if it fails."""
        try:
            with self._place.named("write", self.name):
                step()
        except BaseException:
            self.abort()
            raise


DELETES_AT_ONCE: Final = 8
"""Maximum concurrent delete requests to an object store."""


class Found(NamedTuple):
    """A file below a place.

    Attributes:
        name: file name below the place, with slashes.
        size_bytes: file size; for a symbolic link, the size of its target.
        is_link: whether it is a symbolic link; files below a link to a directory are not listed.
    """

    name: str
    size_bytes: int
    is_link: bool = False


class Place:
    """The files below one URI.

    Arguments:
        uri: directory, as a URL or path; the first file creates it.

    Attributes:
        uri: as given; a path is absolute.

    Raises:
        ConfigError: fsspec is not installed, or does not support the URL.
    """

    EXTRA: ClassVar[str] = "checkpoint"
    """Extra of raftkv to install if fsspec is missing."""

    DIRECTORY_MODE: ClassVar[int] = 0o777
    FILE_MODE: ClassVar[int] = 0o666

    def __init__(self, uri: str) -> None:
        self.uri = absolute(uri)
        self.fs, self.root, self.is_local = open_url(self.uri, extra=self.EXTRA)
        self._durable: set[str] = set()
        # Directory names below this path are made durable: the root, and parents created for it.
        self._top = os.path.dirname(self.root)

    def __repr__(self) -> str:
        return f"<Place {self.uri}>"

    def path(self, name: str) -> str:
        """Return the path of a file for the file system. Raises ConfigError if it would be outside of the place."""
        return f"{self.root}/{check_file_name(name)}"

    def contains(self, uri: str) -> bool:
        """Return whether a directory is below this one, and no link in its path leads out.

        Raises:
            ConfigError: the uri is not valid.
        """
        return bool(self.real_name_below(uri))

    def real_name_below(self, uri: str) -> str:
        """Return the name of a directory below this place with all links followed; empty: it is elsewhere.

        Raises:
            ConfigError: the uri is not valid.
        """
        found = Place(uri)
        if not (self.is_local and found.is_local):
            return self.name_below(uri)
        root, path = os.path.realpath(self.root), os.path.realpath(found.root)
        name = os.path.relpath(path, root)
        with suppress(ConfigError):
            return check_file_name(name)
        return ""

    def name_below(self, uri: str) -> str:
        """Return the name of a directory below this place; empty: it is elsewhere.

        Raises:
            ConfigError: the uri is not valid.
        """
        found = Place(uri)
        name = found.root.removeprefix(f"{self.root}/")
        if type(found.fs) is not type(self.fs) or name == found.root:
            return ""
        with suppress(ConfigError):
            return check_file_name(name)
        return ""

    # ---- writing

    def write(self, name: str, data: bytes) -> FileRecord:
        """Write a complete file durably; on a local disk, an existing one is replaced atomically.

        Raises:
            StorageError: the file could not be written.
        """
        if not self.is_local:
            with self.open_writer(name) as file:
                file.write(data)
            return file.record
        with self.named("write", name):
            part = f"{name}.part-{os.urandom(4).hex()}"
            with self.open_writer(part) as file:
                file.write(data)
            os.replace(self.path(part), self.path(name))
            sync(os.path.dirname(self.path(name)))
        return FileRecord(name, file.record.size_bytes, file.record.digest)

    def open_writer(self, name: str, *, digest: str = SHA256) -> Writer:
        """Open a new file that is digested while it is written; see ``Writer``.

        Arguments:
            name: file name.
            digest: digest algorithm, one of ``digest.ALGORITHMS``.

        Raises:
            StorageError: the file cannot be written.
            ConfigError: the name or the algorithm is not valid.
        """
        path, own = self.path(name), Digest(digest)
        with self.named("write", name):
            if self.is_local:
                self._make_directories(os.path.dirname(path))
                with suppress(FileNotFoundError):
                    os.unlink(path)  # others may have it open, or hold it by another name
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                file: IO[bytes] = os.fdopen(os.open(path, flags, self.FILE_MODE), "r+b", 0)
            else:
                file = self._open_remote(path)
        return Writer(self, name, file, own)

    def _make_directories(self, directory: str) -> None:
        there = directory
        while not os.path.isdir(there) and there != os.path.dirname(there):
            there = os.path.dirname(there)
        self._top = min(self._top, there, key=len)
        os.makedirs(directory, self.DIRECTORY_MODE, exist_ok=True)

    def _open_remote(self, path: str) -> IO[bytes]:
        # Create directories only after a failure: on an object store, this would create a bucket with a misspelt name.
        try:
            return cast("IO[bytes]", self.fs.open(path, "wb"))
        except FileNotFoundError:
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return cast("IO[bytes]", self.fs.open(path, "wb"))

    def make_durable(self, name: str, *, contents: bool = False) -> None:
        """Make the name of a file and its parent directories durable; object stores do this themselves.

        Arguments:
            name: file name.
            contents: also the content of the file, as after another program has written it.

        Raises:
            StorageError: it cannot be synced.
        """
        if self.is_local:
            with self.named("sync", name):
                self._sync(self.path(name), contents)

    def _sync(self, path: str, contents: bool) -> None:
        if contents:
            sync(path)
        directory = os.path.dirname(path)
        sync(directory)
        # Another process may have made a directory and not synced its name yet: each Place does so once.
        while directory not in self._durable and len(directory) > len(self._top):
            self._durable.add(directory)
            directory = os.path.dirname(directory)
            sync(directory)

    # ---- reading

    def read(self, name: str, size_max_bytes: int = -1) -> bytes:
        """Return the content of a file, or its beginning.

        Arguments:
            name: file name.
            size_max_bytes: maximum size of the result; -1: none.

        Raises:
            StorageError: it cannot be read.
        """
        with self.named("read", name), self._open(name) as file:
            if size_max_bytes >= 0:  # a local file reserves the memory for what it is asked for
                size_max_bytes = min(size_max_bytes, file.seek(0, os.SEEK_END))
                file.seek(0)
            return file.read(size_max_bytes)

    def open_reader(self, name: str) -> IO[bytes]:
        """Open a file for reading. Raises StorageError; reads raise the errors of the file system."""
        with self.named("read", name):
            return self._open(name)

    def chunks(self, name: str, size_bytes: int = 4 << 20) -> Iterator[bytes]:
        """Read a file piece by piece. Raises StorageError."""
        with self.named("read", name), self._open(name) as file:
            while chunk := file.read(size_bytes):
                yield chunk

    def _open(self, name: str) -> IO[bytes]:
        path = self.path(name)
        return open_file(path) if self.is_local else cast("IO[bytes]", self.fs.open(path, "rb"))

    def exists(self, name: str) -> bool:
        """Return whether a file exists, without using caches. Raises StorageError."""
        with self.named("look for", name):
            if not self.is_local:
                self.fs.invalidate_cache()
            return bool(self.fs.isfile(self.path(name)))

    def size_now(self, name: str) -> int | None:
        """Return the current size of a file, without using caches; None: it does not exist. Raises StorageError."""
        with self.named("look for", name), suppress(FileNotFoundError, NotADirectoryError):
            if not self.is_local:
                self.fs.invalidate_cache()
                return int(self.fs.size(self.path(name)))
            with open_file(self.path(name)) as file:
                return os.fstat(file.fileno()).st_size
        return None

    def list(self) -> Sequence[Found]:
        """Return all files below the place, by name; empty if the directory does not exist. Raises StorageError."""
        with self.named("list"):
            return sorted(self._walk() if self.is_local else self._find())

    def _walk(self) -> Iterator[Found]:
        for parent, directories, names in os.walk(self.root, onerror=_unless_gone):
            prefix = os.path.relpath(os.path.join(parent, "x"), self.root)[:-1]
            for name in (*names, *(each for each in directories if os.path.islink(os.path.join(parent, each)))):
                path = os.path.join(parent, name)
                with suppress(FileNotFoundError):
                    found = os.lstat(path)
                    is_link = stat.S_ISLNK(found.st_mode)
                    if is_link and os.path.exists(path):
                        found = os.stat(path)
                    yield Found(prefix + name, found.st_size, is_link)

    def _find(self) -> Iterator[Found]:
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(self.root, detail=True)
        except FileNotFoundError:
            return
        for path, info in found.items():
            name = path.removeprefix(self.root).lstrip("/")
            if info.get("type") == "file" and name and path.startswith(f"{self.root}/"):
                yield Found(name, int(info["size"] or 0), bool(info.get("islink", False)))

    def names(self) -> Sequence[str]:
        """Return the names of files and directories directly below; empty if the directory does not exist."""
        with self.named("list"):
            self.fs.invalidate_cache()
            try:
                found = os.listdir(self.root) if self.is_local else self.fs.ls(self.root, detail=False)
            except FileNotFoundError:
                return []
            return sorted({path.rstrip("/").rpartition("/")[2] for path in found})

    # ---- deleting

    def delete(self, name: str) -> None:
        """Delete a file if it exists. Raises StorageError."""
        with self.named("delete", name), suppress(FileNotFoundError):
            self._check_inside(self.path(name))
            self.fs.rm_file(self.path(name))

    def _check_inside(self, path: str) -> None:
        directory = os.path.dirname(path)
        if self.is_local and os.path.realpath(directory) != os.path.realpath(self.root) + directory[len(self.root) :]:
            raise StorageError(f"{path} is not deleted: a link on the way leads out of the directory")

    def delete_tree(self) -> None:
        """Delete the directory with everything below it; after an interruption, call this again.

        Raises:
            StorageError: something could not be deleted; another call continues.
            ConfigError: the directory does not have the name of an attempt; no other is deleted.
        """
        if AttemptId.of_directory(self.root.rpartition("/")[2]) is None:
            raise ConfigError(f"{self.uri} is not deleted: its name is not that of the directory of a checkpoint")
        with self.named("delete"):
            if not self.is_local:
                self._delete_objects()
            elif os.path.islink(self.root):
                os.unlink(self.root)
            else:
                shutil.rmtree(self.root, onerror=_ignore_gone)
                with suppress(FileNotFoundError):
                    sync(os.path.dirname(self.root))

    def _delete_objects(self) -> None:
        # One by one: ``rm`` treats a name with a star as a pattern, and would delete other files too.
        with ThreadPoolExecutor(DELETES_AT_ONCE, "raftkv-delete") as threads:
            for _ in threads.map(self.delete, [found.name for found in self._find()]):
                pass
        self.delete_empty_directories()

    def delete_empty_directories(self) -> None:
        """Delete empty directories below, and this one if empty; object stores have none."""
        if self.is_local:
            walked = [parent for parent, _, _ in os.walk(self.root, topdown=False)]
        else:
            self.fs.invalidate_cache()
            with suppress(FileNotFoundError):
                below = self.fs.find(self.root, withdirs=True, detail=True)
                walked = sorted((path for path, info in below.items() if info["type"] == "directory"), reverse=True)
                walked.append(self.root)
        for path in walked:
            with suppress(OSError):
                self.fs.rmdir(path)

    # ---- errors

    @contextmanager
    def named(self, what: str, name: str = "") -> Iterator[None]:
        """Convert all errors of a file system to a StorageError with the operation and the URI."""
        try:
            yield
        except (StorageError, ConfigError):
            raise
        # Each file system has different errors, and most do not contain the URL.
        except Exception as error:
            where = f"{self.uri}/{name}" if name else self.uri
            raise StorageError(f"cannot {what} {where}: {describe(error)}") from error


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _ignore_gone(_: Callable[..., Any], __: str, failure: Any) -> None:
    _unless_gone(failure[1])
