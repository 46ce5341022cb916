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
import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import raftkv
from bench.report import INK, drawing, keep, machine, names_of, parser_of, write_table
from bench.report import markdown as table_of
from bench.restart_job import BACKENDS, FAULTS, NODES, Backend, Fault, Job, Outcome, Unrecovered, run_trial
from bench.stage import progress
from tests.procs import ETCD, RAFTKV, ROOT, Cluster, data_directory, free_port

# ---- what is shown and kept

RESULTS = ROOT / "bench" / "restart_results.json"
PLOT = ROOT / "docs" / "training" / "restart.png"
COLOURS = {"raftkv": "#2a6f97", "etcd": "#61a5c2", "c10d": "#bc4749", "c10d-tuned": "#e9a178"}


@dataclass(frozen=True)
class Line:
    """One fault with one backend.

    Attributes:
        fault, backend: names.
        median_s, max_s: from the fault to the first allreduce of the next world; None: never.
        rounds_per_fault: None: not known with this rendezvous.
        respawn_s: median until the next workers were started.
        trials: that ended.
        verdict: why there were no more.
        bar_s: median that raftkv aims at.
    """

    fault: str
    backend: str
    median_s: float | None
    max_s: float | None
    rounds_per_fault: float | None
    respawn_s: float | None
    trials: int
    verdict: str = ""
    bar_s: float = 0.0


def show(lines: list[Line]) -> None:
    """Print a table."""
    own = {line.fault: line.median_s for line in lines if line.backend == "raftkv"}
    rows = []
    for line in lines:
        base = own.get(line.fault) if line.backend != "raftkv" else None
        times = f"{line.median_s / base:.1f}x" if base and line.median_s is not None else ""
        seconds = (_seconds(line.median_s, line.verdict), _seconds(line.max_s, ""), _seconds(line.respawn_s, ""))
        rounds = "" if line.rounds_per_fault is None else f"{line.rounds_per_fault:g}"
        rows.append((line.fault, line.backend, *seconds, line.trials, rounds, times))
    headings = ("fault", "rendezvous", "median s", "max s", "respawn s", "trials", "rounds", "beside raftkv")
    print(table_of(headings, rows, texts=2))


def _seconds(value: float | None, verdict: str) -> str:
    return verdict if value is None else f"{value:.2f}"


def write(lines: list[Line], machine: dict[str, Any]) -> None:
    """Keep the results, and draw them."""
    import torch

    about = {**machine, "torch": torch.__version__}
    kept = {"machine": about, "lines": [asdict(line) for line in _merged(lines)]}
    keep(RESULTS, kept)
    publish(kept)


def _merged(lines: list[Line]) -> list[Line]:
    """What was kept, with what was measured now in its place; the faults and backends in the order of the first run."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))["lines"] if RESULTS.exists() else []
    merged = {(line.fault, line.backend): line for line in (Line(**one) for one in kept)}
    merged.update({(line.fault, line.backend): line for line in lines})
    return list(merged.values())


def publish(kept: dict[str, Any]) -> None:
    """Write the table of docs/training/index.md and draw the plot."""
    lines = [Line(**line) for line in kept["lines"]]
    write_table(f"{markdown(lines)}\n\n{_about(kept)}", "restart")
    plot(lines)


def markdown(lines: list[Line]) -> str:
    """A row for each fault, a column for each rendezvous."""
    backends = list(dict.fromkeys(line.backend for line in lines))
    rows = []
    for fault in dict.fromkeys(line.fault for line in lines):
        found = {line.backend: line for line in lines if line.fault == fault}
        cells = [_cell(found.get(backend)) for backend in backends]
        own = found.get("raftkv")
        rounds = "" if own is None or own.rounds_per_fault is None else f"{own.rounds_per_fault:g}"
        rows.append((fault, *cells, rounds))
    return table_of(("fault", *backends, "new generations of raftkv"), rows)


def _cell(line: Line | None) -> str:
    if line is None:
        return "-"
    if line.median_s is None:
        return line.verdict or "never"
    text = f"{line.median_s:.2f} s (max {line.max_s:.2f})"
    return f"**{text}**" if line.backend == "raftkv" else text


def _about(kept: dict[str, Any]) -> str:
    trials = max(Line(**line).trials for line in kept["lines"])
    machine = kept["machine"]
    return (
        f"Seconds from the fault to the first allreduce of the next world: median (and longest) of up to {trials} "
        f"trials. Three members, three agents with a worker each, on {machine['cores']} shared cores, fsync on, gloo, "
        f"torch {machine['torch']}, lease_ttl=1, {machine['date']}."
    )


def plot(lines: list[Line]) -> None:
    """Bars of seconds; a job that did not come back has no bar, but a cross and the reason."""
    faults = list(dict.fromkeys(line.fault for line in lines))
    backends = list(dict.fromkeys(line.backend for line in lines))
    by_fault = {fault: [line for name in backends for line in lines if (line.fault, line.backend) == (fault, name)]
                for fault in faults}  # fmt: skip
    place, ticks = 0.0, []
    with drawing(PLOT, "From a fault to training again", 0.27 * len(lines) + 0.16 * len(faults) + 1.5) as axes:
        for found in by_fault.values():
            ticks.append(place + (len(found) - 1) / 2)
            for line in found:
                colour = COLOURS.get(line.backend)
                axes.barh(place, line.median_s or 0.0, 0.82, color=colour)
                if line.median_s is None:
                    axes.plot(0.06, place, "x", color=colour, markersize=5, markeredgewidth=1.6, clip_on=False)
                text = _seconds(line.median_s, line.verdict)
                axes.annotate(text, (line.median_s or 0.06, place), (7, 0), textcoords="offset points", va="center",
                              fontsize=8, color=INK)  # fmt: skip
                place += 1
            place += 0.6
        axes.set_yticks(ticks, faults)
        axes.invert_yaxis()
        axes.set_xlim(0, max(line.median_s or 0.0 for line in lines) * 1.12)
        axes.set_xlabel("seconds from the fault to the first allreduce of the next world (median; x: it never came)")
        for backend in backends:
            axes.barh(0, 0, color=COLOURS.get(backend), label=backend)
        axes.legend(loc="lower right", fontsize=8)


# ---- what is measured

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
