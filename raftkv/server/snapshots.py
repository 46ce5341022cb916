"""Databases on their way between members: made, streamed, checked, and kept until the core installs them.

A follower that needs entries which the leader no longer has gets the database instead. The sender copies it from a
read transaction, so writes go on meanwhile; the copy's own applied index, not the message's, says what it holds. The
receiver writes it to a file of its own, checks the SHA-256 of all bytes, makes it durable under the name of its index,
and only then hands the SNAPSHOT message to the core.

    sender:   flush -> copy -> header chunk, data chunks, digest
    receiver: FROM.tmp -> sha256 -> fsync -> INDEX.snap.db
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from raftkv import errors
from raftkv.pb import raft_pb2
from raftkv.pb.services import SERVICES
from raftkv.raft.types import Message, MessageType, SnapshotMeta
from raftkv.rpc.channel import Channel
from raftkv.rpc.server_stream import StreamCall
from raftkv.rpc.status import RpcError
from raftkv.server.peer_codec import decode_snapshot_meta, encode_snapshot_meta
from raftkv.storage.backend.lmdb import lock_path
from raftkv.storage.datadir import sync_directory
from raftkv.storage.failpoints import failpoint
from raftkv.storage.mvcc import Store
from raftkv.storage.snapshot import SnapshotInfo, write_snapshot

_log = logging.getLogger(__name__)
_PATH: Final = SERVICES["raftkvpb.Peer"]["InstallSnapshot"].path
CHUNK_BYTES: Final = 256 * 1024
SEND_TIMEOUT_S: Final = 600.0


def snapshot_path(directory: Path, index: int) -> Path:
    """Where a received database waits for its installation."""
    return directory / f"{index:016x}.snap.db"


def remove_leftovers(directory: Path) -> None:
    """Delete copies that a crash left behind; call it when none is awaited."""
    for pattern in ("*.snap.db*", "*.out.db*", "*.tmp"):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


class SnapshotSender:
    """Sends databases, one at a time to each member.

    Arguments:
        store: what is copied.
        directory: where the copy is made.
        channel: the connection to a peer.
        metadata: our introduction to a peer.
        report: told of success or failure, for the core.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        channel: Callable[[int], Channel | None],
        metadata: Callable[[int], tuple[tuple[str, str], ...]],
        report: Callable[[int, bool], None],
    ) -> None:
        self._store = store
        self._directory = directory
        self._channel = channel
        self._metadata = metadata
        self._report = report
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def in_flight(self) -> bool:
        """Whether a snapshot is being sent: the log must not be cut meanwhile."""
        return bool(self._tasks)

    def send(self, message: Message) -> None:
        """Send the database that a SNAPSHOT message stands for."""
        if message.to in self._tasks:
            return
        task = asyncio.get_running_loop().create_task(self._send(message))
        self._tasks[message.to] = task
        task.add_done_callback(lambda _: self._tasks.pop(message.to, None))

    async def close(self) -> None:
        """Give up on what is under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, message: Message) -> None:
        path = self._directory / f"{message.to:016x}.out.db"
        try:
            channel = self._channel(message.to)
            if channel is None:
                raise ConnectionError("no connection")
            info = await self._copy(path)
            _log.info("sending a snapshot at %d to %x", info.index, message.to)
            await self._stream(channel, message, info, path)
        except (RpcError, OSError, errors.StorageError, TimeoutError) as error:
            _log.warning("sending a snapshot to %x failed: %s", message.to, error)
            self._report(message.to, False)
        else:
            _log.info("sent the snapshot at %d to %x: %d bytes", info.index, message.to, info.size_bytes)
            self._report(message.to, True)
        finally:
            _remove_database(path)

    async def _copy(self, path: Path) -> SnapshotInfo:
        _remove_database(path)
        flushed = asyncio.Event()
        self._store.flush(flushed.set)
        await flushed.wait()
        return await asyncio.to_thread(write_snapshot, self._store.backend, path)

    async def _stream(self, channel: Channel, message: Message, info: SnapshotInfo, path: Path) -> None:
        stream = channel.stream(_PATH, metadata=self._metadata(message.to), timeout_s=SEND_TIMEOUT_S)
        try:
            with _open_copy(path) as file:
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


def _remove_database(path: Path) -> None:
    path.unlink(missing_ok=True)
    lock_path(path).unlink(missing_ok=True)


class SnapshotReceiver:
    """Receives databases into a directory.

    Arguments:
        directory: where they are kept until installed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def receive(self, call: StreamCall) -> Message:
        """Take one database; the message to step once it is in place.

        Raises:
            StorageError: it does not fit, or arrived damaged.
        """
        header = raft_pb2.SnapshotChunk.FromString(await _next(call))
        temporary = self._directory / f"{header.message.from_id:016x}.tmp"
        try:
            with _open_private(temporary) as file:
                await self._receive_data(call, file, header.size_bytes)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            meta = decode_snapshot_meta(header.message.snapshot)
            failpoint("snapshotBeforeRename")
            os.replace(temporary, snapshot_path(self._directory, meta.index))
            sync_directory(str(self._directory))
            _log.info(
                "received a snapshot at %d from %x: %d bytes", meta.index, header.message.from_id, header.size_bytes
            )
        except OSError as error:
            raise errors.StorageError(f"cannot store a snapshot in {self._directory}: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return Message(
            MessageType(header.message.type),
            to=header.message.to_id,
            from_=header.message.from_id,
            term=header.message.term,
            snapshot=meta,
        )

    async def _receive_data(self, call: StreamCall, file: BinaryIO, size_bytes: int) -> None:
        digest = hashlib.sha256()
        received = 0
        while True:
            chunk = raft_pb2.SnapshotChunk.FromString(await _next(call))
            if chunk.sha256:
                break
            digest.update(chunk.data)
            received += len(chunk.data)
            if received > size_bytes:
                raise errors.StorageError(f"a snapshot is longer than the {size_bytes} bytes it announced")
            file.write(chunk.data)
        if received != size_bytes or chunk.sha256 != digest.digest():
            raise errors.StorageError(f"a snapshot arrived damaged: {received} of {size_bytes} bytes, digest checked")


def _open_copy(path: Path) -> BinaryIO:
    return path.open("rb")


def _open_private(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb")


async def _next(call: StreamCall) -> bytes:
    data = await call.receive()
    if data is None:
        raise errors.StorageError("a snapshot ended early")
    return data
