"""A compact copy of a database that is still being written, until the copy replaces it.

    any thread          copy()            LMDB's own compacting copy of one commit; commits continue
    any thread          catch_up()        the changes committed since; repeat while there are many
    committing thread   finish()          the last changes, durably; then the copy gets the name of the database
    owner's thread      adopt()           readers and commits use the copy from here on

Commits wait only for ``finish``, which has little left to do. Most changes made meanwhile are found in the database
itself: records by their revision, because each is newer than all before it. ``commit`` notes only deletions and the
names of changed values, up to ``NOTED_MAX``.

Invariants:

- Until the rename in ``finish`` the database is unchanged; after a crash ``remove_leftovers`` removes the copy.
- The notes cover at least everything after the copied commit. They may cover more, because copying a change twice is
  harmless.
- After the rename, commits must not go to the old file, which has lost its name: a failure between the two stops the
  member.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import lmdb

from raftkv.errors import CorruptionError, InvariantError, StorageError
from raftkv.storage import schema
from raftkv.storage.backend.base import ReadTxn, WriteBatch
from raftkv.storage.backend.environment import Environment, declared, lock_path
from raftkv.storage.datadir import remove_unneeded
from raftkv.storage.failpoints import failpoint
from raftkv.storage.revision import unseal

if TYPE_CHECKING:
    from raftkv.storage.backend.lmdb import LMDBBackend

NOTED_MAX: Final = 2_000_000
"""Maximum number of noted deletions and values, about 100 bytes each. With more, the copy is cancelled."""
RECORDS_PER_COMMIT: Final = 2_000
BYTES_PER_COMMIT: Final = 4 * 1024 * 1024
"""Changes copied in one transaction, between two pauses."""
REST_S: Final = 0.001
"""Pause for other threads: the loop shares its processor with this thread."""


class Notes:
    """Changes that a copy cannot find in the database: deletions, and the names of changed values."""

    def __init__(self) -> None:
        self.deletes: list[bytes] = []
        self.values: dict[tuple[bytes, bytes], None] = {}

    def __len__(self) -> int:
        return len(self.deletes) + len(self.values)

    def add(self, batch: WriteBatch) -> None:
        """Note the changes of a batch other than its new records."""
        self.deletes += batch.deletes
        self.values.update(dict.fromkeys(batch.values))


class LMDBDefragmentation:
    """Implements ``Defragmentation``. Use ``LMDBBackend.defragment`` to create one.

    Arguments:
        path: path of the copy; it must not exist.
        database: engine whose file is exchanged.
    """

    def __init__(self, path: Path, database: LMDBBackend) -> None:
        self._path = path
        self._database = database
        self._copy: Environment | None = None
        self._closing = threading.Event()

    def copy(self) -> None:
        """Implement ``Defragmentation.copy``."""
        try:
            failpoint("defragBeforeCopy")
            self._database.copy_file(self._path, self._closing)
            failpoint("defragAfterCopy")
            self._copy = self._database.open_environment(self._path)
        except (lmdb.Error, OSError) as error:
            raise declared(error, self._path) from error

    def catch_up(self) -> int:
        """Implement ``Defragmentation.catch_up``."""
        copy = self._opened()
        source, notes = self._database.pin()
        try:
            brought = self._bring_records(copy, source)
            brought += self._bring_notes(copy, source, notes)
        except (lmdb.Error, OSError) as error:
            raise declared(error, self._path) from error
        finally:
            source.close()
        return brought

    def _opened(self) -> Environment:
        if self._copy is None:
            raise InvariantError("a copy that was not made cannot be caught up")
        return self._copy

    def _bring_records(self, copy: Environment, source: ReadTxn) -> int:
        handle = copy.handles[schema.KEY]
        with copy.raw.begin(db=handle) as txn, txn.cursor() as cursor:
            last = bytes(cursor.key()) if cursor.last() else b""
        # The next possible key: revisions ascend, and the key of a deletion has one byte more than that of a put.
        items = source.items(schema.KEY, last + b"\0" if last else b"")
        brought = 0
        while some := list(_some(items)):
            for key, record in some:
                unseal(key, record)
            self._rest()
            with copy.writing() as sealed, sealed.raw.cursor(handle) as cursor:
                cursor.putmulti(some, append=True, overwrite=False)
            brought += len(some)
        return brought

    def _bring_notes(self, copy: Environment, source: ReadTxn, notes: Notes) -> int:
        deletes, values = iter(notes.deletes), iter(notes.values)
        while keys := list(islice(deletes, RECORDS_PER_COMMIT)):
            self._rest()
            with copy.writing() as sealed:
                for key in keys:
                    sealed.raw.delete(key, db=copy.handles[schema.KEY])
        while names := list(islice(values, RECORDS_PER_COMMIT)):
            self._rest()
            with copy.writing() as sealed:
                for bucket, key in names:
                    sealed.put(bucket, key, source.get(bucket, key))
        return len(notes)

    def _rest(self) -> None:
        if self._closing.wait(REST_S):
            raise StorageError("the defragmentation was given up")

    def finish(self) -> None:
        """Implement ``Defragmentation.finish``."""
        copy, target = self._opened(), self._database.path
        self.catch_up()
        stated = self._database.sealed_sum
        if stated is not None and copy.sum_of_values() != stated:
            raise CorruptionError("its applied index, members, leases or users are not what was written")
        failpoint("defragBeforeRename")
        try:
            copy.rename(target)
        except OSError as error:
            if copy.path == target:
                raise InvariantError(f"{target} was exchanged, but that is not durable: {error.strerror}") from error
            raise declared(error, self._path) from error
        failpoint("defragAfterRename")

    def adopt(self) -> None:
        """Implement ``Defragmentation.adopt``."""
        self._database.adopt(self._opened())
        self._copy = None

    def close(self) -> None:
        """Implement ``Defragmentation.close``."""
        self._database.end_notes()
        if self._copy is not None:
            self._copy.raw.close()
            self._copy = None
        for path in (self._path, lock_path(self._path)):
            remove_unneeded(path)

    def give_up(self) -> None:
        """Implement ``Defragmentation.give_up``."""
        self._closing.set()


def _some(items: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Return the next items, as many as fit in one transaction."""
    size_bytes = 0
    for item in islice(items, RECORDS_PER_COMMIT):
        yield item
        size_bytes += len(item[1])
        if size_bytes > BYTES_PER_COMMIT:
            return
