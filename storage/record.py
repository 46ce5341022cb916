"""Sealed records: a KeyValue with its checksum, because LMDB notices no flipped bit.

    4 bytes    CRC32C, little-endian, over the revision key followed by the KeyValue
    n bytes    KeyValue (``key_value.py``)

The revision key is part of the checksum, so a record that turns up under another revision is refused as well. Every
read from disk verifies the checksum; a failure names the revision and is fatal for the member, which must never serve,
hash or copy what nobody wrote.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import add, ge
from typing import TYPE_CHECKING, Final

from google_crc32c import value as crc32c

from raftkv.errors import CorruptionError
from raftkv.storage import schema
from raftkv.storage.revision import KEY_BYTES, SUB_BITS, SUB_MASK, describe, from_key

if TYPE_CHECKING:
    from raftkv.storage.backend.base import ReadTxn

SEAL_BYTES: Final = 4
STEP_RECORDS: Final = 1_000
"""Records or keys of one step: about 2 ms."""

_SEPARATOR: Final = 0x5F  # "_"

_SEAL = struct.Struct("<I")
pack_seal: Final = _SEAL.pack
read_seal: Final = _SEAL.unpack_from


class CorruptRecordError(CorruptionError):
    """An error that names a revision whose record is missing or has the wrong checksum."""


def seal(revision_key: bytes, data: bytes) -> bytes:
    """Return the record to store for a serialized KeyValue.

    Arguments:
        revision_key: the key that the record is stored under, of 17 or 18 bytes.
        data: the KeyValue.
    """
    return pack_seal(crc32c(revision_key + data)) + data


def unseal(revision_key: bytes, record: bytes | None) -> bytes:
    """Return the serialized KeyValue of a record read from disk.

    Arguments:
        revision_key: the key that the record was read from.
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
    """Iterate over all records in order, some milliseconds of work at a time: revision keys, revisions, KeyValues.

    Raises:
        CorruptionError: one is not what was written, is missing, or is there twice.
    """
    revision = 0
    for items in read.runs(schema.KEY, STEP_RECORDS):
        revision_keys, records = zip(*items, strict=True)
        # Every record, read anyway: damage is found at the start, not when a client asks for the key.
        datas = _unseal_all(revision_keys, records)
        revisions = _revisions(revision_keys)
        # A damaged page may name one record twice, and the one in whose place it does not at all.
        if revision >= revisions[0] or any(map(ge, revisions, islice(revisions, 1, None))):
            raise CorruptionError(f"the records behind revision {describe(revision)} are not in order")
        revision = revisions[-1]
        yield revision_keys, revisions, datas


def _unseal_all(revision_keys: Sequence[bytes], records: Sequence[bytes]) -> list[bytes]:
    """``unseal`` for many."""
    datas = [record[SEAL_BYTES:] for record in records]
    seals = b"".join([record[:SEAL_BYTES] for record in records])
    if len(seals) == SEAL_BYTES * len(records):
        sums = map(crc32c, map(add, revision_keys, datas))
        if tuple(sums) == struct.unpack(f"<{len(records)}I", seals):
            return datas
    return list(map(unseal, revision_keys, records))  # which says what is wrong


def _revisions(revision_keys: Sequence[bytes]) -> list[int]:
    """``from_key`` for many."""
    joined = b"".join(revision_keys)
    # As long as there is no tombstone among them.
    if len(joined) == KEY_BYTES * len(revision_keys):
        parts = struct.unpack(">" + "QBQ" * len(revision_keys), joined)
        if max(parts[2::3]) <= SUB_MASK and parts[1::3].count(_SEPARATOR) == len(revision_keys):
            return [main << SUB_BITS | sub for main, sub in zip(parts[::3], parts[2::3], strict=True)]
    return list(map(from_key, revision_keys))
