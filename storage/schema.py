"""Every bucket, key name and value format that the store puts on disk, and the version of that format.

The names are etcd's (``server/storage/schema``), for readers who know etcd's source. Buckets are LMDB named databases;
within a bucket keys sort as bytes.

    key              revision key (17 or 18 bytes, see ``revision.py``)  ->  sealed record (likewise)
    meta             the names below                                     ->  8-byte big-endian integers, or JSON
    lease, alarm, members, members_removed, cluster, auth, authUsers, authRoles
                     owned by the modules above: opaque to the store

The checksum of all buckets except ``key`` is stored next to them (``backend/environment.py``).

``meta`` is written in the same transaction as the data it describes: the disk always has the exact state after the
entry ``consistent_index``, so that a replay of the log skips nothing and repeats nothing (etcd 3.5.0 violated this
rule, which caused its data inconsistency, issue 13766).

Not here: migrations. There is only one format so far; ``datadir.format_refusal`` describes the numbers of later ones.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Final

from google.protobuf.message import DecodeError

from raftkv.errors import CorruptionError, StorageError
from raftkv.raft.types import ConfState
from raftkv.storage.datadir import format_refusal

FORMAT_VERSION: Final = 1
"""Opening a database with another format number fails."""

KEY: Final[bytes] = b"key"
META: Final[bytes] = b"meta"
LEASE: Final[bytes] = b"lease"
ALARM: Final[bytes] = b"alarm"
MEMBERS: Final[bytes] = b"members"
MEMBERS_REMOVED: Final[bytes] = b"members_removed"
CLUSTER: Final[bytes] = b"cluster"
AUTH: Final[bytes] = b"auth"
AUTH_USERS: Final[bytes] = b"authUsers"
AUTH_ROLES: Final[bytes] = b"authRoles"

BUCKETS: Final[tuple[bytes, ...]] = (
    KEY,
    META,
    LEASE,
    ALARM,
    MEMBERS,
    MEMBERS_REMOVED,
    CLUSTER,
    AUTH,
    AUTH_USERS,
    AUTH_ROLES,
)
"""In the order in which the hash of the whole database visits them."""

META_CONSISTENT_INDEX: Final[bytes] = b"consistent_index"
META_TERM: Final[bytes] = b"term"
META_CONF_STATE: Final[bytes] = b"confState"
META_SCHEDULED_COMPACT: Final[bytes] = b"scheduledCompactRev"
META_FINISHED_COMPACT: Final[bytes] = b"finishedCompactRev"
META_FORMAT_VERSION: Final[bytes] = b"formatVersion"

CLUSTER_LOG_MADE: Final[bytes] = b"raftkv_log_made"
"""Key in ``cluster`` that records that a log was created: if the log is missing now, votes and acknowledgements are
lost, even if nothing was applied yet."""

META_OF_THE_LOG: Final = frozenset({META_CONSISTENT_INDEX, META_TERM})
"""Applied index and term: they also move with elections and reads, so they are not part of the compared state (etcd's
hash of the backend ignores the same keys)."""

CLUSTER_VERSION_PREFIX: Final[bytes] = b"raftkv_version/"
"""Prefix of the keys of ``cluster`` with the version that each member published, by member id. Not part of the compared
state, because older versions did not write them."""

CLUSTER_DOWNGRADE: Final[bytes] = b"downgrade"
"""Key in ``cluster`` of the current or last downgrade."""

CLUSTER_VERSION: Final = "3.7.0"
"""Version of the cluster and of its storage, in etcd's numbering, while no downgrade is in progress."""

CLUSTER_QUOTA_PREFIX: Final[bytes] = b"raftkv_quota/"
"""Prefix of the keys of quotas in ``cluster``: the quota's prefix follows; the value begins with its two limits."""
CLUSTER_LIMIT_PREFIX: Final[bytes] = b"raftkv_limit/"
"""Prefix of the keys of rate limits in ``cluster``."""
QUOTA_PREFIX_BYTES_MAX: Final = 256
QUOTA_LIMIT_MAX: Final = (1 << 63) - 1

META_KEY_BYTES_MAX: Final = 511
"""Longest key of any bucket (LMDB's limit)."""

_U64 = struct.Struct(">Q")


def is_compared(bucket: bytes, key: bytes) -> bool:
    """Return whether a record is part of the state that all members with the same applied entries have in common."""
    if bucket == META:
        return key not in META_OF_THE_LOG
    return bucket != CLUSTER or not key.startswith(CLUSTER_VERSION_PREFIX)


@contextmanager
def reading(bucket: bytes) -> Iterator[None]:
    """Name the bucket in the error when the block cannot decode a record; these records have no checksums of their own.

    Raises:
        CorruptionError: the block could not decode a record.
    """
    try:
        yield
    except (struct.error, DecodeError, ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"a record of the bucket {bucket.decode()} is not what was written: {type(error).__name__}: {error}"
        raise CorruptionError(text) from None


def decode_downgrade(record: bytes | None) -> tuple[bool, str]:
    """Return whether a downgrade is in progress, and its target version.

    Raises:
        CorruptionError: the bytes are not a downgrade record.
    """
    if record is None:
        return False, ""
    with reading(CLUSTER):
        fields = json.loads(record)
        enabled, target = fields["enabled"], fields["target-version"]
        if not isinstance(enabled, bool) or not isinstance(target, str):
            raise TypeError(f"enabled is {enabled!r}, target-version {target!r}")
        target.encode()  # refuses half of a surrogate pair, which no response can hold
        return enabled, target


def encode_integer(number: int) -> bytes:
    """Return a non-negative integer as the 8 bytes kept in ``meta``."""
    return _U64.pack(number)


def decode_integer(data: bytes | None) -> int | None:
    """Return the integer of ``encode_integer``; ``None`` stays ``None``.

    Raises:
        CorruptionError: the bytes are not an integer.
    """
    if data is None:
        return None
    if len(data) != _U64.size:
        raise CorruptionError(f"{data[:16].hex()} in the bucket meta is not an integer of 8 bytes")
    return int.from_bytes(data)


def check_format(data: bytes | None, what: str) -> None:
    """Refuse a database of a format that this version does not know.

    Arguments:
        data: value of ``META_FORMAT_VERSION``; ``None`` in a database that was just created.
        what: the database, for the error.

    Raises:
        StorageError: it has another format; the message names the raftkv version that reads it.
        CorruptionError: the value is not a number.
    """
    stated = decode_integer(data)
    if stated is not None and (refusal := format_refusal(what, stated, FORMAT_VERSION)):
        raise StorageError(refusal)


def read_compact_revisions(get: Callable[[bytes, bytes], bytes | None]) -> tuple[int, int]:
    """Return the scheduled and the finished compact revision, each -1 if never, with a reader of (bucket, key)."""
    scheduled = decode_integer(get(META, META_SCHEDULED_COMPACT))
    finished = decode_integer(get(META, META_FINISHED_COMPACT))
    return -1 if scheduled is None else scheduled, -1 if finished is None else finished


def encode_conf_state(conf: ConfState) -> bytes:
    """Return a configuration as JSON with the field names of etcd's confState."""
    fields = {
        "voters": conf.voters,
        "learners": conf.learners,
        "voters_outgoing": conf.voters_outgoing,
        "learners_next": conf.learners_next,
        "auto_leave": conf.auto_leave,
    }
    # Sorted and without blanks: equal configurations must give equal bytes, because the hash of the database covers
    # them.
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()


def decode_conf_state(data: bytes | None) -> ConfState:
    """Return the configuration of ``encode_conf_state``; ``None`` is the empty one.

    Raises:
        CorruptionError: the bytes are not a configuration.
    """
    if data is None:
        return ConfState()
    with reading(META):
        fields = json.loads(data)
        conf = ConfState(
            voters=tuple(fields["voters"]),
            learners=tuple(fields["learners"]),
            voters_outgoing=tuple(fields["voters_outgoing"]),
            learners_next=tuple(fields["learners_next"]),
            auto_leave=fields["auto_leave"],
        )
        ids = chain(conf.voters, conf.learners, conf.voters_outgoing, conf.learners_next)
        if not isinstance(conf.auto_leave, bool) or not all(isinstance(one, int) for one in ids):
            raise ValueError(f"{data[:64]!r} is not a configuration")
        return conf
