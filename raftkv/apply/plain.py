"""Puts and reads as nearly all are, of one key and without options, decoded without message objects.

    put = decode_put(data)           # None: not a plain one; ``rpc_pb2.PutRequest`` takes it
    get = decode_get(data)           # None: likewise, ``rpc_pb2.RangeRequest``

*Plain* is a request whose bytes are in the order in which every encoder writes them, no field twice: a put of a key,
a value and a lease, and a range of one key that is linearizable or serializable. The key is not empty, so a plain
request passes every check that depends on the request alone. All other requests are left to the message classes and
``check``, which word every refusal. Both paths give the same answers: ``tests/apply/test_plain`` and the fuzz target
``plain`` hold that with the messages as the oracle.

The readers of fields end in ``IndexError`` where the bytes end too early.
"""

from __future__ import annotations

from typing import Any, Final

from raftkv import errors
from raftkv.apply import compares, wire
from raftkv.apply.leases import Leases
from raftkv.pb import rpc_pb2
from raftkv.storage.mvcc_txn import WriteTxn

_KEY: Final = 0x0A
_VALUE: Final = 0x12
_LEASE: Final = 0x18
_SERIALIZABLE: Final = 0x38
# The shift of the ninth and last byte of a number below 2**63; negative numbers have ten bytes.
_SHIFT_MAX: Final = 56


class NotPlain(Exception):
    """The signal that a request is for the message classes."""


class PlainPut:
    """A put without options.

    Attributes:
        key, value: to be written.
        lease: to which the key is attached; 0: to none.
    """

    __slots__ = ("key", "lease", "value")

    def __init__(self, key: bytes, value: bytes, lease: int) -> None:
        self.key = key
        self.value = value
        self.lease = lease

    def message(self) -> rpc_pb2.PutRequest:
        """Return the same put for those that ask for more."""
        return rpc_pb2.PutRequest(key=self.key, value=self.value, lease=self.lease)


class PlainGet:
    """A read of one key in the present.

    Attributes:
        key: to be read.
        serializable: whether the state of any member will do.
    """

    __slots__ = ("key", "serializable")

    def __init__(self, key: bytes, serializable: bool) -> None:
        self.key = key
        self.serializable = serializable

    def message(self) -> rpc_pb2.RangeRequest:
        """Return the same read for those that ask for more."""
        return rpc_pb2.RangeRequest(key=self.key, serializable=self.serializable)


def parse_put(data: bytes) -> PlainPut | rpc_pb2.PutRequest:
    """Return a put in the form that it is executed in.

    Arguments:
        data: a serialized ``PutRequest``.

    Raises:
        DecodeError: it is none.
    """
    plain = decode_put(data)
    return rpc_pb2.PutRequest.FromString(data) if plain is None else plain


def decode_put(data: bytes) -> PlainPut | None:
    """Return a plain put; ``None`` for all others, and for what is no put.

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
    """Refuse a put that cannot be executed, as ``txn.check_put`` does.

    Arguments:
        put: with a lease.
        leases: those that exist.

    Raises:
        LeaseNotFoundError: the key would be attached to a lease that does not exist.
    """
    if not leases.exists(put.lease):
        raise errors.LeaseNotFoundError


def decode_get(data: bytes) -> PlainGet | None:
    """Return a plain read; ``None`` for all others, and for what is no range.

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
    """Return the bytes whose length is at ``at``, and where they end.

    Arguments:
        data: a message.
        at: place of the length.
        end: place behind which they may not end.

    Raises:
        NotPlain, IndexError: they are longer, or 2 MiB or longer.
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
    """Return a length of two or three bytes, and where it ends: longer ones are not worth a look.

    Arguments:
        data: a message.
        at: place of its first byte, which says that there is another.

    Raises:
        NotPlain, IndexError: it is longer.
    """
    high = data[at + 1]
    if high <= 0x7F:
        return data[at] & 0x7F | high << 7, at + 2
    top = data[at + 2]
    if top <= 0x7F:
        return data[at] & 0x7F | (high & 0x7F) << 7 | top << 14, at + 3
    raise NotPlain


def read_number(data: bytes, at: int) -> tuple[int, int]:
    """Return a number that is not negative, and where it ends.

    Arguments:
        data: a message.
        at: place of its first byte.

    Raises:
        NotPlain, IndexError: it is negative, or does not end.
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
# Txns in the form that nearly all have: compares, puts and reads of single keys, decoded and executed without message
# objects.
#
#     txn = decode_txn(data)               # None: not a plain one; the message classes and ``txn`` take it
#     txn.writes                       # True: some branch puts a key
#     body = execute_txn(write, succeeded, txn.success, is_answered=True)
#
# *Plain* is a txn whose bytes are in the order in which every encoder writes them, no field twice; whose compares are
# on single keys, with a known target and result, and with the operand of that target or none; whose operations are puts
# without options but a lease, and ranges of single keys without options; and that passes every check that depends on
# the request alone: keys are not empty, no list is longer than ``max-txn-ops``, and no branch puts a key twice. All
# other txns are left to ``txn``, which also words every refusal of a request. Both paths give the same answers,
# refusals and states: ``tests/apply/test_plain_txn`` and the fuzz target ``plain-txn`` hold that with the messages as
# the oracle.
#
# One compare and one put are decoded, checked and recognized as a write in 2 us instead of 4, and executed in 2 us,
# beside the put itself, instead of 5.

OPERATIONS_MAX: Final = 64
"""Longest list of a plain txn: longer ones gain little."""

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
        data: its bytes.
        compares: what must hold for ``success``.
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
        """Compares, and operations of the longer branch."""
        return len(self.compares) + max(len(self.success), len(self.failure))

    def values(self, is_answered: bool) -> int:
        """Return how many values it reads at most: to compare them, and for its answer.

        Arguments:
            is_answered: whether the answer is wanted here.
        """
        values = sum([target == _BY_VALUE for _, target, _, _ in self.compares])
        if is_answered:
            values += max([sum([value is None for _, value, _ in branch]) for branch in (self.success, self.failure)])
        return values

    def message(self) -> rpc_pb2.TxnRequest:
        """Return the same txn for those that ask for more than single keys."""
        return rpc_pb2.TxnRequest.FromString(self.data)


def parse(data: bytes) -> PlainTxn | rpc_pb2.TxnRequest:
    """Return a txn in the form that it is executed in.

    Arguments:
        data: a serialized ``TxnRequest``.

    Raises:
        DecodeError: it is none.
    """
    plain = decode_txn(data, OPERATIONS_MAX)
    return rpc_pb2.TxnRequest.FromString(data) if plain is None else plain


def decode_txn(data: bytes, operations_max: int) -> PlainTxn | None:
    """Return a plain txn; ``None`` for all others, and for what is no txn.

    Arguments:
        data: a serialized ``TxnRequest``.
        operations_max: as of ``check.check_txn``.
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
    """Take a txn apart. Raises NotPlain, and IndexError where the bytes end too early."""
    at, size, last, left = 0, len(data), 0, 0
    while at < size:
        tag = data[at]
        if tag != last:
            # A list at a time, in order: so each is counted to its end.
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
    """Take a compare apart: 1 result, 2 target, 3 key, then the operand under the tag of its target."""
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
    """Take an operation apart: a put of 1 key, 2 value, 3 lease, or a range of 1 key."""
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
        branch: the one taken.
        leases: those that exist.

    Raises:
        LeaseNotFoundError: a key would be attached to a lease that does not exist.
    """
    for _, _, lease in branch:
        if lease and not leases.exists(lease):
            raise errors.LeaseNotFoundError


def execute_txn(view: WriteTxn, succeeded: bool, branch: list[PlainOperation], *, is_answered: bool) -> bytes:
    """Execute a branch; return the body of the TxnResponse, empty if it is not wanted.

    Arguments:
        view: the write transaction.
        succeeded: which branch it is.
        branch: checked already.
        is_answered: whether the answer is wanted here.
    """
    answers: list[bytes] = []
    for key, value, lease in branch:
        if value is not None:
            view.put(key, value, lease)
            if is_answered:
                answers.append(wire.field(2, wire.revision_header(view.revision)))
        elif is_answered:
            found = view.range(key)
            header = wire.revision_header(found.revision)
            answers.append(wire.field(1, header + wire.range_body(found.kvs, more=False, count=found.count)))
    return wire.txn_body(succeeded, answers) if is_answered else b""
