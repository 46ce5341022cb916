"""Checkpoints in the memory of nodes: the time to restore a state after `kill -9` of a node, and the cost of saving.

    python -m bench.checkpoint.memory [--rows restore,nearest,held,kills] [--size 256MiB] [--kills-s 300] [--seed 1]

Three members of raftkv with fsync and three nodes on this machine, each with agent, holder and rank in one process.
Each state is also held by one other node. No checkpoint has a directory.

    restore   a node is killed and replaced; from the start of the new generation until the slowest rank has its state,
              of which each rank compares the digest                                       bar: 0.5 s
    nearest   a query for the copies of a file, by three ranks at once                     bar: 5 ms (median)
    held      share of the time for which `save` blocks a loop of steps of 0.1 s with a gloo collective, saving every
              10 steps, compared with the same loop without saves                          bar: 5 %
    kills     nodes killed at named points of saves and restores, drawn from the seed; every state is compared byte for
              byte with the state that its rank has saved                                  bar: 0 wrong, stale or mixed

If a bar is missed, the exit status is 1. Members, nodes and other work share the cores, so the load average is printed
beside the figures.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Final

from bench.report import finish, latencies_ms, machine, markdown, parser_of
from bench.stage import progress
from tests.checkpoint.chaos.memory_nodes import NODES
from tests.checkpoint.chaos.memory_trial import MemoryJob
from tests.procs import RAFTKV, Cluster, free_port

ROWS: Final = ("restore", "nearest", "held", "kills")
KILLS_OF_RESTORE: Final = 5
QUESTIONS: Final = 500
STEPS, EVERY, STEP_S = 60, 10, 0.1
RESTORE_BAR_S, NEAREST_BAR_MS, HELD_BAR = 0.5, 5.0, 0.05

Line = tuple[str, str, str, str, str]


def line_of(row: str, what: str, value: float, unit: str, bar: float | None = None) -> Line:
    """Return a line of the table; with a bar, also whether it is met."""
    verdict = "" if bar is None else "met" if value <= bar else "MISSED"
    return row, what, f"{value:,.3g} {unit}".strip(), "" if bar is None else f"{bar:g} {unit}".strip(), verdict


def measure_restore(endpoints: list[str], size_bytes: int) -> list[Line]:
    """Repeatedly kill a node after a successful save."""
    with MemoryJob(endpoints, size_bytes=size_bytes // NODES, run_id="restore", reserve=NODES + 1) as job:
        for number in range(KILLS_OF_RESTORE):
            job.save()
            job.kill_node(number % NODES)
        problems, times, processor = job.tally.problems, job.tally.restore_s, job.tally.processor_s
    what = f"{size_bytes >> 20} MiB in all, {len(times)} kills"
    return [
        line_of("restore", f"state back, median; {what}", statistics.median(times), "s", RESTORE_BAR_S),
        line_of("restore", "the slowest", max(times), "s"),
        line_of("restore", "processor time of all nodes together, median", statistics.median(processor), "s"),
        line_of("restore", "wrong, stale, mixed or lost", len(problems), "", 0),
    ]


def measure_calm(endpoints: list[str], size_bytes: int, rows: list[str]) -> list[Line]:
    """Measure nodes that are not killed."""
    lines = []
    with MemoryJob(endpoints, size_bytes=size_bytes // NODES, run_id="calm", reserve=NODES) as job:
        job.save()
        if "nearest" in rows:
            found = latencies_ms([took_s for times in job.call("ask", QUESTIONS) for took_s in times])
            lines += [
                line_of("nearest", "p50", found["p50_ms"], "ms", NEAREST_BAR_MS),
                line_of("nearest", "p99", found["p99_ms"], "ms"),
            ]
        if "held" in rows:
            job.forget()
            port = free_port()
            without = max(answer["took_s"] for answer in job.call("train", STEPS, 0, STEP_S, port))
            answers = job.call("train", STEPS, EVERY, STEP_S, port)
            held = max(answer["held_s"] / answer["took_s"] for answer in answers)
            slower = max(answer["took_s"] for answer in answers) / without - 1
            lines += [
                line_of(
                    "held", f"{size_bytes >> 20} MiB in all, every {EVERY} steps of {STEP_S} s", held, "", HELD_BAR
                ),
                line_of("held", "the loop is slower by, with all that the processors do beside it", slower, ""),
            ]
    return lines


def measure_kills(endpoints: list[str], limit_s: float, seed: int) -> list[Line]:
    """Kill nodes for some time, with another seed after every hundred kills."""
    deadline = time.monotonic() + limit_s
    kills = restored = lost = 0
    problems: list[str] = []
    while time.monotonic() < deadline:
        with MemoryJob(endpoints, seed=seed) as job:
            while time.monotonic() < deadline and job.tally.kills.total() < 100 and not job.tally.problems:
                job.kill_one()
        tally = job.tally
        kills, restored, lost = kills + tally.kills.total(), restored + tally.restored, lost + tally.lost
        problems += tally.problems
        progress(f"seed {seed}: {dict(tally.kills)}, {tally.restored} restored, {tally.lost} without a copy")
        seed += 1
    for problem in problems:
        print(problem, file=sys.stderr)
    what = f"of {kills} kills; {restored} restored, {lost} had lost or damaged both copies"
    return [line_of("kills", f"wrong, stale or mixed; {what}", len(problems), "", 0)]


def main() -> None:
    """Measure, print a table, and report missed bars."""
    parser = parser_of(__doc__, ROWS)
    parser.add_argument("--size", default="256MiB", help="of the states of all ranks together")
    parser.add_argument("--kills-s", type=float, default=300.0, help="how long nodes are killed")
    parser.add_argument("--seed", type=int, default=1, help="of the kills; the next is printed")
    options = parser.parse_args()
    size_bytes = int(options.size.removesuffix("MiB")) << 20
    lines: list[Line] = []
    with Cluster(RAFTKV, NODES) as cluster:
        if "restore" in options.rows:
            lines += measure_restore(cluster.endpoints, size_bytes)
        if {"nearest", "held"} & {*options.rows}:
            lines += measure_calm(cluster.endpoints, size_bytes, options.rows)
        if "kills" in options.rows:
            lines += measure_kills(cluster.endpoints, options.kills_s, options.seed)
    facts, load = machine(), ", ".join(f"{one:.1f}" for one in os.getloadavg())
    text = markdown(("row", "figure", "raftkv", "bar", ""), lines, texts=2)
    text += f"\n\n{facts['cores']} cores, Python {facts['python']}, {facts['date']}; load {load}"
    finish(text, [" ".join(line[:3]) for line in lines if line[4] == "MISSED"])


if __name__ == "__main__":
    main()
