"""The time from the death of a rank to the next collective of the surviving ranks, which keep their processes.

    python -m bench.inprocess_recovery [--rows rank,rank0,raft-leader+rank,freeze] [--trials 10]
                                       [--device cuda]

Three ranks (gloo; on `cuda` NCCL) and a cluster of three members with fsync, all on this machine. Each step is an
allreduce of a gradient, a step of SGD, and a pause. A trial kills one rank (SIGKILL; `freeze`: SIGSTOP), and measures
the time until the *last* survivor has completed an allreduce of the new generation, on the clock that all processes
share (CLOCK_MONOTONIC). Then a process is started in place of the killed one; the new generation for it is not
measured.

Each step adds exactly 1 to every weight, and a failed step adds nothing; anything else is a wrong step. On `cuda` all
ranks share the one GPU of this machine, over NCCL's sockets. The exit code is 1 if a step was wrong, if a fault did not
lead to exactly one new generation, or if the median of a killed rank on the CPU is above its bar. The parts of the time
are those of `ElasticGroup.last_recovery` of the slowest survivor.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import signal
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import raftkv
from bench.report import finish, markdown, parser_of
from bench.stage import Worker, leader_of, progress, share_gpu, tell

FAULTS = ("rank", "rank0", "raft-leader+rank", "freeze")
RANKS = 3
GRACE_S = 0.03
BAR_S = 0.15
PATIENCE_S = 180.0
PAUSE_S = 0.005
SETTLE_S = 0.5
WEIGHTS = {"cpu": 1_000, "cuda": 4_000_000}
"""Number of weights. On the GPU it is so large that a fault interrupts an allreduce."""


# ---- a rank


def work(endpoints: str, device: str) -> None:
    """Do steps until killed; report the first allreduce of each generation, and slow steps."""
    gpu = share_gpu(device)
    import torch
    import torch.distributed as dist

    import raftkv.torch
    import raftkv.training

    torch.set_num_threads(1)
    weights = torch.zeros(WEIGHTS[device], device=device)
    optimizer = torch.optim.SGD([weights], lr=1.0)
    weights.grad = torch.zeros_like(weights)
    run = raftkv.training.join(
        "bench", endpoints=endpoints, min_nodes=2, max_nodes=RANKS, expected_nodes=RANKS, disconnect_grace_s=GRACE_S,
        address="127.0.0.1", fault_limit=0,
    )  # fmt: skip

    def share(group: raftkv.torch.ElasticGroup) -> None:
        dist.broadcast(weights, group.source)

    pause, seen = threading.Event(), 0
    backend = "gloo" if gpu is None else "nccl"
    with run, raftkv.torch.ElasticGroup(run, backend, sync=share, device=gpu) as group:
        for step in group.steps(sys.maxsize):
            with step:
                weights.grad.fill_(-1 / group.world_size)
                dist.all_reduce(weights.grad)
                weights.grad.round_()
                optimizer.step()
            is_wrong = not bool((weights == step.number + (step.failure is None)).all())
            facts = {"rank": group.rank, "generation": group.generation, "at": time.monotonic()}
            if is_wrong or (step.failure is None and group.generation != seen):
                parts = asdict(group.last_recovery) if group.last_recovery else {}
                seen = seen if step.failure else group.generation
                tell(**facts, is_wrong=is_wrong, has_failed=step.failure is not None, parts=parts)
            pause.wait(PAUSE_S)


# ---- the driver


class Rank(Worker):
    """A rank's process, and its last reported state."""

    rank = -1
    generation = 0


class Job:
    """The ranks, and a queue of their reports."""

    def __init__(self, endpoints: Sequence[str], device: str) -> None:
        self.wrong = 0
        self.said: queue.Queue[tuple[Rank, dict[str, Any] | None]] = queue.Queue()
        self.ranks: list[Rank] = []
        self._words = ("--work", ",".join(endpoints), "--device", device)

    @property
    def generation(self) -> int:
        """The newest generation that a rank has reported."""
        return max(rank.generation for rank in self.ranks)

    def wait_whole(self) -> None:
        """Wait until all ranks are in one generation, and a moment longer."""
        while len(self.ranks) < RANKS:
            self.ranks.append(Rank("bench.inprocess_recovery", *self._words, said=self.said))
        while len({rank.generation for rank in self.ranks}) != 1 or self.generation == 0:
            self.next_word(PATIENCE_S)
        self.hear_for(SETTLE_S)

    def next_word(self, timeout_s: float) -> tuple[Rank, dict[str, Any]]:
        """Return the next report of a rank, skipping ranks that were ended.

        Raises:
            queue.Empty: no report arrived in time.
        """
        rank, facts = self.said.get(timeout=timeout_s)
        if rank not in self.ranks:
            return rank, {}
        if facts is None:
            raise SystemExit(f"bench: rank {rank.rank} ended with {rank.process.wait()}")
        if not facts["has_failed"]:
            rank.rank, rank.generation = facts["rank"], facts["generation"]
        self.wrong += facts["is_wrong"]
        return rank, facts

    def hear_for(self, seconds: float) -> None:
        """Process reports for a while."""
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while (left := end - time.monotonic()) > 0:
                self.next_word(left)

    def recover(self, victim: Rank, number: int) -> dict[str, Any]:
        """Send a signal to a rank; return the report of the last survivor in the new generation, with the seconds."""
        before, at, slowest = self.generation, time.monotonic(), {}
        self.ranks.remove(victim)
        victim.process.send_signal(number)
        while any(rank.generation <= before for rank in self.ranks):
            rank, facts = self.next_word(PATIENCE_S)
            if rank.generation > before and rank in self.ranks:
                slowest = max(slowest, facts, key=lambda told: told.get("at", 0.0))
        self.hear_for(SETTLE_S)
        victim.end()
        return {**slowest, "seconds": slowest["at"] - at}


def measure(fault: str, trials: int, job: Job, cluster: Any, device: str) -> tuple[list[object], list[str]]:
    """Do all trials of a fault; return its row, and the problems found."""
    seconds, rounds, parts = list[float](), list[int](), defaultdict[str, list[float]](list)
    for number in range(trials):
        job.wait_whole()
        before, member = job.generation, leader_of(cluster) if fault.startswith("raft-leader") else None
        if member is not None:
            member.kill()
        wanted = 0 if fault == "rank0" else RANKS - 1
        victim = next(rank for rank in job.ranks if rank.rank == wanted)
        told = job.recover(victim, signal.SIGSTOP if fault == "freeze" else signal.SIGKILL)
        seconds.append(told["seconds"])
        for name, value in told["parts"].items():
            parts[name].append(value)
        rounds.append(job.generation - before)
        if member is not None:
            member.restart()
        progress(f"{fault} {number + 1}/{trials}: {seconds[-1] * 1000:.0f} ms")
    wrong, job.wrong = job.wrong, 0
    median = statistics.median(seconds)
    shown = [f"{name} {statistics.median(values):.3f}" for name, values in parts.items() if name != "generation"]
    row = [fault, f"{median:.2f} s", f"{max(seconds):.2f} s", f"{statistics.mean(rounds):g}", wrong, ", ".join(shown)]
    bars = (
        (device == "cpu" and fault in ("rank", "rank0") and median > BAR_S, f"{median:.2f} s, the bar is {BAR_S:g} s"),
        (wrong > 0, f"{wrong} wrong steps"),
        (set(rounds) != {1}, f"{rounds} new generations"),
    )
    return row, [f"{fault}: {text}" for is_missed, text in bars if is_missed]


def main() -> None:
    """Measure, print, and exit with 1 if there was a problem."""
    parser = parser_of(__doc__, FAULTS)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--device", default="cpu", choices=tuple(WEIGHTS))
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.device)
        return
    with raftkv.local(size=3, flags=("--log-level", "error")) as cluster:
        job = Job(cluster.endpoints, given.device)
        try:
            found = [measure(fault, given.trials, job, cluster, given.device) for fault in given.rows]
        finally:
            for rank in job.ranks:
                rank.end()
    headings = ("fault", "median", "longest", "new generations", "wrong steps", "parts of it, s")
    finish(markdown(headings, [row for row, _ in found]), [text for _, problems in found for text in problems])


if __name__ == "__main__":
    main()
