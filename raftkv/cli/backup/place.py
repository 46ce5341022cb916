"""Where backups are: a URL of fsspec (``file:``, ``memory:``, ``s3:`` and what else is installed).

Owns the order of steps that makes a file appear whole: it is written under a name that ends in ``.part``, and then gets
its own. On local disks both are synced. Whatever a file system raises becomes one line.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from raftkv.checkpoint.storage.filesystems import describe, open_url, sync
from raftkv.cli.backup.manifest import DATA_SUFFIX, MANIFEST_SUFFIX, PART_SUFFIX, Manifest, oldest_first, time_of
from raftkv.cli.exits import CommandError
from raftkv.client.control.records import RecordError
from raftkv.errors import ConfigError

CHUNK_BYTES: Final = 1 << 20
MANIFEST_BYTES_MAX: Final = 64 << 10
DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
LEFT_OVER_S: Final = 86_400.0
"""Age at which a file without a manifest is taken for one that nobody finishes any more."""

Advance = Callable[[int], None]
"""Told of bytes that were copied."""


class Place:
    """The files below one URL.

    Arguments:
        url: of a directory; it is made by the first file.

    Raises:
        CommandError: fsspec is not installed, or knows no such URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._fs, self._root, self._is_local = open_url(url, extra="backup")
        except ConfigError as error:
            raise CommandError(str(error)) from error

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except CommandError:
            raise
        # Each file system has errors of its own, and most say nothing of the URL.
        except Exception as error:
            raise CommandError(f"cannot {what} {self.url}: {describe(error)}") from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def require(self) -> None:
        """Refuse a local directory that is not there: more often than not its name is misspelled.

        Raises:
            CommandError: it is not there, or no directory. An object store has no directories to look for.
        """
        if self._is_local and not self._fs.isdir(self._root):
            why = "is no directory" if self._fs.exists(self._root) else "is not there"
            raise CommandError(f"{self.url} {why}")

    def names(self) -> list[str]:
        """Return the names of all files, sorted; none if there is no such directory."""
        with self._named("list"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def upload(self, source: Path, name: str, advance: Advance = lambda size: None) -> None:
        """Copy a file to ``NAME.part``."""
        with self._named("write to"):
            with source.open("rb") as reader, self._open_writer(name + PART_SUFFIX) as writer:
                _copy(reader, writer, advance)
            self._sync(name + PART_SUFFIX)

    def _open_writer(self, name: str) -> Any:
        """Open a new file; on a local disk with the modes of a data directory: it holds all that the cluster does."""
        if not self._is_local:
            self._fs.makedirs(self._root, exist_ok=True)
            return self._fs.open(self._path(name), "wb")
        os.makedirs(self._root, DIRECTORY_MODE, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path(name), flags, FILE_MODE)
        os.fchmod(descriptor, FILE_MODE)  # of one that a killed backup has left
        return os.fdopen(descriptor, "wb")

    def finish(self, name: str) -> None:
        """Give ``NAME.part`` its name."""
        with self._named("write to"):
            self._fs.mv(self._path(name + PART_SUFFIX), self._path(name))
            self._sync_names()

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        with self._named("write to"):
            with self._open_writer(name + PART_SUFFIX) as writer:
                writer.write(data)
            self._sync(name + PART_SUFFIX)
        self.finish(name)

    def read(self, name: str) -> bytes:
        """Return a small file, and of a large one the beginning. Raises CommandError."""
        with self._named("read"):
            return bytes(self._fs.cat_file(self._path(name), start=0, end=MANIFEST_BYTES_MAX))

    def download(self, name: str, target: Path, advance: Advance = lambda size: None) -> None:
        """Copy a file from here.

        Raises:
            CommandError: it cannot be read.
            OSError: the copy cannot be written.
        """
        with target.open("wb") as writer, contextlib.ExitStack() as stack:
            with self._named("read"):
                reader = stack.enter_context(self._fs.open(self._path(name), "rb"))
            while chunk := self._chunk(reader):
                writer.write(chunk)
                advance(len(chunk))

    def _chunk(self, reader: Any) -> bytes:
        with self._named("read"):
            return bytes(reader.read(CHUNK_BYTES))

    def delete(self, name: str) -> None:
        """Delete a file, there or not."""
        with self._named("delete in"):
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                pass

    def backups(self) -> list[Manifest]:
        """Return the backups that are whole, oldest first, where all must be known.

        Raises:
            CommandError: a manifest cannot be read.
        """
        found, damaged = self.look()
        if damaged:
            raise CommandError(next(iter(damaged.values())))
        return found

    def look(self) -> tuple[list[Manifest], dict[str, str]]:
        """Return the backups that are whole, oldest first, and of those with a damaged manifest, by name, why."""
        names = self.names()
        there, found, damaged = set(names), list[Manifest](), dict[str, str]()
        for name in names:
            if time_of(name) is None or not name.endswith(MANIFEST_SUFFIX):
                continue
            stem = name.removesuffix(MANIFEST_SUFFIX)
            if stem + DATA_SUFFIX not in there:
                continue  # killed while it was deleted
            try:
                one = Manifest.decode(self.read(name))
                if not one.belongs_to(stem):
                    raise RecordError(Manifest.NAME, f"it is that of {one.name}")
                found.append(one)
            except RecordError as error:
                damaged[stem] = f"cannot read {name} in {self.url}: {error.why}"
        return oldest_first(found), damaged

    def remove(self, backup: Manifest) -> None:
        """Delete a backup, the manifest first: without it the rest is none."""
        self.delete(backup.name + MANIFEST_SUFFIX)
        self.delete(backup.name + DATA_SUFFIX)

    def remove_leftovers(self, now_s: float) -> list[str]:
        """Delete what backups left that were killed long ago; return the names."""
        names = self.names()
        whole = {name.removesuffix(MANIFEST_SUFFIX) for name in names if name.endswith(MANIFEST_SUFFIX)}
        stems = {name.removesuffix(DATA_SUFFIX) for name in names if name.endswith(DATA_SUFFIX)}
        left = []
        for name in names:
            taken_s = time_of(name)
            stem = name.partition(".")[0]
            is_whole = not name.endswith(PART_SUFFIX) and stem in whole and stem in stems
            if taken_s is not None and not is_whole and now_s - taken_s > LEFT_OVER_S:
                self.delete(name)
                left.append(name)
        return left

    def _sync(self, name: str) -> None:
        if self._is_local:
            sync(self._path(name))
            self._sync_names()

    def _sync_names(self) -> None:
        if self._is_local:
            sync(self._root)


def _copy(reader: Any, writer: Any, advance: Advance) -> None:
    while chunk := reader.read(CHUNK_BYTES):
        writer.write(chunk)
        advance(len(chunk))
