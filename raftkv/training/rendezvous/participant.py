"""One node's part in a run: it registers, joins worlds, and becomes the arbiter if it is elected.

::

    participant = await Participant.open(kv, RunConfig(run_id="job", min_nodes=2, max_nodes=4))
    while not done:
        world = await participant.next_world()       # everything of earlier worlds is stopped here
        start_workers(world)
        while workers_run() and not participant.nodes_waiting: ...
        stop_workers()
    await participant.finish()                       # the last one closes the run
    await participant.leave()

Invariants:

1. ``next_world`` writes that nothing of an earlier generation runs here any more, *before* it waits. So it never
   returns a world while another may still run here.
2. Losing the store, or its leader, does not end a world: calls are repeated until they succeed, and the world
   continues. Only when the cluster says that the lease has ended does the node register again; it stays in its world as
   long as no other generation has begun.
3. Every write has the lease as a condition, and every write of a generation also the generation (``World.fence``).

Its parts: ``registration`` (the lease and the node's key), ``world.RecordCache`` (the records of the run) and
``arbiter_driver.ArbiterElection`` (which node decides).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from raftkv.checkpoint.copies.holder import Holder, Me
from raftkv.client.arguments import limit
from raftkv.client.control import ClientControl, Control, OnTrouble, Reflector, Sparse, check_whole, until_answered
from raftkv.client.lease import Callbacks
from raftkv.client.operations import Compare, Delete, GetRange, Operation, Put, lease_of, mod_revision, version
from raftkv.client.records import RecordError, read
from raftkv.client.rpc.retry import is_transient
from raftkv.client.values import Event, KeyValue, TxnResult
from raftkv.errors import StatusError
from raftkv.training.config import RunConfig
from raftkv.training.errors import ClusterAway, DeprecatedAlias, GenerationOver, JoinTimeout, RunClosed, RunConflict
from raftkv.training.records import (
    BROKEN,
    CLOSED,
    GATHERING,
    LEFT,
    RUNNING,
    Fault,
    GenerationRecord,
    Node,
    RunKeys,
    State,
)
from raftkv.training.rendezvous.arbiter_driver import ArbiterElection
from raftkv.training.rendezvous.registration import Registration
from raftkv.training.rendezvous.world import RecordCache, RecordView, World
from raftkv.training.scheduling.ledger import HOST_SLOTS, give_back

if TYPE_CHECKING:
    from raftkv.client.library import Client

MEMBERS_KEPT: Final = 32
"""An ended run keeps the members of its last generation in its record if there are at most this many, else none."""
PATIENT_NODES: Final = 1000
"""Nodes of a larger run wait longer for an answer before they ask again: when it first gathers, each node reads the
list of all, so the members send 2.6 GB to 5,000 nodes."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is from its next generation, for waiting users.

    Attributes:
        generation: last generation that began.
        phase, reason: phase of the run, and its reason.
        joined: number of present nodes.
        min_nodes, max_nodes: limits of the run.
        damage: name of the unreadable record that blocks the run; empty: none.
    """

    generation: int
    phase: str
    reason: str
    joined: int
    min_nodes: int
    max_nodes: int
    damage: str = ""

    epoch = DeprecatedAlias("generation")


OnProgress = Callable[[Progress], None]


class Participant(RecordView):
    """One node's part in a run; made by ``open``.

    Attributes:
        config: configuration of this node.
        world: world that ``next_world`` returned last.
    """

    def __init__(
        self, control: Control, config: RunConfig, data: Mapping[str, str], on_progress: OnProgress | None
    ) -> None:
        self.config = config = config.checked()
        self.world: World | None = None
        self._control = control
        self._keys = RunKeys(config.run_id)
        self._cache = RecordCache(control, config.run_id, self._changed)
        self._calls = Reflector(control, self._keys.calls, self._on_calls)
        self._registration = Registration(
            control,
            config,
            _new_node(config, data),
            on_registered=self._registered,
            on_lost=self._lost_lease,
            on_outage=self._outage,
        )
        self._holder: Holder | None = None
        self._election = ArbiterElection(control, config, self._cache, self._registration)
        self._left = False
        self._finished = 0
        self._deadline = 0.0
        self._on_progress = on_progress
        self._reported: Progress | None = None
        self._callbacks: Callbacks[Participant] = Callbacks()
        self._waiters: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()

    # -- coming and going

    @classmethod
    async def open(
        cls,
        kv: Client,
        config: RunConfig,
        *,
        data: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
        on_trouble: OnTrouble | None = None,
    ) -> Participant:
        """Register a node in a run.

        Arguments:
            kv: a client, not a view of one; it must outlive the participant.
            config: the run and this node.
            data: small strings that other nodes can read.
            on_progress: called on the loop while nodes gather.
            on_trouble: called on the loop while the store does not answer; see ``rpc.retry.until_answered``.

        Raises:
            ClusterAway: the store did not answer within ``connect_timeout_s``.
            ConfigError: the configuration is not valid, or the client is a view.
            RunClosed: the run is closed, and nodes of it are still present.
            RunConflict: its nodes were started with other limits.
            StatusError: the store refused.
        """
        with explain_outage(check_whole(kv), config.run_id, config.connect_timeout_s):
            control = ClientControl(kv, is_patient=config.max_nodes > PATIENT_NODES)
            return await cls.start(control, config, data=data, on_progress=on_progress, on_trouble=on_trouble)

    @classmethod
    async def start(
        cls,
        control: Control,
        config: RunConfig,
        *,
        data: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
        on_trouble: OnTrouble | None = None,
    ) -> Participant:
        """Register like ``open``, over any ``Control``.

        Arguments:
            control: the store.
            config: the run and this node.
            data: small texts that other nodes can read.
            on_progress, on_trouble: see ``open``.
        """
        participant = cls(control, config, data or {}, on_progress)
        try:
            await participant._registration.open(on_trouble)
            await participant._check_run()
            if participant.config.memory_bytes:
                await participant._hold()
        except BaseException:
            await participant._deregister()
            raise
        return participant

    async def _hold(self) -> None:
        """Keep copies of checkpoints in this process, which outlives the workers of all generations."""
        node, config = self.node, self.config
        me = Me(node.id, node.host, node.address, node.topology)
        holder = Holder(
            self._control, config.run_id, me, limit_bytes=config.memory_bytes, ttl_s=config.lease_ttl_s,
            grace_s=config.disconnect_grace_s,
        )  # fmt: skip
        await holder.open()
        self._holder = holder

    async def leave(self, *, is_away: bool = False) -> None:
        """Leave the run. The generation of this node ends at once, unless it has finished or the run is closed.

        Arguments:
            is_away: the store did not answer just now, so make no calls; the others learn of it when the lease ends.
        """
        try:
            if is_away or self._left:
                pass
            elif self.closed:
                # The last node to leave deletes keys that workers wrote after the run was closed.
                await self._control.txn([self._state_as_seen()], self._leftovers())
            elif self.world is not None and self.nodes_waiting == 0 and self._finished != self.world.generation:
                await self._say_goodbye(self.world)
        except StatusError as error:
            is_away = is_transient(error)  # the others learn of it when the lease ends
        is_over = self.closed and not self._left
        await self._deregister(is_away=is_away)
        if is_over and not is_away:
            await self._shorten()

    async def _shorten(self) -> None:
        """Delete the member list of a closed run if no node is left: for 1,000 nodes it is 100 KB."""
        last = self._cache.round
        if last is None or len(last.members) <= MEMBERS_KEPT:
            return
        unchanged = mod_revision(self._keys.round) == self._cache.round_revision
        short = Put(self._keys.round, replace(last, members=()).encode())
        # Every leaving node asks. The first condition fails for all but the last few, so that the members need not
        # scan the keys of all nodes each time.
        conditions = [lease_of(self._keys.arbiter) == 0, self._keys.deserted, unchanged, self._state_as_seen()]
        with suppress(StatusError):  # it stays as large as it is
            await self._control.txn(conditions, [short])

    async def _say_goodbye(self, world: World) -> None:
        fault = Fault(world.generation, self.node.id, self.node.host, cause=LEFT, time=time.time())
        put = Put(self._keys.faults(world.generation) + fault.key, fault.encode())
        await self._control.txn(world.fence.conditions, [put])

    def _leftovers(self) -> list[Operation]:
        """Return deletes of the run's keys, except ``round`` and ``state``, which keep generations from decreasing."""
        parts = ("boot", "deny", "fault", "store", "strike", "sync")
        return [Delete(f"{self._keys.base}{part}/", prefix=True) for part in parts]

    async def _deregister(self, *, is_away: bool = False) -> None:
        self._left = True
        self._election.close()
        self._cache.close()
        self._calls.close()
        self._wake()
        if self._holder is not None:
            await self._holder.close(is_away=is_away)
        await self._registration.leave(revoke=not is_away)
        if self.config.cluster and not is_away:
            await give_back(self._control, self.config.cluster, self.config.run_id)

    async def finish(self, reason: str = "finished") -> bool:
        """Record that this node has finished successfully; the last node of the world closes the run.

        The world continues for the others, even if this node leaves. Does nothing if the next one has begun.

        Returns:
            Whether the run is closed.

        Raises:
            StatusError: the store refused.
        """
        world = self.world
        while world is not None and self._cache.round_revision == world.revision and not (self.closed or self._left):
            have_all = await self.record_exit(world)
            if have_all is not None:
                self._finished = world.generation
                if have_all:
                    await self.close(reason)
                break
            await self._registration.wait()
            await self._cache.refresh()
        return self.closed

    async def record_exit(self, world: World) -> bool | None:
        """Record that this node has finished successfully in a world; from then on, new nodes do not end the world.

        Returns:
            Whether all nodes of the world have finished; None: not recorded, because another world has begun, or the
            lease of this node has ended.

        Raises:
            StatusError: the store refused.
        """
        exits, mine = self._keys.exits(world.generation), self._keys.exit(world.generation, world.index)
        count = GetRange(exits, prefix=True, count_only=True)
        result = await self._txn(world.fence.conditions, [Put(mine, "0"), count])
        if not result.succeeded:
            return None
        return result.results[1].count >= world.node_count and await self._have_all_finished(world)

    async def _have_all_finished(self, world: World) -> bool:
        """Look whose the keys are of which there are enough: the last node does, not each of them."""
        read = GetRange(self._keys.exits(world.generation), prefix=True, keys_only=True)
        found = (await self._txn((), [read])).results[0]
        return len(self._keys.exited(world.generation, world.node_count, found)) == world.node_count

    async def close(self, reason: str = "finished") -> None:
        """Close the run for all nodes: no further generation begins. Does nothing if a generation has begun
        without this node.

        Raises:
            StatusError: the store refused.
        """
        while not self.closed and not self._left:
            state, current = self._cache.state, self._cache.round
            if state is None or (self.world is not None and current and current.generation != self.world.generation):
                return
            closed = replace(state, phase=CLOSED, reason=reason, cause="", node=self.node.id, time=time.time())
            conditions = [self._state_as_seen(), version(self._keys.node(self.node.id)) > 0]
            result = await self._txn(conditions, [Put(self._keys.state, closed.encode()), *self._leftovers()])
            if result.succeeded:
                await self._cache.reached(result.revision)
            else:
                await self._registration.wait()
                await self._cache.refresh()

    # -- what the store holds

    def _registered(self, result: TxnResult) -> None:
        calls_at = 3 + len(self._keys.record.parts)
        self._calls.load(Sparse.items(result.results[calls_at:]), result.revision)
        self._cache.load(Sparse.items(result.results[3:calls_at]), result.revision)

    def _lost_lease(self) -> None:
        self._election.lost_lease()
        self._election.postpone_expiry()

    def _outage(self) -> None:
        self._election.postpone_expiry()

    def _on_calls(self, changes: Sequence[Event]) -> None:
        self._election.on_arbiter(self._calls.get(self._keys.arbiter))
        self._wake()

    async def _txn(self, compares: Sequence[Compare], then: Sequence[Operation]) -> TxnResult:
        return await until_answered(lambda: self._control.txn(compares, then))

    def _state_as_seen(self) -> Compare:
        return mod_revision(self._keys.state) == self._cache.state_revision

    # -- may this node take part?

    async def _check_run(self) -> None:
        """Reuse a run that is closed, or has other limits, if it has no nodes any more."""
        limits = self._limits
        while (state := self._cache.state) is not None:
            revision = self._cache.state_revision
            if state.phase != CLOSED and (state.min_nodes, state.max_nodes) == limits:
                return
            if await self._is_in_use(state, revision):
                if state.phase == CLOSED:
                    raise RunClosed(self.config.run_id, state.reason)
                raise self._conflict(state)
            phase = GATHERING if state.phase == CLOSED else BROKEN
            anew = State(
                state.generation, phase, "started anew", min_nodes=limits[0], max_nodes=limits[1], time=time.time()
            )
            put = Put(self._keys.state, anew.encode())
            # If a generation has begun meanwhile, the state has changed, and this is decided again.
            result = await self._txn([mod_revision(self._keys.state) == revision], [put, *self._leftovers()])
            if result.succeeded:
                await self._cache.reached(result.revision)
            else:
                await self._cache.refresh()

    @property
    def _limits(self) -> tuple[int, int]:
        return self.config.min_nodes, self.config.max_nodes

    def _conflict(self, state: State) -> RunConflict:
        ours = f"{self.config.min_nodes}:{self.config.max_nodes}"
        return RunConflict(self.config.run_id, f"{state.min_nodes}:{state.max_nodes}", ours)

    async def _is_in_use(self, state: State, revision: int) -> bool:
        """Return whether the run has nodes, or others arrived before this one: of two new nodes only one reuses the
        run."""
        found = (await self._txn((), [GetRange(self._keys.nodes, prefix=True)])).results[0]
        own = self._keys.node(self.node.id).encode()
        others = [item for item in found if item.lease and item.key != own]
        if state.phase == CLOSED:
            return any(item.create_revision <= revision for item in others)
        mine = next((item.create_revision for item in found if item.key == own), found.revision)
        return any(item.create_revision < mine or _has_limits(item, state) for item in others)

    # -- worlds

    async def next_world(self, timeout_s: float | None = None, *, spent_s: float = 0.0) -> World:
        """Declare that everything of earlier worlds is stopped here, and wait for the next world with this node.

        Arguments:
            timeout_s: time to wait for the minimum number of nodes; None: ``join_timeout_s``. While others run without
                this node (it is a standby), the time does not count; it starts again when they stop.
            spent_s: how much of that time has already passed, as for ``open``.

        Raises:
            RunClosed: the run is closed.
            JoinTimeout: too few nodes came; this one has left.
            StatusError: the store refused; the client is closed.
        """
        limit_s = self.config.join_timeout_s if timeout_s is None else timeout_s
        self._deadline = self._loop.time() + limit_s - spent_s
        try:
            while True:
                async with asyncio.timeout_at(self._deadline):
                    await self._registration.declare(self._first_possible())
                world = await self._formed(limit_s)
                if world is not None:
                    self._registration.starts(world.generation)
                    self.world = world
                    return world
        except TimeoutError:
            why = self._why_not()
            await self._deregister()
            raise JoinTimeout(self.config.run_id, limit_s, why) from None

    def _first_possible(self) -> int:
        """Return the first generation that may include this node, which runs nothing now.

        A generation that began between ``open`` and ``next_world`` includes this node, and waits for it.
        """
        current, started = self._cache.round, self.world.generation if self.world is not None else 0
        if current is None or not self._is_member or self._may_start(current):
            return started + 1
        return max(current.generation, started) + 1

    def _may_start(self, current: GenerationRecord) -> bool:
        """Return whether a generation with this node still lasts, and this node was registered before it began."""
        state, started = self._cache.state, self.world.generation if self.world is not None else 0
        is_whole = state is not None and state.phase == RUNNING and state.generation == current.generation
        was_there = self._registration.was_there(self._cache.round_revision)
        return is_whole and was_there and current.generation >= max(self.node.want, started + 1)

    async def _formed(self, limit_s: float) -> World | None:
        """Wait for a world that this node may start; None: one began and ended without it, so declare again."""
        while True:
            state, current = self._cache.state, self._cache.round
            if self._left:
                raise RunClosed(self.config.run_id, "this node has left")
            if self._cache.end is not None:
                raise self._cache.end
            if state is not None and state.phase == CLOSED:
                raise RunClosed(self.config.run_id, state.reason)
            if state is not None and (state.min_nodes, state.max_nodes) != self._limits:
                raise self._conflict(state)  # another job reused the run id while this node was out of reach
            if current is not None and current.generation >= self.node.want and self._is_member:
                # If not, the run continues without this node, which will declare again that it runs nothing.
                return self._world(current) if self._may_start(current) else None
            self._report_progress()
            if self._is_standby:
                await self._next_change(None)
                self._deadline = self._loop.time() + limit_s  # the time counts from when the others stop running
            else:
                await self._next_change(self._deadline)

    def _world(self, current: GenerationRecord) -> World:
        index = self._cache.roster.places[self.node.id]
        return World(self.config.run_id, current.generation, current.members, index, self._cache.round_revision)

    @property
    def _is_member(self) -> bool:
        """Whether this node is in the current generation."""
        return self.node.id in self._cache.roster.places

    @property
    def _is_standby(self) -> bool:
        """Whether others run, and this node waits for a place."""
        state = self._cache.state
        return state is not None and state.phase == RUNNING and not self._is_member

    def _why_not(self) -> str:
        state = self._cache.state
        if self._cache.damage:
            return self._cache.damage
        if state is None or not self._registration.registered.is_set():
            return "the store cannot be reached"
        if state.waits_for:
            return f"it waits for {state.waits_for}"
        because = f" ({state.reason})" if state.reason else ""
        if state.joined >= state.min_nodes:
            return f"{state.joined} nodes are present, but others have not come back{because}"
        return f"{state.joined} of at least {state.min_nodes} nodes are present{because}"

    # -- state, for any thread

    @property
    def node(self) -> Node:
        """This node, as registered."""
        return self._registration.node

    def _seen(self) -> tuple[RecordCache, World | None]:
        return self._cache, self.world

    # -- what members tell each other

    async def report(self, fault: Fault) -> None:
        """Record a fault, which ends the current world for all nodes at once. Does nothing if the world has ended.

        Raises:
            StatusError: the store refused.
        """
        world = self.world
        if world is None or fault.generation != world.generation:
            return
        put = Put(self._keys.faults(world.generation) + fault.key, fault.encode())
        await self._txn(world.fence.conditions, [put])

    async def publish(self, value: str) -> None:
        """Publish a value, such as the address of a store, to all members of the current world; the last value counts.

        Raises:
            GenerationOver: the world has ended.
            StatusError: the store refused.
        """
        world = self._present()
        result = await self._txn(world.fence.conditions, [Put(self._keys.boot(world.generation), value)])
        if not result.succeeded:
            raise GenerationOver(world.run_id, world.generation)

    async def published(self, timeout_s: float | None = None) -> str:
        """Wait for the value published in the current world, and return it.

        Raises:
            GenerationOver: the world ended before.
            RunClosed: the run was closed.
            StatusError: the client is closed.
            TimeoutError: nothing came in time.
        """
        world, timeout_s = self._present(), limit(timeout_s, "timeout_s")
        deadline = None if timeout_s is None else self._loop.time() + timeout_s
        while (published := self._calls.get(self._keys.boot(world.generation))) is None:
            state = self._cache.state
            if self.closed or self._left:
                raise RunClosed(world.run_id, state.reason if state is not None else "")
            if self._cache.end is not None:
                raise self._cache.end
            if self.nodes_waiting:
                raise GenerationOver(world.run_id, world.generation, state.reason if state is not None else "")
            try:
                await self._next_change(deadline)
            except TimeoutError:
                where = f"generation {world.generation} of run {world.run_id!r}"
                raise TimeoutError(f"nothing was published in {where} within {timeout_s:g} s") from None
        return published.text

    def _present(self) -> World:
        if self.world is None:
            raise GenerationOver(self.config.run_id, 0, "no generation has begun here yet")
        return self.world

    def on_change(self, callback: Callable[[Participant], None]) -> Callable[[], None]:
        """Call back, on the loop, whenever something about the run changes; return a function that cancels this."""
        return self._callbacks.add(callback)

    def _changed(self) -> None:
        self._wake()
        self._election.look()
        self._callbacks.call(self)

    async def _next_change(self, deadline: float | None) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(future)
        async with asyncio.timeout_at(deadline):
            await future

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _report_progress(self) -> None:
        state, damage = self._cache.state, self._cache.damage
        if self._on_progress is None:
            return
        if damage:
            damage += f"; write it again, or: raftkvctl run delete {self.config.run_id}"
            progress = Progress(0, GATHERING, "", 0, *self._limits, damage)
        elif state is not None:
            waits_for = f"waits for {state.waits_for}" if state.waits_for else ""
            reason = state.left_out.get(self.node.host) or waits_for or state.reason
            joined = len(self._cache.roster.members) if state.phase == RUNNING else state.joined
            progress = Progress(state.generation, state.phase, reason, joined, state.min_nodes, state.max_nodes)
        else:
            return
        if progress != self._reported:
            self._reported = progress
            self._on_progress(progress)


@contextmanager
def explain_outage(kv: Client, run_id: str, timeout_s: float) -> Iterator[None]:
    """Turn an unanswered start into ``ClusterAway``, which says what to do."""
    try:
        yield
    except StatusError as error:
        if not is_transient(error):
            raise
        endpoints = ",".join(endpoint.text for endpoint in kv.scope.core.endpoints)
        raise ClusterAway(run_id, endpoints, timeout_s, error) from None


def waiting(say: Callable[[str], object]) -> OnTrouble:
    """Return a callback that reports once that the start waits for the store."""
    told: list[StatusError] = []

    def tell(error: StatusError | None) -> None:
        if error is not None and not told:
            told.append(error)
            say(f"waits for the cluster: {error}")

    return tell


def _new_node(config: RunConfig, data: Mapping[str, str]) -> Node:
    return Node(
        id=f"{config.host}-{secrets.token_hex(4)}",
        host=config.host,
        address=config.address,
        slots=config.slots,
        topology=config.topology,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        data={**data, HOST_SLOTS: str(config.host_slots)} if config.host_slots else dict(data),
        time=time.time(),
    )


def _has_limits(item: KeyValue, state: State) -> bool:
    """Return whether a node was started with the limits of a state."""
    try:
        node = read(Node, item)
    except RecordError:
        return False
    return (node.min_nodes, node.max_nodes) == (state.min_nodes, state.max_nodes)
