"""The files that one rank adds to a checkpoint: written to the attempt's directory, made durable and digested.

    files = RankFiles(attempt.uri)
    files.write("rank-3/data.json", b"...")
    with files.open("rank-3/model.bin") as file: ...
    files.path("rank-3/by-name")            # for code that writes files by name: a file, or a directory of files
    await attempt.prepare(3, files.finish())

Blocking: programs with an event loop call ``finish`` on a thread.
"""

from __future__ import annotations

import os

from raftkv.checkpoint.digest import SHA256
from raftkv.checkpoint.errors import StorageError
from raftkv.checkpoint.keys import check_file_name
from raftkv.checkpoint.records import FileRecord
from raftkv.checkpoint.storage.filesystems import sync
from raftkv.checkpoint.storage.place import Place, Writer
from raftkv.checkpoint.storage.verify import digest_of
from raftkv.errors import ConfigError


class RankFiles:
    """The files of one rank.

    Arguments:
        uri: directory of the attempt.
        digest: digest algorithm for files written by ``open``, of ``digest.ALGORITHMS``.

    Raises:
        ConfigError: fsspec is not installed, or does not support the URL.
    """

    def __init__(self, uri: str, *, digest: str = SHA256) -> None:
        self.place = Place(uri)
        self._digest = digest
        self._paths: set[str] = set()
        self._writers: list[Writer] = []
        self._written: dict[str, FileRecord] = {}

    def write(self, name: str, data: bytes) -> None:
        """Write a complete file durably.

        Arguments:
            name: file name below the checkpoint, different on each rank.
            data: content of the file.

        Raises:
            ConfigError: the name is not valid, or was used before.
            StorageError: the file could not be written.
        """
        self._check_new(name)
        self._written[name] = self.place.write(name, data)

    def open(self, name: str) -> Writer:
        """Open a new file, which is digested while it is written; ``finish`` closes it.

        Arguments:
            name: as for ``write``, with the same errors.
        """
        self._check_new(name)
        writer = self.place.open_writer(name, digest=self._digest)
        self._writers.append(writer)
        return writer

    def path(self, name: str) -> str:
        """Return a local path to write to: a file, or a directory that only this rank uses.

        Raises:
            ConfigError: the name is not valid, or the checkpoint is not on a local disk.
            StorageError: its directory could not be created.
        """
        if not self.place.is_local:
            raise ConfigError(f"{self.place.uri} is not a local disk: use write(name, data), or open(name)")
        if name not in self._paths:
            self._check_new(name)
        path = self.place.path(name)
        with self.place.named("make", os.path.dirname(name)):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        self._paths.add(name)
        return path

    def add(self, record: FileRecord) -> None:
        """Add a file that was written durably by other means.

        Arguments:
            record: record of the file.
        """
        self._check_new(record.name)
        self._written[record.name] = record

    def finish(self) -> list[FileRecord]:
        """Make all files durable; return them with their digests.

        Raises:
            StorageError: a file at a path of ``path`` does not exist, could not be read or synced, or is a link to a
                directory.
        """
        for writer in self._writers:
            writer.close()
            self._written[writer.name] = writer.record
        for name in sorted(self._paths):
            for file in self._below(name):
                self._written[file] = self._settle(file)
        return sorted(self._written.values(), key=lambda file: file.name)

    def _below(self, name: str) -> list[str]:
        path = self.place.path(name)
        if not os.path.isdir(path):
            return [name]
        if os.path.islink(path):  # its target does not belong to the checkpoint, and readers would not find it
            raise StorageError(f"cannot add {path} to the checkpoint: it is a link to a directory; put the files there")
        found = Place(path).list()
        return [f"{name}/{file.name}" for file in found]

    def _settle(self, name: str) -> FileRecord:
        path = self.place.path(name)
        with self.place.named("add to the checkpoint", name):
            if not os.path.exists(path):
                raise StorageError(f"{path} was announced by path({name!r}), and is not there; write it in the block")
            sync(path)
            self.place.make_durable(name)
            size_bytes = os.path.getsize(path)
        return FileRecord(name, size_bytes, digest_of(self.place, name, on_bytes=lambda _: None))

    def _check_new(self, name: str) -> None:
        names = {*self._written, *self._paths, *(writer.name for writer in self._writers)}
        if check_file_name(name) in names:
            raise ConfigError(f"the file {name!r} already exists; give every file of a checkpoint a different name")
