"""Verified copies of the files of a checkpoint from one place to another.

::

    files = copy_files(source, files, target, on_progress=lambda done, total: ...)

Each piece is digested when it is read and when it is written, on separate threads, several files in parallel; the
returned files are durable. A file that does not have its known digest raises ``DigestMismatch``. To continue an
interrupted copy, call it again: with ``resume`` it keeps the files that are already correct.

The use of the copy is in ``checkpoint.exchange``.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import logging
import os
import shutil
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TextIO

from raftkv.checkpoint import digest
from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.errors import CheckpointNotFound, DigestMismatch, NotWhole, StorageError
from raftkv.checkpoint.records import Checkpoint, FileRecord
from raftkv.checkpoint.storage.filesystems import describe
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.rank_files import RankFiles
from raftkv.checkpoint.storage.verify import (
    THREADS,
    Counter,
    Progress,
    Report,
    digest_of,
    load_manifest,
    stream_verified,
    verify,
)
from raftkv.errors import ConfigError, RaftKVError

if TYPE_CHECKING:
    from raftkv.checkpoint.sync import Pin, Registry

UNKNOWN: str = ""
"""Digest of a file whose digest is not known yet."""


def list_files(place: Place) -> list[FileRecord]:
    """Return the files, without digests, of a directory that is not a checkpoint of a registry.

    Arguments:
        place: place of the directory.

    Raises:
        ConfigError: there are no files, or a name is not valid.
        StorageError: the place cannot be read, or contains a link to a directory or to nothing.
    """
    found = place.list()
    for each in found:
        if each.is_link and not os.path.isfile(place.path(each.name)):
            raise StorageError(f"cannot read {place.uri}/{each.name}: it is a link to no file; put the files there")
    if not found:
        raise ConfigError(f"there are no files at {place.uri}; name the directory of a checkpoint")
    return [FileRecord(each.name, each.size_bytes, UNKNOWN) for each in found]


def copy_files(
    source: Place,
    files: Sequence[FileRecord],
    target: Place,
    *,
    resume: bool = False,
    on_progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> list[FileRecord]:
    """Copy files durably; return them with their digests, in the given order.

    Arguments:
        source: location of the files.
        files: files to copy; each digest is checked unless it is ``UNKNOWN``.
        target: place of the copies.
        resume: keep correct files of the target.
        on_progress: called with numbers of bytes.
        stop: set to cancel.

    Raises:
        DigestMismatch: a file does not match its digest.
        NotWhole: the length of a file has changed, for example because a job still writes it.
        StorageError: a file could not be read or written, or ``stop`` was set.
    """
    there = {found.name: found.size_bytes for found in target.list()} if resume else {}

    def one(file: FileRecord, counter: Callable[[int], None]) -> FileRecord:
        if file.digest and there.get(file.name) == file.size_bytes and _is_right(target, file):
            counter(file.size_bytes)
            return file
        pieces = stream_verified(source, file) if file.digest else _stream_unchanged(source, file)
        algorithm = file.digest.partition(":")[0] or digest.SHA256
        with target.open_writer(file.name, digest=algorithm) as copy:
            for piece in pieces:
                copy.write(piece)
                counter(len(piece))
        return copy.record

    return _each(files, one, on_progress, stop)


def _stream_unchanged(place: Place, file: FileRecord) -> Iterator[bytes]:
    """Read a file once, piece by piece. Raises NotWhole at its end, or before there are more bytes than there were."""
    size_bytes = 0
    for piece in place.chunks(file.name):
        size_bytes += len(piece)
        if size_bytes > file.size_bytes:
            break
        yield piece
    if size_bytes != file.size_bytes:
        more = "more" if size_bytes > file.size_bytes else "fewer"
        raise NotWhole(place.uri, f"{file.name} had {file.size_bytes} bytes and has {more}: it is still written to")


def _is_right(target: Place, file: FileRecord) -> bool:
    return digest_of(target, file.name, like=file.digest, on_bytes=lambda _: None) == file.digest


def _each(
    files: Sequence[FileRecord],
    one: Callable[[FileRecord, Callable[[int], None]], FileRecord],
    on_progress: Progress | None,
    stop: threading.Event | None,
) -> list[FileRecord]:
    """Call a function for each file, several in parallel; the first failure ends the others."""
    stop = stop or threading.Event()
    counter = Counter(sum(file.size_bytes for file in files), on_progress)

    def advance(size_bytes: int) -> None:
        if stop.is_set():
            raise StorageError("the copy was cancelled")
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


# ---- checkpoints as local directories, for tools that use only paths
#
# ``taken_in`` renames a directory where possible: no byte is copied, and the old name disappears.

_log = logging.getLogger(__name__)

_WITHOUT_LOCKS: Final = frozenset((errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP))
"""Errors of file systems without locks, as some shared ones; each process then works without a lock."""


def make_directory(uri: str) -> None:
    """Create the directory of an attempt if it is local, because programs open files in it by path.

    Raises:
        StorageError: it could not be created.
    """
    place = Place(uri)
    if place.is_local:
        with place.named("make"):
            os.makedirs(place.root, exist_ok=True)


@contextmanager
def taken_in(directory: str, uri: str) -> Iterator[list[FileRecord]]:
    """Move a local directory to the directory of an attempt, for a block that commits its files.

    Arguments:
        directory: directory to move. If it could not be moved or read, or if the block raises ConfigError or
            StorageError (nothing was committed), it is restored, because files below the uri of a failed attempt are
            deleted. After other errors, such as those of the cluster, the moved files may have been committed.
        uri: directory of the attempt, which does not exist yet.

    Raises:
        StorageError: the directory could not be moved or read.
        ConfigError: a file name is not valid, or the directory is a link.
    """
    if os.path.islink(
        os.fspath(directory).rstrip("/")
    ):  # the link would be moved, and its target could be deleted later
        raise ConfigError(f"{directory} is a link; name the directory that it leads to")
    place = Place(uri)
    is_moved = is_given = False
    records: list[FileRecord] = []
    try:
        with place.named("move the checkpoint to"):
            is_moved = place.is_local and _rename(directory, place.root)
            if is_moved:
                records = digest_tree(uri)
            else:
                source = Place(directory)
                records = copy_files(source, list_files(source), place)
        is_given = True
        yield records
    except BaseException as error:
        if is_moved and (not is_given or isinstance(error, ConfigError | StorageError)):
            if is_given and all(record.name != MANIFEST for record in records):
                with suppress(OSError):
                    os.unlink(f"{place.root}/{MANIFEST}")  # of this attempt: the next one could not write its own
            with suppress(OSError):
                os.rename(place.root, directory)
        raise
    if not is_moved:
        try:
            shutil.rmtree(directory)
        except OSError as error:  # its copy is committed, and stays so
            _log.warning(
                "raftkv: %s was copied and committed, but the original could not be deleted: %s",
                directory,
                describe(error),
            )


def _rename(directory: str, target: str) -> bool:
    """Rename a directory; False: the target is on another file system."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        os.rename(directory, target)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
        raise
    return True


def digest_tree(uri: str) -> list[FileRecord]:
    """Make all files below a uri durable, and return them with their digests.

    Raises:
        StorageError: a file could not be read or synced, or the directory is missing or empty.
    """
    files = RankFiles(uri)
    if files.place.is_local:
        with files.place.named("read"):  # a deleted directory is an error, not an empty checkpoint
            names = sorted(os.listdir(files.place.root))
        for name in names:
            files.path(name)
    else:
        for found in files.place.list():
            digest = digest_of(files.place, found.name, on_bytes=lambda _: None)
            files.add(FileRecord(found.name, found.size_bytes, digest))
    records = files.finish()
    if not records:
        raise StorageError(f"there are no files below {files.place.uri}: write there before the save ends")
    return records


def local_directory(checkpoint: Checkpoint, directory: str = "", look: str = "") -> str:
    """Return a local directory with the verified files of a checkpoint.

    Arguments:
        checkpoint: result of a lookup.
        directory: download directory for checkpoints that are not on a local disk; each is downloaded once, and wrong
            files of an existing copy are downloaded again.
        look: name of one call by several processes, new for each call: the first process of a machine downloads and
            verifies, the others wait and use the same copy.

    Raises:
        DigestMismatch: a file is missing or differs from the committed one, or an uncommitted file exists.
        ConfigError: the checkpoint is not on a local disk, and ``directory`` is empty.
        StorageError: a file could not be read or written.
    """
    place = Place(checkpoint.uri)
    if place.is_local:
        report = verify(checkpoint)
        if wrong := _wrong(report):
            raise DigestMismatch(checkpoint.uri, wrong[0], "is missing, or is not what was committed")
        _refuse_extra(report, checkpoint.uri)
        return place.root
    if not directory:
        raise ConfigError(f"{checkpoint.uri} is not a local disk; name a directory to download the checkpoint to")
    target = os.path.join(os.path.abspath(directory), checkpoint.id.directory)
    with Place(directory).named("lock a copy in"):
        lock, is_alone = _lock(f"{target}.lock")
    with lock:
        try:
            if not look or lock.read() != look:
                if is_alone:
                    for left in glob.glob(f"{glob.escape(target)}.*.part"):  # by processes that were killed
                        shutil.rmtree(left, ignore_errors=True)
                _download(checkpoint, place, target)
                lock.truncate(0)
                lock.write(look)
                lock.flush()
        finally:
            if is_alone:  # unlock explicitly, because a child that was forked meanwhile also has the file open
                fcntl.flock(lock, fcntl.LOCK_UN)
    return target


Stamps = Mapping[str, tuple[int, ...]]
"""By file name, the properties that change with a write: inode, size, and its two times."""


class HandedOut:
    """Local directories of checkpoints whose paths were given to another program's loader, which reads them itself.

    The last checkpoint is pinned until ``check``. Digests are verified before a path is returned. ``check`` detects
    a write between the verification and the load; it costs one ``stat`` per file. Writes of another machine to a
    network file system are detected only when this machine refreshes its cached attributes.

    Arguments:
        registry: registry of the checkpoints.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._stamps: dict[str, Stamps] = {}
        self._last = ""
        self._pin: Pin | None = None
        self._finalizer: weakref.finalize[..., HandedOut] | None = None

    def pinned(self, find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        """Find and pin the next checkpoint, and unpin the previous one; return None if ``find`` returns None.

        Arguments:
            find: lookup; called again if its result is deleted before it is pinned.
        """
        while (found := find()) is not None:
            with suppress(CheckpointNotFound):
                pin = self._registry.pin(found, f"{socket.gethostname()}:{os.getpid()}").take()
                self._release()
                self._pin, self._finalizer = pin, weakref.finalize(self, pin.let_go)
                break
        return found

    def _release(self) -> None:
        pin, self._pin = self._pin, None
        if pin is not None and self._finalizer is not None:
            self._finalizer.detach()
            with suppress(RaftKVError):  # it ends with its lease
                pin.release()

    def take(self, checkpoint: Checkpoint, directory: str = "", look: str = "") -> str:
        """Return a directory like ``local_directory``, and record its state. Arguments and errors as there."""
        place = Place(checkpoint.uri)
        before = _stamps(place) if place.is_local else {}
        self._last = local_directory(checkpoint, directory, look)
        self._stamps[self._last] = before or _stamps(Place(self._last))
        return self._last

    def take_again(self, path: str) -> bool:
        """Return whether a path may be used again; False: a file below it has changed, so it must be verified again."""
        self._last = path
        return not self._changed(path)

    def check_before(self) -> None:
        """Check the last path just before it is read, because a pickle may run code.

        Raises:
            DigestMismatch: a file has changed since it was verified.
        """
        if self._last and (name := self._changed(self._last)):
            raise DigestMismatch(self._last, name, "was changed or deleted after it was compared; it is not loaded")

    def check(self) -> None:
        """Check the last path after all processes have read it.

        Raises:
            DigestMismatch: a file has changed since it was verified, so the loaded bytes are unknown.
        """
        path, self._last = self._last, ""
        self._release()
        if path and (name := self._changed(path)):
            raise DigestMismatch(path, name, "was changed or deleted after it was compared, and while it was read")

    def _changed(self, path: str) -> str:
        known, now = self._stamps[path], _stamps(Place(path))
        return min((name for name in known.keys() | now.keys() if known.get(name) != now.get(name)), default="")


def _stamps(place: Place) -> Stamps:
    found: dict[str, tuple[int, ...]] = {}
    for name in (each.name for each in place.list()):
        with place.named("look for", name), suppress(FileNotFoundError):
            one = os.stat(os.path.join(place.root, name))
            found[name] = one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns
    return found


def _lock(path: str) -> tuple[TextIO, bool]:
    """Open and lock a file, waiting for other processes; the end of a process releases the lock.

    Returns:
        the file, and whether the file system supports locks, so that this process is alone.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = (
        os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    )  # the target of a link would be truncated
    descriptor = os.open(path, flags, 0o666)
    is_locked = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            os.close(descriptor)
            raise
        is_locked = False
    return os.fdopen(descriptor, "r+", encoding="utf-8"), is_locked


def _download(checkpoint: Checkpoint, place: Place, target: str) -> None:
    # The process id does not suffice: without locks, another container may use the same one.
    partial = f"{target}.{os.getpid()}-{os.urandom(4).hex()}.part"
    local, fetched = Place(target), Place(partial)
    try:
        if local.exists(MANIFEST):  # renamed when it was whole: what has happened to it since is not known
            _repair(checkpoint, place, local, fetched)
        else:
            _fetch(checkpoint, place, target, fetched)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # of a copy that failed: the disk may be full of it


def _fetch(checkpoint: Checkpoint, place: Place, target: str, fetched: Place) -> None:
    """Download a checkpoint, and rename it when it is complete."""
    manifest = load_manifest(checkpoint)
    copy_files(place, [file for _, file in manifest.files], fetched)
    fetched.write(MANIFEST, manifest.encoded)
    with fetched.named("rename"):
        try:
            os.rename(fetched.root, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # else another process was first, where files have no locks


def _repair(checkpoint: Checkpoint, place: Place, local: Place, fetched: Place) -> None:
    """Download missing or wrong files of a copy; each file is replaced atomically, because others may read it."""
    copy = replace(checkpoint, uri=local.uri)
    try:
        manifest = load_manifest(copy)
    except DigestMismatch as error:
        _log.warning("downloading the manifest of the copy in %s again: %s", local.root, error)
        manifest = load_manifest(checkpoint)
        local.write(MANIFEST, manifest.encoded)
    report = verify(copy)
    _refuse_extra(report, local.root)
    wrong = _wrong(report)
    if not wrong:
        return
    _log.warning("downloading %d files of the copy in %s again, for example %s", len(wrong), local.root, wrong[0])
    copy_files(place, [file for _, file in manifest.files if file.name in wrong], fetched)
    for name in wrong:
        with local.named("write", name):
            os.makedirs(os.path.dirname(local.path(name)), exist_ok=True)
            os.replace(fetched.path(name), local.path(name))
        local.make_durable(name)


def _refuse_extra(report: Report, where: str) -> None:
    """Refuse a directory with a file that is not in the manifest, because loaders may read all files of a directory."""
    if report.extra:
        raise DigestMismatch(where, report.extra[0], "was not committed with it, and a loader may take it")


def _wrong(report: Report) -> list[str]:
    """Return the files that differ from the committed ones."""
    return [*report.missing, *report.wrong_size, *report.wrong_digest, *(name for name, _ in report.unreadable)]
