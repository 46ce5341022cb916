"""A simulated cluster: members, network, disks, one event heap, one journal, one set of checkers.

Owns who exists. Faults come from ``nemesis``, requests from ``workload``; both only call the verbs here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from raftkv.raft.types import ConfState, HardState, Message, SnapshotMeta

from .checkers import Checkers, is_quorum
from .clock import Journal, Scheduler
from .disk import Disk, DiskParameters
from .history import ViolationError
from .machine import Operation, Outcome, StateImage, StateMachine
from .member import Answer, Member, MemberParameters
from .network import Network, NetworkParameters
from .wal_disk import WALDisk

_BOOT_INDEX = 1
_BOOT_TERM = 1


@dataclass(frozen=True, slots=True)
class ClusterParameters:
    """The cluster and its devices."""

    voters_count: int = 3
    member: MemberParameters = field(default_factory=MemberParameters)
    network: NetworkParameters = field(default_factory=NetworkParameters)
    disk: DiskParameters = field(default_factory=DiskParameters)
    tick_skew: float = 0.0
    checks_disabled: frozenset[str] = frozenset()


def stream(seed: int, name: str) -> random.Random:
    """An independent random stream: a fault drawn in one must not shift what another draws."""
    return random.Random(f"{seed}/{name}")


class Cluster:
    """Members on a network. All verbs take effect at ``scheduler.now_us``."""

    def __init__(self, seed: int, parameters: ClusterParameters, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.parameters = parameters
        self.scheduler = Scheduler()
        self.journal = Journal(self.scheduler, trace)
        self.members: dict[int, Member] = {}
        self.network = Network(self.scheduler, stream(seed, "network"), parameters.network, self._deliver, self._report)
        self.checkers = Checkers(self, parameters.checks_disabled)
        self.on_conf_applied: Callable[[int, ConfState], None] = lambda index, conf_state: None
        self._clock_rng = stream(seed, "clock")
        self._boot(tuple(range(1, parameters.voters_count + 1)))

    def _boot(self, voters: tuple[int, ...]) -> None:
        """Begin with a state that has the membership in it, as if the cluster had run before."""
        conf_state = ConfState(voters=voters)
        machine = StateMachine(_BOOT_INDEX, _BOOT_TERM, conf_state)
        self.checkers.bootstrapped(conf_state)
        for member_id in voters:
            disk = self._new_disk(member_id)
            marker = SnapshotMeta(_BOOT_INDEX, _BOOT_TERM, conf_state)
            disk.boot(machine.image(), [marker, HardState(_BOOT_TERM, 0, _BOOT_INDEX)])
            self._add(member_id, disk)

    def _new_disk(self, id: int) -> Disk:
        kind = WALDisk if self.parameters.disk.segment_bytes else Disk
        return kind(self.scheduler, stream(self.seed, f"disk {id}"), self.parameters.disk)

    def _add(self, id: int, disk: Disk) -> None:
        skew = self.parameters.tick_skew
        tick_us = int(self.parameters.member.tick_us * (1 + self._clock_rng.uniform(-skew, skew)))
        member = Member(self, id, disk, stream(self.seed, f"member {id}"), tick_us)
        self.members[id] = member
        member.start()

    # -- verbs ----------------------------------------------------------------------------------------------

    def join(self, id: int) -> None:
        """Start a new member with an empty disk; a leader will bring it what it needs."""
        if id not in self.members:
            self.journal.record("join", id)
            self._add(id, self._new_disk(id))

    def crash(self, id: int) -> None:
        """Kill a member; the un-synced tail of its log is lost or torn."""
        if self.members[id].alive:
            self.journal.record("crash", id)
            self.members[id].crash()

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

    def pause(self, id: int) -> None:
        """SIGSTOP."""
        self.journal.record("pause", id)
        self.members[id].pause()

    def resume(self, id: int) -> None:
        """SIGCONT."""
        self.journal.record("resume", id)
        self.members[id].resume()

    # -- what the network calls -----------------------------------------------------------------------------

    def _deliver(self, message: Message, payload: StateImage | None) -> None:
        member = self.members.get(message.to)
        if member is not None:
            member.enter(member.incarnation, member.deliver, message, payload)

    def _report(self, message: Message, arrived: bool) -> None:
        member = self.members[message.from_]
        member.enter(member.incarnation, member.report, message, arrived)

    # -- what clients and operators see ---------------------------------------------------------------------

    def members_reachable(self) -> list[int]:
        """Members that accept connections (a paused one does)."""
        return [member.id for member in self.members.values() if member.alive]

    def leader_hint(self) -> int | None:
        """The running leader of the highest term."""
        leaders = [member for member in self.members.values() if member.is_leader()]
        return max(leaders, key=lambda member: member.term).id if leaders else None

    def submit(self, member_id: int, operation: Operation, answer: Answer) -> None:
        """A client's request reaches a member; what a crashed member would answer never comes."""
        member = self.members[member_id]

        def answer_once(outcome: Outcome | None) -> None:
            self.journal.record("answer", member_id, operation.id, repr(outcome))
            answer(outcome)

        member.enter(member.incarnation, member.submit, operation, answer_once)

    def newest_conf(self) -> ConfState:
        """The membership that the most advanced member has applied."""
        newest = max(self.members.values(), key=lambda member: member.applied_ever())
        return newest.newest_conf_state()

    def has_live_quorum(self) -> bool:
        """Whether a majority of the newest membership runs."""
        return is_quorum(self.newest_conf(), [member.id for member in self.members.values() if member.alive])

    # -- the end --------------------------------------------------------------------------------------------

    def heal(self, quiet: NetworkParameters) -> None:
        """Stop all faults: mend links, resume and restart everybody, make devices fast."""
        self.journal.record("heal")
        self.network.heal()
        self.network.parameters = quiet
        for member in list(self.members.values()):
            member.disk.heal()
            if member.paused:
                self.resume(member.id)
            self.start(member.id)

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
        return all(member.alive and member.machine.applied_index == end for member in members)

    def check_equal_replicas(self) -> None:
        """All members of the newest membership hold the same state. Raises ``ViolationError``."""
        images = {member.id: member.machine.image() for member in self.voters()}
        if len(set(images.values())) > 1:
            raise ViolationError("R4", f"replicas differ at the end: {images}")

    def describe(self) -> str:
        """Every member in a line."""
        return "; ".join(member.describe() for member in self.members.values())

    def committed_log(self) -> list[bytes]:
        """Data of all entries ever applied, in order of index."""
        data = self.checkers.log_data
        return [data[index] for index in sorted(data)]
