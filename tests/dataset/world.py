"""A store in memory with datasets on it: their blocking side as in a program, one event loop for all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from raftkv.client.errors import EndpointsFailed
from raftkv.client.operations import get, put
from raftkv.client.sync.loop import LoopThread
from raftkv.dataset.dataset import Dataset
from raftkv.dataset.entry import Entry
from raftkv.dataset.source import Store
from raftkv.dataset.tree import Cut
from tests.virtual_store.direct import StoreWorld

SMALL = Cut(entries_min=4, entries_max=16, entries_mean=4, children_max=8)


class World:
    """The store, and what happens to it. Usable where a client of the cluster is."""

    def __init__(self, loop: LoopThread) -> None:
        self.loop = loop
        self.world = StoreWorld()
        self.store = self.world.store
        self.chunk_reads: list[str] = []
        self.is_down = False
        self.watches = 0
        self.slow_s = 0.0

    def target(self) -> tuple[LoopThread, World]:
        return self.loop, self

    def dataset(self, name: str = "images", *, seed: int = 0, lost: float = 0.0, **settings: Any) -> Dataset:
        return Dataset(self, name, make_store=lambda _: self._store(seed, lost), **settings)

    def _store(self, seed: int, lost: float) -> Store:
        control: Any = self.world.control(seed, lost)
        execute, watch = control.txn, control.watch

        async def txn(*args: Any) -> Any:
            if self.is_down:
                raise EndpointsFailed({}, 0.0, definite=False)
            return await execute(*args)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.watches += 1
            return watch(*args, **kwargs)

        async def read(key: str) -> bytes | None:
            self.chunk_reads.append(key)
            await asyncio.sleep(self.slow_s)
            (found,) = (await txn((), [get(key)])).results
            return None if found is None else bytes(found.value)

        control.txn, control.watch = txn, counted
        return Store(control, read)

    def put(self, key: str, value: bytes) -> None:
        """Write something past all clients."""
        self._call(lambda: self.store.txn([], [put(key, value)]))

    def _call(self, change: Any) -> Any:
        async def run() -> Any:
            return change()

        return self.loop.run(run())

    def revoke_all(self) -> None:
        """All leases end: the processes behind them are taken for dead, and time has passed."""
        self._call(lambda: [self.store.revoke(lease) for lease in sorted(self.store.leases)])

    def keys(self, prefix: str) -> list[str]:
        return sorted(key.decode() for key in self.store.items if key.startswith(prefix.encode()))


def entries(numbers: Iterable[int], size: int = 1) -> list[Entry]:
    return sorted(Entry(f"train/{number // 10:04d}/{number:06d}.jpg", size) for number in numbers)
