"""The simulated database of a member: an in-memory engine that holds exactly the committed data, the mark of applied
entries, and databases received from other members.

Owns the part of ``DATA/member/snap`` that survives a crash. A commit takes a while on the writer's thread and is then
durable at once; a crash before that loses it. A received database is durable once it has its final name.
"""

from __future__ import annotations

import fnmatch
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path

from raftkv.errors import StorageError
from raftkv.raft.types import SnapshotMeta
from raftkv.replica.snapshots import snapshot_path
from raftkv.storage import schema
from raftkv.storage.backend.base import Backend, Defragmentation, WriteBatch
from raftkv.storage.backend.lmdb import Done, Job
from raftkv.storage.failpoints import failpoint
from tests.sim.devices.wal_disk import DiskParameters, Threads
from tests.storage.memory import MemoryBackend

_MARKS_LOST_MAX = 16
"""Stores into the mapped page that a power cut may lose."""


class File:
    """The part of ``pathlib.Path`` that received databases need."""

    def __init__(self, directory: Directory, name: str) -> None:
        self.directory = directory
        self.name = name

    def __str__(self) -> str:
        return self.name

    def exists(self) -> bool:
        return self.name in self.directory.files

    def unlink(self, missing_ok: bool = False) -> None:
        self.directory.files.pop(self.name, None)

    def with_name(self, name: str) -> File:
        return File(self.directory, name)


class Directory:
    """Databases by name."""

    def __init__(self) -> None:
        self.files: dict[str, MemoryBackend] = {}

    def __truediv__(self, name: str) -> File:
        return File(self, name)

    def received(self, index: int) -> File | None:
        """Return the received database of an entry that waits to be installed."""
        name = snapshot_path(Path(), index).name
        return File(self, name) if name in self.files else None

    def glob(self, pattern: str) -> list[File]:
        return [File(self, name) for name in fnmatch.filter(self.files, pattern)]

    def iterdir(self) -> list[File]:
        return [File(self, name) for name in self.files]


class Database(MemoryBackend):
    """The engine: see ``Backend``."""

    noted: list[WriteBatch] | None = None
    """Batches since a copy was made that is to take this one's place."""

    def commit(self, batch: WriteBatch) -> None:
        failpoint("beforeCommit")
        super().commit(batch)
        if self.noted is not None:
            self.noted.append(batch)
        failpoint("afterCommit")

    def copy_to(self, path: File) -> None:
        path.directory.files[path.name] = self.clone()

    def open_copy(self, path: File) -> Backend:
        return path.directory.files[path.name]

    def defragment(self, path: File) -> Defragmentation:
        return SimulatedDefragmentation(self, path)

    def replace(self, path: File) -> None:
        failpoint("replaceBeforeRename")
        if self._readers:
            raise StorageError("the database is being read")
        self.noted = None
        other = path.directory.files.pop(path.name)
        self.buckets, self._size_bytes = other.buckets, other._size_bytes


class SimulatedDefragmentation:
    """Implements ``Defragmentation``: changes since the copy are recorded and then applied to the copy."""

    def __init__(self, database: Database, path: File) -> None:
        self._database = database
        self._path = path
        self._copy: MemoryBackend | None = None

    def copy(self) -> None:
        failpoint("defragBeforeCopy")
        self._copy = self._path.directory.files[self._path.name] = self._database.clone()
        self._database.noted = []
        failpoint("defragAfterCopy")

    def catch_up(self) -> int:
        noted = self._database.noted
        if noted is None or self._copy is None:
            raise StorageError("the database was exchanged")
        self._database.noted = []
        for batch in noted:
            self._copy.commit(batch)
        return len(noted)

    def finish(self) -> None:
        self.catch_up()
        failpoint("defragBeforeRename")
        copy = self._path.directory.files.pop(self._path.name)
        self._database.buckets, self._database._size_bytes = copy.buckets, copy._size_bytes
        failpoint("defragAfterRename")

    def adopt(self) -> None:
        self._database.noted = None

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        self._database.noted = None
        self._path.unlink()


def applied_meta(database: MemoryBackend) -> SnapshotMeta:
    """Return the log position of a database."""
    get = database.buckets[schema.META].get
    return SnapshotMeta(
        schema.decode_integer(get(schema.META_CONSISTENT_INDEX)) or 0,
        schema.decode_integer(get(schema.META_TERM)) or 0,
        schema.decode_conf_state(get(schema.META_CONF_STATE)),
    )


class Mark:
    """Replaces ``storage.applied_mark.AppliedMark``."""

    def __init__(self) -> None:
        self.index = self.term = 0
        self._newest: deque[tuple[int, int]] = deque([(0, 0)], _MARKS_LOST_MAX)

    def note(self, index: int, term: int) -> None:
        """Implement ``AppliedMark.note``."""
        if index <= self.index:
            return
        self.index, self.term = index, term
        self._newest.append((index, term))

    def forget(self) -> None:
        """Implement ``AppliedMark.forget``."""
        self.index = self.term = 0

    def power_cut(self, rng: random.Random) -> None:
        """Lose some of the last stores."""
        self.index, self.term = rng.choice(self._newest)
        self._newest = deque([(self.index, self.term)], _MARKS_LOST_MAX)


class CommitThread:
    """Carries out commits one at a time, each after a while. A ``Writer``.

    Arguments:
        threads: of the member.
        rng, parameters: how long a commit takes.
    """

    def __init__(self, threads: Threads, rng: random.Random, parameters: DiskParameters) -> None:
        self.slow_factor = 1
        self._threads = threads
        self._rng = rng
        self._parameters = parameters
        self._jobs: deque[tuple[Job, Done]] = deque()

    def submit(self, job: Job, done: Done) -> None:
        """Implement ``Writer.submit``."""
        self._jobs.append((job, done))
        if len(self._jobs) == 1:
            self._next()

    def _next(self) -> None:
        delay_s = self.slow_factor * self._rng.expovariate(1.0 / self._parameters.commit_s_mean)
        self._threads.later(delay_s, self._run, self._jobs[0])

    def _run(self, item: tuple[Job, Done]) -> None:
        if self._jobs and self._jobs[0] is item:
            self._run_first()
            if self._jobs:
                self._next()

    def _run_first(self) -> None:
        job, done = self._jobs[0]
        error = _outcome(job)
        self._jobs.popleft()
        self._threads.call_soon(done, error)

    def heal(self) -> None:
        """Commit fast from now on, the commit in progress included."""
        self.slow_factor = 1
        self._parameters = DiskParameters()
        if self._jobs:
            self._next()

    def close(self) -> None:
        """Implement ``Writer.close``."""
        self._jobs.clear()


def _outcome(job: Callable[[], None]) -> BaseException | None:
    try:
        job()
    except Exception as error:
        return error
    return None
