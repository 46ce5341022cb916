"""Directories that only their owner may change.

Owns the one check that every data directory of a member passes before anything is read from it or written to it:
whoever can write there can replace the log of the member, and so forge its vote and its acknowledgements.

Files inside are made 0600 by whoever makes them; a directory that others may *list* is therefore accepted, one that
others may *write* is not.
"""

from __future__ import annotations

import os
import stat

from raftkv.errors import StorageError

DIRECTORY_MODE = 0o700
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def ensure_private_directory(path: str | os.PathLike[str]) -> str:
    """Make ``path`` (and its parents) with mode 0700, or check the directory that is there; return it as text.

    Raises ``StorageError``, in one line for the user: not a directory, writable by group or others, or not usable
    by this process. A new directory is durable on return: its parent was synced.
    """
    path = os.fspath(path)
    try:
        _make_missing(path)
        mode = os.stat(path).st_mode
    except OSError as error:
        raise StorageError(f"cannot make directory {path}: {error.strerror}") from error
    if not stat.S_ISDIR(mode):
        raise StorageError(f"{path} is not a directory")
    if mode & _WRITABLE_BY_OTHERS:
        raise StorageError(
            f"directory {path} has mode {stat.S_IMODE(mode):04o}: group or others may write to it; use chmod 0700"
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise StorageError(f"directory {path} is not readable and writable by this user")
    return path


def _make_missing(path: str) -> None:
    """``makedirs`` that gives every level 0700 (the standard one does so for the last only) and syncs the parents."""
    if os.path.lexists(path):
        return
    parent = os.path.dirname(os.path.abspath(path))
    _make_missing(parent)
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        return  # another member on the same machine made the common parent at the same moment
    sync_directory(parent)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable: a rename or a new file is lost in a power cut without this."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
