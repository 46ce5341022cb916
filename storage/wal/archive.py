"""Closed segments kept elsewhere, and marks that tell which entry was applied when.

    ARCHIVE/<cluster>-<member>/0000000000000000-0000000000000001.wal          a segment, byte for byte
    ARCHIVE/<cluster>-<member>/0000000000000000-0000000000000001.wal.marks    marks of its time

A *mark* is a line ``<RFC 3339 time> <applied index> <revision> <term> crc:<CRC32C of these>``: what the member had
applied at that moment of its own clock. Entries carry no time, so a restore to a time goes to the last mark before it.
Earlier versions wrote marks without a checksum, which are read as well.

    directory = ArchiveDirectory(path)
    directory.store(segment_path)            # durable on return, whole under its name or not there at all

Laws: a name in the archive holds a whole file (written under a temporary name, synced, renamed, the directory synced);
what is there is never overwritten with other contents; zeros that were never written take no room (the copy is
sparse). ``Progress`` notes beside the log how far the archive is, so that a restart does not begin again.

Leaves out: when to archive and what to do at a failure (``raftkv.replica.archiver``), and reading (``raftkv.offline``).
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
    """The applied state of a member at a moment: the time in seconds since the epoch, index, revision, term."""

    time_s: float
    index: int
    revision: int
    term: int

    def __str__(self) -> str:
        text = f"{format_time(self.time_s)} {self.index} {self.revision} {self.term}"
        return f"{text} crc:{_checksum(text)}\n"

    @classmethod
    def parse(cls, line: str) -> Mark | None:
        """Return the mark in a line; None for one that a crash cut short, or that is damaged."""
        text, _, checksum = line.partition(" crc:")
        words = text.split(" ")
        if len(words) != 4 or not line.endswith("\n") or (checksum and checksum != _checksum(text) + "\n"):
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
        ValueError: it is none, or it has no offset from UTC.
    """
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{text} has no offset from UTC: add Z or +00:00")
    return time.timestamp()


def directory_name(cluster_id: int, member_id: int) -> str:
    """Return the name of a member's directory in an archive that members share."""
    return f"{cluster_id:016x}-{member_id:016x}"


class ArchiveDirectory:
    """A directory that segments are copied to. The calls block; they run on any one thread.

    Arguments:
        path: of the directory; made when the first file is stored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def store(self, source: Path) -> None:
        """Copy a file under its own name, durably; nothing is done if it is there. Marks are replaced: they grow.

        Raises:
            StorageError: a file with that name and other contents is there, or the system refused.
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
    """Copy a file, durably, and leave out the blocks that are zeros.

    Arguments:
        source: of which file.
        target: path of the copy; an old one is replaced.

    Raises:
        OSError: the system refused.
    """
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    # Buffered: of a raw file one write may take a part alone, as the last one that fits on a disk does.
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
    """The sequence number below which all segments of a log are archived, kept in a file beside the log.

    The number has a checksum: a larger one would let segments be deleted that no archive has. Earlier versions wrote
    the number alone; they begin anew where they find both.

    Arguments:
        directory: of the log.
        first_sequence: where an archive begins of which nothing is known.
        last_sequence: of the segment that is written to.

    Attributes:
        next_sequence: the first segment that is not archived.
    """

    def __init__(self, directory: Path, first_sequence: int, last_sequence: int) -> None:
        self._path = directory / PROGRESS_NAME
        try:
            number, *checksum = self._path.read_text().split()
            self.next_sequence = int(number)
            if checksum not in ([], [_checksum(number)]) or not 0 <= self.next_sequence <= last_sequence:
                raise ValueError(number)
        except (FileNotFoundError, ValueError):
            self.note(first_sequence)

    def note(self, next_sequence: int) -> None:
        """Note that everything below a sequence number is archived. If a crash loses it, it is archived again."""
        temporary = self._path.with_name(PROGRESS_NAME + _TEMPORARY_SUFFIX)
        temporary.write_text(f"{next_sequence} {_checksum(str(next_sequence))}\n")
        temporary.replace(self._path)
        self.next_sequence = next_sequence


def _checksum(text: str) -> str:
    return f"{crc32c(text.encode()):08x}"
