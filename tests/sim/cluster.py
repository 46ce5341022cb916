"""A simulated cluster: members, network, disks, one source of time, one journal, one set of checkers.

Owns the members and their process environment: while time passes (``run_until``), the production modules use the
simulation's processor clock, randomness and failpoints. Faults come from ``nemesis``, requests from ``workload``,
``leases`` and ``watchers``; all of them only call the verbs here.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from raftkv import suspend_clock
from raftkv.apply.membership import Membership
from raftkv.loop import scheduler
from raftkv.pb import rpc_pb2
from raftkv.raft.types import ConfState
from raftkv.replica.node import applying, proposals
from raftkv.server.services import cluster as membership_service
from raftkv.server.streams import watch as watch_service
from raftkv.storage import failpoints
from raftkv.storage.failpoints import FailpointPanic
from raftkv.storage.hash import KVHash
from tests.sim.assembly import MemberLoop, MemberParameters
from tests.sim.checkers import Checkers
from tests.sim.clients.history import ViolationError
from tests.sim.devices.network import Network, NetworkParameters
from tests.sim.devices.wal_disk import DiskParameters
from tests.sim.journal import Journal, stream
from tests.sim.member import Member
from tests.sim.state_checks import BOOT_INDEX
from tests.virtual_loop import Scheduler

_BOOT_TERM = 1
LOOK_S = 0.004
"""Time that a slow processor has spent between two looks at its clock."""


@dataclass(frozen=True, slots=True)
class ClusterParameters:
    """The cluster and its devices."""

    voters_count: int = 3
    member: MemberParameters = field(default_factory=MemberParameters)
    network: NetworkParameters = field(default_factory=NetworkParameters)
    disk: DiskParameters = field(default_factory=DiskParameters)
    tick_skew: float = 0.0
    is_managed: bool = False
    """Members are changed by operators, through the API: a removed member is heard by no other, and stops."""
    has_users: bool = False
    """Users are asked for: what they may do changes all the time."""
    pace_bytes: int = 0
    """What members put into the log before the first of it is applied, and their turns are watched; 0: as they do."""
    checks_disabled: frozenset[str] = frozenset()


class Cluster:
    """Members on a network. All verbs take effect now."""

    def __init__(self, seed: int, parameters: ClusterParameters, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.parameters = parameters
        self.scheduler = Scheduler(stream(seed, "order"))
        self.journal = Journal(self.scheduler, trace)
        self.members: dict[int, Member] = {}
        self.network = Network(self.scheduler, stream(seed, "network"), parameters.network, self.members)
        self.checkers = Checkers(self, parameters.checks_disabled)
        self.acting: Member | None = None
        """The process whose thread runs, where it is not the running loop's."""
        self.armed: dict[str, tuple[int | None, float]] = {}
        """Failpoints at which a member (None: any) dies, to start again some seconds later."""
        self.deaths: Counter[str] = Counter()
        self.on_conf_applied: Callable[[int, ConfState], None] = lambda index, conf_state: None
        self._clock_rng = stream(seed, "clock")
        self._crash_rng = stream(seed, "crash")
        self._jitter_rng = stream(seed, "jitter")
        self._spent_s = 0.0
        with self._process():
            self._boot(tuple(range(1, parameters.voters_count + 1)))

    def _boot(self, voters: tuple[int, ...]) -> None:
        conf_state = ConfState(voters=voters)
        self.checkers.bootstrapped(conf_state)
        for member_id in voters:
            member = self._make(member_id)
            member.found(conf_state, BOOT_INDEX, _BOOT_TERM)
            member.start()

    def _make(self, id: int) -> Member:
        skew = self.parameters.tick_skew
        tick_s = self.parameters.member.tick_s * (1 + self._clock_rng.uniform(-skew, skew))
        member = self.members[id] = Member(self, id, stream(self.seed, f"member {id}"), tick_s)
        return member

    # -- time -----------------------------------------------------------------------------------------------

    def run_until(self, deadline_s: float, stop: Callable[[], bool] | None = None) -> bool:
        """Let time pass; True if ``stop`` held before the deadline came.

        Raises:
            ViolationError: a property did not hold.
        """
        with self._process():
            stopped = self.scheduler.run_until(deadline_s, stop)
        if self.checkers.violation is not None:
            raise self.checkers.violation
        if self.scheduler.failures:
            raise ViolationError("unhandled", self.scheduler.failures[0])
        return stopped

    @contextlib.contextmanager
    def _process(self) -> Iterator[None]:
        """Give production modules this simulation's clock, randomness and failpoints within the block; no logging."""
        clock, chance = applying.perf_counter, watch_service.random
        asleep_s, suspend_clock.suspended_s = suspend_clock.suspended_s, _never_asleep
        now, membership_service.time = membership_service.time, SimpleNamespace(time=lambda: self.scheduler.now)
        applying.perf_counter = scheduler.perf_counter = self._processor_time
        watch_service.random = self._jitter_rng
        paces = proposals.PACE_MIN_BYTES, proposals.PACE_MAX_BYTES
        if self.parameters.pace_bytes:
            proposals.PACE_MIN_BYTES = proposals.PACE_MAX_BYTES = self.parameters.pace_bytes
        logged = logging.root.manager.disable
        logging.disable()
        for name in self.armed:
            failpoints.arm_call(name, self._at_failpoint)
        try:
            yield
        finally:
            applying.perf_counter = scheduler.perf_counter = clock
            suspend_clock.suspended_s = asleep_s
            proposals.PACE_MIN_BYTES, proposals.PACE_MAX_BYTES = paces
            membership_service.time = now
            watch_service.random = chance
            failpoints.disarm_all()
            logging.disable(logged)

    def _processor_time(self) -> float:
        if self.parameters.member.steps_are_slow:
            self._spent_s += LOOK_S
        return self.scheduler.now + self._spent_s

    def close(self) -> None:
        """End everything."""
        with self._process():
            self.scheduler.tear_down()

    # -- verbs ----------------------------------------------------------------------------------------------

    def join(self, id: int, members: Sequence[rpc_pb2.Member] = ()) -> None:
        """Start a new member with an empty disk that knows these members; a leader sends it the log."""
        if id not in self.members:
            self.journal.record("join", id)
            member = self._make(id)
            if members:
                member.join(members)
            member.start()

    def crash(self, id: int) -> None:
        """Kill a member, or cut its power, which loses or tears the unsynced tail of its log."""
        member = self.members[id]
        if not member.loop.crashed:
            power = self._crash_rng.random() < self.parameters.disk.power_cuts
            self.journal.record("crash", id, power)
            member.crash(power=power)

    def start(self, id: int) -> None:
        """Start a member that is down."""
        member = self.members[id]
        if not member.alive and not member.removed:
            self.journal.record("start", id)
            member.start()

    def retire(self, id: int) -> None:
        """Switch a removed member off for good."""
        self.crash(id)
        self.members[id].removed = True

    def wipe(self, id: int) -> None:
        """Lose a machine with its disk. Checkers keep its state, since others may rely on its promises."""
        self.journal.record("wipe", id)
        self.retire(id)

    def pause(self, id: int) -> None:
        """SIGSTOP."""
        self.journal.record("pause", id)
        self.members[id].pause()

    def resume(self, id: int) -> None:
        """SIGCONT."""
        self.journal.record("resume", id)
        self.members[id].resume()

    def arm(self, name: str, member_id: int | None, start_after_s: float) -> None:
        """Crash the next member (or one of the given) that reaches a failpoint; it restarts later."""
        self.armed[name] = (member_id, start_after_s)
        failpoints.arm_call(name, self._at_failpoint)

    def _at_failpoint(self, name: str) -> None:
        running = self.scheduler.running
        member = self.acting or (running._member if isinstance(running, MemberLoop) else None)
        wanted, start_after_s = self.armed[name]
        if member is None or member.loop.crashed or wanted not in (None, member.id):
            return
        del self.armed[name]
        failpoints.disarm(name)
        self.deaths[name] += 1
        self.journal.record("failpoint", name)
        self.crash(member.id)
        self.scheduler.after(start_after_s, self.start, member.id)
        raise FailpointPanic(name)

    def conf_applied(self, index: int, conf_state: ConfState) -> None:
        """A member has applied a membership change."""
        self.on_conf_applied(index, conf_state)

    # -- what clients and operators see ---------------------------------------------------------------------

    def members_reachable(self) -> list[int]:
        """Members that accept connections, paused ones too."""
        return [member.id for member in self.members.values() if member.alive and member.accepts_clients]

    def members_alive(self) -> list[int]:
        """Members whose process runs."""
        return [member.id for member in self.members.values() if member.alive]

    def leader_hint(self) -> int | None:
        """The running leader of the highest term."""
        leaders = [member for member in self.members.values() if member.is_leader()]
        return max(leaders, key=lambda member: member.term).id if leaders else None

    def _newest_membership(self) -> Membership | None:
        alive = [member for member in self.members.values() if member.alive and member.conf_state.voters]
        return max(alive, key=lambda member: member.applied).applier.membership if alive else None

    def newest_members(self) -> list[rpc_pb2.Member]:
        """The members as the most advanced running one knows them; none if no member runs."""
        membership = self._newest_membership()
        return membership.list() if membership is not None else []

    def newest_removed(self) -> set[int]:
        """The removed members as the most advanced running one knows them."""
        membership = self._newest_membership()
        return membership.removed if membership is not None else set()

    def newest_conf(self) -> ConfState:
        """The membership that the most advanced member has applied."""
        return max(self.members.values(), key=lambda member: member.applied).conf_state

    # -- the end --------------------------------------------------------------------------------------------

    def heal(self, quiet: NetworkParameters) -> None:
        """Stop all faults: mend links, resume and restart all members, make devices fast."""
        self.journal.record("heal")
        self.network.heal()
        self.network.parameters = quiet
        self.armed.clear()
        with self._process():
            for member in list(self.members.values()):
                member.loop.crash_after(-1)
                if member.paused:
                    self.resume(member.id)
                self.start(member.id)
                member.heal_disks()

    def voters(self) -> list[Member]:
        """The members of the newest membership."""
        conf = self.newest_conf()
        return [member for member in self.members.values() if member.id in (*conf.voters, *conf.learners)]

    def converged(self) -> bool:
        """Whether all members of the newest membership have applied the same log, to its end."""
        members = self.voters()
        leader = self.leader_hint()
        if leader is None:
            return False
        end = self.members[leader].last_index()
        return all(member.alive and member.applied == end for member in members)

    def check_equal_replicas(self) -> None:
        """All members of the newest membership hold what the log gives, in memory and on disk.

        Raises:
            ViolationError: HashKV or the contents differ.
        """
        members = self.voters()
        hashes: dict[int, KVHash] = {}
        replay = self.checkers.replay
        for member in members:
            for revision in {replay.revision, max(replay.compacted, 1)}:
                wrong = self.checkers.contents_differ(member, revision)
                if wrong:
                    raise ViolationError("R4", f"at the end: {wrong}")
            with self._process():
                member.loop.enter(self._hash, member, hashes)
        self.run_until(self.scheduler.now + 30.0, lambda: len(hashes) == len(members))
        if len(set(hashes.values())) != 1 or len(hashes) != len(members):
            raise ViolationError("D11", f"hashes differ at the end: {hashes}")

    @staticmethod
    def _hash(member: Member, hashes: dict[int, KVHash]) -> None:
        def ready(job: Callable[[], KVHash]) -> None:
            hashes[member.id] = job()

        member.store.hash_kv(0, ready)

    def describe(self) -> str:
        """Describe every member in one line."""
        return "; ".join(member.describe() for member in self.members.values())


def _never_asleep() -> tuple[float, float]:
    return 0.0, 0.0
