"""Creates the data directory of a member from a snapshot file.

    FILE -> DIR.restoring/member/{snap/db, wal}  (all checked, all durable)  ->  rename  ->  DIR

Members that restore the same file with the same flags found a new cluster: the database starts as that of entry 1,
which stands for everything in the file, and the log begins after it. So a member that joins later must be sent the
database, because the log alone lacks the beginning.

An existing empty directory is kept: it may be a mount point, a link, or the only place where this user may write. Then
the data is built in ``DIR/.restoring``, and its contents are renamed: the database and its log in one step.
A crash leaves ``DIR.restoring`` or ``DIR/.restoring``, which no member uses as its data and the next restore removes.
A log elsewhere (``--wal-dir``) is renamed after the database: in between, the member refuses to start, because a
database without its log is not a member.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from raftkv import cluster_id
from raftkv.apply.auth.store import AuthStore
from raftkv.apply.membership import Membership
from raftkv.apply.quotas import QUOTAS_MAX, Quotas
from raftkv.config import ServerConfig
from raftkv.errors import CorruptionError, StorageError
from raftkv.offline.database import BATCH_BYTES, BATCH_RECORDS, Base, Forward, copy_database, is_database
from raftkv.offline.etcd import records
from raftkv.offline.etcd.file import check_hash, database_bytes, opened
from raftkv.pb import admin_pb2, kv_pb2, raft_pb2, rpc_pb2
from raftkv.raft.types import ConfState, HardState, SnapshotMeta
from raftkv.storage import schema
from raftkv.storage.backend.base import WriteBatch
from raftkv.storage.backend.lmdb import MAP_SIZE_BYTES, LMDBBackend
from raftkv.storage.bolt.reader import BoltFile
from raftkv.storage.datadir import DIRECTORY_MODE, ensure_private_directory, sync_directory
from raftkv.storage.failpoints import failpoint
from raftkv.storage.mvcc import FIRST_REVISION, Store
from raftkv.storage.revision import SUB_BITS, describe, from_key, is_tombstone, is_well_formed, seal
from raftkv.storage.wal import WAL

INDEX: Final = 1
"""Index of the entry for which the restored state stands."""
TERM: Final = 1
REVISIONS_MAX: Final = 1 << 39
"""Above all main revisions that the index can hold in a 64-bit integer with their sub-revisions."""
TEMPORARY_SUFFIX: Final = ".restoring"
INSIDE: Final = ".restoring"
"""Name of the directory under construction inside an existing directory."""
_SPARED: Final = frozenset((INSIDE, "lost+found"))
"""Allowed contents of an empty directory: from an interrupted restore, and from the root of a file system."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore.

    Attributes:
        cluster_id, member_id: ids of the new member.
        revision: revision of the store.
        records: number of records in the history.
        needs_users: whether authentication is enabled.
    """

    cluster_id: int
    member_id: int
    revision: int
    records: int
    needs_users: bool


def restore(
    path: Path,
    config: ServerConfig,
    *,
    skip_hash_check: bool = False,
    bump_revision: int = 0,
    forward: Forward | None = None,
) -> Restored:
    """Create a data directory; durable on return.

    Arguments:
        path: the snapshot file, or a copy of a member's database (which has no hash).
        config: name, cluster and directories of the new member.
        skip_hash_check: accept a file whose hash is missing or wrong.
        bump_revision: how much to raise the revision of the file; all of the history is then compacted.
        forward: applied to the contents of the file before they become those of the new member.

    Raises:
        ConfigError: the flags do not describe a cluster with this member in it.
        StorageError: the file is not a snapshot, or the directories are in use; nothing was changed.
    """
    config.check_bootstrap()
    data_dir = Path(config.data_dir)
    wal_dir = Path(config.wal_dir) if config.wal_dir else None
    _check_free(data_dir, wal_dir)
    database_bytes(path)
    if not skip_hash_check:
        check_hash(path)
    with ExitStack() as held:
        temporary = held.enter_context(_building(data_dir))
        wal_temporary = temporary / "member" / "wal"
        if wal_dir is not None and _absolute(wal_dir).is_relative_to(_absolute(data_dir)):
            wal_temporary = temporary / _absolute(wal_dir).relative_to(_absolute(data_dir))
            ensure_private_directory(wal_temporary.parent)
            wal_dir = None  # it is moved together with the data directory
        elif wal_dir is not None:
            wal_temporary = held.enter_context(_building(wal_dir)) / "wal"
        restored = _build(path, config, temporary, wal_temporary, bump_revision, forward)
        failpoint("restoreBeforeRename")
        if temporary.name == INSIDE:
            _take_places(temporary, data_dir)
        else:
            _take_place(temporary, data_dir)
        if wal_dir is not None:
            failpoint("restoreBeforeRenameLog")
            _take_place(wal_temporary, wal_dir)
    return restored


def _check_free(data_dir: Path, wal_dir: Path | None) -> None:
    try:
        occupied = data_dir.exists() and any(child.name not in _SPARED for child in data_dir.iterdir())
    except OSError:
        occupied = True
    if occupied:
        raise StorageError(f'data-dir "{data_dir}" not empty or could not be read{_advice(data_dir, wal_dir)}')
    if wal_dir is None:
        return
    if wal_dir.exists():
        raise StorageError(f'wal-dir "{wal_dir}" exists')
    if _absolute(data_dir).is_relative_to(_absolute(wal_dir)):
        raise StorageError(f'wal-dir "{wal_dir}" is data-dir, or holds it: the log needs a directory of its own')


def _advice(data_dir: Path, wal_dir: Path | None) -> str:
    """Return what to delete after a restore that was killed before its log was renamed; empty: nothing."""
    with suppress(OSError):
        if (data_dir / INSIDE).exists():
            return f": a restore was cut off there; delete what is in {data_dir}, and restore again"
        if wal_dir is not None and not wal_dir.exists() and (_beside(wal_dir) / "wal").exists():
            return f": a restore was cut off there; delete {data_dir} and {_beside(wal_dir)}, and restore again"
    return ""


def _absolute(path: Path) -> Path:
    """Return a path without links and dots, for comparing directories."""
    return Path(os.path.realpath(path))


def _beside(path: Path) -> Path:
    path = path.absolute()
    return path.with_name(path.name + TEMPORARY_SUFFIX)


@contextmanager
def _building(data_dir: Path) -> Iterator[Path]:
    """Lock an empty directory next to the target, or inside it, for one process at a time; removed at the end."""
    temporary = _beside(data_dir)
    if data_dir.exists():
        # Access for the owner only, as a new directory would have; another user's directory is refused in one line.
        with suppress(PermissionError):
            data_dir.chmod(DIRECTORY_MODE)
        ensure_private_directory(data_dir)
        temporary = data_dir.absolute() / INSIDE
    lock = _locked(temporary)
    try:
        for child in temporary.iterdir():
            _remove(child)
        yield temporary
    finally:
        # After it was renamed, another process may have created a directory with this name.
        if temporary.exists() and os.path.samestat(os.fstat(lock), temporary.stat()):
            _remove(temporary)
        os.close(lock)


def _locked(directory: Path) -> int:
    ensure_private_directory(directory)
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have renamed this directory, and a third process have created another.
        if directory.exists() and os.path.samestat(os.fstat(lock), directory.stat()):
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    raise StorageError(f"another restore is at work in {directory}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _take_place(temporary: Path, target: Path) -> None:
    """Rename a directory; an empty directory with the new name is replaced."""
    try:
        os.replace(temporary, target)
        sync_directory(str(target.absolute().parent))
    except OSError as error:
        raise StorageError(f"cannot move {temporary} to {target}: {error.strerror}") from error


def _take_places(temporary: Path, directory: Path) -> None:
    """Move the built files into an existing directory: the database first, which is unusable without its log."""
    for child in sorted(temporary.iterdir(), key=lambda child: child.name != "member"):
        _take_place(child, directory / child.name)


def _build(
    path: Path, config: ServerConfig, directory: Path, wal_dir: Path, bump_revision: int, forward: Forward | None
) -> Restored:
    """Write database and log of the new member; durable on return."""
    snapshots = ensure_private_directory(directory / "member" / "snap")
    founders = config.founding_members()
    conf_state = ConfState(voters=tuple(sorted(founders)))
    backend = LMDBBackend(Path(snapshots) / "db", _map_size_bytes(path))
    try:
        count, base = _copied(path, backend, bump_revision)
        if forward is not None:
            forward(backend, base)
        store = _opened_store(path, backend)
        members = [rpc_pb2.Member(ID=key, name=name, peerURLs=urls) for key, (name, urls) in founders.items()]
        Membership(store).bootstrap(members)
        store.meta_put(schema.CLUSTER, schema.CLUSTER_LOG_MADE, b"")
        store.set_conf_state(conf_state)
        store.set_applied(INDEX, TERM)
        store.commit()
        needs_users = _needs_users(path, store)
        revision = store.revision
        store.close()
    finally:
        backend.close()
    found = Restored(cluster_id.cluster_id(founders), config.member_id, revision, count, needs_users)
    _write_log(str(wal_dir), found, conf_state)
    for made in (snapshots, directory / "member", directory):
        sync_directory(str(made))
    return found


def _copied(path: Path, backend: LMDBBackend, bump_revision: int) -> tuple[int, Base]:
    if not is_database(path):
        copy = _Copy(path, backend)
        found = copy.run(bump_revision)
        _set_quotas(path, backend, copy.quotas)
        return found
    if bump_revision:
        raise StorageError(f"{path} is a copy of a member's database: its revision cannot be bumped")
    return copy_database(path, backend)


def _set_quotas(path: Path, backend: LMDBBackend, requests: list[admin_pb2.QuotaSetRequest]) -> None:
    """Set the quotas of prefixes, and count their use, which may have changed elsewhere."""
    if not requests:
        return
    store = _opened_store(path, backend)
    quotas = Quotas(store)
    for request in requests:
        for _ in quotas.execute(request):
            pass
    store.set_applied(0, 0)
    store.commit()
    store.close()


def _map_size_bytes(path: Path) -> int:
    return max(MAP_SIZE_BYTES, 4 * path.stat().st_size)


def _opened_store(path: Path, backend: LMDBBackend) -> Store:
    """Open the copied database as a member would: the whole history is decoded and checked."""
    try:
        return Store.open(backend)
    except CorruptionError as error:
        raise StorageError(f"{path} holds a history that etcd does not write: {error}") from error


def _needs_users(path: Path, store: Store) -> bool:
    """Return whether authentication is enabled; all users are read, as a starting member would do."""
    try:
        return AuthStore(store).is_enabled
    except StorageError as error:
        raise StorageError(f"{path}: {error}; remove it with etcd, and save another snapshot") from error


def _write_log(wal_dir: str, member: Restored, conf_state: ConfState) -> None:
    metadata = raft_pb2.WALMetadata(cluster_id=member.cluster_id, member_id=member.member_id)
    wal = WAL.create(wal_dir, metadata.SerializeToString())
    try:
        wal.save_snapshot(SnapshotMeta(INDEX, TERM, conf_state), HardState(TERM, 0, INDEX))
        wal.sync()
    finally:
        wal.close()


class _Copy:
    """Copies the contents of one file into a database.

    Arguments:
        path: the file.
        backend: an empty database.

    Attributes:
        quotas: quotas of prefixes.
    """

    def __init__(self, path: Path, backend: LMDBBackend) -> None:
        self._path = path
        self._backend = backend
        self._batch = WriteBatch()
        self._batch_bytes = 0
        self.quotas: list[admin_pb2.QuotaSetRequest] = []
        self._base = Base(0, 0)

    def run(self, bump_revision: int) -> tuple[int, Base]:
        """Copy; return the number of records in the history, and the log position of the file."""
        with opened(self._path) as file:
            count, newest = self._copy_history(file)
            self._copy_small(file)
            self._copy_compaction(file, newest, bump_revision)
            file.check_free_pages()
        self._backend.commit(self._batch)
        return count, self._base

    def _copy_history(self, file: BoltFile) -> tuple[int, int]:
        count, newest = 0, FIRST_REVISION
        for key, value in file.items(schema.KEY):
            if not is_well_formed(key) or from_key(key) >> SUB_BITS >= REVISIONS_MAX:
                raise StorageError(f"{self._path}: cannot parse revision key: {key[:32].hex()}")
            newest = from_key(key) >> SUB_BITS
            # etcd's mark of a revision made by `--bump-revision`: no key was changed, and it is compacted.
            if not value:
                continue
            self._batch.records[key] = seal(key, self._checked(key, newest, value))
            count += 1
            self._batch_bytes += len(value)
            if len(self._batch.records) >= BATCH_RECORDS or self._batch_bytes >= BATCH_BYTES:
                self._backend.commit(self._batch)
                self._batch, self._batch_bytes = WriteBatch(), 0
        return count, newest

    def _checked(self, key: bytes, main: int, value: bytes) -> bytes:
        """Return the bytes to keep for a record: hashes of the history depend on every byte."""
        try:
            pair = kv_pb2.KeyValue.FromString(value)
        except DecodeError:
            pair = kv_pb2.KeyValue()
        if not pair.key or (pair.mod_revision != main and not is_tombstone(key)):
            raise StorageError(
                f"{self._path}: the value of revision {describe(key)} is damaged, or of another revision"
            )
        return pair.SerializeToString(deterministic=True)

    def _copy_small(self, file: BoltFile) -> None:
        values = self._batch.values
        for key, value in file.items(schema.LEASE):
            kept = records.lease_from_etcd(key, value)
            values[schema.LEASE, kept[0]] = kept[1]
        for key, _ in file.items(schema.ALARM):
            kept = records.alarm_from_etcd(key)
            values[schema.ALARM, kept[0]] = kept[1]
        for key, value in file.items(schema.CLUSTER):
            if key.startswith(schema.CLUSTER_QUOTA_PREFIX) and len(self.quotas) < QUOTAS_MAX:
                self.quotas.append(records.quota_from_etcd(key, value))
        for bucket in (schema.AUTH, schema.AUTH_USERS, schema.AUTH_ROLES):
            for key, value in file.items(bucket):
                if len(key) > schema.META_KEY_BYTES_MAX:
                    raise StorageError(f"{self._path}: a name in bucket {bucket.decode()} has {len(key)} bytes")
                values[bucket, key] = value

    def _copy_compaction(self, file: BoltFile, newest: int, bump_revision: int) -> None:
        found = dict(file.items(schema.META))
        index, term = (found.get(name, b"") for name in (schema.META_CONSISTENT_INDEX, schema.META_TERM))
        self._base = Base(int.from_bytes(index, "big"), int.from_bytes(term, "big"))
        names = (schema.META_SCHEDULED_COMPACT, schema.META_FINISHED_COMPACT)
        revisions = {name: records.compact_revision_from_etcd(found[name]) for name in names if name in found}
        newest = max(newest, *revisions.values(), FIRST_REVISION)
        if bump_revision:
            revisions[schema.META_SCHEDULED_COMPACT] = newest + bump_revision
        for name, revision in revisions.items():
            if revision >= REVISIONS_MAX:
                raise StorageError(f"{self._path}: revision {revision} is out of range")
            self._batch.values[schema.META, name] = schema.encode_integer(revision)
