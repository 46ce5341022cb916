"""How a request travels through the log, and its response to the client: both as bytes.

    1 byte kind | 8 bytes request id, big-endian | the client's own protobuf bytes, unchanged

The bytes that a client sent are the bytes that every member applies: nothing is re-encoded on the way. The id pairs
the applied entry with the caller that waits for it on the member that proposed it.

A member that meets a kind which it does not know must stop: it cannot tell what the others do with it. So that it can
say which version to install, the body of every kind from ``VERSIONED_FIRST`` on begins with two bytes, the major and
minor version of the first raftkv that knows the kind. Kinds below it are given out (1 to 11, and 7 was never written).

    128 PREFIX_QUOTA    129 DOWNGRADE    130 IDENTIFIED    131 AUTH    132 HISTORY_QUOTA    133 LIMIT

Where users are asked for, an entry of any other kind travels in one of the kind IDENTIFIED, which says who caused it:

    130 | request id | version | inner kind | auth revision, 8 bytes | length of the user's name, 2 bytes | name | body

The applying members check with it, once more, what the caller may do: a change of rights that came first counts. An
entry is caused by a user; by a member that acts by itself (``MEMBER``); or, while users are not asked for, by no caller
(``None``). Once users are asked for, an entry without a caller is refused.

RESPONSES are written by hand where protobuf objects would only be passed through.

A stored ``mvccpb.KeyValue`` is already in its wire form, and a message inside a message is its bytes behind a tag and
a length. So a response is put together by concatenation, several times faster than building message objects.

    >>> field(2, b"ab")
    b'\\x12\\x02ab'
    >>> varint(300)
    b'\\xac\\x02'

A *body* below is a response without its header: the header names the answering member and its term, which must not
take part in applying. ``HeaderEncoder`` makes it, and ``header + body`` is the response.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Final

from raftkv import errors
from raftkv.storage.key_value import varint

USER_NAME_BYTES_MAX: Final = 0xFFFF
"""Longest name that an entry can carry."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A user, as known by the users and roles of one moment.

    Attributes:
        user: the name; empty: a member.
        auth_revision: of the users and roles by which the caller was let in.
    """

    user: bytes
    auth_revision: int


MEMBER: Final = Caller(b"", 0)
"""A member that acts by itself, not for a client: it raises an alarm, or compacts by its own rule."""


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
    PREFIX_QUOTA = 128
    DOWNGRADE = 129
    IDENTIFIED = 130
    AUTH = 131
    HISTORY_QUOTA = 132
    LIMIT = 133


IDENTIFIED: Final = Kind.IDENTIFIED
"""The same, for what asks with every entry: a member of an enumeration takes 0.1 us to look up."""

FIRST_KNOWN_IN: Final[dict[int, tuple[int, int]]] = {
    Kind.PREFIX_QUOTA: (0, 2),
    Kind.DOWNGRADE: (0, 2),
    Kind.IDENTIFIED: (0, 2),
    Kind.AUTH: (0, 2),
    Kind.HISTORY_QUOTA: (0, 2),
    Kind.LIMIT: (0, 2),
}
"""Major and minor of the first version that knows a kind: it is proposed when all members run that or a later one."""

_KNOWN: Final = frozenset(map(int, Kind))
_VERSION_SIZE_BYTES: Final = 2
_IDENTITY: Final = struct.Struct(">BQH")
INNER_KIND_AT: Final = HEADER_SIZE_BYTES + _VERSION_SIZE_BYTES
"""Where the data of an IDENTIFIED entry says what it carries."""


def versioned(kind: int, body: bytes) -> bytes:
    """Return the body of an entry of a kind that not every version knows.

    Arguments:
        kind: from ``VERSIONED_FIRST`` on.
        body: its protobuf bytes.
    """
    return bytes(FIRST_KNOWN_IN[kind]) + body


def unversioned(body: bytes) -> bytes:
    """Return the protobuf bytes of the body of a versioned kind.

    Raises:
        MalformedEntryError: it has no version.
    """
    if len(body) < _VERSION_SIZE_BYTES:
        raise errors.MalformedEntryError
    return body[_VERSION_SIZE_BYTES:]


def identified(caller: Caller, kind: int, body: bytes) -> bytes:
    """Return the body of an IDENTIFIED entry.

    Arguments:
        caller: who caused it.
        kind, body: what it carries.
    """
    identity = _IDENTITY.pack(kind, caller.auth_revision, len(caller.user)) + caller.user
    return versioned(Kind.IDENTIFIED, identity + body)


def decode_identified(body: bytes) -> tuple[Caller, int, bytes]:
    """Return the caller, the kind and the body that an IDENTIFIED entry carries.

    Raises:
        MalformedEntryError: it carries none.
    """
    start = _VERSION_SIZE_BYTES + _IDENTITY.size
    if len(body) < start:
        raise errors.MalformedEntryError
    kind, auth_revision, size_bytes = _IDENTITY.unpack_from(body, _VERSION_SIZE_BYTES)
    end = start + size_bytes
    if len(body) < end or kind == Kind.IDENTIFIED:
        raise errors.MalformedEntryError
    return Caller(body[start:end], auth_revision), kind, body[end:]


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


def is_known(data: bytes) -> bool:
    """Return whether this version can apply an entry: one of a kind that it does not know would stop it.

    Arguments:
        data: of the entry. One too short to be a request changes nothing, so it stops no member.
    """
    if len(data) < HEADER_SIZE_BYTES:
        return True
    if data[0] == Kind.IDENTIFIED and len(data) > INNER_KIND_AT:
        return data[INNER_KIND_AT] in _KNOWN
    return data[0] in _KNOWN


def needed_version(kind: int, body: bytes) -> str:
    """Return the version of raftkv that knows a kind which this one does not, as far as the entry tells.

    Arguments:
        kind, body: of the entry.
    """
    if kind >= VERSIONED_FIRST and len(body) >= 2:
        return f"{body[0]}.{body[1]} or later"
    return "of a later version"


DROPPED_BYTES: Final = 4 * 1024 * 1024
"""Bytes that are freed at once: giving memory back to the system takes about 0.2 ms a MiB."""
DROPPED_PIECES: Final = 4000

_TAGS: Final = tuple(bytes((number,)) for number in range(128))


def field(number: int, value: bytes) -> bytes:
    """Return a length-delimited field.

    Arguments:
        number: of the field, below 16.
        value: its bytes.
    """
    return _TAGS[number << 3 | 2] + varint(len(value)) + value


def head(number: int, size_bytes: int) -> bytes:
    """Return what comes before the bytes of a length-delimited field.

    Arguments:
        number: of the field, below 16.
        size_bytes: number of its bytes.
    """
    return _TAGS[number << 3 | 2] + varint(size_bytes)


def integer(number: int, value: int) -> bytes:
    """Return an integer or boolean field, nothing when it is zero.

    Arguments:
        number: of the field, below 16.
        value: its value.
    """
    return _TAGS[number << 3] + varint(value) if value else b""


def drop(pieces: list[bytes]) -> Generator[None, None, None]:
    """Free an answer that is not sent, with a pause after some of it: 512 MiB at once would hold the loop for 0.1 s.

    Arguments:
        pieces: emptied; no other owner has them.
    """
    while pieces:
        size_bytes = count = 0
        while pieces and size_bytes < DROPPED_BYTES and count < DROPPED_PIECES:
            size_bytes += len(pieces.pop())
            count += 1
        yield


def range_body(kvs: Iterable[bytes], more: bool, count: int) -> bytes:
    """Return the body of a RangeResponse: fields kvs=2, more=3, count=4.

    Arguments:
        kvs: serialized KeyValues.
        more: whether the limit left any out.
        count: keys of the interval.
    """
    parts = [field(2, kv) for kv in kvs]
    parts.append(range_end(more, count))
    return b"".join(parts)


def range_kvs(kvs: Iterable[bytes]) -> bytes:
    """Return the KeyValues of a RangeResponse, or some of them: the body may be put together from pieces."""
    # Many parts and one join: ``field`` would copy each of them once more.
    return b"".join(chain.from_iterable([(b"\x12", varint(len(kv)), kv) for kv in kvs]))


def range_end(more: bool, count: int) -> bytes:
    """Return the rest of the body of a RangeResponse.

    Arguments:
        more: whether the limit left any out.
        count: keys of the interval.
    """
    return (b"\x18\x01" if more else b"") + integer(4, count)


def put_body(prev_kv: bytes | None) -> bytes:
    """Return the body of a PutResponse: field prev_kv=2."""
    return b"" if prev_kv is None else field(2, prev_kv)


def delete_range_body(deleted: int, prev_kvs: Iterable[bytes]) -> bytes:
    """Return the body of a DeleteRangeResponse: fields deleted=2, prev_kvs=3.

    Arguments:
        deleted: number of keys.
        prev_kvs: serialized KeyValues, if they were asked for.
    """
    return integer(2, deleted) + b"".join(field(3, kv) for kv in prev_kvs)


def txn_body(succeeded: bool, responses: Iterable[bytes]) -> bytes:
    """Return the body of a TxnResponse: fields succeeded=2, responses=3.

    Arguments:
        succeeded: whether all compares held.
        responses: serialized ResponseOps, in order.
    """
    return (b"\x10\x01" if succeeded else b"") + b"".join(field(3, response) for response in responses)


def revision_header(revision: int) -> bytes:
    """Return the header of a response inside a txn, which carries only the revision."""
    return field(1, integer(3, revision))


EMPTY_HEADER: Final = field(1, b"")
"""The header of a nested txn's response."""


class HeaderEncoder:
    """An encoder of the header field of this member's responses.

    Arguments:
        cluster_id: of the cluster.
        member_id: of the answering member.
    """

    def __init__(self, cluster_id: int, member_id: int) -> None:
        self._prefix = integer(1, cluster_id) + integer(2, member_id)
        self._revision = self._term = 0
        self._term_field = self._encoded = b""

    def encode(self, revision: int, term: int) -> bytes:
        """Return field 1 of a response: cluster id, member id, revision, term.

        Arguments:
            revision: main revision of the store.
            term: Raft term of this member.
        """
        if term != self._term:
            self._term = term
            self._term_field = integer(4, term)
        elif revision == self._revision and self._encoded:  # reads of one moment
            return self._encoded
        self._revision = revision
        fields = self._prefix + (b"\x18" + varint(revision) if revision else b"") + self._term_field
        self._encoded = bytes((0x0A, len(fields))) + fields  # four numbers take less than 128 bytes
        return self._encoded
