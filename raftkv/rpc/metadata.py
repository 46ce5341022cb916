"""Call metadata: timeouts in their header form, user metadata in and out, reserved names.

Names are lower-case ASCII; a name that ends in ``-bin`` carries bytes, which cross the wire as base64.
Users of this package see such values as plain bytes. Source: gRPC's PROTOCOL-HTTP2.md, "Requests".
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from raftkv.rpc.status import Headers, decode_binary, encode_binary

Metadata = Iterable[tuple[str | bytes, str | bytes]]
"""User metadata as callers write it: pairs of name and value."""

_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT_DIGITS_MAX = 8
_LARGEST_VALUE = 10**_TIMEOUT_DIGITS_MAX - 1


def encode_timeout(timeout_s: float) -> bytes:
    """Return the ``grpc-timeout`` value: the finest unit whose number has at most 8 digits, rounded up."""
    for unit, per_second in ((b"n", 10**9), (b"u", 10**6), (b"m", 10**3), (b"S", 1)):
        number = -int(-timeout_s * per_second // 1)
        if number <= _LARGEST_VALUE:
            return b"%d%s" % (max(number, 0), unit)
    return b"%dH" % min(-int(-timeout_s // 3600), _LARGEST_VALUE)


def decode_timeout(value: bytes) -> float:
    """Return the seconds of a ``grpc-timeout`` value; ValueError when it is not 1-8 digits and a unit."""
    unit = _UNIT_S.get(value[-1:])
    digits = value[:-1]
    if unit is None or not digits.isdigit() or len(digits) > _TIMEOUT_DIGITS_MAX:
        raise ValueError(f"not a timeout: {value[:32]!r}")
    return int(digits) * unit


_NAME = re.compile(rb"[0-9a-z_.\-]+")
_VALUE = re.compile(rb"[\x20-\x7e]*")


def encode_metadata(metadata: Metadata) -> Headers:
    """Return user metadata as header fields, in order.

    Raises:
        ValueError: a name is not gRPC's, or is reserved, or a text value is not printable ASCII.
    """
    return tuple(_encode_field(name, value) for name, value in metadata)


def _encode_field(name: str | bytes, value: str | bytes) -> tuple[bytes, bytes]:
    key = name.encode("ascii") if isinstance(name, str) else name
    raw = value.encode("utf-8") if isinstance(value, str) else value
    if not _NAME.fullmatch(key) or key.startswith(b"grpc-") or key in _RESERVED:
        raise ValueError(f"not a metadata name: {key!r}")
    if key.endswith(b"-bin"):
        return key, encode_binary(raw)
    if not _VALUE.fullmatch(raw):
        raise ValueError(f"metadata value of {key!r} is not printable ASCII; use a name that ends in -bin")
    return key, raw


_RESERVED = frozenset((b"te", b"content-type", b"user-agent", b"host", b"connection", b"content-length"))


def user_metadata(headers: Headers) -> dict[str, str | bytes]:
    """Return a request's or response's metadata by name; the last of equal names wins.

    HTTP's and gRPC's own fields are left out, except ``:authority`` and ``user-agent``, which handlers ask for.
    A value that is not UTF-8 stays bytes, so that a handler can refuse it; so does one of a ``-bin`` name.
    """
    found: dict[str, str | bytes] = {}
    for name, value in headers:
        if name in _HIDDEN or name.startswith(b"grpc-"):
            continue
        found[name.decode("latin-1")] = _decode_value(name, value)
    return found


_HIDDEN = frozenset((b":method", b":scheme", b":path", b":status", b"te", b"content-type"))


def _decode_value(name: bytes, value: bytes) -> str | bytes:
    try:
        return decode_binary(value) if name.endswith(b"-bin") else value.decode("utf-8")
    except ValueError:
        return value
