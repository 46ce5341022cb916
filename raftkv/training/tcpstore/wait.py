"""Waiting for keys of a store by watch.

A key comes true by a value, or by an item of the queue of that name. A value wakes everybody who waits for its key; an
item wakes one, as in torch's server, or consumers would be told of items that another has taken: each item comes with
a token, and whoever can delete that token is the one. Tokens older than the wait belong to nobody and are left alone;
the item takes its token along when it is popped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from raftkv import aio


class Ground(Protocol):
    """What a wait needs of a store."""

    @property
    def view(self) -> aio.Client:
        """The keys below the prefix."""
        ...

    @property
    def has_queues(self) -> bool:
        """Whether waits look for items of queues."""
        ...

    async def missing(self, keys: list[bytes]) -> dict[bytes, int]:
        """Those that are not there, and the revision at which that was so."""
        ...

    async def take_token(self, token: bytes, revision: int) -> bool:
        """Whether it is for this waiter to be woken."""
        ...


def queue_prefix(kind: bytes, key: bytes) -> bytes:
    """Before the items (``q/``) or tokens (``t/``) of a queue; its length keeps ``a`` and ``a/b`` apart."""
    return b"%s%d:%s/" % (kind, len(key), key)


async def first_value(
    kv: aio.Client, key: bytes, revision: int, accept: Callable[[bytes], bool] = lambda _: True
) -> bytes:
    """The first value that is written after a revision, among those accepted.

    Raises:
        Compacted: history from there on is gone.
    """
    watch = kv.watch(b"k/" + key, start_revision=revision + 1, no_delete=True)
    try:
        return await _accepted(watch, accept)
    finally:
        watch.cancel()


async def _accepted(watch: aio.Watch, accept: Callable[[bytes], bool]) -> bytes:
    async for event in watch:
        if accept(event.value):
            return event.value
    raise aio.WatchCanceled("the watch was cancelled")


class Wait:
    """For one key that was not there at a revision; the watches begin at once, and end with the ``with`` block."""

    def __init__(self, ground: Ground, key: bytes, revision: int) -> None:
        self._ground = ground
        self._key = key
        self._watches: list[aio.Watch] = []
        self._begin(revision)

    def _begin(self, revision: int) -> None:
        kv, start = self._ground.view, revision + 1
        self._watches = [kv.watch(b"k/" + self._key, start_revision=start, no_delete=True)]
        if self._ground.has_queues:
            tokens = queue_prefix(b"t/", self._key)
            self._watches.append(kv.watch(tokens, prefix=True, start_revision=start, no_delete=True))

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.cancel()

    async def finished(self) -> None:
        """Return when the key has come true.

        Raises:
            WatchCanceled: the client was closed, or a member refused for good.
        """
        while True:
            with contextlib.suppress(aio.Compacted):
                await self._first()
                return
            self.__exit__()
            missing = await self._ground.missing([self._key])
            if not missing:
                return
            self._begin(missing[self._key])

    async def _first(self) -> None:
        value, *tokens = self._watches
        if not tokens:
            await _accepted(value, lambda _: True)
            return
        tasks = [asyncio.ensure_future(_accepted(value, lambda _: True)), asyncio.ensure_future(self._woken(tokens[0]))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _woken(self, tokens: aio.Watch) -> None:
        async for event in tokens:
            if await self._ground.take_token(event.key, event.revision):
                return
        raise aio.WatchCanceled("the watch was cancelled")
