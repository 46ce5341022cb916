"""Checkpoints in memory, simulated: nodes that hold copies, ranks that save there and agree on what they restore.

    python -m tests.checkpoint.sim.memory --seeds 500 --jobs 2
    python -m tests.checkpoint.sim.memory --seed 17 --trace

Nodes are processes of their own: they are killed, freeze and are cut off as all others, and what they lend is damaged
now and then. Bytes go from process to process without sockets; everything else is the code of the product.

P10  what a rank is handed is what it prepared for the attempt that all ranks of its generation restore
P11  a copy is announced under a lease alone, and none is left when its holder is gone
P12  in calm weather the newest commit is restored
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from raftkv.checkpoint.commit.attempt import Attempt
from raftkv.checkpoint.copies.catalogue import Spot, choose
from raftkv.checkpoint.copies.holder import NoRoom, Shelf
from raftkv.checkpoint.digest import of_bytes
from raftkv.checkpoint.errors import (
    AttemptOver,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    FilesChanged,
    RanksMissing,
    StaleStep,
    StorageError,
)
from raftkv.checkpoint.keys import MEMORY
from raftkv.checkpoint.records import Checkpoint, CopyRecord, FileRecord, HolderRecord
from raftkv.errors import StatusError
from tests.virtual_store.command import Simulator

from . import programs
from .__main__ import summary
from .process import Process, SimFence
from .programs import Generation, Program
from .run import Outcome, Settings, Simulation
from .swarm import draw

NODES = 3
COPIES = 1
LIMIT_BYTES = 4000
"""Memory of a node: some attempts of all ranks fit."""
MEETING_S = 5.0
SENDING_S = 3.0
DAMAGED = 0.1
"""Share of the copies that are lent with a wrong byte, before the weather is calm."""


@dataclass(slots=True)
class MemoryGeneration(Generation):
    """A generation whose ranks restore together.

    Attributes:
        offer: what rank 0 names; None: nothing.
        is_offered: it has.
        answers: what each rank was handed; None: nothing.
        is_restored: None: not all have answered.
    """

    offer: Checkpoint | None = None
    is_offered: bool = False
    answers: dict[int, bytes | None] = field(default_factory=dict)
    is_restored: bool | None = None


class MemorySimulation(Simulation):
    """A simulation of checkpoints in memory.

    Attributes:
        shelves: what the living nodes keep, by the names of their processes.
        prepared: bytes that a rank has prepared, by its attempt's uri and its file.
    """

    generations: list[MemoryGeneration]  # type: ignore[assignment]

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.shelves: dict[str, tuple[Process, Shelf]] = {}
        self.prepared: dict[tuple[str, str], bytes] = {}
        self.damage = random.Random(settings.seed)

    def is_broken(self, generation: Generation) -> bool:
        return super().is_broken(generation) or not all(process.alive for process in generation.processes)

    def make_generation(self, number: int, revision: int, size: int) -> Generation:
        return MemoryGeneration(number, revision, 2 + self.settings.seed % 2)  # as many ranks restore as have saved

    def program_of(self, generation: Generation, rank: int) -> Program:
        assert isinstance(generation, MemoryGeneration)
        return rank_of(generation, rank)

    def _crew(self) -> None:
        self.crews["collector0"] = (programs.collect, "job")
        self.crews["watcher0"] = (programs.watch(self.told[0]), "job")
        for number in range(NODES):
            self.crews[f"node{number}"] = (hold, "job")

    def intrude(self) -> bool:
        self._start("intruder", intrude)
        return True

    def _end(self) -> None:
        if self.violation is None:
            self.begin_generation()
            last = self.generations[-1]
            deadline = self.scheduler.now + 30.0
            while self.violation is None and last.is_restored is None and self.scheduler.now < deadline:
                self.pass_time(1.0)
            if not last.is_restored:
                self.checker.fail("P12", f"nothing is restored in calm weather: {last.offer}, {last.answers}")
        super()._end()
        left = [key.decode() for key in self.cluster.store.items if b"/copy/" in key or b"/holder/" in key]
        if left:
            self.checker.fail("P11", f"copies are left: {left}")

    async def lend(self, process: Process, copy: CopyRecord, size_bytes: int) -> memoryview:
        """Some bytes are damaged on the way."""

        async def read(shelf: Shelf) -> bytes:
            held = shelf.held.get(copy.digest)
            if held is None or held.size_bytes != size_bytes:
                raise NoRoom("it is not here")
            return bytes(held.memory[:size_bytes])

        data = bytearray(await across(process, copy.holder, read))
        if not self.is_calm and self.damage.random() < DAMAGED:
            data[self.damage.randrange(len(data))] ^= 1
        return memoryview(data)

    def handed(self, generation: MemoryGeneration, rank: int, data: bytes | None) -> None:
        """A rank has its state, or nothing."""
        generation.answers[rank] = data
        if len(generation.answers) < generation.size:
            return
        answers = [generation.answers[each] for each in range(generation.size)]
        generation.is_restored = None not in answers
        for each, answer in enumerate(answers):
            offer = generation.offer
            if generation.is_restored and offer and answer != self.prepared.get((offer.uri, f"rank-{each}")):
                self.checker.fail("P10", f"rank {each} was handed {answer!r} for {offer.uri}")


def simulation_of(process: Process) -> MemorySimulation:
    return cast(MemorySimulation, process.simulation)


# ---- nodes


async def hold(process: Process) -> None:
    """Keep copies, as the agent of a node."""
    simulation = simulation_of(process)
    host = process.name.partition("#")[0]
    record = HolderRecord(process.name, host, "10.0.0.1:1", "0" * 64, host)
    shelf = Shelf(process.registry.control, "job", record, limit_bytes=LIMIT_BYTES, ttl_s=2)
    await shelf.open()
    simulation.shelves[process.name] = process, shelf
    while True:
        await process.pause(1.0, 2.0)


async def across(process: Process, holder: str, work: Callable[[Shelf], Any]) -> Any:
    """Have a node do something, over a network that may lose it.

    Raises:
        StorageError: it did not, or said no.
    """
    simulation = simulation_of(process)
    found = simulation.shelves.get(holder)
    if found is None or not found[0].alive:
        raise StorageError(f"{holder}: connection refused")
    node, shelf = found
    delay_s = process.random.uniform(0.0, 0.05)
    answer: list[Any] = []

    async def there() -> None:
        try:
            answer.append(await work(shelf))
        except (NoRoom, StatusError, TimeoutError) as error:
            answer.append(StorageError(f"{holder}: {error}"))

    simulation.scheduler.after(delay_s, lambda: node.alive and node.loop.create_task(there()))
    deadline = process.loop.time() + SENDING_S
    while not answer and process.loop.time() < deadline:
        await process.pause(0.02, 0.1)
    if not answer or isinstance(answer[0], Exception):
        raise answer[0] if answer else StorageError(f"{holder} does not answer")
    return answer[0]


async def put_copies(process: Process, attempt: Attempt, rank: int) -> FileRecord:
    """Hand a rank's state to some nodes."""
    record, simulation = attempt.record, simulation_of(process)
    data = f"{attempt.uri} of rank {rank}, drawn {process.random.random()}".encode()
    file = FileRecord(f"rank-{rank}", len(data), of_bytes(data))
    simulation.prepared[attempt.uri, file.name] = data
    secret = await attempt.offer(file)
    wanted = 1 + COPIES
    for holder in choose(await process.registry.holders(), f"node{rank % NODES}", Spot(f"node{rank % NODES}")):
        copy = CopyRecord(
            MEMORY, record.step, record.generation, record.number, file.name, file.digest, len(data), holder.holder,
            holder.host, holder.address, holder.token, holder.topology,
        )  # fmt: skip

        async def keep(shelf: Shelf, copy: CopyRecord = copy) -> bool:
            await shelf.check_offered(copy, secret)
            if shelf.has(copy.digest, copy.size_bytes):
                await shelf.add(copy, None)
                return True
            memory = await shelf.take_room(len(data), copy.generation)
            memory[: len(data)] = data
            await shelf.add(copy, memory)
            return True

        if wanted:
            try:
                wanted -= await across(process, holder.holder, keep)
            except StorageError as error:
                process.say(f"{error}")
    if wanted > COPIES:
        raise StorageError("no node keeps it")
    return file


# ---- ranks

UNSAVED = (RanksMissing, StaleStep, CheckpointExists, StorageError, FilesChanged)


def rank_of(generation: MemoryGeneration, rank: int) -> Program:
    """Return the program of a rank."""

    async def program(process: Process) -> None:
        process.world_revision = generation.revision
        registry = process.registry
        process.claim = await registry.claim_run(generation.number, generation.revision, SimFence(generation.revision))
        if rank == 0:
            await programs._resume(process)
            try:
                generation.offer = await registry.latest(MEMORY)
            except CheckpointNotFound:
                generation.offer = None
            generation.is_offered = True
        restored = await _restore(process, generation, rank)
        if rank == 0:
            if not restored:
                await registry.forget_memory(process.claim)
            await _coordinate(process, generation, generation.offer.step if restored and generation.offer else 0)
        else:
            await _follow(process, generation, rank)

    return program


async def _restore(process: Process, generation: MemoryGeneration, rank: int) -> bool:
    simulation = simulation_of(process)
    deadline = process.loop.time() + MEETING_S
    while not generation.is_offered and process.loop.time() < deadline:
        await process.pause(0.01, 0.1)
    data = None
    if generation.offer is not None:
        try:
            data = bytes(await process.registry.fetch(generation.offer, f"rank-{rank}", to=f"node{rank % NODES}"))
        except CheckpointError as error:
            process.say(f"is handed nothing: {error}")
    simulation.handed(generation, rank, data)
    while generation.is_restored is None:
        if process.loop.time() > deadline:
            raise TimeoutError("a rank is missing")
        await process.pause(0.01, 0.1)
    return generation.is_restored


async def _coordinate(process: Process, generation: Generation, step: int) -> None:
    while True:
        step += 10
        await process.pause(0.05, process.simulation.settings.train_s)
        await _save(process, generation, step)


async def _save(process: Process, generation: Generation, step: int) -> None:
    registry, claim, checker = process.registry, process.claim, process.simulation.checker
    assert claim is not None
    try:
        attempt = await registry.begin(claim, step, kind=MEMORY, world_size=generation.size)
    except (CheckpointExists, StaleStep):
        return
    generation.step = step
    try:
        file = await put_copies(process, attempt, 0)
        await attempt.prepared(process.random.choice((10.0, 3.0)), but=[0])
        await programs.prepare(process, attempt, 0, [file])
        checker.acknowledged(await attempt.commit())
    except UNSAVED as error:
        if await attempt.abort(str(error)):
            checker.is_over(registry.run_id, attempt.record)
    except AttemptOver:
        checker.is_over(registry.run_id, attempt.record)


async def _follow(process: Process, generation: Generation, rank: int) -> None:
    last = -1
    assert process.claim is not None
    while True:
        while generation.step == last:
            await process.pause(0.02, 0.06)
        last = generation.step
        try:
            attempt = await process.registry.join(process.claim, last, kind=MEMORY, timeout_s=3.0)
            file = await put_copies(process, attempt, rank)
            await programs.prepare(process, attempt, rank, [file])
        except AttemptOver:
            process.simulation.checker.is_over(process.registry.run_id, attempt.record)
        except (CheckpointExists, TimeoutError, StorageError):
            continue


async def intrude(process: Process) -> None:
    """Claim the run from outside, and save a later step for as many ranks, as a program that was started by hand."""
    registry = process.registry
    process.claim = claim = await registry.claim()
    await programs._resume(process)
    before = await registry.latest(MEMORY)
    attempt = await registry.begin(claim, before.step + 5, kind=MEMORY, world_size=before.world_size)
    try:
        for rank in range(before.world_size):
            await programs.prepare(process, attempt, rank, [await put_copies(process, attempt, rank)])
        process.simulation.checker.acknowledged(await attempt.commit())
    except UNSAVED:
        await attempt.abort("it could not be saved")


def draw_memory(seed: int) -> Settings:
    """The settings that a seed stands for."""
    return replace(draw(seed), is_memory=True)


def run_memory_seed(seed: int) -> Outcome:
    """Simulate a seed."""
    return MemorySimulation(draw_memory(seed)).play()


main = Simulator(
    "tests.checkpoint.sim.memory", "simulated checkpoints in memory", draw_memory, run_memory_seed, summary
).main

if __name__ == "__main__":
    sys.exit(main())
