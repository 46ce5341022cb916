"""The receiving side: a database from the leader is checked on this disk before it is used, then installed.

    offset(index, term, size, sha256) -> bytes received so far     a broken stream is resumed there
    header, data, digest -> ...part.tmp -> fsync -> read again -> INDEX.snap.db -> SNAPSHOT message

A partial file remains when a stream breaks or this process ends. It is deleted when it is damaged, when another
database arrives, when its space is needed, or when the rest has not arrived for a while.
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
from raftkv.errors import CorruptionError, ForkedError, StorageError
from raftkv.histograms import DISK_S, Buckets, doubling
from raftkv.loop.scheduler import on_thread
from raftkv.pb import raft_pb2
from raftkv.pb.services import SERVICES
from raftkv.raft.types import INDEX_MAX, Message, MessageType, SnapshotMeta
from raftkv.replica.codec import decode_snapshot_meta
from raftkv.replica.snapshots.files import (
    PARTIAL_SUFFIX,
    Transfers,
    check_room,
    incoming_path,
    remove_received,
    remove_soon,
    snapshot_path,
)
from raftkv.rpc.server.calls import AsyncUnaryHandler
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.status import RpcError
from raftkv.storage.backend.copying import SteadyFile
from raftkv.storage.datadir import give_back, sync_directory
from raftkv.storage.failpoints import failpoint
from raftkv.storage.mvcc import Beside, Store
from raftkv.storage.revision import SUB_BITS, from_key
from raftkv.storage.snapshot import DamagedSourceError, SnapshotInfo, is_continued, verify_snapshot

# -- partials -------------------------------------------------------------------------------------------------------
#
# A partial file holds the received bytes of a database and their count, so that a broken transfer can be resumed.
#
#     INDEX-TERM-SIZE-SHA256.part.tmp    | bytes of the database | 8 bytes: how many of them are there |
#
# The name identifies the copy, because no two copies have the same SHA-256. The count is written after the bytes that
# it counts, so it is right if the process is killed. A power cut may lose bytes that it counts: the SHA-256 of the
# whole, read back from the disk at the end, detects that.

KEPT_S: Final = 120.0
"""Seconds for which a part of a database waits for the rest: longer than the sender keeps the copy."""

_COUNT_BYTES: Final = 8


class Partial:
    """A database being received. All methods except ``close`` may wait for the disk.

    Arguments:
        path: the file; created if it does not exist.
        size_bytes: size of the whole database.
        offset_bytes: number of bytes already received.

    Raises:
        OSError: the disk is full, or failed.
    """

    def __init__(self, path: Path, size_bytes: int, offset_bytes: int) -> None:
        self._size_bytes = size_bytes
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._file = SteadyFile(descriptor, offset_bytes)
        try:
            # Reserve all space first: better to fail now than in the middle, and writes here see the remaining space.
            os.posix_fallocate(descriptor, 0, size_bytes + _COUNT_BYTES)
            self._note()
        except BaseException:
            self.close()
            raise

    @property
    def offset_bytes(self) -> int:
        """Number of bytes received."""
        return self._file.offset_bytes

    def append(self, data: bytes) -> None:
        """Write the next bytes.

        Raises:
            OSError: the disk is full, or failed.
        """
        self._file.write(data)
        self._note()
        failpoint("snapshotAfterPiece")

    def _note(self) -> None:
        os.pwrite(self._file.descriptor, self.offset_bytes.to_bytes(_COUNT_BYTES), self._size_bytes)

    def finish(self) -> None:
        """Truncate the file to the database alone, durably.

        Raises:
            OSError: the disk is full, or failed.
        """
        os.ftruncate(self._file.descriptor, self._size_bytes)
        os.fsync(self._file.descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        self._file.close()


def partial_path(directory: Path, index: int, term: int, size_bytes: int, sha256: bytes) -> Path:
    """Return the path for the parts of one copy.

    Arguments:
        directory: directory of all database transfers.
        index, term, size_bytes, sha256: the identity of the copy.
    """
    return directory / f"{index:016x}-{term:x}-{size_bytes:x}-{sha256.hex()}{PARTIAL_SUFFIX}"


def received_bytes(path: Path, size_bytes: int) -> int:
    """Return how much of a database is in a file; 0 if there is no file, or its count is impossible.

    Arguments:
        path: the file.
        size_bytes: size of the whole database.
    """
    try:
        with path.open("rb") as file:
            file.seek(size_bytes)
            count = int.from_bytes(file.read(_COUNT_BYTES + 1)[:_COUNT_BYTES])
            complete = file.tell() == size_bytes + _COUNT_BYTES
    except OSError:
        return 0
    return count if complete and count <= size_bytes else 0


class Partials:
    """The partial files of a directory that are not being written: at most one, for a limited time.

    Arguments:
        directory: directory of all database transfers.
        is_written: returns whether a file is being written.
    """

    def __init__(self, directory: Path, is_written: Callable[[Path], bool]) -> None:
        self._directory = directory
        self._is_written = is_written
        self._expiry: asyncio.TimerHandle | None = None

    def keep(self) -> None:
        """Keep the existing files for ``KEPT_S`` from now."""
        self.close()
        self._expiry = asyncio.get_running_loop().call_later(KEPT_S, self.remove)

    def remove(self, kept: Path | None = None) -> bool:
        """Remove files that are not being written; return whether there were any.

        Arguments:
            kept: a file that stays.
        """
        paths = [path for path in self._directory.glob(f"*{PARTIAL_SUFFIX}") if path != kept]
        idle = [path for path in paths if not self._is_written(path)]
        for path in idle:
            remove_soon(path)
        return bool(idle)

    def close(self) -> None:
        """Leave the files to the next start."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


_log = logging.getLogger(__name__)

IDLE_TIMEOUT_S: Final = 30.0
"""Longest wait for the next piece in seconds: a sender that is gone must not keep the space reserved for its database.
"""

REST_MAX_S: Final = 0.1
"""Longest pause between two pieces of the check."""

WRITE_BYTES: Final = 1024 * 1024
"""Bytes collected before they are written."""

PIECES_AT_ONCE: Final = 64
"""Pieces processed in one turn of the loop: a sender's are 4 MiB in total, with waits for the disk in between."""


class BrokenStreamError(errors.StorageError):
    """A stream that ended before its database did: the rest may come with another stream."""


class SnapshotReceiver:
    """Receives databases into a directory.

    Arguments:
        directory: directory of the databases until they are installed.
        is_awaited: returns whether the database of an index is already about to be installed.
        newest: returns the newest record of this member, a revision key and a KeyValue, if it can be read and the state
            after an entry must have it.
        on_fork: called with an error if the leader has another history, after which the member must stop.
    """

    def __init__(
        self,
        directory: Path,
        is_awaited: Callable[[int], bool],
        newest: Callable[[int], tuple[bytes, bytes] | None],
        on_fork: Callable[[ForkedError], None],
    ) -> None:
        self._directory = directory
        self._is_awaited = is_awaited
        self._newest = newest
        self._on_fork = on_fork
        self._receiving: set[asyncio.Task[object]] = set()
        self._writers: dict[Path, asyncio.Task[object]] = {}
        """The task that owns each file, until it is in place or removed: no other task writes or removes it."""
        self._whole: set[Path] = set()
        """Completely received files that are being checked."""
        self._unsettled: dict[int, int] = {}
        """Number of databases per entry that are in place, and whose message is not stepped yet."""
        self._partials = Partials(directory, self._writers.__contains__)
        self.transfers = Transfers()
        self.syncs = Buckets(DISK_S)
        self.saves = Buckets(doubling(0.1, 10))
        """Durations of receiving a whole database, in seconds; ``syncs`` has those of making it durable."""

    def start(self) -> None:
        """Start the time limit for resuming partial files that a crash left behind."""
        self._partials.keep()

    def close(self) -> None:
        """Stop waiting; the next start resumes."""
        self._partials.close()

    def for_members(self) -> dict[str, AsyncUnaryHandler]:
        """Return the handlers for requests of other members, by path, for the peer port."""
        return {SERVICES["raftkvpb.Peer"]["SnapshotOffset"].path: self._offset}

    async def _offset(self, data: bytes, call: Any) -> bytes:
        """Return how much of a database is here. A stream that is still receiving it ends, because its sender asks. A
        completely received one does not end: its file is about to be put in place.
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
        """End the writer of a file, or wait for its check: another task will write it."""
        while (writer := self._writers.get(path)) is not None:
            if path not in self._whole:
                writer.cancel()
            await asyncio.wait([writer])

    async def receive(self, call: StreamCall, sender: int) -> Message:
        """Receive one database; return the message to step once it is in place. Call ``settle`` after that.

        Arguments:
            call: stream with the database.
            sender: id of the sending member.

        Raises:
            StorageError: it does not fit, is damaged, was cancelled, or belongs to another member.
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
            raise errors.StorageError("the snapshot was aborted: the disk is full") from None
        finally:
            if task is not None:
                self._receiving.discard(task)

    def give_up(self) -> bool:
        """Cancel all receptions, because their space is needed; return whether there were any."""
        tasks, self._receiving = self._receiving, set()
        for task in tasks:
            task.cancel()
        return self._partials.remove() or bool(tasks)

    def settle(self, message: Message) -> None:
        """Remove the file of a received database after its message was stepped, unless the core wants it.

        Also keep it if the core may still want it: two successive leaders may have sent databases of the same entry,
        and the message of the second is still to come.
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
        _log.info(
            "received a snapshot (entry %d) from member %x: %d bytes", meta.index, message.from_id, header.size_bytes
        )
        return Message(MessageType.SNAPSHOT, to=message.to_id, from_=message.from_id, term=message.term, snapshot=meta)

    def _check_offset(self, path: Path, header: raft_pb2.SnapshotChunk) -> None:
        """Refuse a stream that begins after the received bytes, or for which there is no space."""
        offset = received_bytes(path, header.size_bytes) if header.offset_bytes else 0
        if header.offset_bytes > offset:
            raise errors.StorageError(f"a snapshot continues at byte {header.offset_bytes}, of which {offset} are here")
        if not path.exists():
            check_room(self._directory, header.size_bytes)

    async def _take_in(self, call: StreamCall, path: Path, header: raft_pb2.SnapshotChunk, meta: SnapshotMeta) -> None:
        """Receive a database, check it, and put it in place; no other file of it remains."""
        self._check_offset(path, header)
        digest = await self._write(call, path, header)
        self._whole.add(path)
        try:
            # Versions that send the SHA-256 first also seal what they send.
            info = SnapshotInfo(meta.index, meta.term, meta.conf_state, header.size_bytes, digest, bool(header.sha256))
            given_up = threading.Event()
            await on_thread(lambda: _verify(path, info, header.message.from_id, given_up), given_up.set)
            await self._check_history(path, meta.index, header.message.from_id)
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

    async def _check_history(self, path: Path, index: int, sender: int) -> None:
        """Refuse a database that would replace what the other members lost: the log may not reach back that far."""
        newest = self._newest(index)
        if newest is None or await on_thread(lambda: is_continued(path, *newest)):
            return
        error = ForkedError(
            f"revision {from_key(newest[0]) >> SUB_BITS} was committed here, and the database that {sender:x} sent has "
            "another one: other members lost acknowledged writes, which this one may have"
        )
        self._on_fork(error)
        raise StorageError(str(error))

    async def _path(self, header: raft_pb2.SnapshotChunk) -> Path:
        """Return the file for a received database; no other task writes it."""
        message = header.message
        if not header.sha256:
            return incoming_path(self._directory, message.from_id)  # from a version that never resumes streams
        meta = message.snapshot
        path = partial_path(self._directory, meta.index, meta.term, header.size_bytes, header.sha256)
        await self._take_over(path)
        self._partials.remove(kept=path)
        return path

    async def _write(self, call: StreamCall, path: Path, header: raft_pb2.SnapshotChunk) -> bytes:
        """Write the data; return the digest at the end of the stream. The data of a broken stream is kept."""
        opened: list[Partial] = []
        try:
            try:
                await on_thread(lambda: opened.append(Partial(path, header.size_bytes, header.offset_bytes)))
                return await _receive_into(opened[0], call, header.size_bytes, self.syncs)
            finally:
                for file in opened:  # also a file whose opening was cancelled
                    file.close()
        except BaseException as error:
            is_broken = isinstance(error, BrokenStreamError | RpcError | asyncio.CancelledError)
            # A cancelled transfer is no longer in this set: its space is needed.
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
            await asyncio.sleep(0)  # pieces that have already arrived come without waiting
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
    """Check the written file, read from the disk and not from memory of this process."""

    def rest(worked_s: float) -> None:
        if given_up.wait(min(REST_MAX_S, worked_s)):
            raise errors.StorageError("the snapshot was aborted")

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


# -- installer ------------------------------------------------------------------------------------------------------
#
# The installer replaces the current database by a received one, while the loop does all its other work.
#
# Reading the database takes seconds, in steps of a few milliseconds, between which the member ticks, answers heartbeats
# and serves its current state. The last step swaps the two. By then the marker in the log says that the new database is
# valid, so after a crash at any time the next start completes the installation (``bootstrap``).


class Installer:
    """Installs one database at a time.

    Arguments:
        store: store of the member.
        directory: directory of received databases.
        on_fatal: called with an error, after which the member must stop.

    Attributes:
        on_received: called before the swap: read derived state from the received database, in steps.
        on_swapped: called in the turn of the swap; derived state is read again here.
        is_installing: whether a database is being installed.
    """

    def __init__(self, store: Store, directory: Path, on_fatal: Callable[[BaseException], None]) -> None:
        self._store = store
        self._directory = directory
        self.on_received: list[Beside] = []
        self.on_swapped: list[Callable[[SnapshotMeta], None]] = []
        self._on_fatal = on_fatal
        self._task: asyncio.Task[None] | None = None
        self.is_installing = False

    def install(self, meta: SnapshotMeta, done: Callable[[], None]) -> None:
        """Begin; ``done`` is called in the turn of the swap. No entry may be applied until then.

        Arguments:
            meta: description of the received database.
            done: called in the turn of the swap.
        """
        self._task = asyncio.get_running_loop().create_task(self._install(meta, done))

    async def close(self) -> None:
        """Stop in any state; the next start completes the installation."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _install(self, meta: SnapshotMeta, done: Callable[[], None]) -> None:
        path = snapshot_path(self._directory, meta.index)
        steps = self._store.install_steps(path, beside=self.on_received)
        self.is_installing = True
        try:
            failpoint("raftBeforeApplySnap")
            for rest_s in steps:
                await asyncio.sleep(rest_s)
            for callback in self.on_swapped:
                callback(meta)
            remove_received(self._directory, meta.index)
            _log.info("installed a snapshot (entry %d)", meta.index)
            done()
        except CorruptionError as error:
            self._on_fatal(
                StorageError(
                    f"the database that was received as {path} was damaged on this disk since: {error}; start the "
                    "member again: it goes on with its own, and asks for another"
                )
            )
        except Exception as error:
            self._on_fatal(error)
        finally:
            self.is_installing = False
            steps.close()
