"""The faults of the restart benchmark: how each is done, what must follow, and how the job is made whole again.

    outcome = run_trial(FAULTS["node0"], job, cluster)
    outcome.seconds, outcome.rounds, outcome.problems

A trial starts from a whole world of three. After the fault it waits for the next whole world, watches for a while that
no further one begins, checks what must hold, and brings back what was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.stage import leader_of

if TYPE_CHECKING:
    from bench.restart_job import Agent, Job, World
    from tests.procs import Cluster

NODES = 3
SETTLE_S = 1.0
"""For so long after recovery no further round may begin."""
GAP_WATCH_S = 4.0
"""For so long after the loss of the leader alone steps are watched."""


@dataclass
class Outcome:
    """What a trial has shown.

    Attributes:
        seconds: from the fault to the first allreduce of the next world; of the leader alone: the longest step.
        rounds: that began because of it; -1: not known with this rendezvous.
        respawn_s: of the seconds, until the processes of the next world were started: detection and rendezvous.
        problems: what should not have been.
    """

    seconds: float
    rounds: int
    respawn_s: float | None = None
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """See the module.

    Attributes:
        name: as on the command line.
        strike: does it; returns what brings back what was lost.
        size: of the next world.
        rounds: that must begin.
        needs_cluster: it is about members of the cluster.
        bar_s: median that is aimed at.
    """

    name: str
    strike: Callable[[Job, World, Cluster | None], Callable[[], object]]
    size: int
    bar_s: float
    rounds: int = 1
    needs_cluster: bool = False


def _nothing() -> None:
    pass


def _worker(job: Job, world: World, _: Cluster | None) -> Callable[[], object]:
    job.of_rank(world, NODES - 1).kill_worker()
    return _nothing


def _kill_node(job: Job, agent: Agent) -> Callable[[], object]:
    agent.kill_node()
    return lambda: job.start(agent.name)


def _node(job: Job, world: World, _: Cluster | None) -> Callable[[], object]:
    return _kill_node(job, job.victim(world))


def _node0(job: Job, world: World, _: Cluster | None) -> Callable[[], object]:
    return _kill_node(job, job.first(world))


def _agent(job: Job, world: World, _: Cluster | None) -> Callable[[], object]:
    agent = job.victim(world)
    left_running = agent.kill_agent()
    job.left_running += left_running

    def bring_back() -> None:
        for pid in left_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.start(agent.name)

    return bring_back


def _freeze(job: Job, world: World, _: Cluster | None) -> Callable[[], object]:
    agent = job.victim(world)
    agent.signal_node(signal.SIGSTOP)
    return lambda: agent.signal_node(signal.SIGCONT)


def _leader(job: Job, world: World, cluster: Cluster | None) -> Callable[[], object]:
    member = leader_of(cluster)
    member.kill()
    return member.restart


def _leader_and_node(job: Job, world: World, cluster: Cluster | None) -> Callable[[], object]:
    agent, member = job.victim(world), leader_of(cluster)
    member.kill()
    agent.kill_node()

    def bring_back() -> None:
        member.restart()
        job.start(agent.name)

    return bring_back


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("worker", _worker, NODES, 2.5),
        Fault("node", _node, NODES - 1, 2.5),
        Fault("node0", _node0, NODES - 1, 2.5),
        Fault("agent", _agent, NODES - 1, 2.5),
        Fault("freeze", _freeze, NODES - 1, 3.0),
        Fault("raft-leader", _leader, NODES, 1.0, rounds=0, needs_cluster=True),
        Fault("raft-leader+node", _leader_and_node, NODES - 1, 4.5, needs_cluster=True),
    )
}


def run_trial(fault: Fault, job: Job, cluster: Cluster | None, world: World) -> tuple[Outcome, World]:
    """One trial; returns what it has shown, and the world that is whole again after it.

    Raises:
        Unrecovered: no world came.
    """
    before = world
    struck_at = time.monotonic()
    bring_back = fault.strike(job, world, cluster)
    if fault.rounds == 0:
        outcome, after = _watch_gap(job, world, struck_at), world
    else:
        after = job.wait_world(fault.size, struck_at)
        outcome = Outcome(after.first_step_s - struck_at, -1, after.started_s - struck_at)
        threading.Event().wait(SETTLE_S)
    _check(fault, job, before, after, struck_at, outcome)
    returned_at = time.monotonic()
    bring_back()
    if fault.size < NODES:
        world = job.wait_world(NODES, returned_at, cap_s=max(60.0, job.backend.cap_s))
    else:
        world = after
    threading.Event().wait(SETTLE_S / 2)  # whoever has just come back has its lease and connections settled
    return outcome, world


def _watch_gap(job: Job, world: World, struck_at: float) -> Outcome:
    threading.Event().wait(GAP_WATCH_S)
    steps = [one for one in job.steps(0.0, since=struck_at) if one.pid in {worker.pid for worker in world.workers}]
    return Outcome(max(one.gap_s for one in steps), -1)


def _check(fault: Fault, job: Job, before: World, after: World, struck_at: float, outcome: Outcome) -> None:
    """Exactly the rounds that there should be, no rank twice, nobody in two worlds."""
    newer = job.steps(struck_at)
    if job.backend.rdzv == "raftkv":
        outcome.rounds = max((one.generation for one in newer), default=before.generation) - before.generation
        if outcome.rounds != fault.rounds:
            outcome.problems.append(f"{fault.name}: {outcome.rounds} rounds instead of {fault.rounds}")
    for generation in {one.generation for one in newer}:
        ranks = sorted(one.rank for one in newer if one.generation == generation)
        if job.backend.rdzv == "raftkv" and ranks != list(range(len(ranks))):
            outcome.problems.append(f"{fault.name}: ranks {ranks} in generation {generation}")
    if after is before:
        return
    old = {worker.pid for worker in before.workers}
    still = [one for one in job.steps(0.0) if one.pid in old and one.last_s > after.first_step_s]
    outcome.problems += [f"{fault.name}: rank {one.rank} of the old world made a step in the new one" for one in still]
