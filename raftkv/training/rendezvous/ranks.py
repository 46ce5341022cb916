"""Ranks: from the members of a generation, in their order, to the place of every slot. Pure.

>>> from raftkv.training.records import Member
>>> two = [Member("a-1", "a", slots=2), Member("b-1", "b", slots=1)]
>>> [(p.rank, p.local_rank, p.cross_rank, p.cross_size) for p in placements(two)]
[(0, 0, 0, 2), (1, 1, 0, 1), (2, 0, 1, 2)]

Terms as in Horovod: the *local* rank counts the slots on one host, the *cross* rank the hosts that have a slot with
that local rank. Members on one host share its local ranks, in their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from raftkv.training.records import Member


class Placement(NamedTuple):
    """The place of one slot.

    Attributes:
        member: index of its member: the node rank.
        rank: among all slots.
        local_rank, local_size: among those of its host.
        cross_rank, cross_size: of its host, among the hosts that have this local rank.
    """

    member: int
    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def world_size(members: Sequence[Member]) -> int:
    """Count the slots of all members."""
    return sum(member.slots for member in members)


def first_ranks(members: Sequence[Member]) -> list[int]:
    """Return the lowest rank of each member."""
    firsts, total = [], 0
    for member in members:
        firsts.append(total)
        total += member.slots
    return firsts


def find_slot(members: Sequence[Member], host: str, local_rank: int) -> Placement | None:
    """Find one of the ``placements`` by its host and local rank, in a time that grows with the members alone.

    Arguments:
        members: of the generation, in the order of ranks.
        host: name of the machine.
        local_rank: of the slot, among those of its host.

    Returns:
        None: the host has no such slot.
    """
    used: dict[str, int] = defaultdict(int)
    peers: list[str] = []
    first, member, rank = 0, -1, -1
    for index, each in enumerate(members):
        before = used[each.host]
        used[each.host] += each.slots
        if before <= local_rank < used[each.host]:
            peers.append(each.host)
            if each.host == host:
                member, rank = index, first + local_rank - before
        first += each.slots
    if rank < 0:
        return None
    return Placement(member, rank, local_rank, used[host], peers.index(host), len(peers))


def placements(members: Sequence[Member]) -> list[Placement]:
    """Compute the places of all slots, by rank."""
    local_sizes: dict[str, int] = defaultdict(int)
    slots: list[tuple[int, str, int]] = []
    for index, member in enumerate(members):
        for _ in range(member.slots):
            slots.append((index, member.host, local_sizes[member.host]))
            local_sizes[member.host] += 1
    cross: dict[int, dict[str, int]] = defaultdict(dict)
    for _, host, local_rank in slots:
        cross[local_rank].setdefault(host, len(cross[local_rank]))
    return [
        Placement(index, rank, local_rank, local_sizes[host], cross[local_rank][host], len(cross[local_rank]))
        for rank, (index, host, local_rank) in enumerate(slots)
    ]
