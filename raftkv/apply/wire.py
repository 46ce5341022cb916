"""How a request travels through the log, and its response to the client: both as bytes.

    1 byte kind | 8 bytes request id, big-endian | the client's own protobuf bytes, unchanged

Every member applies exactly the bytes that the client sent: nothing is re-encoded. The request id connects the applied
entry with the caller that waits for it on the member that proposed it.

A member that reads an unknown kind must stop, because it cannot know what the others do with it. So that its error can
name the version to install, the body of every kind from ``VERSIONED_FIRST`` on begins with two bytes, the major and
minor version of the first raftkv that knows the kind. Kinds below it are assigned (1 to 11; 7 was never written).
No release wrote 128.

    129 DOWNGRADE    130 IDENTIFIED    131 AUTH    132 HISTORY_QUOTA    133 LIMIT

While authentication is enabled, an entry of any other kind is wrapped in one of the kind IDENTIFIED, which names its
caller:

    130 | request id | version | inner kind | auth revision, 8 bytes | length of the user's name, 2 bytes | name | body

With it, the applying members check the caller's rights again, so an earlier change of rights takes effect. The caller
of an entry is a user; a member that acts on its own (``MEMBER``); or, while authentication is disabled, ``None``. While
authentication is enabled, an entry without a caller is refused.

PLAIN REQUESTS, puts and reads as nearly all are, of one key and without options, are decoded without message objects.

    put = decode_put(data)           # None: not plain; use ``rpc_pb2.PutRequest``
    get = decode_get(data)           # None: not plain; use ``rpc_pb2.RangeRequest``

*Plain* is a request whose bytes are in the order in which every encoder writes them, no field twice: a put of a key,
a value and a lease, and a range of one key that is linearizable or serializable. The key is not empty, so a plain
request passes every check that depends on the request alone. All other requests are left to the message classes and
``check``, which word every refusal. Both paths give the same answers: ``tests/apply/test_plain`` and the
fuzz target ``plain`` hold that with the messages as the oracle.

The functions that read fields raise ``IndexError`` where the bytes end too early.

RESPONSES are written by hand where protobuf objects would only be passed through.

A stored ``mvccpb.KeyValue`` already has its wire form, and a message inside a message is its bytes after a tag and a
length. So a response is built by concatenation, several times faster than with message objects.

    >>> field(2, b"ab")
    b'\\x12\\x02ab'
    >>> varint(300)
    b'\\xac\\x02'

A *body* below is a response without its header: the header has the responding member and its term, which must not
affect applying. ``HeaderEncoder`` makes it, and ``header + body`` is the response.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from raftkv import errors
from raftkv.apply import compares
from raftkv.apply.leases import Leases
from raftkv.pb import rpc_pb2
from raftkv.storage.key_value import varint
from raftkv.storage.mvcc import WriteTxn

USER_NAME_BYTES_MAX: Final = 0xFFFF
"""Longest user name that an entry can hold."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A user, as of one revision of users and roles.

    Attributes:
        user: the name; empty: a member.
        auth_revision: revision of the users and roles when the caller was admitted.
    """

    user: bytes
    auth_revision: int


MEMBER: Final = Caller(b"", 0)
"""A member that acts on its own, not for a client: it raises an alarm, or compacts automatically."""


_HEADER: Final = struct.Struct(">BQ")
HEADER_SIZE_BYTES: Final = _HEADER.size

VERSIONED_FIRST: Final = 128
"""First kind whose body names the version that it needs."""


class Kind(enum.IntEnum):
    """The kinds of entries, which determine the body."""

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
    DOWNGRADE = 129
    IDENTIFIED = 130
    AUTH = 131
    HISTORY_QUOTA = 132
    LIMIT = 133


IDENTIFIED: Final = Kind.IDENTIFIED
"""The same as a global, for code that runs for every entry: looking up an enum member takes 0.1 us."""

FIRST_KNOWN_IN: Final[dict[int, tuple[int, int]]] = {
    Kind.DOWNGRADE: (0, 2),
    Kind.IDENTIFIED: (0, 2),
    Kind.AUTH: (0, 2),
    Kind.HISTORY_QUOTA: (0, 2),
    Kind.LIMIT: (0, 2),
}
"""Major and minor of the first version that knows a kind: it is proposed only when all members run that or a later one.
"""

_KNOWN: Final = frozenset(map(int, Kind))
_VERSION_SIZE_BYTES: Final = 2
_IDENTITY: Final = struct.Struct(">BQH")
INNER_KIND_AT: Final = HEADER_SIZE_BYTES + _VERSION_SIZE_BYTES
"""Offset of the inner kind in the data of an IDENTIFIED entry."""


def versioned(kind: int, body: bytes) -> bytes:
    """Return the body of an entry of a versioned kind.

    Arguments:
        kind: from ``VERSIONED_FIRST`` on.
        body: protobuf bytes of the request.
    """
    return bytes(FIRST_KNOWN_IN[kind]) + body


def unversioned(body: bytes) -> bytes:
    """Return the protobuf bytes of the body of a versioned kind.

    Raises:
        MalformedEntryError: the body has no version.
    """
    if len(body) < _VERSION_SIZE_BYTES:
        raise errors.MalformedEntryError
    return body[_VERSION_SIZE_BYTES:]


def identified(caller: Caller, kind: int, body: bytes) -> bytes:
    """Return the body of an IDENTIFIED entry.

    Arguments:
        caller: caller of the request.
        kind, body: the wrapped request.
    """
    identity = _IDENTITY.pack(kind, caller.auth_revision, len(caller.user)) + caller.user
    return versioned(Kind.IDENTIFIED, identity + body)


def decode_identified(body: bytes) -> tuple[Caller, int, bytes]:
    """Return the caller, the kind and the body in an IDENTIFIED entry.

    Raises:
        MalformedEntryError: the body is malformed.
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
        kind: kind of the request.
        request_id: id by which its waiting caller is found.
        body: the client's protobuf bytes.
    """
    return _HEADER.pack(kind, request_id) + body


def decode(data: bytes) -> tuple[int, int, bytes] | None:
    """Return kind, request id and body of an entry's data; ``None`` if it is too short to be a request: it changes
    nothing.
    """
    if len(data) < HEADER_SIZE_BYTES:
        return None
    kind, request_id = _HEADER.unpack_from(data)
    return kind, request_id, data[HEADER_SIZE_BYTES:]


def is_known(data: bytes) -> bool:
    """Return whether this version can apply an entry: an entry of an unknown kind would stop it.

    Arguments:
        data: data of the entry. Data too short to be a request changes nothing, so it stops no member.
    """
    if len(data) < HEADER_SIZE_BYTES:
        return True
    if data[0] == Kind.IDENTIFIED and len(data) > INNER_KIND_AT:
        return data[INNER_KIND_AT] in _KNOWN
    return data[0] in _KNOWN


def needed_version(kind: int, body: bytes) -> str:
    """Return the raftkv version that knows a kind unknown to this one, as far as the entry shows it.

    Arguments:
        kind, body: kind and body of the entry.
    """
    if kind >= VERSIONED_FIRST and len(body) >= 2:
        return f"{body[0]}.{body[1]} or later"
    return "of a later version"


DROPPED_BYTES: Final = 4 * 1024 * 1024
"""Bytes freed at once: returning memory to the system takes about 0.2 ms per MiB."""
DROPPED_PIECES: Final = 4000

_TAGS: Final = tuple(bytes((number,)) for number in range(128))


def field(number: int, value: bytes) -> bytes:
    """Return a length-delimited field.

    Arguments:
        number: field number, below 16.
        value: bytes of the field.
    """
    return _TAGS[number << 3 | 2] + varint(len(value)) + value


def head(number: int, size_bytes: int) -> bytes:
    """Return the tag and length of a length-delimited field.

    Arguments:
        number: field number, below 16.
        size_bytes: length of the value.
    """
    return _TAGS[number << 3 | 2] + varint(size_bytes)


def integer(number: int, value: int) -> bytes:
    """Return an integer or boolean field; empty when the value is zero.

    Arguments:
        number: field number, below 16.
        value: the number.
    """
    return _TAGS[number << 3] + varint(value) if value else b""


def drop(pieces: list[bytes]) -> Generator[None, None, None]:
    """Free a response that is not sent, with pauses: freeing 512 MiB at once would block the loop for 0.1 s.

    Arguments:
        pieces: list to empty; there must be no other reference to its items.
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
    """Return the KeyValues of a RangeResponse, or some of them: the body may be built from pieces."""
    # Many parts and one join, because ``field`` would copy each of them once more.
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
        prev_kvs: serialized KeyValues, if requested.
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
    """Return the header of a response inside a txn, which has only the revision."""
    return field(1, integer(3, revision))


EMPTY_HEADER: Final = field(1, b"")
"""The header of a nested txn's response."""


class HeaderEncoder:
    """An encoder of the header field of this member's responses.

    Arguments:
        cluster_id: id of the cluster.
        member_id: id of this member.
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
        elif revision == self._revision and self._encoded:  # several reads at the same revision
            return self._encoded
        self._revision = revision
        fields = self._prefix + (b"\x18" + varint(revision) if revision else b"") + self._term_field
        self._encoded = bytes((0x0A, len(fields))) + fields  # four numbers take less than 128 bytes
        return self._encoded


_KEY: Final = 0x0A
_VALUE: Final = 0x12
_LEASE: Final = 0x18
_SERIALIZABLE: Final = 0x38
# The shift of the ninth and last byte of a varint below 2**63; negative numbers have ten bytes.
_SHIFT_MAX: Final = 56


class NotPlain(Exception):
    """The signal that a request must be decoded with the message classes."""


class PlainPut:
    """A put without options.

    Attributes:
        key, value: key and value to write.
        lease: lease to which the key is attached; 0: none.
    """

    __slots__ = ("key", "lease", "value")

    def __init__(self, key: bytes, value: bytes, lease: int) -> None:
        self.key = key
        self.value = value
        self.lease = lease

    def message(self) -> rpc_pb2.PutRequest:
        """Return the same put as a message."""
        return rpc_pb2.PutRequest(key=self.key, value=self.value, lease=self.lease)


class PlainGet:
    """A read of the current value of one key.

    Attributes:
        key: key to read.
        serializable: whether the state of any member is sufficient.
    """

    __slots__ = ("key", "serializable")

    def __init__(self, key: bytes, serializable: bool) -> None:
        self.key = key
        self.serializable = serializable

    def message(self) -> rpc_pb2.RangeRequest:
        """Return the same read as a message."""
        return rpc_pb2.RangeRequest(key=self.key, serializable=self.serializable)


def parse_put(data: bytes) -> PlainPut | rpc_pb2.PutRequest:
    """Return a put in the form in which it is executed.

    Arguments:
        data: a serialized ``PutRequest``.

    Raises:
        DecodeError: the bytes are not a put.
    """
    plain = decode_put(data)
    return rpc_pb2.PutRequest.FromString(data) if plain is None else plain


def decode_put(data: bytes) -> PlainPut | None:
    """Return a plain put; ``None`` for all other puts, and for bytes that are not a put.

    Arguments:
        data: a serialized ``PutRequest``.
    """
    size, value, lease = len(data), b"", 0
    try:
        if data[0] != _KEY:
            return None
        key, at = read_bytes(data, 1, size)
        if at < size and data[at] == _VALUE:
            value, at = read_bytes(data, at + 1, size)
        if at < size and data[at] == _LEASE:
            lease, at = read_number(data, at + 1)
    except (NotPlain, IndexError):
        return None
    return PlainPut(key, value, lease) if at == size and key else None


def check_lease(put: PlainPut, leases: Leases) -> None:
    """Refuse a put that cannot be executed, like ``txn.check_put``.

    Arguments:
        put: a put with a lease.
        leases: the existing leases.

    Raises:
        LeaseNotFoundError: the lease does not exist.
    """
    if not leases.exists(put.lease):
        raise errors.LeaseNotFoundError


def decode_get(data: bytes) -> PlainGet | None:
    """Return a plain read; ``None`` for all other reads, and for bytes that are not a range.

    Arguments:
        data: a serialized ``RangeRequest``.
    """
    size, serializable = len(data), False
    try:
        if data[0] != _KEY:
            return None
        key, at = read_bytes(data, 1, size)
        if at < size and data[at] == _SERIALIZABLE and data[at + 1] == 1:
            serializable = True
            at += 2
    except (NotPlain, IndexError):
        return None
    return PlainGet(key, serializable) if at == size and key else None


def read_bytes(data: bytes, at: int, end: int) -> tuple[bytes, int]:
    """Return the bytes whose length is at ``at``, and their end.

    Arguments:
        data: a message.
        at: offset of the length.
        end: offset that they must not exceed.

    Raises:
        NotPlain, IndexError: they exceed ``end``, or have 2 MiB or more.
    """
    length = data[at]
    at += 1
    if length > 0x7F:
        length, at = read_length(data, at - 1)
    after = at + length
    if after > end:
        raise NotPlain
    return data[at:after], after


def read_length(data: bytes, at: int) -> tuple[int, int]:
    """Return a length of two or three bytes, and its end; longer ones are not decoded here.

    Arguments:
        data: a message.
        at: offset of its first byte, which says that there is another.

    Raises:
        NotPlain, IndexError: the length has more bytes.
    """
    high = data[at + 1]
    if high <= 0x7F:
        return data[at] & 0x7F | high << 7, at + 2
    top = data[at + 2]
    if top <= 0x7F:
        return data[at] & 0x7F | (high & 0x7F) << 7 | top << 14, at + 3
    raise NotPlain


def read_number(data: bytes, at: int) -> tuple[int, int]:
    """Return a nonnegative number, and its end.

    Arguments:
        data: a message.
        at: offset of its first byte.

    Raises:
        NotPlain, IndexError: the number is negative, or does not end.
    """
    number = shift = 0
    while True:
        octet = data[at]
        at += 1
        if octet < 0x80:
            return number | octet << shift, at
        number |= (octet & 0x7F) << shift
        shift += 7
        if shift > _SHIFT_MAX:
            raise NotPlain


# -- txns ----------------------------------------------------------------------------------------------------------
#
# Txns in the most common form: compares, puts and reads of single keys, decoded and executed without message objects.
#
#     txn = decode_txn(data)               # None: not plain; use the message classes and ``txn``
#     txn.writes                       # True: some branch puts a key
#     body = execute_txn(write, succeeded, txn.success, is_answered=True)
#
# A txn is *plain* if its fields are in the order in which every encoder writes them, without repetition; its compares
# are on single keys, with a known target and result, and with the operand of that target or none; its operations are
# puts without options other than a lease, and ranges of single keys without options; and it passes every check that
# depends on the request alone: keys are not empty, no list is longer than ``max-txn-ops``, and no branch puts a key
# twice. All other txns are left to ``txn``, which also makes all refusals. Both paths give the same responses, refusals
# and states: ``tests/apply/test_plain_txn`` and the fuzz target ``plain-txn`` check that against the messages.
#
# Decoding, checking and recognizing a write of one compare and one put takes 2 us instead of 4 us; executing it takes
# 2 us instead of 5 us, not counting the put itself.

OPERATIONS_MAX: Final = 64
"""Longest list of a plain txn: longer lists would gain little."""

PlainCompare = tuple[bytes, int, int, Any]
"""Key, target, result, operand."""

PlainOperation = tuple[bytes, bytes | None, int]
"""Key, value, lease; the value of a read is None."""

_COMPARE: Final = 0x0A
_SUCCESS: Final = 0x12
_FAILURE: Final = 0x1A
_RANGE: Final = 0x0A
_PUT: Final = 0x12
# Indexed by the target of a compare: the tag of its operand.
_OPERAND_TAGS: Final = (0x20, 0x28, 0x30, 0x3A, 0x40)
_RESULTS: Final = 4
_BY_VALUE: Final = rpc_pb2.Compare.VALUE


class PlainTxn:
    """A plain txn.

    Attributes:
        data: bytes of the txn.
        compares: must all hold for ``success``.
        success, failure: the branches.
        writes: whether any branch puts a key.
    """

    __slots__ = ("compares", "data", "failure", "success", "writes")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.compares: list[PlainCompare] = []
        self.success: list[PlainOperation] = []
        self.failure: list[PlainOperation] = []
        self.writes = False

    @property
    def size(self) -> int:
        """Number of compares, and of operations of the longer branch."""
        return len(self.compares) + max(len(self.success), len(self.failure))

    def values(self, is_answered: bool) -> int:
        """Return the maximum number of values that it reads: for compares, and for the response.

        Arguments:
            is_answered: whether the response is needed here.
        """
        values = sum([target == _BY_VALUE for _, target, _, _ in self.compares])
        if is_answered:
            values += max([sum([value is None for _, value, _ in branch]) for branch in (self.success, self.failure)])
        return values

    def message(self) -> rpc_pb2.TxnRequest:
        """Return the same txn as a message."""
        return rpc_pb2.TxnRequest.FromString(self.data)


def parse(data: bytes) -> PlainTxn | rpc_pb2.TxnRequest:
    """Return a txn in the form in which it is executed.

    Arguments:
        data: a serialized ``TxnRequest``.

    Raises:
        DecodeError: the bytes are not a txn.
    """
    plain = decode_txn(data, OPERATIONS_MAX)
    return rpc_pb2.TxnRequest.FromString(data) if plain is None else plain


def decode_txn(data: bytes, operations_max: int) -> PlainTxn | None:
    """Return a plain txn; ``None`` for all other txns, and for bytes that are not a txn.

    Arguments:
        data: a serialized ``TxnRequest``.
        operations_max: as in ``check.check_txn``.
    """
    txn = PlainTxn(data)
    success, failure = txn.success, txn.failure
    try:
        _fill(txn, data, min(operations_max, OPERATIONS_MAX))
    except (NotPlain, IndexError):
        return None
    if (len(success) > 1 and _puts_twice(success)) or (len(failure) > 1 and _puts_twice(failure)):
        return None
    return txn


def _fill(txn: PlainTxn, data: bytes, operations_max: int) -> None:
    """Decode a txn. Raises NotPlain, and IndexError where the bytes end too early."""
    at, size, last, left = 0, len(data), 0, 0
    while at < size:
        tag = data[at]
        if tag != last:
            # One list after the other: so the count of each is complete.
            if tag < last:
                raise NotPlain
            last, left = tag, operations_max
        left -= 1
        if left < 0:
            raise NotPlain
        at += 1
        length = data[at]
        at += 1
        if length > 0x7F:
            length, at = read_length(data, at - 1)
        end = at + length
        if end > size:
            raise NotPlain
        if tag == _COMPARE:
            txn.compares.append(_compare(data, at, end))
        elif tag in (_SUCCESS, _FAILURE):
            operation = _operation(data, at, end)
            (txn.success if tag == _SUCCESS else txn.failure).append(operation)
            if operation[1] is not None:
                txn.writes = True
        else:
            raise NotPlain
        at = end


def _compare(data: bytes, at: int, end: int) -> PlainCompare:
    """Decode a compare: 1 result, 2 target, 3 key, then the operand with the tag of its target."""
    result = target = 0
    tag = data[at]
    if tag == 0x08:
        result = data[at + 1]
        at += 2
        tag = data[at]
    if tag == 0x10:
        target = data[at + 1]
        at += 2
        tag = data[at]
    if tag != 0x1A or result >= _RESULTS or target >= len(_OPERAND_TAGS):
        raise NotPlain
    key, at = read_bytes(data, at + 1, end)
    if not key:
        raise NotPlain
    if at == end:
        return key, target, result, b"" if target == _BY_VALUE else 0
    if data[at] != _OPERAND_TAGS[target]:
        raise NotPlain
    operand: bytes | int
    if target == _BY_VALUE:
        operand, at = read_bytes(data, at + 1, end)
    else:
        operand, at = read_number(data, at + 1)
    if at != end:
        raise NotPlain
    return key, target, result, operand


def _operation(data: bytes, at: int, end: int) -> PlainOperation:
    """Decode an operation: a put of 1 key, 2 value, 3 lease, or a range of 1 key."""
    kind = data[at]
    length = data[at + 1]
    at += 2
    if length > 0x7F:
        length, at = read_length(data, at - 1)
    if at + length != end or data[at] != 0x0A:
        raise NotPlain
    key, at = read_bytes(data, at + 1, end)
    if not key:
        raise NotPlain
    if kind == _RANGE:
        if at != end:
            raise NotPlain
        return key, None, 0
    if kind != _PUT:
        raise NotPlain
    value, lease = b"", 0
    if at < end and data[at] == 0x12:
        value, at = read_bytes(data, at + 1, end)
    if at < end and data[at] == 0x18:
        lease, at = read_number(data, at + 1)
    if at != end:
        raise NotPlain
    return key, value, lease


def _puts_twice(branch: list[PlainOperation]) -> bool:
    keys = [key for key, value, _ in branch if value is not None]
    return len(set(keys)) < len(keys)


def choose(view: compares.View, txn: PlainTxn) -> bool:
    """Return whether all compares hold, so that the branch is ``success``.

    Arguments:
        view: the state before the txn.
        txn: the txn.
    """
    return all(compares.holds(view, key, target, result, operand) for key, target, result, operand in txn.compares)


def check(branch: list[PlainOperation], leases: Leases) -> None:
    """Refuse a branch that cannot be executed.

    Arguments:
        branch: the chosen branch.
        leases: the existing leases.

    Raises:
        LeaseNotFoundError: the lease of a put does not exist.
    """
    for _, _, lease in branch:
        if lease and not leases.exists(lease):
            raise errors.LeaseNotFoundError


def execute_txn(view: WriteTxn, succeeded: bool, branch: list[PlainOperation], *, is_answered: bool) -> bytes:
    """Execute a branch; return the body of the TxnResponse, empty if it is not needed.

    Arguments:
        view: the write transaction.
        succeeded: whether all compares held.
        branch: operations to execute, already checked.
        is_answered: whether the response is needed here.
    """
    answers: list[bytes] = []
    for key, value, lease in branch:
        if value is not None:
            view.put(key, value, lease)
            if is_answered:
                answers.append(field(2, revision_header(view.revision)))
        elif is_answered:
            found = view.range(key)
            header = revision_header(found.revision)
            answers.append(field(1, header + range_body(found.kvs, more=False, count=found.count)))
    return txn_body(succeeded, answers) if is_answered else b""
