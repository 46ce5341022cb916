"""Every bucket, key name and value format that the store puts on disk, and the version of that format.

The names are etcd's (``server/storage/schema``), so that a reader of one knows the other. Buckets are LMDB named
databases; within a bucket keys sort as bytes.

    key              revision key (17 or 18 bytes, see ``revision.py``)  ->  sealed record (likewise)
    meta             the names below                                     ->  8-byte big-endian integers, or JSON
    lease, alarm, members, members_removed, cluster, auth, authUsers, authRoles
                     owned by the modules above: opaque to the store

Beside the buckets lies the checksum of all of them but ``key`` (``backend/environment.py``).

``meta`` is written in the same transaction as the data it describes: what is on disk is always the exact state
after the entry ``consistent_index``, so that replay of the log skips nothing and repeats nothing (etcd's data
inconsistency of 3.5.0, issue 13766, was a violation of this rule).

Left out: any migration. There is one format so far; ``datadir.format_refusal`` says what numbers of later ones hold.
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
"""Refused at open when the database on disk says another number."""

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
"""Key in ``cluster`` that says that a log was made: without it now, votes and acknowledgements are lost even if nothing
was applied yet."""

META_OF_THE_LOG: Final = frozenset({META_CONSISTENT_INDEX, META_TERM})
"""How far the log is applied: it moves with elections and reads too, so it is not part of the state (etcd: the keys
that its hash of the backend ignores)."""

CLUSTER_VERSION_PREFIX: Final[bytes] = b"raftkv_version/"
"""Keys of ``cluster`` with the version that a member published, by its id. Not part of the state that members compare:
versions that did not know of it yet left it out."""

CLUSTER_DOWNGRADE: Final[bytes] = b"downgrade"
"""Key in ``cluster`` of a downgrade that is under way, or was."""

CLUSTER_VERSION: Final = "3.7.0"
"""Version of the cluster and of its storage, as etcd counts them, while no downgrade is under way."""

CLUSTER_QUOTA_PREFIX: Final[bytes] = b"raftkv_quota/"
"""Begins the keys of quotas in ``cluster``: the prefix follows, and the value begins with its two limits."""
CLUSTER_LIMIT_PREFIX: Final[bytes] = b"raftkv_limit/"
"""Begins the keys of limits of rates in ``cluster``."""
QUOTA_PREFIX_BYTES_MAX: Final = 256
QUOTA_LIMIT_MAX: Final = (1 << 63) - 1

META_KEY_BYTES_MAX: Final = 511
"""Longest key of any bucket (LMDB's own limit)."""

_U64 = struct.Struct(">Q")


def is_compared(bucket: bytes, key: bytes) -> bool:
    """Return whether a record is part of what all members that applied the same entries have alike."""
    if bucket == META:
        return key not in META_OF_THE_LOG
    return bucket != CLUSTER or not key.startswith(CLUSTER_VERSION_PREFIX)


@contextmanager
def reading(bucket: bytes) -> Iterator[None]:
    """Name the bucket whose records turn out not to be what was written; none of them has a checksum of its own.

    Raises:
        CorruptionError: the block could not make sense of one.
    """
    try:
        yield
    except (struct.error, DecodeError, ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"a record of the bucket {bucket.decode()} is not what was written: {type(error).__name__}: {error}"
        raise CorruptionError(text) from None


def decode_downgrade(record: bytes | None) -> tuple[bool, str]:
    """Return whether a downgrade is under way, and the version that it goes to.

    Raises:
        CorruptionError: the record is none.
    """
    if record is None:
        return False, ""
    with reading(CLUSTER):
        fields = json.loads(record)
        enabled, target = fields["enabled"], fields["target-version"]
        if not isinstance(enabled, bool) or not isinstance(target, str):
            raise TypeError(f"enabled is {enabled!r}, target-version {target!r}")
        target.encode()  # refuses half of a surrogate pair, which no answer can hold
        return enabled, target


def encode_integer(number: int) -> bytes:
    """Return a non-negative integer as the 8 bytes kept in ``meta``."""
    return _U64.pack(number)


def decode_integer(data: bytes | None) -> int | None:
    """Return the integer of ``encode_integer``; ``None`` stays ``None``.

    Raises:
        CorruptionError: it is none.
    """
    if data is None:
        return None
    if len(data) != _U64.size:
        raise CorruptionError(f"{data[:16].hex()} in the bucket meta is not an integer of 8 bytes")
    return int.from_bytes(data)


def check_format(data: bytes | None, what: str) -> None:
    """Refuse a database of a format that this version does not know.

    Arguments:
        data: its value of ``META_FORMAT_VERSION``; ``None`` in one that was just made.
        what: the database, for the error.

    Raises:
        StorageError: it has another format; says which raftkv reads it.
        CorruptionError: it is no number.
    """
    stated = decode_integer(data)
    if stated is not None and (refusal := format_refusal(what, stated, FORMAT_VERSION)):
        raise StorageError(refusal)


def read_compact_revisions(get: Callable[[bytes, bytes], bytes | None]) -> tuple[int, int]:
    """Return the compact revision asked for and the one carried out, each -1 if never, by a reader of (bucket, key)."""
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
    # Sorted and without blanks: equal configurations must be equal bytes, because the hash of the database covers them.
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()


def decode_conf_state(data: bytes | None) -> ConfState:
    """Return the configuration of ``encode_conf_state``; ``None`` is the empty one.

    Raises:
        CorruptionError: it is none.
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
