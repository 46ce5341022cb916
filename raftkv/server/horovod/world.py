"""What a member reads of a training run for Horovod's workers: who is in the present epoch, and the place of a slot.

Reads the records that ``raftkv/training`` writes, which the server does not import: their JSON is the contract.

>>> world = read_round(b'{"epoch":3,"members":[{"id":"a-1","host":"a","slots":2},{"id":"b-1","host":"b"}]}')
>>> world.epoch, str(world.slot("a", 1)), str(world.slot("b", 0)), str(world.slot("c", 0))
(3, '1,3,1,2,0,1', '2,3,0,1,1,2', '-1,-1,-1,-1,-1,-1')

Left out: everything about how an epoch comes about.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

SLOTS_MAX: Final = 1_000_000
"""Slots of a world: more are damage, and would hold the loop."""


class DamagedRecordError(ValueError):
    """A record of a run holds something that no run writes."""


class Slot(NamedTuple):
    """The place of a worker, in the order in which Horovod reads it; all -1: it has none."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


NO_SLOT: Final = Slot(-1, -1, -1, -1, -1, -1)


@dataclass(frozen=True, slots=True)
class World:
    """An epoch of a run: host and number of slots of each member, in the order of ranks."""

    epoch: int
    members: tuple[tuple[str, int], ...]

    def slot(self, host: str, local_rank: int) -> Slot:
        """The place of one slot of a host; ``NO_SLOT`` if there is none such."""
        used: Counter[str] = Counter()
        first, rank = 0, -1
        peers: list[str] = []
        for name, count in self.members:
            before = used[name]
            used[name] += count
            if before <= local_rank < used[name]:
                peers.append(name)
                if name == host:
                    rank = first + local_rank - before
            first += count
        if rank < 0:
            return NO_SLOT
        return Slot(rank, first, local_rank, used[host], peers.index(host), len(peers))


def read_round(value: bytes) -> World:
    """The world of a ``round`` record.

    Raises:
        DamagedRecordError: it is none.
    """
    plain = _object(value)
    epoch, members = plain.get("epoch"), plain.get("members", [])
    if type(epoch) is not int or epoch < 0 or not isinstance(members, list):
        raise DamagedRecordError(f"no round: {value[:80]!r}")
    world = World(epoch, tuple(_member(member) for member in members))
    if sum(count for _, count in world.members) > SLOTS_MAX:
        raise DamagedRecordError(f"a round of more than {SLOTS_MAX} slots")
    return world


def _member(plain: object) -> tuple[str, int]:
    if isinstance(plain, dict):
        host, slots = plain.get("host"), plain.get("slots", 1)
        if isinstance(host, str) and type(slots) is int and slots >= 0:
            return host, slots
    raise DamagedRecordError(f"no member of a round: {plain!r:.80}")


def read_state(value: bytes) -> tuple[int, str]:
    """Epoch and phase of a ``state`` record.

    Raises:
        DamagedRecordError: it is none.
    """
    plain = _object(value)
    epoch, phase = plain.get("epoch"), plain.get("phase")
    if type(epoch) is not int or not isinstance(phase, str):
        raise DamagedRecordError(f"no state of a run: {value[:80]!r}")
    return epoch, phase


def _object(value: bytes) -> dict[str, Any]:
    try:
        plain = json.loads(value)
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        raise DamagedRecordError(f"no JSON object: {value[:80]!r}")
    return plain
