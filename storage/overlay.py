"""The edge between memory and disk: the batch being filled, the batch being committed, and the pinned state below.

Writes go into ``pending`` at apply time and are visible at once. ``commit`` hands the whole of it to the writer
(another thread in production) and starts an empty one; until that commit is reported, its records stay readable here:

    put 9 ---> pending       7 8 9      being filled                       read 1st
                  | commit
                  v
               committing    4 5 6      on its way, on the writer's thread  read 2nd
                  | durable: the read transaction is renewed, then the batch is dropped
                  v
               LMDB          1 2 3      as of the last commit               read 3rd

When the report arrives, the read transaction is renewed first and the committed batch dropped after, so no moment
exists in which a revision can be found in neither. At most one batch is on its way; what is written meanwhile goes
together in the next. Nothing here ever waits.

A log entry is in one batch, whole, with the applied index that ``stamp`` adds: else a restart would apply it twice. So
the first change after an applied index opens a *unit* (``is_changing``), the next applied index closes it, and no batch
can be filled between. What is asked for meanwhile happens at the end of the unit. If an entry fails, its unit is never
closed, and ``poison`` says so: nothing more goes to disk, and the log has what is lost.

    set_applied(6)    put  put  delete    set_applied(7)
    --------+------------------------------+-------->
            |<--- a unit: entry 7 -------->|
            |     commit() waits           | commit: a batch with entry 7 and "applied 7"

A full map is grown as soon as this module is the only reader, and the batch tried again. A full disk (``SpaceError``)
keeps the batch where it is, readable, to be tried again by the next ``commit``. Every other failure goes to
``on_fatal``: after a failed write the state of the disk is not known, so the member stops.
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
"""Objects that are freed where they are given up; more are freed little by little."""
_FREED_IN_A_ROW = 500
SIZE_MAX_BYTES = 1 << 62
"""More than there is."""


class Overlay:
    """The uncommitted changes of a store, readable over its backend."""

    def __init__(
        self,
        backend: Backend,
        writer: Writer,
        stamp: Callable[[WriteBatch], Callable[[], None]],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Begin over the last commit.

        Arguments:
            backend: the engine.
            writer: carries out commits, one at a time.
            stamp: adds the applied index and the like to a batch about to go; what it returns is called when the batch
                is durable.
            on_fatal: called with a failure that the member must not survive.
        """
        self._backend = backend
        self._writer = writer
        self._stamp = stamp
        self._on_fatal = on_fatal
        self._read = backend.begin_read()
        # Bound once for each read transaction: this call is most of what a read costs.
        self._get_record = self._read.get_record
        self.pending = WriteBatch()
        self._committing: WriteBatch | None = None
        # Keys of their records, as far as they were asked for: a history of very many is read in many steps.
        self._pending_keys: list[bytes] = []
        self._committing_keys: list[bytes] = []
        self._on_durable: Callable[[], None] = _nothing
        self._busy = False
        self._commit_again = False
        self._touched = False
        # Callers of ``flush``, each with the number of the batch that it waits for, ascending. Batches are numbered as
        # they are filled: ``_filling`` is the one being filled, ``_durable`` the last one on disk.
        self._waiters: deque[tuple[int, Callable[[], None]]] = deque()
        self._epoch = 0
        """Counts exchanges of the database: reports of commits to an earlier one are not for us."""
        self._filling = 1
        self._durable = 0
        self.space_error: SpaceError | None = None
        self.closed = False
        self.is_changing = False
        """Whether a unit is open. Set by the code that makes a change; unset by ``end_unit`` alone."""
        self.is_poisoned = False
        self._wanted = False

    @property
    def is_busy(self) -> bool:
        """Whether a batch or another job of the writer is on its way."""
        return self._busy

    def end_unit(self) -> None:
        """Close the unit: the stamp has changed and describes what was written, so it may be committed now.

        Raises:
            InvariantError: the store is poisoned.
        """
        if self.is_poisoned:
            raise InvariantError("the store is poisoned: an entry failed while it was applied")
        # Also an entry that changed nothing moves the applied index, which belongs on disk.
        self._touched = True
        self.is_changing = False
        if self._wanted:
            self._wanted = False
            self.commit()

    def poison(self) -> None:
        """Commit nothing any more: an entry failed half-way."""
        self.is_poisoned = self.is_changing = True

    def load(self, revision_key: bytes) -> bytes:
        """Return the KeyValue of a revision known to the index.

        Raises:
            CorruptRecordError: it cannot be read or is not what was written; fatal.
        """
        # A revision is written once and never changed, so the three places cannot disagree: whichever has it is right.
        record = self.pending.records.get(revision_key)
        if record is None and self._committing is not None:
            record = self._committing.records.get(revision_key)
        # Records in memory were made by this process: the checksum is for the disk.
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
            size_bytes_max: load no more once so many bytes are loaded.

        Raises:
            CorruptRecordError: as of ``load``.
        """
        pending = self.pending.records.get
        # With no batch on its way the same table is asked twice, which costs less than a branch for each revision.
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
            found.append(data if intact else self.load(key))  # which says what is wrong
        return found

    def discard(self, revision_key: bytes) -> bool:
        """Drop a record that did not leave memory yet; return ``False`` when it must be deleted on disk."""
        # The sorted keys of ``records`` are positions in the batch, and those shift now.
        self._pending_keys = []
        return self.pending.records.pop(revision_key, None) is not None

    def records(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over revision keys and KeyValues of ``start <= revision key < end``, oldest first.

        The caller must finish before anything else happens to the store.

        Arguments:
            start, end: revision keys (``revision.py``).
        """
        # Disk, committing, pending: every revision of one is older than all of the next. A batch that is on disk but
        # not yet reported is read once all the same, because this read transaction is pinned before it.
        for key, record in self._read.items(schema.KEY, start, end):
            yield key, unseal(key, record)
        for batch, keys in ((self._committing, self._committing_keys), (self.pending, self._pending_keys)):
            # Batches fill in order of revision, so the last record decides whether any can be wanted.
            if batch is not None and batch.records and next(reversed(batch.records)) >= start:
                # Only what was added since the last call: a watcher that catches up calls this for every few hundred
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
        # Unlike records, values are overwritten: the newest batch must be asked first.
        for batch in (self.pending, self._committing):
            if batch is not None and (bucket, key) in batch.values:
                return batch.values[bucket, key]
        return self._read.get(bucket, key)

    def values(self, bucket: bytes) -> list[tuple[bytes, bytes]]:
        """Return all keys and values of a bucket other than ``key``, in order of key."""
        found: dict[bytes, bytes | None] = dict(self._read.items(bucket))
        # Oldest first, each covering what was before it; ``None`` is a deletion.
        for batch in (self._committing, self.pending):
            if batch is not None:
                found.update({key: value for (name, key), value in batch.values.items() if name == bucket})
        return sorted((key, value) for key, value in found.items() if value is not None)

    def commit(self) -> None:
        """Send what is pending on its way, now or as soon as the writer is free and the unit under way is closed."""
        if self.closed:
            return
        if self._busy:
            self._commit_again = True
            return
        # A batch that found no room is still in place, and is tried again before anything newer may go.
        batch = self._committing or self._fill()
        if batch is None:
            return
        self._busy = True
        self._writer.submit(lambda: _write(self._backend, batch), partial(self._committed, self._epoch))

    def commit_next(self) -> None:
        """Commit what is pending right after those that waited for the last commit have heard of it: for its report.

        Not before, as one of them may want the writer for itself (``exclusive``).
        """
        self._commit_again = True

    def _fill(self) -> WriteBatch | None:
        if not self._has_pending():
            return None
        # Half an entry: ``end_unit`` will commit.
        if self.is_changing:
            self._wanted = True
            return None
        self._touched = False
        batch, self.pending = self.pending, WriteBatch()
        self._committing_keys, self._pending_keys = self._pending_keys, []
        # Stamped when it is taken and not when it is written: entries applied meanwhile are not in this batch.
        self._on_durable = self._stamp(batch)
        self._committing = batch
        self._filling += 1
        return batch

    def _has_pending(self) -> bool:
        return self._touched or self.pending.operations() > 0

    def _committed(self, epoch: int, error: BaseException | None) -> None:
        # The report is of a batch that ``exchange`` made obsolete.
        if self.closed or epoch != self._epoch:
            return
        self._busy = False
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
        # After an error the owner's timer tries again: at once would be a busy loop on a full disk.
        if error is None and (self._commit_again or self._waiters):
            self._commit_again = False
            self.commit()

    def _grow(self) -> bool:
        """Make room in the map of the backend, which must not be read meanwhile; whether that was possible now."""
        # The map can be changed only while no read transaction is open; this one is ours.
        self._read.close()
        try:
            return self._backend.grow()
        except SpaceError as error:
            self.space_error = error
            return False
        finally:
            self._renew()

    def _settle(self) -> None:
        # Renew first, drop after: in between both have the records, never neither.
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
        """Empty an unused object, lists in it too, on the writer's thread.

        To free hundreds of thousands of objects at once would hold the owner for a tenth of a second.
        """
        if self.closed:
            return
        self._writer.submit(partial(_free, items), _ignore)

    def _tell_waiters(self) -> None:
        while self._waiters and self._waiters[0][0] <= self._durable:
            # Taken out before it is called: a callback may flush again.
            self._waiters.popleft()[1]()

    def _renew(self) -> None:
        self._read.close()
        self._read = self._backend.begin_read()
        self._get_record = self._read.get_record

    def flush(self, on_durable: Callable[[], None]) -> None:
        """Commit now; call back (on the owner's thread) once everything written so far is durable."""
        # The writes so far are in the batch being filled, in the one on its way, or on disk.
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
        """Run a job on the writer with commits held back, then ``swap`` here with no read transaction of ours open.

        For the end of an online compacting copy: the file that ``job`` writes stays complete because nothing is
        committed meanwhile; writes go on into ``pending``.

        Arguments:
            job: runs on the writer's thread.
            swap: runs on the owner's thread if the job succeeded.
            done: called at the end, with the error of ``job`` or ``swap``; a job that fails changes nothing.

        Raises:
            InvariantError: a batch is on its way (``flush`` first).
        """
        if self._busy or self._committing is not None:
            raise InvariantError("a batch is on its way to the disk")

        epoch = self._epoch

        def finish(error: BaseException | None) -> None:
            # A received database has taken the place of the one that was copied.
            if self.closed or epoch != self._epoch:
                done(StorageError("a received database has taken the place of the one that was copied"))
                return
            # The file has lost its name: nothing may be committed to it any more. Damage was found before that.
            if isinstance(error, InvariantError) and not isinstance(error, CorruptionError):
                self._on_fatal(error)
                done(error)
                return
            self._busy = False
            if error is None:
                error = self._swap(swap)
            done(error)
            # Writes during the job wait in ``pending``.
            self.commit()

        # While a job of the writer is on its way, ``commit`` only takes note.
        self._busy = True
        self._writer.submit(job, finish)

    def _swap(self, swap: Callable[[], None]) -> StorageError | None:
        # ``swap`` waits until there is no reader, and this transaction is ours.
        self._read.close()
        try:
            swap()
        except StorageError as error:
            return error
        # Whether or not the swap worked there is a database to read.
        finally:
            self._renew()
        return None

    def exchange(self, replace: Callable[[], None]) -> None:
        """Forget every uncommitted change and go on over another database, which contains them.

        Waits for the batch on its way, because its file is about to be replaced. A unit under way ends: what it was
        about to do is in the other database. ``exchanged`` is to follow.

        Arguments:
            replace: exchanges the file, with no read transaction of ours open.

        Raises:
            InvariantError: the store is poisoned.
        """
        if self.is_poisoned:
            raise InvariantError("the store is poisoned: an entry failed while it was applied")
        # A commit that is under way would write into a file that is about to lose its name.
        self._writer.drain()
        # The report of that commit comes later, and must not be taken for one of the new database.
        self._epoch += 1
        self._busy = self._commit_again = self._touched = self.is_changing = self._wanted = False
        self._committing, self.pending = None, WriteBatch()
        self._committing_keys, self._pending_keys = [], []
        self._read.close()
        try:
            replace()
        finally:
            self._renew()
        self.space_error = None

    def exchanged(self) -> None:
        """Call back the waiters of ``flush``: all that is known of the other database is in its place now."""
        # Everything that was flushed is contained in it.
        self._durable = self._filling
        self._filling += 1
        self._tell_waiters()

    def close(self) -> None:
        """Stop; what was not committed is forgotten (the log has it)."""
        self.closed = True
        self._writer.close()
        self._read.close()


def _write(backend: Backend, batch: WriteBatch) -> None:
    """Commit, with the points at which a compaction can be cut short; runs on the writer's thread."""
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
    """Drop items a few at a time: between two calls the interpreter lets others run."""
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
