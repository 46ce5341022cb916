"""Planted bugs in fair queueing of identities before the log."""

from __future__ import annotations

from raftkv.loop.fair import FairQueue, Identity
from raftkv.replica.node import proposals
from tests.sim.corners import floods_corner
from tests.sim.mutants.registry import Patches, mutant


@mutant("identities forgotten in the queue", "a flood of one holds up no other (F1)", floods_corner)
def _forgotten(patches: Patches) -> None:
    patches.set(proposals, "queue_of", lambda identity: "")


@mutant("few proposals sorted at a time", "who comes behind a flood is found in it (F1)", floods_corner)
def _few_sorted(patches: Patches) -> None:
    patches.set(proposals, "SORTED_AT_ONCE", 4)


@mutant("an identity that rested saves up", "who comes anew begins at the time of the others (F1)", floods_corner)
def _saves_up(patches: Patches) -> None:
    def add(queue: FairQueue[int], identity: Identity, item: int) -> None:
        now, queue._now = queue._now, 0.0
        original(queue, identity, item)
        queue._now = now

    original = patches.set(FairQueue, "add", add)
