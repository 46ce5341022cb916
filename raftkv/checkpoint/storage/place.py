"""Files below the directory of a checkpoint, wherever fsspec reaches.

::

    place = Place("s3://bucket/job/step-000000000100.g7.1")
    place.write("config.json", data)                # durable when it returns; returns its FileRecord
    with place.open_writer("model.bin") as file:    # digested while it is written, durable at the end of the block
        torch.save(model, file)
    file.record                                     # name, size and digest, for ``Attempt.prepare``
    place.list(), place.read("model.bin"), place.delete_tree()

Blocking: programs with an event loop call it on a thread (``asyncio.to_thread``). Whatever a file system raises becomes
a ``StorageError`` of one line.

A file that was not finished counts nowhere: no rank has prepared it. Symbolic links are read through (a digest decides
what is right) but never walked into: neither ``list`` nor ``delete_tree`` leaves the directory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import IO, Any, Final, NamedTuple, cast

from raftkv.checkpoint.digest import SHA256, Digest
from raftkv.checkpoint.errors import StorageError
from raftkv.checkpoint.keys import AttemptId, check_file_name
from raftkv.checkpoint.records import FileRecord
from raftkv.checkpoint.storage.filesystems import absolute, describe, open_url, sync
from raftkv.checkpoint.storage.writer import Writer
from raftkv.errors import ConfigError

DELETES_AT_ONCE: Final = 8
"""Requests of an object store that delete files side by side."""


class Found(NamedTuple):
    """A file that lies below a place.

    Attributes:
        name: below the place, with slashes.
        size_bytes: its length; of a symbolic link: of what it leads to.
        is_link: whether it is a symbolic link; what is below one to a directory is not listed.
    """

    name: str
    size_bytes: int
    is_link: bool = False


class Place:
    """The files below one uri.

    Arguments:
        uri: of a directory, or a path; it is made by the first file.

    Attributes:
        uri: as given; a path is absolute.

    Raises:
        ConfigError: fsspec is not installed, or knows no such URL.
    """

    def __init__(self, uri: str) -> None:
        self.uri = absolute(uri)
        self.fs, self.root, self.is_local = open_url(self.uri)
        self._durable: set[str] = set()
        # Names below it are made durable: that of the root, and of what was made above it.
        self._top = os.path.dirname(self.root)

    def __repr__(self) -> str:
        return f"<Place {self.uri}>"

    def path(self, name: str) -> str:
        """Return the path of a file, as the file system knows it. Raises ConfigError: it would lie elsewhere."""
        return f"{self.root}/{check_file_name(name)}"

    def contains(self, uri: str) -> bool:
        """Return whether a directory lies below this one, and no link on the way to it leads out.

        Raises:
            ConfigError: the uri is none.
        """
        name = self.name_below(uri)
        if not name or not self.is_local:
            return bool(name)
        return os.path.realpath(self.path(name)) == f"{os.path.realpath(self.root)}/{name}"

    def name_below(self, uri: str) -> str:
        """Return the name that a directory has below this one; empty: it lies elsewhere.

        Raises:
            ConfigError: the uri is none.
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
        """Write a whole file, durably; on a local disk another of the same name is replaced at once or not at all.

        Raises:
            StorageError: it could not be written.
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

    def write_new(self, name: str, data: bytes) -> bool:
        """Write a whole file, durably, unless there is one of that name; False: there is.

        On an object store, and on a disk that knows no links, of two who do so at the same moment both may write.

        Raises:
            StorageError: it could not be written.
        """
        if self.exists(name):
            return False
        if not self.is_local:
            self.write(name, data)
            return True
        with self.named("write", name):
            part = f"{name}.part-{os.urandom(4).hex()}"
            with self.open_writer(part) as file:
                file.write(data)
            try:
                os.link(self.path(part), self.path(name))
            except FileExistsError:
                return False
            except OSError:
                os.replace(self.path(part), self.path(name))
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(self.path(part))
            sync(os.path.dirname(self.path(name)))
        return True

    def open_writer(self, name: str, *, digest: str = SHA256) -> Writer:
        """Open a new file that is digested while it is written; see ``writer.Writer``.

        Arguments:
            name: of the file.
            digest: its algorithm, of ``digest.ALGORITHMS``.

        Raises:
            StorageError: it cannot be written.
            ConfigError: no such name or algorithm can be.
        """
        path, own = self.path(name), Digest(digest)
        with self.named("write", name):
            if self.is_local:
                self._make_directories(os.path.dirname(path))
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                file: IO[bytes] = os.fdopen(os.open(path, flags, 0o666), "r+b", 0)
            else:
                file = self._open_remote(path)
        return Writer(self, name, file, own)

    def _make_directories(self, directory: str) -> None:
        there = directory
        while not os.path.isdir(there) and there != os.path.dirname(there):
            there = os.path.dirname(there)
        self._top = min(self._top, there, key=len)
        os.makedirs(directory, exist_ok=True)

    def _open_remote(self, path: str) -> IO[bytes]:
        # Directories are made only where they are missed: on an object store that would make a bucket of a wrong name.
        try:
            return cast("IO[bytes]", self.fs.open(path, "wb"))
        except FileNotFoundError:
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return cast("IO[bytes]", self.fs.open(path, "wb"))

    def make_durable(self, name: str, *, contents: bool = False) -> None:
        """Make the name of a file durable, and those of the directories that it lies in; object stores have done so.

        Arguments:
            name: of the file.
            contents: of the file too, as of one that somebody else has written.

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

    def read(self, name: str) -> bytes:
        """Return a whole file. Raises StorageError."""
        with self.named("read", name), self._open(name) as file:
            return file.read()

    def open_reader(self, name: str) -> IO[bytes]:
        """Open a file to read. Raises StorageError; reading raises what the file system does."""
        with self.named("read", name):
            return self._open(name)

    def chunks(self, name: str, size_bytes: int = 4 << 20) -> Iterator[bytes]:
        """Read a file piece by piece. Raises StorageError."""
        with self.named("read", name), self._open(name) as file:
            while chunk := file.read(size_bytes):
                yield chunk

    def _open(self, name: str) -> IO[bytes]:
        path = self.path(name)
        return open(path, "rb") if self.is_local else cast("IO[bytes]", self.fs.open(path, "rb"))

    def exists(self, name: str) -> bool:
        """Return whether there is such a file now, whatever was remembered. Raises StorageError."""
        with self.named("look for", name):
            if not self.is_local:
                self.fs.invalidate_cache()
            return bool(self.fs.isfile(self.path(name)))

    def size_now(self, name: str) -> int | None:
        """Return the length that a file has now, whatever was remembered; None: it is gone. Raises StorageError."""
        with self.named("look for", name), suppress(FileNotFoundError, NotADirectoryError):
            if not self.is_local:
                self.fs.invalidate_cache()
                return int(self.fs.size(self.path(name)))
            with open(self.path(name), "rb") as file:
                return os.fstat(file.fileno()).st_size
        return None

    def list(self) -> Sequence[Found]:
        """Return all files below, by name; none if there is no such directory. Raises StorageError."""
        with self.named("list"):
            return sorted(self._walk() if self.is_local else self._find())

    def _walk(self) -> Iterator[Found]:
        for parent, directories, names in os.walk(self.root, onerror=_unless_gone):
            for name in (*names, *(each for each in directories if os.path.islink(os.path.join(parent, each)))):
                path = os.path.join(parent, name)
                with suppress(FileNotFoundError):
                    is_link = os.path.islink(path)
                    found = os.stat(path) if os.path.exists(path) else os.lstat(path)
                    yield Found(os.path.relpath(path, self.root), found.st_size, is_link)

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
        """Return the names of files and directories right below; none if there is no such directory."""
        with self.named("list"):
            self.fs.invalidate_cache()
            try:
                found = os.listdir(self.root) if self.is_local else self.fs.ls(self.root, detail=False)
            except FileNotFoundError:
                return []
            return sorted({path.rstrip("/").rpartition("/")[2] for path in found})

    # ---- deleting

    def delete(self, name: str) -> None:
        """Delete a file, there or not. Raises StorageError."""
        with self.named("delete", name), suppress(FileNotFoundError):
            self._check_inside(self.path(name))
            self.fs.rm_file(self.path(name))

    def _check_inside(self, path: str) -> None:
        directory = os.path.dirname(path)
        if self.is_local and os.path.realpath(directory) != os.path.realpath(self.root) + directory[len(self.root) :]:
            raise StorageError(f"{path} is not deleted: a link on the way leads out of the directory")

    def delete_tree(self) -> None:
        """Delete everything below, and the directory; whoever is interrupted calls it again.

        Raises:
            StorageError: something could not be deleted; calling again goes on.
            ConfigError: the directory is none that an attempt has made: nothing else is ever deleted whole.
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
        # One by one: ``rm`` takes a name with a star for a pattern, and would delete what others have.
        with ThreadPoolExecutor(DELETES_AT_ONCE, "raftkv-delete") as threads:
            for _ in threads.map(self.delete, [found.name for found in self._find()]):
                pass
        self.delete_empty_directories()

    def delete_empty_directories(self) -> None:
        """Delete directories below, and this one, as far as they are empty; object stores have none."""
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
        """Turn whatever a file system raises into a StorageError that says what was done, and where."""
        try:
            yield
        except (StorageError, ConfigError):
            raise
        # Each file system has errors of its own, and most say nothing of the URL.
        except Exception as error:
            where = f"{self.uri}/{name}" if name else self.uri
            raise StorageError(f"cannot {what} {where}: {describe(error)}") from error


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _ignore_gone(_: Callable[..., Any], __: str, failure: Any) -> None:
    _unless_gone(failure[1])
