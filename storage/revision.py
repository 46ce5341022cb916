"""Revisions: where a change stands in the history of the store, in memory and on disk.

A revision is a pair: ``main`` counts transactions, ``sub`` the changes within one. In memory it is one integer,
``main << 24 | sub``, because the index keeps millions of them and an integer below 2**60 takes 32 bytes where a
tuple of two takes 120. On disk it is the key of its record in the bucket ``key``, in etcd's form:

    00 00 00 00 00 00 00 05  5f  00 00 00 00 00 00 00 01        revision 5.1
    00 00 00 00 00 00 00 06  5f  00 00 00 00 00 00 00 00  74    revision 6.0, a tombstone ('t')

Both forms sort in the order of history. Zero stands for "no revision" (``main`` starts at 1).
"""

from __future__ import annotations

import struct
from typing import Final

from raftkv.errors import InvariantError

SUB_BITS: Final = 24
SUB_MASK: Final = (1 << SUB_BITS) - 1
"""Largest ``sub``: a transaction makes at most 16,777,216 changes."""

TOMBSTONE_MARK: Final = b"t"
KEY_BYTES: Final = 17

_FORM = struct.Struct(">QBQ")
_SEPARATOR: Final = 0x5F  # "_"
_read_form = _FORM.unpack_from
pack_key: Final = _FORM.pack
"""``pack_key(main, 95, sub)``: for callers on the hot path; others use ``to_key``."""


def pack(main: int, sub: int) -> int:
    """Return the integer form of a revision.

    Arguments:
        main: number of the transaction.
        sub: number of the change in it, from 0 to ``SUB_MASK``.

    Raises:
        InvariantError: ``sub`` does not fit.
    """
    if not 0 <= sub <= SUB_MASK:
        raise InvariantError(f"sub-revision {sub} of revision {main} is out of range")
    return main << SUB_BITS | sub


def to_key(revision: int) -> bytes:
    """Return the 17-byte key of a put at this packed revision."""
    return _FORM.pack(revision >> SUB_BITS, _SEPARATOR, revision & SUB_MASK)


def to_tombstone_key(revision: int) -> bytes:
    """Return the 18-byte key of a deletion at this packed revision."""
    return _FORM.pack(revision >> SUB_BITS, _SEPARATOR, revision & SUB_MASK) + TOMBSTONE_MARK


def from_key(key: bytes) -> int:
    """Return the packed revision of a key of either length.

    Raises:
        InvariantError: the bytes are not a revision key.
    """
    # The length alone accepts nearly every key; the full test is for tombstones and for bytes that are neither.
    if len(key) != KEY_BYTES and not is_well_formed(key):
        raise InvariantError(f"{key.hex()} is not a revision key")
    main, separator, sub = _read_form(key)
    if separator != _SEPARATOR or sub > SUB_MASK:
        raise InvariantError(f"{key.hex()} is not a revision key")
    return int(main << SUB_BITS | sub)


def is_well_formed(key: bytes) -> bool:
    """Return whether the bytes have the form of a revision key."""
    if len(key) < KEY_BYTES or key[8] != _SEPARATOR or key[KEY_BYTES:] not in (b"", TOMBSTONE_MARK):
        return False
    return bool(_read_form(key)[2] <= SUB_MASK)


def is_tombstone(key: bytes) -> bool:
    """Return whether a revision key marks a deletion."""
    return len(key) > KEY_BYTES


def describe(revision: int | bytes) -> str:
    """Return a packed revision or a revision key as people write it: ``5.1``; ``6.0(t)`` for a tombstone's key."""
    if isinstance(revision, int):
        return f"{revision >> SUB_BITS}.{revision & SUB_MASK}"
    if not is_well_formed(revision):
        return revision.hex()
    main, _, sub = _read_form(revision)
    return f"{main}.{sub}{'(t)' if is_tombstone(revision) else ''}"
