"""The commands of raftkvutl: their names, flags, help and examples, and the functions that they run.

Defines the command tree. A command's function has the command's name, in the module of its branch; see ``cli.command``.
"""

from __future__ import annotations

from raftkv.cli.command import Branch
from raftkv.cli.common import FORMATS_FLAG, add_about_commands, add_file_commands
from raftkv.cli.pflag import BOOL, INT, Flag

NAME = "raftkvutl"

GLOBAL_FLAGS = (FORMATS_FLAG,)


def _add_databases(root: Branch) -> None:
    directory = Flag("data-dir", usage="data directory of a member that does not run (required)")
    rev = Flag("rev", INT, usage="hash the history up to this revision; 0 means all of it")
    migration = (
        directory,
        Flag("target-version", usage="version whose format is wanted: X.Y, at least 3.5 (required)"),
        Flag("force", BOOL, usage="accepted for etcdutl's scripts, and ignored"),
    )
    migrate = "raftkv has one format so far, that of version 3.7."
    root.leaf("hashkv", "FILE", "Print the hash of the history in a database", (rev,), _HASHKV).like(
        "default.etcd", "db --rev 1000 -w json"
    )
    root.leaf("defrag", "", "Write a database anew without its free pages", (directory,)).like(
        "--data-dir default.etcd"
    )
    root.leaf("migrate", "", "Bring data to the format of another version", migration, migrate).like(
        "--data-dir default.etcd --target-version 3.7"
    )


_HASHKV = """FILE is a snapshot, a database or a data directory. The hash is the one that `raftkvctl endpoint
hashkv` prints for that revision."""
_WAL = "DIR is a data directory, or a directory with segments. It is only read: the member may run."


def _add_log(root: Branch) -> None:
    wal = root.branch("wal", "Look at write-ahead logs", "utl.files:")
    flags = (
        Flag("start", INT, usage="leave out the entries before this index"),
        Flag("end", INT, usage="if given, leave out the entries from this index on"),
        Flag("json", BOOL, usage="print JSON, one object a record", ours=True),
    )
    verify = """Walks the whole chain of checksums and prints cluster, member, number and size of the segments, first
and last index, term, commit index, last marker, and whether a crash left something at the end."""
    wal.leaf("dump", "DIR", "Print every record of a log", flags, _WAL).like(
        "default.etcd", "default.etcd --start 100 --end 200 --json"
    )
    wal.leaf("verify", "DIR", "Check a log from end to end", (), f"{verify}\n\n{_WAL}").like("default.etcd")


def make_tree() -> Branch:
    """Return the tree of all commands."""
    root = Branch(NAME, "Work on data directories that no member has open", "utl.files:", shared=GLOBAL_FLAGS)
    snapshot = root.branch("snapshot", "Look at snapshot files, and restore them", "utl.files:")
    add_file_commands(snapshot, "hash, revision, total keys, total size, version")
    _add_databases(root)
    _add_log(root)
    add_about_commands(root)
    return root
