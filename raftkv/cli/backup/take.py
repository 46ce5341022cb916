"""A snapshot from one member, the hash that the cluster gives for it, and the check of a file by restoring it.

Owns the choice of the member: a follower before a learner before the leader, the one that has applied most first; when
one is lost in the middle, the next. A snapshot is only taken for good if a member gives a hash for exactly its revision
and its compacted revision. If the cluster was compacted meanwhile, another one is taken.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raftkv.cli.backup.manifest import Manifest
from raftkv.cli.program import CommandError
from raftkv.client.library import Client
from raftkv.client.rpc import methods
from raftkv.client.snapshot import Progress
from raftkv.client.values import EndpointStatus
from raftkv.config import ServerConfig
from raftkv.errors import RaftKVError, StatusError, StorageError
from raftkv.offline.database import hash_database_file
from raftkv.offline.etcd.restore import restore
from raftkv.pb import rpc_pb2


@dataclass(frozen=True, slots=True)
class Contents:
    """What a restored file holds: the hash of its history, the revisions that it is for, where in the log of its
    cluster it stands, and the file's own hash."""

    hash: int
    revision: int
    compact_revision: int
    index: int
    size_bytes: int
    sha256: str


def read_contents(path: Path) -> Contents:
    """Restore a snapshot file and return what is in it.

    Raises:
        CommandError: it cannot be restored.
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
        CommandError: it is not.
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
"""Snapshots that are taken until one has not been overtaken by a compaction."""
HASH_TIMEOUT_S: Final = 120.0
STATUS_TIMEOUT_S: Final = 2.0


async def take(kv: Client, path: Path, progress: Progress) -> tuple[EndpointStatus, Contents]:
    """Save a snapshot that has the hash which the cluster gives for it.

    Arguments:
        kv: a client of all members.
        path: where to.
        progress: told of bytes.

    Returns:
        who gave it, and what is in it.

    Raises:
        CommandError: no member gives one, or its hash is not the cluster's.
    """
    for _ in range(TRIES):
        member = await _save(kv, path, progress)
        contents = await asyncio.to_thread(read_contents, path)
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
    """Return members in the order in which they are asked; those that do not answer last."""

    def rank(one: EndpointStatus) -> tuple[bool, bool, bool, int]:
        is_leader = one.member_id == one.leader_id
        return bool(one.error), is_leader, one.is_learner, -one.raft_applied_index

    return sorted(members, key=rank)


async def _is_confirmed(kv: Client, member: EndpointStatus, contents: Contents) -> bool:
    """Return whether the cluster has this history at that revision; False: it was compacted meanwhile.

    Raises:
        CommandError: it has another history, or no member tells.
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
