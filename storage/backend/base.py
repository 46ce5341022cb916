"""The interface of an engine: atomic durable batches, and reads of one consistent state.

An engine stores named buckets that map bytes to bytes, ordered by key. Duties of every engine, checked by one test
suite:

- ``commit`` makes the whole batch durable or none of it, and returns only then. One thread at a time calls it.
- A ``ReadTxn`` sees the state of the last commit before it began, until it is closed: later commits are not visible.
  It may begin and be used on any thread, by one thread at a time.
- A batch is applied in this order: records are appended, revisions deleted, named values put or deleted.

The engine need not sort ``records``: their keys ascend, and all are above every key in the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

RUN_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of values at which ``in_runs`` ends a list: each value may be as large as a request."""
_PART_ITEMS: Final = 10
"""Items between two checks of their size: a check costs as much as reading one item."""


def in_runs(items: Iterator[tuple[bytes, bytes]], items_max: int) -> Iterator[list[tuple[bytes, bytes]]]:
    """Group keys and values into nonempty lists.

    Arguments:
        items: the items, in order.
        items_max: maximum length of a list; large values end a list earlier.
    """
    run: list[tuple[bytes, bytes]] = []
    size_bytes = 0
    # Several items per call, to spend less time in the interpreter.
    while part := list(islice(items, min(_PART_ITEMS, items_max - len(run)))):
        run += part
        size_bytes += sum([len(value) for _, value in part])
        if len(run) >= items_max or size_bytes > RUN_BYTES_MAX:
            yield run
            run, size_bytes = [], 0
    if run:
        yield run


class WriteBatch:
    """The changes that go to disk in one transaction; never changed after it is passed to an engine."""

    __slots__ = ("deletes", "records", "values")

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}
        """Revision key -> sealed record, in order of revision."""
        self.deletes: list[bytes] = []
        """Revision keys that a compaction drops."""
        self.values: dict[tuple[bytes, bytes], bytes | None] = {}
        """(bucket, key) -> value, or ``None`` to delete it."""

    def operations(self) -> int:
        """Return the number of changes."""
        return len(self.records) + len(self.deletes) + len(self.values)


class History(Protocol):
    """One consistent state of a database, kept until it is closed."""

    def get(self, bucket: bytes, key: bytes) -> bytes | None:
        """Return the value of a key, ``None`` if absent.

        Arguments:
            bucket: bucket name (``schema.py``).
            key: the key in it.
        """

    def items(self, bucket: bytes, start: bytes = b"", end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over keys and values of ``start <= key < end`` in order.

        Arguments:
            bucket: bucket name (``schema.py``).
            start: the first key.
            end: the key before which to stop; ``None``: no bound.
        """

    def close(self) -> None:
        """Release the state. May be called more than once. Reading afterwards is an error of the caller."""


class ReadTxn(History, Protocol):
    """One consistent state of an engine."""

    def get_record(self, revision_key: bytes) -> bytes | None:
        """Return the record of a revision, ``None`` if absent. This is the hot path of reads."""

    def runs(self, bucket: bytes, items_max: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """Iterate over all keys and values of a bucket in order, in lists, for callers that read all of them.

        Arguments:
            bucket: bucket name (``schema.py``).
            items_max: maximum length of a list; none is empty, and lists of large values are shorter (``in_runs``).
        """


class Defragmentation(Protocol):
    """A compact copy that replaces its database while batches are committed and states are read.

    Call in order: ``copy``, ``catch_up`` until little is left, ``finish``, ``adopt``; always end with ``close``.
    """

    def copy(self) -> None:
        """Copy the last committed state. Any thread.

        Raises:
            SpaceError, StorageError: the database is unchanged.
        """

    def catch_up(self) -> int:
        """Copy the changes committed since then; return their number. Any thread.

        Raises:
            SpaceError, StorageError: the database is unchanged.
        """

    def finish(self) -> None:
        """Copy the remaining changes and rename the copy to the database. On the committing thread, while it is idle.

        Raises:
            SpaceError, StorageError: the database is unchanged.
            InvariantError: the files were exchanged, but a crash may undo that: nothing more may be committed.
        """

    def adopt(self) -> None:
        """Use the copy for reads and commits from now on. On the owner's thread, before any other commit."""

    def give_up(self) -> None:
        """Make a ``copy`` or ``catch_up`` that runs on another thread end soon with an error."""

    def close(self) -> None:
        """End the defragmentation; remove a copy that was not adopted. Any thread, but not during another call."""


class Backend(Protocol):
    """An engine: buckets of keys and values that change a batch at a time."""

    def begin_read(self) -> ReadTxn:
        """Open a read transaction of the last committed state."""

    def commit(self, batch: WriteBatch) -> None:
        """Make a batch durable.

        Raises:
            MapFullError: the map is full; retry after ``grow``, otherwise as SpaceError.
            SpaceError: the disk is full; nothing of the batch is visible and it may be retried.
            StorageError: the disk failed; the engine must not be used any more.
        """

    def grow(self) -> bool:
        """Enlarge the map after a batch found it full. The committing thread must be idle.

        Returns:
            False: a read transaction is open, so nothing was changed; try again later.

        Raises:
            SpaceError: the map cannot be enlarged.
        """

    @property
    def size_bytes(self) -> int:
        """Space taken on disk, as of the last commit."""

    @property
    def size_in_use_bytes(self) -> int:
        """The part of ``size_bytes`` that holds data; the rest is free for reuse."""

    def copy_to(self, path: Path) -> None:
        """Write a consistent compact copy of the last committed state to a new file, durable on return."""

    def copy_pieces(self) -> Generator[bytes, None, None]:
        """Iterate over the bytes of the file that ``copy_to`` writes; close the iterator on the same thread."""

    @property
    def is_sealed(self) -> bool:
        """Whether a seal covers the data without checksums of its own; it then covers that data in a copy too."""

    def check(self, rest: Callable[[float], None]) -> None:
        """Read all of the last committed state, kept open meanwhile, and verify its checksums. Any thread.

        Arguments:
            rest: called with the seconds of each piece of work; may wait, and ends the check by raising.

        Raises:
            CorruptionError: the state is damaged; the message says where.
            StorageError: the state could not be read completely; this says nothing about its contents.
        """

    def open_copy(self, path: Path) -> Backend:
        """Open a database that ``copy_to`` made, in place; close it before anything is done with the file."""

    def defragment(self, copy: Path) -> Defragmentation:
        """Begin to exchange the database for a compact copy of itself; one at a time, and the caller must close it.

        Arguments:
            copy: path of the copy, on the same file system; it must not exist.

        Raises:
            StorageError: a defragmentation is already in progress.
        """

    def replace(self, path: Path) -> None:
        """Continue with another database, made by ``copy_to`` and moved over this one. No batch may be in flight.

        Open readers continue to read the old database.

        Arguments:
            path: the other database; it no longer exists under this path afterwards.

        Raises:
            StorageError: nothing was changed.
            InvariantError: the files were exchanged, but a crash may undo that.
        """

    def close(self) -> None:
        """Release all resources. Close the read transactions first."""
