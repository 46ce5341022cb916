"""Export of a database as a snapshot file of etcd.

    layout, pieces = snapshot(read)              from one read transaction
    for blob, remaining in blobs(layout, pieces) 32 KiB each, then the SHA-256 of all of them

As a program (``python -m raftkv.offline.etcd.export PATH INDEX IDENTITY``) it writes the messages of
``Maintenance.Snapshot`` to its standard output, each after its length (4 bytes, little-endian). A member runs it as a
separate process: the work takes seconds of a core, and would hold the interpreter of the member that long. Meanwhile
the member keeps a read transaction of the state of entry INDEX open, so that no page that this process reads is reused;
LMDB's lock file is not used.

The exit status is 0 when everything was written. Otherwise the last line of its standard error gives the reason.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from struct import Struct
from typing import Final

from raftkv.errors import CorruptionError, InvariantError, RaftKVError
from raftkv.offline.etcd import records
from raftkv.pb import rpc_pb2
from raftkv.storage import schema
from raftkv.storage.backend.base import ReadTxn
from raftkv.storage.backend.environment import identity_of
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.bolt.writer import Buckets, Layout, measure, write
from raftkv.storage.revision import SEAL_BYTES, unseal

# -- contents -------------------------------------------------------------------------------------------------------
#
# A member's database as the buckets of an etcd database. One read transaction is read twice, once for the sizes and
# once for the bytes (``storage.bolt``). The second pass checks the records of the key space against their checksums, so
# that a damaged record is not exported as valid.


def etcd_buckets(read: ReadTxn, *, for_size: bool = False) -> Buckets:
    """Yield the buckets of one state of a database in order of their names, and their items in order.

    Arguments:
        read: the state.
        for_size: only the lengths of the records of the key space are needed.

    Raises:
        CorruptRecordError: a record is damaged.
    """
    for name in sorted(schema.BUCKETS):
        items = read.items(name)
        if name == schema.KEY:
            # The sizes need no checksums.
            yield name, ((key, record[SEAL_BYTES:] if for_size else unseal(key, record)) for key, record in items)
        elif convert := _CONVERT.get(name):
            yield name, sorted(convert(key, value) for key, value in items)
        else:
            yield name, sorted(_MADE[name](read) if name in _MADE else items)


def _version(read: ReadTxn) -> bytes:
    """Return the etcd version of the file's fields: the target of a downgrade in progress, else the current."""
    enabled, target = schema.decode_downgrade(read.get(schema.CLUSTER, schema.CLUSTER_DOWNGRADE))
    return (target if enabled else schema.CLUSTER_VERSION).encode()


def _cluster(read: ReadTxn) -> Iterator[tuple[bytes, bytes]]:
    yield records.CLUSTER_VERSION_KEY, _version(read)
    # Quotas are raftkv's own, and etcd ignores them; use is counted again where the file is restored.
    for key, value in read.items(schema.CLUSTER, schema.CLUSTER_QUOTA_PREFIX):
        if not key.startswith(schema.CLUSTER_QUOTA_PREFIX):
            return
        yield key, value[: records.QUOTA_LIMITS.size]


def _meta(read: ReadTxn) -> Iterator[tuple[bytes, bytes]]:
    for key in (schema.META_CONSISTENT_INDEX, schema.META_TERM):
        # Like etcd, which takes 0 for an index that was not read yet.
        if schema.decode_integer(value := read.get(schema.META, key)):
            yield key, value or b""
    for key in (schema.META_SCHEDULED_COMPACT, schema.META_FINISHED_COMPACT):
        if (value := read.get(schema.META, key)) is not None:
            yield key, records.compact_revision_to_etcd(value)
    conf_state = schema.decode_conf_state(read.get(schema.META, schema.META_CONF_STATE))
    yield schema.META_CONF_STATE, records.conf_state_to_etcd(conf_state)
    yield records.META_STORAGE_VERSION, _version(read)


_CONVERT: Final[dict[bytes, Callable[[bytes, bytes], tuple[bytes, bytes]]]] = {
    schema.LEASE: records.lease_to_etcd,
    schema.ALARM: lambda key, _: records.alarm_to_etcd(key),
    schema.MEMBERS: records.member_to_etcd,
    schema.MEMBERS_REMOVED: lambda key, _: (records.member_key(key), records.REMOVED),
}
_MADE: Final = {schema.CLUSTER: _cluster, schema.META: _meta}


BLOB_BYTES: Final = 32 * 1024
"""Size of the pieces, as in etcd."""
LENGTH: Final = Struct("<I")
OTHER_FILE_STATUS: Final = 75
DAMAGED_STATUS: Final = 65
NICENESS: Final = 5
"""Increment of this program's nice value, so that the member has priority on a shared core."""


def snapshot(read: ReadTxn) -> tuple[Layout, Iterator[bytes]]:
    """Return the layout of a database file with this state, and its bytes in small pieces.

    Raises:
        CorruptRecordError: a record is damaged; raised while the pieces are read.
    """
    layout = measure(etcd_buckets(read, for_size=True))
    return layout, write(etcd_buckets(read), layout)


def blobs(layout: Layout, pieces: Iterator[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield the file in pieces of ``BLOB_BYTES``, each with the number of bytes after it; last its SHA-256.

    Arguments:
        layout: layout of the file, with its size.
        pieces: its bytes.
    """
    digest = hashlib.sha256()
    remaining = layout.size_bytes
    waiting, waiting_bytes = list[bytes](), 0
    for piece in pieces:
        waiting.append(piece)
        waiting_bytes += len(piece)
        if waiting_bytes < BLOB_BYTES:
            continue
        data = b"".join(waiting)
        whole = waiting_bytes - waiting_bytes % BLOB_BYTES
        for start in range(0, whole, BLOB_BYTES):
            blob = data[start : start + BLOB_BYTES]
            digest.update(blob)
            remaining -= BLOB_BYTES
            yield blob, remaining
        waiting, waiting_bytes = [data[whole:]], waiting_bytes - whole
    if waiting_bytes:
        blob = b"".join(waiting)
        digest.update(blob)
        yield blob, remaining - len(blob)
    yield digest.digest(), 0


def messages(read: ReadTxn) -> Iterator[bytes]:
    """Yield the messages of ``Maintenance.Snapshot``: the state as a file, in pieces.

    Raises:
        CorruptRecordError: a record is damaged.
    """
    version = _version(read).decode()
    for blob, remaining in blobs(*snapshot(read)):
        yield rpc_pb2.SnapshotResponse(remaining_bytes=remaining, blob=blob, version=version).SerializeToString()


def main(path: str, index: str, identity: str) -> int:
    """Write the messages for a database to the standard output.

    Arguments:
        path: the database.
        index: an entry that its state must include.
        identity: identity of the file.

    Returns:
        0; ``OTHER_FILE_STATUS`` if another file has the name now.

    Raises:
        RaftKVError: the database cannot be read.
    """
    with closing(LMDBBackend(Path(path), read_only=True)) as backend, closing(backend.begin_read()) as read:
        # The name had this identity both when opened and now, so the opened file is the right one.
        if (read.file_identity, identity_of(Path(path))) != (identity, identity):
            return OTHER_FILE_STATUS
        found = schema.decode_integer(read.get(schema.META, schema.META_CONSISTENT_INDEX)) or 0
        if found < int(index):
            raise InvariantError(f"the database {path} is of entry {found}, not {index}")
        if backend.is_sealed:
            read.check_seal()
        with open(sys.stdout.fileno(), "wb", buffering=1 << 18, closefd=False) as output:
            for message in messages(read):
                output.write(LENGTH.pack(len(message)))
                output.write(message)
    return 0


if __name__ == "__main__":
    # The reader is gone: the member has stopped, or cancelled the stream.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal it is meant for the member
    os.nice(NICENESS)
    try:
        sys.exit(main(*sys.argv[1:]))
    except CorruptionError as error:
        print(error, file=sys.stderr)
        sys.exit(DAMAGED_STATUS)
    except (RaftKVError, OSError) as error:
        sys.exit(str(error))
