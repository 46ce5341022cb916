"""The words of ``snapshot status`` and ``snapshot restore``, which ``raftkvctl`` and ``raftkvutl`` both have."""

from __future__ import annotations

from raftkv.cli.goflags.command import Leaf, MakeLeaf
from raftkv.cli.goflags.pflag import BOOL, UINT, Flag
from raftkv.cli.point_in_time import FLAGS as POINT_IN_TIME_FLAGS

RESTORE_FLAGS = (
    Flag("data-dir", usage="directory to make; it does not exist or is empty (default NAME.etcd, as a member's)"),
    Flag("wal-dir", usage="directory to make for the log (default inside --data-dir)"),
    Flag("name", default="default", usage="name of this member"),
    Flag("initial-cluster", default="default=http://localhost:2380", usage="members of the new cluster"),
    Flag("initial-cluster-token", default="etcd-cluster", usage="token of the new cluster"),
    Flag("initial-advertise-peer-urls", default="http://localhost:2380", usage="peer URLs of this member"),
    Flag("skip-hash-check", BOOL, usage="accept a file without its SHA-256, copied from a data directory of etcd"),
    Flag("bump-revision", UINT, usage="make the revision this much higher than in the file"),
    Flag("mark-compacted", BOOL, usage="compact all history; required with --bump-revision, and only with it"),
    Flag("initial-memory-map-size", UINT, usage="accepted as etcdutl does, and not used"),
    *POINT_IN_TIME_FLAGS,
)
_STATUS = """FILE is a snapshot that raftkvctl or etcdctl saved, or a database of etcd. All of it is read. The simple
format is: """
_RESTORE = """Every member of the new cluster is restored from the same FILE, with flags of its own. FILE may be of
raftkv or of etcd 3.4 to 3.6. Users and roles in it are kept."""


def file_commands(leaf: MakeLeaf, module: str, columns: str, remark: str = "") -> list[Leaf]:
    """Make the commands that work on a snapshot file.

    Arguments:
        leaf: makes a command that only lacks its examples.
        module: where the functions of this program are.
        columns: what ``status`` prints, in order.
        remark: what the pages of this program say at their end.
    """
    status, restore = f"{_STATUS}{columns}.{remark}", f"{_RESTORE}{remark}"
    look, make = "Check a snapshot file and print what is in it", "Make a data directory of a member"
    return [
        leaf("status", f"{module}:status", "FILE", look, (), status)(
            "snapshot status backup.db", "snapshot status backup.db -w table"
        ),
        leaf("restore", f"{module}:restore_directory", "FILE", make, RESTORE_FLAGS, restore)(
            "snapshot restore old.db --data-dir new.etcd",
            "snapshot restore old.db --bump-revision 1000000 --mark-compacted",
            "snapshot restore old.db --wal-archive-dir archive --to-revision 900",
        ),
    ]
