"""Snapshots: copying the database of a running member, and installing a received copy.

    sender      info = write_snapshot(store.backend, path)       any thread; writers continue
                ... the file and ``info`` are sent ...
    receiver    install_snapshot(received, db_path, info)        the old database is closed before
                Store.open(LMDBBackend(db_path), ...)

Rules:

- The copy is one consistent state, compact, and contains its own applied index, term and members. ``info`` repeats
  them for Raft and adds size and SHA-256 for the transfer.
- A copy is read again from end to end before it is sent, and every checksum in it is verified: damage does not spread.
- A received file replaces the database only if it is byte for byte the file that was sent, agrees with ``info``, and
  has no damaged contents.
- After a crash the database file is either the whole old one or the whole new one: the received file is durable before
  the rename, and the rename is durable before the function returns. The caller deletes a leftover received file.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raftkv.errors import CorruptionError
from raftkv.raft.types import ConfState, SnapshotMeta
from raftkv.storage import schema
from raftkv.storage.backend.base import Backend, ReadTxn
from raftkv.storage.backend.copying import SteadyFile, create
from raftkv.storage.backend.environment import declared
from raftkv.storage.backend.lmdb import LMDBBackend, check_copy, read_value, replace_file
from raftkv.storage.datadir import remove_unneeded
from raftkv.storage.failpoints import failpoint
from raftkv.storage.restore import scan_steps
from raftkv.storage.revision import SUB_BITS, from_key, unseal

_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """The description of a snapshot file: the log position that it contains, and its exact bytes.

    Attributes:
        index: last log entry contained.
        term: term of that entry.
        conf_state: members of the cluster as of that entry.
        size_bytes: size of the file.
        sha256: hash of the file, 32 bytes.
        is_sealed: whether the sender also sent a seal, which covers all contents without a checksum of their own
            (``backend/environment.py``).
    """

    index: int
    """Last log entry contained."""
    term: int
    conf_state: ConfState
    size_bytes: int
    sha256: bytes
    is_sealed: bool = False


class DamagedSourceError(CorruptionError):
    """An error that says that a database was damaged before it was copied."""


def _no_rest(_worked_s: float) -> None:
    """Continue at once."""


def write_snapshot(backend: Backend, path: Path, rest: Callable[[float], None] = _no_rest) -> SnapshotInfo:
    """Copy the last committed state of a backend to a new file; durable on return. Runs on any thread.

    Arguments:
        backend: the engine.
        path: new file; it must not exist.
        rest: called after each megabyte with the time that it took (seconds); may wait, and cancels the copy by
            raising.

    Raises:
        CorruptionError: the database is damaged; the copy is removed.
        SpaceError, StorageError: the file could not be written; it is removed.
    """
    try:
        created = create(path)
    except OSError as error:
        raise declared(error, path) from error
    try:
        is_sealed = backend.is_sealed
        with closing(created) as file:
            sha256 = _copy(backend, file, rest)
            failpoint("snapshotBeforeCopySync")
            file.sync()
        check_copy(path, rest, is_sealed=is_sealed)
        meta = read_meta(path)
        return SnapshotInfo(meta.index, meta.term, meta.conf_state, path.stat().st_size, sha256, is_sealed)
    except OSError as error:
        remove_unneeded(path)
        raise declared(error, path) from error
    # A partial copy is of no use, and takes up to the size of a whole database.
    except BaseException:
        remove_unneeded(path)
        raise


def _copy(backend: Backend, file: SteadyFile, rest: Callable[[float], None]) -> bytes:
    """Write all of a database to a file; return its SHA-256, computed while writing."""
    digest = hashlib.sha256()
    with closing(backend.copy_pieces()) as pieces:
        started, worked_bytes = time.perf_counter(), 0
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
            worked_bytes += len(piece)
            if worked_bytes >= _CHUNK_BYTES:
                rest(time.perf_counter() - started)
                started, worked_bytes = time.perf_counter(), 0
    return digest.digest()


def read_meta(path: Path) -> SnapshotMeta:
    """Return the log position of a database file, which must not be open elsewhere.

    Raises:
        StorageError: the file is not a database, or has a later format.
    """
    # Before anything else is opened: a later format may have other buckets.
    schema.check_format(read_value(path, schema.META, schema.META_FORMAT_VERSION), f"the database {path}")
    with closing(LMDBBackend(path, read_only=True)) as backend, closing(backend.begin_read()) as read:
        return meta_of(read)


def meta_of(read: ReadTxn) -> SnapshotMeta:
    """Return the log position of a state."""
    return SnapshotMeta(
        index=schema.decode_integer(read.get(schema.META, schema.META_CONSISTENT_INDEX)) or 0,
        term=schema.decode_integer(read.get(schema.META, schema.META_TERM)) or 0,
        conf_state=schema.decode_conf_state(read.get(schema.META, schema.META_CONF_STATE)),
    )


def _sha256(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


def verify_snapshot(path: Path, info: SnapshotInfo, rest: Callable[[float], None] = _no_rest) -> None:
    """Refuse a file that is not exactly the described one, or that has damaged contents.

    The whole file is read as in its installation, which then cannot fail because of the contents.

    Arguments:
        path: snapshot file.
        info: the description that came with it.
        rest: as in ``write_snapshot``.

    Raises:
        CorruptionError: size, hash or content differ; the message names the file.
        DamagedSourceError: the file is what was sent, but it is damaged.
    """
    size_bytes = path.stat().st_size
    if size_bytes != info.size_bytes or _sha256(path) != info.sha256:
        raise CorruptionError(f"snapshot {path} ({size_bytes} bytes) is not the one sent ({info.size_bytes} bytes)")
    try:
        check_copy(path, rest, is_sealed=info.is_sealed, read_history=scan_steps)
    except CorruptionError as error:
        raise DamagedSourceError(str(error)) from error
    # Raft will use ``info``, but the state machine will use the contents of the file: both must agree.
    found = read_meta(path)
    if found != SnapshotMeta(info.index, info.term, info.conf_state):
        raise CorruptionError(f"snapshot {path} is of entry {found.index}, announced was {info.index}")


def is_continued(path: Path, key: bytes, data: bytes) -> bool:
    """Return whether a database may be a later state of a history: it has a record of it, or has compacted it.

    Arguments:
        path: file of the database, which must not be open elsewhere.
        key, data: revision key and KeyValue of the record.
    """
    with closing(LMDBBackend(path, read_only=True)) as backend, closing(backend.begin_read()) as read:
        record = read.get_record(key)
        if record is None or unseal(key, record) != data:
            return from_key(key) >> SUB_BITS <= max(schema.read_compact_revisions(read.get))
        return True


def install_snapshot(received: Path, target: Path, info: SnapshotInfo) -> None:
    """Replace a database, which must not be open, by a received one; durable on return.

    Arguments:
        received: path of the received file; it no longer exists afterwards.
        target: path of the database.
        info: the description that came with the file.

    Raises:
        CorruptionError: the file is not the described one; nothing is changed.
    """
    verify_snapshot(received, info)
    # The contents before the name: after a power cut right after the rename, the file must not be empty.
    with received.open("rb") as file:
        os.fsync(file.fileno())
    failpoint("snapshotBeforeRename")
    replace_file(received, target)
