"""Faults of the network between members: one-way or two-way cuts, delays, and resets.

    cut      a member and the others do not hear each other        deaf   it hears no member, all hear it
    offline  the same, and its clients do not reach it either      mute   no member hears it, it hears all
    bridge   only one member reaches all others                    slow   its messages take up to 250 ms
    reset    every connection breaks at once                       thin   50 to 250 ms, and 1 Mbit/s

They need ``Settings.network`` (``network.py``); clients stay connected except with ``offline``. With ``cut``, clients
can still reach the isolated leader, which must not answer from its outdated state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from jepsen.db import Cluster, DbError, Member
from jepsen.faults.network import CLIENTS, Network, Pair

if TYPE_CHECKING:
    from jepsen.faults.nemesis import Fault

SLOW_LEAST_S, SLOW_MOST_S = 0.025, 0.25
THIN_LEAST_S, THIN_MOST_S, THIN_BYTES_PER_S = 0.05, 0.25, 125_000.0


class _NetworkFault:
    """The base class of all network faults: healing one heals everything."""

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: undo all cuts and delays."""
        _network(cluster).heal()


class Cut(_NetworkFault):
    """A two-way cut between a member and all other members."""

    targets: ClassVar[tuple[str, ...]] = ("one", "leader", "follower", "all")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: cut."""
        _network(cluster).cut(both_ways(_outwards(cluster, members)))


class Offline(_NetworkFault):
    """A two-way cut between a member and all other members and clients."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "follower")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: cut."""
        pairs = [*_outwards(cluster, members), *((member.number, CLIENTS) for member in members)]
        _network(cluster).cut(both_ways(pairs))


class Deaf(_NetworkFault):
    """A one-way cut: messages of others do not arrive."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "follower")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: cut inwards."""
        _network(cluster).cut((there, here) for here, there in _outwards(cluster, members))


class Mute(_NetworkFault):
    """A one-way cut: the member's messages to others do not arrive."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "follower")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: cut outwards."""
        _network(cluster).cut(_outwards(cluster, members))


class Bridge(_NetworkFault):
    """A cut between two halves of the other members, which only the chosen one reaches."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "follower")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: cut the halves apart."""
        others = [member.number for member in cluster.members if member not in members]
        half = len(others) // 2
        _network(cluster).cut(both_ways(product(others[:half], others[half:])))


class Slow(_NetworkFault):
    """A delay of messages to and from other members."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "all")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: slow down."""
        _network(cluster).slow(both_ways(_outwards(cluster, members)), SLOW_LEAST_S, SLOW_MOST_S)


class Thin(_NetworkFault):
    """A slow, narrow line between all members, as between continents over a bad provider."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "all")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: delay and limit the bandwidth."""
        pairs = list(both_ways(_outwards(cluster, members)))
        _network(cluster).slow(pairs, THIN_LEAST_S, THIN_MOST_S, THIN_BYTES_PER_S)


class Reset(_NetworkFault):
    """A break of all connections, which may reconnect at once."""

    targets: ClassVar[tuple[str, ...]] = ("all",)

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: break them."""
        _network(cluster).reset()


FAULTS: dict[str, Callable[[], Fault]] = {
    "cut": Cut, "offline": Offline, "deaf": Deaf, "mute": Mute, "bridge": Bridge, "slow": Slow, "thin": Thin,
    "reset": Reset,
}  # fmt: skip


def both_ways(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Iterate over each pair and its reverse."""
    for here, there in pairs:
        yield here, there
        yield there, here


def _outwards(cluster: Cluster, members: list[Member]) -> list[Pair]:
    """Return a pair from each of some members to every other member."""
    return [(member.number, other.number) for member in members for other in cluster.members if other is not member]


def _network(cluster: Cluster) -> Network:
    if cluster.network is None:
        raise DbError("network faults need relays between the members: Settings.network")
    return cluster.network
