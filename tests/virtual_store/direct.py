"""A store in memory with a ``Control`` on the real event loop: answers get lost on request, watches deliver later.

``StoreWorld().control(seed)`` gives one client's ``Control``: each call gives the loop to others a random number of
times, before and after it takes effect, so that many clients interleave differently with every seed. ``world.sent``
has every txn that was ever sent, so that a test can let copies of them arrive late.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raftkv.client.control import Grant, OnEvents, OnLost
from raftkv.client.operations import Compare, Operation
from raftkv.client.scope import Text
from raftkv.client.values import PUT, Event, TxnResult
from raftkv.errors import CompactedError, ContextDeadlineExceededError

from .store import Store


class StoreWorld:
    """The store, and what tests do to it.

    Attributes:
        txns: how many were executed.
        sent: each of them, to be executed again.
    """

    def __init__(self) -> None:
        self.store = Store()
        self.txns = 0
        self.sent: list[Callable[[], TxnResult]] = []

    def control(self, seed: int = 0, lost: float = 0.0) -> FakeControl:
        return FakeControl(self, random.Random(seed), lost)


@dataclass
class FakeGrant:
    """A lease that lives until the test revokes it."""

    id: int
    ttl_s: int
    silent_s: float = 0.0


class FakeControl:
    """``Control`` of one client."""

    def __init__(self, world: StoreWorld, rng: random.Random, lost: float) -> None:
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
        self._world.sent.append(lambda: self._world.store.txn(compares, then, otherwise))
        result = self._world.sent[-1]()
        await self._pause()
        return result

    async def grant_fixed(self, ttl_s: int) -> int:
        await self._pause()
        return self._world.store.grant(ttl_s)

    async def grant(self, ttl_s: int, grace_s: float, on_lost: Callable[[], None]) -> Grant:
        await self._pause()
        return FakeGrant(self._world.store.grant(ttl_s), ttl_s)

    async def end(self, grant: Grant, *, revoke: bool) -> None:
        if revoke:
            self._world.store.revoke(grant.id)

    def watch(
        self,
        key: Text,
        end: Text,
        start_revision: int,
        on_events: OnEvents,
        on_lost: OnLost,
        *,
        deletes: bool = True,
        cluster_id: int = 0,
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
            if (cancel, on_lost) in self.watches:
                self.watches.remove((cancel, on_lost))

        store.on_commit.append(commit)
        loop.call_soon(deliver)
        self.watches.append((cancel, on_lost))
        return cancel

    def lose_watch(self, error: Exception | None = None) -> None:
        """End the oldest watch that lives: history was compacted, or what ``error`` says."""
        cancel, on_lost = self.watches[0]
        cancel()
        on_lost(error or CompactedError())
