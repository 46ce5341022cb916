"""Planted bugs: each removes one safety rule from the running code, and the simulator must find every one.

``registry`` says what a mutant is; ``core`` plants them in Raft and its disk, the others in what their names say.

    with MUTANTS["vote given twice"].planted():
        report = hunt(range(100))
"""

from tests.sim.mutants import core, leases, membership, server, storage, turns, users, watches
from tests.sim.mutants.registry import MUTANTS, hunt

__all__ = ["MUTANTS", "core", "hunt", "leases", "membership", "server", "storage", "turns", "users", "watches"]
