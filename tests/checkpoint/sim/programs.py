"""What processes of a simulation do: ranks that save, an outside claimant, collectors, readers, watchers, evaluators.

Each is written as a user would write it, on ``Registry`` alone, and tells the checker what it was answered.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from raftkv.checkpoint.commit.attempt import Attempt
from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.commit.manifest import Manifest
from raftkv.checkpoint.digest import of_bytes
from raftkv.checkpoint.errors import AttemptOver, CheckpointExists, CheckpointNotFound, PinLost, RanksMissing, StaleStep
from raftkv.checkpoint.keys import PIN, RegistryKeys
from raftkv.checkpoint.records import Checkpoint, FileRecord, Reference
from raftkv.checkpoint.retention.policy import Best, Policy
from raftkv.errors import StatusError

from .checker import Which
from .process import Process, SimFence

DCP = "dcp"
TENSORS = "safetensors"
Program = Callable[[Process], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class Generation:
    """A generation of the run.

    Attributes:
        number, revision: of it.
        size: ranks.
        step: which is being saved now; -1: unknown.
    """

    number: int
    revision: int
    size: int
    step: int = -1
    processes: list[Process] = field(default_factory=list)


async def write_part(process: Process, attempt: Attempt, rank: int, name: str = "") -> list[FileRecord]:
    """Write what a rank has."""
    files = []
    for number in range(process.random.choice((1, 1, 2, 0))) if not name else [0]:
        file = name or f"{rank}_{number}.bin"
        data = f"{attempt.uri} {file} of {process.name}, drawn {process.random.random()}".encode()
        await process.write(f"{attempt.uri}/{file}", data)
        files.append(FileRecord(file, len(data), of_bytes(data)))
    return files


async def prepare(process: Process, attempt: Attempt, rank: int, files: list[FileRecord]) -> None:
    """Prepare, once or twice."""
    for _ in range(process.random.choice((1, 1, 2))):
        await attempt.prepare(rank, files)
        process.simulation.checker.prepared(process.registry.run_id, attempt.record, rank)


# ---- ranks


def rank_of(generation: Generation, rank: int) -> Program:
    """Return the program of a rank."""

    async def program(process: Process) -> None:
        process.world_revision = generation.revision
        fence = SimFence(generation.revision)
        process.claim = await process.registry.claim_run(generation.number, generation.revision, fence)
        if rank == 0:
            await _resume(process)
            await _coordinate(process, generation)
        else:
            await _follow(process, generation, rank)

    return program


async def _resume(process: Process) -> None:
    """Take over, and load the latest: what it says must be there."""
    assert process.claim is not None
    for taken in await process.registry.take_over(process.claim):
        if taken.checkpoint is None:
            process.simulation.checker.is_over(process.registry.run_id, taken.attempt)
        else:
            process.simulation.checker.acknowledged(taken.checkpoint)


async def _last_step(process: Process) -> int:
    try:
        return (await process.registry.latest()).step
    except CheckpointNotFound:
        return 0


async def _coordinate(process: Process, generation: Generation) -> None:
    step = await _last_step(process)
    while True:
        step += 10
        await process.pause(0.05, process.simulation.settings.train_s)
        if process.random.random() < 0.3:
            process.loop.create_task(_convert(process, step))
        if not await _save(process, generation, step):
            step = max(step, await _last_step(process))


async def _save(process: Process, generation: Generation, step: int) -> bool:
    registry, claim, checker = process.registry, process.claim, process.simulation.checker
    assert claim is not None
    parent = Reference("job", DCP, step - 10) if process.random.random() < 0.3 else None
    try:
        attempt = await registry.begin(claim, step, kind=DCP, world_size=generation.size, parent=parent)
    except (CheckpointExists, StaleStep):
        return False
    generation.step = step
    try:
        files = await write_part(process, attempt, 0)
        limit_s = process.random.choice((10.0, 3.0, 0.5))
        await attempt.prepared(limit_s, but=[0])
        await attempt.check()
        files += await write_part(process, attempt, 0, ".metadata")
        await prepare(process, attempt, 0, files)
        for _ in range(process.random.choice((1, 1, 2))):
            checker.acknowledged(await attempt.commit(metrics={"loss": process.random.choice((0.5, 1.0, 2.0))}))
    except (RanksMissing, StaleStep, CheckpointExists):
        if await attempt.abort("too slow"):
            checker.is_over(registry.run_id, attempt.record)
        return False
    except AttemptOver:
        checker.is_over(registry.run_id, attempt.record)
        return False
    return True


async def _convert(process: Process, step: int) -> None:
    """Save the same step in another form, beside the other ranks: two attempts begin at one moment."""
    registry, claim, checker = process.registry, process.claim, process.simulation.checker
    assert claim is not None
    try:
        attempt = await registry.begin(claim, step, kind=TENSORS)
        await prepare(process, attempt, 0, await write_part(process, attempt, 0))
        if process.random.random() < 0.2 and await attempt.abort("not wanted"):
            checker.is_over(registry.run_id, attempt.record)
            return
        checker.acknowledged(await attempt.commit())
    except (CheckpointExists, StaleStep):
        return
    except Exception as error:
        if not isinstance(error, (StatusError, type(claim.broken()), AttemptOver)):
            raise


async def _follow(process: Process, generation: Generation, rank: int) -> None:
    checker, last = process.simulation.checker, -1
    assert process.claim is not None
    while True:
        while generation.step <= last:
            await process.pause(0.02, 0.06)
        last = generation.step
        try:
            attempt = await process.registry.join(process.claim, last, kind=DCP, timeout_s=3.0)
            await prepare(process, attempt, rank, await write_part(process, attempt, rank))
            checker.acknowledged(await attempt.outcome(10.0))
        except AttemptOver:
            checker.is_over(process.registry.run_id, attempt.record)
        except (CheckpointExists, TimeoutError):
            continue


async def intrude(process: Process) -> None:
    """Claim the run from outside, as a program that a user starts by hand does, and save something."""
    registry, checker = process.registry, process.simulation.checker
    process.claim = claim = await registry.claim()
    await _resume(process)
    attempt = await registry.begin(claim, await _last_step(process) + 5, kind=DCP)
    await prepare(process, attempt, 0, await write_part(process, attempt, 0))
    checker.acknowledged(await attempt.commit())


async def descend(process: Process) -> None:
    """Save a checkpoint of another run that descends from one of the run."""
    registry, checker = process.registry, process.simulation.checker
    process.claim = claim = await registry.claim()
    await _resume(process)
    parent = await registry.lookup.latest("job")
    await process.pause(0.0, 1.0)
    try:
        step = await _last_step(process) + 1
        attempt = await registry.begin(claim, step, kind=DCP, parent=parent.reference)
        await prepare(process, attempt, 0, await write_part(process, attempt, 0))
        child = await attempt.commit()
        checker.acknowledged(child)
        lineage = await registry.lineage(child)
        if lineage[1:2] != [checker.live.get(parent.reference)] and parent.reference not in checker.live:
            checker.fail("P4", f"the parent of {child.reference} is gone: {lineage}")
    except CheckpointNotFound:
        await attempt.abort("the parent is gone")


# ---- the other programs


async def collect(process: Process) -> None:
    """Delete what no rule keeps, again and again."""
    source = process.random
    while True:
        await process.pause(0.2, process.simulation.settings.collect_s)
        best = (Best("loss"),) if source.random() < 0.5 else ()
        last = source.choice((1, 1, 2, 3, 0))
        await process.registry.collect(Policy(keep_last=last, keep_every=0 if last else 1000, keep_best=best))


async def read(process: Process) -> None:
    """Pin the latest, and read all of it, slowly; tag one now and then."""
    registry, source = process.registry, process.random
    while True:
        await process.pause(0.1, 1.5)
        try:
            checkpoint = await registry.latest()
            if source.random() < 0.3:
                await registry.tag(source.choice("ab"), source.choice(await registry.checkpoints(checkpoint.kind)))
            if source.random() < 0.2:
                await registry.untag(source.choice("ab"))
            async with registry.pin(checkpoint, process.name.partition("#")[0], source.choice((1, 5))) as pin:
                await _load(process, checkpoint, pin._grant.id if pin._grant is not None else 0)
        except (CheckpointNotFound, PinLost, IndexError) as error:
            process.say(f"reads nothing: {error}")


async def _load(process: Process, checkpoint: Checkpoint, lease: int) -> None:
    disk, checker = process.disk, process.simulation.checker
    name = f"{process.name.partition('#')[0]}@{lease:x}"
    pin = RegistryKeys("job").hold(checkpoint.kind, checkpoint.step, PIN, name).encode()
    manifest = disk.files.get(f"{checkpoint.uri}/{MANIFEST}")
    checker.loads(checkpoint, MANIFEST, manifest, checkpoint.manifest, pin)
    if manifest is None:
        return
    for _, file in Manifest.decode(manifest).files:
        await process.pause(0.0, 0.4)
        checker.loads(checkpoint, file.name, disk.files.get(f"{checkpoint.uri}/{file.name}"), file.digest, pin)


def watch(told: list[tuple[int, Which]]) -> Program:
    """Return the program of a watcher, which goes on where its last incarnation ended."""

    async def program(process: Process) -> None:
        commits = process.registry.watch(start_revision=told[-1][0] + 1 if told else 2)
        async for commit in commits:
            process.simulation.checker.reported(told, commit.revision, commit.checkpoint)
            if not process.simulation.is_calm:
                await process.pause(0.0, process.random.choice((0.0, 0.1, 1.0)))

    return program


def evaluate(name: str) -> Program:
    """Return the program of an evaluator, which has a metric of its own."""

    async def program(process: Process) -> None:
        registry, source, checker = process.registry, process.random, process.simulation.checker
        while True:
            await process.pause(0.1, 1.0)
            found = await registry.checkpoints()
            if not found:
                continue
            checkpoint = source.choice(found)
            value = float(source.randrange(5))
            values = checker.metrics.setdefault((checkpoint.reference, name), [None])
            values.append(value)
            try:
                after = await registry.set_metrics(checkpoint.step, checkpoint.kind, {name: value})
            except CheckpointNotFound:
                continue
            if after.metrics[name] != value:
                checker.fail("P6", f"{name} of {checkpoint.reference} was acknowledged, and is {after.metrics}")
            values[:] = [value]

    return program
