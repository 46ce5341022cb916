"""Where lines go: a file that is rotated by its size, or standard output or error.

A file that somebody moved or deleted is opened anew before the next lines (so ``logrotate`` needs no signal). The file
and what is rotated away are readable by their owner alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol

from raftkv.server.line_file import LineFile, LineStream

FILE_MODE: Final = 0o600


class Destination(Protocol):
    """Takes lines."""

    def write(self, lines: bytes) -> None:
        """Write lines; OSError: what is not written waits inside, and the next call begins with it."""

    def close(self) -> None:
        """Let go; nothing is written afterwards."""


class AuditFile(LineFile):
    """A file of lines, and those that it was before: ``FILE.1`` is the youngest.

    Arguments:
        path: of the file.
        max_bytes: size above which it is rotated; 0: never.
        keep: rotated files that stay.

    Raises:
        ConfigError: it cannot be opened; one line for the user.
    """

    def __init__(self, path: str, max_bytes: int = 0, keep: int = 10) -> None:
        self._max_bytes = max_bytes
        self._keep = keep
        super().__init__(path, "the audit log", FILE_MODE)

    def make_room(self, size_bytes: int) -> None:
        """Rotate the file if it gets too large."""
        if self._max_bytes and self.size_bytes and self.size_bytes + size_bytes > self._max_bytes:
            self._rotate()

    def _rotate(self) -> None:
        for number in range(self._keep - 1, 0, -1):
            older, younger = self._rotated(number + 1), self._rotated(number)
            if younger.exists():
                os.replace(younger, older)
        if self._keep:
            os.replace(self.path, self._rotated(1))
        else:
            os.unlink(self.path)
        self.reopen()

    def _rotated(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def open_destination(name: str, max_bytes: int, keep: int) -> Destination:
    """Return where a flag says that lines go.

    Arguments:
        name: ``-`` for standard output, ``stderr``, or a file.
        max_bytes, keep: see ``AuditFile``.

    Raises:
        ConfigError: the file cannot be opened.
    """
    if name in ("-", "stderr"):
        return LineStream(1 if name == "-" else 2)
    return AuditFile(name, max_bytes, keep)
