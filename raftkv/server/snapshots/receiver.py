"""The receiving half: a database from the leader, checked as it lies on this disk before anything relies on it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.pb import raft_pb2
from raftkv.raft.types import Message, MessageType
from raftkv.rpc.server.stream import StreamCall
from raftkv.server.peer.codec import decode_snapshot_meta
from raftkv.server.snapshots.files import check_room, incoming_path, on_thread, remove_database, snapshot_path
from raftkv.storage.datadir import sync_directory
from raftkv.storage.failpoints import failpoint
from raftkv.storage.snapshot import SnapshotInfo, verify_snapshot

_log = logging.getLogger(__name__)

IDLE_TIMEOUT_S: Final = 30.0
"""Longest wait for the next piece: a sender that is gone must not keep the room that its database was given."""


class SnapshotReceiver:
    """Receives databases into a directory.

    Arguments:
        directory: where they are kept until installed.
        is_awaited: whether the database of an index is about to be installed already.
    """

    def __init__(self, directory: Path, is_awaited: Callable[[int], bool]) -> None:
        self._directory = directory
        self._is_awaited = is_awaited
        self._receiving: set[asyncio.Task[object]] = set()

    async def receive(self, call: StreamCall) -> Message:
        """Take one database; the message to step once it is in place. Call ``settle`` after that.

        Raises:
            StorageError: it does not fit, arrived damaged, or was given up.
        """
        task = asyncio.current_task()
        if task is not None:
            self._receiving.add(task)
        try:
            return await self._receive(call)
        except TimeoutError:
            raise errors.StorageError(f"a snapshot stopped coming for {IDLE_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise errors.StorageError(f"cannot store a snapshot in {self._directory}: {error.strerror}") from error
        except asyncio.CancelledError:
            if task in self._receiving:
                raise
            raise errors.StorageError("a snapshot was given up: the disk is full") from None
        finally:
            if task is not None:
                self._receiving.discard(task)

    def give_up(self) -> bool:
        """End all that is being received: its room is needed; whether there was anything."""
        tasks, self._receiving = self._receiving, set()
        for task in tasks:
            task.cancel()
        return bool(tasks)

    def settle(self, message: Message) -> None:
        """The message of a received database was stepped: remove the file, unless the core wants it."""
        if message.snapshot is not None and not self._is_awaited(message.snapshot.index):
            remove_database(snapshot_path(self._directory, message.snapshot.index))

    async def _receive(self, call: StreamCall) -> Message:
        header = await _next(call)
        message = header.message
        if message.type != MessageType.SNAPSHOT or not message.snapshot.index:
            raise errors.StorageError("a snapshot does not say what it is")
        check_room(self._directory, header.size_bytes)
        meta = decode_snapshot_meta(message.snapshot)
        temporary = incoming_path(self._directory, message.from_id)
        try:
            with _create(temporary) as file:
                digest = await _write(call, file, header.size_bytes)
            info = SnapshotInfo(meta.index, meta.term, meta.conf_state, header.size_bytes, digest)
            await on_thread(lambda: _verify(temporary, info))
            failpoint("snapshotBeforeRename")
            if not self._is_awaited(meta.index):
                os.replace(temporary, snapshot_path(self._directory, meta.index))
            failpoint("snapshotAfterRename")
            await on_thread(lambda: sync_directory(str(self._directory)))
        finally:
            remove_database(temporary)
        _log.info("received a snapshot at %d from %x: %d bytes", meta.index, message.from_id, header.size_bytes)
        return Message(
            MessageType.SNAPSHOT,
            to=message.to_id,
            from_=message.from_id,
            term=message.term,
            snapshot=meta,
        )


def _create(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb")


async def _write(call: StreamCall, file: BinaryIO, size_bytes: int) -> bytes:
    """Write what comes; the digest that the sender gives at the end."""
    # Room for all of it first: better to find none now than in the middle, and writes here see what is left.
    if size_bytes:
        await on_thread(lambda: os.posix_fallocate(file.fileno(), 0, size_bytes))
    received = 0
    while not (chunk := await _next(call)).sha256:
        received += len(chunk.data)
        if received > size_bytes:
            raise errors.StorageError(f"a snapshot is longer than the {size_bytes} bytes it announced")
        file.write(chunk.data)
    if received != size_bytes:
        raise errors.StorageError(f"a snapshot arrived damaged: {received} of {size_bytes} bytes")
    file.flush()
    await on_thread(lambda: os.fsync(file.fileno()))
    return chunk.sha256


def _verify(path: Path, info: SnapshotInfo) -> None:
    """Check the file that was written, from the disk and not from what this process still has of it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    try:
        verify_snapshot(path, info)
    except errors.CorruptionError as error:
        raise errors.StorageError(f"a snapshot arrived damaged: {error}") from error


async def _next(call: StreamCall) -> raft_pb2.SnapshotChunk:
    async with asyncio.timeout(IDLE_TIMEOUT_S):
        data = await call.receive()
    if data is None:
        raise errors.StorageError("a snapshot ended early")
    try:
        return raft_pb2.SnapshotChunk.FromString(data)
    except DecodeError as error:
        raise errors.StorageError(f"a snapshot cannot be read: {error}") from None
