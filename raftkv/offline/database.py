"""The database of a stopped member: its hash, its compaction on disk, its format version, and a copy for a restore. A
database that a running member has open is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raftkv.errors import CorruptionError, StorageError
from raftkv.offline.directory import database_of, held, refuse_running
from raftkv.pb import rpc_pb2
from raftkv.storage import schema
from raftkv.storage.backend.base import History, ReadTxn, WriteBatch
from raftkv.storage.backend.lmdb import LMDBBackend, replace_file
from raftkv.storage.datadir import begins
from raftkv.storage.hash import KVHash, hash_kv
from raftkv.storage.mvcc import FIRST_REVISION
from raftkv.storage.revision import SUB_BITS, from_key, unseal

TEMPORARY_NAME: Final = "db.tmp"
"""Name of the copy that ``defragment`` makes next to the database; a starting member removes it."""

STORAGE_VERSIONS: Final = {schema.FORMAT_VERSION: "3.7"}
"""Format of the database to the storage version that members report, in etcd's numbering."""


def hash_database_file(path: str, revision: int = 0) -> KVHash:
    """Hash the history in a database, as ``Maintenance.HashKV`` does.

    Arguments:
        path: the file, or a data directory.
        revision: last revision to hash; 0: the newest.

    Raises:
        StorageError: the database cannot be used: missing, foreign, in use, or without that revision.
        CorruptionError: the database is damaged.
    """
    database = database_of(path)
    refuse_running(database)
    with closing(LMDBBackend(database, read_only=True)) as backend:
        check_format(backend)
        return hash_kv(backend.begin_read, checked_revision(backend.begin_read, revision))


def members_in(path: str) -> list[rpc_pb2.Member]:
    """Return the members of the cluster, as a database or data directory knows them; none that it lacks yet.

    Raises:
        StorageError: it cannot be used: missing, foreign or in use.
        CorruptionError: it is damaged.
    """
    database = database_of(path)
    refuse_running(database)
    with closing(LMDBBackend(database, read_only=True)) as backend, closing(backend.begin_read()) as read:
        check_format(backend)
        with schema.reading(schema.MEMBERS):
            return [rpc_pb2.Member.FromString(record) for _, record in read.items(schema.MEMBERS)]


def checked_revision(begin_read: Callable[[], History], revision: int) -> int:
    """Return the revision to hash, the newest one for 0.

    Arguments:
        begin_read: opens a read transaction of the history.
        revision: the requested revision.

    Raises:
        StorageError: the revision cannot be read; the message is etcdutl's.
    """
    last, compacted = _revisions(begin_read)
    if revision > last:
        raise StorageError("mvcc: required revision is a future revision")
    if 0 < revision < compacted:
        raise StorageError("mvcc: required revision has been compacted")
    return revision or last


def check_format(backend: LMDBBackend) -> int:
    """Return the version of a database's format.

    Raises:
        StorageError: the format is unknown to this program.
    """
    with closing(backend.begin_read()) as read:
        version = schema.decode_integer(read.get(schema.META, schema.META_FORMAT_VERSION))
    if version not in STORAGE_VERSIONS:
        raise StorageError(
            f"the database {backend.path} has format {version}, and this program reads "
            f"{', '.join(map(str, STORAGE_VERSIONS))}: use the raftkvutl of the raftkv that wrote it"
        )
    return version


def _revisions(begin_read: Callable[[], History]) -> tuple[int, int]:
    """Return the newest revision, and the compacted one (-1: none)."""
    with closing(begin_read()) as read:
        compacted = max(schema.read_compact_revisions(read.get))
        last = FIRST_REVISION
        for key, _ in read.items(schema.KEY):
            last = from_key(key) >> SUB_BITS
    return max(last, compacted), compacted


def defragment(data_dir: str) -> None:
    """Rewrite a database without its free pages.

    Arguments:
        data_dir: data directory of a stopped member.

    Raises:
        StorageError: the database cannot be used, or there is no space for the copy; nothing is changed.
        CorruptionError: the database is damaged; nothing is changed.
    """
    with held(data_dir) as database:
        copy = database.with_name(TEMPORARY_NAME)
        copy.unlink(missing_ok=True)
        try:
            with closing(LMDBBackend(database, read_only=True)) as backend:
                check_format(backend)
                backend.copy_to(copy)
            # Root may work on the files of the user that runs the member, who must be able to open the copy.
            owner = database.stat()
            if owner.st_uid != os.geteuid():
                os.chown(copy, owner.st_uid, owner.st_gid)
            replace_file(copy, database)
        except BaseException:
            copy.unlink(missing_ok=True)
            raise


def storage_version(data_dir: str) -> str:
    """Return the storage version of a stopped member.

    Raises:
        StorageError: the directory has no database, cannot be used, or has a format unknown to this program.
    """
    with held(data_dir) as database, closing(LMDBBackend(database, read_only=True)) as backend:
        try:
            return STORAGE_VERSIONS[check_format(backend)]
        except CorruptionError as error:
            raise StorageError(f"the database {database} cannot be read: {error}") from error


# -- copy -----------------------------------------------------------------------------------------------------------
#
# ``copy_database`` copies the contents of ``member/snap/db`` into a new database, without the records of the old member
# and cluster; ``offline.etcd`` handles snapshot files in etcd's form. Every record is checked.

BATCH_RECORDS: Final = 10_000
BATCH_BYTES: Final = 16 << 20
"""Bytes of records kept in memory before they are written."""
_OF_THE_CLUSTER: Final = frozenset({schema.MEMBERS, schema.MEMBERS_REMOVED, schema.CLUSTER})
_META_TAKEN: Final = (schema.META_SCHEDULED_COMPACT, schema.META_FINISHED_COMPACT)


@dataclass(frozen=True, slots=True)
class Base:
    """Log position of a database: its applied index and the term of that entry (0: unknown)."""

    index: int
    term: int


Forward = Callable[[LMDBBackend, Base], None]
"""Advances a database from its position in the log of its cluster; see ``offline.archive``."""


def is_database(path: Path) -> bool:
    """Return whether a file is a database of raftkv, by its first bytes."""
    return begins(path, b"\xde\xc0\xef\xbe", 16)


def copy_database(path: Path, backend: LMDBBackend) -> tuple[int, Base]:
    """Copy the data that a new cluster takes over.

    Arguments:
        path: the database.
        backend: an empty database.

    Returns:
        the number of records in the history, and the log position of the database.

    Raises:
        StorageError: the database is in use, or has another format.
        CorruptionError: the database is damaged.
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
    batch, size_bytes, count = WriteBatch(), 0, 0
    for key, record in read.items(schema.KEY):
        unseal(key, record)
        batch.records[key] = record
        size_bytes += len(record)
        count += 1
        if len(batch.records) >= BATCH_RECORDS or size_bytes >= BATCH_BYTES:
            backend.commit(batch)
            batch, size_bytes = WriteBatch(), 0
    backend.commit(batch)
    return count


def _copy_small(read: ReadTxn, backend: LMDBBackend) -> None:
    batch = WriteBatch()
    for bucket in schema.BUCKETS:
        if bucket not in (schema.KEY, schema.META) and bucket not in _OF_THE_CLUSTER:
            batch.values.update({(bucket, key): value for key, value in read.items(bucket)})
    # Quotas affect the result of entries; limits protect the new cluster.
    for key, record in read.items(schema.CLUSTER):
        if key.startswith((schema.CLUSTER_QUOTA_PREFIX, schema.CLUSTER_LIMIT_PREFIX)):
            batch.values[schema.CLUSTER, key] = record
    for name in _META_TAKEN:
        if (value := read.get(schema.META, name)) is not None:
            batch.values[schema.META, name] = value
    backend.commit(batch)
