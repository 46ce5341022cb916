"""Where backups are: a URL of fsspec (``file:``, ``memory:``, ``s3:`` and what else is installed).

Owns the order of steps that makes a file appear whole: it is written under a name that ends in ``.part``, and then gets
its own. On local disks both are synced. Any exception of a file system becomes one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from raftkv.checkpoint.storage.filesystems import describe, open_url, sync
from raftkv.cli.program import CommandError
from raftkv.client.control.records import Record, RecordError
from raftkv.errors import ConfigError

# -- manifest -------------------------------------------------------------------------------------------------------
#
# What is known of one backup, and the rule which backups are deleted. Pure.
#
# >>> one = Manifest("raftkv-20261122T183000Z-00000000000000ff", 0.0, 255, -1, 7, 301, 4096, "ab", 1, 2, "h:2379",
# 1.0)
# >>> Manifest.decode(one.encode()) == one
# True

FORMAT: Final = 1
DATA_SUFFIX: Final = ".db"
MANIFEST_SUFFIX: Final = ".json"
PART_SUFFIX: Final = ".part"
_FILE: Final = re.compile(r"raftkv-(\d{8}T\d{6}Z)-[0-9a-f]{16}\.(?:db|json)(?:\.part)?")
_TIME: Final = "%Y%m%dT%H%M%SZ"
DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Manifest(Record):
    """One verified backup.

    Attributes:
        name: of its files, without their suffixes.
        taken_s: when it was taken, seconds since the epoch.
        revision, compact_revision, hash: of the history in it (HashKV).
        index: of the last entry of the log that is in it; archived segments before are of no use to it.
        size_bytes, sha256: of the file, the hash in hexadecimal.
        cluster_id, member_id, endpoint: whose it is and who gave it.
        verified_s: when it was last verified.
    """

    NAME: ClassVar[str] = "backup"
    SIGNED: ClassVar[frozenset[str]] = frozenset(("compact_revision",))
    name: str
    taken_s: float
    revision: int
    compact_revision: int
    hash: int
    index: int
    size_bytes: int
    sha256: str
    cluster_id: int
    member_id: int
    endpoint: str
    verified_s: float

    def encode(self) -> bytes:
        """Return what is written."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode() + b"\n"

    def check(self) -> None:
        """Implement ``Record.check``: the name becomes that of files, and both are printed."""
        if time_of(self.name + DATA_SUFFIX) is None or not self.endpoint.isprintable():
            raise RecordError(self.NAME, f"name is {reprlib.repr(self.name)}, endpoint {reprlib.repr(self.endpoint)}")

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``: of a file without its suffix."""
        return key == self.name

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        """Implement ``Record.from_plain``: that of a later version is none."""
        if isinstance(plain, dict) and plain.get("format") != FORMAT:
            raise RecordError(cls.NAME, f"it has another format than {FORMAT}")
        return super(Manifest, cls).from_plain(plain)


def name_of(taken_s: float, revision: int) -> str:
    """Return the name of a backup; names sort in the order of time."""
    return f"raftkv-{datetime.fromtimestamp(taken_s, UTC).strftime(_TIME)}-{revision:016x}"


def time_of(file_name: str) -> float | None:
    """Return when the backup of a file was taken, in seconds since the epoch; None: it is no file of a backup.

    A copy under another name is the user's own, and no backup.
    """
    match = _FILE.fullmatch(file_name)
    return datetime.strptime(match[1], _TIME).replace(tzinfo=UTC).timestamp() if match else None


def oldest_first(backups: Iterable[Manifest]) -> list[Manifest]:
    """Return backups in the order in which they were taken, also where a clock jumped on the way.

    In one cluster the index tells what came first. A backup is therefore no younger than any that has a higher index,
    even if the clock differs, and takes that time for its place among those of other clusters.
    """
    youngest_s: dict[int, float] = {}
    moments: list[tuple[float, int, float, Manifest]] = []
    for one in sorted(backups, key=lambda one: (one.index, one.taken_s), reverse=True):
        moment_s = youngest_s[one.cluster_id] = min(one.taken_s, youngest_s.get(one.cluster_id, one.taken_s))
        moments.append((moment_s, one.index, one.taken_s, one))
    return [moment[-1] for moment in sorted(moments, key=lambda moment: moment[:-1])]


def begins_before(backup: Manifest, revision: int | None, time_s: float | None) -> bool:
    """Return whether a restore to a point in time may begin with a backup: an archived log leads forward only.

    Arguments:
        backup: any.
        revision: to be restored; None: not by revision.
        time_s: to be restored, in seconds since the epoch; None: not by time.
    """
    return (revision is None or backup.revision <= revision) and (time_s is None or backup.taken_s <= time_s)


def not_needed(backups: Sequence[Manifest], keep: int, keep_days: float, now_s: float) -> list[Manifest]:
    """Return the backups that the rules let go; never the newest.

    Arguments:
        backups: all that are verified.
        keep: newest to keep; 0: this rule keeps none.
        keep_days: age up to which they are kept; 0: this rule keeps none. Without either rule all are kept.
        now_s: the time, in seconds since the epoch.
    """
    if not keep and not keep_days:
        return []
    return [
        one
        for number, one in enumerate(reversed(oldest_first(backups)))
        if number >= max(keep, 1) and (not keep_days or now_s - one.taken_s >= keep_days * DAY_S)
    ]


CHUNK_BYTES: Final = 1 << 20
MANIFEST_BYTES_MAX: Final = 64 << 10
DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
LEFT_OVER_S: Final = 86_400.0
"""Age at which a file without a manifest counts as left over by a killed backup."""

Advance = Callable[[int], None]
"""Told of bytes that were copied."""


class Place:
    """The files below one URL.

    Arguments:
        url: of a directory; it is made by the first file.

    Raises:
        CommandError: fsspec is not installed, or knows no such URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._fs, self._root, self._is_local = open_url(url, extra="backup")
        except ConfigError as error:
            raise CommandError(str(error)) from error

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except CommandError:
            raise
        # Each file system has errors of its own, and most say nothing of the URL.
        except Exception as error:
            raise CommandError(f"cannot {what} {self.url}: {describe(error)}") from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def require(self) -> None:
        """Refuse a local directory that is not there: more often than not its name is misspelled.

        Raises:
            CommandError: it is not there, or no directory. An object store has no directories to look for.
        """
        if self._is_local and not self._fs.isdir(self._root):
            why = "is no directory" if self._fs.exists(self._root) else "is not there"
            raise CommandError(f"{self.url} {why}")

    def names(self) -> list[str]:
        """Return the names of all files, sorted; none if there is no such directory."""
        with self._named("list"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def upload(self, source: Path, name: str, advance: Advance = lambda size: None) -> None:
        """Copy a file to ``NAME.part``."""
        with self._named("write to"):
            with source.open("rb") as reader, self._open_writer(name + PART_SUFFIX) as writer:
                _copy(reader, writer, advance)
            self._sync(name + PART_SUFFIX)

    def _open_writer(self, name: str) -> Any:
        """Open a new file; on a local disk with the modes of a data directory: it holds all that the cluster does."""
        if not self._is_local:
            self._fs.makedirs(self._root, exist_ok=True)
            return self._fs.open(self._path(name), "wb")
        os.makedirs(self._root, DIRECTORY_MODE, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path(name), flags, FILE_MODE)
        os.fchmod(descriptor, FILE_MODE)  # of one that a killed backup has left
        return os.fdopen(descriptor, "wb")

    def finish(self, name: str) -> None:
        """Give ``NAME.part`` its name."""
        with self._named("write to"):
            self._fs.mv(self._path(name + PART_SUFFIX), self._path(name))
            self._sync_names()

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        with self._named("write to"):
            with self._open_writer(name + PART_SUFFIX) as writer:
                writer.write(data)
            self._sync(name + PART_SUFFIX)
        self.finish(name)

    def read(self, name: str) -> bytes:
        """Return a small file, and of a large one the beginning. Raises CommandError."""
        with self._named("read"):
            return bytes(self._fs.cat_file(self._path(name), start=0, end=MANIFEST_BYTES_MAX))

    def download(self, name: str, target: Path, advance: Advance = lambda size: None) -> None:
        """Copy a file from here.

        Raises:
            CommandError: it cannot be read.
            OSError: the copy cannot be written.
        """
        with target.open("wb") as writer, contextlib.ExitStack() as stack:
            with self._named("read"):
                reader = stack.enter_context(self._fs.open(self._path(name), "rb"))
            while chunk := self._chunk(reader):
                writer.write(chunk)
                advance(len(chunk))

    def _chunk(self, reader: Any) -> bytes:
        with self._named("read"):
            return bytes(reader.read(CHUNK_BYTES))

    def delete(self, name: str) -> None:
        """Delete a file, there or not."""
        with self._named("delete in"):
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                pass

    def backups(self) -> list[Manifest]:
        """Return the backups that are whole, oldest first, where all must be known.

        Raises:
            CommandError: a manifest cannot be read.
        """
        found, damaged = self.look()
        if damaged:
            raise CommandError(next(iter(damaged.values())))
        return found

    def look(self) -> tuple[list[Manifest], dict[str, str]]:
        """Return the backups that are whole, oldest first, and of those with a damaged manifest, by name, why."""
        names = self.names()
        there, found, damaged = set(names), list[Manifest](), dict[str, str]()
        for name in names:
            if time_of(name) is None or not name.endswith(MANIFEST_SUFFIX):
                continue
            stem = name.removesuffix(MANIFEST_SUFFIX)
            if stem + DATA_SUFFIX not in there:
                continue  # killed while it was deleted
            try:
                one = Manifest.decode(self.read(name))
                if not one.belongs_to(stem):
                    raise RecordError(Manifest.NAME, f"it is that of {one.name}")
                found.append(one)
            except RecordError as error:
                damaged[stem] = f"cannot read {name} in {self.url}: {error.why}"
        return oldest_first(found), damaged

    def remove(self, backup: Manifest) -> None:
        """Delete a backup, the manifest first: without it the rest is none."""
        self.delete(backup.name + MANIFEST_SUFFIX)
        self.delete(backup.name + DATA_SUFFIX)

    def remove_leftovers(self, now_s: float) -> list[str]:
        """Delete what backups left that were killed long ago; return the names."""
        names = self.names()
        whole = {name.removesuffix(MANIFEST_SUFFIX) for name in names if name.endswith(MANIFEST_SUFFIX)}
        stems = {name.removesuffix(DATA_SUFFIX) for name in names if name.endswith(DATA_SUFFIX)}
        left = []
        for name in names:
            taken_s = time_of(name)
            stem = name.partition(".")[0]
            is_whole = not name.endswith(PART_SUFFIX) and stem in whole and stem in stems
            if taken_s is not None and not is_whole and now_s - taken_s > LEFT_OVER_S:
                self.delete(name)
                left.append(name)
        return left

    def _sync(self, name: str) -> None:
        if self._is_local:
            sync(self._path(name))
            self._sync_names()

    def _sync_names(self) -> None:
        if self._is_local:
            sync(self._root)


def _copy(reader: Any, writer: Any, advance: Advance) -> None:
    while chunk := reader.read(CHUNK_BYTES):
        writer.write(chunk)
        advance(len(chunk))
