"""Directed schedules: a cluster that moves only by the steps of a test.

Owns ``Stage``: no ticks, no random network; every message is held until the test delivers or drops it. For
interleavings that random runs practically never find, such as Figure 8 of the Raft paper.

    stage = Stage(5)
    stage.elect(1, voters=(2, 3))
    stage.submit(1)
    stage.deliver(1, 2)          # everything held from 1 to 2, and the answers back
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from raftkv.pb import rpc_pb2
from raftkv.raft.types import ConfChange, Message
from tests.sim.assembly import MemberParameters
from tests.sim.clients.history import History, Invocation, Operation, check_history
from tests.sim.clients.workload import COMPACT, DELETE, PUT, RANGE, Workload, WorkloadParameters
from tests.sim.cluster import Cluster, ClusterParameters
from tests.sim.devices import snapshots
from tests.sim.devices.database import Database
from tests.sim.devices.network import Network, clone
from tests.sim.devices.wal_disk import DiskParameters
from tests.sim.member import Member

_HOURS_S = 1_000_000.0
_SETTLE_S = 0.05
_CAMPAIGNS_MAX = 4
_ALL = 1 << 30


class HeldNetwork(Network):
    """Holds every message until ``release``."""

    def __init__(self, network: Network) -> None:
        super().__init__(network._scheduler, network._rng, network.parameters, network._members)
        self.held: list[tuple[int, Message, tuple[Member, Database, asyncio.Future[None]] | None]] = []

    def send(self, source: int, messages: list[Message]) -> None:
        """Hold the messages."""
        self.held += [(source, clone(message), None) for message in messages]

    def send_snapshot(self, member: Member, message: Message, content: Database, arrived: asyncio.Future[None]) -> None:
        """Hold a database."""
        self.held.append((member.id, clone(message), (member, content, arrived)))

    def release(self, source: int, target: int, count_max: int) -> int:
        """Deliver up to ``count_max`` messages held from ``source`` to ``target``; returns how many."""
        matching = [held for held in self.held if (held[0], held[1].to) == (source, target)][:count_max]
        self.held = [held for held in self.held if not any(held is taken for taken in matching)]
        for _, message, database in matching:
            self._deliver(message, database)
        return len(matching)

    def _deliver(self, message: Message, database: Any) -> None:
        target = self._members.get(message.to)
        if target is None or not target.alive:
            return
        if database is None:
            target.deliver([message])
            return
        sender, content, arrived = database
        target.call_soon(snapshots.receive, target, message, content)
        sender.call_soon(arrived.set_result, None)


class Stage:
    """Members that act only by the steps of a test. All disks are fast and lose nothing."""

    open: ClassVar[list[Stage]] = []
    """Stages whose end is still to come; ``close_all``."""

    def __init__(
        self,
        voters_count: int,
        checks_disabled: Iterable[str] = (),
        segment_bytes: int = 4_096,
        settings: ClusterParameters | None = None,
        **member: Any,
    ) -> None:
        quiet: dict[str, Any] = {
            "tick_s": _HOURS_S,
            "pre_vote": False,
            "check_quorum": False,
            "commit_interval_s": _HOURS_S,
            "ready_timeout_s": 0.0,
            **member,
        }
        parameters = settings or ClusterParameters(
            voters_count,
            MemberParameters(**quiet),
            disk=DiskParameters(power_cuts=0.0, segment_bytes=segment_bytes),
            checks_disabled=frozenset(checks_disabled),
        )
        self.cluster = Cluster(0, parameters)
        self.network = HeldNetwork(self.cluster.network)
        self.cluster.network = self.network
        self.workload = Workload(self.cluster._jitter_rng, WorkloadParameters(clients_count=0), self.cluster)
        Stage.open.append(self)

    @classmethod
    def close_all(cls) -> None:
        """Close all stages that are still open."""
        for stage in cls.open:
            stage.cluster.close()
        cls.open.clear()

    @property
    def history(self) -> History:
        """Requests of clients and their answers."""
        return self.workload.history

    def settle(self, seconds: float = _SETTLE_S) -> None:
        """Let disks and turns finish. Raises ViolationError."""
        self.cluster.run_until(self.cluster.scheduler.now + seconds)

    def drop(self) -> None:
        """Drop all held messages."""
        self.network.held.clear()

    def lose(self, source: int, target: int) -> None:
        """Drop the messages held from one member to another."""
        self.network.held = [held for held in self.network.held if (held[0], held[1].to) != (source, target)]

    def deliver(self, source: int, target: int, count_max: int = _ALL, answers: bool = True) -> None:
        """Deliver the messages held from ``source`` to ``target``, then (with ``answers``) the answers."""
        self.network.release(source, target, count_max)
        self.settle()
        if answers:
            self.network.release(target, source, _ALL)
            self.settle()

    def do(self, id: int, action: Callable[..., object], *arguments: Any) -> None:
        """Run an action at a member."""
        self.cluster.members[id].call_soon(action, *arguments)
        self.settle()

    def elect(self, id: int, voters: Iterable[int]) -> None:
        """Let ``id`` campaign until it wins with these voters (terms already used need several tries).

        No other member hears of the election; the new leader's messages are held.
        """
        member = self.cluster.members[id]
        for _ in range(_CAMPAIGNS_MAX):
            self.network.held = [held for held in self.network.held if held[0] != id]
            self.do(id, member.campaign)
            for voter in voters:
                self.deliver(id, voter, 1)
            if member.is_leader():
                return
        raise RuntimeError(f"{id} did not win: {self.cluster.describe()}")

    def tick(self, id: int) -> None:
        """Let one tick pass at member ``id``: a leader sends heartbeats."""
        node = self.cluster.members[id].running
        self.do(id, node._tick)

    def change(self, id: int, change: ConfChange) -> None:
        """Request a membership change from a leader."""
        self.do(id, self.cluster.members[id].propose_conf_change, change)

    def write(self, id: int) -> Invocation:
        """Send a client's write to member ``id``; the history records the answer."""
        return self._ask(id, Operation(PUT, rpc_pb2.PutRequest(key=b"k0", value=self.workload._value())))

    def read(self, id: int) -> Invocation:
        """Send a client's linearizable read to member ``id``."""
        return self._ask(id, Operation(RANGE, rpc_pb2.RangeRequest(key=b"k0")))

    def delete(self, id: int) -> Invocation:
        """Send member ``id`` a client's deletion of the key of ``write``."""
        return self._ask(id, Operation(DELETE, rpc_pb2.DeleteRangeRequest(key=b"k0")))

    def compact(self, id: int, revision: int) -> Invocation:
        """Send a client's compaction to member ``id``."""
        return self._ask(id, Operation(COMPACT, rpc_pb2.CompactionRequest(revision=revision)))

    def _ask(self, id: int, operation: Operation) -> Invocation:
        invocation = self.workload.call(id, id, operation, lambda outcome: None)
        self.settle()
        return invocation

    def commit_database(self, id: int) -> None:
        """Commit the database of a member and compact its log."""
        member = self.cluster.members[id]
        self.do(id, member.store.commit)
        self.settle(1.0)
        self.do(id, member.replica.log_cut.step)

    def restart(self, id: int) -> None:
        """Crash and restart a member; its held messages are lost."""
        self.crash(id)
        self.start(id)

    def start(self, id: int) -> None:
        """Start a member that is down."""
        with self.cluster._process():
            self.cluster.start(id)
        self.settle()

    def crash(self, id: int) -> None:
        """Crash a member; its held messages are lost."""
        self.cluster.crash(id)
        self.network.held = [held for held in self.network.held if held[0] != id]

    def check(self) -> None:
        """Check the history. Raises ``ViolationError``."""
        check_history(self.history.invocations, self.cluster.checkers.replay)
