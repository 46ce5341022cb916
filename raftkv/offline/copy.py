"""The contents of a raftkv database taken over into a new one, without what belongs to the old member and cluster.

Owns the way from a copy of ``member/snap/db`` to a restore; snapshot files of etcd's form have their own
(``offline.etcd``). Every record is checked on the way. A database that a running member has open is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raftkv.apply.quotas import KEY_PREFIX
from raftkv.offline.database import check_format
from raftkv.offline.directory import refuse_running
from raftkv.storage import schema
from raftkv.storage.backend.base import ReadTxn, WriteBatch
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.record import unseal

BATCH_RECORDS: Final = 10_000
_MAGIC: Final = b"\xde\xc0\xef\xbe"
_MAGIC_AT: Final = 16
_OF_THE_CLUSTER: Final = frozenset({schema.MEMBERS, schema.MEMBERS_REMOVED, schema.CLUSTER})
_META_TAKEN: Final = (schema.META_SCHEDULED_COMPACT, schema.META_FINISHED_COMPACT)


@dataclass(frozen=True, slots=True)
class Base:
    """Where a database stands in the log: its applied index and the term of that entry (0: not known)."""

    index: int
    term: int


Forward = Callable[[LMDBBackend, Base], None]
"""Brings a database forward from where it stands in the log of its cluster; see ``offline.replay``."""


def is_database(path: Path) -> bool:
    """Return whether a file is a database of raftkv, by its first bytes."""
    with path.open("rb") as file:
        return file.read(_MAGIC_AT + len(_MAGIC))[_MAGIC_AT:] == _MAGIC


def copy_database(path: Path, backend: LMDBBackend) -> tuple[int, Base]:
    """Copy what a new cluster takes over.

    Arguments:
        path: of the database.
        backend: an empty one.

    Returns:
        the number of records in the history, and where the database stands.

    Raises:
        StorageError: it is in use, or of another format.
        CorruptionError: it is damaged.
    """
    refuse_running(path)
    with closing(LMDBBackend(path, read_only=True)) as source:
        check_format(source)
        with closing(source.begin_read()) as read:
            count = _copy_history(read, backend)
            _copy_small(read, backend)
            index = schema.decode_integer(read.get(schema.META, schema.META_CONSISTENT_INDEX)) or 0
            term = schema.decode_integer(read.get(schema.META, schema.META_TERM)) or 0
    return count, Base(index, term)


def _copy_history(read: ReadTxn, backend: LMDBBackend) -> int:
    batch, count = WriteBatch(), 0
    for key, record in read.items(schema.KEY):
        unseal(key, record)
        batch.records[key] = record
        count += 1
        if len(batch.records) >= BATCH_RECORDS:
            backend.commit(batch)
            batch = WriteBatch()
    backend.commit(batch)
    return count


def _copy_small(read: ReadTxn, backend: LMDBBackend) -> None:
    batch = WriteBatch()
    for bucket in schema.BUCKETS:
        if bucket not in (schema.KEY, schema.META) and bucket not in _OF_THE_CLUSTER:
            batch.values.update({(bucket, key): value for key, value in read.items(bucket)})
    # Quotas decide which entries take effect.
    for key, quota in read.items(schema.CLUSTER):
        if key.startswith(KEY_PREFIX):
            batch.values[schema.CLUSTER, key] = quota
    for name in _META_TAKEN:
        if (value := read.get(schema.META, name)) is not None:
            batch.values[schema.META, name] = value
    backend.commit(batch)
