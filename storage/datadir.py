"""Checks of the data directory: no other user may change it, and its files must be raftkv's.

Every data directory of a member passes ``ensure_private_directory`` before the first read or write: a user who can
write there can replace the log of the member, and so forge its vote and its acknowledgements.

Files are created with mode 0600. A directory that others may *list* is therefore accepted; a directory that others may
*write* is refused.

``check_file`` refuses what is not a file. ``refuse_etcd`` refuses directories of etcd, which uses the same file names.
``format_refusal`` makes the error message for files that a later version wrote.

A format number has 32 bits: the format in the low half and, from the second format on, the raftkv version that reads it
in the high half (major and minor version, one byte each), so that an older raftkv can name the version to install.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import logging
import os
import pwd
import stat
from pathlib import Path

from raftkv import __version__
from raftkv.errors import StorageError

_log = logging.getLogger(__name__)

DIRECTORY_MODE = 0o700
NO_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
"""Errors of file systems that cannot reserve space."""
_ROOT = 0


def ensure_private_directory(path: str | os.PathLike[str], *, is_own: bool = True) -> str:
    """Create ``path`` (and its parents) with mode 0700, or check the existing directory; return the path as text.

    Raises ``StorageError`` with one line for the user if it is not a directory, belongs to another user (allowed if
    ``is_own`` is False: the directory may be on another machine's disk), is writable by other users (``is_shared``), or
    cannot be used by this process. A volume owned by root that this process may write to, as a kubelet creates it, is
    accepted. A new directory is durable on return: its parent was synced.
    """
    path = os.fspath(path)
    try:
        _make_missing(path)
        found = os.stat(path)
    except OSError as error:
        raise StorageError(obstacle(path) or f"cannot make directory {path}: {error.strerror}") from error
    mode = found.st_mode
    if not stat.S_ISDIR(mode):
        raise StorageError(obstacle(path))
    owner_may_be = (os.geteuid(), _ROOT) if os.access(path, os.W_OK) else (os.geteuid(),)
    if is_own and found.st_uid not in owner_may_be:
        raise StorageError(
            f"directory {path} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}: "
            "use chown, or run as its owner"
        )
    # Refused, not corrected: other users may need these rights.
    if is_shared(found):
        raise StorageError(
            f"directory {path} has mode {stat.S_IMODE(mode):04o}: group or others may write to it; use chmod 0700"
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            raise StorageError(
                f"directory {path} is on a file system that is mounted read-only, as the kernel does after an error of "
                "the disk: see dmesg, and mount it writable"
            )
        raise StorageError(f"directory {path} is not readable and writable by this user")
    return path


def check_file(path: Path) -> None:
    """Refuse anything but a file at a path, where there may be nothing.

    Raises:
        StorageError: something else is there, or the path cannot be examined.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise StorageError(f"{path} is not a file, and raftkv keeps one there: move it elsewhere, then start again")


def warn_if_short(path: Path, whole_bytes: int) -> None:
    """Warn of a mapped file that lacks its end; there may be none.

    A member that has such a file mapped is ended by SIGBUS when it reads or writes there, without time for a message.

    Arguments:
        path: the file.
        whole_bytes: smallest size of the whole file.
    """
    if path.exists() and (found_bytes := path.stat().st_size) < whole_bytes:
        _log.warning(
            "another program has cut short %s to %d bytes, which ends a running member by a Bus error (SIGBUS): find "
            "that program, and keep it from the files of members; this file is made whole now",
            *(path, found_bytes),
        )


def is_shared(found: os.stat_result) -> bool:
    """Return whether users other than the owner, this process's user and root may write to a directory.

    Write permission of the group is harmless if the group has no other user: either the group is unknown on this
    machine (a pod's ``fsGroup``, to which a kubelet gives all rights at each start), or it is a user's private group.

    Arguments:
        found: result of ``os.stat``.
    """
    if found.st_mode & stat.S_IWOTH or not found.st_mode & stat.S_IWGRP:
        return bool(found.st_mode & stat.S_IWOTH)
    try:
        group = grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    allowed = (_ROOT, os.geteuid(), found.st_uid)
    users = pwd.getpwall()
    names = {user.pw_name for user in users if user.pw_uid in allowed}
    has_others = any(user.pw_gid == found.st_gid and user.pw_uid not in allowed for user in users)
    return has_others or group.gr_name not in names or not names.issuperset(group.gr_mem)


def obstacle(path: str) -> str:
    """Return what prevents creating a directory, such as ``/a/b is not a directory``; empty if nothing is known to."""
    there = os.path.abspath(path)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if os.path.isdir(there):
        return ""
    return f"{there} is a link to nothing" if os.path.islink(there) else f"{there} is not a directory"


def format_refusal(what: str, stated: int, known: int) -> str:
    """Return the error message for files of an unknown format; empty if the format is the known one.

    Arguments:
        what: the files, as the subject of a sentence.
        stated: format number in the files.
        known: format number that this version reads and writes.
    """
    if stated == known:
        return ""
    number, minor, major = stated & 0xFFFF, stated >> 16 & 0xFF, stated >> 24
    needed = f"raftkv {major}.{minor} or later" if major or minor else "the raftkv that wrote it, or a later one,"
    return (
        f"{what} has format {number}, and raftkv {__version__} reads format {known}: run {needed} on this data "
        "(nothing was changed)"
    )


_WAL_MAGIC = b"\xa7rkW"
ETCD_DATABASE = b"\xed\xda\x0c\xed", 16
"""First bytes of a database of etcd, and their place."""


def refuse_etcd(data_dir: str, wal_dir: str) -> None:
    """Refuse directories that hold a log or a database of etcd.

    Arguments:
        data_dir: data directory of a member.
        wal_dir: directory of its log.

    Raises:
        StorageError: the files are etcd's; one line for the user.
    """
    segments = sorted(name for name in _names(wal_dir) if name.endswith(".wal"))
    log = os.path.join(wal_dir, segments[0]) if segments else ""
    database = os.path.join(data_dir, "member", "snap", "db")
    # Recognised by their contents: the file names are the same for both programs.
    if begins(database, *ETCD_DATABASE) or (log and _is_etcd_log(log)):
        raise StorageError(
            f"{data_dir} is the data directory of an etcd member, which raftkv cannot read: give raftkv a --data-dir "
            "of its own, and copy the keys with `raftkvctl make-mirror` while both run"
        )


def _is_etcd_log(path: str) -> bool:
    """Return whether a file starts like etcd's log: ``08 04`` (record type 4, checksum chain) after 8 length bytes."""
    return begins(path, b"\x08\x04", 8) and not begins(path, _WAL_MAGIC, 0)


def begins(path: str | Path, data: bytes, offset: int) -> bool:
    """Return whether a file has these bytes at an offset; False: it cannot be read."""
    try:
        # A pipe in the place of the file would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            file.seek(offset)
            return file.read(len(data)) == data
    except OSError:
        return False


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _make_missing(path: str) -> None:
    """Create a directory and its parents with mode 0700 each (``os.makedirs`` sets it for the last only); sync them."""
    if os.path.lexists(path):
        return
    # From the top down: each new directory is synced into a parent that is already durable.
    parent = os.path.dirname(os.path.abspath(path))
    _make_missing(parent)
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        return  # another member on the same machine created the common parent at the same time
    sync_directory(parent)


def sync_directory(path: str) -> None:
    """Make the file names in a directory durable: without this, a power cut may lose a rename or a new file."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        give_back(fd)


def give_back(descriptor: int) -> None:
    """Close a descriptor; errors are ignored because the data was synced before."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def remove_unneeded(path: Path) -> None:
    """Remove a file that is no longer needed, if it exists; a failure is logged as a warning."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("cannot remove the leftover %s: %s; remove it by hand", path, error.strerror)
