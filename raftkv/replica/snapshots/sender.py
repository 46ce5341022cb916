"""The sending side: a copy of the database for a member whose entries are no longer in the log.

    send(message) --> wait after failures --> [copy] --> ask what arrived --> stream --> report(to, ok), exactly once
                                              log is held from here on
    ... until the member has the entries that the log had at the end of the stream: else it would need another database

A stream that broke is not begun anew: the copy is kept for a while (``Copies``), the receiver keeps what it has, and
the next stream goes on there. One that does not know of this is sent everything, from the beginning.

The stream takes only a fraction of the loop's time (``SEND_SHARE``), in small pieces, so that it hardly slows down
writes; and no more is queued than the receiver can accept soon.

If the core sends a member a second snapshot while one is in progress, it has given up the first in between (it asks
again only after a report, or in another term): the first is cancelled, and the one report is that of the second.

COPIES: the database that is being sent is made once, shared by all members that need one, kept after a break.

    use(to, index) --> [made in the background] --> users ... none left --> all were served: removed
                       log is held from here on                             \\-> one broke off: kept for KEPT_S, so that
                                                                                its next stream resumes where it stopped

There is at most one copy at a time, so copies take the space of one database; of two while an older copy is still being
sent that a newly joined member cannot use. ``drop`` ends the copy for all its users.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Final

from raftkv.errors import CorruptionError, MapFullError, StorageError, explain
from raftkv.loop.outcomes import outcome_of
from raftkv.loop.scheduler import on_thread
from raftkv.pb import raft_pb2
from raftkv.pb.services import SERVICES
from raftkv.raft.types import Message, SnapshotMeta
from raftkv.replica.codec import encode_snapshot_meta
from raftkv.replica.snapshots.files import Transfers, check_room, flushed, outgoing_path, remove_database
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import Code, RpcError
from raftkv.storage.failpoints import failpoint
from raftkv.storage.mvcc import Store
from raftkv.storage.snapshot import SnapshotInfo, write_snapshot

KEPT_S: Final = 60.0
"""Seconds for which a copy is kept for a member whose stream broke: it returns within seconds, or is away for long."""

COPY_SHARE: Final = 0.5
"""Fraction of the time spent on copying; the rest leaves disk and processor to writes."""

REST_MAX_S: Final = 0.1


class Copy:
    """A database copy.

    Attributes:
        path: path of its file.
        info: description of its contents.
        users: number of sends that are reading it.
        owed: members whose send broke off and may be resumed.
    """

    def __init__(self, path: Path, info: SnapshotInfo) -> None:
        self.path = path
        self.info = info
        self.users = 0
        self.owed: set[int] = set()


class Copies:
    """Makes, shares and keeps the copy of one member's database.

    Arguments:
        store: store to copy.
        directory: directory of the copy.
        on_damage: called when the database is found to be damaged: nothing of it is sent.
    """

    def __init__(self, store: Store, directory: Path, on_damage: Callable[[CorruptionError], None]) -> None:
        self._store = store
        self._on_damage = on_damage
        self._directory = directory
        self._making: asyncio.Task[Copy] | None = None
        self._stop = threading.Event()
        self._expiry: asyncio.TimerHandle | None = None
        self._coming = 0
        """Sends that wait for the copy; it may be complete before they run."""
        self._ending: set[asyncio.Future[Any]] = set()

    @property
    def held(self) -> bool:
        """Whether there is a copy, or one is being made: the log after it must be kept."""
        return self._making is not None

    @contextlib.asynccontextmanager
    async def use(self, to: int, index: int) -> AsyncIterator[Copy]:
        """Use the copy, made now if there is none; an exception from the block means that the send broke off.

        Arguments:
            to: the receiving member.
            index: an entry that it must contain.

        Raises:
            StorageError: the copy could not be made, was dropped, or cannot be used by that member.
        """
        self._coming += 1
        try:
            copy = await self._get(to, index)
        finally:
            self._coming -= 1
        copy.users += 1
        copy.owed.add(to)
        try:
            yield copy
            copy.owed.discard(to)
        finally:
            copy.users -= 1
            self._left(copy)

    def forget(self, is_served: Callable[[int, int], bool]) -> None:
        """Drop the copy if it is kept only for members that have got its entries in another way.

        Arguments:
            is_served: returns whether a member has the log up to an index.
        """
        making = self._making
        if self._coming or making is None or not making.done() or making.exception():
            return
        copy = making.result()
        if not copy.users and all(is_served(to, copy.info.index) for to in copy.owed):
            self.drop()

    def drop(self) -> None:
        """Stop handing out the copy; it is removed after its last reader."""
        making, self._making = self._making, None
        self._stop.set()
        self._stop = threading.Event()
        self._forget_expiry()
        if making is not None:
            making.add_done_callback(self._dropped)
            self._ending.add(making)
            making.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Drop the copy and wait until it is removed."""
        self.drop()
        while self._ending:
            await asyncio.wait(self._ending)

    async def _get(self, to: int, index: int) -> Copy:
        copy = await self._present(to, index)
        if not serves(copy, to, index):  # its copying began too early
            copy = await self._present(to, index)
        if not serves(copy, to, index):
            if self._making is not None:
                self._expire(self._making)
            raise StorageError(f"the copy of the database does not know member {to:x}")
        return copy

    async def _present(self, to: int, index: int) -> Copy:
        """Return the existing copy, unless it is known not to serve a member."""
        made = self._making
        if made is not None and made.done() and (made.exception() or not serves(made.result(), to, index)):
            self.drop()
        if self._making is None:
            self._making = asyncio.get_running_loop().create_task(self._make(self._stop))
            self._making.add_done_callback(self._made)
        self._forget_expiry()
        making = self._making
        try:
            # A send that is replaced by another leaves the copy to the new one.
            return await outcome_of(making)
        except asyncio.CancelledError:
            self._expire(making)
            raise

    def _made(self, making: asyncio.Task[Copy]) -> None:
        if self._making is making and (making.cancelled() or making.exception() is not None):
            self._making = None

    async def _make(self, stop: threading.Event) -> Copy:
        path = outgoing_path(self._directory)
        try:
            return Copy(path, await self.write(path, stop))
        except BaseException as error:
            if isinstance(error, CorruptionError):
                self._on_damage(error)
            await on_thread(lambda: remove_database(path))
            raise

    async def write(self, path: Path, stop: threading.Event) -> SnapshotInfo:
        """Write the copy.

        Arguments:
            path: path of the file.
            stop: event that cancels it.
        """
        await flushed(self._store, lambda: not stop.is_set())
        check_room(self._directory, self._store.backend.size_in_use_bytes)
        pace = _pace(stop, self._is_in_the_way)
        return await on_thread(lambda: write_snapshot(self._store.backend, path, pace), stop.set)

    def _is_in_the_way(self) -> bool:
        """Whether the database must grow, which excludes readers: applied changes stay in memory meanwhile."""
        return isinstance(self._store.space_error, MapFullError)

    def _left(self, copy: Copy) -> None:
        if copy.users:
            return
        making = self._making
        is_kept = making is not None and making.done() and not making.exception() and making.result() is copy
        if not is_kept:
            self._remove(copy)  # it was dropped while in use
        elif copy.owed and making is not None:
            self._expire(making)
        else:
            self.drop()

    def _expire(self, making: asyncio.Task[Copy]) -> None:
        """Drop a copy that no member has used in time."""
        if self._making is making:
            self._forget_expiry()
            self._expiry = asyncio.get_running_loop().call_later(KEPT_S, self._drop_unused, making)

    def _drop_unused(self, making: asyncio.Task[Copy]) -> None:
        if self._making is not making:
            return
        if making.done() and not making.result().users:
            self.drop()

    def _forget_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _dropped(self, making: asyncio.Task[Copy]) -> None:
        if not making.cancelled() and not making.exception() and not making.result().users:
            self._remove(making.result())

    def _remove(self, copy: Copy) -> None:
        """Remove the file in the background, because freeing a gigabyte takes half a second."""
        removing = asyncio.ensure_future(asyncio.to_thread(remove_database, copy.path))
        self._ending.add(removing)
        removing.add_done_callback(self._ending.discard)


def serves(copy: Copy, to: int, index: int) -> bool:
    """Return whether a member can start from a copy. It refuses one made before it joined, in which it is not a member.

    Arguments:
        copy: a complete copy.
        to: the member.
        index: an entry that it must contain.
    """
    members = copy.info.conf_state
    return copy.info.index >= index and any(
        to in ids for ids in (members.voters, members.learners, members.voters_outgoing, members.learners_next)
    )


def _pace(stop: threading.Event, is_in_the_way: Callable[[], bool]) -> Callable[[float], None]:
    """Return a function that pauses between pieces of a copy for as long as each took, and cancels unwanted copies."""

    def rest(worked_s: float) -> None:
        if stop.wait(min(REST_MAX_S, worked_s * (1 / COPY_SHARE - 1))):
            raise StorageError("the copy of the database was aborted")
        if is_in_the_way():
            raise StorageError("the copy of the database was aborted, so that it can grow")

    return rest


_log = logging.getLogger(__name__)
PATH: Final = SERVICES["raftkvpb.Peer"]["InstallSnapshot"].path
OFFSET_PATH: Final = SERVICES["raftkvpb.Peer"]["SnapshotOffset"].path
READ_BYTES: Final = 1024 * 1024
CHUNK_BYTES: Final = 64 * 1024
QUEUED_MAX_BYTES: Final = 1024 * 1024
"""Bytes of the stream that may wait to be sent: messages of the log share its connection."""

SEND_SHARE: Final = 0.25
"""Fraction of the loop's time that a stream takes."""

SEND_TIMEOUT_S: Final = 600.0
OFFSET_TIMEOUT_S: Final = 10.0
CATCH_UP_S: Final = 60.0
"""Time in seconds for a member to install a database and read the entries that the log had when it was sent."""

RETRY_MIN_S: Final = 0.5
RETRY_MAX_S: Final = 30.0
"""Maximum pause in seconds before a member is sent another copy after failures; it starts shorter and doubles with each
further failure. Pauses in which leadership was lost are not failures; they would lengthen the next leader's pauses.
"""


class SnapshotSender:
    """Sends databases, at most one at a time to each member.

    Arguments:
        store: store to copy.
        directory: directory of the copy.
        channel: returns the connection to a peer.
        is_wanted: returns whether the core still waits for the database of a message.
        is_served: returns whether a member has the log up to an index, or is no longer one of this member's peers.
        report: called for the core with the member and whether it succeeded.
        on_damage: called when the database is found to be damaged.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        channel: Callable[[int], Channel | None],
        is_wanted: Callable[[Message], bool],
        is_served: Callable[[int, int], bool],
        report: Callable[[int, bool], None],
        on_damage: Callable[[CorruptionError], None],
    ) -> None:
        self._store = store
        self._channel = channel
        self._is_wanted = is_wanted
        self._is_served = is_served
        self._report = report
        self._sends: dict[int, asyncio.Task[bool | None]] = {}
        self._failures: dict[int, tuple[int, float]] = {}
        """By member: number of failures since it was last served, and the end of its pause."""
        self._catching_up: dict[int, tuple[int, float]] = {}
        self._tasks: set[asyncio.Task[bool | None]] = set()
        self._holding: set[asyncio.Task[Any]] = set()
        self.copies = Copies(store, directory, on_damage)
        self.transfers = Transfers()

    def holds_log(self) -> bool:
        """Whether a snapshot is being made, sent, kept or caught up with: the log after it must be kept meanwhile.

        Drops a copy that is kept only for members that no longer need it.
        """
        self.copies.forget(self._is_served)
        now = asyncio.get_running_loop().time()
        for to, (index, until) in list(self._catching_up.items()):
            if now > until or self._is_served(to, index):
                del self._catching_up[to]
        return bool(self._holding) or self.copies.held or bool(self._catching_up)

    def send(self, message: Message) -> None:
        """Send the database for a SNAPSHOT message."""
        self._catching_up.pop(message.to, None)
        before = self._sends.pop(message.to, None)
        if before is not None:
            before.cancel()
        task = asyncio.get_running_loop().create_task(self._send(message))
        self._sends[message.to] = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, message.to))

    def _ended(self, to: int, task: asyncio.Task[bool | None]) -> None:
        """Handle the end of a send, for every reason: complete, cancelled, or never started."""
        self._tasks.discard(task)
        self._holding.discard(task)
        result = False if task.cancelled() or task.exception() is not None else task.result()
        if self._sends.get(to) is not task:
            return  # replaced by another send to the same member, which will report
        del self._sends[to]
        now = task.get_loop().time()
        if result:
            # It has to install the database, and catch up with later writes: if the log were cut in between, it would
            # need another database, and so on for as long as there are many writes.
            self._catching_up[to] = self._store.applied_index, now + CATCH_UP_S
            self._failures.pop(to, None)
        elif result is False:
            count = self._failures.get(to, (0, 0.0))[0]
            self._failures[to] = count + 1, now + min(RETRY_MAX_S, RETRY_MIN_S * 2 ** min(count, 10))
        self._report(to, bool(result))

    def give_up(self, reason: str) -> bool:
        """Cancel all copies and sends, as failed; return whether there were any."""
        news = [task for task in self._holding if not task.cancelling()]
        if news:
            _log.warning("aborting %d snapshots that are being sent to other members: %s", len(news), reason)
        for task in news:
            task.cancel()
        held = bool(self._holding) or self.copies.held
        self.copies.drop()
        self._catching_up.clear()
        return held

    async def close(self) -> None:
        """Cancel everything."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.copies.close()

    async def _send(self, message: Message) -> bool | None:
        """Deliver a copy; return whether that succeeded, ``None`` if it was not tried."""
        rest_s = self._failures.get(message.to, (0, 0.0))[1] - asyncio.get_running_loop().time()
        if rest_s > 0:
            await asyncio.sleep(rest_s)
        if not self._is_wanted(message):
            return None
        task = asyncio.current_task()
        if task is not None:
            self._holding.add(task)
        try:
            await self._deliver(message)
        except Exception as error:
            # The core must be notified of every failure, or it never sends anything to this member again.
            _log.warning("sending a snapshot to member %x failed, retrying later: %s", message.to, explain(error))
            return False
        return True

    async def _deliver(self, message: Message) -> None:
        channel = self._channel(message.to)
        if channel is None:
            raise ConnectionError("no connection")
        index = message.snapshot.index if message.snapshot is not None else 0
        async with self.copies.use(message.to, index) as copy:
            failpoint("snapshotBeforeSend")
            with self.transfers.of(message.to):
                await self._stream(channel, message, copy)
        _log.info(
            "sent a snapshot (entry %d) to member %x: %d bytes", copy.info.index, message.to, copy.info.size_bytes
        )

    async def _stream(self, channel: Channel, message: Message, copy: Copy) -> None:
        offset = await _offset(channel, copy.info)
        _log.info(
            "sending a snapshot (entry %d) to member %x%s",
            copy.info.index,
            message.to,
            f", which has {offset} of {copy.info.size_bytes} bytes" if offset else "",
        )
        # Do not wait for a disconnected member: the log would be held for it until the space is needed elsewhere.
        stream = channel.stream(PATH, timeout_s=SEND_TIMEOUT_S, wait_for_ready=False)
        stream.room_bytes = QUEUED_MAX_BYTES
        try:
            await stream.send(_header_chunk(message, copy.info, offset))
            async with aclosing(_pieces(copy.path, offset)) as pieces:
                async for data in pieces:
                    started = time.perf_counter()
                    await stream.send(raft_pb2.SnapshotChunk(data=data).SerializeToString())
                    # Leave the rest of the time to other work, in proportion.
                    await asyncio.sleep((time.perf_counter() - started) * (1 / SEND_SHARE - 1))
            await stream.send(raft_pb2.SnapshotChunk(sha256=copy.info.sha256).SerializeToString())
            stream.half_close()
            async for _ in stream:
                pass
        finally:
            stream.cancel()


async def _offset(channel: Channel, info: SnapshotInfo) -> int:
    """Return how much of a copy the receiver has."""
    request = raft_pb2.SnapshotOffsetRequest(
        index=info.index, term=info.term, size_bytes=info.size_bytes, sha256=info.sha256
    )
    call = channel.unary(OFFSET_PATH, request.SerializeToString(), OFFSET_TIMEOUT_S, wait_for_ready=False)
    try:
        offset = raft_pb2.SnapshotOffsetResponse.FromString(await call).offset_bytes
    except RpcError as error:
        if error.code == Code.UNIMPLEMENTED:
            return 0  # an older version, which always starts from the beginning
        raise
    return offset if offset <= info.size_bytes else 0


def _header_chunk(message: Message, info: SnapshotInfo, offset: int) -> bytes:
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
        sha256=info.sha256,
        offset_bytes=offset,
    ).SerializeToString()


async def _pieces(path: Path, offset: int) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a file from an offset on, in pieces; read on a thread, because the disk may be slow."""
    with path.open("rb") as file:
        file.seek(offset)
        while data := await asyncio.to_thread(file.read, READ_BYTES):
            for at in range(0, len(data), CHUNK_BYTES):
                yield data[at : at + CHUNK_BYTES]
