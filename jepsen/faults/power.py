"""Disks that lie: power loss, syncs that do nothing, calls that fail, slow syncs.

Members run with ``disk_shim.c`` preloaded before the C library. It logs everything that a power loss could undo: the
bytes that each write replaced, each change of a length or a name, and each sync. To simulate a power loss, the members
are killed, and a random part (by the seed) of what no successful sync covers is undone in their directories:

    sectors (512 bytes)    each keeps its newest bytes, or gets those of an earlier moment since its last sync
    length                 that of the last sync, or up to the last sector that was kept
    names                  in each directory, the first changes since its last sync are kept, the rest undone

So the disk is torn and reordered, removed files reappear, and mapped pages (for which no sync is logged) have any
earlier content. The kept part is drawn again for each loss: nothing, little, half or nearly all.

Invariants: a successful sync covers the writes that returned before it was called; a write to a file opened with
O_DSYNC, or with RWF_DSYNC, covers itself. On a disk that lies, a sync succeeds and covers nothing.

Not simulated: sectors that are neither old nor new; truncated files keep their new length.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import shutil
import struct
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from jepsen.db import DbError, Member

SECTOR_BYTES: Final = 512
OPENS, READS, WRITES, SYNCS, NAMES, ALLOCATIONS = 1, 2, 4, 8, 16, 32
"""Kinds of calls that can be made to fail."""
SHORT: Final = 4096
"""In place of an errno: only half of the bytes are written."""

_SOURCE: Final = Path(__file__).with_name("disk_shim.c")
_CONTROL: Final = struct.Struct("<5I")
_HEAD: Final = struct.Struct("<4s3I4Q")
_WRITTEN, _MAPPED, _ZEROS = 1, 2, 4
_KEPT: Final = (0.0, 0.1, 0.5, 0.9)


def library() -> str:
    """Compile the shim, once for each version of its source, and return its path.

    Raises:
        DbError: there is no C compiler, or the compilation failed.
    """
    name = f"raftkv-disk-shim-{os.getuid()}-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}.so"
    path = Path(tempfile.gettempdir()) / name
    if not path.exists():
        if shutil.which("gcc") is None:
            raise DbError("there is no gcc, which the disk that lies is compiled with: apt-get install gcc")
        beside = path.with_suffix(f".{os.getpid()}")
        command = ["gcc", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(beside), str(_SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DbError(f"the disk that lies cannot be compiled: {done.stderr}")
        beside.replace(path)
    return str(path)


@dataclass(frozen=True, slots=True)
class Loss:
    """How much unsynced data survives a power loss.

    Attributes:
        sectors: share of the sectors that are newer than their last sync.
        names: share of the name changes in a directory.
        lengths: whether files keep a length that no sync covers.
    """

    sectors: float = 0.0
    names: float = 0.0
    lengths: bool = False

    @classmethod
    def draw(cls, rng: random.Random) -> Loss:
        """Return a random loss."""
        return cls(rng.choice(_KEPT), rng.choice((0.0, rng.random(), 1.0)), rng.random() < 0.5)


class LyingDisk:
    """The disk of one program, whose files are below one directory.

    Arguments:
        folder: directory for the log, the control page and unnamed files; on the same file system.
        root: absolute path of the program's directory.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder, self._root = folder.resolve(), root.resolve()
        self._kept = self._folder / "kept"
        self._kept.mkdir(parents=True, exist_ok=True)
        control = self._folder / "control"
        if not control.exists():
            control.write_bytes(bytes(_CONTROL.size))
        with control.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), _CONTROL.size)

    def environment(self) -> dict[str, str]:
        """Return the environment of a program that uses the disk."""
        return {"LD_PRELOAD": library(), "RAFTKV_DISK": str(self._folder), "RAFTKV_DISK_ROOT": str(self._root)}

    def set(
        self, *, lies: bool = False, delay_ms: int = 0, calls: int = 0, error: int = 0, per_million: int = 1_000_000
    ) -> None:
        """Set the behaviour of the disk from now on; without arguments it is a good one.

        Arguments:
            lies: whether syncs succeed and cover nothing.
            delay_ms: additional time of each sync.
            calls: kinds of calls that fail.
            error: errno of the failures, or ``SHORT``.
            per_million: number of failures per million calls.
        """
        self._control[:] = _CONTROL.pack(lies, delay_ms * 1000, calls, error, per_million)

    def lose_power(self, rng: random.Random, loss: Loss | None = None) -> None:
        """Undo what the disk had not made durable; the program must be dead.

        Arguments:
            rng: decides what is kept.
            loss: how much is kept; None: random.
        """
        log = _Log()
        for record in _records(self._folder / "log"):
            log.take(record)
        loss = loss or Loss.draw(rng)
        places = {
            path.stat().st_ino: path for path in (*self._root.rglob("*"), *self._kept.iterdir()) if path.is_file()
        }
        for inode, changes in sorted(log.contents.items()):
            if inode in places and changes:
                _undo_writes(places[inode], changes, loss, rng)
        for directory in sorted(log.names, key=len, reverse=True):
            changes = log.names[directory]
            for record in reversed(changes[round(len(changes) * loss.names) :]):
                self._undo_name(record)
        self.renew()

    def renew(self) -> None:
        """Make the content of the disk count as durable; the program must be dead."""
        (self._folder / "log").unlink(missing_ok=True)
        shutil.rmtree(self._kept)
        self._kept.mkdir()

    def _undo_name(self, record: _Record) -> None:
        old, path, kept = Path(record.first), Path(record.second), self._kept / str(record.id)
        if record.kind == b"R" and path.exists():
            os.rename(path, old)
        target = path if record.kind == b"R" else old
        if record.kind == b"C":
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        elif record.id and kept.exists() and target.parent.exists() and not target.exists():
            os.link(kept, target)


def environment(member: Member) -> dict[str, str]:
    """Return the environment of a member with such a disk."""
    return disk_of(member).environment()


def disk_of(member: Member) -> LyingDisk:
    """Return the disk of a member."""
    return LyingDisk(member.folder / "disk", member.folder / "data")


@dataclass(slots=True)
class _Record:
    kind: bytes
    flags: int
    id: int
    offset: int
    length: int
    size: int
    first: str
    second: str = ""
    before: bytes = b""
    number: int = 0


def _records(path: Path) -> Iterator[_Record]:
    """Yield the records of a log, whose last record may be incomplete after a kill."""
    if not path.exists():
        return
    with path.open("rb") as file:
        number = 0
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            kind, flags, first_size, second_size, identity, offset, length, size = _HEAD.unpack(head)
            first, second = os.fsdecode(file.read(first_size)), file.read(second_size)
            number += 1
            record = _Record(kind[:1], flags, identity, offset, length, size, first, number=number)
            if record.kind == b"R":
                record.second = os.fsdecode(second)
            elif record.kind == b"W":
                record.before = bytes(min(length, max(0, size - offset))) if flags & _ZEROS else second
            yield record


@dataclass(slots=True)
class _Log:
    """What no sync covers: the changes of each file by inode, and of each directory by path."""

    contents: dict[int, list[_Record]] = field(default_factory=lambda: defaultdict(list))
    names: dict[str, list[_Record]] = field(default_factory=lambda: defaultdict(list))
    _begun: dict[int, _Record] = field(default_factory=dict)

    def take(self, record: _Record) -> None:
        """Add the next record."""
        if record.kind == b"B":
            self._begun[record.id] = record
        elif record.kind == b"E":
            self._cover(self._begun.pop(record.id))
        elif record.kind in (b"W", b"T"):
            if record.kind == b"T" and record.length <= record.size:
                for earlier in self.contents[record.id]:
                    earlier.size = min(earlier.size, record.length)
            self.contents[record.id].append(record)
        else:
            directory = os.path.dirname(record.second or record.first)
            self.names[directory].append(record)

    def _cover(self, sync: _Record) -> None:
        if sync.first:
            self.names[sync.first] = [one for one in self.names[sync.first] if one.number > sync.number]
        else:
            changes = self.contents[sync.size]
            self.contents[sync.size] = [one for one in changes if one.number > sync.number or one.flags & _MAPPED]


def _undo_writes(path: Path, changes: list[_Record], loss: Loss, rng: random.Random) -> None:
    """Undo a part of the writes to one file, each sector independently."""
    touching: dict[int, list[_Record]] = defaultdict(list)
    for record in changes:
        if record.kind == b"W":
            for sector in range(record.offset // SECTOR_BYTES, -(-(record.offset + record.length) // SECTOR_BYTES)):
                touching[sector].append(record)
    unsynced = [record for record in changes if not record.flags & (_WRITTEN | _MAPPED)]
    end = min((record.size for record in unsynced), default=None)
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        kept_end = 0
        for sector, records in touching.items():
            durable = max((n + 1 for n, one in enumerate(records) if one.flags & _WRITTEN), default=0)
            version = len(records)
            if rng.random() >= loss.sectors:
                version = durable if loss.sectors == 0.0 else rng.randint(durable, len(records))
            for record in reversed(records[version:]):
                _restore(file.fileno(), sector, record, size)
            if version:
                written = max(one.offset + one.length for one in records[:version])
                kept_end = max(kept_end, min(written, (sector + 1) * SECTOR_BYTES))
        if end is not None and not loss.lengths and max(end, kept_end) < size:
            file.truncate(max(end, kept_end))


def _restore(fd: int, sector: int, record: _Record, size: int) -> None:
    """Restore the content of a sector before a write; beyond the end of the file it is zeros."""
    begin = max(sector * SECTOR_BYTES, record.offset)
    end = min((sector + 1) * SECTOR_BYTES, record.offset + record.length, size)
    if begin < end:
        data = record.before[begin - record.offset : end - record.offset]
        os.pwrite(fd, data.ljust(end - begin, b"\0"), begin)
