"""Puts and reads as nearly all are, of one key and without options, decoded without message objects.

    put = decode_put(data)           # None: not a plain one; ``rpc_pb2.PutRequest`` takes it
    get = decode_get(data)           # None: likewise, ``rpc_pb2.RangeRequest``

*Plain* is a request whose bytes are in the order in which every encoder writes them, no field twice: a put of a key,
a value and a lease, and a range of one key that is linearizable or serializable. The key is not empty, so a plain
request passes every check that depends on the request alone. Whatever else there is, however rare, is left to the
message classes and ``check``, which word every refusal. So this module decides nothing: that both come to the same
answers is what ``tests/apply/test_plain`` and the fuzz target ``plain`` hold, with the messages as the oracle.

Owns the readers of fields, which ``plain_txn`` uses, too. They end in ``IndexError`` where the bytes end too early.
"""

from __future__ import annotations

from typing import Final

from raftkv import errors
from raftkv.apply.txn import Leases
from raftkv.pb import rpc_pb2

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
