"""How a request travels through the log.

    1 byte kind | 8 bytes request id, big-endian | the client's own protobuf bytes, unchanged

The bytes that a client sent are the bytes that every member applies: nothing is re-encoded on the way. The id pairs
the applied entry with the caller that waits for it on the member that proposed it.

A member that meets a kind which it does not know must stop: it cannot tell what the others do with it. So that it can
say which version to install, the body of every kind from ``VERSIONED_FIRST`` on begins with two bytes, the major and
minor version of the first raftkv that knows the kind. Kinds below it are given out (1 to 11, and 7 was never written).
"""

from __future__ import annotations

import enum
import struct
from typing import Final

_HEADER: Final = struct.Struct(">BQ")
HEADER_SIZE_BYTES: Final = _HEADER.size

VERSIONED_FIRST: Final = 128
"""First kind whose body names the version that it needs."""


class Kind(enum.IntEnum):
    """The kinds of entries: what the body is."""

    PUT = 1
    DELETE_RANGE = 2
    TXN = 3
    COMPACT = 4
    ALARM = 5
    MEMBER_ATTRIBUTES = 6
    LEASE_GRANT = 8
    LEASE_REVOKE = 9
    LEASE_EXPIRE = 10
    LEASE_RENEW = 11


def encode(kind: int, request_id: int, body: bytes) -> bytes:
    """Return the data of a log entry.

    Arguments:
        kind: of the request.
        request_id: by which its waiter is found.
        body: the client's protobuf bytes.
    """
    return _HEADER.pack(kind, request_id) + body


def decode(data: bytes) -> tuple[int, int, bytes] | None:
    """Return kind, request id and body of an entry's data; ``None`` for one too short to be a request: it changes
    nothing.
    """
    if len(data) < HEADER_SIZE_BYTES:
        return None
    kind, request_id = _HEADER.unpack_from(data)
    return kind, request_id, data[HEADER_SIZE_BYTES:]


def needed_version(kind: int, body: bytes) -> str:
    """Return the version of raftkv that knows a kind which this one does not, as far as the entry tells.

    Arguments:
        kind, body: of the entry.
    """
    if kind >= VERSIONED_FIRST and len(body) >= 2:
        return f"{body[0]}.{body[1]} or later"
    return "of a later version"
