"""Every bucket, key name and value format that the store puts on disk, and the version of that format.

The names are etcd's (``server/storage/schema``), so that a reader of one knows the other. Buckets are LMDB named
databases; within a bucket keys sort as bytes.

    key              revision key (17 or 18 bytes, see ``revision.py``)  ->  sealed record (see ``record.py``)
    meta             the names below                                     ->  8-byte big-endian integers, or JSON
    lease, alarm, members, members_removed, cluster, auth, authUsers, authRoles
                     owned by the modules above: opaque to the store

``meta`` is written in the same transaction as the data it describes: what is on disk is always the exact state
after the entry ``consistent_index``, so that replay of the log skips nothing and repeats nothing (etcd's data
inconsistency of 3.5.0, issue 13766, was a violation of this rule).

Left out: any migration. There is one format so far.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Final

from raftkv.raft.types import ConfState

FORMAT_VERSION: Final = 1
"""Refused at open when the database on disk says another number."""

KEY: Final = b"key"
META: Final = b"meta"
LEASE: Final = b"lease"
ALARM: Final = b"alarm"
MEMBERS: Final = b"members"
MEMBERS_REMOVED: Final = b"members_removed"
CLUSTER: Final = b"cluster"
AUTH: Final = b"auth"
AUTH_USERS: Final = b"authUsers"
AUTH_ROLES: Final = b"authRoles"

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

META_CONSISTENT_INDEX: Final = b"consistent_index"
META_TERM: Final = b"term"
META_CONF_STATE: Final = b"confState"
META_SCHEDULED_COMPACT: Final = b"scheduledCompactRev"
META_FINISHED_COMPACT: Final = b"finishedCompactRev"
META_FORMAT_VERSION: Final = b"formatVersion"

META_OF_THE_LOG: Final = frozenset({META_CONSISTENT_INDEX, META_TERM})
"""How far the log is applied: it moves with elections and reads too, so it is not part of the state (etcd: the keys
that its hash of the backend ignores)."""

META_KEY_BYTES_MAX: Final = 511
"""Longest key of any bucket (LMDB's own limit)."""

_U64 = struct.Struct(">Q")


def encode_integer(number: int) -> bytes:
    """Return a non-negative integer as the 8 bytes kept in ``meta``."""
    return _U64.pack(number)


def decode_integer(data: bytes | None) -> int | None:
    """Return the integer of ``encode_integer``; ``None`` stays ``None``."""
    return None if data is None else int(_U64.unpack(data)[0])


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
    """Return the configuration of ``encode_conf_state``; ``None`` is the empty one."""
    if data is None:
        return ConfState()
    fields = json.loads(data)
    return ConfState(
        voters=tuple(fields["voters"]),
        learners=tuple(fields["learners"]),
        voters_outgoing=tuple(fields["voters_outgoing"]),
        learners_next=tuple(fields["learners_next"]),
        auto_leave=fields["auto_leave"],
    )
