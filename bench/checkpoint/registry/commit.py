"""Row ``commit``: so many ranks prepare, from several processes, and the coordinator commits.

The ranks' files exist already, as it were: what is timed is what the registry adds to the writing of shards. All ranks
prepare at the same moment, which is the worst that they can do.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic

import raftkv.aio
from bench.checkpoint.registry.figures import Figure
from raftkv.checkpoint.aio import Attempt, Claim, Registry
from raftkv.checkpoint.records import FileRecord
from raftkv.client.control.control import ClientControl
from raftkv.client.kv.operations import Compare, Operation
from raftkv.client.kv.txn import txn
from raftkv.client.scope import Space
from raftkv.client.values import TxnResult

PROCESSES = 8
BAR_RANKS, BAR_S = 1_000, 0.5
DIGEST = f"sha256:{'ab' * 32}"


class Measured(ClientControl):
    """A control that knows the size of the largest txn that it has sent."""

    largest_bytes = 0

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        request = txn().when(*compares).then(*then).otherwise(*otherwise).request(Space())
        self.largest_bytes = max(self.largest_bytes, request.ByteSize())
        return await super().txn(compares, then, otherwise)


def files_of(rank: int) -> list[FileRecord]:
    """Two files, as DCP and a data position have."""
    return [FileRecord(f"__{rank}_0.distcp", 1 << 28, DIGEST), FileRecord(f"position-{rank}.json", 120, DIGEST)]


def _prepare_in_process(endpoints: list[str], ranks: range, pipe: Connection) -> None:
    asyncio.run(_prepare(endpoints, ranks, pipe))


async def _prepare(endpoints: list[str], ranks: range, pipe: Connection) -> None:
    """Prepare whenever the parent sends a claim and a step; the first answer says that this process is ready."""
    async with raftkv.aio.connect(endpoints) as kv:
        registry = Registry(kv, "commit")
        while (told := await asyncio.to_thread(pipe.recv)) is not None:
            token, step = told
            attempt = await registry.join(Claim.from_token(token), step)
            pipe.send(None)
            await asyncio.to_thread(pipe.recv)
            await asyncio.gather(*(attempt.prepare(rank, files_of(rank)) for rank in ranks))
            pipe.send(monotonic())


class Ranks:
    """Processes that prepare for many ranks."""

    def __init__(self, endpoints: list[str], world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        share = -(-world_size // PROCESSES)
        self._pipes = []
        self._processes = []
        for number in range(PROCESSES):
            ours, theirs = context.Pipe()
            ranks = range(min(number * share, world_size), min((number + 1) * share, world_size))
            process = context.Process(target=_prepare_in_process, args=(endpoints, ranks, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def tell(self, what: object) -> list[float]:
        """Tell all processes something and wait for their answers."""
        for pipe in self._pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


async def _save(registry: Registry, ranks: Ranks, claim: Claim, step: int, world_size: int) -> tuple[float, float]:
    """Save once; returns the seconds of all prepares, and from the last of them to the commit."""
    attempt: Attempt = await registry.begin(claim, step, world_size=world_size)
    await asyncio.to_thread(ranks.tell, (claim.token, step))
    waiting = asyncio.create_task(attempt.commit(metrics={"loss": 1.0 / step}))
    began = monotonic()
    prepared = max(await asyncio.to_thread(ranks.tell, "go"))
    await waiting
    return prepared - began, monotonic() - prepared


async def measure(endpoints: list[str], world_sizes: Sequence[int], rounds: int) -> list[Figure]:
    """Measure with each number of ranks."""
    found = []
    for world_size in world_sizes:
        with tempfile.TemporaryDirectory() as directory:
            async with raftkv.aio.connect(endpoints) as kv:
                found += await _measure(kv, endpoints, directory, world_size, rounds)
    return found


async def _measure(
    kv: raftkv.aio.Client, endpoints: list[str], directory: str, world_size: int, rounds: int
) -> list[Figure]:
    registry = Registry(kv, "commit", uri=directory)
    control = Measured(kv, is_patient=True)
    registry._means = replace(registry._means, control=control)
    claim = await registry.claim()
    ranks = Ranks(endpoints, world_size)
    try:
        summaries = await registry.lookup.summary("commit")
        step = max((one.latest.step for one in summaries), default=0)
        times = [await _save(registry, ranks, claim, step + number, world_size) for number in range(1, rounds + 1)]
    finally:
        await asyncio.to_thread(ranks.close)
    prepares, commits = (statistics.median(column) for column in zip(*times, strict=True))
    whole = statistics.median(sum(both) for both in times)
    row, bar = f"commit of {world_size:,} ranks", BAR_S if world_size <= BAR_RANKS else None
    return [
        Figure(row, "all prepare at once", round(prepares, 3), "s"),
        Figure(row, "last prepare to commit", round(commits, 3), "s", bar),
        Figure(row, "both", round(whole, 3), "s", bar),
        Figure(row, "commit txn", control.largest_bytes, "bytes"),
    ]
