"""Helpers for fsspec: a URL as a file system, one-line errors, durable names and contents.

    files = open_url("s3://bucket/job")       # files.fs, files.root, files.is_local
    describe(error)                           # one line, and what to do about it
    sync("/data/model.bin")                   # durable when it returns

Used by checkpoints and ``raftkv backup``.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import IO, Any, Final, NamedTuple

from raftkv.client import arguments
from raftkv.errors import ConfigError

_ADVICE: Final = {
    errno.ENOSPC: "free some space there, or use another place",
    errno.EDQUOT: "free some of the quota there, or use another place",
    errno.EACCES: "give this process the right to do so, or use another place",
    errno.EPERM: "give this process the right to do so, or use another place",
    errno.EROFS: "use a place that can be written to",
    errno.ENOENT: "check that the directory or bucket exists",
}


_SYNCS_NO_DIRECTORY: Final = frozenset((errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP))
"""Errors of file systems that cannot sync directories, such as some network file systems."""


class Files(NamedTuple):
    """A directory of a file system.

    Attributes:
        fs: fsspec file system.
        root: the directory, as the file system names it.
        is_local: whether it is a local directory.
    """

    fs: Any
    root: str
    is_local: bool


def open_url(url: str, *, extra: str) -> Files:
    """Open the directory at a URL or path.

    Arguments:
        url: URL of the directory.
        extra: extra of raftkv to install if fsspec is missing.

    Raises:
        ConfigError: the URL is empty or of an unknown kind; or fsspec, or its package for the URL, is not installed.
    """
    if not url:
        raise ConfigError("the URL of a directory is empty; name one")  # fsspec would take the working directory
    try:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem
    except ImportError:
        raise ConfigError(f"files at a URL need fsspec: pip install 'raftkv[{extra}]'") from None
    if "://" not in url or url.startswith("file://"):
        # fsspec would treat a name with two colons as a chain of file systems, and drop the text after them.
        path = os.path.abspath(url.removeprefix("file://"))
        return Files(LocalFileSystem(), path.rstrip("/"), is_local=True)
    try:
        fs, root = url_to_fs(url)
    except Exception as error:  # each kind of URL has different errors
        raise ConfigError(f"cannot use {url}: {describe(error)}") from None
    if "::" in url and not str(root).rstrip("/").endswith(url.rstrip("/").rpartition("/")[2]):
        raise ConfigError(f"cannot use {url}: :: separates file systems in a URL; use a name without it")
    protocols = fs.protocol if isinstance(fs.protocol, tuple | list) else (fs.protocol,)
    return Files(fs, str(root).rstrip("/"), "file" in protocols)


def absolute(uri: str) -> str:
    """Return a URL, or an absolute path, without trailing slashes.

    >>> absolute("s3://bucket/job/"), absolute("memory://"), absolute("/"), absolute("")
    ('s3://bucket/job', 'memory://', '/', '')
    """
    uri = arguments.path(uri, "the place of checkpoints")
    scheme, separator, path = uri.rpartition("://")
    if separator:
        return scheme + separator + (path.rstrip("/") or path[:1])
    return os.path.abspath(uri) if uri else ""


def describe(error: BaseException) -> str:
    """Return an error as one line with advice; file systems have different errors, and most do not say what to do."""
    number = error.errno if isinstance(error, OSError) else None
    text = error.strerror if isinstance(error, OSError) and error.strerror and number in _ADVICE else str(error)
    line = " ".join(text.split()) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        number = errno.ENOENT
        line = line if " " in line else "there is no such file"  # many say only the path
    elif isinstance(error, PermissionError):
        number = errno.EACCES
    return f"{line}; {_ADVICE[number]}" if number in _ADVICE else line


def open_file(path: str) -> IO[bytes]:
    """Open a local file for reading, without blocking on a pipe or device in its place.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "it is not a file but a pipe or a device; delete it", path)


def sync(path: str) -> None:
    """Make the contents of a file, or the names in a directory, durable; some file systems sync no directories."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _SYNCS_NO_DIRECTORY or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)
