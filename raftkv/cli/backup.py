"""``raftkv backup``: snapshots of a cluster, each verified by restoring it, at any URL that fsspec knows.

    member --snapshot--> local file --upload--> NAME.db.part --read back, restored, hashed--> NAME.db --> NAME.json

    raftkv backup URL --every 1h --keep 24 --endpoints ...      until SIGTERM
    raftkv backup URL --once                                    for cron: exit code 0 if stored and verified
    raftkv backup list|verify|restore URL ...

Invariants: a backup exists when its manifest exists. The manifest is written last, so a backup killed at any moment
does not count. The uploaded file itself is verified, against the hash that a member gives for its revision. The newest
verified backup is never deleted. A verification that could not be done is a failure.

Exit codes: 0 done, 1 failed (one line says what), 2 an invalid flag, 130 Ctrl-C. Not here: the log archive
(``--wal-archive-dir`` of a member), which covers the time between two backups.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import re
import reprlib
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from raftkv import cluster_id
from raftkv.checkpoint.storage.place import Place as Directory
from raftkv.cli import daemon
from raftkv.cli.common import POINT_IN_TIME_FLAGS, forward_of, target_of
from raftkv.cli.pflag import BOOL, DURATION, UINT, Flag
from raftkv.cli.printer import human_size
from raftkv.cli.program import BAD_FLAGS, ERROR, SUCCESS, CommandError, described, on_signals
from raftkv.cli.table import byte_bar, progress_bar, render
from raftkv.client.admin import Progress
from raftkv.client.library import Client, connect
from raftkv.client.records import SIGNED, Limits, Record, RecordError
from raftkv.client.rpc import methods
from raftkv.client.values import EndpointStatus
from raftkv.config import ServerConfig
from raftkv.errors import RaftKVError, StatusError, StorageError, printable
from raftkv.loop.scheduler import on_thread
from raftkv.offline.database import hash_database_file
from raftkv.offline.etcd.restore import restore
from raftkv.pb import rpc_pb2

if TYPE_CHECKING:
    from raftkv.offline.archive import Target

# -- manifest -------------------------------------------------------------------------------------------------------
#
# The manifest of a backup, and the rules for deleting backups. Pure.
#
# >>> one = Manifest("raftkv-20261122T183000Z-00000000000000ff", 0.0, 255, -1, 7, 301, 9, "ab", 1, 2, "h:2379", 1.0, 1)
# >>> Manifest.decode(one.encode()) == one
# True

FORMAT: Final = 1
DATA_SUFFIX: Final = ".db"
MANIFEST_SUFFIX: Final = ".json"
PART_SUFFIX: Final = ".part"
_FILE: Final = re.compile(r"raftkv-([0-9]{8}T[0-9]{6}Z)-[0-9a-f]{16}\.(?:db|json)(?:\.part(?:-[0-9a-f]{8})?)?")
NUMBER_MAX: Final = 2**48
_TIME: Final = "%Y%m%dT%H%M%SZ"
DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Manifest(Record):
    """One verified backup.

    Attributes:
        name: name of its files, without suffixes.
        taken_s: time at which it was taken, in seconds since the epoch.
        revision, compact_revision, hash: revisions and hash of its history (HashKV).
        index: index of the last log entry in it; a restore does not need archived segments before.
        size_bytes, sha256: size and hash (hexadecimal) of the file.
        cluster_id, member_id, endpoint: the cluster, and the member that gave the snapshot.
        verified_s: time of the last verification.
        number: one more than the highest number of the existing backups.
    """

    NAME: ClassVar[str] = "backup"
    LIMITS: ClassVar[Limits] = {"compact_revision": SIGNED, "number": (1, NUMBER_MAX)}  # the next one is higher
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
    number: int

    def encode(self) -> bytes:
        """Return the content of the manifest file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode() + b"\n"

    def check(self) -> None:
        """Implement ``Record.check``: the name is used for files, and name and endpoint are printed."""
        if time_of(self.name + DATA_SUFFIX) is None or not self.endpoint.isprintable():
            raise RecordError(self.NAME, f"name is {reprlib.repr(self.name)}, endpoint {reprlib.repr(self.endpoint)}")

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``: the key is a file name without suffix."""
        return key == self.name

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        """Implement ``Record.from_plain``: refuse the manifest of a later version."""
        if isinstance(plain, dict) and plain.get("format") != FORMAT:
            raise RecordError(cls.NAME, f"it has another format than {FORMAT}")
        return super(Manifest, cls).from_plain(plain)


def name_of(taken_s: float, revision: int, salt: int = 0) -> str:
    """Return the name of a backup; names sort by time.

    Arguments:
        taken_s: time at which it was taken, in seconds since the epoch.
        revision: revision of its history, below ``2**48``.
        salt: 16 bits that distinguish backups that several machines take in the same second.
    """
    return f"raftkv-{datetime.fromtimestamp(taken_s, UTC).strftime(_TIME)}-{salt:04x}{revision:012x}"


def time_of(file_name: str) -> float | None:
    """Return the time of a backup file's snapshot, in seconds since the epoch; None: not a backup file.

    A copy under another name belongs to the user, and is not a backup.
    """
    match = _FILE.fullmatch(file_name)
    with suppress(ValueError):  # no such time, as in month 13
        return datetime.strptime(match[1], _TIME).replace(tzinfo=UTC).timestamp() if match else None
    return None


def oldest_first(backups: Iterable[Manifest]) -> list[Manifest]:
    """Return backups in the order in which they were taken, even if a clock jumped in between."""
    return sorted(backups, key=lambda one: (one.number, one.taken_s, one.name))


def begins_before(backup: Manifest, revision: int | None, time_s: float | None) -> bool:
    """Return whether a point-in-time restore may start from a backup: the log archive only leads forward.

    Arguments:
        backup: backup to start from.
        revision: revision to restore; None: not by revision.
        time_s: time to restore, in seconds since the epoch; None: not by time.
    """
    return (revision is None or backup.revision <= revision) and (time_s is None or backup.taken_s <= time_s)


def not_needed(backups: Sequence[Manifest], keep: int, keep_days: float, now_s: float) -> list[Manifest]:
    """Return the backups that the rules allow to delete, newest first; never the newest backup of a history.

    A new cluster does not displace the backups of a lost one. It has another cluster id, or, when it was started with
    the same flags, the same id but a lower index than the backup before.

    Arguments:
        backups: all verified backups.
        keep: number of newest backups to keep in each history; 0: no such rule.
        keep_days: age up to which backups are kept; 0: no such rule. Without both rules all are kept.
        now_s: current time, in seconds since the epoch.
    """
    if not keep and not keep_days:
        return []
    histories: dict[int, list[list[Manifest]]] = {}
    for one in oldest_first(backups):
        of_cluster = histories.setdefault(one.cluster_id, [[]])
        if of_cluster[-1] and one.index < of_cluster[-1][-1].index:
            of_cluster.append([])
        of_cluster[-1].append(one)
    old = [one for of_cluster in histories.values() for history in of_cluster for one in history[: -max(keep, 1)]]
    return [one for one in reversed(old) if not keep_days or now_s - one.taken_s >= keep_days * DAY_S]


CHUNK_BYTES: Final = 1 << 20
MANIFEST_BYTES_MAX: Final = 64 << 10
LEFT_OVER_S: Final = 86_400.0
"""Age at which a file without a manifest counts as a leftover of a killed backup."""

Advance = Callable[[int], None]
"""Called with the number of bytes copied."""


class Place(Directory):
    """The backups below one URL of fsspec (``file:``, ``memory:``, ``s3:`` and what else is installed).

    A backup only appears when complete: it is written under a name that ends in ``.part``, then renamed. Local files
    have the modes of a data directory, because they contain all data.

    Arguments:
        uri: URL of a directory; it is created with the first file.

    Raises:
        ConfigError: fsspec is not installed, or does not support the URL.
    """

    EXTRA = "backup"
    DIRECTORY_MODE, FILE_MODE = 0o700, 0o600

    def require(self) -> None:
        """Refuse a local directory that does not exist, because its name is probably misspelled.

        Raises:
            CommandError: it does not exist, or is not a directory. Object stores are not checked: they have no
                directories.
        """
        if self.is_local and not self.fs.isdir(self.root):
            why = "is not a directory" if self.fs.exists(self.root) else "does not exist"
            raise CommandError(f"{self.uri} {why}")

    def upload(self, source: Path, name: str, advance: Advance = lambda size: None) -> None:
        """Copy a file to ``NAME.part``."""
        with source.open("rb") as reader, self.open_writer(name + PART_SUFFIX) as writer:
            while chunk := reader.read(CHUNK_BYTES):
                writer.write(chunk)
                advance(len(chunk))

    def finish(self, name: str) -> None:
        """Rename ``NAME.part`` to ``NAME``."""
        with self.named("write", name):
            self.fs.mv(self.path(name + PART_SUFFIX), self.path(name))
        self.make_durable(name)

    def download(self, name: str, target: Path, advance: Advance = lambda size: None) -> None:
        """Copy a stored file to a local path.

        Raises:
            StorageError: the file cannot be read.
            OSError: the copy cannot be written.
        """
        with target.open("wb") as writer:
            for chunk in self.chunks(name, CHUNK_BYTES):
                writer.write(chunk)
                advance(len(chunk))

    def backups(self) -> list[Manifest]:
        """Return all complete backups, oldest first.

        Raises:
            CommandError: a manifest cannot be read.
        """
        found, damaged = self.look()
        if damaged:
            raise CommandError(next(iter(damaged.values())))
        return found

    def look(self) -> tuple[list[Manifest], dict[str, str]]:
        """Return all complete backups, oldest first, and a map from the name of each damaged manifest to the reason."""
        names = self.names()
        there, found, damaged = set(names), list[Manifest](), dict[str, str]()
        for name in names:
            if time_of(name) is None or not name.endswith(MANIFEST_SUFFIX):
                continue
            stem = name.removesuffix(MANIFEST_SUFFIX)
            if stem + DATA_SUFFIX not in there:
                continue  # deleted in the meantime
            try:
                one = Manifest.decode(self.read(name, MANIFEST_BYTES_MAX))
                if not one.belongs_to(stem):
                    raise RecordError(Manifest.NAME, f"it is that of {one.name}")
                found.append(one)
            except RecordError as error:
                damaged[stem] = f"cannot read {name} in {self.uri}: {error.why}"
            except RaftKVError as error:
                if not isinstance(error.__cause__, FileNotFoundError):  # deleted since it was listed
                    raise
        return oldest_first(found), damaged

    def remove(self, backup: Manifest) -> None:
        """Delete a backup, the manifest first: without it the remaining files do not count."""
        self.delete(backup.name + MANIFEST_SUFFIX)
        self.delete(backup.name + DATA_SUFFIX)

    def remove_leftovers(self, now_s: float) -> list[str]:
        """Delete leftovers of backups that were killed long ago; return their names."""
        names = self.names()
        whole = {name.removesuffix(MANIFEST_SUFFIX) for name in names if name.endswith(MANIFEST_SUFFIX)}
        stems = {name.removesuffix(DATA_SUFFIX) for name in names if name.endswith(DATA_SUFFIX)}
        left = []
        for name in names:
            taken_s = time_of(name)
            stem = name.partition(".")[0]
            is_whole = PART_SUFFIX not in name and stem in whole and stem in stems
            if taken_s is not None and not is_whole and now_s - taken_s > LEFT_OVER_S:
                self.delete(name)
                left.append(name)
        return left


# -- take -----------------------------------------------------------------------------------------------------------
#
# Taking a snapshot from one member, with the hash that the cluster gives for it, and checking a file by restoring it.
#
# Chooses the member: a follower before a learner before the leader, and the one that has applied most first; if it is
# lost midway, the next one. A snapshot is accepted only if a member gives a hash for exactly its revision and compact
# revision. If the cluster was compacted in the meantime, another snapshot is taken.


@dataclass(frozen=True, slots=True)
class Contents:
    """A summary of a restored file.

    It has the hash and revisions of the history, its place in the cluster's log, and the hash of the file.
    """

    hash: int
    revision: int
    compact_revision: int
    index: int
    size_bytes: int
    sha256: str


def read_contents(path: Path) -> Contents:
    """Restore a snapshot file and return a summary of its content.

    Raises:
        CommandError: the file cannot be restored.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="raftkv-verify-", dir=path.parent) as directory:
            data_dir = str(Path(directory) / "member")
            indexes: list[int] = []
            restore(path, ServerConfig(data_dir=data_dir), forward=lambda _, base: indexes.append(base.index))
            found = hash_database_file(data_dir)
    except (RaftKVError, OSError) as error:
        raise CommandError(f"cannot restore {path.name}: {error}") from error
    size_bytes, digest = _digest(path)
    return Contents(found.hash, found.revision, found.compact_revision, indexes[0], size_bytes, digest)


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def check(backup: Manifest, path: Path) -> None:
    """Check that a file is the backup that its manifest describes, and can be restored.

    Raises:
        CommandError: the file differs or cannot be restored.
    """
    size_bytes, digest = _digest(path)
    if (size_bytes, digest) != (backup.size_bytes, backup.sha256):
        raise CommandError(
            f"backup {backup.name} is damaged: {size_bytes} bytes with SHA-256 {digest[:16]}..., "
            f"written were {backup.size_bytes} with {backup.sha256[:16]}..."
        )
    found = read_contents(path)
    wanted = (backup.hash, backup.revision, backup.compact_revision)
    if (found.hash, found.revision, found.compact_revision) != wanted:
        raise CommandError(
            f"backup {backup.name} has hash {found.hash} at revision {found.revision}, "
            f"the cluster had {backup.hash} at revision {backup.revision}"
        )


TRIES: Final = 3
"""Maximum number of snapshots to take until one was not overtaken by a compaction."""
HASH_TIMEOUT_S: Final = 120.0
STATUS_TIMEOUT_S: Final = 5.0


async def take(kv: Client, path: Path, progress: Progress) -> tuple[EndpointStatus, Contents]:
    """Save a snapshot whose hash the cluster confirms.

    Arguments:
        kv: client of all members.
        path: file to write.
        progress: called with byte counts.

    Returns:
        The member that gave the snapshot, and the snapshot's content.

    Raises:
        CommandError: no member gives a snapshot, or its hash differs from the cluster's.
    """
    for _ in range(TRIES):
        member = await _save(kv, path, progress)
        contents = await on_thread(lambda: read_contents(path))
        if await _is_confirmed(kv, member, contents):
            return member, contents
    raise CommandError(f"the cluster was compacted {TRIES} times while a snapshot was taken: try again later")


async def _save(kv: Client, path: Path, progress: Progress) -> EndpointStatus:
    members = preferred(await kv.status(timeout_s=STATUS_TIMEOUT_S))
    failures = [f"{one.endpoint}: {one.error}" for one in members if one.error]
    for member in members:
        if member.error:
            continue
        try:
            await kv.snapshot(path, endpoint=member.endpoint, on_progress=progress)
        except (StatusError, StorageError) as error:
            failures.append(f"{member.endpoint}: {error}")
        else:
            return member
    raise CommandError(f"no member gives a snapshot: {'; '.join(failures)}")


def preferred(members: list[EndpointStatus]) -> list[EndpointStatus]:
    """Return members in the order of preference for a snapshot; those that do not answer come last."""

    def rank(one: EndpointStatus) -> tuple[bool, bool, bool, int]:
        is_leader = one.member_id == one.leader_id
        return bool(one.error), is_leader, one.is_learner, -one.raft_applied_index

    return sorted(members, key=rank)


async def _is_confirmed(kv: Client, member: EndpointStatus, contents: Contents) -> bool:
    """Return whether the cluster confirms this history; False: it was compacted in the meantime.

    Raises:
        CommandError: the cluster has another history, or no member answers.
    """
    others = [one.text for one in kv.scope.core.endpoints if one.text != member.endpoint]
    failures = []
    for endpoint in [member.endpoint, *others]:
        request = rpc_pb2.HashKVRequest(revision=contents.revision)
        try:
            answer = await kv.scope.core.call_at(endpoint, methods.HASH_KV, request, timeout_s=HASH_TIMEOUT_S)
        except StatusError as error:
            if "compacted" in str(error):
                return False
            failures.append(f"{endpoint}: {error}")
            continue
        if answer.compact_revision != contents.compact_revision:
            return False
        if answer.hash != contents.hash:
            raise CommandError(
                f"the snapshot of {member.endpoint} has hash {contents.hash} at revision {contents.revision}, "
                f"and {endpoint} says {answer.hash}: one of them is damaged"
            )
        return True
    raise CommandError(f"no member says which hash revision {contents.revision} has: {'; '.join(failures)}")


# -- report ---------------------------------------------------------------------------------------------------------
#
# The output of ``raftkv backup``: a line or an object for each event, and progress bars on a terminal.


class Report:
    """Prints events: completed steps to standard output, failures to standard error.

    Arguments:
        json: whether to print one object per line, without progress bars.
    """

    def __init__(self, *, json: bool) -> None:
        self.is_json = json

    def say(self, text: str, event: str, **fields: Any) -> None:
        """Print a completed step.

        Arguments:
            text: text for people.
            event: name of the event for programs.
            fields: further fields for programs.
        """
        print(json.dumps({"event": event, **fields}) if self.is_json else text, flush=True)

    def deleted(self, name: str) -> None:
        """Print that an old file or backup was deleted."""
        self.say(f"deleted {name}", "deleted", name=name)

    def failed(self, why: str, name: str = "") -> None:
        """Print a failure after which the command continues."""
        if self.is_json:
            self.say("", "failed", name=name, error=why)
        else:
            self.warn(why)

    def warn(self, text: str) -> None:
        """Print a line on standard error, without acting on the terminal: it may quote a manifest."""
        print(f"raftkv backup: {printable(text)}", file=sys.stderr, flush=True)

    def table(self, backups: Sequence[Manifest]) -> None:
        """Print a table of all backups."""
        if self.is_json:
            for backup in backups:
                self.say("", "backup", **asdict(backup))
            return
        rows = []
        for one in backups:
            taken = datetime.fromtimestamp(one.taken_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
            rows.append([one.name, taken, str(one.revision), human_size(one.size_bytes), one.endpoint])
        print(render(["name", "taken", "revision", "size", "endpoint"], rows))

    @contextmanager
    def copying(self, what: str, total: int) -> Iterator[Advance]:
        """Show a progress bar on a terminal during the block; yield a function that advances it by some bytes."""
        with progress_bar(what, ("Download", "TransferSpeed"), total, hidden=self.is_json) as update:
            yield lambda size_bytes: update(advance=size_bytes)


PREFIX: Final = "raftkv-backup-"


@contextmanager
def temporary_directory(base: str = "") -> Iterator[Path]:
    """Create a directory for a snapshot for the block; it needs space for the database and a segment of the log.

    Each directory is locked while it is in use. Directories without a lock belong to killed backups and are deleted
    first.

    Arguments:
        base: parent directory; empty: the system's directory for temporary files.

    Raises:
        OSError: the directory cannot be created.
    """
    for path in Path(base or tempfile.gettempdir()).glob(PREFIX + "*"):
        with suppress(OSError):  # owned by another user, or deleted in the meantime
            _remove_if_left(path)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=base or None) as name:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_if_left(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # An empty directory may be new and not locked yet.
        if os.fstat(descriptor).st_uid != os.geteuid() or not os.listdir(descriptor):
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(descriptor)


_FAILURES: Final = (CommandError, RaftKVError)
RETRY_S: Final = 60.0
"""Longest time until a failed scheduled backup is retried."""

_JSON = Flag("json", BOOL, usage="print JSON, one object a line")
_TEMPORARY = Flag("temporary-dir", usage="directory for temporary files (default the system's)")
CLUSTER_FLAGS = (
    Flag("endpoints", default="127.0.0.1:2379", usage="members of the cluster, comma-separated"),
    *daemon.CREDENTIALS,
)
TAKE_FLAGS = (
    Flag("once", BOOL, usage="take one backup and exit"),
    Flag("every", DURATION, 3600.0, usage="time between backups", least=0.001),
    Flag("keep", UINT, usage="keep this many of the newest backups of each cluster; 0: no limit by number"),
    Flag(
        "keep-days", UINT, usage="keep the backups of this many days; 0: no limit by age; without limits all are kept"
    ),
    Flag("prune-wal-archive", usage="delete segments of this log archive that no kept backup needs"),
    _JSON,
    _TEMPORARY,
    *CLUSTER_FLAGS,
)
RESTORE_FLAGS = (
    Flag("backup", usage="name of the backup (default the newest, or the newest before --to-revision or --to-time)"),
    Flag("data-dir", usage="directory of the new member (required)"),
    Flag("wal-dir", usage="directory of its log, if not in the data directory"),
    Flag("name", default="default", usage="name of the new member"),
    Flag("initial-cluster", default="default=http://localhost:2380", usage="name=URL,... of all new members"),
    Flag(
        "initial-cluster-token",
        usage="token of the new cluster (default the backup's name, which gives the cluster new ids)",
    ),
    Flag("initial-advertise-peer-urls", default="http://localhost:2380", usage="peer URLs of the new member"),
    *POINT_IN_TIME_FLAGS,
    _JSON,
    _TEMPORARY,
)
LOOK_FLAGS = (_JSON, _TEMPORARY)
_USAGE = """Usage:
  raftkv backup URL [flags]            take a backup now, and one after each --every
  raftkv backup list URL               print the backups
  raftkv backup verify URL             restore every backup into a temporary directory and compare its hash
  raftkv backup restore URL [flags]    make the data directory of a member of a new cluster

URL is a directory of any file system that fsspec knows: /var/backups, file:///var/backups, s3://bucket/raftkv.

Examples:
  raftkv backup s3://bucket/raftkv --every 1h --keep 24 --endpoints 10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379
  raftkv backup verify s3://bucket/raftkv
  raftkv backup restore s3://bucket/raftkv --data-dir /var/lib/raftkv"""


def main(words: Sequence[str]) -> int:
    """Run ``raftkv backup``.

    Arguments:
        words: the command line after ``backup``.

    Returns:
        the exit code.

    Raises:
        CommandError, RaftKVError: the command failed; the text is one line.
    """
    found = daemon.parse_command({name: flags for name, (flags, _) in _COMMANDS.items()}, words, _USAGE)
    if found is None:
        return SUCCESS
    command, parsed = found
    if len(parsed.arguments) != 1:
        raise CommandError(f"backup {command}".strip() + " takes one URL; see raftkv backup --help", BAD_FLAGS)
    return _COMMANDS[command][1](Place(parsed.arguments[0]), parsed.values)


# -- taking ----------------------------------------------------------------------------------------------------------


async def _take_all(place: Place, values: dict[str, Any]) -> int:
    """Take backups until a signal arrives; a backup in progress is then aborted and its files are removed."""
    stop = asyncio.Event()
    with on_signals(stop.set):
        ended = await daemon.before_stop(stop, _schedule(place, values))
    if ended is not None:
        return ended.result()
    return ERROR if values["once"] else SUCCESS


async def _schedule(place: Place, values: dict[str, Any]) -> int:
    report = Report(json=values["json"])
    due = time.monotonic()
    while True:
        due += values["every"]
        try:
            await take_one(place, values, report)
        except _FAILURES as error:
            if values["once"]:
                raise
            report.failed(str(error))
            due = min(due, time.monotonic() + RETRY_S)
        if values["once"]:
            return SUCCESS
        await asyncio.sleep(max(due - time.monotonic(), 0.0))


async def take_one(place: Place, values: dict[str, Any], report: Report) -> Manifest:
    """Take one backup, verify the uploaded file, write its manifest, and delete backups that are no longer needed.

    Raises:
        CommandError: the backup failed and does not count.
    """
    async with connect(values["endpoints"].split(","), **daemon.connection(values)) as kv:
        with _temporary(values) as directory:
            made = await _make(kv, place, directory, report)
    size = human_size(made.size_bytes)
    text = f"backup {made.name}: revision {made.revision}, {size}, from {made.endpoint}, verified"
    report.say(text, "taken", **asdict(made))
    try:
        await on_thread(lambda: _prune(place, values, report))
    except (CommandError, RaftKVError) as error:
        # The backup counts: a schedule that took another one at once would fill a place that allows no deletion.
        report.failed(f"old backups were not deleted: {error}")
    return made


async def _make(kv: Client, place: Place, directory: Path, report: Report) -> Manifest:
    taken_s, path, back = time.time(), directory / "snapshot.db", directory / "uploaded.db"
    with byte_bar("receiving", hidden=report.is_json) as received:
        member, contents = await take(kv, path, received)
    status = await kv.scope.core.call_at(member.endpoint, methods.STATUS, rpc_pb2.StatusRequest(), timeout_s=5.0)
    if not status.leader:
        report.warn(f"{member.endpoint} knows no leader: the backup may lack the last writes of the cluster")
    found, _ = await on_thread(place.look)
    made = Manifest(
        number=1 + max((one.number for one in found), default=0),
        name=name_of(taken_s, contents.revision, secrets.randbits(16)),
        taken_s=taken_s,
        **asdict(contents),
        cluster_id=status.header.cluster_id,
        member_id=member.member_id,
        endpoint=member.endpoint,
        verified_s=time.time(),
    )
    file_name = made.name + DATA_SUFFIX
    try:
        with report.copying("uploading", contents.size_bytes) as advance:
            await _copied(place.upload, path, file_name, advance)
        path.unlink()
        # Verify the stored file, not the local copy.
        with report.copying("verifying", contents.size_bytes) as advance:
            await _copied(place.download, file_name + PART_SUFFIX, back, advance)
        await on_thread(lambda: check(made, back))
    except (*_FAILURES, OSError, asyncio.CancelledError):
        await on_thread(lambda: _delete(place, [file_name + PART_SUFFIX]))
        raise
    # One job, so that a signal in its middle leaves a whole backup.
    await on_thread(lambda: _publish(place, made))
    return made


def _publish(place: Place, made: Manifest) -> None:
    """Make an uploaded file a backup."""
    file_name, manifest_name = made.name + DATA_SUFFIX, made.name + MANIFEST_SUFFIX
    try:
        place.finish(file_name)
        place.write(manifest_name, made.encode())
    except _FAILURES:
        # Without its manifest the uploaded file is not a backup, and would only occupy space.
        _delete(place, [file_name + PART_SUFFIX, manifest_name, file_name])
        raise


def _delete(place: Place, names: Sequence[str]) -> None:
    """Delete files of a failed backup as far as possible; ignore errors, because the original failure is reported."""
    for name in names:
        with suppress(RaftKVError):
            place.delete(name)


async def _copied(copy: Callable[[Any, Any, Advance], None], source: Any, target: Any, advance: Advance) -> None:
    """Copy in a thread; a cancellation stops the copy at the next piece."""
    cancelled = threading.Event()

    def go_on(size_bytes: int) -> None:
        if cancelled.is_set():
            raise CommandError("cancelled")
        advance(size_bytes)

    await on_thread(lambda: copy(source, target, go_on), cancelled.set)


def _prune(place: Place, values: dict[str, Any], report: Report) -> None:
    now_s = time.time()
    found, damaged = place.look()
    for name, why in damaged.items():
        report.failed(why, name)
    for old in not_needed(found, values["keep"], values["keep-days"], now_s):
        place.remove(old)
        report.deleted(old.name)
    for name in place.remove_leftovers(now_s):
        report.deleted(name)
    if values["prune-wal-archive"] and damaged:
        report.failed("the log archive was not pruned, because these damaged backups may need parts of it")
    elif values["prune-wal-archive"]:
        _prune_archive(Path(values["prune-wal-archive"]), place, report)


def _prune_archive(archive: Path, place: Place, report: Report) -> None:
    from raftkv.offline.archive import prune

    needed: dict[int, int] = {}
    for backup in place.backups():
        needed[backup.cluster_id] = min(needed.get(backup.cluster_id, backup.index), backup.index)
    for path in prune(archive, needed):
        report.deleted(str(path))


@contextmanager
def _temporary(values: dict[str, Any]) -> Iterator[Path]:
    try:
        with temporary_directory(values["temporary-dir"]) as directory:
            yield directory
    except OSError as error:
        place = f": {error.filename}" if error.filename is not None else ""
        raise CommandError(f"cannot use a temporary directory: {error.strerror or error}{place}") from None


@contextmanager
def _checked(place: Place, backup: Manifest, values: dict[str, Any], report: Report) -> Iterator[Path]:
    """Download a backup for the block, and check it; yield the path of the file."""
    with _temporary(values) as directory:
        path = directory / "backup.db"
        with report.copying(backup.name, backup.size_bytes) as advance:
            place.download(backup.name + DATA_SUFFIX, path, advance)
        check(backup, path)
        yield path


# -- listing and restoring -------------------------------------------------------------------------------------------


def _list(place: Place, values: dict[str, Any]) -> int:
    place.require()
    report = Report(json=values["json"])
    found, damaged = place.look()
    report.table(found)
    for name, why in damaged.items():
        report.failed(why, name)
    return ERROR if damaged else SUCCESS


def _verify(place: Place, values: dict[str, Any]) -> int:
    report = Report(json=values["json"])
    backups, damaged = place.look()
    if not backups and not damaged:
        raise CommandError(f"there are no backups in {place.uri}")
    for name, why in damaged.items():
        report.failed(why, name)
    bad = len(damaged)
    for backup in backups:
        try:
            with _checked(place, backup, values, report):
                pass
        except _FAILURES as error:
            bad += 1
            report.failed(str(error), backup.name)
        else:
            text = f"backup {backup.name}: revision {backup.revision}, hash {backup.hash}, verified"
            report.say(text, "verified", name=backup.name, revision=backup.revision, hash=backup.hash)
    if bad:
        raise CommandError(f"{bad} of {len(backups) + len(damaged)} backups cannot be restored")
    return SUCCESS


def _restore(place: Place, values: dict[str, Any]) -> int:
    if not values["data-dir"]:
        raise CommandError('required flag(s) "data-dir" not set')
    target, report = target_of(values), Report(json=values["json"])
    backup = _chosen(place, values["backup"], target)
    config = ServerConfig(
        name=values["name"],
        data_dir=values["data-dir"],
        wal_dir=values["wal-dir"],
        initial_cluster=values["initial-cluster"],
        # A new token gives new ids, so that the archive of the old log cannot be mistaken for the new one.
        initial_cluster_token=values["initial-cluster-token"] or backup.name,
        initial_advertise_peer_urls=cluster_id.parse_urls(values["initial-advertise-peer-urls"]),
    )
    with _checked(place, backup, values, report) as path:
        try:
            made = restore(path, config, forward=forward_of(values))
        except OSError as error:  # not one of the temporary directory
            raise CommandError(f"cannot restore to {config.data_dir}: {described(error)}") from None
    text = f"restored {backup.name} to {config.data_dir}, revision {made.revision}"
    report.say(text, "restored", name=backup.name, revision=made.revision, data_dir=config.data_dir)
    return SUCCESS


def _chosen(place: Place, name: str, target: Target | None = None) -> Manifest:
    """Return the backup with a name, the newest, or the newest from which the log leads to a point in time."""
    backups, damaged = place.look()
    found = [one for one in backups if not name or one.name == name]
    newest = name or max((*damaged, *(one.name for one in found)), default="")
    if newest in damaged:
        raise CommandError(damaged[newest] + ("" if name else "; --backup restores another one by name"))
    if not found:
        raise CommandError(f"there is {f'no backup {name}' if name else 'no backup'} in {place.uri}")
    if target is not None and not name:
        found = [one for one in found if begins_before(one, target.revision, target.time_s)]
        if not found:
            raise CommandError(f"all backups in {place.uri} are newer than what is to be restored")
    return oldest_first(found)[-1]


_COMMANDS: Final[dict[str, tuple[Sequence[Flag], Callable[[Place, dict[str, Any]], int]]]] = {
    "": (TAKE_FLAGS, lambda place, values: asyncio.run(_take_all(place, values))),
    "list": (LOOK_FLAGS, _list),
    "verify": (LOOK_FLAGS, _verify),
    "restore": (RESTORE_FLAGS, _restore),
}
