"""What all ranks of an epoch wait for: keys below one prefix, each put once, seen by one watch.

    board = Board(epoch)
    value = await board.wait("ready/0")      # put by whoever came last, for everybody

One watch a rank, whatever the number of barriers: a member encodes an event once for all that watch the same interval,
so a barrier of 1,024 ranks is 1,024 writes and one event. The watch begins with the epoch, so what was put before a
rank asked, even if it was deleted since, is seen. A value is kept until it is taken, and is taken once.

Arguments of ``Board``: the epoch, and who tells that a name is past, so that nobody will ask for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from raftkv.client.rpc.retry import until_answered
from raftkv.client.values import KeyValue
from raftkv.errors import CompactedError, StatusError

if TYPE_CHECKING:
    from raftkv.training.api.generation import Epoch


class Board:
    """See the module."""

    def __init__(self, epoch: Epoch, is_stale: Callable[[str], bool]) -> None:
        self.prefix = f"{epoch.base}open/"
        self._epoch = epoch
        self._is_stale = is_stale
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._task: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def wait(self, name: str) -> bytes:
        """The value of a name, as soon as it is there.

        Raises:
            StatusError: the cluster refuses to be watched.
        """
        if self._failure is not None:
            raise self._failure
        if name in self._values:
            return self._values.pop(name)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow())
        waiter = self._waiting.setdefault(name, asyncio.get_running_loop().create_future())
        # Shielded: somebody else may wait for the same name, and who gave up may come again.
        value = await asyncio.shield(waiter)
        self._waiting.pop(name, None)
        return value

    def forget(self, name: str) -> None:
        """Nobody will ask for it any more."""
        self._values.pop(name, None)

    def close(self) -> None:
        """Watch no more."""
        if self._task is not None:
            self._task.cancel()

    async def _follow(self) -> None:
        start_revision = self._epoch.world.revision + 1
        try:
            while True:
                try:
                    await self._watch(start_revision)
                except CompactedError:
                    start_revision = await self._read() + 1
                else:
                    return  # it was cancelled: the client is being closed
        except StatusError as error:
            self._failure = error
            for waiter in self._waiting.values():
                if not waiter.done():
                    waiter.set_exception(error)
                    waiter.exception()  # seen: whoever waited may have given up

    async def _watch(self, start_revision: int) -> None:
        watch = self._epoch.kv.watch(self.prefix, prefix=True, start_revision=start_revision, no_delete=True)
        try:
            async for event in watch:
                self._note(event.kv)
        finally:
            watch.cancel()

    async def _read(self) -> int:
        page = await until_answered(lambda: self._epoch.kv.range(self.prefix, prefix=True))
        for item in page:
            self._note(item)
        return page.revision

    def _note(self, item: KeyValue) -> None:
        name = item.key.decode()[len(self.prefix) :]
        waiter = self._waiting.get(name)
        if waiter is None:
            if not self._is_stale(name):
                self._values[name] = item.value
        elif not waiter.done():
            waiter.set_result(item.value)
