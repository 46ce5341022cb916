"""What the registry of checkpoints costs, on three real members with fsync, raftkv beside etcd in one run.

    python -m bench.checkpoint.registry [--rows commit,watch,lookup] [--write]

    commit   many ranks prepare and one commits: seconds, and the size of the txn     bar: 0.5 s for 1,000 ranks
    watch    from a commit to a program that waits for it                             bar: 50 ms
    lookup   every question about 100,000 checkpoints of 100 runs                     bar: 5 ms

The bars are on raftkv alone and machine-checked: the exit code is 1 if one is missed. The members, and the load, share
the cores of one machine; the load average is printed beside the figures.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

import raftkv.aio
from bench.report import latencies_ms, machine, markdown, names_of, parser_of, write_table
from bench.stage import memory_mib, pids_of, progress
from raftkv.checkpoint.aio import Attempt, Claim, Registry
from raftkv.checkpoint.commit.summary import advanced, indexed
from raftkv.checkpoint.keys import TAG, RegistryKeys
from raftkv.checkpoint.records import Checkpoint, FileRecord, Hold, Latest, Reference
from raftkv.client.control import ClientControl
from raftkv.client.kv import txn
from raftkv.client.operations import Compare, Operation, put
from raftkv.client.scope import Space
from raftkv.client.values import TxnResult
from tests.procs import ETCD, RAFTKV, Cluster, Program

# ---- figures with their bars


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one program; ``bar``: what it may be at most; None: it has no bar."""

    row: str
    name: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def is_met(self) -> bool:
        return self.bar is None or self.value <= self.bar


def latencies(row: str, name: str, seconds: Sequence[float], bar_ms: float | None = None) -> list[Figure]:
    """Return p50 and p99 of some seconds, in milliseconds."""
    found = latencies_ms(seconds)
    return [Figure(row, f"{name} {each}", round(found[f"{each}_ms"], 2), "ms", bar_ms) for each in ("p50", "p99")]


def table(found: dict[str, list[Figure]], facts: dict[str, Any]) -> str:
    """Return everything as Markdown; bars are raftkv's."""
    names = list(dict.fromkeys((one.row, one.name, one.unit) for figures in found.values() for one in figures))
    values = {program: {(one.row, one.name): one for one in figures} for program, figures in found.items()}
    lines = []
    for row, name, unit in names:
        cells = [values[program].get((row, name)) for program in found]
        shown = [f"{one.value:,g} {unit}" if one is not None else "-" for one in cells]
        own = values.get("raftkv", {}).get((row, name))
        verdict = ("", "")
        if own is not None and own.bar is not None:
            verdict = (f"{own.bar:g} {unit}", "met" if own.is_met else "MISSED")
        lines.append((row, name, *shown, *verdict))
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    text = markdown(("row", "figure", *found, "bar", ""), lines, texts=2)
    return f"{text}\n\n{facts['cores']} cores, Python {facts['python']}, {facts['date']}; load {load}"


def missed(found: dict[str, list[Figure]]) -> list[str]:
    """Return what raftkv misses."""
    return [
        f"{one.row}: {one.name} {one.value:g} {one.unit}, the bar is {one.bar:g}"
        for one in found.get("raftkv", [])
        if not one.is_met
    ]


# ---- row commit: many ranks prepare at the same moment, the worst case, and the coordinator commits

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


async def measure_commits(endpoints: list[str], world_sizes: Sequence[int], rounds: int) -> list[Figure]:
    """Measure with each number of ranks."""
    found = []
    for world_size in world_sizes:
        with tempfile.TemporaryDirectory() as directory:
            async with raftkv.aio.connect(endpoints) as kv:
                found += await _measure_commit(kv, endpoints, directory, world_size, rounds)
    return found


async def _measure_commit(
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


# ---- row watch: from the call of commit to another process that waits for it

WATCH_BAR_MS = 50.0
PAUSE_S = 0.02


def _wait_in_process(endpoints: list[str], commits: int, pipe: Connection) -> None:
    asyncio.run(_wait(endpoints, commits, pipe))


async def _wait(endpoints: list[str], wanted: int, pipe: Connection) -> None:
    seen = {}
    async with raftkv.aio.connect(endpoints) as kv:
        commits = Registry(kv, "watch").watch()
        await commits.ready()
        pipe.send(None)
        async for commit in commits:
            seen[commit.checkpoint.step] = monotonic()
            if len(seen) == wanted:
                commits.cancel()
    pipe.send(seen)


async def measure_watch(endpoints: list[str], rounds: int) -> list[Figure]:
    """Commit so many times."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    watcher = context.Process(target=_wait_in_process, args=(endpoints, rounds, theirs), daemon=True)
    watcher.start()
    await asyncio.to_thread(ours.recv)
    called, answered = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        async with raftkv.aio.connect(endpoints) as kv:
            registry = Registry(kv, "watch", uri=directory)
            claim = await registry.claim()
            for step in range(1, rounds + 1):
                attempt = await registry.begin(claim, step)
                await attempt.prepare(0, [])
                called[step] = monotonic()
                await attempt.commit(metrics={"loss": 1.0 / step})
                answered[step] = monotonic()
                await asyncio.sleep(PAUSE_S)  # commits in practice do not come one after the other
    seen = await asyncio.to_thread(ours.recv)
    watcher.join()
    return [
        *latencies("watch", "call of commit to watcher", [seen[step] - called[step] for step in called], WATCH_BAR_MS),
        *latencies("watch", "call of commit to its return", [answered[step] - called[step] for step in called]),
    ]


# ---- row lookup: every question, asked of many checkpoints of many runs; larger txns write the records

LOOKUP_BAR_MS = 5.0
OPERATIONS_MAX = 120
AT_ONCE = 32
KIND = "dcp"
TAG_EVERY = 100


def checkpoint_of(run: int, step: int) -> Checkpoint:
    """Return what a commit of 64 ranks writes."""
    choose = random.Random(run * 1_000_003 + step)
    return Checkpoint(
        run_id(run), step, 1, step, KIND, 64, f"/shared/checkpoints/{run_id(run)}/step-{step:012d}.g1.{step}", DIGEST,
        DIGEST, 128, 64 << 28, None, {"loss": choose.random(), "accuracy": choose.random()}, {}, "host:1", 1e9, 30.0,
    )  # fmt: skip


def run_id(run: int) -> str:
    return f"team/job-{run:04d}"


def _records(run: int, count: int) -> list[list[Operation]]:
    """Return the puts of one run, a txn each."""
    keys = RegistryKeys(run_id(run))
    latest: Latest | None = None
    puts: list[Operation] = []
    for step in range(1, count + 1):
        one = checkpoint_of(run, step)
        latest = advanced(latest, one)
        puts += [put(keys.record(KIND, step), one.encode()), *indexed(keys, one)]
        if step % TAG_EVERY == 0:
            reference = Reference(run_id(run), KIND, step)
            puts.append(put(keys.tag(f"tag-{step}"), reference.encode()))
            puts.append(put(keys.hold(KIND, step, TAG, f"tag-{step}"), Hold().encode()))
    if latest is not None:
        puts.append(put(keys.latest(KIND), latest.encode()))
    return [puts[start : start + OPERATIONS_MAX] for start in range(0, len(puts), OPERATIONS_MAX)]


async def _fill(kv: raftkv.aio.Client, runs: int, each: int) -> float:
    began = monotonic()
    slots = asyncio.Semaphore(AT_ONCE)

    async def write(operations: list[Operation]) -> None:
        async with slots:
            await kv.txn().then(*operations).commit(timeout_s=60)

    for run in range(runs):
        async with asyncio.TaskGroup() as group:
            for operations in _records(run, each):
                group.create_task(write(operations))
    return monotonic() - began


async def measure_lookups(
    cluster: Cluster, endpoints: list[str], checkpoints: int, runs: int, rounds: int
) -> list[Figure]:
    """Fill the registry, and ask."""
    row = "lookup"
    async with raftkv.aio.connect(endpoints) as kv:
        took_s = await _fill(kv, runs, checkpoints // runs)
        found = [Figure(row, f"fill with {checkpoints:,}", round(took_s, 1), "s")]
        for name, ask in _questions(kv, runs, checkpoints // runs).items():
            await ask()
            times = []
            for _ in range(rounds):
                began = monotonic()
                await ask()
                times.append(monotonic() - began)
            found += latencies(row, name, times, LOOKUP_BAR_MS)
    memory = max(memory_mib(pid)["VmRSS"] for pid in pids_of(cluster))
    return [*found, Figure(row, "memory of a member", round(memory), "MiB")]


def _questions(kv: raftkv.aio.Client, runs: int, each: int) -> dict[str, Callable[[], Awaitable[object]]]:
    choose = random.Random(7)

    def registry() -> Registry:
        return Registry(kv, run_id(choose.randrange(runs)))

    def step() -> int:
        return choose.randint(1, each)

    def tag() -> str:
        return f"tag-{choose.randint(1, each // TAG_EVERY) * TAG_EVERY}"

    return {
        "latest": lambda: registry().latest(),
        "latest of a kind": lambda: registry().latest(KIND),
        "at a step": lambda: registry().at(step()),
        "tagged": lambda: registry().tagged(tag()),
        "best": lambda: registry().best("loss"),
        "best of a run, 10": lambda: registry().lookup.best(run_id(choose.randrange(runs)), "loss", "max", count=10),
        "best of all runs": lambda: registry().lookup.best_of_all("accuracy", "max"),
        "list of runs": registry().lookup.latest_of_all,
        "last 20 of a run": lambda: registry().checkpoints(newest_first=True, limit=20),
    }


# ---- the command line

PROGRAMS = {"etcd": ETCD, "raftkv": RAFTKV.with_flags("--log-level", "warn")}
SIZE = 3
ROWS = ("commit", "watch", "lookup")
RANKS, ROUNDS = (1, 1000, 10000), 5
COMMITS = 100
CHECKPOINTS, RUNS, QUESTIONS = 100_000, 100, 300


async def measure(program: Program, rows: Sequence[str]) -> list[Figure]:
    """Run the rows with fresh members of a program."""
    found: list[Figure] = []
    with Cluster(program, SIZE) as cluster:
        endpoints = cluster.endpoints
        if "commit" in rows:
            found += await measure_commits(endpoints, RANKS, ROUNDS)
        if "watch" in rows:
            found += await measure_watch(endpoints, COMMITS)
        if "lookup" in rows:
            found += await measure_lookups(cluster, endpoints, CHECKPOINTS, RUNS, QUESTIONS)
    return found


def main() -> int:
    """Run the benchmark."""
    parser, found = parser_of(__doc__), {}
    parser.add_argument("--rows", type=names_of(ROWS), default=ROWS, help="comma-separated")
    parser.add_argument("--write", action="store_true", help="put the table into docs/training/checkpoints.md")
    options = parser.parse_args()
    for name, program in PROGRAMS.items():
        progress(f"{name}: load {os.getloadavg()[0]:.1f}")
        found[name] = asyncio.run(measure(program, options.rows))
    facts = machine()
    print(table(found, facts))
    if options.write:
        write_table(table(found, facts), "registry")
    problems = missed(found)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
