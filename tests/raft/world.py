"""A whole cluster in one object: members, their network, and all possible events.

Used by the property tests (events drawn by Hypothesis) and the seeded schedules (events drawn from a seed). ``check``
verifies the rules of one member and of the cluster (reliability.md R1-R5, R7-R9) and that reads are linearizable (K3).
"""

from __future__ import annotations

import random

from raftkv.raft import confchange
from raftkv.raft.errors import ConfChangeError, ProposalDropped, StepPeerNotFound
from raftkv.raft.log import MemoryLog
from raftkv.raft.types import ConfChange, ConfState, Message, MessageType, RaftConfig, SnapshotMeta, StateRole

from .cluster_checks import ClusterChecks
from .member import Member

ELECTION_TICKS = 4
VOTERS = (1, 2, 3)
POOL = (1, 2, 3, 4)
"""Members 1 to 3 vote at first, 4 stands by for membership changes."""


class FreshSnapshots(MemoryLog):
    """Offers a snapshot of the present state at any time, as a server with a database can."""

    member: Member

    def snapshot(self) -> SnapshotMeta:
        named = super().snapshot()
        if not hasattr(self, "member") or self.member.applied <= named.index:
            return named
        applied = self.member.applied
        return SnapshotMeta(applied, self.term(applied), self.member.conf_state_at(applied))


class World:
    """See the head of the module. ``options`` are fields of ``RaftConfig``."""

    def __init__(self, seed: int, **options: int) -> None:
        rng = random.Random(seed)
        self.members: dict[int, Member] = {}
        for member in POOL:
            config = RaftConfig(id=member, election_ticks=ELECTION_TICKS, **options)
            log = FreshSnapshots(conf_state=ConfState(voters=VOTERS))
            self.members[member] = log.member = Member(config, log, random.Random(rng.random()))
        self.network: list[Message] = []
        self.checks = ClusterChecks()
        self.proposed = 0
        # Commit index that was known somewhere when a read was asked, by context.
        self.reads: dict[bytes, int] = {}

    # -- the network -------------------------------------------------------------------------------------------------

    def deliver(self, position: int, keep: bool = False) -> None:
        """Hand one message to its receiver; ``keep`` leaves a copy on the way."""
        if self.network:
            at = position % len(self.network)
            self._step(self.network[at] if keep else self.network.pop(at))

    def _step(self, message: Message) -> None:
        try:
            self.members[message.to].node.step(message)
        except (ProposalDropped, StepPeerNotFound):
            pass
        if message.type == MessageType.SNAPSHOT:
            self.members[message.from_].node.report_snapshot(message.to, True)

    def lose(self, position: int) -> None:
        """Lose one message."""
        if self.network:
            self._lost(self.network.pop(position % len(self.network)))

    def lose_all_of(self, cut: int) -> None:
        """Lose everything from and to a member."""
        lost = [message for message in self.network if cut in (message.from_, message.to)]
        self.network = [message for message in self.network if message not in lost]
        for message in lost:
            self._lost(message)

    def _lost(self, message: Message) -> None:
        # The transport tells the sender when a snapshot could not be delivered.
        if message.type == MessageType.SNAPSHOT:
            self.members[message.from_].node.report_snapshot(message.to, False)

    # -- the disk and the state machine ------------------------------------------------------------------------------

    def take(self, member: int) -> None:
        """Take a Ready; disk and state machine wait."""
        if self.members[member].node.has_ready():
            self.network += self.members[member].take().messages

    def write(self, member: int) -> None:
        """The oldest Ready becomes durable."""
        if self.members[member].writing:
            self.network += self.members[member].write()

    def apply(self, member: int) -> None:
        """The oldest page of committed entries is applied."""
        if self.members[member].applying:
            self.members[member].apply()

    def crash(self, member: int, back: int, survivors: int) -> None:
        """Restart; the state machine falls back, and some writes on their way survive."""
        crashed = self.members[member]
        crashed.crash(max(crashed.applied - back, 0), survivors)
        self.checks.forget(member)

    def compact(self, member: int, keep: int) -> None:
        """Snapshot and drop the log up to ``keep`` entries before the applied one."""
        compacted = self.members[member]
        index = compacted.applied - keep
        if index >= compacted.log.first_index() and index > MemoryLog.snapshot(compacted.log).index:
            compacted.compact(index)

    # -- the callers -------------------------------------------------------------------------------------------------

    def leader(self) -> Member | None:
        """The leader of the highest term, if there is one."""
        leaders = [member for member in self.members.values() if member.node.raft.role == StateRole.LEADER]
        return max(leaders, key=lambda member: member.node.raft.term, default=None)

    def propose(self, member: int, count: int) -> None:
        """Propose some entries, each of them new."""
        self.proposed += count
        try:
            self.members[member].node.propose_batch([b"%d" % (self.proposed - at) for at in range(count)])
        except ProposalDropped:
            pass

    def change_membership(self, change: ConfChange) -> None:
        """Propose a change to the leader, if it is legal there: a server asks first, as etcd's does."""
        leader = self.leader()
        if leader is None:
            return
        try:
            confchange.apply(leader.node.raft.tracker.config, change)
            leader.node.propose_conf_change(change)
        except (ConfChangeError, ProposalDropped):
            pass

    def read(self, member: int) -> None:
        """Ask for a read, noting what it must see."""
        context = b"read %d" % len(self.reads)
        self.reads[context] = max(each.node.raft.log.committed for each in self.members.values())
        self.members[member].node.read_index(context)

    def tick(self, member: int, count: int) -> None:
        """Let time pass for one member."""
        for _ in range(count):
            self.members[member].node.tick()

    # -- runs of good luck -------------------------------------------------------------------------------------------

    def exchange(self, members: set[int], rounds: int) -> None:
        """These members work and exchange messages, without any fault."""
        for _ in range(rounds):
            self.round(sorted(members))

    def round(self, members: list[int]) -> None:
        """Each of these members does all its work once, then gets what was sent to it."""
        for member in members:
            working = self.members[member]
            while working.writing:
                self.network += working.write()
            while working.applying:
                working.apply()
            if working.node.has_ready():
                self.network += working.work()[1]
        messages = [message for message in self.network if message.to in members]
        self.network = [message for message in self.network if message.to not in members]
        for message in messages:
            self._step(message)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if a rule is broken."""
        for member in self.members.values():
            member.checker.check()
            for state in member.read_states:
                assert state.index >= self.reads[state.context], f"stale read at {member.id}: {state}"
        self.checks.check(member.node.raft for member in self.members.values())

    def check_progress(self) -> None:
        """R10: the faults stop, and soon there is a leader that commits."""
        for number in range(2000):
            if number % 4 == 0:
                for member in POOL:
                    self.tick(member, 1)
            self.round(list(POOL))
            self.check()
            if number % 20 == 19 and self._commits():
                return
        raise AssertionError(f"no progress: {[member.node.status() for member in self.members.values()]}")

    def _commits(self) -> bool:
        leader = self.leader()
        if leader is None:
            return False
        try:
            leader.node.propose(b"last")
        except ProposalDropped:
            return False
        for _ in range(8):
            self.round(list(POOL))
        return any(entry.data == b"last" for entry in leader.history[-4:])
