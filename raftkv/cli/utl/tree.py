"""The commands of raftkvutl: their names, flags, help and examples, and the functions that they run.

Owns the tree. Leaves name their function as ``module:function``; see ``cli.command``.
"""

from __future__ import annotations

import click

from raftkv.cli.command import Branch, leaf_maker
from raftkv.cli.common import FORMATS_FLAG, about_commands, file_commands
from raftkv.cli.pflag import BOOL, INT, Flag

NAME = "raftkvutl"

GLOBAL_FLAGS = (FORMATS_FLAG,)
_leaf = leaf_maker(GLOBAL_FLAGS)


def _snapshot_commands() -> list[click.Command]:
    children = file_commands(_leaf, "utl.files", "hash, revision, total keys, total size, version")
    return [Branch("snapshot", "Look at snapshot files, and restore them", children, GLOBAL_FLAGS)]


def _database_commands() -> list[click.Command]:
    directory = Flag("data-dir", usage="data directory of a member that does not run (required)")
    rev = Flag("rev", INT, usage="hash the history up to this revision; 0 means all of it")
    migration = (
        directory,
        Flag("target-version", usage="version whose format is wanted: X.Y, at least 3.5 (required)"),
        Flag("force", BOOL, usage="accepted for etcdutl's scripts, and ignored"),
    )
    migrate = "raftkv has one format so far, that of version 3.7."
    return [
        _leaf("hashkv", "utl.files:hashkv", "FILE", "Print the hash of the history in a database", (rev,), _HASHKV)(
            "hashkv default.etcd", "hashkv db --rev 1000 -w json"
        ),
        _leaf("defrag", "utl.files:defrag", "", "Write a database anew without its free pages", (directory,))(
            "defrag --data-dir default.etcd"
        ),
        _leaf("migrate", "utl.files:migrate", "", "Bring data to the format of another version", migration, migrate)(
            "migrate --data-dir default.etcd --target-version 3.7"
        ),
    ]


_HASHKV = """FILE is a snapshot, a database or a data directory. The hash is the one that `raftkvctl endpoint
hashkv` prints for that revision."""
_WAL = "DIR is a data directory, or a directory with segments. It is only read: the member may run."


def _wal_commands() -> Branch:
    flags = (
        Flag("start", INT, usage="leave out the entries before this index"),
        Flag("end", INT, usage="leave out the entries from this index on"),
        Flag("json", BOOL, usage="print JSON, one object a record", ours=True),
    )
    verify = """Walks the whole chain of checksums and prints cluster, member, number and size of the segments, first
and last index, term, commit index, last marker, and whether a crash left something at the end."""
    children = [
        _leaf("dump", "utl.files:dump", "DIR", "Print every record of a log", flags, _WAL)(
            "wal dump default.etcd", "wal dump default.etcd --start 100 --end 200 --json"
        ),
        _leaf("verify", "utl.files:verify", "DIR", "Check a log from end to end", (), f"{verify}\n\n{_WAL}")(
            "wal verify default.etcd"
        ),
    ]
    return Branch("wal", "Look at write-ahead logs", children, GLOBAL_FLAGS)


def make_tree() -> Branch:
    """Make the tree of all commands."""
    children = [*_snapshot_commands(), *_database_commands(), _wal_commands(), *about_commands(_leaf, NAME)]
    return Branch(NAME, "Work on data directories that no member has open", children, GLOBAL_FLAGS)
