"""The interface of an engine: atomic durable batches, and reads of one consistent state.

An engine keeps named buckets of bytes to bytes, ordered by key. Duties, the same for every engine and held by one
test suite:

- ``commit`` makes the whole batch durable or none of it, and returns only then. One thread at a time calls it.
- A ``ReadTxn`` sees the state of the last commit before it was begun until it is closed: later commits do not show.
  It may be begun and used on any thread, by one thread at a time.
- A batch is applied in this order: records are appended, revisions deleted, named values put or deleted.

``records`` need not be sorted by the engine: their keys ascend, and all lie above every key in the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

RUN_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of values after which ``in_runs`` ends a list: each value may be as large as a request."""
_PART_ITEMS: Final = 10
"""Items between two checks of their size: a check costs as much as reading an item."""


def in_runs(items: Iterator[tuple[bytes, bytes]], items_max: int) -> Iterator[list[tuple[bytes, bytes]]]:
    """Group keys and values into lists, none of them empty.

    Arguments:
        items: in order.
        items_max: of one list; large values end it before.
    """
    run: list[tuple[bytes, bytes]] = []
    size_bytes = 0
    # A part in one call, so that little of the time is the interpreter's.
    while part := list(islice(items, min(_PART_ITEMS, items_max - len(run)))):
        run += part
        size_bytes += sum([len(value) for _, value in part])
        if len(run) >= items_max or size_bytes > RUN_BYTES_MAX:
            yield run
            run, size_bytes = [], 0
    if run:
        yield run


class WriteBatch:
    """The changes that go to disk in one transaction; never changed once handed to an engine."""

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
    """One consistent state of a database, pinned until it is closed."""

    def get(self, bucket: bytes, key: bytes) -> bytes | None:
        """Return the value of a key, ``None`` if absent.

        Arguments:
            bucket: its name (``schema.py``).
            key: the key in it.
        """

    def items(self, bucket: bytes, start: bytes = b"", end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over keys and values of ``start <= key < end`` in order.

        Arguments:
            bucket: its name (``schema.py``).
            start: the first key.
            end: the key before which to stop; ``None`` is no bound.
        """

    def close(self) -> None:
        """Give the state up; harmless when repeated. A read after it is a fault of the caller."""


class ReadTxn(History, Protocol):
    """One consistent state of an engine."""

    def get_record(self, revision_key: bytes) -> bytes | None:
        """Return the record of a revision, ``None`` if absent: the hot path of reads."""

    def runs(self, bucket: bytes, items_max: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """Iterate over all keys and values of a bucket in order, many at a time: ``items`` for those that read all.

        Arguments:
            bucket: its name (``schema.py``).
            items_max: of one list; none is empty, and those of large values are shorter (``in_runs``).
        """


class Defragmentation(Protocol):
    """A compact copy that takes the place of its database while batches are committed and states are read.

    In order: ``copy``, ``catch_up`` until little is left, ``finish``, ``adopt``; and always ``close``.
    """

    def copy(self) -> None:
        """Copy the last committed state. Any thread.

        Raises:
            SpaceError, StorageError: the database is as it was.
        """

    def catch_up(self) -> int:
        """Bring over what was committed since, and return how many changes that were. Any thread.

        Raises:
            SpaceError, StorageError: the database is as it was.
        """

    def finish(self) -> None:
        """Bring over the rest and give the copy the name of the database. The thread that commits; nothing else does.

        Raises:
            SpaceError, StorageError: the database is as it was.
            InvariantError: the files were exchanged, but a crash may undo that: nothing may be committed any more.
        """

    def adopt(self) -> None:
        """Read and commit there from now on. The owner's thread, before anything else is committed."""

    def give_up(self) -> None:
        """Have ``copy`` or ``catch_up``, on another thread, end soon with an error."""

    def close(self) -> None:
        """End it: what was not adopted is removed. Any thread, but not beside another call."""


class Backend(Protocol):
    """An engine: buckets of keys and values that change a batch at a time."""

    def begin_read(self) -> ReadTxn:
        """Pin the last committed state."""

    def commit(self, batch: WriteBatch) -> None:
        """Make a batch durable.

        Raises:
            MapFullError: no room before ``grow``; otherwise as SpaceError.
            SpaceError: no room; nothing of the batch is visible and it may be tried again.
            StorageError: the disk failed; the engine must not be used any more.
        """

    def grow(self) -> bool:
        """Make room in the map for a batch that found it full. The thread that commits must be idle.

        Returns:
            False: a read transaction is open, so nothing has been changed; try again later.

        Raises:
            SpaceError: it cannot be grown.
        """

    @property
    def size_bytes(self) -> int:
        """Space taken on disk, as of the last commit."""

    @property
    def size_in_use_bytes(self) -> int:
        """The part of it that holds data; the rest is free for reuse."""

    def copy_to(self, path: Path) -> None:
        """Write a consistent compact copy of the last committed state to a new file, durable on return."""

    def copy_pieces(self) -> Generator[bytes, None, None]:
        """Iterate over the bytes of the file that ``copy_to`` writes; to be closed, on the thread that iterates."""

    @property
    def is_sealed(self) -> bool:
        """Whether a checksum covers what has none of its own: then it does so in a copy too."""

    def check(self, rest: Callable[[float], None]) -> None:
        """Read all of the last committed state, pinned meanwhile, and compare it with its checksums. Any thread.

        Arguments:
            rest: called with the seconds of each piece of work; may wait, and ends the check by raising.

        Raises:
            CorruptionError: says what is damaged.
            StorageError: it could not be read to its end, which says nothing of what it holds.
        """

    def open_copy(self, path: Path) -> Backend:
        """Open a database that ``copy_to`` made, where it is; close it before anything is done with the file."""

    def defragment(self, copy: Path) -> Defragmentation:
        """Begin to exchange the database for a compact copy of itself, one at a time; close it in the end.

        Arguments:
            copy: path of the copy, on the same file system, where nothing is.

        Raises:
            StorageError: one is under way already.
        """

    def replace(self, path: Path) -> None:
        """Go on with another database, made by ``copy_to``, moved over this one. No batch may be on its way.

        Readers that are open go on reading the old one.

        Arguments:
            path: of the other database, gone afterwards.

        Raises:
            StorageError: nothing is changed.
            InvariantError: the files were exchanged, but a crash may undo that.
        """

    def close(self) -> None:
        """Release everything. Read transactions must be closed before."""
