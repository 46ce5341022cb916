"""The engine on LMDB: one file, full-sync transactions, readers that never block the writer.

Choices, and why:

- Neither NOSYNC nor WRITEMAP: ``commit`` returns after the data pages and then the meta page are on disk, so a power
  cut leaves the state of the last commit.
- The map is large and sparse (16 GiB, eight times the default quota): it costs address space, not disk, and the quota
  is enforced elsewhere. A batch that finds the map full (``MapFullError``) may be retried after ``grow``, which needs a
  moment without readers; a batch that finds the disk full (``SpaceError``) when there is space again.
- Records are appended with ``putmulti(append=True)``: 10,000 take 2 ms, because the loop runs in C and pages fill
  from left to right.
- ``lock=True``: LMDB's lock file holds the reader table, which protects pages of open readers from being reused.
  ``datadir.py`` ensures that no two members open one directory.
- The file has mode 0600 under any umask. Unused memory is zeroed (``meminit``), so no heap contents reach the disk.

Measured (one core, NVMe): get 0.2 us; commit of 10,000 records of 340 B 5 ms; renewal of a reader 0.3 us.

A writer carries out commits: a thread in production, the caller itself in tools. It runs
jobs one at a time, in order, and reports each on the owner's thread through ``done(error)``. Nothing
here knows asyncio: the server injects ``loop.call_soon_threadsafe`` as ``notify``.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, perf_counter
from typing import Any, Final, Protocol

import lmdb

from raftkv.errors import CorruptionError, InvariantError, SpaceError, StorageError
from raftkv.storage import schema
from raftkv.storage.backend.base import ReadTxn, WriteBatch, in_runs
from raftkv.storage.backend.copying import copy_compact, pieces
from raftkv.storage.backend.defragmentation import NOTED_MAX, LMDBDefragmentation, Notes
from raftkv.storage.backend.environment import (
    SEALED_BUCKETS,
    Environment,
    copied_sum,
    declared,
    identity_of,
    read_seal,
    total,
)
from raftkv.storage.backend.pages import check_pages, check_small_trees
from raftkv.storage.datadir import sync_directory
from raftkv.storage.failpoints import failpoint
from raftkv.storage.revision import checked_runs

Job = Callable[[], None]
Done = Callable[[BaseException | None], None]


class Writer(Protocol):
    """A worker that runs jobs one at a time, in order."""

    def submit(self, job: Job, done: Done) -> None:
        """Schedule a job; later report it on the owner's thread.

        Arguments:
            job: the work.
            done: called with ``None``, or with the error that the job raised.
        """

    def close(self) -> None:
        """Finish the submitted jobs and stop. Reports that were not delivered yet may be lost."""


def _outcome(job: Job) -> BaseException | None:
    try:
        job()
    # Not ``BaseException``: a ``FailpointPanic`` simulates the death of the process, not a failure of the job.
    except Exception as error:
        return error
    return None


class InlineWriter:
    """A writer that runs each job inside ``submit``: for tools, and for tests that need no concurrency."""

    def submit(self, job: Job, done: Done) -> None:
        """Implement ``Writer.submit``."""
        done(_outcome(job))

    def close(self) -> None:
        """Implement ``Writer.close``."""


class ThreadWriter:
    """A writer with its own thread: the backend thread of a member."""

    def __init__(self, notify: Callable[[Callable[[], None]], object]) -> None:
        """Start the thread. ``notify(call)`` must run ``call()`` on the owner's thread, soon and in order."""
        self._notify = notify
        self._jobs: SimpleQueue[tuple[Job, Done] | None] = SimpleQueue()
        self.busy_since_s = math.inf
        """When the job under way began, by ``time.monotonic``; infinity: there is none."""
        self._thread = threading.Thread(target=self._run, name="backend", daemon=True)
        self._thread.start()

    def submit(self, job: Job, done: Done) -> None:
        """Implement ``Writer.submit``."""
        self._jobs.put((job, done))

    def close(self) -> None:
        """Implement ``Writer.close``."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            self.busy_since_s = monotonic()
            # The job runs on this thread, its report on the owner's: the owner's state never changes unexpectedly.
            error = _outcome(job)
            self.busy_since_s = math.inf
            try:
                self._notify(partial(done, error))
            except RuntimeError:  # the loop is closed, and the owner has stopped
                return


_log = logging.getLogger(__name__)

MAP_SIZE_BYTES: Final = 16 << 30
RECORDS_IN_A_ROW: Final = 500
VALUES_PER_PACE: Final = 1_000
REST_MAX_S: Final = 0.1


class LMDBReadTxn:
    """A read transaction of an LMDB environment."""

    def __init__(self, environment: Environment, on_close: Callable[[], None]) -> None:
        self.environment = environment.raw
        self.file_identity = environment.identity
        # The bucket of revisions is the default one, so that ``get_record`` needs no second argument.
        self._txn = environment.raw.begin(db=environment.handles[schema.KEY])
        self._handles = environment.handles
        self._on_close = on_close
        self._is_open = True
        self._main = environment.main
        self.get_record = self._txn.get  # bound here once: no Python frame on the hot path

    def get(self, bucket: bytes, key: bytes) -> bytes | None:
        """Implement ``ReadTxn.get``."""
        try:
            return self._txn.get(key, db=self._handles[bucket])
        except lmdb.Error as error:
            raise CorruptionError(f"the database cannot be read in bucket {bucket.decode()}: {error}") from error

    def items(self, bucket: bytes, start: bytes = b"", end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Implement ``ReadTxn.items``."""
        try:
            # One descent of the tree to the first key, then from leaf to leaf; a caller that stops early closes the
            # cursor.
            last, found = b"", 0
            with self._txn.cursor(self._handles[bucket]) as cursor:
                is_any = cursor.set_range(start) if start else cursor.first()
                for item in cursor.iternext() if is_any else ():
                    if end is not None and item[0] >= end:
                        return
                    if item[0] <= last:
                        raise CorruptionError(f"the records of the bucket {bucket.decode()} are not in order")
                    last = item[0]
                    found += 1
                    yield item
            if not start:
                self._check_count(bucket, found)
        except lmdb.Error as error:
            raise CorruptionError(f"the database cannot be read in bucket {bucket.decode()}: {error}") from error

    def runs(self, bucket: bytes, items_max: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """Implement ``ReadTxn.runs``."""
        try:
            found = 0
            with self._txn.cursor(self._handles[bucket]) as cursor:
                cursor.first()
                for run in in_runs(cursor.iternext(), items_max):
                    found += len(run)
                    yield run
            self._check_count(bucket, found)
        except lmdb.Error as error:
            raise CorruptionError(f"the database cannot be read in bucket {bucket.decode()}: {error}") from error

    def _check_count(self, bucket: bytes, found: int) -> None:
        """Refuse a bucket if records are missing: a damaged page may lack some, and the rest would look complete."""
        stated = self._txn.stat(self._handles[bucket])["entries"]
        if found != stated:
            raise CorruptionError(f"the bucket {bucket.decode()} has {found} records, and should have {stated}")

    def check_seal(self) -> None:
        """Read all values that the seal of this state covers, and refuse them if they differ.

        Raises:
            CorruptionError: they do.
        """
        stated = read_seal(self._txn, None, self._main)
        if stated is not None:
            _check_values(self, stated, _no_pace)

    def close(self) -> None:
        """Implement ``ReadTxn.close``."""
        if self._is_open:
            self._is_open = False
            self._txn.abort()
            self._on_close()


class LMDBBackend:
    """The engine on one LMDB file. ``LMDBBackend(path)`` opens the file, or creates it."""

    def __init__(self, path: Path, map_size_bytes: int = MAP_SIZE_BYTES, *, read_only: bool = False) -> None:
        """Open or create the database.

        Arguments:
            path: the database file; its directory exists.
            map_size_bytes: upper bound of the file, reserved as address space.
            read_only: read a file that no process has open, without changing anything.

        Raises:
            StorageError: the file cannot be opened.
            CorruptionError: the contents are damaged, or are not a database.
        """
        self.path = path
        self._map_size_bytes = map_size_bytes
        self._lock = threading.Lock()
        """Held while users of an environment come and go, and while the environment is exchanged."""
        self._committing = threading.Lock()
        """Held while a batch is committed and noted."""
        self._notes: Notes | None = None
        self._was_full = False
        """Whether the last commit found the disk full."""
        self.observe_commit: Callable[[float], object] = float
        """Called on the committing thread with the duration of each commit in seconds."""
        self.waits_for_readers = False
        """Whether ``grow`` found an open reader; readers that can stop should do so."""
        try:
            if path.exists():
                check_pages(path)
        except OSError as error:
            raise declared(error, path, f"cannot open the database {path}") from error
        self._environment = Environment(path, map_size_bytes, read_only=read_only)
        try:
            self._check_seal()
            self._measure()
        except BaseException:
            self.close()
            raise

    def _check_seal(self) -> None:
        """Refuse damaged values, or warn about those of a copy; see ``environment.py``."""
        try:
            # One state, although another process may write the file.
            with closing(self.begin_read()) as read:
                read.check_seal()
        except CorruptionError as error:
            if self._environment.sealed_sum is not None:
                raise CorruptionError(f"the database {self.path} is damaged: {error}") from error
            _log.warning(
                "the database %s was copied to this place, and %s: unless raftkv 0.1 wrote it last, the copy is "
                "damaged: copy it again, or remove this member and add it again without data",
                *(self.path, error),
            )

    def _measure(self) -> None:
        self.size_bytes, self.size_in_use_bytes = self._environment.measure()

    def begin_read(self) -> LMDBReadTxn:
        """Implement ``Backend.begin_read``."""
        # Locked so that ``replace`` does not close the environment in between.
        with self._lock:
            environment = self._environment
            read = LMDBReadTxn(environment, partial(self._leave, environment))
            environment.users += 1
            return read

    def _leave(self, environment: Environment) -> None:
        with self._lock:
            environment.users -= 1
            environment.left()

    def commit(self, batch: WriteBatch) -> None:
        """Implement ``Backend.commit``."""
        began_s = perf_counter()
        try:
            failpoint("beforeCommit")
            with self._committing:
                with self._environment.writing() as txn:
                    self._append(txn.raw, batch.records)
                    self._delete(txn.raw, batch.deletes)
                    for (bucket, key), value in batch.values.items():
                        txn.put(bucket, key, value)
                if self._notes is not None:
                    self._notes.add(batch)
            failpoint("afterCommit")
            # Here, not on demand: measuring takes a read transaction, and the loop asks often.
            self._measure()
        except (lmdb.Error, OSError) as error:
            # After a commit that found the disk full, a write that was cut short is retried even if there is space now.
            was_full, self._was_full = self._was_full, isinstance(declared(error, self.path), SpaceError)
            raise declared(error, self.path, was_full=was_full) from error
        self._was_full = False
        self.observe_commit(perf_counter() - began_s)

    def _append(self, txn: lmdb.Transaction, records: dict[bytes, bytes]) -> None:
        added, items = 0, iter(records.items())
        # Keys ascend and are above all existing ones, so LMDB fills the last page without searching.
        with txn.cursor(self._environment.handles[schema.KEY]) as cursor:
            # A few at a time: the interpreter switches threads only between two calls.
            while some := list(islice(items, RECORDS_IN_A_ROW)):
                added += cursor.putmulti(some, append=True, overwrite=False)[1]
        # A record that is not above all others was skipped: a duplicate or older revision, which no correct store
        # writes.
        if added != len(records):
            raise InvariantError(f"only {added} of {len(records)} records are newer than the disk")

    def _delete(self, txn: lmdb.Transaction, keys: list[bytes]) -> None:
        handle = self._environment.handles[schema.KEY]
        # An absent key is not an error: after a crash a compaction repeats deletions.
        for key in keys:
            txn.delete(key, db=handle)

    def grow(self) -> bool:
        """Implement ``Backend.grow``. Doubles the map, which costs only address space."""
        with self._lock:
            # LMDB moves the map when it grows it; an open reader would have addresses of the old one.
            self.waits_for_readers = self._environment.users > 0
            if self.waits_for_readers:
                return False
            size_bytes = 2 * int(self._environment.raw.info()["map_size"])
            try:
                self._environment.raw.set_mapsize(size_bytes)
            except (lmdb.Error, OSError, OverflowError) as error:
                raise SpaceError(f"cannot map {size_bytes} bytes of the database {self.path}: {error}") from error
            self._map_size_bytes = size_bytes
            return True

    @property
    def open_reads(self) -> int:
        """Number of open read transactions."""
        return self._environment.users

    def copy_to(self, path: Path) -> None:
        """Implement ``Backend.copy_to``. Runs without the interpreter lock; writers continue meanwhile."""
        self.copy_file(path, threading.Event())

    def copy_file(self, path: Path, given_up: threading.Event) -> None:
        """Copy as ``copy_to`` does; an event cancels it."""
        try:
            with closing(self.begin_read()) as read:  # keeps the environment open
                is_sealed = self.is_sealed
                self._check_pages(read, Pace(lambda worked_s: _rest(given_up, worked_s)))
                copy_compact(read.environment, path, given_up)
        except (lmdb.Error, OSError) as error:
            raise declared(error, path) from error
        try:
            check_copy(path, lambda worked_s: _rest(given_up, worked_s), is_sealed=is_sealed)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def copy_pieces(self) -> Generator[bytes, None, None]:
        """Implement ``Backend.copy_pieces``."""
        try:
            with closing(self.begin_read()) as read:  # keeps the environment open
                self._check_pages(read, _no_pace)
                yield from pieces(read.environment)
        except (lmdb.Error, OSError) as error:
            raise declared(error, self.path) from error

    @property
    def is_sealed(self) -> bool:
        """Implement ``Backend.is_sealed``."""
        return self.sealed_sum is not None

    def check(self, rest: Callable[[float], None]) -> None:
        """Implement ``Backend.check``."""
        pace = Pace(rest)
        try:
            with self._committing:  # so that the sum belongs to the state being read
                read, stated = self.begin_read(), self._environment.sum
            with closing(read):
                self._check_pages(read, pace)
                for _ in checked_runs(read):
                    pace()
                if stated is not None:
                    _check_values(read, stated, pace)
        except lmdb.Error as error:
            raise CorruptionError(f"it cannot be read: {error}") from error
        except OSError as error:
            raise declared(error, self.path) from error

    def _check_pages(self, read: LMDBReadTxn, pace: Callable[[], None]) -> None:
        """Check the pages of the state that is being read, and of later states; its pages are not written meanwhile."""
        try:
            check_pages(self.path, pace)
        except CorruptionError:
            # Another file may have this name by now.
            if read.file_identity == identity_of(self.path):
                raise

    def open_copy(self, path: Path) -> LMDBBackend:
        """Implement ``Backend.open_copy``."""
        return LMDBBackend(path, read_only=True)

    def defragment(self, copy: Path) -> LMDBDefragmentation:
        """Implement ``Backend.defragment``."""
        with self._committing:
            if self._notes is not None:
                raise StorageError(f"the database {self.path} is being defragmented already")
            self._notes = Notes()
        return LMDBDefragmentation(copy, self)

    # -- called by the defragmentation -------------------------------------------------------------------------------

    def open_environment(self, path: Path) -> Environment:
        """Open a copy for writing, with the map size of this database."""
        return Environment(path, self._map_size_bytes)

    @property
    def sealed_sum(self) -> int | None:
        """The sum in the seal; ``None``: there is no seal."""
        return self._environment.sum

    def pin(self) -> tuple[LMDBReadTxn, Notes]:
        """Open a read transaction of the current state and take the notes up to it."""
        with self._committing:
            if self._notes is None:
                raise StorageError(f"the database {self.path} was exchanged while it was defragmented")
            if len(self._notes) > NOTED_MAX:
                raise StorageError(f"more than {NOTED_MAX} deletions were committed while {self.path} was copied")
            notes, self._notes = self._notes, Notes()
            return self.begin_read(), notes

    def end_notes(self) -> None:
        """Stop taking notes."""
        with self._committing:
            self._notes = None

    def adopt(self, environment: Environment) -> None:
        """Continue with another environment, which has the name of the database."""
        with self._committing, self._lock:
            old, self._environment = self._environment, environment
            self._notes = None
            old.retire()
        self._measure()

    def replace(self, path: Path) -> None:
        """Implement ``Backend.replace``."""
        failpoint("replaceBeforeRename")
        try:
            path.stat()
        except OSError as error:
            raise StorageError(f"cannot move {path} over the database {self.path}: {error.strerror}") from error
        environment = self.open_environment(path)
        try:
            environment.rename(self.path)
        except OSError as error:
            environment.raw.close()
            if environment.path == self.path:
                raise InvariantError(f"{self.path} was exchanged, but that is not durable: {error.strerror}") from error
            raise declared(error, self.path, f"cannot move {path} over the database {self.path}") from error
        self.adopt(environment)

    def close(self) -> None:
        """Implement ``Backend.close``."""
        self._environment.raw.close()


class Pace:
    """Calls ``rest`` with the working time since the last call; ``rest`` may wait, or raise to stop the work."""

    def __init__(self, rest: Callable[[float], None]) -> None:
        self._rest = rest
        self._since_s = perf_counter()

    def __call__(self) -> None:
        """Report the working time since the last call, and rest."""
        self._rest(perf_counter() - self._since_s)
        self._since_s = perf_counter()


def _no_pace() -> None:
    """Do not rest."""


def _rest(given_up: threading.Event, worked_s: float) -> None:
    """Rest as long as the work took."""
    if given_up.wait(min(REST_MAX_S, worked_s)):
        raise StorageError("the copy of the database was aborted")


def _check_values(read: LMDBReadTxn, stated: int, pace: Callable[[], None]) -> None:
    """Refuse values that do not match the seal."""

    def items(bucket: bytes) -> Iterator[tuple[bytes, bytes]]:
        for count, item in enumerate(read.items(bucket), 1):
            if not count % VALUES_PER_PACE:
                pace()
            yield item

    found = total((bucket, items(bucket)) for bucket in SEALED_BUCKETS)
    if found != stated:
        raise CorruptionError(
            f"its applied index, members, leases or users are not what was written (checksum {found:08x}, sealed "
            f"{stated:08x})"
        )


def check_copy(
    path: Path,
    rest: Callable[[float], None],
    *,
    is_sealed: bool,
    read_history: Callable[[ReadTxn], Iterable[object]] = checked_runs,
) -> None:
    """Read all of a compact copy that is not open elsewhere, and refuse it if anything in it is damaged.

    Arguments:
        path: the copy.
        rest: called with the seconds of each piece of work; may wait, and ends the check by raising.
        is_sealed: whether the source had a valid seal, which the copy then has too.
        read_history: reads all records, a piece at a time.

    Raises:
        CorruptionError: the copy is damaged, or is not a database; the message says where.
    """
    pace = Pace(rest)
    check_pages(path, pace)
    with closing(LMDBBackend(path, read_only=True)) as backend, closing(backend.begin_read()) as read:
        for _ in read_history(read):
            pace()
        with read.environment.begin() as txn:
            stated = copied_sum(txn) if is_sealed else None
        if stated is not None:
            _check_values(read, stated, pace)


def read_value(path: Path, bucket: bytes, key: bytes) -> bytes | None:
    """Return one value of a database file without changing the file; ``None`` if the value or the file does not exist.

    Also returns ``None`` for an unreadable file: opening it normally reports the reason.

    Arguments:
        path: the database file.
        bucket, key: bucket and key of the value.
    """
    try:
        if not path.exists():
            return None
        check_small_trees(path)  # a damaged page may make LMDB read behind the end of the file, which kills the process
        options: dict[str, Any] = {"subdir": False, "readonly": True, "lock": False, "create": False, "max_dbs": 1}
        with lmdb.open(os.fsencode(path), **options) as environment:
            size_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
            # Reading beyond the end of a truncated file would kill the process.
            if path.stat().st_size < size_bytes:
                return None
            handle = environment.open_db(bucket, create=False)
            with environment.begin(db=handle) as txn:
                return txn.get(key)
    except (lmdb.Error, OSError, CorruptionError):
        return None


def replace_file(source: Path, target: Path) -> None:
    """Move a file over another, durably: after a crash the name refers to one of the two, complete.

    Arguments:
        source: path of the file that is moved.
        target: path of the file that is replaced.
    """
    os.replace(source, target)
    sync_directory(str(target.parent))
