"""``raftkvutl hashkv``, ``defrag`` and ``migrate``: work on the database of a member that does not run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from raftkv.cli.exits import BAD_ARGUMENTS, ERROR, CommandError
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.goflags.values import quote
from raftkv.cli.utl.output import Cell, check_format, show
from raftkv.errors import RaftKVError
from raftkv.offline import database
from raftkv.offline.etcd.file import hash_snapshot_file, is_snapshot

_OLDEST: Final = (3, 5)


def hashkv(invocation: Invocation) -> None:
    """Print the hash of the history in a file."""
    check_format(invocation["write-out"])
    if len(invocation.arguments) != 1:
        raise CommandError(f"accepts 1 arg(s), received {len(invocation.arguments)}")
    path, revision = invocation.arguments[0], invocation["rev"]
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
    """Write a database anew without its free pages."""
    directory = required(invocation, "data-dir")
    try:
        database.defragment(directory)
    except RaftKVError as error:
        raise CommandError(f"Failed to defragment etcd data[{directory}] ({error})", ERROR) from None


def migrate(invocation: Invocation) -> None:
    """Bring the format of a data directory to that of another version."""
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
    """Return the value of a flag that must be given.

    Arguments:
        invocation: the command line.
        names: of the flags; the value is the first one's.

    Raises:
        CommandError: some are not given.
    """
    missing = [f'"{name}"' for name in names if name not in invocation.changed]
    if missing:
        raise CommandError(f"required flag(s) {', '.join(missing)} not set", ERROR)
    value: str = invocation[names[0]]
    return value
