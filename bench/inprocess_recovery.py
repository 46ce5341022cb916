"""From the death of a rank to the next collective of those that are left, which keep their processes.

    python -m bench.inprocess_recovery [--trials 10] [--fault rank,rank0,raft-leader,raft-leader+rank,freeze]
                                       [--device cuda] [--json]

Three ranks (gloo; on `cuda` NCCL) on a cluster of three with fsync, all on this machine. They do steps of one allreduce
of a gradient, a step of SGD, and a pause. A trial kills (SIGKILL; `freeze`: stops) one, and takes the time until the
*last* survivor has completed an allreduce of the new generation, by the clock that all processes share
(CLOCK_MONOTONIC). Then a process is started in its place: a new generation as well, which is not counted. `raft-leader`
alone is to change nothing: its time is the longest step meanwhile.

Each step adds exactly 1 to every weight, and a failed one nothing: whatever else is seen is BAD. On `cuda` all ranks
share the one GPU of this machine, over NCCL's sockets: each says that it is a host of its own, for NCCL takes a GPU
once a host.

`rounds_per_fault` must be 1 (of `raft-leader`: 0). The breakdown is `ElasticGroup.last_recovery` of the slowest
survivor: what is missing to the whole is the time until the broken connection is noticed, and the first allreduce.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import sys
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import raftkv
from bench.report import names_of
from bench.stage import Worker, leader_of, progress, tell

FAULTS = ("rank", "rank0", "raft-leader", "raft-leader+rank", "freeze")
LIMIT_S = 0.15
PATIENCE_S = 180.0
PAUSE_S = 0.005
SETTLE_S = 0.5
LONG_STEP_S = 0.05
OBSERVE_S = 4.0
WEIGHTS = {"cpu": 1_000, "cuda": 4_000_000}
"""On the GPU so many that a fault finds an allreduce under way."""


# ---- a rank


def work(endpoints: str, ranks: int, grace_s: float, device: str) -> None:
    """Do steps until killed; say in JSON when a generation had its first allreduce, and which steps took long."""
    if device == "cuda":
        os.environ |= {"NCCL_HOSTID": str(os.getpid()), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    import torch
    import torch.distributed as dist

    import raftkv.torch
    import raftkv.training

    torch.set_num_threads(1)
    weights = torch.zeros(WEIGHTS[device], device=device)
    optimizer = torch.optim.SGD([weights], lr=1.0)
    weights.grad = torch.zeros_like(weights)

    def share(group: raftkv.torch.ElasticGroup) -> None:
        dist.broadcast(weights, group.source)

    pause = threading.Event()
    run = raftkv.training.join(
        "bench", endpoints=endpoints, min_nodes=2, max_nodes=ranks, expected_nodes=ranks, disconnect_grace_s=grace_s,
        address="127.0.0.1", fault_limit=0,
    )  # fmt: skip
    seen_generation, last = 0, time.monotonic()
    with run, elastic_group(run, device, share) as group:
        for step in group.steps(sys.maxsize):
            with step:
                weights.grad.fill_(-1 / group.world_size)
                dist.all_reduce(weights.grad)
                weights.grad.round_()
                optimizer.step()
            done = step.number + (step.failure is None)
            if not bool((weights == done).all()):
                tell(event="wrong", rank=group.rank, step=step.number, failure=repr(step.failure))
            now = time.monotonic()
            if step.failure is None and group.generation != seen_generation:
                seen_generation = group.generation
                parts = asdict(group.last_recovery) if group.last_recovery else {}
                tell(
                    event="generation",
                    generation=seen_generation,
                    rank=group.rank,
                    size=group.world_size,
                    at=now,
                    parts=parts,
                )
            elif now - last > LONG_STEP_S:
                tell(event="long", seconds=now - last, at=now)
            last = now
            pause.wait(PAUSE_S)


def elastic_group(run: Any, device: str, share: Any) -> Any:
    import torch

    import raftkv.torch

    if device == "cpu":
        return raftkv.torch.ElasticGroup(run, sync=share)
    return raftkv.torch.ElasticGroup(run, "nccl", sync=share, device=torch.device("cuda", 0))


# ---- the driver


class Rank(Worker):
    """A process, and where it stands by the events that it has reported."""

    rank = -1
    generation = 0


@dataclass
class Seen:
    """The trials of one fault."""

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    rounds: list[int] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Job:
    """The ranks, and a queue of what they say."""

    def __init__(self, endpoints: list[str], ranks: int, grace_s: float, device: str) -> None:
        self.size = ranks
        self.wrong = 0
        self.said: queue.Queue[tuple[Rank, dict[str, Any] | None]] = queue.Queue()
        self.ranks: list[Rank] = []
        self._words = ("--work", ",".join(endpoints), "--ranks", str(ranks), f"--grace={grace_s}", "--device", device)

    def wait_whole(self) -> None:
        """Until all are in one generation, and a moment longer."""
        while len(self.ranks) < self.size:
            self.ranks.append(Rank("bench.inprocess_recovery", *self._words, said=self.said))
        while len({rank.generation for rank in self.ranks}) != 1 or self.ranks[0].generation == 0:
            self.next_word(PATIENCE_S)
        threading.Event().wait(SETTLE_S)
        while not self.said.empty():
            self.next_word(0)

    def next_word(self, timeout_s: float) -> tuple[Rank, dict[str, Any]]:
        rank, facts = self.said.get(timeout=timeout_s)
        if facts is None:
            if rank in self.ranks:
                raise SystemExit(f"bench: rank {rank.rank} ended with {rank.process.wait()}")
            return rank, {"event": "ended"}
        if facts["event"] == "generation":
            rank.rank, rank.generation = facts["rank"], facts["generation"]
        elif facts["event"] == "wrong":
            self.wrong += 1
            progress(f"wrong: {facts}")
        return rank, facts

    def end(self, victim: Rank, with_signal: int) -> float:
        self.ranks.remove(victim)
        at = time.monotonic()
        victim.process.send_signal(with_signal)
        return at

    def close(self) -> None:
        for rank in self.ranks:
            rank.end()


def trial(fault: str, job: Job, cluster: raftkv.LocalCluster, seen: Seen) -> None:
    """One fault, and everything whole again after it."""
    job.wait_whole()
    before = job.ranks[0].generation
    member = leader_of(cluster) if fault.startswith("raft-leader") else None
    if member is not None:
        member.kill()
    if fault == "raft-leader":
        seen.seconds.append(longest_step(job))
        seen.rounds.append(max(rank.generation for rank in job.ranks) - before)
    else:
        wanted = 0 if fault == "rank0" else job.size - 1
        victim = next(rank for rank in job.ranks if rank.rank == wanted)
        at = job.end(victim, signal.SIGSTOP if fault == "freeze" else signal.SIGKILL)
        note_recovery(job, before, at, seen)
        victim.end()
    if member is not None:
        member.restart()


def note_recovery(job: Job, before: int, at: float, seen: Seen) -> None:
    """Wait for the survivors' first allreduce of a new generation, and see that there is no further generation."""
    slowest: dict[str, Any] = {"at": at}
    waiting = set(map(id, job.ranks))
    while waiting:
        rank, facts = job.next_word(PATIENCE_S)
        if facts["event"] == "generation" and facts["generation"] > before:
            waiting.discard(id(rank))
            slowest = max(slowest, facts, key=lambda said: said["at"])
    threading.Event().wait(SETTLE_S)
    while not job.said.empty():
        job.next_word(0)
    seen.seconds.append(slowest["at"] - at)
    seen.rounds.append(max(rank.generation for rank in job.ranks) - before)
    for name, value in slowest["parts"].items():
        seen.parts[name].append(value)


def longest_step(job: Job) -> float:
    """The longest step of any rank for a while; 0: none was worth telling."""
    longest, end = 0.0, time.monotonic() + OBSERVE_S
    while (left := end - time.monotonic()) > 0:
        try:
            longest = max(longest, job.next_word(left)[1].get("seconds", 0.0))
        except queue.Empty:
            break
    return longest


def measure(faults: list[str], trials: int, ranks: int, grace_s: float, device: str) -> list[dict[str, Any]]:
    """A row for each fault."""
    rows = []
    with raftkv.local(size=3, flags=("--log-level", "error")) as cluster:
        job = Job(cluster.endpoints, ranks, grace_s, device)
        try:
            for fault in faults:
                seen = Seen()
                for number in range(trials):
                    trial(fault, job, cluster, seen)
                    progress(f"{fault} {number + 1}/{trials}: {seen.seconds[-1] * 1000:.0f} ms")
                seen.wrong, job.wrong = job.wrong, 0
                rows.append(row_of(fault, seen))
        finally:
            job.close()
    return rows


def row_of(fault: str, seen: Seen) -> dict[str, Any]:
    return {
        "fault": fault,
        "trials": len(seen.seconds),
        "median_s": round(statistics.median(seen.seconds), 4),
        "max_s": round(max(seen.seconds), 4),
        "rounds_per_fault": statistics.mean(seen.rounds),
        "wrong_steps": seen.wrong,
        "parts_s": {
            name: round(statistics.median(values), 4) for name, values in seen.parts.items() if name != "generation"
        },
    }


def is_good(row: dict[str, Any], device: str) -> bool:
    """The verdict: weights right, one round a fault; and for a killed rank the limit, which knows no CUDA."""
    if row["wrong_steps"] or row["rounds_per_fault"] != (0 if row["fault"] == "raft-leader" else 1):
        return False
    return device != "cpu" or row["fault"] not in ("rank", "rank0") or row["median_s"] <= LIMIT_S


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--fault", type=names_of(FAULTS), default=FAULTS[:4], help=f"some of {', '.join(FAULTS)}")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--grace", type=float, default=0.03, help="disconnect_grace_s of the run")
    parser.add_argument("--device", default="cpu", choices=tuple(WEIGHTS))
    parser.add_argument("--json", action="store_true", help="a line for each fault")
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.ranks, given.grace, given.device)
        return 0
    rows = measure(given.fault, given.trials, given.ranks, given.grace, given.device)
    for row in rows:
        if given.json:
            print(json.dumps(row))
        else:
            verdict = "" if is_good(row, given.device) else "  BAD"
            print(
                f"{row['fault']:18} median {row['median_s'] * 1000:6.0f} ms  max {row['max_s'] * 1000:6.0f} ms  "
                f"rounds {row['rounds_per_fault']:g}{verdict}"
            )
    return 0 if all(is_good(row, given.device) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
