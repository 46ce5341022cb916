"""The archive: copies of closed segments, and marks that record when each entry was applied.

    ARCHIVE/<cluster>-<member>/0000000000000000-0000000000000001.wal          a segment, byte for byte
    ARCHIVE/<cluster>-<member>/0000000000000000-0000000000000001.wal.marks    marks from the time of that segment

A *mark* is a line ``<RFC 3339 time> <applied index> <revision> <term> crc:<CRC32C of these>``: the applied state of the
member at that time of its own clock. Entries carry no time, so a restore to a time uses the last mark before it.

    directory = ArchiveDirectory(path)
    directory.store(segment_path)            # on return the file is complete and durable

Invariants: a name in the archive always refers to a complete file (written under a temporary name, synced, renamed, the
directory synced); a stored file is never overwritten with other contents; blocks that were never written take no space
(the copy is sparse). ``Progress`` records in a file of the log directory how much is archived, so that a restart does
not begin again.

Not here: when to archive and what to do on failure (``raftkv.replica.archiver``), and reading (``raftkv.offline``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

from google_crc32c import value as crc32c

from raftkv.errors import StorageError
from raftkv.storage.datadir import ensure_private_directory, sync_directory
from raftkv.storage.wal.disk import FILE_MODE

MARKS_SUFFIX: Final = ".marks"
PROGRESS_NAME: Final = "archived"
_TEMPORARY_SUFFIX: Final = ".tmp"
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Mark:
    """The applied state of a member at one time: seconds since the epoch, index, revision, term."""

    time_s: float
    index: int
    revision: int
    term: int

    def __str__(self) -> str:
        text = f"{format_time(self.time_s)} {self.index} {self.revision} {self.term}"
        return f"{text} crc:{_checksum(text)}\n"

    @classmethod
    def parse(cls, line: str) -> Mark | None:
        """Return the mark in a line; ``None`` if the line is incomplete (after a crash) or damaged."""
        text, _, checksum = line.partition(" crc:")
        words = text.split(" ")
        if len(words) != 4 or checksum != _checksum(text) + "\n":
            return None
        try:
            return cls(parse_time(words[0]), int(words[1]), int(words[2]), int(words[3]))
        except ValueError:
            return None


def format_time(time_s: float) -> str:
    """Return a time as RFC 3339 with microseconds, in UTC."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse_time(text: str) -> float:
    """Return the seconds since the epoch of an RFC 3339 time.

    Raises:
        ValueError: the text is not an RFC 3339 time, or has no offset from UTC.
    """
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{text} has no offset from UTC: add Z or +00:00")
    return time.timestamp()


def directory_name(cluster_id: int, member_id: int) -> str:
    """Return the name of a member's directory in an archive shared by members."""
    return f"{cluster_id:016x}-{member_id:016x}"


class ArchiveDirectory:
    """A directory that segments are copied to. The calls block; they must come from one thread at a time.

    Arguments:
        path: the directory; created when the first file is stored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def store(self, source: Path) -> None:
        """Copy a file under its own name, durably; do nothing if it is stored already. Mark files are replaced, as they
        grow.

        Raises:
            StorageError: a file with that name and other contents exists, or a file operation failed.
        """
        target = self.path / source.name
        try:
            ensure_private_directory(self.path, is_own=False)
            if target.exists() and not source.name.endswith(MARKS_SUFFIX):
                self._check_same(source, target)
                return
            temporary = target.with_name(target.name + _TEMPORARY_SUFFIX)
            copy_sparse(source, temporary)
            os.rename(temporary, target)
            sync_directory(str(self.path))
        except OSError as error:
            raise StorageError(f"cannot archive {source.name} in {self.path}: {error.strerror}") from error

    def _check_same(self, source: Path, target: Path) -> None:
        if source.stat().st_size == target.stat().st_size:
            with source.open("rb") as one, target.open("rb") as other:
                if all(a == b for a, b in zip(_chunks(one), _chunks(other), strict=True)):
                    return
        raise StorageError(
            f"cannot archive {source.name}: {target} has other contents; give every data directory an archive of its "
            "own, and move away what an earlier one left"
        )


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file, durably and without its blocks of zeros.

    Arguments:
        source: file to copy.
        target: path of the copy; an existing file is replaced.

    Raises:
        OSError: a file operation failed.
    """
    target.unlink(missing_ok=True)  # of a killed member, or of another user, who would read what is written to it
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    # Buffered: one write to a raw file may write only a part, as the last one that fits on a disk does.
    with source.open("rb") as reader, open(descriptor, "wb") as writer:
        size_bytes = 0
        for chunk in _chunks(reader):
            if chunk.count(0) != len(chunk):
                writer.seek(size_bytes)
                writer.write(chunk)
            size_bytes += len(chunk)
        writer.truncate(size_bytes)
        os.fsync(descriptor)


class Progress:
    """The sequence number below which all segments of a log are archived, kept in a file next to the log.

    The number has a checksum: a number that is too large would let segments be deleted that are not archived.

    Arguments:
        directory: directory of the log.
        first_sequence: where to begin if nothing is known about the archive.
        last_sequence: sequence number of the segment being written.

    Attributes:
        next_sequence: the first segment that is not archived.
    """

    def __init__(self, directory: Path, first_sequence: int, last_sequence: int) -> None:
        self._path = directory / PROGRESS_NAME
        try:
            number, checksum = self._path.read_text().split()
            self.next_sequence = int(number)
            if checksum != _checksum(number) or not 0 <= self.next_sequence <= last_sequence:
                raise ValueError(number)
        except (FileNotFoundError, ValueError):
            self.note(first_sequence)

    def note(self, next_sequence: int) -> None:
        """Record that everything below a sequence number is archived. If a crash loses this, it is archived again."""
        temporary = self._path.with_name(PROGRESS_NAME + _TEMPORARY_SUFFIX)
        temporary.write_text(f"{next_sequence} {_checksum(str(next_sequence))}\n")
        temporary.replace(self._path)
        self.next_sequence = next_sequence


def _checksum(text: str) -> str:
    return f"{crc32c(text.encode()):08x}"
