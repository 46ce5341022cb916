"""The arbiter sees nodes late: one that has registered again is not taken for lost, though its watch says so."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from raftkv.client.control import OnEvents, OnLost
from raftkv.client.operations import Compare, Operation, Put
from raftkv.client.scope import Text
from raftkv.client.values import Event, TxnResult
from raftkv.training.config import RunConfig
from raftkv.training.records import GATHERING, RUNNING, GenerationRecord, Node, RunKeys, State
from raftkv.training.rendezvous.arbiter_driver import ArbiterDriver
from raftkv.training.rendezvous.world import RecordCache
from tests.virtual_store.direct import FakeControl, StoreWorld

KEYS = RunKeys("job")
CONFIG = RunConfig(run_id="job", min_nodes=1, max_nodes=1, host="c", last_call_timeout_s=0.0).checked()


class LateControl:
    """A way to the store whose decisions and news of nodes can be held up."""

    def __init__(self, control: FakeControl) -> None:
        self._control = control
        self.decided = asyncio.Event()
        self.may_arrive = asyncio.Event()
        self.is_blind = False
        self._unseen: list[Callable[[], None]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._control, name)

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        if any(isinstance(one, Put) and one.key == KEYS.round for one in then):
            self.decided.set()
            await self.may_arrive.wait()
        return await self._control.txn(compares, then, otherwise)

    def watch(
        self, key: Text, end: Text, start: int, on_events: OnEvents, on_lost: OnLost, **options: object
    ) -> Callable[[], None]:
        def hear(revision: int, events: Sequence[Event]) -> None:
            if self.is_blind and key == KEYS.nodes:
                self._unseen.append(lambda: on_events(revision, events))
            else:
                on_events(revision, events)

        return self._control.watch(key, end, start, hear, on_lost, **options)  # type: ignore[arg-type]

    def see(self) -> None:
        """Deliver what was held up."""
        self.is_blind = False
        for deliver in self._unseen:
            deliver()


async def settle() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


def node(name: str, **changes: int) -> Node:
    return Node(name, name, f"{name}:1", min_nodes=1, max_nodes=1, **{"want": 1, **changes})


async def test_node_that_has_registered_again_is_waited_for() -> None:
    """Its lease ended, and it registered anew, while the decision that has it in was on its way."""
    world = StoreWorld()

    def register(name: str, **changes: int) -> int:
        lease = world.store.grant(5)
        world.store.txn((), [Put(KEYS.node(name), node(name, **changes).encode(), lease=lease)])
        return lease

    driver: ArbiterDriver

    def generation() -> int:
        return GenerationRecord.decode(world.store.items[KEYS.round.encode()].value).generation

    def look() -> None:
        driver.look()

    control = LateControl(world.control())
    world.store.txn((), [Put(KEYS.state, State(0, GATHERING, min_nodes=1, max_nodes=1).encode())])
    lease = register("b")
    office = world.store.txn((), [Put(KEYS.arbiter, b"c", lease=register("c"))]).revision
    cache = RecordCache(control, "job", look)
    driver = ArbiterDriver(control, CONFIG, cache, office, -math.inf)
    cache.start()
    await control.decided.wait()
    world.store.revoke(lease)
    await settle()  # the arbiter sees that
    control.is_blind = True
    register("b")  # and not that
    control.may_arrive.set()
    await settle()
    assert generation() == 1, "another generation began beside a member that holds its lease"
    assert State.decode(world.store.items[KEYS.state.encode()].value).phase == RUNNING
    control.see()
    await settle()
    assert generation() == 1
    driver.close()
    cache.close()
