"""An agent as torchrun's: it asks for a world, runs workers in it, stops them when told to, and asks again.

Owns nothing of the rendezvous: the class under test is opened over a simulated way to the cluster, on the loop of one
simulated machine. Workers are entries of a set; stopping them takes a random time, and a frozen machine does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from raftkv.client.operations import Compare, Operation, Put
from raftkv.client.scope import to_bytes
from raftkv.client.values import Event, TxnResult
from raftkv.errors import RaftKVError, StatusError
from raftkv.training.config import RunConfig
from raftkv.training.errors import JoinTimeout, RunClosed, RunConflict
from raftkv.training.records import EXIT, Fault, RunKeys, State
from raftkv.training.rendezvous import participant as rendezvous
from raftkv.training.rendezvous.participant import Participant
from raftkv.training.rendezvous.world import RecordCache
from tests.virtual_store.network import Link, SimControl

if TYPE_CHECKING:
    from raftkv.training.rendezvous.world import World

    from .checkers import RunChecker


@dataclass(frozen=True, slots=True)
class Habits:
    """How agents behave.

    Attributes:
        poll_s: how often they look whether they are wanted.
        stop_s: shortest and longest time to stop the workers.
        fenced_write: chance at each look that a worker writes something with the fence of its generation.
        barrier_s: how long one whose workers ended well stays for the others.
    """

    poll_s: float = 0.1
    stop_s: tuple[float, float] = (0.0, 0.3)
    fenced_write: float = 0.05
    barrier_s: float = 5.0


class EarlierCache(RecordCache):
    """The records as versions before ``Head`` follow them: each ``round`` comes by the watch, with all members."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._watched = self._interval

    def _lead_on(self, events: Sequence[Event]) -> bool:
        return True


class EarlierControl(SimControl):
    """The way of such a version to the cluster: its states are no heads."""

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """Implement ``Control.txn``."""
        earlier = [
            replace(one, value=State.decode(to_bytes(one.value)).encode())
            if isinstance(one, Put) and str(one.key).endswith("/state")
            else one
            for one in then
        ]
        return await super().txn(compares, earlier, otherwise)


class EarlierParticipant(Participant):
    """A participant of a version before ``Head``."""

    def __init__(self, *arguments: Any) -> None:
        with mock.patch.object(rendezvous, "RecordCache", EarlierCache):
            super().__init__(*arguments)


class Agent:
    """One incarnation of an agent on one machine.

    Attributes:
        workers: (generation, rank) of those that run.
        finished_generation: the last in which its workers ended well; 0: none.
        last_generation: of the last world it was given; 0: none.
        exited: why it is gone; empty: it is there.
        told: it has seen that its generation is over.
        fails: its workers are to fail at the next look.
        finishes: its workers are to end well at the next look.
        leaves: it is to go at the next look, as after SIGTERM, without an end of the run.
        is_earlier: it runs a version that knows no heads of generations.
    """

    def __init__(
        self,
        number: int,
        link: Link,
        checker: RunChecker,
        config: RunConfig,
        habits: Habits,
        *,
        is_earlier: bool = False,
    ) -> None:
        self.number = number
        self.is_earlier = is_earlier
        self.name = f"{config.host}#{number}"
        self.link = link
        self.checker = checker
        self.config = config
        self.habits = habits
        self.random = random.Random(link.random.random())
        self.participant: Participant | None = None
        self.workers: set[tuple[int, int]] = set()
        self.world: World | None = None
        self.finished_generation = 0
        self.last_generation = 0
        self.exited = ""
        self.told = False
        self.leaving = False
        self.waiting = False
        self.fails = False
        self.finishes = False
        self.leaves = False
        self.calm_since = 0.0
        self._writes = 0
        checker.agents[number] = self
        link.loop.create_task(self._main())

    @property
    def alive(self) -> bool:
        """It is there, frozen or not."""
        return not self.exited

    @property
    def connected(self) -> bool:
        """It runs and can reach the cluster."""
        return self.alive and not self.link.loop.frozen and self.link.open

    def kill(self, reason: str = "killed") -> None:
        """It and its workers are gone; the kernel closes their connections."""
        self.checker.say(f"{self.name} {reason}")
        self.link.loop.crash()
        self.link.hang_up()
        self.workers.clear()
        self.exited = reason

    # ---- its life

    async def _main(self) -> None:
        try:
            participant = self.participant = await self._open()
            self.exited = await self._serve(participant)
        except RunClosed:
            self.exited = "closed"
        except RunConflict:
            self.exited = "conflict"
        self.checker.say(f"{self.name} exits: {self.exited}")
        self.workers.clear()

    async def _open(self) -> Participant:
        while True:
            try:
                kinds = (EarlierControl, EarlierParticipant) if self.is_earlier else (SimControl, Participant)
                return await kinds[1].start(kinds[0](self.link), self.config, data={"agent": str(self.number)})
            except StatusError as error:
                self.checker.say(f"{self.name} cannot open: {error}")
                await asyncio.sleep(0.5)

    async def _serve(self, participant: Participant) -> str:
        while True:
            world = await self._next_world(participant)
            if world is None:
                await self._leave(participant)
                return "gave up"
            if isinstance(world, str):
                await self._leave(participant)
                return world
            self._start(world)
            how = await self._monitor(participant, world)
            self.leaving = True
            await self._stop_workers()
            self.leaving = False
            if how == "finished":
                await self._finish(participant, world)
            if how in ("finished", "left"):
                await self._leave(participant)
                return how

    async def _next_world(self, participant: Participant) -> World | str | None:
        self.waiting = True
        try:
            while True:
                try:
                    return await participant.next_world()
                except StatusError as error:
                    self.checker.say(f"{self.name} next_world: {error}")
                    await asyncio.sleep(0.3)
        except RunClosed:
            return "closed"
        except RunConflict:
            return "conflict"
        except JoinTimeout:
            return None
        finally:
            self.waiting = False

    def _start(self, world: World) -> None:
        self.checker.starts(self, world)
        self.world, self.last_generation, self.told = world, world.generation, False
        self.workers = {(world.generation, world.rank + slot) for slot in range(world.member.slots)}

    async def _monitor(self, participant: Participant, world: World) -> str:
        self.fails = False
        while True:
            await asyncio.sleep(self.habits.poll_s)
            if participant.closed or participant.nodes_waiting > 0:
                self.told = True
                return "wanted"
            if self.fails:
                await self._report(participant, world)
                return "failed"
            if self.finishes or self.leaves:
                return "finished" if self.finishes else "left"
            if self.random.random() < self.habits.fenced_write:
                self.link.loop.create_task(self._write(world))

    async def _report(self, participant: Participant, world: World) -> None:
        self.checker.say(f"{self.name} reports a fault of generation {world.generation}")
        fault = Fault(
            world.generation, world.member.id, host=self.config.host, rank=world.rank, cause=EXIT, exit_code=1
        )
        try:
            await participant.report(fault)
        except RaftKVError as error:
            self.checker.say(f"{self.name} report: {error}")

    async def _stop_workers(self) -> None:
        await asyncio.sleep(self.random.uniform(*self.habits.stop_s))
        self.workers.clear()
        self.checker.say(f"{self.name} has stopped generation {self.last_generation}")

    async def _finish(self, participant: Participant, world: World) -> None:
        """Record it, and stay for a while, as in torch's exit barrier."""
        self.finished_generation = world.generation
        while True:
            try:
                await participant.finish()
            except StatusError:
                await asyncio.sleep(0.3)
            else:
                break
        over = asyncio.Event()
        cancel = participant.on_change(lambda one: over.set() if one.closed or one.nodes_waiting else None)
        if not (participant.closed or participant.nodes_waiting):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), self.habits.barrier_s)
        cancel()

    async def _leave(self, participant: Participant) -> None:
        try:
            await participant.leave()
        except StatusError as error:
            self.checker.say(f"{self.name} leave: {error}")

    # ---- what its workers do, and a zombie's go on doing

    async def _write(self, world: World) -> None:
        self._writes += 1
        key = f"{RunKeys(world.run_id).sync(world.generation)}{self.number}-{self._writes}"
        value = json.dumps({"epoch": world.generation, "node": world.member.id})
        try:
            await SimControl(self.link).txn(world.fence.conditions, [Put(key, value)])
        except StatusError:
            return

    def haunt(self) -> None:
        """Write as a worker that does not know that its world is over."""
        if self.world is not None and self.alive:
            self.link.loop.create_task(self._write(self.world))
