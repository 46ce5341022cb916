"""How a request travels through the log.

    1 byte kind | 8 bytes request id, big-endian | the client's own protobuf bytes, unchanged

The bytes that a client sent are the bytes that every member applies: nothing is re-encoded on the way. The id pairs
the applied entry with the caller that waits for it on the member that proposed it.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

from raftkv.errors import InvariantError

_HEADER: Final = struct.Struct(">BQ")
HEADER_SIZE_BYTES: Final = _HEADER.size


class Kind(enum.IntEnum):
    """What the body of an entry is."""

    PUT = 1
    DELETE_RANGE = 2
    TXN = 3
    COMPACT = 4
    ALARM = 5
    MEMBER_ATTRIBUTES = 6
    CLUSTER_VERSION = 7
    LEASE_GRANT = 8
    LEASE_REVOKE = 9
    LEASE_EXPIRE = 10
    LEASE_RENEW = 11


def encode(kind: int, request_id: int, body: bytes) -> bytes:
    """The data of a log entry."""
    return _HEADER.pack(kind, request_id) + body


def decode(data: bytes) -> tuple[int, int, bytes]:
    """Kind, request id and body of an entry's data.

    Raises:
        InvariantError: the data is too short to be an entry that a member proposed.
    """
    if len(data) < HEADER_SIZE_BYTES:
        raise InvariantError(f"log entry of {len(data)} bytes has no request header")
    kind, request_id = _HEADER.unpack_from(data)
    return kind, request_id, data[HEADER_SIZE_BYTES:]
