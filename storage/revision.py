"""Revisions: the position of a change in the history of the store, in memory and on disk; and sealed records.

A revision is a pair: ``main`` counts transactions, ``sub`` the changes within one. In memory it is one integer,
``main << 24 | sub``, because the index keeps millions of them and an integer below 2**60 takes 32 bytes where a
tuple of two takes 120. On disk it is the key of its record in the bucket ``key``, in etcd's form:

    00 00 00 00 00 00 00 05  5f  00 00 00 00 00 00 00 01        revision 5.1
    00 00 00 00 00 00 00 06  5f  00 00 00 00 00 00 00 00  74    revision 6.0, a tombstone ('t')

Both forms sort in the order of history. Zero stands for "no revision" (``main`` starts at 1).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import add, ge
from typing import TYPE_CHECKING, Final

from google_crc32c import value as crc32c

from raftkv.errors import CorruptionError, InvariantError
from raftkv.storage import schema

if TYPE_CHECKING:
    from raftkv.storage.backend.base import ReadTxn

SUB_BITS: Final = 24
SUB_MASK: Final = (1 << SUB_BITS) - 1
"""Largest ``sub``: a transaction makes at most 16,777,216 changes."""

TOMBSTONE_MARK: Final = b"t"
KEY_BYTES: Final = 17

_FORM = struct.Struct(">QBQ")
_SEPARATOR: Final = 0x5F  # "_"
_read_form = _FORM.unpack_from
pack_key: Final = _FORM.pack
"""``pack_key(main, 95, sub)``: for callers on the hot path; other callers use ``to_key``."""


def pack(main: int, sub: int) -> int:
    """Return the integer form of a revision.

    Arguments:
        main: number of the transaction.
        sub: number of the change within it, from 0 to ``SUB_MASK``.

    Raises:
        InvariantError: ``sub`` does not fit.
    """
    if not 0 <= sub <= SUB_MASK:
        raise InvariantError(f"sub-revision {sub} of revision {main} is out of range")
    return main << SUB_BITS | sub


def after(main: int) -> int:
    """Return the packed revision that follows all changes of a main revision."""
    return (main + 1) << SUB_BITS


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
    # Nearly every key is accepted by its length alone; the full test is for tombstones and for malformed keys.
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
    """Return the readable form of a packed revision or a revision key: ``5.1``; ``6.0(t)`` for a tombstone's key."""
    if isinstance(revision, int):
        return f"{revision >> SUB_BITS}.{revision & SUB_MASK}"
    if not is_well_formed(revision):
        return revision.hex()
    main, _, sub = _read_form(revision)
    return f"{main}.{sub}{'(t)' if is_tombstone(revision) else ''}"


# -- record ---------------------------------------------------------------------------------------------------------
#
# Sealed records: a KeyValue with its checksum, because LMDB does not detect flipped bits.
#
#     4 bytes    CRC32C, little-endian, over the revision key followed by the KeyValue
#     n bytes    KeyValue (``key_value.py``)
#
# The revision key is part of the checksum, so a record found under another revision is refused as well. Every read from
# disk verifies the checksum, and a failure names the revision: damaged data must never be served, hashed or copied.

SEAL_BYTES: Final = 4
STEP_RECORDS: Final = 1_000
"""Records or keys per step: about 2 ms."""


_SEAL = struct.Struct("<I")
pack_seal: Final = _SEAL.pack
read_seal: Final = _SEAL.unpack_from


class CorruptRecordError(CorruptionError):
    """An error that names a revision whose record is missing or has the wrong checksum."""


def seal(revision_key: bytes, data: bytes) -> bytes:
    """Return the record to store for a serialized KeyValue.

    Arguments:
        revision_key: the key of the record, of 17 or 18 bytes.
        data: the KeyValue.
    """
    return pack_seal(crc32c(revision_key + data)) + data


def unseal(revision_key: bytes, record: bytes | None) -> bytes:
    """Return the serialized KeyValue of a record read from disk.

    Arguments:
        revision_key: the key of the record.
        record: its bytes; ``None`` if there are none.

    Raises:
        CorruptRecordError: the record is absent, too short, or not what ``seal`` made for this revision.
    """
    if record is None:
        raise CorruptRecordError(f"record of revision {describe(revision_key)} is missing")
    data = record[4:]
    if len(record) < SEAL_BYTES or read_seal(record)[0] != crc32c(revision_key + data):
        raise CorruptRecordError(f"record of revision {describe(revision_key)} is corrupt: its checksum is wrong")
    return data


def checked_runs(read: ReadTxn) -> Iterator[tuple[Sequence[bytes], list[int], list[bytes]]]:
    """Iterate over all records in order, in runs of a few milliseconds: revision keys, revisions, KeyValues.

    Raises:
        CorruptionError: a record is damaged, missing, or stored twice.
    """
    revision = 0
    for items in read.runs(schema.KEY, STEP_RECORDS):
        revision_keys, records = zip(*items, strict=True)
        # All records are checked here, because all are read anyway: damage is found at the start, not when a client
        # reads the key.
        datas = _unseal_all(revision_keys, records)
        revisions = _revisions(revision_keys)
        # With a damaged page, one record may appear twice, in the place of a missing one.
        if revision >= revisions[0] or any(map(ge, revisions, islice(revisions, 1, None))):
            raise CorruptionError(f"the records behind revision {describe(revision)} are not in order")
        revision = revisions[-1]
        yield revision_keys, revisions, datas


def _unseal_all(revision_keys: Sequence[bytes], records: Sequence[bytes]) -> list[bytes]:
    """Apply ``unseal`` to many records."""
    datas = [record[SEAL_BYTES:] for record in records]
    seals = b"".join([record[:SEAL_BYTES] for record in records])
    if len(seals) == SEAL_BYTES * len(records):
        sums = map(crc32c, map(add, revision_keys, datas))
        if tuple(sums) == struct.unpack(f"<{len(records)}I", seals):
            return datas
    return list(map(unseal, revision_keys, records))  # ``unseal`` raises the error


def _revisions(revision_keys: Sequence[bytes]) -> list[int]:
    """Apply ``from_key`` to many keys."""
    joined = b"".join(revision_keys)
    # Only if there is no tombstone among them.
    if len(joined) == KEY_BYTES * len(revision_keys):
        parts = struct.unpack(">" + "QBQ" * len(revision_keys), joined)
        if max(parts[2::3]) <= SUB_MASK and parts[1::3].count(_SEPARATOR) == len(revision_keys):
            return [main << SUB_BITS | sub for main, sub in zip(parts[::3], parts[2::3], strict=True)]
    return list(map(from_key, revision_keys))
