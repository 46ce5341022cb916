"""A training job for fault tests: torchrun agents, their workers, and the workers' notes.

    with Job(backend, endpoint, directory, "job1") as job:
        job.start("a"); job.start("b"); job.start("c")
        world = job.wait_world(3, after=0.0)
        world.first_step_s                      # CLOCK_MONOTONIC, which is common to all processes of the machine

Every worker of `examples/train_allreduce.py` writes the time of each step to a file. A *world* is a set of workers that
began together: as many files as the world size, one for each rank, all with a first step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bench.stage import leader_of
from tests import forked
from tests.procs import ROOT, Cluster

SCRIPT = ROOT / "examples" / "train_allreduce.py"
LEASE_TTL_S = 1
POLL_S = 0.01
RESTARTS = 1000
LOG_TAIL = 1500
HOST = "n0"
"""The node named in `--rdzv-endpoint` of c10d; it hosts that rendezvous."""


class Unrecovered(Exception):
    """A world did not form in time, or the job has died; the text says which."""


@dataclass(frozen=True)
class Backend:
    """A rendezvous to compare: its name here, torch's name, and its settings.

    With ``on_gpu`` the workers communicate with NCCL and share the one GPU of this machine. NCCL accepts each GPU once
    per host, so each node claims to be a separate host.
    """

    name: str
    rdzv: str
    conf: str
    environment: tuple[tuple[str, str], ...] = ()
    cap_s: float = 60.0
    """Seconds after which a trial is aborted."""
    on_gpu: bool = False
    rest_s: float = 0.0
    """Seconds before each fault, in which standby workers finish importing torch."""


# With the default limit, a node would be excluded after ten faults.
_RAFTKV_CONF = f"lease_ttl={LEASE_TTL_S},last_call_timeout=2,fault_limit=0"
_C10D_CONF = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
_SHARED_OFF = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)
_SOCKETS = (("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_IB_DISABLE", "1"))
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("raftkv", "raftkv", _RAFTKV_CONF),
        Backend("raftkv-prefork", "raftkv", f"{_RAFTKV_CONF},prefork=torch", rest_s=12.0),
        Backend("etcd", "raftkv", _RAFTKV_CONF),
        Backend("c10d", "c10d", "", cap_s=120.0),
        Backend("c10d-tuned", "c10d", _C10D_CONF, _SHARED_OFF, cap_s=120.0),
        Backend("raftkv-nccl", "raftkv", _RAFTKV_CONF, _SOCKETS, on_gpu=True),
        Backend("c10d-nccl", "c10d", _C10D_CONF, _SHARED_OFF + _SOCKETS, cap_s=120.0, on_gpu=True),
    )
}


@dataclass(frozen=True)
class Steps:
    """The notes of one worker."""

    pid: int
    generation: int
    rank: int
    size: int
    first_s: float
    last_s: float
    gap_s: float
    """The longest time between two steps, in seconds."""


@dataclass(frozen=True)
class World:
    """Workers that began together, in order of rank."""

    workers: tuple[Steps, ...]

    @property
    def first_step_s(self) -> float:
        """Time at which the last worker had done its first step."""
        return max(worker.first_s for worker in self.workers)

    @property
    def started_s(self) -> float:
        """Time at which the last process was started, to 0.01 s; the time after it is for Python, torch and gloo."""
        return max(_started_s(worker.pid) for worker in self.workers)

    @property
    def generation(self) -> int:
        """The generation number of raftkv; 0 with other rendezvous."""
        return self.workers[0].generation


def _started_s(pid: int) -> float:
    """Return the start time of a process, on the clock of `time.monotonic` (unless the machine was suspended)."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(stat[19]) / os.sysconf("SC_CLK_TCK")


def read_steps(path: Path, since: float = 0.0) -> Steps | None:
    """Return the notes in a worker's file; None if there is no complete line yet."""
    generation, _, pid = path.stem.split("-")
    lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    whole = [line for line in lines if len(line) == 4 and "." in line[3]]
    if not whole:
        return None
    times = [float(line[3]) for line in whole]
    late = [moment for moment in times if moment >= since] or times[-1:]
    gap = max((later - earlier for earlier, later in itertools.pairwise(late)), default=0.0)
    return Steps(int(pid), int(generation), int(whole[0][0]), int(whole[0][1]), times[0], times[-1], gap)


class Agent:
    """One torchrun process: a node of the job."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self._left: list[int] = []
        """Workers that outlived the agent."""

    @property
    def workers(self) -> list[int]:
        """Its child processes."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(OSError):
            return [int(pid) for pid in path.read_text(encoding="ascii").split()]
        return []

    @property
    def is_running(self) -> bool:
        """Whether the process is running."""
        return self.process.poll() is None

    def kill_worker(self) -> None:
        """`kill -9` of its workers that have trained, but not of standby workers."""
        noted = {int(path.stem.rpartition("-")[2]) for path in (self.log.parent / "steps").glob("*.steps")}
        _signal(noted.intersection(self.workers), signal.SIGKILL)

    def kill_node(self) -> None:
        """`kill -9` of the agent and its workers, as when a machine loses power."""
        self.kill_agent()
        _signal(self._left, signal.SIGKILL)

    def kill_agent(self) -> None:
        """`kill -9` of the agent only; its workers continue to run."""
        self._left = self.workers
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """Stop the agent and its workers (SIGSTOP)."""
        _signal((*self.workers, self.process.pid), signal.SIGSTOP)

    def recover(self) -> None:
        """Resume the processes, and kill workers that have outlived the agent."""
        if self.is_running:
            _signal((*self.workers, self.process.pid), signal.SIGCONT)
        _signal(self._left, signal.SIGKILL)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Job:
    """A training job; see the module.

    Arguments:
        backend: rendezvous of the job.
        endpoint: value of `--rdzv-endpoint`.
        directory: directory for logs and notes; it is created.
        run_id: id of the job.
    """

    def __init__(self, backend: Backend, endpoint: str, directory: Path, run_id: str) -> None:
        self.backend = backend
        self.endpoint = endpoint
        self.directory = directory
        self.run_id = run_id
        self.agents: dict[str, Agent] = {}
        self._stop_file = directory / "stop"
        (directory / "steps").mkdir(parents=True)

    def start(self, name: str) -> None:
        """Start an agent; the name may be that of an earlier agent."""
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--rdzv-backend={self.backend.rdzv}"),
            *(f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={self.run_id}", "--nnodes=2:4", "--nproc-per-node=1"),
            *(f"--max-restarts={RESTARTS}", "--local-addr=127.0.0.1", *self._conf(name), str(SCRIPT)),
            *("--steps=0", f"--stop-file={self._stop_file}", f"--notes={self.directory / 'steps'}"),
            f"--backend={'nccl' if self.backend.on_gpu else 'gloo'}",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict(self.backend.environment), "NCCL_HOSTID": name}
        log = self.directory / f"{name}.log"
        with log.open("ab") as output:
            process = forked.start(command, cwd=Path.cwd(), environment=environment, log=output)
        self.agents[name] = Agent(name, process, log)

    def _conf(self, name: str) -> list[str]:
        own = f"node_name={name}" if self.backend.rdzv == "raftkv" else f"is_host={int(name == HOST)}"
        conf = ",".join(filter(None, (self.backend.conf, own)))
        return [f"--rdzv-conf={conf}"] if conf else []

    @property
    def running(self) -> list[Agent]:
        """Agents that are running."""
        return [agent for agent in self.agents.values() if agent.is_running]

    def victim(self, world: World) -> Agent:
        """A node other than the first; with c10d, the first one hosts the rendezvous."""
        agents = [self.of_rank(world, rank) for rank in (1, 2)]
        return next(agent for agent in agents if self.backend.rdzv == "raftkv" or agent.name != HOST)

    def first(self, world: World) -> Agent:
        """The node of rank 0; with c10d, the host of the rendezvous."""
        return self.of_rank(world, 0) if self.backend.rdzv == "raftkv" else self.agents[HOST]

    def of_rank(self, world: World, rank: int) -> Agent:
        """The agent whose worker has a given rank."""
        pid = world.workers[rank].pid
        return next(agent for agent in self.running if pid in agent.workers)

    def steps(self, after: float, since: float = 0.0) -> list[Steps]:
        """Notes of the workers whose first step came after a given time."""
        paths = (self.directory / "steps").glob("*.steps")
        found = [steps for path in paths if (steps := read_steps(path, since)) is not None]
        return [steps for steps in found if steps.first_s > after]

    def wait_world(self, size: int, after: float, cap_s: float | None = None) -> World:
        """Return the first complete world of a size that began after a given time.

        Raises:
            Unrecovered: it did not form in time, or all agents have ended.
        """
        limit_s = cap_s or self.backend.cap_s
        deadline = time.monotonic() + limit_s
        pause = threading.Event()
        while time.monotonic() < deadline:
            new = [steps for steps in self.steps(after) if steps.size == size]
            newest = [steps for steps in new if steps.generation == max(one.generation for one in new)]
            if sorted(steps.rank for steps in newest) == list(range(size)):
                return World(tuple(sorted(newest, key=lambda steps: steps.rank)))
            if len(self.running) < 2:
                raise Unrecovered("the job died")
            pause.wait(POLL_S)
        raise Unrecovered(f"not within {limit_s:g} s")

    def logs(self) -> str:
        """Return the ends of the agents' logs."""
        texts = {name: agent.log.read_text(encoding="utf-8", errors="replace") for name, agent in self.agents.items()}
        return "\n".join(f"--- {name}\n{text[-LOG_TAIL:]}" for name, text in texts.items())

    def finish(self, timeout_s: float = 60.0) -> dict[str, int | None]:
        """Let the job end; return the agents' exit statuses, None for one that did not end."""
        self._stop_file.touch()
        deadline = time.monotonic() + timeout_s
        statuses: dict[str, int | None] = {}
        for name, agent in self.agents.items():
            try:
                statuses[name] = agent.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                statuses[name] = None
        return statuses

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            agent.recover()
            if agent.is_running:
                agent.kill_node()


# ---- faults: how each is injected, what must follow, and how the job is restored
#
# A trial starts from a complete world of three. After the fault it waits for the next complete world, watches for a
# while that no further world begins, checks the invariants, and restores the killed processes.

NODES = 3
SETTLE_S = 1.0
"""Seconds after recovery in which no further round may begin."""
GAP_WATCH_S = 4.0
"""Seconds for which steps are watched after the loss of only the leader."""


@dataclass
class Outcome:
    """The result of a trial.

    Attributes:
        seconds: from the fault to the first allreduce of the next world; if only the leader was killed, the longest
            step.
        rounds: number of rounds caused by the fault; -1: unknown with this rendezvous.
        respawn_s: part of ``seconds`` until the next processes were started: detection and rendezvous.
        problems: violated expectations.
    """

    seconds: float
    rounds: int
    respawn_s: float | None = None
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: name on the command line.
        hurt: what to do to a node; None: nothing.
        size: size of the next world.
        bar_s: target of the median, in seconds.
        rounds: number of rounds that must begin.
        is_first: whether the node is that of rank 0 (with c10d, the host of the rendezvous) or another one.
        needs_cluster: whether the leader of the cluster is killed.
    """

    name: str
    hurt: Callable[[Agent], None] | None
    size: int
    bar_s: float
    rounds: int = 1
    is_first: bool = False
    needs_cluster: bool = False

    def strike(self, job: Job, world: World, cluster: Cluster | None) -> Callable[[], None]:
        """Inject the fault; return a function that restores what was killed."""
        member = leader_of(cluster) if self.needs_cluster else None
        agent = job.first(world) if self.is_first else job.victim(world)
        if member is not None:
            member.kill()
        if self.hurt is not None:
            self.hurt(agent)

        def bring_back() -> None:
            if member is not None:
                member.restart()
            agent.recover()
            if not agent.is_running:
                job.start(agent.name)

        return bring_back


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("worker", Agent.kill_worker, NODES, 2.5),
        Fault("node", Agent.kill_node, NODES - 1, 2.5),
        Fault("node0", Agent.kill_node, NODES - 1, 2.5, is_first=True),
        Fault("agent", Agent.kill_agent, NODES - 1, 2.5),
        Fault("freeze", Agent.freeze, NODES - 1, 3.0),
        Fault("raft-leader", None, NODES, 1.0, rounds=0, needs_cluster=True),
        Fault("raft-leader+node", Agent.kill_node, NODES - 1, 4.5, needs_cluster=True),
    )
}


def run_trial(fault: Fault, job: Job, cluster: Cluster | None, world: World) -> tuple[Outcome, World]:
    """Run one trial; return its outcome, and the complete world after the restoration.

    Raises:
        Unrecovered: no world formed.
    """
    before = world
    threading.Event().wait(job.backend.rest_s)
    struck_at = time.monotonic()
    bring_back = fault.strike(job, world, cluster)
    if fault.rounds == 0:
        outcome, after = _watch_gap(job, world, struck_at), world
    else:
        after = job.wait_world(fault.size, struck_at)
        outcome = Outcome(after.first_step_s - struck_at, -1, max(0.0, after.started_s - struck_at))
        threading.Event().wait(SETTLE_S)
    _check(fault, job, before, after, struck_at, outcome)
    returned_at = time.monotonic()
    bring_back()
    if fault.size < NODES:
        world = job.wait_world(NODES, returned_at, cap_s=max(60.0, job.backend.cap_s))
    else:
        world = after
    threading.Event().wait(SETTLE_S / 2)  # a node that has just returned gets its lease and connections
    return outcome, world


def _watch_gap(job: Job, world: World, struck_at: float) -> Outcome:
    threading.Event().wait(GAP_WATCH_S)
    steps = [one for one in job.steps(0.0, since=struck_at) if one.pid in {worker.pid for worker in world.workers}]
    return Outcome(max(one.gap_s for one in steps), -1)


def _check(fault: Fault, job: Job, before: World, after: World, struck_at: float, outcome: Outcome) -> None:
    """Check that each round occurs once, and that no rank occurs twice or in two worlds."""
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
