"""The layer between memory and disk: the batch being filled, the batch being committed, and a read transaction below.

Writes go into ``pending`` when they are applied and are visible at once. ``commit`` passes the whole batch to the
writer (another thread in production) and starts an empty one. Until the writer reports the commit, the records stay
readable here:

    put 9 ---> pending       7 8 9      being filled                       read 1st
                 | commit
                 v
               committing    4 5 6      with the writer, on its thread     read 2nd
                  | durable: the read transaction is renewed, then the batch is dropped
                  v
               LMDB          1 2 3      as of the last commit              read 3rd

When the report arrives, the read transaction is renewed before the committed batch is dropped, so every revision can be
found at any time. At most one batch is in flight; all changes made meanwhile go into the next one. No method waits.

A log entry is always in one batch as a whole, with the applied index that ``stamp`` adds; otherwise a restart would
apply it twice. So the first change after an applied index opens a *unit* (``is_changing``), the next applied index
closes it, and no batch is submitted in between. Commits requested meanwhile happen at the end of the unit. If an entry
fails, its unit is never closed, and ``poison`` marks that: nothing more goes to disk, and the log has the lost changes.

    set_applied(6)    put  put  delete    set_applied(7)
    --------+------------------------------+-------->
            |<--- a unit: entry 7 -------->|
            |     commit() waits           | commit: a batch with entry 7 and "applied 7"

When the LMDB map is full, it is grown as soon as this module has the only reader, and the batch is retried. When the
disk is full (``SpaceError``), the batch stays in place, readable, and the next ``commit`` retries it. Every other
failure goes to ``on_fatal``: after a failed write the state of the disk is unknown, so the member stops.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Final

from google_crc32c import value as crc32c

from raftkv.errors import CorruptionError, InvariantError, MapFullError, SpaceError, StorageError
from raftkv.storage import schema
from raftkv.storage.backend.base import Backend, WriteBatch
from raftkv.storage.backend.lmdb import Writer
from raftkv.storage.failpoints import failpoint
from raftkv.storage.revision import (
    SEAL_BYTES,
    SUB_BITS,
    SUB_MASK,
    CorruptRecordError,
    describe,
    pack_key,
    read_seal,
    unseal,
)

_SEPARATOR: Final = 0x5F  # "_"
FREED_AT_ONCE = 20_000
"""Number of objects that are freed immediately; more are freed gradually."""
_FREED_IN_A_ROW = 500
SIZE_MAX_BYTES = 1 << 62
"""No limit."""


class Overlay:
    """The uncommitted changes of a store, readable on top of its backend."""

    def __init__(
        self,
        backend: Backend,
        writer: Writer,
        stamp: Callable[[WriteBatch], Callable[[], None]],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Start with the last committed state.

        Arguments:
            backend: the engine.
            writer: carries out commits, one at a time.
            stamp: adds the applied index and related values to a batch before its commit; the returned function is
                called when the batch is durable.
            on_fatal: called with a failure after which the member must stop.
        """
        self._backend = backend
        self._writer = writer
        self._stamp = stamp
        self._on_fatal = on_fatal
        self._read = backend.begin_read()
        # Bound once per read transaction: this call is most of the cost of a read.
        self._get_record = self._read.get_record
        self.pending = WriteBatch()
        self._committing: WriteBatch | None = None
        # Keys of the records in each batch, as far as they were needed: a long history is read in many steps.
        self._pending_keys: list[bytes] = []
        self._committing_keys: list[bytes] = []
        self._on_durable: Callable[[], None] = _nothing
        self.is_busy = False
        """Whether the writer has a batch or another job."""
        self._commit_again = False
        self._touched = False
        # Callers of ``flush``, each with the number of the batch that it waits for, ascending. Batches are numbered in
        # order: ``_filling`` is the one being filled, ``_durable`` the last one on disk.
        self._waiters: deque[tuple[int, Callable[[], None]]] = deque()
        self._filling = 1
        self._durable = 0
        self.space_error: SpaceError | None = None
        self.closed = False
        self.is_changing = False
        """Whether a unit is open. Set by code that makes a change; cleared only by ``end_unit``."""
        self.is_poisoned = False
        self._wanted = False

    def end_unit(self) -> None:
        """Close the unit: the stamp now describes the changes, so they may be committed.

        Raises:
            InvariantError: the store is poisoned.
        """
        if self.is_poisoned:
            raise InvariantError("the store is poisoned: an entry failed while it was applied")
        # An entry without changes also moves the applied index, which must reach the disk.
        self._touched = True
        self.is_changing = False
        if self._wanted:
            self._wanted = False
            self.commit()

    def poison(self) -> None:
        """Stop all commits, because an entry failed halfway."""
        self.is_poisoned = self.is_changing = True

    def load(self, revision_key: bytes) -> bytes:
        """Return the KeyValue of a revision known to the index.

        Raises:
            CorruptRecordError: the record cannot be read or is damaged.
        """
        # A revision is written once and never changed, so the three places cannot disagree: the first match is right.
        record = self.pending.records.get(revision_key)
        if record is None and self._committing is not None:
            record = self._committing.records.get(revision_key)
        # Records in memory were made by this process: only records from the disk need their checksum verified.
        if record is not None:
            return record[SEAL_BYTES:]
        try:
            record = self._get_record(revision_key)
        except Exception as error:
            raise CorruptRecordError(f"revision {describe(revision_key)} cannot be read: {error}") from error
        return unseal(revision_key, record)

    def load_all(self, revisions: Iterable[int], size_bytes_max: int = SIZE_MAX_BYTES) -> list[bytes]:
        """Return the KeyValues of packed revisions known to the index: ``load`` for many, with its calls inlined.

        Arguments:
            revisions: packed revisions.
            size_bytes_max: stop once this many bytes are loaded.

        Raises:
            CorruptRecordError: as in ``load``.
        """
        pending = self.pending.records.get
        # Without a batch in flight the same table is looked up twice, which costs less than a branch per revision.
        committing = (self._committing or self.pending).records.get
        get_record = self._get_record
        found: list[bytes] = []
        room = size_bytes_max
        for revision in revisions:
            if room < 0:
                break
            key = pack_key(revision >> SUB_BITS, _SEPARATOR, revision & SUB_MASK)
            record = pending(key) or committing(key)
            if record is not None:
                found.append(record[SEAL_BYTES:])
                room -= len(record)
                continue
            try:
                record = get_record(key) or b""
                room -= len(record)
                data = record[SEAL_BYTES:]
                intact = read_seal(record)[0] == crc32c(key + data)
            except Exception:
                intact = False
            found.append(data if intact else self.load(key))  # ``load`` raises the error
        return found

    def size_bytes(self, revision: int) -> int:
        """Return the size of the record of a packed revision known to the index, without checking it.

        Raises:
            CorruptRecordError: the record cannot be read.
        """
        key = pack_key(revision >> SUB_BITS, _SEPARATOR, revision & SUB_MASK)
        record = self.pending.records.get(key) or (self._committing or self.pending).records.get(key)
        try:
            return len(record or self._get_record(key) or b"")
        except Exception as error:
            raise CorruptRecordError(f"revision {describe(key)} cannot be read: {error}") from error

    def discard(self, revision_key: bytes) -> bool:
        """Drop a record that is still pending; return ``False`` when it must be deleted on disk."""
        # ``_pending_keys`` maps positions in the batch to keys, and the positions shift now.
        self._pending_keys = []
        return self.pending.records.pop(revision_key, None) is not None

    def records(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over revision keys and KeyValues of ``start <= revision key < end``, oldest first.

        The caller must finish before anything else happens to the store.

        Arguments:
            start, end: revision keys (``revision.py``).
        """
        # Disk, committing, pending: all revisions of one are older than all of the next. A batch that is on disk but
        # not yet reported is still read only once, because this read transaction was opened before its commit.
        for key, record in self._read.items(schema.KEY, start, end):
            yield key, unseal(key, record)
        for batch, keys in ((self._committing, self._committing_keys), (self.pending, self._pending_keys)):
            # Batches fill in order of revision, so the last record shows whether the batch overlaps the interval.
            if batch is not None and batch.records and next(reversed(batch.records)) >= start:
                # Only the records added since the last call: a watcher that catches up calls this for every few hundred
                # events.
                if len(keys) < len(batch.records):
                    keys.extend(islice(batch.records, len(keys), None))
                for number in range(bisect_left(keys, start), bisect_left(keys, end)):
                    key = keys[number]
                    yield key, batch.records[key][SEAL_BYTES:]

    def value(self, bucket: bytes, key: bytes) -> bytes | None:
        """Return a value of a bucket other than ``key``; ``None`` if there is none.

        Arguments:
            bucket: its name (``schema.py``).
            key: the key in it.
        """
        # Unlike records, values are overwritten: the newest batch must be read first.
        for batch in (self.pending, self._committing):
            if batch is not None and (bucket, key) in batch.values:
                return batch.values[bucket, key]
        return self._read.get(bucket, key)

    def values(self, bucket: bytes) -> list[tuple[bytes, bytes]]:
        """Return all keys and values of a bucket other than ``key``, in order of key."""
        found: dict[bytes, bytes | None] = dict(self._read.items(bucket))
        # Oldest first, so that newer values replace older ones; ``None`` is a deletion.
        for batch in (self._committing, self.pending):
            if batch is not None:
                found.update({key: value for (name, key), value in batch.values.items() if name == bucket})
        return sorted((key, value) for key, value in found.items() if value is not None)

    def commit(self) -> None:
        """Submit the pending batch, now or as soon as the writer is free and the open unit is closed."""
        if self.closed:
            return
        if self.is_busy:
            self._commit_again = True
            return
        # A batch that did not fit on the disk is still in place, and must be retried before newer changes.
        batch = self._committing or self._fill()
        if batch is None:
            return
        self.is_busy = True
        self._writer.submit(lambda: _write(self._backend, batch), self._committed)

    def commit_next(self) -> None:
        """Commit the pending batch right after the waiters of the last commit were called; for use in its report.

        Not earlier, because one of them may need exclusive use of the writer (``exclusive``).
        """
        self._commit_again = True

    def _fill(self) -> WriteBatch | None:
        if not self._has_pending():
            return None
        # Half an entry: ``end_unit`` will commit it.
        if self.is_changing:
            self._wanted = True
            return None
        self._touched = False
        batch, self.pending = self.pending, WriteBatch()
        self._committing_keys, self._pending_keys = self._pending_keys, []
        # Stamped when the batch is taken, not when it is written: entries applied meanwhile are not in this batch.
        self._on_durable = self._stamp(batch)
        self._committing = batch
        self._filling += 1
        return batch

    def _has_pending(self) -> bool:
        return self._touched or self.pending.operations() > 0

    def _committed(self, error: BaseException | None) -> None:
        if self.closed:
            return
        self.is_busy = False
        if error is None:
            self._settle()
        # Nothing of the batch is on disk; it stays in ``_committing``, where reads find it.
        elif isinstance(error, SpaceError):
            self.space_error = error
            if isinstance(error, MapFullError) and self._grow():
                self.commit()
        else:
            self._on_fatal(error)
            return
        # After an error the owner's timer retries: retrying at once would be a busy loop on a full disk.
        if error is None and (self._commit_again or self._waiters):
            self._commit_again = False
            self.commit()

    def _grow(self) -> bool:
        """Grow the map of the backend, which must not be read meanwhile; return whether that was possible now."""
        # The map can be changed only while no read transaction is open; close ours.
        self._read.close()
        try:
            return self._backend.grow()
        except SpaceError as error:
            self.space_error = error
            return False
        finally:
            self._renew()

    def _settle(self) -> None:
        # Renew first, then drop: in between, both have the records.
        self._renew()
        failpoint("beforeWritebackBuf")
        committed, self._committing = self._committing, None
        self._committing_keys = []
        failpoint("afterWritebackBuf")
        if committed is not None and len(committed.records) > FREED_AT_ONCE:
            self.free_later(committed.records)
        self.space_error = None
        # The batch just committed is the one filled before the present one.
        self._durable = self._filling - 1
        self._on_durable()
        self._tell_waiters()

    def free_later(self, items: dict[Any, Any] | list[Any]) -> None:
        """Empty an unused object, and lists in it, on the writer's thread.

        Freeing hundreds of thousands of objects at once would block the owner for a tenth of a second.
        """
        if self.closed:
            return
        self._writer.submit(partial(_free, items), _ignore)

    def _tell_waiters(self) -> None:
        while self._waiters and self._waiters[0][0] <= self._durable:
            # Removed before the call: a callback may flush again.
            self._waiters.popleft()[1]()

    def _renew(self) -> None:
        self._read.close()
        self._read = self._backend.begin_read()
        self._get_record = self._read.get_record

    def flush(self, on_durable: Callable[[], None]) -> None:
        """Commit now; call back (on the owner's thread) once everything written so far is durable."""
        # The writes so far are in the batch being filled, in the one in flight, or on disk.
        if self._has_pending():
            self._waiters.append((self._filling, on_durable))
        elif self._committing is not None:
            self._waiters.append((self._filling - 1, on_durable))
        else:
            on_durable()
        self.commit()

    def exclusive(
        self, job: Callable[[], None], swap: Callable[[], None], done: Callable[[BaseException | None], None]
    ) -> None:
        """Run a job on the writer while commits wait, then ``swap`` here with our read transaction closed.

        For the end of an online compacting copy: the file that ``job`` writes stays complete because nothing is
        committed meanwhile; writes continue in ``pending``.

        Arguments:
            job: runs on the writer's thread.
            swap: runs on the owner's thread if the job succeeded.
            done: called at the end, with the error of ``job`` or ``swap``; a job that fails changes nothing.

        Raises:
            InvariantError: a batch is in flight (call ``flush`` first).
        """
        if self.is_busy or self._committing is not None:
            raise InvariantError("a batch is on its way to the disk")

        def finish(error: BaseException | None) -> None:
            if self.closed:
                done(StorageError("the store is closed"))
                return
            # The file has lost its name, so nothing may be committed to it. (Damage is found before that.)
            if isinstance(error, InvariantError) and not isinstance(error, CorruptionError):
                self._on_fatal(error)
                done(error)
                return
            self.is_busy = False
            if error is None:
                error = self._swap(swap)
            done(error)
            # Writes during the job wait in ``pending``.
            self.commit()

        # While the writer has a job, ``commit`` only notes that a commit is wanted.
        self.is_busy = True
        self._writer.submit(job, finish)

    def _swap(self, swap: Callable[[], None]) -> StorageError | None:
        # ``swap`` waits until there is no reader, so close our read transaction.
        self._read.close()
        try:
            swap()
        except StorageError as error:
            return error
        # Whether or not the swap worked, there is a database to read.
        finally:
            self._renew()
        return None

    def exchange(self, replace: Callable[[], None]) -> None:
        """Drop every uncommitted change and continue with another database, which contains these changes.

        An open unit ends: its changes are in the other database. Call ``exchanged`` afterwards.

        Arguments:
            replace: exchanges the file; our read transaction is closed meanwhile.

        Raises:
            InvariantError: the store is poisoned, or the writer has a batch or another job, whose file is about to lose
                its name.
        """
        if self.is_poisoned:
            raise InvariantError("the store is poisoned: an entry failed while it was applied")
        if self.is_busy:
            raise InvariantError("a batch is on its way to the disk")
        self._commit_again = self._touched = self.is_changing = self._wanted = False
        self._committing, self.pending = None, WriteBatch()
        self._committing_keys, self._pending_keys = [], []
        self._read.close()
        try:
            replace()
        finally:
            self._renew()
        self.space_error = None

    def exchanged(self) -> None:
        """Call the waiters of ``flush``, after the whole state of the other database is in place."""
        # The other database contains everything that was flushed.
        self._durable = self._filling
        self._filling += 1
        self._tell_waiters()

    def close(self) -> None:
        """Stop; uncommitted changes are dropped (the log has them)."""
        self.closed = True
        self._writer.close()
        self._read.close()


def _write(backend: Backend, batch: WriteBatch) -> None:
    """Commit a batch, with the failpoints of a compaction; runs on the writer's thread."""
    schedules = (schema.META, schema.META_SCHEDULED_COMPACT) in batch.values
    if schedules:
        failpoint("compactBeforeCommitScheduledCompact")
    if batch.deletes:
        failpoint("compactBeforeCommitBatch")
    backend.commit(batch)
    if schedules:
        failpoint("compactAfterCommitScheduledCompact")
    if batch.deletes:
        failpoint("compactAfterCommitBatch")


def _free(items: dict[Any, Any] | list[Any]) -> None:
    """Drop items a few at a time, so that other threads can run in between."""
    while items:
        if not isinstance(items, list):
            items.popitem()
        elif isinstance(items[-1], list):
            _free(items.pop())
        else:
            del items[-_FREED_IN_A_ROW:]


def _ignore(error: BaseException | None) -> None:
    pass


def _nothing() -> None:
    pass
