"""The copy of the database that is being sent: made once, shared by all members that need one, kept after a break.

    use(to, index) --> [made, beside the loop] --> users ... all gone --> all were served: removed
                       log is held from here on                       \\-> one was broken off: kept for KEPT_S, so that
                                                                           its next stream goes on where it stopped

There is at most one copy at a time, so copies take the room of one database; of two while an older copy is still being
sent that a member which joined later cannot use. ``drop`` ends the copy for all its users.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from raftkv.errors import CorruptionError, MapFullError, StorageError
from raftkv.loop.scheduler import on_thread
from raftkv.replica.snapshots.files import check_room, flushed, outgoing_path, remove_database
from raftkv.storage.mvcc import Store
from raftkv.storage.snapshot import SnapshotInfo, write_snapshot

KEPT_S: Final = 60.0
"""How long a copy waits for a member whose stream broke: it comes back within seconds, or is away for long."""

COPY_SHARE: Final = 0.5
"""Part of the time in which a copy is worked on: the rest is the disk's and the processor's for writes."""

REST_MAX_S: Final = 0.1


class Copy:
    """One copy.

    Attributes:
        path: of its file.
        info: what it holds.
        users: sends that read it now.
        owed: members whose send was broken off and may go on.
    """

    def __init__(self, path: Path, info: SnapshotInfo) -> None:
        self.path = path
        self.info = info
        self.users = 0
        self.owed: set[int] = set()


class Copies:
    """Makes, shares and keeps the copy of one member's database.

    Arguments:
        store: what is copied.
        directory: where the copy is made.
        on_damage: called when the database turns out to be damaged: nothing of it leaves.
    """

    def __init__(self, store: Store, directory: Path, on_damage: Callable[[CorruptionError], None]) -> None:
        self._store = store
        self._on_damage = on_damage
        self._directory = directory
        self._making: asyncio.Task[Copy] | None = None
        self._stop = threading.Event()
        self._expiry: asyncio.TimerHandle | None = None
        self._coming = 0
        """Sends that wait for the copy: it may be whole, and they have not run since."""
        self._ending: set[asyncio.Future[Any]] = set()

    @property
    def held(self) -> bool:
        """Whether there is a copy, or one is being made: the log behind it must be kept."""
        return self._making is not None

    @contextlib.asynccontextmanager
    async def use(self, to: int, index: int) -> AsyncIterator[Copy]:
        """Use the copy, made now if there is none; an exception that leaves the block means that the send broke off.

        Arguments:
            to: the member that it is sent to.
            index: an entry that it must hold.

        Raises:
            StorageError: it could not be made, was dropped, or is of no use to that member.
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
        """Drop the copy if it is kept only for members that have come by what it holds in another way.

        Arguments:
            is_served: whether a member has the log up to an index.
        """
        making = self._making
        if self._coming or making is None or not making.done() or making.exception():
            return
        copy = making.result()
        if not copy.users and all(is_served(to, copy.info.index) for to in copy.owed):
            self.drop()

    def drop(self) -> None:
        """End the copy: it is handed out no more, and removed after its last reader."""
        making, self._making = self._making, None
        self._stop.set()
        self._stop = threading.Event()
        self._forget_expiry()
        if making is not None:
            making.add_done_callback(self._dropped)
            self._ending.add(making)
            making.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Drop the copy and wait until it is gone."""
        self.drop()
        while self._ending:
            await asyncio.wait(self._ending)

    async def _get(self, to: int, index: int) -> Copy:
        copy = await self._present(to, index)
        if not serves(copy, to, index):  # it was begun too early
            copy = await self._present(to, index)
        if not serves(copy, to, index):
            if self._making is not None:
                self._expire(self._making)
            raise StorageError(f"the copy of the database does not know member {to:x}")
        return copy

    async def _present(self, to: int, index: int) -> Copy:
        """The copy that there is, unless it is known not to serve a member."""
        made = self._making
        if made is not None and made.done() and (made.exception() or not serves(made.result(), to, index)):
            self.drop()
        if self._making is None:
            self._making = asyncio.get_running_loop().create_task(self._make(self._stop))
            self._making.add_done_callback(self._made)
        self._forget_expiry()
        making = self._making
        try:
            # A send that is replaced by another leaves the copy to it.
            return await asyncio.shield(making)
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
            path: of the file.
            stop: set when it is no longer wanted.
        """
        await flushed(self._store, lambda: not stop.is_set())
        check_room(self._directory, self._store.size_in_use_bytes)
        pace = _pace(stop, self._is_in_the_way)
        return await on_thread(lambda: write_snapshot(self._store.backend, path, pace), stop.set)

    def _is_in_the_way(self) -> bool:
        """Whether the database has to grow, which excludes readers: applied changes stay in memory meanwhile."""
        return isinstance(self._store.space_error, MapFullError)

    def _left(self, copy: Copy) -> None:
        if copy.users:
            return
        making = self._making
        is_kept = making is not None and making.done() and not making.exception() and making.result() is copy
        if not is_kept:
            self._remove(copy)  # it was dropped while it was used
        elif copy.owed and making is not None:
            self._expire(making)
        else:
            self.drop()

    def _expire(self, making: asyncio.Task[Copy]) -> None:
        """Drop a copy that no member has fetched."""
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
        """Remove the file, beside the loop: to free a gigabyte takes half a second."""
        removing = asyncio.ensure_future(asyncio.to_thread(remove_database, copy.path))
        self._ending.add(removing)
        removing.add_done_callback(self._ending.discard)


def serves(copy: Copy, to: int, index: int) -> bool:
    """Whether a member can begin anew from a copy. It refuses one made before it joined, in which it is no member.

    Arguments:
        copy: that is whole.
        to: the member.
        index: an entry that it must hold.
    """
    members = copy.info.conf_state
    return copy.info.index >= index and any(
        to in ids for ids in (members.voters, members.learners, members.voters_outgoing, members.learners_next)
    )


def _pace(stop: threading.Event, is_in_the_way: Callable[[], bool]) -> Callable[[float], None]:
    """Rests between the pieces of a copy as long as each took, and ends a copy that is unwanted or in the way."""

    def rest(worked_s: float) -> None:
        if stop.wait(min(REST_MAX_S, worked_s * (1 / COPY_SHARE - 1))):
            raise StorageError("the copy of the database was given up")
        if is_in_the_way():
            raise StorageError("the copy of the database was given up, so that it can grow")

    return rest
