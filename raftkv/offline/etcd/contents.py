"""What a member's database holds, as the buckets of an etcd database.

One read transaction is walked twice, once for the sizes and once for the bytes (``storage.bolt``). Records of the key
space are checked against their checksums in the second walk: what is damaged is not sent as if it were sound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from raftkv.apply.quotas import KEY_PREFIX
from raftkv.offline.etcd import records
from raftkv.storage import schema
from raftkv.storage.backend.base import ReadTxn
from raftkv.storage.bolt.writer import Buckets, Items
from raftkv.storage.record import SEAL_BYTES, unseal


def etcd_buckets(read: ReadTxn, *, for_size: bool = False) -> Buckets:
    """Yield the buckets of one state of a database in order of their names, and their items in order.

    Arguments:
        read: the state.
        for_size: of a record of the key space only the length counts.

    Raises:
        CorruptRecordError: a record is damaged.
    """
    for name in sorted(schema.BUCKETS):
        if name == schema.KEY:
            yield name, _unchecked_revisions(read) if for_size else _revisions(read)
        else:
            yield name, sorted(_SMALL.get(name, _as_it_is)(read, name))


def _revisions(read: ReadTxn) -> Items:
    for key, record in read.items(schema.KEY):
        yield key, unseal(key, record)


def _unchecked_revisions(read: ReadTxn) -> Items:
    for key, record in read.items(schema.KEY):
        yield key, record[SEAL_BYTES:]


def _as_it_is(read: ReadTxn, bucket: bytes) -> Iterator[tuple[bytes, bytes]]:
    return read.items(bucket)


def _leases(read: ReadTxn, bucket: bytes) -> Iterator[tuple[bytes, bytes]]:
    return (records.lease_to_etcd(key, value) for key, value in read.items(bucket))


def _alarms(read: ReadTxn, bucket: bytes) -> Iterator[tuple[bytes, bytes]]:
    return (records.alarm_to_etcd(key) for key, _ in read.items(bucket))


def _members(read: ReadTxn, bucket: bytes) -> Iterator[tuple[bytes, bytes]]:
    return (records.member_to_etcd(key, value) for key, value in read.items(bucket))


def _removed(read: ReadTxn, bucket: bytes) -> Iterator[tuple[bytes, bytes]]:
    return ((records.member_key(key), records.REMOVED) for key, _ in read.items(bucket))


def _cluster(read: ReadTxn, bucket: bytes) -> Iterator[tuple[bytes, bytes]]:
    yield records.CLUSTER_VERSION_KEY, records.CLUSTER_VERSION
    # Quotas are raftkv's own, and go through etcd unseen; what is used is counted again where the file is restored.
    for key, value in read.items(bucket, KEY_PREFIX):
        if not key.startswith(KEY_PREFIX):
            return
        yield key, value[: records.QUOTA_LIMITS.size]


def _meta(read: ReadTxn, bucket: bytes) -> Iterator[tuple[bytes, bytes]]:
    for key in (schema.META_CONSISTENT_INDEX, schema.META_TERM):
        # As etcd, which takes a 0 for an index that was not read yet.
        if schema.decode_integer(value := read.get(bucket, key)):
            yield key, value or b""
    for key in (schema.META_SCHEDULED_COMPACT, schema.META_FINISHED_COMPACT):
        if (value := read.get(bucket, key)) is not None:
            yield key, records.compact_revision_to_etcd(value)
    conf_state = schema.decode_conf_state(read.get(bucket, schema.META_CONF_STATE))
    yield schema.META_CONF_STATE, records.conf_state_to_etcd(conf_state)
    yield records.META_STORAGE_VERSION, records.STORAGE_VERSION


_SMALL: Final = {
    schema.LEASE: _leases,
    schema.ALARM: _alarms,
    schema.MEMBERS: _members,
    schema.MEMBERS_REMOVED: _removed,
    schema.CLUSTER: _cluster,
    schema.META: _meta,
}
