"""The members of the cluster, as agreed through the log.

Owns the members bucket: id to ``etcdserverpb.Member``. Who votes is Raft's business (its ConfState is stored beside
the applied index); this is what clients are shown.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from raftkv.apply.alarms import MetaStore
from raftkv.pb import raft_pb2, rpc_pb2

_KEY: Final = struct.Struct(">Q")


class Membership:
    """The members by id.

    Arguments:
        store: where they are kept.
        bucket: name of their bucket (``storage.schema``).
    """

    def __init__(self, store: MetaStore, bucket: bytes) -> None:
        self._store = store
        self._bucket = bucket
        self.members: dict[int, rpc_pb2.Member] = {}
        self.reload()

    def reload(self) -> None:
        """Read the members back from the store: at start, and after a snapshot replaced it."""
        records = (rpc_pb2.Member.FromString(value) for _, value in self._store.meta_items(self._bucket))
        self.members = {member.ID: member for member in records}

    def bootstrap(self, members: Iterable[rpc_pb2.Member]) -> None:
        """Write the members that a new cluster starts with."""
        for member in members:
            self._save(member)

    def set_attributes(self, record: raft_pb2.MemberRecord) -> None:
        """Take over the name and the client URLs that a member published; unknown members are ignored, as they may have
        left.
        """
        member = self.members.get(record.member.ID)
        if member is None:
            return
        changed = rpc_pb2.Member()
        changed.CopyFrom(member)
        changed.name = record.member.name
        changed.ClearField("clientURLs")
        changed.clientURLs.extend(record.member.clientURLs)
        self._save(changed)

    def list(self) -> list[rpc_pb2.Member]:
        """Return all members by id."""
        return [self.members[member_id] for member_id in sorted(self.members)]

    def _save(self, member: rpc_pb2.Member) -> None:
        self.members[member.ID] = member
        self._store.meta_put(self._bucket, _KEY.pack(member.ID), member.SerializeToString(deterministic=True))
