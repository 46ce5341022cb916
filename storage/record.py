"""Sealed records: a KeyValue with its checksum, because LMDB notices no flipped bit.

    4 bytes    CRC32C, little-endian, over the revision key followed by the KeyValue
    n bytes    KeyValue (``key_value.py``)

The revision key is part of the checksum, so a record that turns up under another revision is refused as well. Every
read from disk verifies the checksum; a failure names the revision and is fatal for the member, which must never serve,
hash or copy what nobody wrote.
"""

from __future__ import annotations

import struct
from typing import Final

from google_crc32c import value as crc32c

from raftkv.errors import CorruptionError
from raftkv.storage.revision import describe

SEAL_BYTES: Final = 4

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
