"""Resolves a path given to raftkvutl, and checks whether a member uses it.

Finds the log and the database of a data directory, and checks the locks: a member holds an exclusive lock on ``wal``
and on ``wal/lock``, and LMDB a shared one on the first byte of ``db-lock`` while a process has the database open.
Invariant: a check creates no files. A wrong path is a ``StorageError`` with one line.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from raftkv.errors import StorageError
from raftkv.storage.backend.environment import lock_path
from raftkv.storage.datadir import obstacle as obstacle
from raftkv.storage.datadir import refuse_etcd
from raftkv.storage.wal import WAL
from raftkv.storage.wal.segment import LOCK_NAME


def log_of(path: str) -> str:
    """Return the directory of a log.

    Arguments:
        path: a data directory, or a directory with segments (a log, or archived segments).

    Raises:
        StorageError: there is no log.
    """
    below = os.path.join(path, "member", "wal")
    directory = below if os.path.isdir(below) else path
    _check_directory(path)
    refuse_etcd(path, directory)
    if not WAL.exists(directory):
        raise StorageError(f"there is no write-ahead log in {path}")
    return directory


def database_of(path: str) -> Path:
    """Return the path of a database.

    Arguments:
        path: a data directory, or the file.

    Raises:
        StorageError: there is no database, or it is etcd's.
    """
    if not os.path.lexists(path):
        raise StorageError(f"stat {path}: no such file or directory")
    if os.path.isfile(path):
        return Path(path)
    if not os.path.isdir(path):
        raise StorageError(f"{path} is neither a data directory nor the file of a database")
    refuse_etcd(path, os.path.join(path, "member", "wal"))
    database = Path(path, "member", "snap", "db")
    if not database.is_file():
        raise StorageError(f"stat {database}: no such file or directory")
    return database


def _check_directory(path: str) -> None:
    if not os.path.lexists(path):
        raise StorageError(f"stat {path}: no such file or directory")
    if not os.path.isdir(path):
        raise StorageError(f"{path} is not a directory")


@contextmanager
def held(data_dir: str) -> Iterator[Path]:
    """Lock a data directory against members during a change; yields the path of its database.

    Raises:
        StorageError: the path is not a data directory, or a member uses it.
    """
    database = database_of(data_dir)
    # If the log is elsewhere, a member that starts with it waits for the database.
    with _locked(os.path.join(data_dir, "member", "wal")) as is_free:
        if not is_free:
            raise _running(data_dir)
        with _closed(database):
            yield database


def is_running(log: str) -> bool:
    """Return whether a member has a log open.

    Arguments:
        log: directory of the log.
    """
    with _locked(log) as is_free:
        return not is_free


@contextmanager
def _locked(log: str) -> Iterator[bool]:
    """Lock the directory of a log and its lock file, where they exist, for the block; yield whether both were free."""
    is_free = True
    with ExitStack() as opened:
        for path in (log, os.path.join(log, LOCK_NAME)):
            with suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                opened.callback(os.close, descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    is_free = False
        yield is_free


def refuse_running(database: Path) -> None:
    """Refuse a database that another process has open.

    Raises:
        StorageError: another process has it open.
    """
    with _closed(database):
        return


@contextmanager
def _closed(database: Path) -> Iterator[None]:
    """Prevent others from opening a database within the block: LMDB waits for this lock before it opens the file.

    The lock belongs to the process: it is lost as soon as the lock file is closed anywhere in this process, so nothing
    in the block may open the database with locks.

    Raises:
        StorageError: another process has it open.
    """
    try:
        descriptor = os.open(lock_path(database), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except BlockingIOError:
            raise _running(str(database)) from None
        yield
    finally:
        os.close(descriptor)


def _running(path: str) -> StorageError:
    return StorageError(f"{path} is in use by a running member: stop it first, or ask it with raftkvctl")
