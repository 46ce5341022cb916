"""HashKV of a snapshot file: its history, read where it lies as ``storage.hash`` reads a database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from raftkv.errors import CorruptionError, StorageError
from raftkv.offline.database import checked_revision
from raftkv.offline.etcd.file import opened
from raftkv.offline.etcd.records import compact_revision_from_etcd
from raftkv.storage import schema
from raftkv.storage.hash import KVHash, hash_kv
from raftkv.storage.record import seal

_COMPACT_NAMES: Final = frozenset({schema.META_SCHEDULED_COMPACT, schema.META_FINISHED_COMPACT})


def hash_snapshot_file(path: Path, revision: int = 0) -> KVHash:
    """Hash the history in a snapshot file of raftkv or etcd, as ``Maintenance.HashKV`` does.

    Arguments:
        path: of the file.
        revision: hash the history up to it; 0: the newest.

    Raises:
        StorageError: it is none, or has no such revision.
    """
    source = _Snapshot(path)
    try:
        return hash_kv(source, checked_revision(source, revision))
    except (CorruptionError, ValueError, IndexError) as error:
        raise StorageError(f"{path} holds a history that etcd does not write: {error}") from error


class _Snapshot:
    """The history of a file, and how far it was compacted, in the form of a database."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with opened(path) as file:
            self._meta = dict(file.items(schema.META)) if schema.META in file.buckets() else {}

    def begin_read(self) -> _Snapshot:
        """Return this: nobody changes a file."""
        return self

    def get(self, bucket: bytes, key: bytes) -> bytes | None:
        """Return a compacted revision as a database has it."""
        value = self._meta.get(key)
        if value is None or bucket != schema.META or key not in _COMPACT_NAMES:
            return None
        return schema.encode_integer(compact_revision_from_etcd(value))

    def items(self, bucket: bytes, start: bytes = b"", end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over records; etcd's mark of a bumped revision, which is empty, is none."""
        with opened(self._path) as file:  # a file that is open takes a page met twice for damage
            for key, value in file.items(bucket):
                if end is not None and key >= end:
                    return
                if key >= start and value:
                    yield key, seal(key, value)

    def close(self) -> None:
        """Do nothing."""
