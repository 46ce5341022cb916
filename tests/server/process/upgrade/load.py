"""Clients that work during restarts of members, and the check of their answers.

    with Load(endpoints) as load:
        ... restart members ...
        load.advance()                   # every client has done more since
    load.check()                         # nothing failed, nothing was lost, nothing was seen twice

Each writer owns a key: a read after a write must return that write. Counters share a key, which each increments by
compare and set. A watch follows all keys, and its events are compared with the writes. All calls go through
``raftkv.aio``, which fails over to another member; a call that still raises is a failure.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable
from types import TracebackType

from raftkv import aio, put
from raftkv.aio import value
from tests.procs import wait_for
from tests.rpc.loop import until

PREFIX = "load/"
WRITERS, COUNTERS = 4, 2
PAUSE_MAX_S = 0.01


class Load:
    """The clients, on a thread of their own."""

    def __init__(self, endpoints: list[str]) -> None:
        self._endpoints = endpoints
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self._stop = threading.Event()
        self.failures: list[str] = []
        self.done = [0] * (WRITERS + COUNTERS)
        self.events: dict[bytes, list[tuple[int, bytes]]] = {}
        self.final: dict[bytes, tuple[int, bytes]] = {}

    def __enter__(self) -> Load:
        self._thread.start()
        self.advance()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is not None:
            error.add_note(f"answers: {self.done}, failures: {self.failures}")

    def advance(self) -> None:
        """Wait until every client has been served again."""
        before = list(self.done)
        wait_for(
            lambda: self.failures or all(now > then + 5 for now, then in zip(self.done, before, strict=True)),
            f"answers to all clients: {before}",
        )
        assert not self.failures, self.failures

    def check(self) -> None:
        """Compare what clients were answered with what the cluster has now and what the watch saw."""
        assert not self.failures, self.failures
        for number in range(WRITERS):
            assert int(self.final[self._key(number)][1]) == self.done[number]
        assert int(self.final[self._key(WRITERS)][1]) == sum(self.done[WRITERS:])
        for key, events in self.events.items():
            first = int(events[0][1])
            assert [int(text) for _, text in events] == list(range(first, first + len(events))), key
            assert events[-1] == self.final[key], key
        assert set(self.events) == set(self.final)

    @staticmethod
    def _key(number: int) -> bytes:
        return f"{PREFIX}{min(number, WRITERS)}".encode()

    async def _run(self) -> None:
        async with aio.connect(self._endpoints) as kv:
            following = asyncio.create_task(self._follow(kv))
            clients = [self._write(kv, number) for number in range(WRITERS)]
            clients += [self._count(kv, number) for number in range(WRITERS, WRITERS + COUNTERS)]
            await asyncio.gather(*(self._guarded(client) for client in clients))
            await self._guarded(self._finish(kv))
            following.cancel()
            await asyncio.wait([following])

    async def _guarded(self, client: Awaitable[None]) -> None:
        try:
            await client
        except Exception as error:
            self.failures.append(repr(error))
            self._stop.set()

    async def _write(self, kv: aio.Client, number: int) -> None:
        key = self._key(number)
        while not self._stop.is_set():
            await kv.put(key, str(self.done[number] + 1))
            self.done[number] += 1
            found = await kv.get(key)
            if found is None or int(found.value) != self.done[number]:
                raise AssertionError(f"{key!r} is {found} after {self.done[number]} was acknowledged")
            await asyncio.sleep(random.uniform(0, PAUSE_MAX_S))

    async def _count(self, kv: aio.Client, number: int) -> None:
        key = self._key(number)
        await kv.txn().when(aio.version(key) == 0).then(put(key, "0")).commit()
        while not self._stop.is_set():
            found = await kv.get(key)
            ok, _ = await kv.txn().when(value(key) == found.value).then(put(key, str(int(found.value) + 1))).commit()
            self.done[number] += ok
            await asyncio.sleep(random.uniform(0, PAUSE_MAX_S))

    async def _finish(self, kv: aio.Client) -> None:
        for item in await kv.range(PREFIX, prefix=True):
            self.final[item.key] = (item.mod_revision, item.value)
        await until(lambda: {key: events[-1] for key, events in self.events.items()} == self.final)

    async def _follow(self, kv: aio.Client) -> None:
        async with kv.watch(PREFIX, prefix=True, start_revision=1) as events:
            async for event in events:
                self.events.setdefault(event.key, []).append((event.revision, event.value))
