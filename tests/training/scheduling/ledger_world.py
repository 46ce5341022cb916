"""A store in memory for tests of what arbiters share: answers get lost on request, watches deliver later and in order.

``control(seed)`` gives one client's ``Control``: each call gives the loop to others a random number of times, before
and after it takes effect, so that many clients interleave differently with every seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from raftkv.client.kv.compares import Compare
from raftkv.client.kv.operations import Operation, Put
from raftkv.client.space import Text
from raftkv.client.values import PUT, Event, TxnResult
from raftkv.errors import CompactedError, ContextDeadlineExceededError
from raftkv.training.control import Grant, OnEvents, OnLost
from raftkv.training.keys import RunKeys
from tests.training.sim.store import Store


class LedgerWorld:
    """The store, and what tests do to it."""

    def __init__(self) -> None:
        self.store = Store()
        self.txns = 0

    def control(self, seed: int = 0, lost: float = 0.0) -> FakeControl:
        return FakeControl(self, random.Random(seed), lost)

    def arrive(self, run: str, node: str) -> int:
        """A node registers; its lease."""
        lease = self.store.grant(1)
        self.store.txn((), (Put(RunKeys(run).node(node), b"{}", lease),))
        return lease


class FakeControl:
    """``Control`` of one client."""

    def __init__(self, world: LedgerWorld, rng: random.Random, lost: float) -> None:
        self._world = world
        self._rng = rng
        self._lost = lost
        self.watches: list[tuple[Callable[[], None], OnLost]] = []

    async def _pause(self) -> None:
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)
        if self._rng.random() < self._lost:
            raise ContextDeadlineExceededError

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        await self._pause()
        self._world.txns += 1
        result = self._world.store.txn(compares, then, otherwise)
        await self._pause()
        return result

    async def grant_fixed(self, ttl_s: int) -> int:
        await self._pause()
        return self._world.store.grant(ttl_s)

    async def grant(self, ttl_s: int, grace_s: float, on_lost: Callable[[], None]) -> Grant:
        raise NotImplementedError

    async def end(self, grant: Grant, *, revoke: bool) -> None:
        raise NotImplementedError

    def watch(
        self,
        key: Text,
        end: Text,
        start_revision: int,
        on_events: OnEvents,
        on_lost: OnLost,
        *,
        deletes: bool = True,
    ) -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        store = self._world.store
        sent = start_revision - 1
        over = False

        def deliver() -> None:
            nonlocal sent
            if over:
                return
            try:
                events = [event for event in store.events(key, end, sent + 1) if deletes or event.type == PUT]
            except CompactedError as error:
                cancel()
                on_lost(error)
                return
            sent = store.revision
            if events:
                on_events(sent, events)

        def commit(revision: int, events: list[Event]) -> None:
            loop.call_soon(deliver)

        def cancel() -> None:
            nonlocal over
            over = True
            if commit in store.on_commit:
                store.on_commit.remove(commit)

        store.on_commit.append(commit)
        loop.call_soon(deliver)
        self.watches.append((cancel, on_lost))
        return cancel

    def lose_watch(self, error: Exception | None = None) -> None:
        """End the oldest watch: history was compacted, or what ``error`` says."""
        cancel, on_lost = self.watches.pop(0)
        cancel()
        on_lost(error or CompactedError())
