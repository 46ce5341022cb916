"""A snapshot file, its contents and its HashKV: an etcd database, followed by its SHA-256 if it was saved over the
network.

The size of a database is a multiple of 512 bytes, so a file with 32 more bytes has the hash (etcd's own rule).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError
from google_crc32c import extend

from raftkv.errors import CorruptionError, StorageError
from raftkv.offline.database import checked_revision
from raftkv.offline.etcd.records import META_STORAGE_VERSION, compact_revision_from_etcd
from raftkv.pb import kv_pb2
from raftkv.storage import schema
from raftkv.storage.bolt.reader import BoltFile
from raftkv.storage.datadir import ETCD_DATABASE, begins
from raftkv.storage.hash import KVHash, hash_kv
from raftkv.storage.revision import SUB_BITS, describe, from_key, is_tombstone, is_well_formed, seal

_SECTOR_BYTES: Final = 512
_CHUNK_BYTES: Final = 1 << 20
HASH_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Status:
    """The result of ``snapshot status``.

    Attributes:
        hash: CRC32C over the names, keys and values of all buckets, in order.
        revision: the newest main revision.
        keys: number of keys that exist at that revision.
        size_bytes: size of the database.
        version: storage version; empty before etcd 3.6.
    """

    hash: int
    revision: int
    keys: int
    size_bytes: int
    version: str


def database_bytes(path: Path) -> tuple[int, bool]:
    """Return the size of the database in a file, and whether its hash follows.

    Raises:
        StorageError: the file does not exist.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise StorageError(f"stat {path}: {(error.strerror or str(error)).lower()}") from error
    if stat.S_ISDIR(status.st_mode):
        raise StorageError(f"{path} is a directory, not a snapshot file")
    if not stat.S_ISREG(status.st_mode):  # a pipe has no size, and may never end
        raise StorageError(f"{path} is a pipe or a device, not a snapshot file")
    size_bytes = status.st_size
    has_hash = size_bytes % _SECTOR_BYTES == HASH_BYTES
    return size_bytes - HASH_BYTES if has_hash else size_bytes, has_hash


def check_hash(path: Path) -> None:
    """Refuse a file whose hash is missing or wrong, with etcd's message.

    Raises:
        StorageError: the hash is missing or wrong.
    """
    size_bytes, has_hash = database_bytes(path)
    if not has_hash:
        raise StorageError("snapshot missing hash but --skip-hash-check=false")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size_bytes and (chunk := file.read(min(size_bytes, _CHUNK_BYTES))):
            digest.update(chunk)
            size_bytes -= len(chunk)
        expected = file.read(HASH_BYTES)
    if expected != digest.digest():
        raise StorageError(f"expected sha256 {_as_go(expected)}, got {_as_go(digest.digest())}")


def _as_go(data: bytes) -> str:
    return f"[{' '.join(map(str, data))}]"


def is_snapshot(path: str) -> bool:
    """Return whether a path is a file that begins like an etcd database."""
    return os.path.isfile(path) and begins(path, *ETCD_DATABASE)  # a pipe may never have a writer


@contextmanager
def opened(path: Path) -> Iterator[BoltFile]:
    """Open the database of a snapshot file.

    Raises:
        StorageError: the file is not a snapshot file.
    """
    size_bytes, _ = database_bytes(path)
    with BoltFile(path, size_bytes) as file:
        yield file


def snapshot_status(path: str | os.PathLike[str]) -> Status:
    """Read a whole snapshot file, and compare it with its hash if it has one.

    Raises:
        StorageError: the file is damaged, or is not a snapshot file.
    """
    place = Path(path)
    hashed, revision, version = 0, 0, b""
    keys: set[bytes] = set()
    with opened(place) as file:
        for bucket in file.buckets():
            hashed = extend(hashed, bucket)
            is_history = bucket == schema.KEY
            for key, value in file.items(bucket):
                hashed = extend(extend(hashed, key), value)
                if is_history:
                    revision = _revision(place, key) >> SUB_BITS
                    (keys.discard if is_tombstone(key) else keys.add)(_key_of(place, key, value))
                elif key == META_STORAGE_VERSION and bucket == schema.META:
                    version = value
        file.check_free_pages()
        if database_bytes(place)[1]:
            try:
                check_hash(place)
            except StorageError as error:
                raise StorageError(f"{place} was changed or damaged since it was saved: {error}") from None
        return Status(hashed, revision, len(keys), file.size_bytes, version.decode(errors="replace"))


def _revision(path: Path, key: bytes) -> int:
    if not is_well_formed(key):
        raise StorageError(f"{path}: cannot parse revision key: {key[:32].hex()}")
    return from_key(key)


def _key_of(path: Path, key: bytes, value: bytes) -> bytes:
    try:
        return kv_pb2.KeyValue.FromString(value).key
    except DecodeError:
        raise StorageError(f"{path}: the value of revision {describe(key)} is not a key-value pair") from None


_COMPACT_NAMES: Final = frozenset({schema.META_SCHEDULED_COMPACT, schema.META_FINISHED_COMPACT})


def hash_snapshot_file(path: Path, revision: int = 0) -> KVHash:
    """Hash the history in a snapshot file of raftkv or etcd, as ``Maintenance.HashKV`` does.

    Arguments:
        path: the file.
        revision: last revision to hash; 0: the newest.

    Raises:
        StorageError: the file is not a snapshot file, or does not have the revision.
    """
    read = _Snapshot(path)
    try:
        return hash_kv(lambda: read, checked_revision(lambda: read, revision))
    except (CorruptionError, ValueError, IndexError) as error:
        raise StorageError(f"{path} holds a history that etcd does not write: {error}") from error


class _Snapshot:
    """The history of a snapshot file and its compacted revision, with the interface of a database."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with opened(path) as file:
            self._meta = dict(file.items(schema.META)) if schema.META in file.buckets() else {}

    def get(self, bucket: bytes, key: bytes) -> bytes | None:
        """Return a compacted revision in the form of a database."""
        value = self._meta.get(key)
        if value is None or bucket != schema.META or key not in _COMPACT_NAMES:
            return None
        return schema.encode_integer(compact_revision_from_etcd(value))

    def items(self, bucket: bytes, start: bytes = b"", end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over records, without etcd's empty marks of bumped revisions."""
        with opened(self._path) as file:  # opened again, because an open file treats a page read twice as damage
            for key, value in file.items(bucket):
                if end is not None and key >= end:
                    return
                if key >= start and value:
                    yield key, seal(key, value)

    def close(self) -> None:
        """Do nothing."""
