"""An in-memory engine with the guarantees of the one on disk, and a writer whose commits end on command.

The object acts as the disk: it survives a crash of its store, and holds exactly the committed data. Readers are
isolated at a cost proportional to the changes: every open reader has a table of the old values of keys changed after it
began, and looks there first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing

from sortedcontainers import SortedDict

from raftkv.errors import InvariantError
from raftkv.storage import schema
from raftkv.storage.backend.base import WriteBatch, in_runs
from raftkv.storage.backend.lmdb import Done, InlineWriter, Job
from raftkv.storage.revision import checked_runs


class MemoryReadTxn:
    """A state pinned by undo entries: the old values of what was changed after it began."""

    def __init__(self, backend: MemoryBackend) -> None:
        self._backend = backend
        self.undo: dict[tuple[bytes, bytes], bytes | None] = {}

    def get(self, bucket: bytes, key: bytes) -> bytes | None:
        """Implement ``ReadTxn.get``."""
        place = bucket, key
        if place in self.undo:
            return self.undo[place]
        value: bytes | None = self._backend.buckets[bucket].get(key)
        return value

    def get_record(self, revision_key: bytes) -> bytes | None:
        """Implement ``ReadTxn.get_record``."""
        return self.get(schema.KEY, revision_key)

    def items(self, bucket: bytes, start: bytes = b"", end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Implement ``ReadTxn.items``."""
        now = self._backend.buckets[bucket].irange(start, end, inclusive=(True, False))
        # Keys that were deleted since are in the undo table alone.
        undone = (key for name, key in self.undo if name == bucket and key >= start and (end is None or key < end))
        for key in sorted({*now, *undone}):
            value = self.get(bucket, key)
            if value is not None:
                yield key, value

    def runs(self, bucket: bytes, items_max: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """Implement ``ReadTxn.runs``."""
        return in_runs(self.items(bucket), items_max)

    def close(self) -> None:
        """Implement ``ReadTxn.close``."""
        self._backend._readers.discard(self)


class MemoryBackend:
    """The engine in memory; its buckets are those of the last commit."""

    def __init__(self) -> None:
        self.buckets: dict[bytes, SortedDict[bytes, bytes]] = {name: SortedDict() for name in schema.BUCKETS}
        self._readers: set[MemoryReadTxn] = set()
        self.commits = 0
        self._size_bytes = 0

    def clone(self) -> MemoryBackend:
        """Return an independent copy of the committed state: a snapshot for another member of a simulation."""
        other = MemoryBackend()
        other.buckets = {name: SortedDict(bucket) for name, bucket in self.buckets.items()}
        other._size_bytes = self._size_bytes
        return other

    def begin_read(self) -> MemoryReadTxn:
        """Implement ``Backend.begin_read``."""
        reader = MemoryReadTxn(self)
        self._readers.add(reader)
        return reader

    def commit(self, batch: WriteBatch) -> None:
        """Implement ``Backend.commit``."""
        last = self._last_record()
        for key, record in batch.records.items():
            # The same refusal as LMDB's append.
            if key <= last:
                raise InvariantError(f"record {key.hex()} is not after {last.hex()}")
            last = key
            self._set(schema.KEY, key, record)
        for key in batch.deletes:
            self._set(schema.KEY, key, None)
        for (bucket, key), value in batch.values.items():
            self._set(bucket, key, value)
        self.commits += 1

    def grow(self) -> bool:
        """Implement ``Backend.grow``. There is no map."""
        return True

    def _last_record(self) -> bytes:
        records = self.buckets[schema.KEY]
        return records.peekitem()[0] if records else b""

    def _set(self, bucket: bytes, key: bytes, value: bytes | None) -> None:
        items = self.buckets[bucket]
        old = items.get(key)
        for reader in self._readers:
            # The value before the first change since a reader began is the one that it goes on seeing.
            reader.undo.setdefault((bucket, key), old)
        if old is not None:
            self._size_bytes -= len(key) + len(old)
            del items[key]
        if value is not None:
            self._size_bytes += len(key) + len(value)
            items[key] = value

    @property
    def size_bytes(self) -> int:
        """Implement ``Backend.size_bytes``."""
        return self._size_bytes

    @property
    def size_in_use_bytes(self) -> int:
        """Implement ``Backend.size_in_use_bytes``."""
        return self._size_bytes

    @property
    def is_sealed(self) -> bool:
        """Implement ``Backend.is_sealed``: memory needs no seal."""
        return False

    def check(self, rest: Callable[[float], None]) -> None:
        """Implement ``Backend.check``."""
        with closing(self.begin_read()) as read:
            for _ in checked_runs(read):
                rest(0.0)

    def close(self) -> None:
        """Release the readers; what was committed stays, as on a disk."""
        self._readers.clear()


class ScriptedWriter:
    """A writer that holds its jobs: a simulation decides when a commit ends, or lets a crash lose it."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Job, Done]] = deque()

    def submit(self, job: Job, done: Done) -> None:
        """Implement ``Writer.submit``."""
        self._jobs.append((job, done))

    def __len__(self) -> int:
        return len(self._jobs)

    def run_next(self) -> None:
        """Carry out and report the oldest job."""
        job, done = self._jobs.popleft()
        InlineWriter().submit(job, done)

    def run_all(self) -> None:
        """Carry out everything, also what the reports submit."""
        while self._jobs:
            self.run_next()

    def close(self) -> None:
        """Implement ``Writer.close``. Drops what was not run: in a simulation, closing is a crash."""
        self._jobs.clear()
