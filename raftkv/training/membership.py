"""One node's part in a run: being there, being in worlds, and doing its share of deciding.

::

    membership = await Membership.open(kv, RunConfig(run_id="job", min_nodes=2, max_nodes=4))
    while not done:
        world = await membership.next_world()       # everything of earlier worlds is stopped here
        start_workers(world)
        while workers_run() and not membership.nodes_waiting: ...
        stop_workers()
    await membership.close("finished")              # for everybody
    await membership.leave()

Owns the node's leased key, its view of ``round`` and ``state``, and, while this node is the arbiter, the office. What
it holds to:

1. ``next_world`` tells the run that nothing of an earlier epoch runs here any more, *before* it waits; so a world is
   never handed out while another may still run here.
2. Losing the store, or its leader, ends nothing: calls are made again until they get through, and a running world goes
   on. Only the cluster's word that the lease is gone counts; then the node registers again, and is in its world for as
   long as no other epoch has begun.
3. Every write is conditional on the lease, and every write of an epoch on the epoch (``World.fence``).

Who decides: the node that holds ``arbiter``. When that key goes, with its holder's lease, members try to take it in
rank order, a few milliseconds apart, so that a thousand nodes do not ask at once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

from raftkv.client.compares import Compare, mod_revision, version
from raftkv.client.operations import Delete, Get, GetRange, Operation, Put
from raftkv.client.txn import Txn
from raftkv.client.values import DELETE, Event, KeyValue, RangeResult, TxnResult
from raftkv.errors import LeaseNotFoundError, StatusError
from raftkv.training.config import RunConfig
from raftkv.training.control import ClientControl, Control, Grant
from raftkv.training.errors import EpochOver, JoinTimeout, RunClosed, RunConflict
from raftkv.training.keys import RunKeys
from raftkv.training.office import Office
from raftkv.training.record_cache import RecordCache
from raftkv.training.records import (
    BROKEN,
    CLOSED,
    GATHERING,
    HEARTBEAT_LOST,
    LEFT,
    PARTITION,
    RUNNING,
    Fault,
    Node,
    Round,
    State,
)
from raftkv.training.world import World

if TYPE_CHECKING:
    from raftkv.client.library import Client

T = TypeVar("T")

RETRY_MIN_S: Final = 0.02
RETRY_MAX_S: Final = 0.25
STAGGER_S: Final = 0.005
STAGGER_MAX_S: Final = 0.25
FORGIVE_TTLS: Final = 2.0
FORGIVE_EXTRA_S: Final = 1.0
SILENT_TTLS: Final = 0.7
"""Without a confirmed keep-alive for so much of a TTL the store counts as out of reach."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is from its next epoch, for people who wait.

    Attributes:
        epoch: the last that began.
        phase, reason: of the run.
        joined: nodes that are there.
        min_nodes, max_nodes: of the run.
    """

    epoch: int
    phase: str
    reason: str
    joined: int
    min_nodes: int
    max_nodes: int


OnProgress = Callable[[Progress], None]


class Membership:
    """See the module; made by ``open``.

    Attributes:
        config: of this node.
        node: as registered.
        world: the last one that ``next_world`` has returned.
    """

    def __init__(
        self, control: Control, config: RunConfig, data: Mapping[str, str], on_progress: OnProgress | None
    ) -> None:
        self.config = config = config.checked()
        self.world: World | None = None
        self.node = Node(
            id=f"{config.host}-{secrets.token_hex(4)}",
            host=config.host,
            address=config.address,
            slots=config.slots,
            topology=config.topology,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            data=dict(data),
            time=time.time(),
        )
        self._control = control
        self._keys = RunKeys(config.run_id)
        self._cache = RecordCache(config.run_id, self._changed)
        self._grant: Grant | None = None
        self._registered = asyncio.Event()
        self._declared = False
        self._left = False
        self._on_progress = on_progress
        self._told: Progress | None = None
        self._callbacks: dict[int, Callable[[Membership], None]] = {}
        self._last_callback = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._boots: dict[int, str] = {}
        self._arbiter = ""
        self._office: Office | None = None
        self._office_revision = self._office_lease = 0
        self._unwatch: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._succession: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._forgive_until = 0.0
        self._beat_at = 0.0
        self._stood_still_s = 0.0

    # -- coming and going

    @classmethod
    async def open(
        cls,
        kv: Client,
        config: RunConfig,
        *,
        data: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Membership:
        """Register a node in a run.

        Arguments:
            kv: a client, whole, not a view; it must outlive the membership.
            config: the run and this node.
            data: small texts that other nodes can read.
            on_progress: called on the loop while nodes gather.

        Raises:
            ConfigError: the configuration cannot work.
            RunClosed: the run is over, and nodes of it are still there.
            RunConflict: its nodes were started with other limits.
            StatusError: the store cannot be reached, or refused.
        """
        return await cls.start(ClientControl(kv), config, data=data, on_progress=on_progress)

    @classmethod
    async def start(
        cls,
        control: Control,
        config: RunConfig,
        *,
        data: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Membership:
        """As ``open``, over any control."""
        membership = cls(control, config, data or {}, on_progress)
        try:
            await membership._register()
            await membership._check_run()
        except BaseException:
            await membership._go()
            raise
        membership._beat()
        return membership

    async def leave(self) -> None:
        """Be there no more. An epoch that this node was in ends at once, unless the run is closed."""
        world = self.world
        if world is not None and not self._left and not self.closed and self.nodes_waiting == 0:
            fault = Fault(world.epoch, self.node.id, self.node.host, cause=LEFT, time=time.time())
            try:
                await self._control.txn(
                    world.fence.conditions, [Put(self._keys.faults(world.epoch) + fault.key, fault.encode())]
                )
            except StatusError:
                pass  # the end of the lease tells it as well, only later
        await self._go()

    async def _go(self) -> None:
        self._left = True
        self._resign()
        for unwatch in self._unwatch:
            unwatch()
        self._unwatch.clear()
        for task in list(self._tasks):
            task.cancel()
        self._wake()
        if self._grant is not None:
            grant, self._grant = self._grant, None
            try:
                await self._control.end(grant, revoke=True)
            except StatusError:
                return  # nobody keeps it alive: it ends with its TTL

    async def close(self, reason: str = "finished") -> None:
        """End the run for everybody: no epoch begins any more. Does nothing if another has begun without this node.

        Raises:
            StatusError: the store refused.
        """
        while not self.closed and not self._left:
            state, current = self._cache.state, self._cache.round
            if state is None or (self.world is not None and current and current.epoch != self.world.epoch):
                return
            closed = replace(state, phase=CLOSED, reason=reason, cause="", node=self.node.id, time=time.time())
            conditions = [
                mod_revision(self._keys.state) == self._cache.state_revision,
                version(self._keys.node(self.node.id)) > 0,
            ]
            base = self._keys.base
            gone = [Delete(f"{base}{part}/", prefix=True) for part in ("boot", "fault", "store", "sync")]
            result = await self._txn(conditions, [Put(self._keys.state, closed.encode()), *gone])
            if result.succeeded:
                await self._cache.reached(result.revision)
                return
            await self._reload()

    # -- registering

    async def _register(self) -> None:
        """Be there: a lease and the node's key; and see what is going on."""
        grant = await self._control.grant(
            self.config.lease_ttl_s, self.config.disconnect_grace_s, lambda: self._lost_lease(grant_id)
        )
        grant_id = grant.id
        self._grant = grant
        keys = self._keys
        state = State(0, GATHERING, min_nodes=self.config.min_nodes, max_nodes=self.config.max_nodes, time=time.time())
        first = Txn().when(version(keys.state) == 0).then(Put(keys.state, state.encode()))
        office = Txn().when(version(keys.arbiter) == 0).then(Put(keys.arbiter, self.node.id, lease=grant.id))
        result = await self._control.txn(
            (),
            [
                Put(keys.node(self.node.id), self.node.encode(), lease=grant.id),
                first,
                office,
                GetRange(*keys.record),
                GetRange(*keys.calls),
            ],
        )
        self._declared = self.node.running == 0
        self._take(result.results[3], result.results[4], result.revision)
        self._registered.set()
        if not self._unwatch:
            self._watch(result.revision + 1)

    def _take(self, record: RangeResult, calls: RangeResult, revision: int) -> None:
        self._take_calls(calls.items, revision)
        self._cache.load(record, revision)

    def _watch(self, revision: int) -> None:
        for unwatch in self._unwatch:
            unwatch()
        watch, keys = self._control.watch, self._keys
        self._unwatch = [
            watch(*keys.record, revision, self._cache.on_events, self._lost_watch),
            watch(*keys.calls, revision, self._on_calls, self._lost_watch),
        ]

    def _lost_watch(self, error: Exception) -> None:
        if not self._left:
            self._spawn(self._rewatch())

    async def _rewatch(self) -> None:
        """History was compacted under the watches: begin again with what is there now."""
        revision = await self._reload()
        if not self._left:
            self._watch(revision + 1)

    async def _reload(self) -> int:
        reads = [GetRange(*self._keys.record), GetRange(*self._keys.calls)]
        result = await self._txn((), reads)
        self._take(result.results[0], result.results[1], result.revision)
        return result.revision

    async def _check_run(self) -> None:
        """Whether this node may take part at all; a run that nobody is in any more is taken over."""
        state = self._cache.state
        limits = (self.config.min_nodes, self.config.max_nodes)
        while state is not None and (state.phase == CLOSED or (state.min_nodes, state.max_nodes) != limits):
            closed = state.phase == CLOSED
            # Who came before this node; of two that find a closed or dead run at once, the older takes it over.
            mine = await self._txn((), [Get(self._keys.node(self.node.id))])
            since = self._cache.state_revision if closed else mine.results[0].create_revision - 1
            others = GetRange(self._keys.nodes, prefix=True, keys_only=True, limit=1, max_create_revision=since)
            found = await self._txn((), [others])
            if len(found.results[0]):
                if closed:
                    raise RunClosed(self.config.run_id, state.reason)
                raise RunConflict(
                    self.config.run_id, f"{state.min_nodes}:{state.max_nodes}", f"{limits[0]}:{limits[1]}"
                )
            phase = GATHERING if closed else BROKEN
            anew = State(state.epoch, phase, "started anew", min_nodes=limits[0], max_nodes=limits[1], time=time.time())
            result = await self._txn(
                [mod_revision(self._keys.state) == self._cache.state_revision],
                [Put(self._keys.state, anew.encode())],
            )
            if result.succeeded:
                await self._cache.reached(result.revision)
            else:
                await self._reload()
            state = self._cache.state

    def _lost_lease(self, lease_id: int) -> None:
        """The cluster says that the lease is gone, and with it the node's key and office."""
        if self._left or self._grant is None or self._grant.id != lease_id:
            return
        self._grant = None
        self._registered.clear()
        self._resign()
        self._spawn(self._register_again())

    async def _register_again(self) -> None:
        running = 0 if self._declared or self.world is None else self.world.epoch
        self.node = replace(self.node, running=running, want=running or self.node.want, time=time.time())
        self._forgive(self._loop.time())
        stood_still_s = self._stood_still_s
        await self._until_answered(self._register)
        if running and self._cache.round is not None and self._cache.round.epoch == running:
            await self._explain(running, stood_still_s)

    async def _explain(self, epoch: int, stood_still_s: float) -> None:
        """Only this node can tell why its lease ended although it lives: say it where the arbiter noted the loss."""
        if stood_still_s >= self.config.lease_ttl_s:
            cause, message = HEARTBEAT_LOST, f"the process stood still for {stood_still_s:.1f} s"
        else:
            cause, message = PARTITION, "it was cut off from the store, and is back"
        fault = Fault(epoch, self.node.id, self.node.host, cause=cause, message=message, time=time.time())
        key = self._keys.faults(epoch) + fault.key
        put = [Put(key, fault.encode())]
        await self._txn([version(key) > 0], put)

    async def _until_answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call that is safe to repeat until the store answers, however long that takes."""
        wait_s = RETRY_MIN_S
        while True:
            try:
                return await call()
            except LeaseNotFoundError:
                raise
            except StatusError as error:
                if error.definite and not _is_outage(error):
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)

    async def _txn(self, compares: Sequence[Compare], then: Sequence[Operation]) -> TxnResult:
        return await self._until_answered(lambda: self._control.txn(compares, then))

    # -- worlds

    async def next_world(self, timeout_s: float | None = None) -> World:
        """Say that everything of earlier worlds is stopped here, and wait for the next one with this node in it.

        Arguments:
            timeout_s: for the minimum to be there; None: ``join_timeout_s``. A node that others run without, as a
                standby, waits for as long as they do.

        Raises:
            RunClosed: it is over.
            JoinTimeout: too few nodes came; this one has left.
            StatusError: the store refused.
        """
        limit_s = self.config.join_timeout_s if timeout_s is None else timeout_s
        deadline = self._loop.time() + limit_s
        try:
            while True:
                await self._declare(deadline)
                world = await self._formed(deadline)
                if world is not None:
                    self._declared = False
                    self.world = world
                    return world
        except TimeoutError:
            why = self._why_not()
            await self._go()
            raise JoinTimeout(self.config.run_id, limit_s, why) from None

    async def _declare(self, deadline: float) -> None:
        """Write that nothing runs here any more, unless that is what stands there."""
        current = self._cache.round
        epoch = current.epoch if current is not None else 0
        want = max(epoch + 1 if self._is_member(current) else 1, self.world.epoch + 1 if self.world else 1)
        while not self._declared or self.node.want < want:
            self.node = replace(self.node, want=max(want, self.node.want), running=0)
            self._declared = True  # if the lease is lost meanwhile, this is what is registered
            async with asyncio.timeout_at(deadline):
                await self._registered.wait()
                grant = self._grant
                if grant is None:
                    continue
                put = Put(self._keys.node(self.node.id), self.node.encode(), lease=grant.id)
                try:
                    await self._txn((), [put])
                except LeaseNotFoundError:
                    self._declared = False
                    self._lost_lease(grant.id)

    async def _formed(self, deadline: float) -> World | None:
        """The world that this node may start; None: it must declare itself again first."""
        seen = self.world.epoch if self.world is not None else 0
        while True:
            state, current = self._cache.state, self._cache.round
            if self._left:
                raise RunClosed(self.config.run_id, "this node has left")
            if self.closed:
                raise RunClosed(self.config.run_id, state.reason if state else "")
            if current is not None and current.epoch > seen and self._is_member(current):
                if current.epoch >= self.node.want:
                    if state is None or state.phase != RUNNING or state.epoch != current.epoch:
                        return None  # over before it was started here
                    return self._world(current)
                return None
            self._tell_progress()
            await self._next_change(None if self._is_standby else deadline)

    def _world(self, current: Round) -> World:
        index = next(index for index, member in enumerate(current.members) if member.id == self.node.id)
        return World(self.config.run_id, current.epoch, current.members, index, self._cache.round_revision)

    def _is_member(self, current: Round | None) -> bool:
        return current is not None and any(member.id == self.node.id for member in current.members)

    @property
    def _is_standby(self) -> bool:
        """Whether others run, and this node waits for a place."""
        state = self._cache.state
        return state is not None and state.phase == RUNNING and not self._is_member(self._cache.round)

    def _why_not(self) -> str:
        state = self._cache.state
        if state is None or not self._registered.is_set():
            return "the store cannot be reached"
        if self._is_member(self._cache.round) and state.phase == RUNNING:
            return "the other nodes have not come back"
        least = state.min_nodes
        return f"{state.joined} of at least {least} nodes are there" + (f" ({state.reason})" if state.reason else "")

    async def _next_change(self, deadline: float | None) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(future)
        async with asyncio.timeout_at(deadline):
            await future

    @property
    def nodes_waiting(self) -> int:
        """0 while the last world is whole; else come back with ``next_world``. No I/O; any thread may ask."""
        world, state, current = self.world, self._cache.state, self._cache.round
        if world is None or state is None or state.phase == CLOSED:
            return 0
        if current is not None and current.epoch > world.epoch:
            return 1
        return max(1, state.joined) if state.phase == BROKEN and state.epoch == world.epoch else 0

    @property
    def closed(self) -> bool:
        """Whether the run is over."""
        state = self._cache.state
        return state is not None and state.phase == CLOSED

    @property
    def phase(self) -> State | None:
        """What is going on, as last seen."""
        return self._cache.state

    @property
    def damage(self) -> str:
        """Why a record of the run cannot be read; empty: all is well."""
        return self._cache.damage

    # -- what members tell each other

    async def report(self, fault: Fault) -> None:
        """Record a fault of the present world: it ends for everybody at once. Nothing happens if it is over already.

        Raises:
            StatusError: the store refused.
        """
        world = self.world
        if world is None or fault.epoch != world.epoch:
            return
        put = [Put(self._keys.faults(world.epoch) + fault.key, fault.encode())]
        await self._txn(world.fence.conditions, put)

    async def publish(self, value: str) -> None:
        """Tell all members of the present world something, as the address of its store; the last one counts.

        Raises:
            EpochOver: it is over.
            StatusError: the store refused.
        """
        world = self._present()
        put = [Put(self._keys.boot(world.epoch), value)]
        result = await self._txn(world.fence.conditions, put)
        if not result.succeeded:
            raise EpochOver(world.run_id, world.epoch)

    async def published(self, timeout_s: float | None = None) -> str:
        """What was published in the present world; waits for it.

        Raises:
            EpochOver: it ended before.
            RunClosed: the run did.
            TimeoutError: nothing came in time.
        """
        world = self._present()
        deadline = None if timeout_s is None else self._loop.time() + timeout_s
        while world.epoch not in self._boots:
            if self.closed or self._left:
                raise RunClosed(world.run_id, "")
            if self.nodes_waiting:
                raise EpochOver(world.run_id, world.epoch, self._cache.state.reason if self._cache.state else "")
            await self._next_change(deadline)
        return self._boots[world.epoch]

    def _present(self) -> World:
        if self.world is None:
            raise EpochOver(self.config.run_id, 0, "no epoch has begun here yet")
        return self.world

    def on_change(self, callback: Callable[[Membership], None]) -> Callable[[], None]:
        """Call back, on the loop, whenever something about the run changes. Returns how to take that back."""
        self._last_callback += 1
        number = self._last_callback
        self._callbacks[number] = callback
        return lambda: self._callbacks.pop(number, None) and None

    def _changed(self) -> None:
        self._wake()
        if self._office is not None:
            self._office.look()
        for callback in list(self._callbacks.values()):
            callback(self)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _tell_progress(self) -> None:
        state = self._cache.state
        if self._on_progress is None or state is None:
            return
        progress = Progress(state.epoch, state.phase, state.reason, state.joined, state.min_nodes, state.max_nodes)
        if progress != self._told:
            self._told = progress
            self._on_progress(progress)

    # -- the arbiter's office

    def _on_calls(self, revision: int, events: Sequence[Event]) -> None:
        for event in events:
            if event.type == DELETE:
                self._drop_call(event.kv.key)
            else:
                self._put_call(event.kv)
        self._look_at_office()
        self._wake()

    def _take_calls(self, items: Sequence[KeyValue], revision: int) -> None:
        self._arbiter = ""
        for item in items:
            self._put_call(item)
        self._look_at_office()

    def _put_call(self, item: KeyValue) -> None:
        name = item.key.decode()[len(self._keys.base) :]
        if name == "arbiter":
            self._arbiter = item.text
            self._office_revision = item.mod_revision
            self._office_lease = item.lease
        elif name.startswith("boot/") and name[5:].isdigit():
            self._boots[int(name[5:])] = item.text

    def _drop_call(self, key: bytes) -> None:
        name = key.decode()[len(self._keys.base) :]
        if name == "arbiter":
            self._arbiter = ""
        elif name.startswith("boot/") and name[5:].isdigit():
            self._boots.pop(int(name[5:]), None)

    def _look_at_office(self) -> None:
        """Take the office up, lay it down, or try to get it: as the ``arbiter`` key says."""
        if self._left:
            return
        mine = self._arbiter == self.node.id and self._grant is not None and self._office_lease == self._grant.id
        if not mine:
            self._resign()
        elif self._office is None:
            self._office = Office(self._control, self.config, self._cache, self._office_revision, self._forgive_until)
        if self._arbiter:
            self._forget_succession()
        elif self._succession is None:
            self._succession = self._loop.call_later(self._stagger_s(), self._succeed)

    def _resign(self) -> None:
        self._forget_succession()
        if self._office is not None:
            self._office.close()
            self._office = None

    def _forget_succession(self) -> None:
        if self._succession is not None:
            self._succession.cancel()
            self._succession = None

    def _stagger_s(self) -> float:
        current = self._cache.round
        members = current.members if current is not None else ()
        place = next((index for index, member in enumerate(members) if member.id == self.node.id), len(members))
        return min(place * STAGGER_S, STAGGER_MAX_S)

    def _succeed(self) -> None:
        self._succession = None
        self._spawn(self._take_office())

    async def _take_office(self) -> None:
        keys = self._keys
        wait_s = RETRY_MIN_S
        while not self._arbiter and not self._left:
            await self._registered.wait()
            grant = self._grant
            if grant is None:
                continue
            conditions = [version(keys.arbiter) == 0, version(keys.node(self.node.id)) > 0]
            try:
                result = await self._control.txn(conditions, [Put(keys.arbiter, self.node.id, lease=grant.id)])
            except LeaseNotFoundError:
                self._lost_lease(grant.id)
                return
            except StatusError:
                result = None
            if result is not None and result.succeeded:
                return  # the watch brings it, and so begins the office
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)

    # -- time

    def _beat(self) -> None:
        """Notice that this process stood still, or that the store was out of reach."""
        now = self._loop.time()
        interval_s = self.config.lease_ttl_s / 2
        if self._beat_at:
            late_s = now - self._beat_at - interval_s
            if late_s > interval_s:
                self._stood_still_s = late_s
        self._beat_at = now
        grant = self._grant
        if grant is None or grant.silent_s > SILENT_TTLS * grant.ttl_s:
            self._forgive(now)
        if not self._left:
            self._loop.call_later(interval_s, self._beat)

    def _forgive(self, now: float) -> None:
        """Give others the time to register again that this node had."""
        ttl_s = self._grant.ttl_s if self._grant is not None else self.config.lease_ttl_s
        self._forgive_until = now + FORGIVE_TTLS * ttl_s + FORGIVE_EXTRA_S
        if self._office is not None:
            self._office.forgive(self._forgive_until)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_outage(error: StatusError) -> bool:
    """Whether an error says that the store cannot answer now, rather than that it will not."""
    return error.code in _OUTAGE_CODES


_OUTAGE_CODES: Final = frozenset((1, 4, 8, 10, 14))
"""CANCELLED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, ABORTED, UNAVAILABLE."""
