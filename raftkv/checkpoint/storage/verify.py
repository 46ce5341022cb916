"""Verification that the files of a checkpoint are the committed ones, and readers that return only such bytes.

::

    report = verify(checkpoint, on_progress=lambda done, total: ...)
    report.is_whole, report.missing, report.wrong_size, report.wrong_digest, report.extra
    with open_verified(checkpoint, "model.bin") as file: ...     # DigestMismatch before the first byte
    check_there(place, manifest)                                 # before a commit: sizes only

The record has the digest of the manifest, and the manifest has the digests of all files. So a change of the files by a
process without write access to the store is always detected. Digests are computed on several threads, one piece of a
file at a time, so memory does not depend on the size of files.

Blocking, like ``place``.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Final

from raftkv.checkpoint import digest
from raftkv.checkpoint.commit.manifest import MAX_BYTES, RECORD, Manifest
from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.digest import Digest, of_bytes
from raftkv.checkpoint.errors import DigestMismatch, FilesChanged, StorageError
from raftkv.checkpoint.records import Checkpoint, FileRecord
from raftkv.checkpoint.storage.place import Found, Place
from raftkv.client.records import RecordError
from raftkv.errors import ConfigError

Progress = Callable[[int, int], None]
"""Called with the number of processed bytes and the total; from several threads, one at a time."""

SMALL_BYTES: Final = 64 << 20
"""Files up to this size are verified in memory, so that they cannot change between the check and the read."""
PIECE_BYTES: Final = 1 << 20
"""Size of the pieces of larger files; each piece is verified again when it is read."""
THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of ``verify``; names are below the checkpoint.

    Attributes:
        checkpoint: checkpoint.
        file_count, size_bytes: number and total size of the files with the right digest.
        missing: files that do not exist.
        wrong_size, wrong_digest: files that differ from the committed ones.
        unreadable: files that could not be read, with the error.
        extra: files of no rank: the readers of this module ignore them, other loaders may read them.
    """

    checkpoint: Checkpoint
    file_count: int
    size_bytes: int
    missing: tuple[str, ...] = ()
    wrong_size: tuple[str, ...] = ()
    wrong_digest: tuple[str, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every file exists and is correct."""
        return not (self.missing or self.wrong_size or self.wrong_digest or self.unreadable)


class Counter:
    """Sums up bytes from several threads and reports progress.

    Arguments:
        total: total number of bytes.
        on_progress: called with each sum; None: no calls.

    Attributes:
        given_up: set to make the threads end with their next piece, for example after Ctrl-C.
    """

    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self.given_up = False
        self._done = 0
        self._total = total
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """Report more bytes.

        Raises:
            StorageError: the work was cancelled.
        """
        if self.given_up:
            raise StorageError("it was given up")
        with self._lock:
            self._done += size_bytes
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)


def require_below(checkpoint: Checkpoint, uri: str) -> None:
    """Refuse a checkpoint that is not below the registry's uri, before its files are loaded as code.

    Arguments:
        checkpoint: checkpoint; any user who may write its key may have chosen its directory.
        uri: URI of the registry.

    Raises:
        ConfigError: the checkpoint is not below the uri.
    """
    if not uri or not Place(uri).contains(checkpoint.uri):
        raise ConfigError(
            f"{checkpoint.reference} is not loaded: it lies in {checkpoint.uri}, not below {uri or 'a given place'}; "
            "if you trust its writers, name that place as the uri of the registry, or give anywhere=True"
        )


def load_manifest(checkpoint: Checkpoint) -> Manifest:
    """Return the list of a checkpoint's files, verified against the record.

    Raises:
        DigestMismatch: the list is not the committed one.
        StorageError: the list cannot be read. If the checkpoint was deleted, a lookup raises ``CheckpointNotFound``.
    """
    return decode_manifest(checkpoint.uri, read_manifest(checkpoint), checkpoint.manifest)


def read_manifest(checkpoint: Checkpoint) -> bytes:
    """Return the unverified bytes of the list of a checkpoint's files. Raises StorageError, as ``load_manifest``."""
    try:
        return Place(checkpoint.uri).read(MANIFEST, MAX_BYTES)
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        remedy = "put the deleted files back, or begin afresh under another run id"
        raise StorageError(f"{error}; step {checkpoint.step} of this run was committed there: {remedy}") from error


def decode_manifest(uri: str, data: bytes, wanted: str) -> Manifest:
    """Decode and verify a manifest.

    Arguments:
        uri: directory of the files.
        data: content of the file.
        wanted: expected digest of the data.

    Raises:
        DigestMismatch: the digest differs, or the data is not a manifest.
    """
    if of_bytes(data, wanted) != wanted:
        raise DigestMismatch(uri, MANIFEST, "is not the one that was committed")
    try:
        return Manifest.decode(data)
    except RecordError as error:
        raise DigestMismatch(uri, MANIFEST, f"cannot be read: {error}") from None


def check_there(place: Place, manifest: Manifest) -> None:
    """Check that every prepared file exists with its size, without reading the files.

    Arguments:
        place: place of the attempt.
        manifest: manifest of the files that the ranks have prepared.

    Raises:
        FilesChanged: a file is missing or has another size.
        StorageError: the place cannot be read.
    """
    there = {found.name: found.size_bytes for found in place.list()}
    for rank, file in manifest.files:
        if there.get(file.name) == file.size_bytes:
            continue
        # On a network file system, a listing may be older than the file. Opening the file gives its current size.
        size_bytes = place.size_now(file.name)
        if size_bytes is None:
            raise FilesChanged(place.uri, file.name, rank, "is not there any more")
        if size_bytes != file.size_bytes:
            raise FilesChanged(place.uri, file.name, rank, f"has {size_bytes} bytes now, not {file.size_bytes}")


def verify(checkpoint: Checkpoint, *, on_progress: Progress | None = None, threads: int = THREADS) -> Report:
    """Compare every file of a checkpoint with its committed digest.

    Arguments:
        checkpoint: result of a lookup.
        on_progress: called with numbers of bytes.
        threads: number of threads that read and digest in parallel.

    Raises:
        DigestMismatch: the manifest is not the committed one, so the files cannot be verified.
        StorageError: the place cannot be read.
    """
    place = Place(checkpoint.uri)
    files = [file for _, file in load_manifest(checkpoint).files]
    there = {found.name: found for found in place.list()}
    counter = Counter(sum(file.size_bytes for file in files), on_progress)
    with ThreadPoolExecutor(max(1, threads), "raftkv-verify") as pool:
        try:
            outcomes = list(pool.map(lambda file: _check(place, file, there.get(file.name), counter), files))
        except BaseException:
            counter.given_up = True  # the end of the block waits for files in progress
            raise
    named = {name: tuple(file.name for file, outcome in zip(files, outcomes, strict=True) if outcome == name)
             for name in (_MISSING, _SIZE, _DIGEST)}  # fmt: skip
    right = [file for file, outcome in zip(files, outcomes, strict=True) if not outcome]
    known = {MANIFEST, RECORD, *(file.name for file in files)}
    return Report(
        checkpoint, len(right), sum(file.size_bytes for file in right),
        named[_MISSING], named[_SIZE], named[_DIGEST],
        tuple((file.name, why) for file, why in zip(files, outcomes, strict=True) if why and why not in named),
        tuple(sorted(there.keys() - known)),
    )  # fmt: skip


_MISSING: Final = "is missing"
_SIZE: Final = "differs in size from what was committed"
_DIGEST: Final = "differs in contents from what was committed"


def _check(place: Place, file: FileRecord, found: Found | None, counter: Counter) -> str:
    """Return the fault of a file; empty: none."""
    try:
        size_bytes = None if found is None else found.size_bytes
        if size_bytes != file.size_bytes:  # a listing may be older than the file, see above
            size_bytes = place.size_now(file.name)
        if size_bytes != file.size_bytes:
            counter.add(file.size_bytes)
            return _MISSING if size_bytes is None else _SIZE
        own = digest_of(place, file.name, like=file.digest, on_bytes=counter.add)
    except (StorageError, ConfigError) as error:  # the second: a digest of a later version
        return str(error)
    return "" if own == file.digest else _DIGEST


def digest_of(place: Place, name: str, *, like: str = digest.SHA256, on_bytes: Callable[[int], None]) -> str:
    """Return the digest of a file.

    Arguments:
        place, name: place and name of the file.
        like: algorithm, or a digest of the same algorithm.
        on_bytes: called with the size of each piece.

    Raises:
        StorageError: the file cannot be read.
        ConfigError: the algorithm is unknown.
    """
    found = Digest.like(like)
    for chunk in place.chunks(name):
        found.update(chunk)
        on_bytes(len(chunk))
    return str(found)


def find_file(manifest: Manifest, checkpoint: Checkpoint, name: str) -> FileRecord:
    """Return the committed record of a file. Raises DigestMismatch if no file has the name."""
    for _, file in manifest.files:
        if file.name == name:
            return file
    raise DigestMismatch(checkpoint.uri, name, "is not a file of this checkpoint")


def open_verified(checkpoint: Checkpoint, name: str, *, file: FileRecord | None = None) -> IO[bytes]:
    """Open a verified file: no byte is returned before the complete file was verified.

    A file up to 64 MiB is read into memory and checked there. A larger one is read twice: first to check it and
    to digest each piece, then by the caller, with each piece compared. ``stream_verified`` reads once.

    Arguments:
        checkpoint: result of a lookup.
        name: file name.
        file: its entry in the manifest; None: the manifest is read.

    Raises:
        DigestMismatch: the file or the manifest is not the committed one. A read raises it too if the file was
            changed after it was opened.
        StorageError: the file cannot be read.
    """
    wanted = file or find_file(load_manifest(checkpoint), checkpoint, name)
    place = Place(checkpoint.uri)
    opened = place.open_reader(name)
    try:
        if wanted.size_bytes > SMALL_BYTES:
            return io.BufferedReader(_Pieces(opened, place, wanted), PIECE_BYTES)
        with opened, place.named("read", name):
            data = opened.read(wanted.size_bytes + 1)
        _compare(checkpoint.uri, wanted, len(data), of_bytes(data, wanted.digest))
    except BaseException:
        opened.close()
        raise
    return io.BytesIO(data)


class _Pieces(io.RawIOBase):
    """A large file that is verified first; each later read must return the verified bytes.

    Arguments:
        file: open file, closed with this object.
        place, wanted: place and committed record of the file.

    Raises:
        DigestMismatch: the file is not the committed one.
    """

    def __init__(self, file: IO[bytes], place: Place, wanted: FileRecord) -> None:
        self._file, self._place, self._wanted = file, place, wanted
        self._position, self._loaded, self._piece = 0, -1, b""
        found, self._digests, size_bytes = Digest.like(wanted.digest), list[bytes](), 0
        while size_bytes <= wanted.size_bytes and (piece := self._read()):
            found.update(piece)
            self._digests.append(hashlib.sha256(piece).digest())
            size_bytes += len(piece)
        _compare(place.uri, wanted, size_bytes, str(found))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._wanted.size_bytes}[whence]
        if origin + offset < 0:
            raise ValueError(f"a position is 0 or above, not {origin + offset}")
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, target: Any, /) -> int:
        number, start = divmod(self._position, PIECE_BYTES)
        if number >= len(self._digests):
            return 0
        if number != self._loaded:
            piece = self._read(number)
            if hashlib.sha256(piece).digest() != self._digests[number]:
                raise DigestMismatch(self._place.uri, self._wanted.name, "was changed while it was read")
            self._loaded, self._piece = number, piece
        part = memoryview(self._piece)[start : start + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _read(self, number: int | None = None) -> bytes:
        """Return a piece, also if the file system returns it in parts."""
        with self._place.named("read", self._wanted.name):
            if number is not None:
                self._file.seek(number * PIECE_BYTES)
            piece = self._file.read(PIECE_BYTES)
            while piece and (more := self._file.read(PIECE_BYTES - len(piece))):
                piece += more
        return piece


def read_verified(checkpoint: Checkpoint, name: str, *, file: FileRecord | None = None) -> bytes:
    """Return the verified content of a file. Arguments and errors as ``open_verified``."""
    with open_verified(checkpoint, name, file=file) as opened:
        return opened.read()


def stream_verified(place: Place, file: FileRecord) -> Iterator[bytes]:
    """Read a file once, piece by piece; the pieces are verified only when the end is reached.

    Arguments:
        place: place of the files.
        file: committed record of the file.

    Raises:
        DigestMismatch: at the end, if the returned bytes are not the committed ones, or before there are more of them.
        StorageError: the file cannot be read.
    """
    found, size_bytes = Digest.like(file.digest), 0
    for chunk in place.chunks(file.name):
        size_bytes += len(chunk)
        if size_bytes > file.size_bytes:
            break
        found.update(chunk)
        yield chunk
    _compare(place.uri, file, size_bytes, str(found))


def _compare(uri: str, wanted: FileRecord, size_bytes: int, found: str) -> None:
    if size_bytes != wanted.size_bytes:
        raise DigestMismatch(uri, wanted.name, f"{_SIZE}: {wanted.size_bytes} bytes")
    if found != wanted.digest:
        raise DigestMismatch(uri, wanted.name, _DIGEST)
