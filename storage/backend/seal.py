"""One checksum for all that has none of its own: how far the log is applied, members, leases, users, alarms.

Records of revisions carry a checksum each. The values of all other buckets are small, and read at the start or never
again: a flipped bit in the applied index has entries applied twice or left out, one in a lease or a role changes who
may do what, and only on this member. So every transaction that writes also writes the *seal*, which is checked when
the database is opened.

    main database of LMDB     raftkv_seal  ->  transaction u64, inode u64, sum u32, CRC32C of these u32

The sum is the XOR of one CRC32C for each value, so a change costs the old value and the new one, not a walk. It lies
beside the buckets, because what is in a bucket is hashed and compared by members of all versions.

Versions that do not know the seal leave it as it is. So it counts only if the last transaction of this very file is
the one that it names: numbers of transactions begin again in a compact copy, and with such a version one may come to
the number that the seal of its source has. A database without a seal that counts, a copy too, is taken as it is, and
sealed by the next transaction.

Whoever makes such a copy knows whether its source was sealed, and compares the copy with the seal that came along.

Left out: the bucket of revisions, whose records are many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import Struct
from typing import Final

import lmdb
from google_crc32c import value as crc32c

from raftkv.errors import CorruptionError
from raftkv.storage import schema

SEAL: Final = b"raftkv_seal"
SEALED_BUCKETS: Final = tuple(bucket for bucket in schema.BUCKETS if bucket != schema.KEY)

_BODY: Final = Struct("<QQI")
_SUM: Final = Struct("<I")


def sum_of(bucket: bytes, key: bytes, value: bytes) -> int:
    """Return the part of one value in the sum."""
    checksum: int = crc32c(b"%b %d " % (bucket, len(key)) + key + value)
    return checksum


def total(values: Iterable[tuple[bytes, Iterable[tuple[bytes, bytes]]]]) -> int:
    """Return the sum of whole buckets, each given as its name and its items."""
    found = 0
    for bucket, items in values:
        for key, value in items:
            found ^= sum_of(bucket, key, value)
    return found


def read_seal(txn: lmdb.Transaction, inode: int) -> int | None:
    """Return the sum that a database states of its values, ``None`` if it has no seal that counts.

    Arguments:
        txn: reads the last state.
        inode: of the file.
    """
    data = txn.get(SEAL)
    if data is None or len(data) != _BODY.size + _SUM.size:
        return None
    if _SUM.unpack_from(data, _BODY.size)[0] != crc32c(data[: _BODY.size]):
        return None
    sealed_txn, sealed_inode, stated = _BODY.unpack_from(data)
    return int(stated) if (sealed_txn, sealed_inode) == (txn.id(), inode) else None


def copied_sum(txn: lmdb.Transaction) -> int | None:
    """Return the sum that a compact copy of a sealed database brings along; ``None`` if it has none.

    Arguments:
        txn: reads the copy.

    Raises:
        CorruptionError: the seal itself is not what was written.
    """
    data = txn.get(SEAL)
    if data is None:
        return None
    if len(data) != _BODY.size + _SUM.size or _SUM.unpack_from(data, _BODY.size)[0] != crc32c(data[: _BODY.size]):
        raise CorruptionError("its seal is not what was written")
    return int(_BODY.unpack_from(data)[2])


class SealedTxn:
    """The values of one write transaction, and what they make of the sum.

    Arguments:
        txn: writes.
        handles: of the buckets, by name.
        inode: of the file.
        before: the sum of what is there.

    Attributes:
        sum: of what is there now.
    """

    def __init__(self, txn: lmdb.Transaction, handles: Mapping[bytes, lmdb._Database], inode: int, before: int) -> None:
        self.raw = txn
        self.sum = before
        self._handles = handles
        self._inode = inode

    def put(self, bucket: bytes, key: bytes, value: bytes | None) -> None:
        """Put or, for ``None``, delete a value of any bucket but that of the revisions."""
        txn, handle = self.raw, self._handles[bucket]
        old = txn.get(key, db=handle)
        if old is not None:
            self.sum ^= sum_of(bucket, key, bytes(old))
        if value is None:
            txn.delete(key, db=handle)
        else:
            txn.put(key, value, db=handle)
            self.sum ^= sum_of(bucket, key, value)

    def seal(self) -> None:
        """Write the seal; the last change of the transaction."""
        body = _BODY.pack(self.raw.id(), self._inode, self.sum)
        self.raw.put(SEAL, body + _SUM.pack(crc32c(body)))
