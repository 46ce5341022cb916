"""Transfer of databases between simulated members: the production sender's rules, with an in-memory copy and one
envelope instead of a stream; and the receiver.

Owns nothing durable: a received database belongs to the directory.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from raftkv.raft.types import Message, MessageType, SnapshotMeta
from raftkv.replica.snapshots import SnapshotSender, snapshot_path
from raftkv.replica.snapshots.sender import Copy
from raftkv.storage.failpoints import failpoint
from raftkv.storage.snapshot import SnapshotInfo
from tests.sim.devices.database import Database, applied_meta

if TYPE_CHECKING:
    from tests.sim.member import Member


class SnapshotCarrier(SnapshotSender):
    """Sends databases, at most one at a time to each member.

    Arguments:
        member: the sending member.
        others: as in ``SnapshotSender``.
    """

    def __init__(self, member: Member, *others: Any) -> None:
        self._member = member
        super().__init__(*others)
        self.copies.write = self._write

    async def _write(self, path: Path, stop: object) -> SnapshotInfo:
        flushed = asyncio.Event()
        self._member.store.flush(flushed.set)
        await flushed.wait()
        self._member.store.backend.copy_to(path)
        meta = applied_meta(self._member.directory.files[path.name])
        return SnapshotInfo(meta.index, meta.term, meta.conf_state, 0, b"")

    async def _stream(self, channel: Any, message: Message, copy: Copy) -> None:
        info, path = copy.info, copy.path
        meta = SnapshotMeta(info.index, info.term, info.conf_state)
        envelope = Message(MessageType.SNAPSHOT, message.to, message.from_, message.term, snapshot=meta)
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        content = self._member.directory.files[path.name].clone()
        self._member.cluster.network.send_snapshot(self._member, envelope, content, arrived)
        await arrived


def receive(member: Member, message: Message, content: Database) -> None:
    """Accept a database with its snapshot message, as ``snapshots/receiver`` does. Runs on the member's loop."""
    node, meta = member.running, message.snapshot
    if meta is None:
        raise ValueError("a snapshot message without meta")
    path: Any = snapshot_path(cast(Path, member.directory), meta.index)
    failpoint("snapshotBeforeRename")
    if not node.awaits_snapshot(meta.index):
        member.directory.files[path.name] = content
    failpoint("snapshotAfterRename")
    member._receive([message])
    if not node.awaits_snapshot(meta.index):
        path.unlink(missing_ok=True)
