"""Conversion of a member's small records to etcd's form, and back: leases, alarms, members, counters.

    bucket     raftkv                                     etcd
    lease      id i64 -> TTL i64                          id i64 -> leasepb.Lease (1 ID, 2 TTL, 3 RemainingTTL)
    alarm      member u64, kind i32 -> nothing            etcdserverpb.AlarmMember -> nothing
    members    id u64 -> etcdserverpb.Member              id in hexadecimal -> JSON
    cluster    quota of a prefix -> limits, use           the same -> limits (ignored by etcd)
    meta       compacted revision u64                     its revision key (17 bytes)
               confState: JSON, all fields, sorted        JSON, fields that are set

Integers are big-endian in keys and in ``meta``. The auth buckets are the same on both sides.
"""

from __future__ import annotations

import json
from struct import Struct
from typing import Final, cast

from google.protobuf.message import DecodeError

from raftkv.errors import StorageError
from raftkv.pb import admin_pb2, rpc_pb2
from raftkv.raft.types import ConfState
from raftkv.storage import schema
from raftkv.storage.revision import SUB_BITS, from_key, is_well_formed, pack, to_key

META_STORAGE_VERSION: Final = b"storageVersion"
CLUSTER_VERSION_KEY: Final = b"clusterVersion"
REMOVED: Final = b"removed"
"""Value of a removed member in etcd."""

QUOTA_LIMITS: Final = Struct(">QQ")
"""Maximum bytes and keys of a prefix, 0 for no limit."""

_LEASE_ID: Final = Struct(">q")
_TTL: Final = Struct(">q")
_ALARM: Final = Struct(">Qi")
_MEMBER_ID: Final = Struct(">Q")
_Lease: Final = rpc_pb2.LeaseGrantRequest
"""Stands in for leasepb.Lease, whose two fields have the same types: field 1 (``TTL`` here) is its id, field 2 (``ID``
here) its TTL."""


def lease_to_etcd(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Return a lease in etcd's form: with its whole TTL, as after a restart, and without its owner."""
    return key, _Lease(TTL=_LEASE_ID.unpack(key)[0], ID=_TTL.unpack_from(value)[0]).SerializeToString()


def lease_from_etcd(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Return a lease of etcd in raftkv's form.

    Raises:
        StorageError: it is none.
    """
    try:
        lease = _Lease.FromString(value)
    except DecodeError:
        raise StorageError(f"{value[:32].hex()} is not a lease") from None
    if key != _LEASE_ID.pack(lease.TTL) or lease.ID < 0:
        raise StorageError(f"entry {key.hex()} of the bucket lease is not a lease")
    return key, _TTL.pack(lease.ID)


def alarm_to_etcd(key: bytes) -> tuple[bytes, bytes]:
    """Return an alarm in etcd's form."""
    member_id, kind = _ALARM.unpack(key)
    alarm = rpc_pb2.AlarmMember(memberID=member_id, alarm=cast("rpc_pb2.AlarmType", kind))
    return alarm.SerializeToString(deterministic=True), b""


def alarm_from_etcd(key: bytes) -> tuple[bytes, bytes]:
    """Return an alarm of etcd in raftkv's form.

    Raises:
        StorageError: it is none.
    """
    try:
        alarm = rpc_pb2.AlarmMember.FromString(key)
    except DecodeError as failure:
        raise StorageError(f"entry {key[:32].hex()} of the bucket alarm is not an alarm") from failure
    return _ALARM.pack(alarm.memberID, alarm.alarm), b""


def member_to_etcd(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Return a member in etcd's form."""
    member = rpc_pb2.Member.FromString(value)
    fields: dict[str, object] = {"id": _MEMBER_ID.unpack(key)[0], "peerURLs": list(member.peerURLs)}
    if member.isLearner:
        fields["isLearner"] = True
    if member.name:
        fields["name"] = member.name
    if member.clientURLs:
        fields["clientURLs"] = list(member.clientURLs)
    return member_key(key), json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def member_key(key: bytes) -> bytes:
    """Return the key of a current or removed member in etcd's form: without leading zeros."""
    return b"%x" % _MEMBER_ID.unpack(key)[0]


def conf_state_to_etcd(conf: ConfState) -> bytes:
    """Return a configuration in etcd's form."""
    names = ("voters", "learners", "voters_outgoing", "learners_next")
    present: dict[str, object] = {name: value for name in names if (value := getattr(conf, name))}
    return json.dumps(present | {"auto_leave": conf.auto_leave}, separators=(",", ":")).encode()


def quota_from_etcd(key: bytes, value: bytes) -> admin_pb2.QuotaSetRequest:
    """Return the request that sets a quota.

    Raises:
        StorageError: the record is not a quota.
    """
    prefix = key.removeprefix(schema.CLUSTER_QUOTA_PREFIX)
    limits = QUOTA_LIMITS.unpack(value) if len(value) == QUOTA_LIMITS.size else (schema.QUOTA_LIMIT_MAX + 1,)
    if len(prefix) > schema.QUOTA_PREFIX_BYTES_MAX or max(limits) > schema.QUOTA_LIMIT_MAX:
        raise StorageError(f"entry {key[:64].hex()} of the bucket cluster is not a quota")
    return admin_pb2.QuotaSetRequest(prefix=prefix, bytes_max=limits[0], keys_max=limits[1])


def compact_revision_to_etcd(value: bytes) -> bytes:
    """Return a compacted revision in etcd's form."""
    return to_key(pack(schema.decode_integer(value) or 0, 0))


def compact_revision_from_etcd(value: bytes) -> int:
    """Return a compacted revision of etcd.

    Raises:
        StorageError: the record is not a revision.
    """
    if not is_well_formed(value):
        raise StorageError(f"{value[:32].hex()} is not a compacted revision")
    return from_key(value) >> SUB_BITS
