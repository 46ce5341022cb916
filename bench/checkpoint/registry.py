"""The cost of the checkpoint registry, on three real members with fsync, raftkv beside etcd in one run.

    python -m bench.checkpoint.registry [--rows commit,watch,lookup] [--scale 0.01] [--write]

    commit   many ranks prepare at the same moment (the worst case), and one commits    bar: 0.5 s for 1,000 ranks
    watch    from a commit until a waiting program sees it                              bar: 50 ms
    lookup   every kind of query on 100,000 checkpoints of 100 runs                     bar: 5 ms

The bars apply only to raftkv: the exit code is 1 if one is missed. The members and the load share the cores of one
machine, so the load average is printed beside the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, Final

import raftkv.aio
from bench.report import finish, latencies_ms, machine, markdown, parser_of
from bench.stage import Worker, alternate, memory_mib, pids_of, progress, tell
from raftkv.checkpoint.aio import Claim, Registry
from raftkv.checkpoint.commit.summary import advanced, indexed
from raftkv.checkpoint.keys import TAG, RegistryKeys
from raftkv.checkpoint.records import Checkpoint, FileRecord, Hold, Latest, Reference
from raftkv.client.operations import Operation, put
from tests.procs import Cluster, Program

PROCESSES: Final = 8
"""Number of processes in which ranks prepare."""
PAUSE_S: Final = 0.02
"""Pause between two commits of row watch, because commits are never back to back in practice."""
OPERATIONS_MAX: Final = 120
AT_ONCE: Final = 32
KIND: Final = "dcp"
TAG_EVERY: Final = 100
DIGEST: Final = f"sha256:{'ab' * 32}"
COMMIT_BAR_S, WATCH_BAR_MS, LOOKUP_BAR_MS = 0.5, 50.0, 5.0

Rows = dict[str, dict[str, float]]
"""Figures by row; the name of a figure ends with its unit."""


@dataclass(frozen=True)
class Sizes:
    """The numbers of ranks, commits and so on."""

    ranks: tuple[int, ...]
    commits: int
    checkpoints: int
    runs: int
    questions: int
    rounds: int = 5


def bar_of(row: str, name: str) -> float | None:
    """Return the maximum of a figure of raftkv; None: it has no bar."""
    if row == "watch" and "watcher" in name:
        return WATCH_BAR_MS
    if row == "lookup" and name.endswith("ms"):
        return LOOKUP_BAR_MS
    is_commit = name in ("last prepare to commit, s", "both, s")
    return COMMIT_BAR_S if is_commit and row in ("commit of 1 ranks", "commit of 1,000 ranks") else None


def latencies(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 of times in seconds, in milliseconds."""
    found = latencies_ms(seconds)
    return {f"{name} {each}, ms": found[f"{each}_ms"] for each in ("p50", "p99")}


def table(found: dict[str, Rows]) -> tuple[str, list[str]]:
    """Return the results as Markdown, and the missed bars of raftkv."""
    lines, missed = [], []
    for row, figures in found["raftkv"].items():
        for figure, value in figures.items():
            bar, (name, unit) = bar_of(row, figure), figure.rsplit(", ", 1)
            verdict = "" if bar is None else "met" if value <= bar else "MISSED"
            shown = [f"{found[program][row][figure]:,.4g} {unit}" for program in ("etcd", "raftkv")]
            lines.append((row, name, *shown, "" if bar is None else f"{bar:g} {unit}", verdict))
            missed += [f"{row}: {name} {shown[1]}, the bar is {bar:g}"] if verdict == "MISSED" else []
    facts, load = machine(), ", ".join(f"{one:.1f}" for one in os.getloadavg())
    text = markdown(("row", "figure", "etcd", "raftkv", "bar", ""), lines, texts=2)
    return f"{text}\n\n{facts['cores']} cores, Python {facts['python']}, {facts['date']}; load {load}", missed


# ---- row commit


def write_files(directory: Path, ranks: Sequence[int]) -> dict[int, list[FileRecord]]:
    """Write two files for each rank, as for DCP and a data position."""
    directory.mkdir(exist_ok=True)
    names = {rank: (f"__{rank}_0.distcp", f"position-{rank}.json") for rank in ranks}
    for name in chain.from_iterable(names.values()):
        (directory / name).write_bytes(b"x")
    return {rank: [FileRecord(name, 1, DIGEST) for name in both] for rank, both in names.items()}


async def prepare(endpoints: list[str], directory: str, *ranks: int) -> None:
    """Prepare for some ranks when a step and a claim are received, and again on another word."""
    async with raftkv.aio.connect(endpoints) as kv:
        registry = Registry(kv, "commit", uri=directory)
        while line := await asyncio.to_thread(sys.stdin.readline):
            step, _, token = line.partition(" ")
            attempt = await registry.join(Claim.from_token(token.strip()), int(step))
            files = await asyncio.to_thread(write_files, Path(attempt.uri), ranks)
            tell()
            await asyncio.to_thread(sys.stdin.readline)
            await asyncio.gather(*(attempt.prepare(rank, each) for rank, each in files.items()))
            tell(at=monotonic())


def _ask_all(workers: Sequence[Worker], word: str) -> list[dict[str, Any]]:
    """Send a word to all workers, and return their answers."""
    for worker in workers:
        worker.say(word)
    return [worker.answer() for worker in workers]


async def measure_commits(cluster: Cluster, sizes: Sizes) -> Rows:
    """Measure with each number of ranks."""
    found = {}
    for ranks in sizes.ranks:
        with tempfile.TemporaryDirectory() as directory:
            found[f"commit of {ranks:,} ranks"] = await _measure_commit(cluster.endpoints, directory, ranks, sizes)
    return found


async def _measure_commit(endpoints: list[str], directory: str, world_size: int, sizes: Sizes) -> dict[str, float]:
    times: list[tuple[float, float]] = []
    shares = [range(number, world_size, PROCESSES) for number in range(min(PROCESSES, world_size))]
    workers = [_worker("prepare", endpoints, directory, *share) for share in shares]
    try:
        async with raftkv.aio.connect(endpoints) as kv:
            registry = Registry(kv, "commit", uri=directory)
            claim = await registry.claim()
            newest = max((one.latest.step for one in await registry.lookup.summary("commit")), default=0)
            for step in range(newest + 1, newest + 1 + sizes.rounds):
                attempt = await registry.begin(claim, step, world_size=world_size)
                await asyncio.to_thread(_ask_all, workers, f"{step} {claim.token}")
                waiting = asyncio.create_task(attempt.commit(metrics={"loss": 1.0 / step}))
                began = monotonic()
                prepared = max(each["at"] for each in await asyncio.to_thread(_ask_all, workers, "go"))
                await waiting
                times.append((prepared - began, monotonic() - prepared))
    finally:
        for worker in workers:
            worker.end()
    prepares, commits = (statistics.median(column) for column in zip(*times, strict=True))
    both = statistics.median(map(sum, times))
    return {"all prepare at once, s": prepares, "last prepare to commit, s": commits, "both, s": both}


# ---- row watch: from the call of commit to another process that waits for it


async def wait(endpoints: list[str], directory: str, wanted: int) -> None:
    """Report when this process is ready, and when it saw each commit."""
    seen: dict[int, float] = {}
    async with raftkv.aio.connect(endpoints) as kv:
        commits = Registry(kv, "watch", uri=directory).watch()
        await commits.ready()
        tell()
        async for commit in commits:
            seen[commit.checkpoint.step] = monotonic()
            if len(seen) == wanted:
                commits.cancel()
    tell(at=[seen[step] for step in sorted(seen)])


async def measure_watch(cluster: Cluster, sizes: Sizes) -> Rows:
    """Measure a number of commits."""
    watcher = _worker("wait", cluster.endpoints, "", sizes.commits)
    await asyncio.to_thread(watcher.answer)
    called, answered = list[float](), list[float]()
    try:
        with tempfile.TemporaryDirectory() as directory:
            async with raftkv.aio.connect(cluster.endpoints) as kv:
                registry = Registry(kv, "watch", uri=directory)
                claim = await registry.claim()
                for step in range(1, sizes.commits + 1):
                    attempt = await registry.begin(claim, step)
                    await attempt.prepare(0, [])
                    called.append(monotonic())
                    await attempt.commit(metrics={"loss": 1.0 / step})
                    answered.append(monotonic())
                    await asyncio.sleep(PAUSE_S)
        seen = (await asyncio.to_thread(watcher.answer))["at"]
    finally:
        watcher.end()
    ends = {"call of commit to watcher": seen, "call of commit to its return": answered}
    found = [
        latencies(name, [end - begin for begin, end in zip(called, each, strict=True)]) for name, each in ends.items()
    ]
    return {"watch": found[0] | found[1]}


# ---- row lookup: every kind of query on many checkpoints of many runs; larger txns write the records


def checkpoint_of(run: int, step: int) -> Checkpoint:
    """Return the record that a commit of 64 ranks writes."""
    choose = random.Random(run * 1_000_003 + step)
    return Checkpoint(
        run_id(run), step, 1, step, KIND, 64, f"/shared/checkpoints/{run_id(run)}/step-{step:012d}.g1.{step}", DIGEST,
        DIGEST, 128, 64 << 28, None, {"loss": choose.random(), "accuracy": choose.random()}, {}, "host:1", 1e9, 30.0,
    )  # fmt: skip


def run_id(run: int) -> str:
    return f"team/job-{run:04d}"


def _records(run: int, count: int) -> list[list[Operation]]:
    """Return the puts of one run, grouped into txns."""
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


async def measure_lookups(cluster: Cluster, sizes: Sizes) -> Rows:
    """Fill the registry, and run the queries."""
    each, found = sizes.checkpoints // sizes.runs, dict[str, float]()
    async with raftkv.aio.connect(cluster.endpoints) as kv:
        found["fill, s"] = await _fill(kv, sizes.runs, each)
        for name, ask in _questions(kv, sizes.runs, each).items():
            await ask()
            times = []
            for _ in range(sizes.questions):
                began = monotonic()
                await ask()
                times.append(monotonic() - began)
            found |= latencies(name, times)
    found["memory of a member, MiB"] = max(memory_mib(pid)["VmRSS"] for pid in pids_of(cluster))
    return {"lookup": found}


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

ROWS: Final = {"commit": measure_commits, "watch": measure_watch, "lookup": measure_lookups}


def _worker(role: str, endpoints: list[str], directory: str, *numbers: int) -> Worker:
    words = ("--work", role, ",".join(endpoints), directory, *map(str, numbers))
    return Worker("bench.checkpoint.registry", *words)


def main() -> None:
    """Run the benchmark, and exit with 1 if a bar is missed."""
    parser = parser_of(__doc__, list(ROWS), writes="the table of docs/reference/performance.md")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of ranks, commits and checkpoints")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        role, endpoints, directory, *numbers = options.work
        work: Callable[..., Any] = prepare if role == "prepare" else wait
        asyncio.run(work(endpoints.split(","), directory, *map(int, numbers)))
        return
    ranks = tuple(max(1, int(number * options.scale)) for number in (1, 1_000, 10_000))
    sizes = Sizes(ranks, *(max(2, int(number * options.scale)) for number in (100, 100_000, 100, 300)))

    def measure(program: Program) -> Rows:
        progress(f"{program.name}: load {os.getloadavg()[0]:.1f}")
        found: Rows = {}
        with Cluster(program, 3) as cluster:
            for name in options.rows:
                found |= asyncio.run(ROWS[name](cluster, sizes))
        return found

    text, problems = table({name: found for name, (found,) in alternate(1, measure).items()})
    finish(text, problems, "registry" if options.write else "")


if __name__ == "__main__":
    main()
