"""The sending half: a copy of the database for a member that fell behind the log.

    send(message) --> wait after failures --> [copy, one at a time] --> stream --> report(to, ok), exactly once
                                              log is held from here on

A member that is sent a second snapshot while one is on its way has been given up by the core in between (it asks again
only after a report, or under another term): the first is cancelled, and the one report is that of the second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from raftkv.pb import raft_pb2
from raftkv.pb.services import SERVICES
from raftkv.raft.types import Message, SnapshotMeta
from raftkv.rpc.client.channel import Channel
from raftkv.server.peer.codec import encode_snapshot_meta
from raftkv.server.snapshots.files import check_room, on_thread, outgoing_path, remove_database
from raftkv.storage.failpoints import failpoint
from raftkv.storage.mvcc import Store
from raftkv.storage.snapshot import SnapshotInfo, write_snapshot

_log = logging.getLogger(__name__)
PATH: Final = SERVICES["raftkvpb.Peer"]["InstallSnapshot"].path
CHUNK_BYTES: Final = 256 * 1024
SEND_TIMEOUT_S: Final = 600.0
RETRY_MIN_S: Final = 0.5
RETRY_MAX_S: Final = 30.0
"""Rest before the next copy for a member after its first failure, which doubles with each further one, up to this."""


class SnapshotSender:
    """Sends databases, at most one at a time to each member.

    Arguments:
        store: what is copied.
        directory: where the copy is made.
        channel: the connection to a peer.
        metadata: our introduction to a peer.
        is_wanted: whether the core still waits for what a message stands for.
        report: called with the member and whether it succeeded, for the core.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        channel: Callable[[int], Channel | None],
        metadata: Callable[[int], tuple[tuple[str, str], ...]],
        is_wanted: Callable[[Message], bool],
        report: Callable[[int, bool], None],
    ) -> None:
        self._store = store
        self._directory = directory
        self._channel = channel
        self._metadata = metadata
        self._is_wanted = is_wanted
        self._report = report
        self._sends: dict[int, asyncio.Task[bool]] = {}
        self._failures: dict[int, int] = {}
        self._tasks: set[asyncio.Task[bool]] = set()
        self._holding: set[asyncio.Task[Any]] = set()
        self._copying = asyncio.Lock()

    @property
    def in_flight(self) -> bool:
        """Whether a snapshot is being made or sent: the log behind it must be kept meanwhile."""
        return bool(self._holding)

    def send(self, message: Message) -> None:
        """Send the database that a SNAPSHOT message stands for."""
        before = self._sends.pop(message.to, None)
        if before is not None:
            before.cancel()
        task = asyncio.get_running_loop().create_task(self._send(message))
        self._sends[message.to] = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, message.to))

    def _ended(self, to: int, task: asyncio.Task[bool]) -> None:
        """The one place where sends end, however they do: by themselves, cancelled, or not even begun."""
        self._tasks.discard(task)
        self._holding.discard(task)
        ok = not task.cancelled() and task.exception() is None and task.result()
        if self._sends.get(to) is not task:
            return  # another to the same member has taken its place, and will report
        del self._sends[to]
        self._failures[to] = 0 if ok else self._failures.get(to, 0) + 1
        self._report(to, ok)

    def give_up(self, reason: str) -> bool:
        """End all that is being made or sent, as failed; whether there was anything."""
        news = [task for task in self._holding if not task.cancelling()]
        if news:
            _log.warning("giving up %d snapshots on their way to other members: %s", len(news), reason)
        for task in news:
            task.cancel()
        return self.in_flight

    async def close(self) -> None:
        """Give up on everything."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, message: Message) -> bool:
        failures = self._failures.get(message.to, 0)
        if failures:
            await asyncio.sleep(min(RETRY_MAX_S, RETRY_MIN_S * 2 ** min(failures - 1, 10)))
        if not self._is_wanted(message):
            return False
        task = asyncio.current_task()
        if task is not None:
            self._holding.add(task)
        path = outgoing_path(self._directory, message.to)
        try:
            await self._deliver(message, path)
        except Exception as error:
            # Whatever it was, the core must hear of it, or it sends this member nothing for ever.
            _log.warning("sending a snapshot to %x failed, it is tried again later: %s", message.to, error)
            return False
        finally:
            remove_database(path)
        return True

    async def _deliver(self, message: Message, path: Path) -> None:
        channel = self._channel(message.to)
        if channel is None:
            raise ConnectionError("no connection")
        async with self._copying:
            info = await self._copy(path)
        failpoint("snapshotBeforeSend")
        _log.info("sending a snapshot at %d to %x", info.index, message.to)
        await self._stream(channel, message, info, path)
        _log.info("sent the snapshot at %d to %x: %d bytes", info.index, message.to, info.size_bytes)

    async def _copy(self, path: Path) -> SnapshotInfo:
        flushed = asyncio.Event()
        self._store.flush(flushed.set)
        await flushed.wait()
        check_room(self._directory, self._store.size_in_use_bytes)
        return await on_thread(partial(write_snapshot, self._store.backend, path))

    async def _stream(self, channel: Channel, message: Message, info: SnapshotInfo, path: Path) -> None:
        # Not to a member that is away: the log would be held for it until somebody else needs the room.
        metadata = self._metadata(message.to)
        stream = channel.stream(PATH, metadata=metadata, timeout_s=SEND_TIMEOUT_S, wait_for_ready=False)
        try:
            with path.open("rb") as file:
                await stream.send(_header_chunk(message, info))
                for data in _pieces(file):
                    await stream.send(raft_pb2.SnapshotChunk(data=data).SerializeToString())
            await stream.send(raft_pb2.SnapshotChunk(sha256=info.sha256).SerializeToString())
            stream.half_close()
            async for _ in stream:
                pass
        finally:
            stream.cancel()


def _header_chunk(message: Message, info: SnapshotInfo) -> bytes:
    meta = SnapshotMeta(info.index, info.term, info.conf_state)
    return raft_pb2.SnapshotChunk(
        message=raft_pb2.Message(
            type=message.type,
            to_id=message.to,
            from_id=message.from_,
            term=message.term,
            snapshot=encode_snapshot_meta(meta),
        ),
        size_bytes=info.size_bytes,
    ).SerializeToString()


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(CHUNK_BYTES), b"")
