"""Swarm runs: one seed draws every parameter, including the kinds of faults, and then the run itself.

Owns ``draw`` (seed -> parameters) and ``run_seed`` (seed -> report). A default setting explores one corner: real
bugs hide behind settings, so each seed has its own (Groce et al., "Swarm testing").

    report = run_seed(7)        # the same seed gives the same report.digest on every machine
    report.violation            # None, or the broken property
"""

from __future__ import annotations

import gc
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace

from raftkv.raft.read_lease import WAIT_NS
from tests.sim.assembly import MemberParameters
from tests.sim.clients.admins import Admin
from tests.sim.clients.history import Outcome, Status, ViolationError, check_history
from tests.sim.clients.leases import Owner, check_ended
from tests.sim.clients.operators import Machines, Operator
from tests.sim.clients.watchers import Watcher
from tests.sim.clients.workload import Workload, WorkloadParameters
from tests.sim.cluster import Cluster, ClusterParameters
from tests.sim.devices.network import NetworkParameters
from tests.sim.devices.wal_disk import DiskParameters
from tests.sim.journal import stream
from tests.sim.nemesis import FAULTS, Nemesis, NemesisParameters

RECOVERY_TIMEOUTS_MAX = 10
"""R10: after the faults stop, a proposal commits within so many election timeouts."""
RECOVERY_TIMEOUTS_MAX_WITHOUT_PRE_VOTE = 60
"""A member with a fast clock and an old log interrupts the campaigns of the only one who can win: chance must help."""
CONVERGENCE_TIMEOUTS_MAX = 40
"""After the faults stop, all members have applied the same log within so many election timeouts."""
WATCHERS_S_MAX = 30.0
"""After that, all watchers have all events within so many seconds."""
PLANS_S_MAX = 60.0
"""What operators had begun ends within so many seconds."""
MACHINE_S_MEAN = 0.5
"""From the addition of a member to the start of its machine."""
_PROBE_CLIENT = 1_000_000


@dataclass(frozen=True, slots=True)
class RunParameters:
    """All parameters of a run, except its seed."""

    duration_s: float = 8.0
    cluster: ClusterParameters = field(default_factory=ClusterParameters)
    workload: WorkloadParameters = field(default_factory=WorkloadParameters)
    nemesis: NemesisParameters = field(default_factory=NemesisParameters)


@dataclass(slots=True)
class Report:
    """Figures and finding of a run. ``recovery_s`` is the time from healing to the first commit."""

    seed: int
    parameters: RunParameters
    corner: str = "draw"
    digest: str = ""
    violation: str | None = None
    trace_back: str = ""
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    events_count: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    acknowledged_count: int = 0
    unknown_count: int = 0
    refused_count: int = 0
    leaders_count: int = 0
    conf_changes_count: int = 0
    leases_count: int = 0
    watched_count: int = 0
    compactions_count: int = 0
    recovery_s: float = 0.0

    @property
    def replay_command(self) -> str:
        """Return the command that replays this run."""
        corner = "" if self.corner == "draw" else f" --corner {self.corner}"
        return f"python -m tests.sim --seed {self.seed}{corner} --trace"


def draw(seed: int) -> RunParameters:
    """The parameters of a seed."""
    rng = stream(seed, "parameters")
    member = _draw_member(rng)
    # From a stream of its own: the other parameters of a seed stay what they were.
    sizes = stream(seed, "bytes of the log")
    member = replace(
        member, snapshot_bytes=sizes.choice((200, 2_000, 1 << 20)), catch_up_bytes=sizes.choice((0, 500, 1 << 20))
    )
    return RunParameters(
        duration_s=rng.choice((4.0, 6.0, 8.0, 12.0)),
        cluster=ClusterParameters(
            voters_count=rng.choice((1, 2, 3, 3, 3, 3, 4, 5, 5, 7)),
            member=member,
            network=_draw_network(rng, member.tick_s),
            disk=_draw_disk(rng),
            tick_skew=rng.choice((0.0, 0.02, 0.2)),
        ),
        workload=_draw_workload(rng),
        nemesis=_draw_nemesis(rng),
    )


def _draw_member(rng: random.Random) -> MemberParameters:
    return MemberParameters(
        tick_s=rng.choice((0.05, 0.1, 0.1)),
        election_ticks=rng.choice((5, 10, 10)),
        pre_vote=rng.random() < 0.8,
        check_quorum=rng.random() < 0.85,
        max_size_per_message_bytes=rng.choice((0, 256, 1 << 20)),
        max_inflight_messages=rng.choice((1, 4, 64)),
        max_uncommitted_bytes=rng.choice((2_000, 1 << 20)),
        commit_interval_s=rng.choice((0.1, 0.5, 2.0)),
        compaction_pause_s=rng.choice((0.01, 0.2)),
        compaction_keys=rng.choice((1, 1_000)),
        snapshot_entries=rng.choice((5, 20, 100, 1_000)),
        catch_up_entries=rng.choice((0, 5, 50)),
        at_once_max=rng.choice((1, 500, 500)),
        ready_timeout_s=rng.choice((0.5, 5.0)),
        steps_are_slow=rng.random() < 0.3,
    )


def _draw_network(rng: random.Random, tick_s: float) -> NetworkParameters:
    return NetworkParameters(
        delay_s_min=rng.choice((0.000_1, 0.000_5, 0.002)),
        delay_s_mean=rng.choice((0.000_5, 0.002, 0.01, tick_s)),
        loss=rng.choice((0.0, 0.0, 0.01, 0.1)),
        duplicate=rng.choice((0.0, 0.0, 0.01, 0.2)),
        fifo=rng.random() < 0.6,
        report_unreachable=rng.random() < 0.5,
    )


def _draw_disk(rng: random.Random) -> DiskParameters:
    return DiskParameters(
        sync_s_min=rng.choice((0.000_05, 0.000_5)),
        sync_s_mean=rng.choice((0.000_1, 0.001, 0.01, 0.05)),
        commit_s_mean=rng.choice((0.001, 0.02, 0.2)),
        inline=rng.random() < 0.5,
        power_cuts=rng.choice((0.2, 0.8, 1.0)),
        segment_bytes=rng.choice((2_048, 2_048, 32_768)),
    )


def _draw_workload(rng: random.Random) -> WorkloadParameters:
    return WorkloadParameters(
        clients_count=rng.choice((1, 3, 6)),
        think_s_mean=rng.choice((0.05, 0.1, 0.2)),
        timeout_s=rng.choice((0.5, 2.0, 5.0)),
        keys_count=rng.choice((1, 3, 10)),
        read_weight=rng.choice((1, 5, 10)),
        compact_weight=rng.choice((0.0, 0.2, 2.0)),
        to_leader=rng.choice((0.0, 0.3, 1.0)),
        owners_count=rng.choice((0, 1, 3)),
        ttl_s_max=rng.choice((1, 2, 4)),
        watchers_count=rng.choice((0, 1, 3)),
    )


def _draw_nemesis(rng: random.Random) -> NemesisParameters:
    share = rng.choice((0.0, 0.2, 0.4, 0.7, 1.0))
    return NemesisParameters(
        faults=tuple(fault for fault in FAULTS if rng.random() < share),
        interval_s_mean=rng.choice((0.3, 1.0, 2.0)),
        duration_s_mean=rng.choice((0.2, 1.0, 3.0)),
        zombie_s=rng.choice((0.2, 3.0)),
    )


def mixed(seed: int) -> RunParameters:
    """Return the profile for speed measurements: etcd's settings, three members, some of every fault."""
    return RunParameters(
        duration_s=60.0,
        cluster=ClusterParameters(voters_count=3),
        workload=WorkloadParameters(
            clients_count=2, think_s_mean=0.2, keys_count=10, owners_count=2, ttl_s_max=5, watchers_count=2
        ),
        nemesis=NemesisParameters(faults=FAULTS, interval_s_mean=3.0, duration_s_mean=1.5),
    )


def year(seed: int) -> RunParameters:
    """Half an hour: mostly calm, a minute of each quarter busy; in every fourth seed an operator changes members."""
    base, is_managed = mixed(seed), seed % 4 == 0
    rng = stream(seed, "year")
    faults = tuple(fault for fault in FAULTS if fault != "membership") if is_managed else FAULTS
    return replace(
        base,
        duration_s=1800.0,
        cluster=replace(base.cluster, voters_count=rng.choice((3, 3, 3, 5)), is_managed=is_managed),
        workload=replace(
            base.workload,
            operators_count=int(is_managed),
            bounded_weight=1.0,
            ttl_s_max=rng.choice((5, 30, 60)),
            calm=20.0,
        ),
        nemesis=replace(base.nemesis, faults=faults, calm=100.0),
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
        workload = parameters.workload
        self.workload = Workload(stream(seed, "workload"), workload, self.cluster)
        self.owners = [
            Owner(number, self.workload, self.cluster, stream(seed, f"owner {number}"))
            for number in range(1, workload.owners_count + 1)
        ]
        self.watchers = [
            Watcher(number, self.workload, self.cluster, stream(seed, f"watcher {number}"))
            for number in range(workload.watchers_count)
        ]
        self.nemesis = Nemesis(self.cluster, stream(seed, "nemesis"), parameters.nemesis)
        self.machines = None
        if parameters.cluster.is_managed:
            self.machines = Machines(self.cluster, stream(seed, "machines"), MACHINE_S_MEAN)
        count = workload.operators_count
        self.operators = [
            Operator(number, self.cluster, stream(seed, f"operator {number}"), wipes=count == 1, calm=workload.calm)
            for number in range(1, count + 1)
        ]
        self.admins = [Admin(self.cluster, stream(seed, f"admin {number}")) for number in range(workload.admins_count)]
        self.recovery_s = 0.0
        self._probe_done = False

    def execute(self) -> None:
        """Run to the end. Raises ``ViolationError`` (or what the core raised)."""
        for part in (self.workload, *self.owners, *self.watchers, self.nemesis, *self.operators, *self.admins):
            part.start()
        self.cluster.run_until(self.parameters.duration_s)
        for other in (self.workload, *self.owners, self.nemesis, *self.operators, *self.admins):
            other.stop()
        self._recover()
        self._finish_plans()
        check_ended(self.cluster, self.parameters.workload.ttl_s_max, self._election_s)
        self._converge()
        self._watchers_have_all()
        for operator in self.operators:
            operator.check()
        self.cluster.check_equal_replicas()
        check_history(self.workload.history.invocations, self.cluster.checkers.replay)

    @property
    def _election_s(self) -> float:
        member = self.parameters.cluster.member
        return member.election_ticks * member.tick_s

    def _recover(self) -> None:
        """R10: with the faults gone a proposal commits in time."""
        scheduler = self.cluster.scheduler
        self.cluster.heal(NetworkParameters())
        healed_at = scheduler.now
        self._probe()
        pre_vote = self.parameters.cluster.member.pre_vote
        timeouts = RECOVERY_TIMEOUTS_MAX if pre_vote else RECOVERY_TIMEOUTS_MAX_WITHOUT_PRE_VOTE
        limit_s = timeouts * self._election_s
        if self.parameters.cluster.member.read_leases:
            limit_s += 2 * WAIT_NS / 1e9  # the lease of the leader before, and of one that was elected while it waited
        self.cluster.run_until(healed_at + limit_s, lambda: self._probe_done)
        self.recovery_s = scheduler.now - healed_at
        if not self._probe_done:
            raise ViolationError("R10", f"no commit within {self.recovery_s} s after the faults stopped")

    def _probe(self) -> None:
        """Propose at the leader, again and again, until one proposal is answered."""
        if self._probe_done:
            return
        leader = self.cluster.leader_hint()
        if leader is not None:
            self.workload.call(_PROBE_CLIENT, leader, self.workload.put(), self._probed)
        self.cluster.scheduler.after(self._election_s / 4, self._probe)

    def _probed(self, outcome: Outcome | None) -> None:
        self._probe_done = self._probe_done or (outcome is not None and not outcome.error)

    def _finish_plans(self) -> None:
        """Check that operators' plans finish once the faults are gone."""
        deadline = self.cluster.scheduler.now + PLANS_S_MAX
        machines = self.machines
        if not self.cluster.run_until(
            deadline,
            lambda: all(operator.is_idle for operator in self.operators) and (machines is None or machines.are_on()),
        ):
            plans = [operator.describe() for operator in self.operators if not operator.is_idle]
            raise ViolationError("R10", f"changes of members did not end: {plans}; {self.cluster.describe()}")

    def _converge(self) -> None:
        scheduler = self.cluster.scheduler
        deadline = scheduler.now + CONVERGENCE_TIMEOUTS_MAX * self._election_s
        while not self.cluster.converged():
            if scheduler.now >= deadline:
                raise ViolationError("R10", "members did not converge: " + self.cluster.describe())
            self.cluster.run_until(scheduler.now + self._election_s / 2)

    def _watchers_have_all(self) -> None:
        """Check that no watcher misses an event in the end (W3)."""
        for watcher in self.watchers:
            watcher.settle()
        deadline = self.cluster.scheduler.now + WATCHERS_S_MAX
        if not self.cluster.run_until(deadline, lambda: all(watcher.has_all() for watcher in self.watchers)):
            missing = [watcher.describe() for watcher in self.watchers if not watcher.has_all()]
            raise ViolationError("W3", f"events never came: {missing}")


def run_seed(seed: int, parameters: RunParameters | None = None, trace: Callable[[str], None] | None = None) -> Report:
    """Simulate one seed; a violation is reported, not raised."""
    report = Report(seed, parameters or draw(seed))
    started_s = time.process_time()
    run = None
    gc.disable()  # a run is over before there is much to collect
    try:
        run = Run(seed, report.parameters, trace)
        run.execute()
    except ViolationError as violation:
        report.violation = str(violation)
        if violation.__cause__ is not None:
            report.trace_back = "".join(traceback.format_exception(violation.__cause__))
    except Exception as error:  # the core stopped itself: that is a finding too
        report.violation = f"{type(error).__name__}: {error}"
        report.trace_back = traceback.format_exc()
    if run is not None:
        _fill(report, run)
        run.cluster.close()
    gc.enable()
    report.cpu_s = time.process_time() - started_s
    return report


def _fill(report: Report, run: Run) -> None:
    cluster, history = run.cluster, run.workload.history
    report.digest = cluster.journal.digest()
    report.simulated_s = cluster.scheduler.now
    report.events_count = cluster.journal.events_count
    report.faults = run.nemesis.injected
    report.deaths = cluster.deaths
    report.acknowledged_count = history.count(Status.OK)
    report.unknown_count = history.count(Status.UNKNOWN)
    report.refused_count = history.count(Status.FAILED)
    report.leaders_count = cluster.checkers.leaders_count
    report.conf_changes_count = cluster.checkers.conf_changes_count
    report.leases_count = len(cluster.checkers.promises)
    report.watched_count = sum(watcher.events_count for watcher in run.watchers)
    report.compactions_count = cluster.checkers.replay.compactions_count
    report.recovery_s = run.recovery_s
