"""Copying the files of a checkpoint from one place to another, checked on the way.

::

    files = copy_files(source, files, target, on_progress=lambda done, total: ...)

Each piece is digested as it is read and as it is written, on threads of its own, several files side by side; what is
handed out at the end is durable. A file whose digest is known and that turns out to be another one is a
``DigestMismatch``. A copy that was cut off is called again: with ``resume`` it keeps the files that are right already.

Leaves out what becomes of the copy: ``checkpoint.exchange``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from raftkv.checkpoint import digest
from raftkv.checkpoint.errors import NotWhole, StorageError
from raftkv.checkpoint.records import FileRecord
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.verify import THREADS, Counter, Progress, digest_of, stream_verified
from raftkv.errors import ConfigError

UNKNOWN: str = ""
"""Digest of a file that nobody has digested yet."""


def list_files(place: Place, *, without: Sequence[str] = ()) -> list[FileRecord]:
    """Return the files of a directory that is no checkpoint of a registry; their digests are not known.

    Arguments:
        place: of the directory.
        without: names that are left out.

    Raises:
        ConfigError: there are none, or one has a name that cannot be used.
        StorageError: the place cannot be read, or has a link to a directory.
    """
    found = [each for each in place.list() if each.name not in without]
    for each in found:
        if each.is_link and not os.path.isfile(place.path(each.name)):
            raise StorageError(f"cannot read {place.uri}/{each.name}: it is a link to no file; put the files there")
    if not found:
        raise ConfigError(f"there are no files at {place.uri}; name the directory of a checkpoint")
    return [FileRecord(each.name, each.size_bytes, UNKNOWN) for each in found]


def digest_files(
    place: Place,
    files: Sequence[FileRecord],
    *,
    on_progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> list[FileRecord]:
    """Return files with their digests, which stay where they are; of local ones the contents are made durable.

    Arguments:
        place, files: what to digest.
        on_progress: told of bytes.
        stop: set to give it up.

    Raises:
        StorageError: one could not be read, has changed meanwhile, or ``stop`` was set.
    """

    def one(file: FileRecord, counter: Callable[[int], None]) -> FileRecord:
        own = digest_of(place, file.name, on_bytes=counter)
        place.make_durable(file.name, contents=True)
        if place.size_now(file.name) != file.size_bytes:
            raise StorageError(f"{place.uri}/{file.name} is still written to; wait until it is finished")
        return FileRecord(file.name, file.size_bytes, own)

    return _each(files, one, on_progress, stop)


def copy_files(
    source: Place,
    files: Sequence[FileRecord],
    target: Place,
    *,
    resume: bool = False,
    on_progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> list[FileRecord]:
    """Copy files; returns them with their digests, in the order given. They are durable then.

    Arguments:
        source: where they are.
        files: which; a digest is checked, unless it is ``UNKNOWN``.
        target: where they go.
        resume: keep files there that are right already.
        on_progress: told of bytes.
        stop: set to give it up.

    Raises:
        DigestMismatch: a file is not what it should be.
        NotWhole: one has another length by now, as of a job that still writes it.
        StorageError: one could not be read or written, or ``stop`` was set.
    """
    there = {found.name: found.size_bytes for found in target.list()} if resume else {}

    def one(file: FileRecord, counter: Callable[[int], None]) -> FileRecord:
        if file.digest and there.get(file.name) == file.size_bytes and _is_right(target, file):
            counter(file.size_bytes)
            return file
        pieces = stream_verified(source, file) if file.digest else source.chunks(file.name)
        algorithm = file.digest.partition(":")[0] or digest.SHA256
        with target.open_writer(file.name, digest=algorithm) as copy:
            for piece in pieces:
                copy.write(piece)
                counter(len(piece))
        if copy.record.size_bytes != file.size_bytes:
            was, size = file.size_bytes, copy.record.size_bytes
            raise NotWhole(source.uri, f"{file.name} had {was} bytes and has {size}: it is still written to")
        return copy.record

    return _each(files, one, on_progress, stop)


def _is_right(target: Place, file: FileRecord) -> bool:
    return digest_of(target, file.name, like=file.digest, on_bytes=lambda _: None) == file.digest


def _each(
    files: Sequence[FileRecord],
    one: Callable[[FileRecord, Callable[[int], None]], FileRecord],
    on_progress: Progress | None,
    stop: threading.Event | None,
) -> list[FileRecord]:
    """Do something with each file, several side by side; the first failure ends the others."""
    stop = stop or threading.Event()
    counter = Counter(sum(file.size_bytes for file in files), on_progress)

    def advance(size_bytes: int) -> None:
        if stop.is_set():
            raise StorageError("the copy was given up")
        counter.add(size_bytes)

    with ThreadPoolExecutor(THREADS, "raftkv-copy") as threads:
        doing = [threads.submit(one, file, advance) for file in files]
        try:
            return [each.result() for each in doing]
        except BaseException:
            stop.set()
            for each in doing:
                each.cancel()
            raise
