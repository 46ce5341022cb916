"""The files of database transfers: names, disk space, removal; and counts of these transfers for the metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

from raftkv.errors import SpaceError, StorageError, UnwrittenError
from raftkv.histograms import Buckets, doubling
from raftkv.storage.backend.environment import lock_path
from raftkv.storage.datadir import remove_unneeded
from raftkv.storage.mvcc import Store

_log = logging.getLogger(__name__)

DISK_RESERVE_BYTES: Final = 80 * 1024 * 1024
"""Free disk space below which writes are refused, and which a copy of a database leaves: space for the log, a database
commit, and deletes that free space."""

MEANWHILE_MAX_BYTES: Final = 176 * 1024 * 1024
"""Maximum space for writes made during the copy: two log segments and database commits. A smaller database is copied
sooner, so as much as its size is enough."""

PARTIAL_SUFFIX: Final = ".part.tmp"
"""Suffix of the file with the received part of a database. Older versions delete it, like all ``.tmp`` files."""

_RECEIVED: Final = re.compile(r"([0-9a-f]{16})\.snap\.db")
_LEFT: Final = re.compile(r"[0-9a-f]{16}\.snap\.db(-lock)?|[0-9a-f.]+\.out\.db(-lock)?|.*\.tmp")

T = TypeVar("T")
_numbers: Final = count()


def snapshot_path(directory: Path, index: int) -> Path:
    """Return the path where a received database waits for its installation."""
    return directory / f"{index:016x}.snap.db"


def outgoing_path(directory: Path) -> Path:
    """Return a name not used by another copy of this process: LMDB refuses a name that it has open, even if renamed."""
    return directory / f"{next(_numbers):x}.out.db"


def incoming_path(directory: Path, from_: int) -> Path:
    """Return a name not used by anything else received by this process."""
    return directory / f"{from_:016x}.{next(_numbers):x}.tmp"


def remove_leftovers(directory: Path) -> None:
    """Delete files that a crash left behind; call it when nothing is awaited.

    Partial files of a database that may still come stay: the receiver resumes or deletes them. Files with other names
    stay too, such as a copy that an operator has put next to the database.
    """
    for path, _ in _found(directory, _LEFT):
        if not path.name.endswith(PARTIAL_SUFFIX):
            remove_unneeded(path)


def _found(directory: Path, names: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    """Return files that could be removed; none, with a warning, if the directory cannot be read."""
    try:
        return [(path, match) for path in directory.iterdir() if (match := names.fullmatch(path.name)) is not None]
    except OSError as error:
        _log.warning("cannot look for leftover files in %s: %s", directory, error.strerror)
        return []


def remove_received(directory: Path, index: int) -> None:
    """Delete received databases that a state of entry ``index`` makes useless.

    Arguments:
        directory: directory of the databases.
        index: last entry in the state.
    """
    for path, match in _found(directory, _RECEIVED):
        if int(match[1], 16) <= index:
            remove_soon(path)


def remove_database(path: Path) -> None:
    """Delete a copy and its lock file."""
    remove_unneeded(path)
    remove_unneeded(lock_path(path))


def remove_soon(path: Path) -> None:
    """Delete a copy, on a thread if a loop is running: freeing a gigabyte takes half a second. The name is free at
    once.
    """
    remove_unneeded(lock_path(path))
    unwanted = path.with_name(f"{next(_numbers):x}.unwanted.tmp")
    try:
        path.rename(unwanted)
    except FileNotFoundError:
        return
    except OSError:
        unwanted = path
    try:
        asyncio.get_running_loop().run_in_executor(None, remove_unneeded, unwanted)
    except RuntimeError:
        remove_unneeded(unwanted)


def free_disk_bytes(directory: str | Path) -> int:
    """Return the free disk space of a directory for this process. Raises OSError."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def check_room(
    directory: Path,
    size_bytes: int,
    what: str = "a snapshot",
    free_disk_bytes: Callable[[str | Path], int] = free_disk_bytes,
) -> None:
    """Refuse a copy that would leave too little disk space.

    Arguments:
        directory: a directory on the disk.
        size_bytes: size of the copy.
        what: name of the copy.
        free_disk_bytes: returns the free disk space of a directory.

    Raises:
        SpaceError: there is too little space; the message has both figures.
        StorageError: the free space cannot be determined.
    """
    try:
        free_bytes = free_disk_bytes(directory)
    except OSError as error:
        raise StorageError(f"cannot see how much room {directory} has for {what}: {error.strerror}") from error
    needed_bytes = size_bytes + min(size_bytes, MEANWHILE_MAX_BYTES) + DISK_RESERVE_BYTES
    if free_bytes < needed_bytes:
        raise SpaceError(
            f"{what} of {size_bytes >> 20} MiB needs {needed_bytes >> 20} MiB free in {directory}, "
            f"where {free_bytes >> 20} MiB are: make room"
        )


_TRANSFER_S: Final = doubling(0.1, 10)


PEERS_MAX: Final = 128
"""Maximum number of counted ids: any caller may claim one on a peer port without TLS."""


class Transfers:
    """Counts of transfers in one direction, by member.

    Attributes:
        under_way: current transfers.
        succeeded, failed: finished transfers.
        durations: durations of successful transfers, in seconds.
    """

    def __init__(self) -> None:
        self.under_way: dict[int, int] = {}
        self.succeeded: dict[int, int] = {}
        self.failed: dict[int, int] = {}
        self.durations: dict[int, Buckets] = {}

    @contextmanager
    def of(self, peer_id: int) -> Iterator[None]:
        """Count the block as one transfer; any exception is a failure.

        Arguments:
            peer_id: id of the other end.
        """
        if peer_id not in self.under_way:
            self._make_room()
        self.under_way[peer_id] = self.under_way.get(peer_id, 0) + 1
        self.succeeded.setdefault(peer_id, 0)
        self.failed.setdefault(peer_id, 0)
        began_s = time.perf_counter()
        try:
            yield
        except BaseException:
            self.failed[peer_id] += 1
            raise
        else:
            self.succeeded[peer_id] += 1
            self.durations.setdefault(peer_id, Buckets(_TRANSFER_S)).observe(time.perf_counter() - began_s)
        finally:
            self.under_way[peer_id] -= 1

    def _make_room(self) -> None:
        """Forget the first member without a current transfer if there are too many."""
        if len(self.under_way) >= PEERS_MAX:
            idle = [peer_id for peer_id, count in self.under_way.items() if not count]
            for counts in (self.under_way, self.succeeded, self.failed, self.durations):
                for peer_id in idle[:1]:
                    counts.pop(peer_id, None)


LOOK_S: Final = 0.05
"""Seconds between two checks whether a commit has failed: the owner of the store retries every tenth of a second."""


def _always() -> bool:
    return True


async def when_durable(
    store: Store, begin: Callable[[Callable[[T], None]], None], is_wanted: Callable[[], bool] = _always
) -> T:
    """Wait for something that the store does after a commit; return its result.

    A commit that finds no space is retried for as long as the member lives, so waiting for it could take days.

    A member that stops in the middle of an entry commits nothing any more: a reader must not wait for it forever.

    Arguments:
        store: store with the commit.
        begin: requests it; its argument is the function to call with the result.
        is_wanted: returns whether to continue waiting; called from time to time.

    Raises:
        UnwrittenError: a commit found no space meanwhile.
        StorageError: the wait was cancelled.
    """
    earlier = store.space_error
    ready: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    begin(lambda given: None if ready.done() else ready.set_result(given))
    while not (await asyncio.wait((ready,), timeout=LOOK_S))[0]:
        error = store.space_error
        # An earlier error may be outdated: space was freed, and the commit that finds it is in progress.
        if error is not None and error is not earlier:
            ready.cancel()
            raise UnwrittenError from error
        if not is_wanted():
            ready.cancel()
            raise StorageError("what was written is not waited for any more")
    return ready.result()


async def flushed(store: Store, is_wanted: Callable[[], bool] = _always) -> None:
    """Wait until everything written so far is in the database.

    Arguments:
        store: the store.
        is_wanted: as in ``when_durable``, which also documents the errors.
    """

    def begin(done: Callable[[None], None]) -> None:
        store.flush(partial(done, None))

    await when_durable(store, begin, is_wanted)
