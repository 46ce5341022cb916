"""The commands of ``raftkvutl``: ``hashkv``, ``defrag``, ``migrate``, ``wal dump|verify``, ``snapshot status|restore``.

They print one record in one of etcdutl's formats; ``wal dump`` prints a line for each record of a log, or an object
with ``--json``. Files may be raftkv's or etcd's; a log may belong to a running member.

>>> cells = [Cell("hash", "Hash", "hash", 255, "ff"), Cell("revision", "Revision", "revision", 7)]
>>> print(rendered("simple", cells))
ff, 7
>>> print(rendered("json", cells))
{"hash":255,"revision":7}
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raftkv import cluster_id
from raftkv.cli.command import Invocation
from raftkv.cli.common import FORMATS, forward_of
from raftkv.cli.pflag import quote
from raftkv.cli.printer import encode, human_size, plain
from raftkv.cli.program import BAD_ARGUMENTS, BAD_FEATURE, ERROR, CommandError
from raftkv.config import ServerConfig
from raftkv.errors import RaftKVError
from raftkv.offline import database, log
from raftkv.offline.directory import log_of
from raftkv.offline.etcd.file import hash_snapshot_file, is_snapshot, snapshot_status
from raftkv.offline.etcd.restore import restore


@dataclass(frozen=True)
class Cell:
    """One value of a record: its names in JSON, as a field and as a column, and its display text (empty: the value)."""

    json_name: str
    field: str
    title: str
    value: int | str
    shown: str = ""

    @property
    def text(self) -> str:
        """The value in the simple format and in tables."""
        return self.shown or str(self.value)


def rendered(write_out: str, cells: Sequence[Cell]) -> str:
    """Return a record as text, without the last newline.

    Arguments:
        write_out: output format.
        cells: values of the record, in order.

    Raises:
        CommandError: the format does not exist, or cannot show a record.
    """
    if write_out == "simple":
        return ", ".join(cell.text for cell in cells)
    if write_out == "fields":
        return "\n".join(f'"{cell.field}" : {cell.value}' for cell in cells)
    if write_out == "json":
        return encode({cell.json_name: cell.value for cell in cells})
    if write_out == "table":
        from raftkv.cli.table import render

        return render([cell.title for cell in cells], [[cell.text for cell in cells]])
    check_format(write_out)
    raise CommandError(f"{write_out} not supported as output format", BAD_FEATURE)


def check_format(write_out: str) -> None:
    """Refuse an unknown output format, before any work is done.

    Raises:
        CommandError: the format does not exist.
    """
    if write_out not in FORMATS:
        raise CommandError("unsupported output format", BAD_FEATURE)


def show(invocation: Invocation, cells: Sequence[Cell]) -> None:
    """Print a record in the format of ``--write-out``."""
    print(rendered(invocation["write-out"], cells))


_OLDEST: Final = (3, 5)


def hashkv(invocation: Invocation) -> None:
    """Print the hash of the history in a file."""
    check_format(invocation["write-out"])
    path = invocation.argument(f"accepts 1 arg(s), received {len(invocation.arguments)}", ERROR)
    revision = invocation["rev"]
    if is_snapshot(path):
        found = hash_snapshot_file(Path(path), revision)
    else:
        found = database.hash_database_file(path, revision)
    cells = [
        Cell("hash", "Hash", "hash", found.hash),
        Cell("hashRevision", "Hash revision", "hash revision", found.revision),
        Cell("compactRevision", "Compact revision", "compact revision", found.compact_revision),
    ]
    show(invocation, cells)


def defrag(invocation: Invocation) -> None:
    """Rewrite a database without its free pages."""
    directory = required(invocation, "data-dir")
    try:
        database.defragment(directory)
    except RaftKVError as error:
        raise CommandError(f"Failed to defragment etcd data[{directory}] ({error})", ERROR) from None


def migrate(invocation: Invocation) -> None:
    """Convert a data directory to the format of another version."""
    directory, text = required(invocation, "data-dir", "target-version"), invocation["target-version"]
    target = _version(text)
    found = database.storage_version(directory)
    if target == found:
        print(f"storage version up-to-date: {found}", file=sys.stderr)
        return
    why = f"cannot migrate {directory} from storage version {found} to {target}: this program writes {found} alone"
    if invocation["force"]:
        why += ", and --force cannot make a format"
    raise CommandError(why, ERROR)


def _version(text: str) -> str:
    if text.count(".") != 1:
        raise CommandError(f'wrong target version format, expected "X.Y", got {quote(text)}', BAD_ARGUMENTS)
    if not re.fullmatch(r"(0|[1-9]\d*)\.(0|[1-9]\d*)", text):
        raise CommandError(f"failed to parse target version: {text}.0 is not in dotted-tri format", BAD_ARGUMENTS)
    major, minor = map(int, text.split("."))
    if (major, minor) < _OLDEST:
        raise CommandError(f'target version {quote(text)} not supported. Minimal "3.5"', BAD_ARGUMENTS)
    return text


def required(invocation: Invocation, *names: str) -> str:
    """Return the value of a required flag.

    Arguments:
        invocation: the command line.
        names: required flags; the value is the first one's.

    Raises:
        CommandError: flags are missing.
    """
    invocation.refuse_surplus()
    missing = [f'"{name}"' for name in names if name not in invocation.changed]
    if missing:
        raise CommandError(f"required flag(s) {', '.join(missing)} not set", ERROR)
    value: str = invocation[names[0]]
    return value


def verify(invocation: Invocation) -> None:
    """Check a whole log and print a summary."""
    check_format(invocation["write-out"])
    found = log.verify(_directory(invocation))
    marker = found.markers[-1].index if found.markers else 0
    cells = [
        Cell("clusterId", "ClusterID", "cluster id", found.cluster_id, f"{found.cluster_id:x}"),
        Cell("memberId", "MemberID", "member id", found.member_id, f"{found.member_id:x}"),
        Cell("segments", "Segments", "segments", found.segments),
        Cell("sizeBytes", "Size", "size", found.size_bytes),
        Cell("firstIndex", "FirstIndex", "first index", found.first_index),
        Cell("lastIndex", "LastIndex", "last index", found.last_index),
        Cell("term", "Term", "term", found.hard_state.term),
        Cell("commit", "Commit", "commit", found.hard_state.commit),
        Cell("marker", "Marker", "marker", marker),
        Cell("torn", "Torn", "torn", found.torn, found.torn or "whole"),
    ]
    show(invocation, cells)


def dump(invocation: Invocation) -> None:
    """Print every record of a log."""
    directory = _directory(invocation)
    start, end = invocation["start"], invocation["end"] if "end" in invocation.changed else None
    for found in log.contents(directory, start, end):
        print(encode(log.row(found, plain)) if invocation["json"] else log.line(found))


def _directory(invocation: Invocation) -> str:
    return log_of(invocation.argument(f"accepts 1 arg(s), received {len(invocation.arguments)}", ERROR))


def status(invocation: Invocation, *, with_version: bool = True) -> None:
    """Print hash, revision, keys, size and version of a snapshot file.

    Arguments:
        invocation: the command line.
        with_version: whether to print the version, as etcdutl since 3.6, but not etcdctl.
    """
    path = invocation.argument("snapshot status requires exactly one argument")
    check_format(invocation["write-out"])
    found = snapshot_status(path)
    cells = [
        Cell("hash", "Hash", "hash", found.hash, f"{found.hash:x}"),
        Cell("revision", "Revision", "revision", found.revision),
        Cell("totalKey", "Keys", "total keys", found.keys),
        Cell("totalSize", "Size", "total size", found.size_bytes, human_size(found.size_bytes)),
    ]
    if with_version:
        cells.append(Cell("version", "Version", "version", found.version))
    show(invocation, cells)


def restore_directory(invocation: Invocation) -> None:
    """Create the data directory of a member from a snapshot file."""
    path = Path(invocation.argument("snapshot restore requires exactly one argument"))
    bump = invocation["bump-revision"]
    if (bump > 0) != invocation["mark-compacted"]:
        raise CommandError("--mark-compacted required if --revision-bump > 0", BAD_ARGUMENTS)
    forward = forward_of(invocation.values)
    if forward is not None and bump:
        raise CommandError("--bump-revision and --wal-archive-dir exclude each other", BAD_ARGUMENTS)
    name = invocation["name"]
    config = ServerConfig(
        name=name,
        data_dir=invocation["data-dir"] or f"{name}.etcd",
        wal_dir=invocation["wal-dir"],
        initial_cluster=invocation["initial-cluster"],
        initial_cluster_token=invocation["initial-cluster-token"],
        initial_advertise_peer_urls=cluster_id.parse_urls(invocation["initial-advertise-peer-urls"]),
    )
    skip = invocation["skip-hash-check"]
    made = restore(path, config, skip_hash_check=skip, bump_revision=bump, forward=forward)
    print(
        f"restored {path} to {config.data_dir}: member {made.member_id:x} of cluster {made.cluster_id:x}, "
        f"revision {made.revision}, {made.records} records",
        file=sys.stderr,
    )
    if made.needs_users:
        print(
            "users and roles are kept, and users are asked for: log in as before, tokens from before are void",
            file=sys.stderr,
        )
