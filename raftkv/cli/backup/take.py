"""A snapshot from one member, and the hash that the cluster gives for it.

Owns the choice of the member: a follower before a learner before the leader, the one that has applied most first; when
one is lost in the middle, the next. A snapshot is only taken for good if a member gives a hash for exactly its revision
and its compacted revision. If the cluster was compacted meanwhile, another one is taken.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from raftkv.cli.backup.verify import Contents, read_contents
from raftkv.cli.exits import CommandError
from raftkv.client.library import Client
from raftkv.client.rpc import methods
from raftkv.client.snapshot import Progress
from raftkv.client.values import EndpointStatus
from raftkv.errors import StatusError, StorageError
from raftkv.pb import rpc_pb2

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
        CommandError: nobody gives one, or its hash is not the cluster's.
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
        CommandError: it has another history, or nobody says.
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
