"""The cluster in time: when leases end, when no member answers.

Owns the server's clock of leases, outages and elections. Keys are ``store.py``'s, the way to the cluster is
``network.py``'s.

Invariants, as of raftkv and etcd:
1. A lease ends when its TTL has passed since the last keep-alive that *arrived*, or its grace since its connection
   broke; never without a leader, and never earlier than a whole TTL after an outage or an election.
2. What arrives during an election waits for its end; what arrives during an outage is lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.virtual_loop import Scheduler

from .store import Store

EXPIRY_LATE_S = 0.1
"""The server looks after its leases from time to time only."""


@dataclass(slots=True)
class LeaseClock:
    """When a lease ends."""

    ttl_s: int
    grace_s: float
    deadline: float
    armed: float = 0.0


class Cluster:
    """See the module.

    Arguments:
        scheduler: whose time it is.
        source: of its moods.
        ttl_min_s: shortest lease that it grants.

    Attributes:
        up: it can be reached at all.
        electing: it can, but there is no leader.
        breaks: outages so far: each breaks every connection.
    """

    def __init__(self, scheduler: Scheduler, source: random.Random, ttl_min_s: int = 1) -> None:
        self.scheduler = scheduler
        self.random = source
        self.store = Store()
        self.up = True
        self.electing = False
        self.breaks = 0
        self.ttl_min_s = ttl_min_s
        self.leases: dict[int, LeaseClock] = {}
        self._waiting: list[Callable[[], None]] = []
        self._troubles = 0

    @property
    def leads(self) -> bool:
        """A member answers."""
        return self.up and not self.electing

    def when_led(self, action: Callable[[], None]) -> None:
        """Do something as soon as a member leads."""
        if self.electing:
            self._waiting.append(action)
        else:
            action()

    # ---- leases

    def grant(self, ttl_s: int, grace_s: float) -> tuple[int, int]:
        """A lease: its id, its TTL."""
        ttl_s = max(ttl_s, self.ttl_min_s)
        lease_id = self.store.grant(ttl_s)
        self.leases[lease_id] = LeaseClock(ttl_s, grace_s, self.scheduler.now + ttl_s)
        self._arm(lease_id)
        return lease_id, ttl_s

    def keep_alive(self, lease_id: int) -> bool:
        """A keep-alive has arrived; whether the lease lives."""
        clock = self.leases.get(lease_id)
        if clock is None:
            return False
        clock.deadline = self.scheduler.now + clock.ttl_s
        self._arm(lease_id)
        return True

    def disconnect(self, lease_id: int) -> None:
        """The connection that kept it alive has broken."""
        clock = self.leases.get(lease_id)
        if clock is not None and clock.grace_s and self.up:
            clock.deadline = min(clock.deadline, self.scheduler.now + clock.grace_s)
            clock.armed = 0.0
            self._arm(lease_id)

    def revoke(self, lease_id: int) -> None:
        """End it."""
        self.leases.pop(lease_id, None)
        self.store.revoke(lease_id)

    def _arm(self, lease_id: int) -> None:
        clock = self.leases[lease_id]
        if clock.armed <= self.scheduler.now:
            clock.armed = clock.deadline + self.random.uniform(0.001, EXPIRY_LATE_S)
            self.scheduler.after(clock.armed - self.scheduler.now, self._look, lease_id)

    def _look(self, lease_id: int) -> None:
        clock = self.leases.get(lease_id)
        if clock is None:
            return
        if self.leads and clock.deadline <= self.scheduler.now:
            self.revoke(lease_id)
        elif clock.armed <= self.scheduler.now:
            clock.armed = 0.0
            clock.deadline = max(clock.deadline, self.scheduler.now + 0.05)
            self._arm(lease_id)

    # ---- bad luck

    def outage(self, duration_s: float) -> None:
        """No client can reach it for so long; then it is back with everything it knew."""
        self.up = False
        self.breaks += 1
        self._trouble(duration_s)

    def election(self, duration_s: float) -> None:
        """No member leads for so long."""
        self.electing = True
        self._trouble(duration_s)

    def _trouble(self, duration_s: float) -> None:
        self._troubles += 1
        self.scheduler.after(duration_s, self._recover, self._troubles)

    def _recover(self, trouble: int) -> None:
        if trouble != self._troubles:
            return
        self.up, self.electing = True, False
        for lease_id, clock in self.leases.items():
            clock.deadline = max(clock.deadline, self.scheduler.now + clock.ttl_s)
            self._arm(lease_id)
        waiting, self._waiting = self._waiting, []
        self.random.shuffle(waiting)
        for action in waiting:
            action()
