"""Swarm runs: one seed draws every parameter, which faults exist at all among them, and then the run itself.

Owns ``draw`` (seed -> parameters) and ``run_seed`` (seed -> report). A default setting explores one corner: real
bugs hide behind settings, so each seed has its own (Groce et al., "Swarm testing").

    report = run_seed(7)        # the same seed gives the same report.digest on every machine
    report.violation            # None, or what was broken
"""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace

from .clock import MILLISECOND_US, SECOND_US
from .cluster import Cluster, ClusterParameters, stream
from .disk import DiskParameters
from .history import Status, ViolationError, check_history
from .machine import Kind, Outcome
from .member import MemberParameters
from .nemesis import FAULTS, Nemesis, NemesisParameters
from .network import NetworkParameters
from .workload import Workload, WorkloadParameters

RECOVERY_TIMEOUTS_MAX = 10
"""R10: after the faults stop, a proposal commits within so many election timeouts."""
RECOVERY_TIMEOUTS_MAX_WITHOUT_PRE_VOTE = 60
"""A member with a fast clock and an old log interrupts the campaigns of the only one who can win: chance must help."""
CONVERGENCE_TIMEOUTS_MAX = 40
"""And all members have applied the same log within so many."""
_PROBE_CLIENT = 1_000_000


@dataclass(frozen=True, slots=True)
class RunParameters:
    """Everything that makes a run, but its seed."""

    duration_us: int = 30 * SECOND_US
    cluster: ClusterParameters = field(default_factory=ClusterParameters)
    workload: WorkloadParameters = field(default_factory=WorkloadParameters)
    nemesis: NemesisParameters = field(default_factory=NemesisParameters)


@dataclass(slots=True)
class Report:
    """What a run did and found. ``recovery_us`` is the time from healing to the first commit."""

    seed: int
    parameters: RunParameters
    corner: str = "draw"
    digest: str = ""
    violation: str | None = None
    trace_back: str = ""
    simulated_us: int = 0
    cpu_s: float = 0.0
    events_count: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    acknowledged_count: int = 0
    unknown_count: int = 0
    refused_count: int = 0
    leaders_count: int = 0
    conf_changes_count: int = 0
    recovery_us: int = 0

    @property
    def replay_command(self) -> str:
        """How to see this run again."""
        corner = "" if self.corner == "draw" else f" --corner {self.corner}"
        return f"python -m tests.sim --seed {self.seed}{corner} --trace"


def draw(seed: int) -> RunParameters:
    """The parameters of a seed."""
    rng = stream(seed, "parameters")
    member = _draw_member(rng)
    return RunParameters(
        duration_us=rng.choice((10, 15, 20, 30)) * SECOND_US,
        cluster=ClusterParameters(
            voters_count=rng.choice((1, 2, 3, 3, 3, 3, 4, 5, 5, 7)),
            member=member,
            network=_draw_network(rng, member.tick_us),
            disk=replace(_draw_disk(rng), segment_bytes=stream(seed, "log").choice((0, 2_048, 32_768))),
            tick_skew=rng.choice((0.0, 0.02, 0.2)),
        ),
        workload=_draw_workload(rng),
        nemesis=_draw_nemesis(rng),
    )


def _draw_member(rng: random.Random) -> MemberParameters:
    return MemberParameters(
        tick_us=rng.choice((50, 100, 100)) * MILLISECOND_US,
        election_ticks=rng.choice((5, 10, 10)),
        pre_vote=rng.random() < 0.8,
        check_quorum=rng.random() < 0.85,
        max_size_per_message_bytes=rng.choice((0, 256, 1 << 20)),
        max_inflight_messages=rng.choice((1, 4, 64)),
        max_uncommitted_bytes=rng.choice((2_000, 1 << 20)),
        turn_us_max=rng.choice((0, 0, 500, 5_000)),
        readies_in_flight_max=rng.choice((1, 2, 8)),
        apply_us_mean=rng.choice((0, 0, 2_000, 50_000)),
        image_every_us=rng.choice((100, 500, 2_000)) * MILLISECOND_US,
        snapshot_entries=rng.choice((5, 20, 100, 1_000)),
        catch_up_entries=rng.choice((0, 5, 50)),
        append_log_early=rng.random() < 0.5,
        keep_log_at_restart=rng.random() < 0.7,
        recut_snapshots=rng.random() < 0.5,
        read_retry_us=rng.choice((200, 1_000)) * MILLISECOND_US,
    )


def _draw_network(rng: random.Random, tick_us: int) -> NetworkParameters:
    return NetworkParameters(
        delay_us_min=rng.choice((100, 500, 2_000)),
        delay_us_mean=rng.choice((500, 2_000, 10_000, tick_us)),
        loss=rng.choice((0.0, 0.0, 0.01, 0.1)),
        duplicate=rng.choice((0.0, 0.0, 0.01, 0.2)),
        fifo=rng.random() < 0.4,
        report_unreachable=rng.random() < 0.5,
    )


def _draw_disk(rng: random.Random) -> DiskParameters:
    return DiskParameters(
        sync_us_min=rng.choice((50, 500)),
        sync_us_mean=rng.choice((100, 1_000, 10_000, 50_000)),
        image_us_mean=rng.choice((1_000, 20_000, 200_000)),
        torn_tail=rng.random() < 0.8,
        coalesce=rng.random() < 0.7,
    )


def _draw_workload(rng: random.Random) -> WorkloadParameters:
    return WorkloadParameters(
        clients_count=rng.choice((1, 3, 6, 10)),
        think_us_mean=rng.choice((20, 50, 200)) * MILLISECOND_US,
        timeout_us=rng.choice((500, 2_000, 5_000)) * MILLISECOND_US,
        keys_count=rng.choice((1, 3, 10)),
        read_weight=rng.choice((1, 5, 10)),
        to_leader=rng.choice((0.0, 0.3, 1.0)),
    )


def _draw_nemesis(rng: random.Random) -> NemesisParameters:
    share = rng.choice((0.0, 0.2, 0.4, 0.7, 1.0))
    return NemesisParameters(
        faults=tuple(fault for fault in FAULTS if rng.random() < share),
        interval_us_mean=rng.choice((300, 1_000, 2_000)) * MILLISECOND_US,
        duration_us_mean=rng.choice((200, 1_000, 3_000)) * MILLISECOND_US,
        zombie_us=rng.choice((200, 3_000)) * MILLISECOND_US,
    )


def describe(parameters: object, prefix: str = "") -> list[str]:
    """Parameters as lines of ``name = value``."""
    lines: list[str] = []
    if not is_dataclass(parameters):
        return lines
    for item in fields(parameters):
        value = getattr(parameters, item.name)
        name = f"{prefix}{item.name}"
        lines += describe(value, f"{name}.") if is_dataclass(value) else [f"{name} = {value}"]
    return lines


class Run:
    """One simulation from boot to verdict."""

    def __init__(self, seed: int, parameters: RunParameters, trace: Callable[[str], None] | None = None) -> None:
        self.parameters = parameters
        self.cluster = Cluster(seed, parameters.cluster, trace)
        scheduler = self.cluster.scheduler
        self.workload = Workload(scheduler, stream(seed, "workload"), parameters.workload, self.cluster)
        self.nemesis = Nemesis(self.cluster, stream(seed, "nemesis"), parameters.nemesis)
        self.recovery_us = 0
        self._probe_done = False

    def execute(self) -> None:
        """Run to the end. Raises ``ViolationError`` (or what the core raised)."""
        scheduler = self.cluster.scheduler
        self.workload.start()
        self.nemesis.start()
        scheduler.run_until(self.parameters.duration_us)
        self.workload.stop()
        self.nemesis.stop()
        self._recover()
        self._converge()
        self.cluster.check_equal_replicas()
        check_history(self.workload.history.invocations, self.cluster.committed_log())

    @property
    def _election_timeout_us(self) -> int:
        member = self.parameters.cluster.member
        return member.election_ticks * member.tick_us

    def _recover(self) -> None:
        """R10: with the faults gone a proposal commits in time."""
        scheduler = self.cluster.scheduler
        self.cluster.heal(NetworkParameters())
        healed_us = scheduler.now_us
        self._probe()
        pre_vote = self.parameters.cluster.member.pre_vote
        timeouts = RECOVERY_TIMEOUTS_MAX if pre_vote else RECOVERY_TIMEOUTS_MAX_WITHOUT_PRE_VOTE
        scheduler.run_until(healed_us + timeouts * self._election_timeout_us, lambda: self._probe_done)
        self.recovery_us = scheduler.now_us - healed_us
        if not self._probe_done:
            raise ViolationError("R10", f"no commit within {self.recovery_us} us after the faults stopped")

    def _probe(self) -> None:
        """Propose at the leader, again and again, until one proposal is answered."""
        if self._probe_done:
            return
        leader = self.cluster.leader_hint()
        if leader is not None:
            operation = self.workload.new_operation(Kind.PUT, 0)
            invocation = self.workload.history.call(_PROBE_CLIENT, operation)

            def answered(outcome: Outcome | None) -> None:
                self.workload.history.end(invocation, outcome)
                self._probe_done = self._probe_done or outcome is not None

            self.cluster.submit(leader, operation, answered)
        self.cluster.scheduler.after(self._election_timeout_us // 4, self._probe)

    def _converge(self) -> None:
        scheduler = self.cluster.scheduler
        deadline_us = scheduler.now_us + CONVERGENCE_TIMEOUTS_MAX * self._election_timeout_us
        while not self.cluster.converged():
            if scheduler.now_us >= deadline_us:
                raise ViolationError("R10", "members did not converge: " + self.cluster.describe())
            scheduler.run_until(scheduler.now_us + self._election_timeout_us // 2)


def run_seed(seed: int, parameters: RunParameters | None = None, trace: Callable[[str], None] | None = None) -> Report:
    """Simulate one seed; never raises for what it finds."""
    report = Report(seed, parameters or draw(seed))
    started_s = time.process_time()
    run = None
    try:
        run = Run(seed, report.parameters, trace)
        run.execute()
    except ViolationError as violation:
        report.violation = str(violation)
    except Exception as error:  # the core stopped itself: that is a finding too
        report.violation = f"{type(error).__name__}: {error}"
        report.trace_back = traceback.format_exc()
    report.cpu_s = time.process_time() - started_s
    if run is not None:
        _fill(report, run)
    return report


def _fill(report: Report, run: Run) -> None:
    cluster, history = run.cluster, run.workload.history
    report.digest = cluster.journal.digest()
    report.simulated_us = cluster.scheduler.now_us
    report.events_count = cluster.scheduler.events_count
    report.faults = run.nemesis.injected
    report.acknowledged_count = history.count(Status.OK)
    report.unknown_count = history.count(Status.UNKNOWN)
    report.refused_count = history.count(Status.FAILED)
    report.leaders_count = cluster.checkers.leaders_count
    report.conf_changes_count = cluster.checkers.conf_changes_count
    report.recovery_us = run.recovery_us
