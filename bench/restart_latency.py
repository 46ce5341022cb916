"""How long a fault interrupts a training job: from the kill to the first allreduce of the next world.

    python -m bench.restart_latency [--backend raftkv,c10d,c10d-tuned] [--rows worker,node,...] [--trials 10] [--write]

Three members of raftkv with fsync, three agents of torchrun (`--nnodes=2:4`, one worker each, gloo) that run
`examples/train_allreduce.py`, all on this machine. `node0` is the node of rank 0, which with c10d hosts the rendezvous;
`respawn_s` is the part until the next workers were started: the rest is Python, torch and gloo.

Backends: `raftkv`; `raftkv-prefork`: with standby workers; `etcd`: raftkv's rendezvous on real etcd 3.5.1, whose
minimum lease TTL is 2 s; `c10d`: torch's own with its defaults, one trial; `c10d-tuned`: its store not shared with
workers, last call 2 s, keep-alive 1 s x 3. Trials are aborted after 60 s, with c10d after 120 s. `raftkv-nccl`,
`c10d-nccl` (tuned): workers on the GPU, with NCCL.

`--write` stores the results: `bench/restart_results.json`, `docs/training/restart.png`, the table of
`docs/training/index.md`. The exit status is 1 on any problem: not exactly one round for each fault, a rank twice, a
worker in two worlds, an agent with an exit status other than 0, leftover keys, a median of raftkv above its bar.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import raftkv
from bench.report import INK, finish, keep, machine, markdown, names_of, parser_of, plot_bars, write_table
from bench.restart_job import BACKENDS, FAULTS, NODES, Backend, Fault, Job, Outcome, Unrecovered, run_trial
from bench.stage import progress
from tests.procs import ETCD, RAFTKV, ROOT, Cluster, data_directory, free_port

RESULTS = ROOT / "bench" / "restart_results.json"
PLOT = ROOT / "docs" / "training" / "restart.png"
COLOURS = {"raftkv": "#2a6f97", "raftkv-prefork": "#014f86", "c10d": "#bc4749", "c10d-tuned": "#e9a178"}
DEFAULT_BACKENDS = ("raftkv", "c10d", "c10d-tuned")
C10D_TRIALS = {"c10d": 1, "c10d-tuned": 3}
"""Maximum number of trials, because each may take two minutes."""

# ---- output


@dataclass(frozen=True)
class Line:
    """The results of one fault with one backend.

    Attributes:
        fault, backend: names.
        median_s, max_s: from the fault to the first allreduce of the next world; None: never.
        rounds_per_fault: None: unknown with this rendezvous.
        respawn_s: median until the next workers were started.
        trials: number of completed trials.
        verdict: why there were no more trials.
        bar_s: raftkv's target of the median.
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

    @property
    def text(self) -> str:
        """Text of the table cell."""
        if self.median_s is None:
            return self.verdict or "never"
        text = f"{self.median_s:.2f} s (max {self.max_s:.2f})"
        return f"**{text}**" if self.backend == "raftkv" else text


def table(lines: Sequence[Line], facts: dict[str, Any]) -> str:
    """Return the table with a row for each fault and a column for each rendezvous."""
    backends = list(dict.fromkeys(line.backend for line in lines))
    rows = []
    for fault in dict.fromkeys(line.fault for line in lines):
        found = {line.backend: line for line in lines if line.fault == fault}
        rounds = found["raftkv"].rounds_per_fault if "raftkv" in found else None
        cells = (found[each].text if each in found else "-" for each in backends)
        rows.append((fault, *cells, "" if rounds is None else f"{rounds:g}"))
    return (
        f"{markdown(('fault', *backends, 'new generations of raftkv'), rows)}\n\n"
        f"Seconds from the fault to the first allreduce of the next world: median (and longest) of up to "
        f"{max(line.trials for line in lines)} trials. Three members, three agents with a worker each, on "
        f"{facts['cores']} shared cores, fsync on, gloo, torch {facts['torch']}, lease_ttl=1, {facts['date']}."
    )


def plot(lines: Sequence[Line]) -> None:
    """Draw bars of seconds; a job that did not recover has the reason instead of a bar."""
    what = "seconds from the fault to the first allreduce of the next world (median)"
    faults = list(dict.fromkeys(line.fault for line in lines))
    bars = []
    for line in sorted(lines, key=lambda line: faults.index(line.fault)):
        text = line.verdict if line.median_s is None else f"{line.median_s:.2f}"
        bars.append((f"{line.fault}, {line.backend}", line.median_s, text, COLOURS.get(line.backend, INK)))
    plot_bars(PLOT, "From a fault to training again", what, bars)


def write(lines: Sequence[Line], facts: dict[str, Any]) -> list[Line]:
    """Replace the stored results of the measured lines; return all stored lines."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))["lines"] if RESULTS.exists() else []
    merged = {(line.fault, line.backend): line for line in [*(Line(**one) for one in kept), *lines]}
    keep(RESULTS, {"machine": facts, "lines": [asdict(line) for line in merged.values()]})
    return list(merged.values())


# ---- measurement


@dataclass
class Trials:
    """The outcomes of one fault's trials."""

    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    verdict: str = ""

    def line(self, fault: Fault, backend: Backend) -> Line:
        """Return the medians."""
        seconds = [outcome.seconds for outcome in self.outcomes]
        rounds = [outcome.rounds for outcome in self.outcomes]
        respawns = [outcome.respawn_s for outcome in self.outcomes if outcome.respawn_s is not None]
        return Line(
            fault=fault.name,
            backend=backend.name,
            median_s=round(statistics.median(seconds), 3) if seconds else None,
            max_s=round(max(seconds), 3) if seconds else None,
            rounds_per_fault=round(statistics.mean(rounds), 2) if rounds and min(rounds) >= 0 else None,
            respawn_s=round(statistics.median(respawns), 3) if respawns else None,
            trials=len(seconds),
            verdict=self.verdict,
            bar_s=fault.bar_s,
        )


def measure(backend: Backend, faults: Sequence[str], trials: int) -> Iterator[tuple[Line, list[str]]]:
    """Measure all faults with one backend, on one cluster, a fresh job for each; yield each line and its problems."""
    count = min(trials, C10D_TRIALS.get(backend.name, trials))
    with ExitStack() as stack:
        cluster = None
        if backend.rdzv == "raftkv":
            program = (ETCD if backend.name == "etcd" else RAFTKV).with_flags("--log-level", "error")
            cluster = stack.enter_context(Cluster(program, size=3))
        directory = data_directory()
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        for fault in (FAULTS[name] for name in faults):
            if fault.needs_cluster and cluster is None:
                continue
            done = _run_job(fault, backend, cluster, directory / fault.name, count)
            line = done.line(fault, backend)
            if backend.name == "raftkv" and (line.median_s or 0.0) > line.bar_s:
                done.problems.append(f"median {line.median_s:.2f} s, the bar is {line.bar_s:g} s")
            progress(f"{backend.name}, {fault.name}: {line.text}, of it {line.respawn_s} s until processes start")
            yield line, [f"{backend.name}, {fault.name}: {text}" for text in done.problems]


def _run_job(fault: Fault, backend: Backend, cluster: Cluster | None, directory: Path, count: int) -> Trials:
    """Inject a fault ``count`` times into a fresh job."""
    endpoint = f"127.0.0.1:{free_port()}" if cluster is None else ",".join(cluster.endpoints)
    done, problems = Trials(), []
    with Job(backend, endpoint, directory, f"bench-{fault.name.replace('+', '-')}") as job:
        for number in range(NODES):
            job.start(f"n{number}")
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
            problems = [f"{error}\n{job.logs()}"]
        else:
            problems = [f"{name} ended with {status}" for name, status in job.finish().items() if status != 0]
            problems += _left_over(cluster, job.run_id)
    if backend.rdzv == "raftkv":
        done.problems += problems
    return done


def _left_over(cluster: Cluster | None, run_id: str) -> list[str]:
    """Return leftover keys of the run; only its record may stay, so that generation numbers never decrease."""
    if cluster is None:
        return []
    prefix = f"/raftkv/train/{run_id}/"
    with raftkv.connect(cluster.endpoints) as kv:
        names = [item.key.decode().removeprefix(prefix) for item in kv.scan(prefix, prefix=True)]
    return [f"the key {name} is left over" for name in names if name not in ("round", "state")]


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__, list(FAULTS), writes="what was measured in place of what was kept of it")
    parser.add_argument("--backend", type=names_of(BACKENDS), default=list(DEFAULT_BACKENDS))
    parser.add_argument("--trials", type=int, default=10)
    options = parser.parse_args()
    import torch

    facts = {**machine(), "torch": torch.__version__}
    found = [each for name in options.backend for each in measure(BACKENDS[name], options.rows, options.trials)]
    lines, problems = [line for line, _ in found], [text for _, texts in found for text in texts]
    if options.write:
        lines = write(lines, facts)
        write_table(table(lines, facts), "restart")
        plot(lines)  # the last, because it fails without matplotlib
    finish(table(lines, facts), problems)


if __name__ == "__main__":
    main()
