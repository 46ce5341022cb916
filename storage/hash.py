"""Hashes that members compare: of the history up to a revision (HashKV), and of the whole database (Hash).

``hash_kv`` equals etcd's (3.6) for the same history, bit for bit: CRC32C over the bucket name ``key`` and then, for
every record up to the revision, over its revision key and KeyValue. Members compact at different times, so a record
that a compaction would drop counts as dropped even if it is still there:

- records at or below the compacted revision count only if they are the state at the hashed revision
  (etcd's quirk, kept: when no key at all exists at the hashed revision, they count nonetheless);
- a tombstone exactly at the compacted revision does not count, because old versions of etcd drop it.

Both functions read one transaction of the engine and nothing else, so they can run on any thread while the owner
continues. Setting the event ``given_up`` cancels them with an error. Every checksum on the way is verified, so a hash
is also a scrub.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from google_crc32c import extend
from google_crc32c import value as crc32c

from raftkv.errors import CompactedError, StorageError
from raftkv.storage import schema
from raftkv.storage.backend.base import Backend, History
from raftkv.storage.key_value import key_of
from raftkv.storage.revision import SUB_BITS, from_key, is_tombstone, pack, to_key, unseal

RECORDS_PER_LOOK: Final = 1_000
"""Records hashed between two checks for cancellation: a few milliseconds."""


class _CancellableHistory:
    """A history whose reads raise an error once the hash is cancelled."""

    def __init__(self, read: History, given_up: threading.Event) -> None:
        self._read = read
        self._given_up = given_up
        self.get = read.get
        self.close = read.close

    def items(self, bucket: bytes, start: bytes = b"", end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Implement ``ReadTxn.items``; raises ``StorageError`` when cancelled."""
        for number, item in enumerate(self._read.items(bucket, start, end)):
            if not number % RECORDS_PER_LOOK and self._given_up.is_set():
                raise StorageError("a hash was given up")
            yield item


def _cancellable(read: History, given_up: threading.Event | None) -> History:
    return read if given_up is None else _CancellableHistory(read, given_up)


@dataclass(frozen=True, slots=True)
class KVHash:
    """The result of HashKV, with the revisions that it covers."""

    hash: int
    compact_revision: int
    """-1 if the store was never compacted."""
    revision: int
    """The revision hashed."""


def hash_kv(begin_read: Callable[[], History], revision: int, given_up: threading.Event | None = None) -> KVHash:
    """Hash the committed history up to a main revision, as etcd's HashKV.

    Arguments:
        begin_read: opens a read transaction of the last committed state; called, and its result read, on the calling
            thread.
        revision: the main revision, which must be committed already; a negative one is before all history: an empty
            history is hashed then, compacted or not.
        given_up: event that another thread sets to cancel the hash.

    Raises:
        CompactedError: the revision is before the compacted one (which may have moved since the caller looked).
        CorruptRecordError: a record is damaged.
        StorageError: the hash was cancelled.
    """
    read = _cancellable(begin_read(), given_up)
    try:
        scheduled, finished = schema.read_compact_revisions(read.get)
        # A compaction counts from the moment it was requested, finished or not: members that are still compacting and
        # members that have finished must agree.
        compacted = max(scheduled, finished)
        if revision < 0:
            return KVHash(crc32c(schema.KEY), compacted, revision)
        if revision < compacted:
            raise CompactedError(compacted)
        return KVHash(_hash(read, compacted, revision, finished < compacted), compacted, revision)
    finally:
        read.close()


def _records(read: History, first: int, last: int) -> Iterator[tuple[bytes, bytes]]:
    """Iterate over revision keys and KeyValues of main revisions ``first..last``."""
    for key, record in read.items(schema.KEY, to_key(pack(max(first, 0), 0)), to_key(pack(last + 1, 0))):
        yield key, unseal(key, record)


def _hash(read: History, compacted: int, revision: int, compacting: bool) -> int:
    # etcd begins with the name of the bucket.
    hashed: int = crc32c(schema.KEY)
    # Records above the compacted revision all count, in order. Of those at or below it, only the records that a
    # finished compaction leaves count, because other members may have no others.
    if compacted >= 0:
        hashed = _hash_old_records(read, hashed, compacted, revision, compacting)
    for key, data in _records(read, compacted + 1, revision):
        hashed = extend(hashed, key + data)
    return hashed


def _hash_old_records(read: History, hashed: int, compacted: int, revision: int, compacting: bool) -> int:
    """Extend the hash by the counting records up to the compacted revision.

    Which of two sets of records counts is known only at the end, so two hashes are computed in parallel.
    """
    # Keys changed after the compacted revision, and whether their last change is a deletion.
    changed = {key_of(data): is_tombstone(key) for key, data in _records(read, compacted + 1, revision)}
    # While the compaction is in progress, records that it will drop still exist: of each key, only the newest record
    # would remain.
    newest = _newest_of_each_key(read, compacted) if compacting else {}
    survivors = overwritten = hashed
    # Whether any key exists at the hashed revision decides between the two hashes.
    exists = any(not deleted for deleted in changed.values())
    for key, data in _records(read, 0, compacted):
        name = key_of(data)
        # No tombstone counts: a finished compaction drops those below the compacted revision, and only new versions of
        # etcd keep one exactly at it.
        if is_tombstone(key) or newest.get(name, key) != key:
            continue
        # Overwritten or deleted since, so it is not part of the state at the hashed revision.
        if name in changed:
            overwritten = extend(overwritten, key + data)
        else:
            survivors, exists = extend(survivors, key + data), True
    return survivors if exists else overwritten


def _newest_of_each_key(read: History, compacted: int) -> dict[bytes, bytes]:
    return {key_of(data): key for key, data in _records(read, 0, compacted)}


def hash_database(backend: Backend, given_up: threading.Event | None = None) -> tuple[int, int]:
    """Return the CRC32C over all buckets (names, keys, values) except the applied index and term, as in etcd.

    The hash is the same before and after a restart, and on all members that have applied the same writes and finished
    the same compactions.

    Arguments:
        backend: the engine; read on the calling thread.
        given_up: event that another thread sets to cancel the hash.

    Returns:
        the hash, and the main revision of the newest record.

    Raises:
        StorageError: the hash was cancelled.
    """
    read = _cancellable(backend.begin_read(), given_up)
    try:
        hashed, revision = 0, 1
        for bucket in schema.BUCKETS:
            hashed = extend(hashed, bucket)
            for key, value in read.items(bucket):
                # The applied index differs between members that hold the same data.
                if not schema.is_compared(bucket, key):
                    continue
                hashed = extend(extend(hashed, key), value)
                revision = from_key(key) >> SUB_BITS if bucket == schema.KEY else revision
        return hashed, revision
    finally:
        read.close()
