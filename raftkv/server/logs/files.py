"""Files of lines: one class writes each log of a member, and a subclass rotates it.

    file = LineFile("audit.log", "the audit log", mode=0o600)
    file.write(b"line\\n")          # OSError: the rest waits inside, and the next call begins with it

Lines are written whole and in order. A line that was cut by a full disk is completed later, in the same file. Other
programs may move, delete or truncate the file meanwhile. While no new file can be opened, or the file cannot be
rotated, lines go on into the open one, unless that was deleted. ``RotatedFile`` rotates like lumberjack (etcd's
library):

    raftkv.log                              the current file
    raftkv-2026-11-23T01-02-03.456.log      an older file, named by the time of its end
    raftkv-2026-11-22T01-02-03.456.log.gz   compressed

A file is rotated before a line that would make it larger than ``maxsize``. A thread then deletes and compresses old
files.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import re
import shutil
import stat
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from raftkv.config import LogRotation
from raftkv.errors import ConfigError

_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK


class LineFile:
    """An open file, which is looked up again by its name before each write.

    Arguments:
        path: path of the file.
        subject: description of the file for error messages.
        mode: most permissions of the file; None: the default of new files, or those of an existing file.

    Attributes:
        trouble: why the next file could not be begun, and lines go on into the open one; empty: nothing is wrong.

    Raises:
        ConfigError: the file cannot be opened; a one-line message for the user.
    """

    def __init__(self, path: str, subject: str, mode: int | None = None) -> None:
        self.path = Path(path)
        self.trouble = ""
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
            # The next file gets the permissions of this one, even if the umask changes.
            self._mode = status.st_mode & 0o777
        self._descriptor = descriptor
        self._identity = status.st_dev, status.st_ino
        self.size_bytes = status.st_size

    def write(self, lines: bytes) -> None:
        """Append lines to the file; to a new file if it is full or was moved away."""
        self._rest += lines
        try:
            if not self._is_amid_line:
                self._choose_file()
            while self._rest:
                written = os.write(self._descriptor, self._rest)
                self.size_bytes += written
                self._rest = self._rest[written:]
                self._is_amid_line = bool(self._rest)
        except MemoryError:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None

    def _choose_file(self) -> None:
        try:
            self._follow()
            self.make_room(len(self._rest))
            self.trouble = ""
        except OSError as error:
            # No reader would find lines in a deleted file: they wait.
            if not os.fstat(self._descriptor).st_nlink:
                raise
            self.trouble = error.strerror or str(error)

    def make_room(self, size_bytes: int) -> None:
        """Rotate the file if it has no room for ``size_bytes`` more; never in this class."""

    def _follow(self) -> None:
        """Reopen the file if another file, or none, has its name."""
        try:
            status = os.stat(self.path)
            same = (status.st_dev, status.st_ino) == self._identity
            self.size_bytes = status.st_size
        except FileNotFoundError:
            same = False
        if not same:
            self.reopen()

    def reopen(self) -> None:
        """Continue in the file that has the name now, or in a new one."""
        before = self._descriptor
        self._open()
        os.close(before)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class LineStream:
    """Standard output or error, or a pipe.

    Arguments:
        descriptor: descriptor of the stream.
        is_own: whether to close it.
    """

    trouble: Final = ""

    def __init__(self, descriptor: int, *, is_own: bool = False) -> None:
        self._descriptor = descriptor
        self._is_own = is_own
        self._rest = b""

    def write(self, lines: bytes) -> None:
        """Write lines to the stream, whole."""
        self._rest += lines
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._descriptor, self._rest) :]
        except MemoryError:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None

    def close(self) -> None:
        """Close the stream, unless it belongs to the process."""
        if self._is_own:
            os.close(self._descriptor)


DAY_S: Final = 86_400
CLOCK_S: Final = 60
"""A file whose name is later than now by more than this was named while the clock was wrong."""

COMPRESSED: Final = ".gz"
_TIME: Final = "%Y-%m-%dT%H-%M-%S"
_STAMP: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d)\.(\d{3})")
_SUBJECT: Final = "the log"


Output = LineFile | LineStream
"""Takes lines. After a failed write (OSError) the unwritten part waits inside, and the next call begins with it. A call
that raises MemoryError has taken nothing."""


class RotatedFile(LineFile):
    """A log file that is rotated.

    Arguments:
        path: path of the file.
        rotation: when to rotate, and what to do with old files.
        subject: subject of errors.
        mode: mode of the file; None: as the process makes files.
        max_bytes: size above which the file is rotated; 0: as ``rotation`` says.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(
        self, path: str, rotation: LogRotation, subject: str = _SUBJECT, mode: int | None = None, max_bytes: int = 0
    ) -> None:
        self._rotation = rotation
        self._max_bytes = max_bytes or rotation.size_max_bytes
        self._tidying: threading.Thread | None = None
        super().__init__(path, subject, mode)

    def make_room(self, size_bytes: int) -> None:
        """Rotate the file if it would become too large."""
        if self.size_bytes and self.size_bytes + size_bytes > self._max_bytes:
            os.replace(self.path, self._free_name())
            self.reopen()
            self._begin_to_tidy()

    def _free_name(self) -> Path:
        """Return a name with the current time, or with the next millisecond whose name is free."""
        now_ms = time.time_ns() // 1_000_000
        while True:
            moment = datetime.fromtimestamp(now_ms // 1000, None if self._rotation.localtime else UTC)
            stamp = f"{moment.strftime(_TIME)}.{now_ms % 1000:03d}"
            path = self.path.with_name(f"{self.path.stem}-{stamp}{self.path.suffix}")
            if not path.exists() and not path.with_name(path.name + COMPRESSED).exists():
                return path
            now_ms += 1

    def _begin_to_tidy(self) -> None:
        if self._tidying is None or not self._tidying.is_alive():
            self._tidying = threading.Thread(target=self.tidy, name="raftkv-log-tidying", daemon=True)
            self._tidying.start()

    def tidy(self) -> None:
        """Delete and compress rotated files; failures are retried after the next rotation."""
        rotation = self._rotation
        files = self._rotated()
        kept = files[: rotation.maxbackups] if rotation.maxbackups else files
        if rotation.maxage:
            oldest = time.time() - rotation.maxage * DAY_S
            kept = [(ended, path) for ended, path in kept if ended >= oldest]
        for _, path in set(files) - set(kept):
            with contextlib.suppress(OSError):
                path.unlink()
        if rotation.compress:
            for _, path in kept:
                if path.suffix != COMPRESSED:
                    with contextlib.suppress(OSError):
                        _compress(path)

    def close(self) -> None:
        """Close the file, after tidying has ended."""
        if self._tidying is not None:
            self._tidying.join()
        super().close()

    def _rotated(self) -> list[tuple[float, Path]]:
        """Return the rotated files by the time of their end, the youngest first.

        Files that end later than now are from a time when the clock was wrong. They come last: otherwise they would
        push out recent files.
        """
        latest = time.time() + CLOCK_S
        prefix, suffix = f"{self.path.stem}-", self.path.suffix
        found: list[tuple[float, Path]] = []
        for path in self.path.parent.iterdir():
            name = path.name.removesuffix(COMPRESSED)
            stamp = name.removeprefix(prefix).removesuffix(suffix)
            match = _STAMP.fullmatch(stamp)
            if match and name == f"{prefix}{stamp}{suffix}":
                with contextlib.suppress(ValueError):
                    moment = datetime.strptime(match[1], _TIME)
                    moment = moment if self._rotation.localtime else moment.replace(tzinfo=UTC)
                    found.append((moment.timestamp() + int(match[2]) / 1000, path))
        return sorted(found, key=lambda one: (one[0] <= latest, one), reverse=True)


def _compress(path: Path) -> None:
    """Replace a file with its compressed form, completely or not at all."""
    target = path.with_name(path.name + COMPRESSED)
    unfinished = target.with_name(target.name + ".part")
    with path.open("rb") as source, gzip.open(unfinished, "wb") as packed:
        shutil.copyfileobj(source, packed)
    shutil.copymode(path, unfinished)
    os.replace(unfinished, target)
    path.unlink()


def open_output(name: str, rotation: LogRotation | None) -> Output:
    """Return the output for a name.

    Arguments:
        name: ``default``, ``stderr``, ``stdout`` or a path.
        rotation: rotation of a file; None: the file grows, or another program rotates it.

    Raises:
        ConfigError: the file cannot be written.
    """
    if name in ("default", "stderr", "stdout"):
        return LineStream(1 if name == "stdout" else 2)
    try:
        is_file = not os.path.lexists(name) or stat.S_ISREG(os.stat(name).st_mode)
        if not is_file:
            # A pipe without a reader is refused; waiting for one would block.
            descriptor = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            return LineStream(descriptor, is_own=True)
    except OSError as error:
        raise ConfigError(f"cannot write the log to {name}: {error.strerror}") from error
    return RotatedFile(name, rotation) if rotation is not None else LineFile(name, _SUBJECT)
