"""The receiving half: a database from the leader, checked as it lies on this disk before anything relies on it.

    offset(index, term, size, sha256) -> bytes that are here       a stream that broke goes on there
    header, data, digest -> ...part.tmp -> fsync -> read again -> INDEX.snap.db -> SNAPSHOT message

What has come stays when a stream breaks or this process ends, and goes when it is damaged, when another database comes,
when its room is needed, or when nobody has sent the rest for a while (``partials``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.histograms import DISK_S, Buckets, doubling
from raftkv.pb import raft_pb2
from raftkv.pb.services import SERVICES
from raftkv.raft.types import INDEX_MAX, Message, MessageType, SnapshotMeta
from raftkv.rpc.server.server import AsyncUnaryHandler
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.status import RpcError
from raftkv.server.peer.codec import decode_snapshot_meta
from raftkv.server.snapshots.files import check_room, incoming_path, on_thread, remove_soon, snapshot_path
from raftkv.server.snapshots.partials import Partial, Partials, partial_path, received_bytes
from raftkv.server.snapshots.transfers import Transfers
from raftkv.storage.datadir import give_back, sync_directory
from raftkv.storage.failpoints import failpoint
from raftkv.storage.snapshot import DamagedSourceError, SnapshotInfo, verify_snapshot

_log = logging.getLogger(__name__)

IDLE_TIMEOUT_S: Final = 30.0
"""Longest wait for the next piece: a sender that is gone must not keep the room that its database was given."""

REST_MAX_S: Final = 0.1
"""Longest rest between two pieces of the check."""

WRITE_BYTES: Final = 1024 * 1024
"""What is gathered before it is written."""

PIECES_AT_ONCE: Final = 64
"""Pieces that a turn of the loop takes: as many as a sender's are 4 MiB, and wait for the disk in between."""


class BrokenStreamError(errors.StorageError):
    """A stream that ended before its database did: the rest may come by another."""


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
        self._writers: dict[Path, asyncio.Task[object]] = {}
        """Who has a file, until it has its place or is removed: nobody else writes to it or removes it."""
        self._whole: set[Path] = set()
        """Files of which all has come, and which are being checked."""
        self._unsettled: dict[int, int] = {}
        """By entry: databases that are in their place, and whose message is still to be stepped."""
        self._partials = Partials(directory, self._writers.__contains__)
        self.transfers = Transfers()
        self.syncs = Buckets(DISK_S)
        self.saves = Buckets(doubling(0.1, 10))
        """Durations of taking a whole database, in seconds; ``syncs`` has those of making it durable."""

    def start(self) -> None:
        """Give what a crash left behind its time to be gone on with."""
        self._partials.keep()

    def close(self) -> None:
        """Forget what is waited for; the next start takes it up."""
        self._partials.close()

    def for_members(self) -> dict[str, AsyncUnaryHandler]:
        """Return what other members may ask: handlers by path, for the peer port."""
        return {SERVICES["raftkvpb.Peer"]["SnapshotOffset"].path: self._offset}

    async def _offset(self, data: bytes, call: Any) -> bytes:
        """How much of a database is here. A stream that brings it still is over: its sender asks. One that has brought
        all of it is not: what came is about to have its place.
        """
        try:
            asked = raft_pb2.SnapshotOffsetRequest.FromString(data)
        except DecodeError as error:
            raise RpcError(errors.INVALID_ARGUMENT, f"not a question for an offset: {error}") from None
        path = partial_path(self._directory, asked.index, asked.term, asked.size_bytes, asked.sha256)
        await self._take_over(path)
        offset = received_bytes(path, asked.size_bytes)
        return raft_pb2.SnapshotOffsetResponse(offset_bytes=offset).SerializeToString()

    async def _take_over(self, path: Path) -> None:
        """End whoever writes to a file, or wait for who checks it: it is about to have another writer."""
        while (writer := self._writers.get(path)) is not None:
            if path not in self._whole:
                writer.cancel()
            await asyncio.wait([writer])

    async def receive(self, call: StreamCall, sender: int) -> Message:
        """Take one database; the message to step once it is in place. Call ``settle`` after that.

        Arguments:
            call: the stream that brings it.
            sender: id of the member whose stream it is.

        Raises:
            StorageError: it does not fit, arrived damaged, was given up, or is another member's.
        """
        task = asyncio.current_task()
        if task is not None:
            self._receiving.add(task)
        try:
            with self.transfers.of(sender):
                return await self._receive(call, sender)
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
        return self._partials.remove() or bool(tasks)

    def settle(self, message: Message) -> None:
        """The message of a received database was stepped: remove the file, unless the core wants it.

        Or may want it: two leaders, one after the other, may have sent one of the same entry, and the message of the
        second is still to come.
        """
        if message.snapshot is not None:
            self._let_go(message.snapshot.index)

    def _let_go(self, index: int) -> None:
        unsettled = self._unsettled.pop(index, 1) - 1
        if unsettled > 0:
            self._unsettled[index] = unsettled
        elif not self._is_awaited(index):
            remove_soon(snapshot_path(self._directory, index))

    async def _receive(self, call: StreamCall, sender: int) -> Message:
        header = await _next(call)
        message = header.message
        if message.from_id != sender:
            raise errors.StorageError(f"member {sender:x} sent a snapshot in the name of {message.from_id:x}")
        if message.type != MessageType.SNAPSHOT or not 0 < message.snapshot.index <= INDEX_MAX:
            raise errors.StorageError("a snapshot does not say what it is")
        meta = decode_snapshot_meta(message.snapshot)
        path = await self._path(header)
        task = asyncio.current_task()
        if task is not None:
            self._writers[path] = task
        try:
            began_s = time.perf_counter()
            await self._take_in(call, path, header, meta)
        finally:
            self._whole.discard(path)
            self._writers.pop(path, None)
        self.saves.observe(time.perf_counter() - began_s)
        _log.info("received a snapshot at %d from %x: %d bytes", meta.index, message.from_id, header.size_bytes)
        return Message(
            MessageType.SNAPSHOT,
            to=message.to_id,
            from_=message.from_id,
            term=message.term,
            snapshot=meta,
        )

    def _check_offset(self, path: Path, header: raft_pb2.SnapshotChunk) -> None:
        """Refuse a stream that goes on behind what is here, or for which there is no room."""
        offset = received_bytes(path, header.size_bytes) if header.offset_bytes else 0
        if header.offset_bytes > offset:
            raise errors.StorageError(f"a snapshot goes on at byte {header.offset_bytes}, of which {offset} are here")
        if not path.exists():
            check_room(self._directory, header.size_bytes)

    async def _take_in(self, call: StreamCall, path: Path, header: raft_pb2.SnapshotChunk, meta: SnapshotMeta) -> None:
        """Take a database, check it, and put it in its place; no file of it is left elsewhere."""
        self._check_offset(path, header)
        digest = await self._write(call, path, header)
        self._whole.add(path)
        try:
            # Versions that say the SHA-256 first also seal what they send.
            info = SnapshotInfo(meta.index, meta.term, meta.conf_state, header.size_bytes, digest, bool(header.sha256))
            given_up = threading.Event()
            await on_thread(lambda: _verify(path, info, header.message.from_id, given_up), given_up.set)
            failpoint("snapshotBeforeRename")
            if not self._is_awaited(meta.index):
                os.replace(path, snapshot_path(self._directory, meta.index))
            self._unsettled[meta.index] = self._unsettled.get(meta.index, 0) + 1
            try:
                failpoint("snapshotAfterRename")
                await on_thread(lambda: sync_directory(str(self._directory)))
            except (OSError, asyncio.CancelledError):
                self._let_go(meta.index)
                raise
        finally:
            remove_soon(path)

    async def _path(self, header: raft_pb2.SnapshotChunk) -> Path:
        """Return the file that a database comes into, which nobody else writes to."""
        message = header.message
        if not header.sha256:
            return incoming_path(self._directory, message.from_id)  # of a version that never goes on with a stream
        meta = message.snapshot
        path = partial_path(self._directory, meta.index, meta.term, header.size_bytes, header.sha256)
        await self._take_over(path)
        self._partials.remove(kept=path)
        return path

    async def _write(self, call: StreamCall, path: Path, header: raft_pb2.SnapshotChunk) -> bytes:
        """Write what comes; the digest that the sender gives at the end. What a broken stream brought is kept."""
        opened: list[Partial] = []
        try:
            try:
                await on_thread(lambda: opened.append(Partial(path, header.size_bytes, header.offset_bytes)))
                return await _receive_into(opened[0], call, header.size_bytes, self.syncs)
            finally:
                for file in opened:  # also one whose opening was not waited for to its end
                    file.close()
        except BaseException as error:
            is_broken = isinstance(error, BrokenStreamError | RpcError | asyncio.CancelledError)
            # What was given up is not among the receiving any more: its room is needed.
            if header.sha256 and is_broken and asyncio.current_task() in self._receiving:
                self._partials.keep()
            else:
                remove_soon(path)
            raise


async def _receive_into(file: Partial, call: StreamCall, size_bytes: int, syncs: Buckets) -> bytes:
    pieces: list[bytes] = []
    gathered = taken = 0
    while not (chunk := await _next(call)).sha256:
        if not chunk.data:
            raise errors.StorageError("a snapshot has a piece with nothing in it")
        taken += 1
        if taken % PIECES_AT_ONCE == 0:
            await asyncio.sleep(0)  # what has come already is not waited for
        pieces.append(chunk.data)
        gathered += len(chunk.data)
        if file.offset_bytes + gathered > size_bytes:
            raise errors.StorageError(f"a snapshot is longer than the {size_bytes} bytes it announced")
        if gathered >= WRITE_BYTES:
            data, pieces, gathered = b"".join(pieces), [], 0
            await on_thread(partial(file.append, data))
    await on_thread(partial(file.append, b"".join(pieces)))
    if file.offset_bytes != size_bytes:
        raise errors.StorageError(f"a snapshot arrived damaged: {file.offset_bytes} of {size_bytes} bytes")
    began_s = time.perf_counter()
    await on_thread(file.finish)
    syncs.observe(time.perf_counter() - began_s)
    return chunk.sha256


def _verify(path: Path, info: SnapshotInfo, sender: int, given_up: threading.Event) -> None:
    """Check the file that was written, from the disk and not from what this process still has of it."""

    def rest(worked_s: float) -> None:
        if given_up.wait(min(REST_MAX_S, worked_s)):
            raise errors.StorageError("a snapshot was given up")

    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        give_back(descriptor)
    try:
        verify_snapshot(path, info, rest)
    except DamagedSourceError as error:
        raise errors.StorageError(
            f"member {sender:x} sent a database that is damaged: {error}; this member keeps its own: "
            f"look at the disk of member {sender:x}, and replace it"
        ) from error
    except errors.CorruptionError as error:
        raise errors.StorageError(f"a snapshot arrived damaged: {error}") from error


async def _next(call: StreamCall) -> raft_pb2.SnapshotChunk:
    try:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            data = await call.receive()
    except TimeoutError:
        raise BrokenStreamError(f"a snapshot stopped coming for {IDLE_TIMEOUT_S:g} s") from None
    if data is None:
        raise BrokenStreamError("a snapshot ended early")
    try:
        return raft_pb2.SnapshotChunk.FromString(data)
    except DecodeError as error:
        raise errors.StorageError(f"a snapshot cannot be read: {error}") from None
