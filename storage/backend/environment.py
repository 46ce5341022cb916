"""One open LMDB file: its environment, its buckets, and its users.

A database is exchanged under a running store by opening the new file, renaming it to the old one, and giving new
readers the new environment. The old environment remains, without a file name, until its last reader ends; no caller
waits.

    environment = Environment(path, map_size_bytes)     opened, with all buckets
    environment.rename(path_of_the_database)             renames the file and LMDB's lock file
    environment.retire()                                 closed after its last reader, on a separate thread

Not here: reads and writes (``lmdb``), and the lock that protects ``users``, which belongs to the backend.
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
from raftkv.storage.datadir import NO_FALLOCATE, sync_directory

# -- seal -----------------------------------------------------------------------------------------------------------
#
# The seal: one checksum for all values without their own: the applied index, members, leases, users, alarms.
#
# Each record of a revision has a checksum. The values of all other buckets are small, and read at the start or never
# again. A flipped bit in the applied index would make this member apply entries twice or skip them; a flipped bit in a
# lease or a role would change rights on this member alone. So every write transaction also writes the *seal*, which is
# checked when the database is opened.
#
#     main database of LMDB     raftkv_seal  ->  transaction u64, inode u64, sum u32, CRC32C of these u32
#
# The sum is the XOR of one CRC32C per value, so a change costs the checksums of the old and the new value, not a scan.
# The seal is not in a bucket, because members of all versions hash and compare the contents of buckets.
#
# Versions that do not know the seal do not update it. So it is valid only if it names the last transaction of this very
# file: transaction numbers start again in a compact copy, and an old version may bring a copy to the number in the seal
# of its source. A database without a valid seal, also a copy, is accepted as it is and sealed by the next transaction;
# if its values do not match the seal that it has, a warning is logged. The maker of such a copy knows whether its
# source was sealed, and compares the copy with that seal.
#
# Not covered: the bucket of revisions, which has very many records.

SEAL: Final = b"raftkv_seal"
SEALED_BUCKETS: Final = tuple(bucket for bucket in schema.BUCKETS if bucket != schema.KEY)

_BODY: Final = Struct("<QQI")
_SUM: Final = Struct("<I")


def sum_of(bucket: bytes, key: bytes, value: bytes) -> int:
    """Return the contribution of one value to the sum."""
    checksum: int = crc32c(b"%b %d " % (bucket, len(key)) + key + value)
    return checksum


def total(values: Iterable[tuple[bytes, Iterable[tuple[bytes, bytes]]]]) -> int:
    """Return the sum of whole buckets, each given as its name and its items."""
    found = 0
    for bucket, items in values:
        for key, value in items:
            found ^= sum_of(bucket, key, value)
    return found


def read_seal(txn: lmdb.Transaction, inode: int | None, main: lmdb._Database | None = None) -> int | None:
    """Return the sum in the seal of a database; ``None`` if it has no valid seal.

    Arguments:
        txn: read transaction of a state.
        inode: inode of the file; ``None``: accept any, for a file that was copied byte for byte.
        main: handle of the main database; ``None``: the transaction's default.
    """
    data = txn.get(SEAL, db=main)
    if data is None or len(data) != _BODY.size + _SUM.size:
        return None
    if _SUM.unpack_from(data, _BODY.size)[0] != crc32c(data[: _BODY.size]):
        return None
    sealed_txn, sealed_inode, stated = _BODY.unpack_from(data)
    return int(stated) if sealed_txn == txn.id() and inode in (sealed_inode, None) else None


def copied_sum(txn: lmdb.Transaction) -> int | None:
    """Return the sum in the seal that a compact copy has from its source; ``None`` if it has none.

    Arguments:
        txn: read transaction of the copy.

    Raises:
        CorruptionError: the seal itself is damaged.
    """
    data = txn.get(SEAL)
    if data is None:
        return None
    if len(data) != _BODY.size + _SUM.size or _SUM.unpack_from(data, _BODY.size)[0] != crc32c(data[: _BODY.size]):
        raise CorruptionError("its seal is not what was written")
    return int(_BODY.unpack_from(data)[2])


class SealedTxn:
    """The values of one write transaction, and their effect on the sum.

    Arguments:
        txn: the write transaction.
        handles: handles of the buckets, by name.
        inode: inode of the file.
        before: sum of the existing values.

    Attributes:
        sum: sum of the current values.
    """

    def __init__(self, txn: lmdb.Transaction, handles: Mapping[bytes, lmdb._Database], inode: int, before: int) -> None:
        self.raw = txn
        self.sum = before
        self._handles = handles
        self._inode = inode

    def put(self, bucket: bytes, key: bytes, value: bytes | None) -> None:
        """Put or, for ``None``, delete a value of any bucket except the bucket of revisions."""
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
READERS_BYTES: Final = 12288
"""Size of the reader table: more than LMDB's header and ``READERS_MAX`` slots of a cache line (64 bytes) each."""
READERS_MIN_BYTES: Final = 64 * READERS_MAX
"""A table is never smaller: without room reserved for it, LMDB itself makes one of the slots and its header."""
FILE_MODE: Final = 0o600
_META_PAGES: Final = 2
FULL_BYTES: Final = 4 * 1024 * 1024
"""Free bytes on the disk below which an input/output error is treated as a write that was cut short by a full disk."""
_DAMAGE: Final = (
    *(lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.MapResizedError),
)
"""Errors of LMDB over the contents of a file; the last one if it claims more than its map, which no process resizes."""
_closers: Final[set[threading.Thread]] = set()
"""Threads that are closing files after their last reader."""


class Environment:
    """An open LMDB file.

    Arguments:
        path: the database file; its directory exists.
        map_size_bytes: upper bound of the file, reserved as address space.
        read_only: read a file that no process has open, without changing anything.

    Attributes:
        raw: LMDB's own object.
        handles: handles of the buckets, by name.
        identity: identifies the file, independent of its name.
        sealed_sum: sum in the seal of the file, if the seal is valid.
        main: handle of the main database, which has the seal.
        users: number of open read transactions and copies; changed under the backend's lock.

    Raises:
        StorageError: the file cannot be opened.
        CorruptionError: the file is damaged or is not a database, or is opened read-only and truncated.
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
                    # LMDB applies its mode only to files that it creates, and the umask changes it.
                    for name in (path, lock_path(path)):
                        name.chmod(FILE_MODE)
                    # Clear reader slots of killed processes: each prevents the pages of its state from being reused.
                    self.raw.reader_check()
                self.handles = self._open_buckets()
                self.main = self.raw.open_db()
                self.identity = identity_of(path)
                self._inode = path.stat().st_ino
                with self.raw.begin() as txn:
                    self.sealed_sum = read_seal(txn, self._inode)
                if is_new:
                    # Otherwise a member whose log was created after its database could lose the database in a power
                    # cut.
                    sync_directory(str(path.parent))
            except BaseException:
                self.raw.close()
                raise
        except (lmdb.Error, OSError) as error:
            what = f"cannot open the database {path}"
            if getattr(error, "code", None) == errno.ENOMEM:
                what += f": {map_size_bytes >> 30:,} GiB of address space are needed (ulimit -v)"
            raise declared(error, path, what) from error
        self._page_bytes = int(self.raw.stat()["psize"])
        self.sum = self.sealed_sum
        """The sum in the seal of the last transaction; ``None`` if there is no valid seal."""
        self._last = self._last_state()

    def _restore_length(self) -> None:
        """Extend a file without the free pages at its end, so that a reader there does not kill the process.

        Whether they are free, ``check_pages`` has found out. A read-only file is refused instead.
        """
        size_bytes = (self.raw.info()["last_pgno"] + 1) * self.raw.stat()["psize"]
        found_bytes = self.path.stat().st_size
        if found_bytes >= size_bytes:
            return
        if self._read_only:
            raise CorruptionError(f"the database {self.path} is cut short: {found_bytes} of {size_bytes} bytes")
        os.truncate(self.path, size_bytes)

    def _open_buckets(self) -> dict[bytes, lmdb._Database]:
        open_bucket = self.raw.open_db
        if self._read_only:
            return {name: open_bucket(name, create=False) for name in schema.BUCKETS}
        # All at once, before any reader: a read transaction sees only buckets that existed when it began.
        with self.raw.begin(write=True) as txn:
            found, stated = sum(1 for _ in txn.cursor()), txn.stat()["entries"]
            # A bucket that is missing because of a damaged page would be created again, empty.
            if found != stated:
                raise CorruptionError(f"the database {self.path} has {found} top entries, and should have {stated}")
            return {name: open_bucket(name, txn=txn) for name in schema.BUCKETS}

    @contextmanager
    def writing(self) -> Iterator[SealedTxn]:
        """Open a write transaction, which is sealed and committed at the end of the block.

        Raises:
            CorruptionError: the last state in the file is not the one that this process left there.
        """
        before = self.sum_of_values()
        with self.raw.begin(write=True) as txn:
            # LMDB continues behind the last page that the file claims. With a damaged number the file would seem larger
            # than the quota, and the resulting alarm of this member would stop the writes of all members.
            if (found := self._last_state()) != self._last:
                text = "its last transaction and page are {} and {}, and were written as {} and {}"
                raise CorruptionError(f"the database {self.path} is damaged: {text.format(*found, *self._last)}")
            sealed = SealedTxn(txn, self.handles, self._inode, before)
            yield sealed
            sealed.seal()
        # Only after the commit: a transaction that found no space changed nothing.
        self.sum = sealed.sum
        self._last = self._last_state()

    def _last_state(self) -> tuple[int, int]:
        """Return the numbers of the last transaction and the last page, as the file has them."""
        info = self.raw.info()
        return int(info["last_txnid"]), int(info["last_pgno"])

    def sum_of_values(self) -> int:
        """Return the sum of the current values, for a file that only this process writes."""
        if self.sum is not None:
            return self.sum
        with self.raw.begin() as txn:
            return total((name, txn.cursor(self.handles[name])) for name in SEALED_BUCKETS)

    def measure(self) -> tuple[int, int]:
        """Return the bytes that the file takes, and the bytes that hold data.

        The first counts every page up to the last one ever used, including free pages in between.

        Raises:
            CorruptionError: the record of a bucket is damaged.
        """
        try:
            with self.raw.begin() as txn:
                pages = sum(_pages(txn.stat(handle)) for handle in self.handles.values())
                pages += _pages(self.raw.stat()) + _META_PAGES
        except lmdb.Error as error:
            raise CorruptionError(f"the database {self.path} cannot be read: {error}") from error
        return (self._last[1] + 1) * self._page_bytes, pages * self._page_bytes

    def rename(self, target: Path) -> None:
        """Rename the file, durably: after a crash the new name refers to one of the two files, complete.

        LMDB works with the open descriptors, so it does not notice; its lock file is renamed too.

        Raises:
            OSError: before or after the rename; ``path`` shows which.
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
        """Close the environment after its last reader. The caller holds the backend's lock."""
        self._is_retired = True
        self.left()

    def left(self) -> None:
        """Close the environment if it is retired and its last reader has ended. The caller holds the backend's lock."""
        if self._is_retired and not self.users:
            # Unmapping a gigabyte and freeing the blocks of its file takes longer than a turn of the loop should.
            closer = threading.Thread(target=lambda: self._close(closer), name="database-closer", daemon=True)
            _closers.add(closer)
            closer.start()

    def _close(self, closer: threading.Thread) -> None:
        self.raw.close()
        _closers.discard(closer)


def _opened(path: Path, map_size_bytes: int, read_only: bool) -> lmdb.Environment:
    def attempt() -> lmdb.Environment:
        return lmdb.open(
            os.fsencode(path),  # the binding does not accept a str that is not UTF-8
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

    if not read_only:
        _allocate_readers(lock_path(path))
    try:
        return attempt()
    except lmdb.Error:
        # The binding recognises open files by inode. A file that is being closed may have had this file's inode.
        closers = list(_closers)
        if not closers:
            raise
        for closer in closers:
            closer.join()
        return attempt()


def _allocate_readers(path: Path) -> None:
    """Reserve the blocks of LMDB's reader table, whose holes would be a SIGBUS on a full disk: a map writes them.

    Does not open an allocated table: closing the descriptor would drop the locks of this process on the file.

    Raises:
        OSError: the disk has no room.
    """
    found = path.stat() if path.exists() else None
    if found is not None and found.st_blocks * 512 >= max(found.st_size, READERS_BYTES):
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        os.posix_fallocate(descriptor, 0, max(os.fstat(descriptor).st_size, READERS_BYTES))
    except OSError as error:
        if error.errno not in NO_FALLOCATE:
            raise
    finally:
        os.close(descriptor)


def lock_path(path: Path) -> Path:
    """Return the path of LMDB's reader table of a database file."""
    return path.with_name(path.name + "-lock")


def identity_of(path: Path) -> str:
    """Return an identifier of the file at this path, different from those of all other existing or open files."""
    stat = path.stat()
    return f"{stat.st_dev}:{stat.st_ino}"


def _pages(stat: lmdb._StatDict) -> int:
    return stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]


def declared(error: Exception, path: Path, what: str = "", *, was_full: bool = False) -> StorageError | CorruptionError:
    """Convert a failure of LMDB or the system into one of our errors: of lack of space, of damage, or another.

    Arguments:
        error: an ``lmdb.Error`` or ``OSError``.
        path: the file.
        what: what could not be done; empty: the database failed.
        was_full: whether the disk was full a moment ago.
    """
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error).removeprefix(f"{path}: ")
    number = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
    if isinstance(error, _DAMAGE):
        return CorruptionError(f"the database {path} is damaged{what and ', or is no database'}: {text}")
    if isinstance(error, lmdb.MapFullError):
        return MapFullError(f"no room in the map of the database {path}: {text}")
    if number in (errno.ENOSPC, errno.EDQUOT) or (number == errno.EIO and (was_full or _is_full(path))):
        return SpaceError(f"no room in the database {path}: {text}")
    return StorageError(f"{what or f'the database {path} failed'}: {text}")


def _is_full(path: Path) -> bool:
    """Return whether the disk is almost full.

    LMDB writes each run of pages with one call. Where the disk accepts only a part, the call returns no error; LMDB
    sees the short write and reports EIO, as for a broken disk (``mdb_page_flush``). The transaction has no effect then.
    """
    try:
        stat = os.statvfs(path)
    except OSError:
        return False
    return stat.f_bavail * stat.f_frsize < FULL_BYTES
