"""How long a training job stands still after a fault: from the kill to the first allreduce of the next world.

    python -m bench.restart_latency [--backend raftkv,c10d,c10d-tuned] [--fault worker,node,...] [--trials 10] [--write]

Three members of raftkv with fsync, three agents of torchrun (`--nnodes=2:4`, one worker each, gloo) that run
`examples/train_allreduce.py`, all on this machine. `node0` is the node of rank 0, with c10d the one that keeps its
rendezvous; `respawn_s` is the part until the next workers were started: the rest is Python, torch and gloo.

Backends: `raftkv`; `etcd`: raftkv's rendezvous on real etcd 3.5.1, whose leases last 2 s at least; `c10d`: torch's own
with its defaults, one trial; `c10d-tuned`: its store not shared with workers, last call 2 s, keep-alive 1 s x 3. Trials
are given up after 60 s, with c10d after 120 s. `raftkv-nccl`, `c10d-nccl` (tuned): workers on the GPU, by NCCL.

`--write` keeps the results: `bench/restart_results.json`, `docs/training/restart.png`, the table of
`docs/training/index.md`. The
exit status is 1 if anything was wrong: not one round for each fault, a rank twice, a worker in two worlds, an agent
that did not end with 0, keys left over, a median of raftkv's above its bar.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import raftkv
from bench.report import machine, names_of, parser_of
from bench.restart_faults import FAULTS, NODES, Fault, Outcome, run_trial
from bench.restart_job import BACKENDS, Backend, Job, Unrecovered
from bench.restart_report import Line, show, write
from bench.stage import progress
from tests.procs import ETCD, RAFTKV, Cluster, data_directory, free_port

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_BACKENDS = ("raftkv", "c10d", "c10d-tuned")
C10D_TRIALS = {"c10d": 1, "c10d-tuned": 3}
"""At most so many: each may take two minutes."""


def main() -> None:
    """Measure, print and write."""
    options = _parse()
    lines: list[Line] = []
    problems: list[str] = []
    for backend in options.backend:
        for line, wrong in measure(BACKENDS[backend], options.fault, options.trials):
            lines.append(line)
            problems += [f"{backend}: {text}" for text in [*wrong, *_missed(line)]]
    show(lines)
    if options.write:
        write(lines, machine())
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


def _missed(line: Line) -> list[str]:
    """The bar, if it is one of raftkv's medians that misses it; the others' are what they are."""
    if line.backend != "raftkv" or line.median_s is None or line.median_s <= line.bar_s:
        return []
    return [f"{line.fault}: median {line.median_s:.2f} s, the bar is {line.bar_s:g} s"]


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--backend", type=names_of(BACKENDS), default=list(DEFAULT_BACKENDS))
    parser.add_argument("--fault", type=names_of(FAULTS), default=list(FAULTS))
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--write", action="store_true", help="keep what was measured in place of what was kept of it")
    return parser.parse_args()


@dataclass
class _Trials:
    """What the trials of one fault have shown."""

    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    verdict: str = ""


def measure(backend: Backend, faults: list[str], trials: int) -> Iterator[tuple[Line, list[str]]]:
    """All faults with one backend, on one cluster, a fresh job for each; yields each one's line, and what was wrong."""
    count = min(trials, C10D_TRIALS.get(backend.name, trials))
    with ExitStack() as stack:
        cluster = None
        if backend.rdzv == "raftkv":
            program = (ETCD if backend.name == "etcd" else RAFTKV).with_flags("--log-level", "error")
            cluster = stack.enter_context(Cluster(program, size=3))
        directory = data_directory()
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        for name in faults:
            fault = FAULTS[name]
            if fault.needs_cluster and cluster is None:
                continue
            done = _run_job(fault, backend, cluster, directory / name, count)
            yield _line(fault, backend, done), done.problems


def _run_job(fault: Fault, backend: Backend, cluster: Cluster | None, directory: Path, count: int) -> _Trials:
    """A fresh job, and ``count`` times the fault."""
    endpoint = f"127.0.0.1:{free_port()}" if cluster is None else ",".join(cluster.endpoints)
    done = _Trials()
    with Job(backend, endpoint, directory, f"bench-{fault.name.replace('+', '-')}") as job:
        for number in range(NODES):
            job.start(f"n{number}")
        progress(f"{backend.name}, {fault.name}: starting")
        try:
            world = job.wait_world(NODES, 0.0, cap_s=120.0)
        except Unrecovered as error:
            sys.exit(f"{backend.name}, {fault.name}: the job did not start: {error}\n{job.logs()}")
        try:
            for number in range(count):
                progress(f"{backend.name}, {fault.name}: {number + 1} of {count}")
                outcome, world = run_trial(fault, job, cluster, world)
                done.outcomes.append(outcome)
                done.problems += outcome.problems
        except Unrecovered as error:
            done.verdict = str(error)
            if backend.rdzv == "raftkv":
                done.problems.append(f"{fault.name}: {error}\n{job.logs()}")
        else:
            statuses = job.finish()
            if backend.rdzv == "raftkv":
                done.problems += [
                    f"{fault.name}: {name} ended with {got}" for name, got in statuses.items() if got != 0
                ]
                done.problems += [f"{fault.name}: {text}" for text in _left_over(cluster, job.run_id)]
    return done


def _left_over(cluster: Cluster | None, run_id: str) -> list[str]:
    """Keys of the run that should be gone: all but its record, so that generations never go back."""
    if cluster is None:
        return []
    prefix = f"/raftkv/train/{run_id}/"
    with raftkv.connect(cluster.endpoints) as kv:
        names = [item.key.decode().removeprefix(prefix) for item in kv.scan(prefix, prefix=True)]
    return [f"the key {name} is left over" for name in names if name not in ("round", "state")]


def _line(fault: Fault, backend: Backend, done: _Trials) -> Line:
    seconds = [outcome.seconds for outcome in done.outcomes]
    rounds = [outcome.rounds for outcome in done.outcomes]
    respawns = [outcome.respawn_s for outcome in done.outcomes if outcome.respawn_s is not None]
    return Line(
        fault=fault.name,
        backend=backend.name,
        median_s=round(statistics.median(seconds), 3) if seconds else None,
        max_s=round(max(seconds), 3) if seconds else None,
        rounds_per_fault=round(statistics.mean(rounds), 2) if rounds and min(rounds) >= 0 else None,
        respawn_s=round(statistics.median(respawns), 3) if respawns else None,
        trials=len(seconds),
        verdict=done.verdict,
        bar_s=fault.bar_s,
    )


if __name__ == "__main__":
    main()
