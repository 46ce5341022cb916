"""One LMDB file that is open: its environment, its buckets, and who reads it.

A database is exchanged under a running store by opening the new file, giving it the name of the old one, and handing
new readers the new environment. The old one lives on, without a name, until its last reader has gone, and no caller
waits.

    environment = Environment(path, map_size_bytes)     opened, buckets there
    environment.rename(path_of_the_database)             the file and LMDB's lock file beside it
    environment.retire()                                 closed after its last reader, on a thread of its own

Left out: what is read and written (``lmdb``), and the lock that keeps ``users`` right, which is the backend's.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import Final

import lmdb
from google_crc32c import value as crc32c

from raftkv.errors import CorruptionError, MapFullError, SpaceError, StorageError
from raftkv.storage import schema
from raftkv.storage.datadir import sync_directory

# -- seal -----------------------------------------------------------------------------------------------------------
#
# The seal: one checksum for all values without one of their own: the applied index, members, leases, users, alarms.
#
# Records of revisions carry a checksum each. The values of all other buckets are small, and read at the start or never
# again: a flipped bit in the applied index makes this member apply entries twice or leave them out, one in a lease or a
# role changes rights, on this member alone. So every transaction that writes also writes the *seal*, which is checked
# when the database is opened.
#
#     main database of LMDB     raftkv_seal  ->  transaction u64, inode u64, sum u32, CRC32C of these u32
#
# The sum is the XOR of one CRC32C for each value, so a change costs the old value and the new one, not a walk. It lies
# beside the buckets, because members of all versions hash and compare the contents of buckets.
#
# Versions that do not know the seal leave it as it is. So it counts only if the last transaction of this very file is
# the one that it names: numbers of transactions begin again in a compact copy, and with such a version a copy may reach
# the number in the seal of its source. A database without a valid seal, a copy too, is taken as it is and sealed by the
# next transaction; where its values are not those of the seal that it brings, a warning says so. The maker of such a
# copy knows whether its source was sealed, and compares the copy with that seal.
#
# Left out: the bucket of revisions, whose records are many.

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


def read_seal(txn: lmdb.Transaction, inode: int | None) -> int | None:
    """Return the sum that a database states of its values, ``None`` if it has no seal that counts.

    Arguments:
        txn: reads the last state.
        inode: of the file; None: of any, as of a file that was copied byte for byte.
    """
    data = txn.get(SEAL)
    if data is None or len(data) != _BODY.size + _SUM.size:
        return None
    if _SUM.unpack_from(data, _BODY.size)[0] != crc32c(data[: _BODY.size]):
        return None
    sealed_txn, sealed_inode, stated = _BODY.unpack_from(data)
    return int(stated) if sealed_txn == txn.id() and inode in (sealed_inode, None) else None


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


READERS_MAX: Final = 126
FILE_MODE: Final = 0o600
_META_PAGES: Final = 2
GROWTH_MAX_BYTES: Final = 1 << 30
"""More than a commit can add. A flipped bit in the number of the last page makes a small file seem larger than a quota,
and an alarm of this member stops the writes of all."""
FULL_BYTES: Final = 4 * 1024 * 1024
"""Free bytes below which an input/output error is taken for a write that was cut short for want of room."""
_closers: Final[set[threading.Thread]] = set()
"""Threads that close files after their last reader."""


class Environment:
    """An open LMDB file.

    Arguments:
        path: the database file; its directory exists.
        map_size_bytes: upper bound of the file, reserved as address space.
        read_only: look at a file that no process has open, and leave no trace.

    Attributes:
        raw: LMDB's own object.
        handles: of the buckets, by name.
        identity: tells the file from every other one, under any name.
        sealed_sum: what the file states of its values in its seal, if that counts.
        brought_sum: the same, if it would count in the file that this one may be a copy of.
        users: read transactions and copies that are open; changed under the backend's lock.

    Raises:
        StorageError: the file cannot be opened or is no database.
        CorruptionError: it was cut short, and is only looked at; or it is damaged.
    """

    def __init__(self, path: Path, map_size_bytes: int, *, read_only: bool = False) -> None:
        self.path = path
        self.users = 0
        self._read_only = read_only
        self._is_retired = False
        try:
            is_new = not read_only and not path.exists()
            self.raw = _opened(path, map_size_bytes, read_only)
            try:
                self._restore_length()
                if not read_only:
                    # LMDB gives its mode only to files it makes, and the umask changes it.
                    for name in (path, lock_path(path)):
                        name.chmod(FILE_MODE)
                    # Slots of processes that were killed: each keeps the pages of its state from being reused.
                    self.raw.reader_check()
                self.handles = self._open_buckets()
                self.identity = identity_of(path)
                self._inode = path.stat().st_ino
                with self.raw.begin() as txn:
                    self.sealed_sum = read_seal(txn, self._inode)
                    self.brought_sum = read_seal(txn, None)
                if is_new:
                    # Else a power cut could leave a member whose log was made after its database without the latter.
                    sync_directory(str(path.parent))
            except BaseException:
                self.raw.close()
                raise
        except (lmdb.Error, OSError) as error:
            raise declared(error, path, f"cannot open the database {path}") from error
        self._page_bytes = int(self.raw.stat()["psize"])
        self._sum = self.sealed_sum
        self._size_bytes = (self.raw.info()["last_pgno"] + 1) * self._page_bytes

    def _restore_length(self) -> None:
        """Let a file that was cut short read as zeros beyond its end: an error then, not the death of the process.

        One that is only looked at is refused.
        """
        size_bytes = (self.raw.info()["last_pgno"] + 1) * self.raw.stat()["psize"]
        found_bytes = self.path.stat().st_size
        if found_bytes >= size_bytes:
            return
        if self._read_only or size_bytes - found_bytes > GROWTH_MAX_BYTES:
            raise CorruptionError(f"the database {self.path} is cut short: {found_bytes} of {size_bytes} bytes")
        os.truncate(self.path, size_bytes)

    def _open_buckets(self) -> dict[bytes, lmdb._Database]:
        open_bucket = self.raw.open_db
        if self._read_only:
            return {name: open_bucket(name, create=False) for name in schema.BUCKETS}
        # All at once, before any reader: a read transaction sees only buckets that were there when it began.
        with self.raw.begin(write=True) as txn:
            found, stated = sum(1 for _ in txn.cursor()), txn.stat()["entries"]
            # A bucket that a damaged page no longer names would be made anew, empty.
            if found != stated:
                raise CorruptionError(f"the database {self.path} has {found} top entries, and should have {stated}")
            return {name: open_bucket(name, txn=txn) for name in schema.BUCKETS}

    @contextmanager
    def writing(self) -> Iterator[SealedTxn]:
        """Open a write transaction, which is sealed and committed at the end of the block."""
        before = self.sum_of_values()
        with self.raw.begin(write=True) as txn:
            sealed = SealedTxn(txn, self.handles, self._inode, before)
            yield sealed
            sealed.seal()
        # Only now: a transaction that found no room changed nothing.
        self._sum = sealed.sum

    @property
    def sum(self) -> int | None:
        """The sum in the seal of the last transaction; ``None`` if it has no valid one."""
        return self._sum

    def sum_of_values(self) -> int:
        """Return the sum of the values as they are now, for a file that this process alone writes."""
        return self._sum_of_values() if self._sum is None else self._sum

    def _sum_of_values(self) -> int:
        with self.raw.begin() as txn:
            return total((name, txn.cursor(self.handles[name])) for name in SEALED_BUCKETS)

    def measure(self) -> tuple[int, int]:
        """Return the bytes that the file takes and those that hold data.

        The first counts every page up to the last one ever used, free ones in between included.

        Raises:
            CorruptionError: the record of a bucket is damaged, or the number of the last page.
        """
        try:
            with self.raw.begin() as txn:
                pages = sum(_pages(txn.stat(handle)) for handle in self.handles.values())
                pages += _pages(self.raw.stat()) + _META_PAGES
        except lmdb.Error as error:
            raise CorruptionError(f"the database {self.path} cannot be read: {error}") from error
        size_bytes, before_bytes = (self.raw.info()["last_pgno"] + 1) * self._page_bytes, self._size_bytes
        if size_bytes - before_bytes > GROWTH_MAX_BYTES:
            raise CorruptionError(
                f"the database {self.path} is damaged: it claims {size_bytes} bytes, after {before_bytes}"
            )
        self._size_bytes = size_bytes
        return size_bytes, pages * self._page_bytes

    def rename(self, target: Path) -> None:
        """Give the file another name, durably: after a crash that name holds one of the two files, whole.

        LMDB works with what it has open, so it does not notice; its lock file goes along.

        Raises:
            OSError: before anything has changed, or after: ``path`` tells.
        """
        source, self.path = self.path, target
        try:
            os.replace(source, target)
        except OSError:
            self.path = source
            raise
        os.replace(lock_path(source), lock_path(target))
        sync_directory(str(target.parent))

    def retire(self) -> None:
        """Close it after its last reader. The lock of the backend is held."""
        self._is_retired = True
        self.left()

    def left(self) -> None:
        """Close it if it is retired and was left by its last reader. The lock of the backend is held."""
        if self._is_retired and not self.users:
            # To unmap a gigabyte and to free the blocks of its file takes longer than a turn of the loop may.
            closer = threading.Thread(target=lambda: self._close(closer), name="database-closer", daemon=True)
            _closers.add(closer)
            closer.start()

    def _close(self, closer: threading.Thread) -> None:
        self.raw.close()
        _closers.discard(closer)


def _opened(path: Path, map_size_bytes: int, read_only: bool) -> lmdb.Environment:
    def attempt() -> lmdb.Environment:
        return lmdb.open(
            os.fsencode(path),  # the binding takes no str of a name that is not UTF-8
            map_size=map_size_bytes,
            subdir=False,
            max_dbs=len(schema.BUCKETS) + 2,
            max_readers=READERS_MAX,
            max_spare_txns=2,
            mode=FILE_MODE,
            readonly=read_only,
            lock=not read_only,
            create=not read_only,
        )

    try:
        return attempt()
    except lmdb.Error:
        # The binding knows by its inode what is open. That of a file which is being closed may be this one's already.
        closers = list(_closers)
        if not closers:
            raise
        for closer in closers:
            closer.join()
        return attempt()


def lock_path(path: Path) -> Path:
    """Return the path of LMDB's reader table of a database file."""
    return path.with_name(path.name + "-lock")


def identity_of(path: Path) -> str:
    """Return what tells the file of this name from every other one that is there or open."""
    stat = path.stat()
    return f"{stat.st_dev}:{stat.st_ino}"


def _pages(stat: lmdb._StatDict) -> int:
    return stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]


def declared(error: Exception, path: Path, what: str = "", *, was_full: bool = False) -> StorageError:
    """Return a failure of LMDB or the system as an error of ours: one of space is a ``SpaceError``, wherever it is met.

    Arguments:
        error: an ``lmdb.Error`` or ``OSError``.
        path: of the file.
        what: what could not be done; empty: that the database failed.
        was_full: the disk had no room a moment ago.
    """
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    number = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
    if isinstance(error, lmdb.MapFullError):
        return MapFullError(f"no room in the map of the database {path}: {text}")
    if number in (errno.ENOSPC, errno.EDQUOT) or (number == errno.EIO and (was_full or _is_full(path))):
        return SpaceError(f"no room in the database {path}: {text}")
    return StorageError(f"{what or f'the database {path} failed'}: {text}")


def _is_full(path: Path) -> bool:
    """Return whether the disk has next to no room.

    LMDB writes pages with one call each run of them. Where the disk takes only a part, the call is no error; LMDB sees
    that it was short and says EIO, as of a broken disk (``mdb_page_flush``). Nothing of the transaction is in force.
    """
    try:
        stat = os.statvfs(path)
    except OSError:
        return False
    return stat.f_bavail * stat.f_frsize < FULL_BYTES
