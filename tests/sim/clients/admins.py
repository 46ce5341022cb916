"""Administrators that keep changing users' rights through any member."""

from __future__ import annotations

import random

from tests.sim.clients.users import CHANGE_S_MEAN, draw_change
from tests.sim.cluster import Cluster


class Admin:
    """Makes one change after the other; the log shows the outcome.

    Arguments:
        cluster, rng: of the simulation.
    """

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._running = True

    def start(self) -> None:
        """Begin."""
        self._cluster.scheduler.after(self._rng.expovariate(1.0 / CHANGE_S_MEAN), self._change)

    def stop(self) -> None:
        """Change nothing more."""
        self._running = False

    def _change(self) -> None:
        if not self._running:
            return
        members = self._cluster.members_reachable()
        if members:
            self._cluster.members[self._rng.choice(members)].change_users(draw_change(self._rng))
        self.start()
