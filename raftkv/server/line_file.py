"""A file of lines that others may move, delete or truncate meanwhile; what keeps it small is up to subclasses.

Law: lines are written whole and in order. What a full disk has cut off is gone on with, in the same file.

    file = LineFile("audit.log", "the audit log", mode=0o600)
    file.write(b"line\\n")          # OSError: the rest waits inside, and the next call begins with it
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

from raftkv.errors import ConfigError

_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK


class LineFile:
    """One open file, found anew by its name before each write.

    Arguments:
        path: of the file.
        subject: what it is, for the message of a failure.
        mode: permissions that it has at most; None: those of new files, or of the one that is there.

    Raises:
        ConfigError: it cannot be opened; one line for the user.
    """

    def __init__(self, path: str, subject: str, mode: int | None = None) -> None:
        self.path = Path(path)
        self._mode = mode
        self._rest = b""
        self._is_amid_line = False
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"cannot write {subject} to {path}: {error.strerror}") from error

    def _open(self) -> None:
        descriptor = os.open(self.path, _FLAGS, 0o666 if self._mode is None else self._mode)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a file")
        if self._mode is not None and status.st_uid == os.geteuid():
            wanted = self._mode if not status.st_size else status.st_mode & self._mode
            if status.st_mode & 0o777 != wanted & 0o777:
                os.fchmod(descriptor, wanted & 0o777)
        if self._mode is None:
            # The next one can be read by whoever can read this one, whatever the umask is by then.
            self._mode = status.st_mode & 0o777
        self._descriptor = descriptor
        self._identity = status.st_dev, status.st_ino
        self.size_bytes = status.st_size

    def write(self, lines: bytes) -> None:
        """Append lines to the file; to a new one if it is full, or was moved away."""
        self._rest += lines
        if not self._is_amid_line:
            self._follow()
            self.make_room(len(self._rest))
        while self._rest:
            written = os.write(self._descriptor, self._rest)
            self.size_bytes += written
            self._rest = self._rest[written:]
            self._is_amid_line = bool(self._rest)

    def make_room(self, size_bytes: int) -> None:
        """Rotate the file if so many bytes more are too many; here: never."""

    def _follow(self) -> None:
        """Open the file anew if another, or none, has its name."""
        try:
            status = os.stat(self.path)
            same = (status.st_dev, status.st_ino) == self._identity
            self.size_bytes = status.st_size
        except FileNotFoundError:
            same = False
        if not same:
            self.reopen()

    def reopen(self) -> None:
        """Go on in the file that has the name now, or in a new one."""
        before = self._descriptor
        self._open()
        os.close(before)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class LineStream:
    """Standard output or error, or whatever else is no file.

    Arguments:
        descriptor: of the stream.
        is_own: whether to close it.
    """

    def __init__(self, descriptor: int, *, is_own: bool = False) -> None:
        self._descriptor = descriptor
        self._is_own = is_own
        self._rest = b""

    def write(self, lines: bytes) -> None:
        """Write lines to the stream, whole."""
        self._rest += lines
        while self._rest:
            self._rest = self._rest[os.write(self._descriptor, self._rest) :]

    def close(self) -> None:
        """Close it, unless it is the process's."""
        if self._is_own:
            os.close(self._descriptor)
