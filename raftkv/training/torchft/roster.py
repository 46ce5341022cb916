"""The replicas that one daemon serves: who is heard of, over which connections, and who waits for a quorum.

No clock, no socket, no store: times are given, an answer is a callback.

Invariants:

1. A replica is dropped when all of its connections have closed and none came in its place within the grace that the
   owner gives it. One that was silent for ``heartbeat_timeout_s`` counts as gone; its ask is kept for its return.
2. Everyone who waits for a replica's quorum gets one answer, from the first quorum that has the replica's latest ask.
3. An ask ends with the last one who waits for it: nobody is put into a quorum who would not hear of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

from raftkv.training.torchft.rules import Ask

Answer = Callable[[bytes], None]

WAITING_MAX: Final = 16
"""For one replica's quorum. Each gets the whole quorum, so many would multiply it."""


@dataclass(slots=True)
class Replica:
    """One replica.

    Attributes:
        heard_s: when it last said something.
        connections: those it has spoken on that are open.
        ask: the ask that is not answered yet.
        asked_s: since when.
        waiting: who waits for it, by any name.
    """

    heard_s: float
    connections: set[Hashable] = field(default_factory=set)
    ask: Ask | None = None
    asked_s: float = 0.0
    waiting: dict[Hashable, Answer] = field(default_factory=dict)


class Roster:
    """The replicas of one job that this daemon serves."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self.replicas: dict[str, Replica] = {}
        self._timeout_s = heartbeat_timeout_s
        self._by_connection: dict[Hashable, set[str]] = {}

    def heard(self, replica_id: str, connection: Hashable, now_s: float) -> bool:
        """Note that something came from a replica; tells if it did not count as healthy before.

        Arguments:
            replica_id: from whom.
            connection: on which it came.
            now_s: seconds of the loop's clock.
        """
        replica = self.replicas.get(replica_id)
        if replica is None:
            self._connect(replica_id, Replica(now_s), connection)
            return True
        was_silent = now_s - replica.heard_s >= self._timeout_s
        replica.heard_s = now_s
        if connection not in replica.connections:
            self._connect(replica_id, replica, connection)
        return was_silent

    def _connect(self, replica_id: str, replica: Replica, connection: Hashable) -> None:
        self.replicas[replica_id] = replica
        replica.connections.add(connection)
        self._by_connection.setdefault(connection, set()).add(replica_id)

    def asked(self, ask: Ask, waiter: Hashable, answer: Answer, now_s: float) -> None:
        """Note what a replica asks, in place of what it asked before.

        Arguments:
            ask: what it asks.
            waiter: who withdraws the answer with ``withdraw``.
            answer: called with the body of the answer.
            now_s: seconds of the loop's clock.
        """
        replica = self.replicas[ask.replica_id]
        replica.ask, replica.asked_s = ask, now_s
        replica.waiting[waiter] = answer

    def is_crowded(self, replica_id: str) -> bool:
        """Tell whether so many wait for a replica's quorum that no other may; a manager has one call under way."""
        replica = self.replicas.get(replica_id)
        return replica is not None and len(replica.waiting) >= WAITING_MAX

    def withdraw(self, replica_id: str, waiter: Hashable) -> bool:
        """Withdraw a waiter; tells if that ends the ask.

        Arguments:
            replica_id: who asked.
            waiter: as in ``asked``.
        """
        replica = self.replicas.get(replica_id)
        if replica is None or replica.waiting.pop(waiter, None) is None or replica.waiting:
            return False
        replica.ask = None
        return True

    def disconnected(self, connection: Hashable) -> list[str]:
        """Note a closed connection; returns the replicas that have no other."""
        alone = []
        for replica_id in sorted(self._by_connection.pop(connection, ())):
            replica = self.replicas.get(replica_id)
            if replica is None:
                continue
            replica.connections.discard(connection)
            if not replica.connections:
                alone.append(replica_id)
        return alone

    def drop_absent(self, replica_id: str) -> bool:
        """Drop a replica whose grace has passed without a connection; tells if it is gone."""
        replica = self.replicas.get(replica_id)
        if replica is None or replica.connections:
            return False
        del self.replicas[replica_id]
        return True

    def healthy(self, now_s: float) -> frozenset[str]:
        """Return the replicas that were heard of lately."""
        return frozenset(name for name, replica in self.replicas.items() if now_s - replica.heard_s < self._timeout_s)

    def next_silence_s(self, now_s: float) -> float | None:
        """Return when the next healthy one may have been silent for too long; None: there is none."""
        ends = [replica.heard_s + self._timeout_s for replica in self.replicas.values()]
        return min((end for end in ends if end > now_s), default=None)

    def asks(self) -> dict[str, tuple[Ask, float]]:
        """Return who asks what, since when."""
        return {
            name: (replica.ask, replica.asked_s) for name, replica in self.replicas.items() if replica.ask is not None
        }

    def answer(self, replica_id: str, number: str, body: bytes) -> bool:
        """Answer an ask with a quorum; tells if it was one of this roster.

        Arguments:
            replica_id: who asked.
            number: of the ask.
            body: of the answer.
        """
        replica = self.replicas.get(replica_id)
        if replica is None or replica.ask is None or replica.ask.number != number:
            return False
        replica.ask = None
        waiting, replica.waiting = replica.waiting, {}
        for answer in waiting.values():
            answer(body)
        return True
