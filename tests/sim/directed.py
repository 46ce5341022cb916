"""Directed schedules: a cluster in which nothing moves but what the story says.

Owns ``Stage``: no ticks, no random network; every message is held until the story delivers or drops it. For the
interleavings that random runs do not find in a lifetime, such as Figure 8 of the Raft paper.

    stage = Stage(5)
    stage.elect(1, voters=(2, 3))
    stage.propose(1)
    stage.deliver(1, 2)          # everything held from 1 to 2, and the answers back
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raftkv.raft.types import Message

from .clock import SECOND_US
from .cluster import Cluster, ClusterParameters
from .disk import DiskParameters
from .history import History, Invocation, check_history
from .machine import Kind, Operation
from .member import MemberParameters
from .network import Network, clone

_HOURS_US = 1_000_000 * SECOND_US
_SETTLE_US = SECOND_US
_CAMPAIGNS_MAX = 4


class HeldNetwork(Network):
    """Holds every message until it is told to deliver."""

    def __init__(self, network: Network) -> None:
        super().__init__(network._scheduler, network._rng, network.parameters, network._deliver, network._report)
        self.held: list[tuple[Message, Any]] = []

    def send(self, message: Message, payload: Any = None) -> None:
        """Hold the message."""
        self.held.append((clone(message), payload))

    def release(self, source: int, target: int, count_max: int) -> int:
        """Deliver up to ``count_max`` messages held from ``source`` to ``target``; returns how many."""
        matching = [held for held in self.held if (held[0].from_, held[0].to) == (source, target)][:count_max]
        self.held = [held for held in self.held if not any(held is taken for taken in matching)]
        for message, payload in matching:
            self._deliver(message, payload)
        return len(matching)


class Stage:
    """Members that act only when told to. All disks are fast and tear nothing."""

    def __init__(
        self, voters_count: int, checks_disabled: Iterable[str] = (), segment_bytes: int = 0, **member: Any
    ) -> None:
        settings: dict[str, Any] = {
            "tick_us": _HOURS_US,
            "pre_vote": False,
            "check_quorum": False,
            "image_every_us": _HOURS_US,
            "read_retry_us": _HOURS_US,
            **member,
        }
        parameters = ClusterParameters(
            voters_count,
            MemberParameters(**settings),
            disk=DiskParameters(torn_tail=False, segment_bytes=segment_bytes),
            checks_disabled=frozenset(checks_disabled),
        )
        self.cluster = Cluster(0, parameters)
        self.network = HeldNetwork(self.cluster.network)
        self.cluster.network = self.network
        self.history = History()
        self._operations_count = 0

    def settle(self) -> None:
        """Let disks and timers finish."""
        scheduler = self.cluster.scheduler
        scheduler.run_until(scheduler.now_us + _SETTLE_US)

    def drop(self) -> None:
        """Lose everything held."""
        self.network.held.clear()

    def deliver(self, source: int, target: int, count_max: int = 1 << 30, answers: bool = True) -> None:
        """Deliver what is held from ``source`` to ``target``, then (with ``answers``) what it answers."""
        self.network.release(source, target, count_max)
        self.settle()
        if answers:
            self.network.release(target, source, 1 << 30)
            self.settle()

    def elect(self, id: int, voters: Iterable[int]) -> None:
        """Let ``id`` campaign until it wins with these voters (terms that are spent take several tries).

        Nobody else hears of it; what it sends as a leader is held.
        """
        member = self.cluster.members[id]
        for _ in range(_CAMPAIGNS_MAX):
            self.network.held = [held for held in self.network.held if held[0].from_ != id]
            member.enter(member.incarnation, member.campaign)
            self.settle()
            for voter in voters:
                self.deliver(id, voter, 1)
            if member.is_leader():
                return
        raise RuntimeError(f"{id} did not win: {self.cluster.describe()}")

    def tick(self, id: int) -> None:
        """One tick passes at member ``id``: a leader sends heartbeats."""
        member = self.cluster.members[id]
        member.enter(member.incarnation, member.tick)
        self.settle()

    def submit(self, id: int, kind: Kind = Kind.PUT, key: int = 0) -> Invocation:
        """A client asks member ``id``; the answer is noted in the history."""
        self._operations_count += 1
        operation = Operation(self._operations_count, kind, key, self._operations_count)
        invocation = self.history.call(id, operation)
        self.cluster.submit(id, operation, lambda outcome: self.history.end(invocation, outcome))
        self.settle()
        return invocation

    def restart(self, id: int) -> None:
        """Crash and start again; what it had sent and is still held is lost."""
        self.crash(id)
        self.cluster.start(id)
        self.settle()

    def crash(self, id: int) -> None:
        """Crash; held messages from it are lost."""
        self.cluster.crash(id)
        self.network.held = [held for held in self.network.held if held[0].from_ != id]

    def judge(self) -> None:
        """Check the history. Raises ``ViolationError``."""
        check_history(self.history.invocations, self.cluster.committed_log())
