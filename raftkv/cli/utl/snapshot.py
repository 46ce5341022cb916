"""``raftkvutl snapshot status`` and ``restore``: etcdutl's words, for files of raftkv and of etcd."""

from __future__ import annotations

import sys
from pathlib import Path

from raftkv import cluster_id
from raftkv.cli.exits import BAD_ARGUMENTS, CommandError
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.output.printer import human_size
from raftkv.cli.point_in_time import forward_of
from raftkv.cli.utl.output import Cell, check_format, show
from raftkv.config import ServerConfig
from raftkv.offline.etcd.file import snapshot_status
from raftkv.offline.etcd.restore import restore


def status(invocation: Invocation, *, with_version: bool = True) -> None:
    """Print hash, revision, keys, size and version of a snapshot file.

    Arguments:
        invocation: the command line.
        with_version: etcdutl prints it since 3.6, etcdctl never did.
    """
    if len(invocation.arguments) != 1:
        raise CommandError("snapshot status requires exactly one argument", BAD_ARGUMENTS)
    check_format(invocation["write-out"])
    found = snapshot_status(invocation.arguments[0])
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
    """Make the data directory of a member out of a snapshot file."""
    if len(invocation.arguments) != 1:
        raise CommandError("snapshot restore requires exactly one argument", BAD_ARGUMENTS)
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
    path = Path(invocation.arguments[0])
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
