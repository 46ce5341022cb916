"""Saves the database of one member as a file that etcd's tools read.

    saved = await kv.snapshot("backup.db")
    print(saved.size_bytes, saved.version)

The file gets its name when it is whole, its hash is right, and it is durable; until then it is ``backup.db.part``,
which is removed if anything fails. One process at a time writes there: two would write into the same file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import stat
from collections.abc import AsyncIterable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from raftkv.errors import StorageError
from raftkv.pb import rpc_pb2

HASH_BYTES: Final = hashlib.sha256().digest_size
SECTOR_BYTES: Final = 512
"""A database is a multiple of this, so a file with its hash is not."""

Progress = Callable[[int, int], None]
"""Called with the bytes that were received and those of the whole database."""


@dataclass(frozen=True, slots=True)
class SavedSnapshot:
    """A snapshot that was saved.

    Attributes:
        path: of the file.
        size_bytes: of the file.
        version: storage version of the member; empty before etcd 3.6.
    """

    path: Path
    size_bytes: int
    version: str


async def save(
    messages: AsyncIterable[rpc_pb2.SnapshotResponse], to: str | os.PathLike[str], on_progress: Progress | None = None
) -> SavedSnapshot:
    """Write what a member sends to a file.

    Arguments:
        messages: of ``Maintenance.Snapshot``.
        to: the path of the file; one that is there is replaced in the end, behind links.
        on_progress: called after each piece.

    Raises:
        StatusError: the member gave up, or was lost.
        StorageError: the file cannot be written, or what was sent is not whole.
    """
    target = _target(to)
    part = target.with_name(target.name + ".part")
    with _alone(part) as file:
        try:
            # A file that was there may have a wider mode.
            os.fchmod(file.fileno(), 0o600)
            saved = await _receive(messages, file, target, on_progress)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        except OSError as error:
            raise _failed(f"could not write snapshot to {part}", error) from None
        try:
            os.replace(part, target)
            await asyncio.to_thread(_sync_directory, target)
        except OSError as error:
            raise _failed(f"could not rename {part} to {target}", error) from None
    return saved


@contextlib.contextmanager
def _alone(part: Path) -> Iterator[BinaryIO]:
    """Open an empty file, and keep others from writing to it for the time of the block; one that fails removes it.

    Raises:
        StorageError: it cannot be opened, or another process writes to it.
    """
    file = _locked(part)
    try:
        yield file
    except BaseException:
        if _has_name(file, part):
            part.unlink(missing_ok=True)
        raise
    finally:
        # What a full disk did not take would fail here once more.
        with contextlib.suppress(OSError):
            file.close()


def _locked(part: Path) -> BinaryIO:
    # A link there could lead the snapshot, and its mode, elsewhere.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            file = os.fdopen(os.open(part, flags, 0o600), "wb")
        except OSError as error:
            raise _failed(f"could not open {part}", error) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise StorageError(f"could not open {part} (another snapshot is being saved there)") from None
        except OSError:
            pass  # a file system without locks
        # The last holder of the lock may have renamed the file: then it is no longer this one.
        if _has_name(file, part):
            file.truncate(0)
            return file
        file.close()


def _has_name(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except OSError:
        return False


def _target(to: str | os.PathLike[str]) -> Path:
    """Return the file that is to be there, behind links; what takes its place must not be a device or a directory."""
    target = Path(os.path.realpath(to) if os.path.islink(to) else to)
    if not target.name:
        raise StorageError(f"could not open {os.fspath(to)!r} (is a directory)")
    with contextlib.suppress(OSError):
        mode = os.stat(to).st_mode
        if not stat.S_ISREG(mode):
            why = "is a directory" if stat.S_ISDIR(mode) else "it is no file, and a file would take its place"
            raise StorageError(f"could not open {os.fspath(to)} ({why})")
    return target


async def _receive(
    messages: AsyncIterable[rpc_pb2.SnapshotResponse], file: BinaryIO, target: Path, on_progress: Progress | None
) -> SavedSnapshot:
    """Write all pieces; the last of them is the hash of all others."""
    digest, waiting, received_bytes, version = hashlib.sha256(), b"", 0, ""
    async for message in messages:
        digest.update(waiting)
        file.write(waiting)
        waiting, version = message.blob, message.version
        received_bytes += len(waiting)
        if on_progress is not None:
            on_progress(received_bytes, received_bytes + message.remaining_bytes)
    if received_bytes % SECTOR_BYTES != HASH_BYTES:
        raise StorageError(f"sha256 checksum not found [bytes: {received_bytes}]")
    file.write(waiting)
    if waiting != digest.digest():
        raise StorageError(f"sha256 checksum of {received_bytes} bytes is wrong: the snapshot was damaged on its way")
    return SavedSnapshot(target, received_bytes, version)


def _sync_directory(path: Path) -> None:
    directory = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _failed(what: str, error: OSError) -> StorageError:
    return StorageError(f"{what} ({(error.strerror or str(error)).lower()})")
