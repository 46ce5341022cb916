"""Refuses transactions with so many operations that parsing them would block the loop, by counting bytes.

An empty operation is two bytes, so a request of 2 MiB may have a million of them, and a parser makes an object of each.
Parsing and freeing them takes 57 ms for operations and 84 ms for compares, in one turn. Here at most ``FIELDS_MAX``
fields are counted in the raw bytes, before parsing: 10 to 39 ms (medians of 7). A lower limit on bytes would refuse
honest requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from raftkv import errors
from raftkv.apply.check import OPERATIONS_TOTAL_MAX
from raftkv.pb.services import SERVICES
from raftkv.rpc.server.router import Kind
from raftkv.server.services.responder import fail

COUNTED_BYTES: Final = 16 * 1024
"""Smaller requests are not counted: they are parsed in less than a millisecond."""

_TXN: Final = SERVICES["etcdserverpb.KV"]["Txn"].path
_VARINT, _FIXED64, _LENGTH, _GROUP, _GROUP_END, _FIXED32 = range(6)
_OPERATIONS: Final = frozenset((2 << 3 | _LENGTH, 3 << 3 | _LENGTH))
"""Tags of ``TxnRequest.success`` and ``failure``. A compare contains no operations."""
_TXNS: Final = frozenset((4 << 3 | _LENGTH,))
"""The tag of ``RequestOp.request_txn``."""

FIELDS_MAX: Final = 2 * OPERATIONS_TOTAL_MAX + 1024
"""Each operation is a field, and contains one."""

SMALL_BYTES: Final = 128
"""The length of a field below this size takes one byte."""


def around(path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the wrapper of a handler. For ``Txn`` it counts the operations of large requests (``router.Around``).

    Arguments:
        path: method path.
        kind: how the handler is called.
        handler: takes the call and the bytes of its request.
    """
    del kind
    if path != _TXN:
        return handler

    @wraps(handler)
    def counted(call: Any, data: bytes) -> Any:
        if len(data) > COUNTED_BYTES and has_too_many_operations(data):
            return fail(call, errors.TooManyOperationsError())
        return handler(call, data)

    return counted


def has_too_many_operations(data: bytes) -> bool:
    """Return whether a transaction, including nested ones, has more fields than its operations may have.

    Malformed bytes are left to the parser, which refuses them. Groups, which these messages never have, are refused
    here.

    Arguments:
        data: serialized ``TxnRequest``.
    """
    left = FIELDS_MAX
    parts = [(0, len(data), _OPERATIONS)]
    while parts:
        at, end, inner = parts.pop()
        while at < end:
            left -= 1
            tag, start = data[at], at + 2
            if tag & 0x87 == _LENGTH and start <= end and data[at + 1] < 0x80:
                # Nearly every field: three times as fast as the general case.
                after = start + data[at + 1]
            elif tag & 0x87 == _LENGTH and start < end and 0 < data[start] < 0x80:
                # The same for lengths of two or three bytes: nested transactions have only these.
                after = start + 1 + (data[at + 1] & 0x7F | data[start] << 7)
                start += 1
            elif tag & 0x87 == _LENGTH and start + 1 < end and data[start] >= 0x80 and 0 < data[start + 1] < 0x80:
                after = start + 2 + (data[at + 1] & 0x7F | (data[start] & 0x7F) << 7 | data[start + 1] << 14)
                start += 2
            else:
                tag, start, after = _field(data, at, end)
                if after - at < SMALL_BYTES:  # an encoding longer than needed takes four times as long
                    left -= 3
            if after > end:
                return False
            if left < 0 or tag & 7 in (_GROUP, _GROUP_END):
                return True
            if after <= at:
                return False
            if tag in inner:
                parts.append((start, after, _TXNS if inner is _OPERATIONS else _OPERATIONS))
            at = after
    return False


def _field(data: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Return the tag, content start and end of the field at ``at``; an end not above ``at``: it is malformed."""
    tag, start = _varint(data, at, end)
    kind = tag & 7
    if kind == _LENGTH:
        size, start = _varint(data, start, end)
        after = start + size
    elif kind == _VARINT:
        after = _varint(data, start, end)[1]
    else:
        after = start + {_FIXED64: 8, _FIXED32: 4}.get(kind, 0)
    return (tag, start, after) if start and after <= end else (_VARINT, at, at)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number at ``at`` and its end; 0, 0: it is malformed."""
    value = shift = 0
    for position in range(at, min(end, at + 10)):
        octet = data[position]
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value, position + 1
        shift += 7
    return 0, 0
