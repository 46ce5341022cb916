"""A world: one generation, as one of its members sees it. A value; it never changes, it only ends.

::

    world = await participant.next_world()
    world.generation, world.rank, world.world_size
    await kv.put("checkpoints/latest", b"7", fence=world.fence)    # refused once the generation is over

The fence of a world is two conditions on the store: ``round`` was not written since, and the leased key of this node
is there. A process that slept through its lease therefore writes nothing, whatever it believes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from raftkv.client.control.records import RecordError
from raftkv.client.control.reflector import Interval
from raftkv.client.kv.operations import Compare, mod_revision, version
from raftkv.client.scope import Space
from raftkv.client.values import KeyValue
from raftkv.pb import rpc_pb2
from raftkv.training.errors import GenerationOver
from raftkv.training.keys import RunKeys
from raftkv.training.records import BROKEN, CLOSED, Member, State
from raftkv.training.rendezvous import ranks


@dataclass(frozen=True)
class World:
    """One generation as one of its nodes sees it.

    Attributes:
        run_id: of the run.
        generation: its number; grows with every world of the run, never goes back: the fencing token.
        members: in the order of ranks.
        index: of this node among them: the node rank.
        revision: of the store when it began.
    """

    run_id: str
    generation: int
    members: tuple[Member, ...]
    index: int
    revision: int

    def __repr__(self) -> str:
        place = f"node {self.index} of {len(self.members)}, rank {self.rank} of {self.world_size}"
        return f"<World of run {self.run_id!r}: generation {self.generation}, {place}>"

    @property
    def epoch(self) -> int:
        """Alias of ``generation``."""
        return self.generation

    @property
    def member(self) -> Member:
        """This node."""
        return self.members[self.index]

    @property
    def node_rank(self) -> int:
        """This node's place among the nodes."""
        return self.index

    @property
    def node_count(self) -> int:
        """Nodes."""
        return len(self.members)

    @cached_property
    def placements(self) -> list[ranks.Placement]:
        """The places of all slots, by rank."""
        return ranks.placements(self.members)

    @cached_property
    def world_size(self) -> int:
        """Slots of all nodes."""
        return ranks.world_size(self.members)

    @cached_property
    def rank(self) -> int:
        """The lowest rank on this node."""
        return ranks.first_ranks(self.members)[self.index]

    @property
    def local_rank(self) -> int:
        """Number of this node's lowest rank among those on its host."""
        return self.placements[self.rank].local_rank

    @property
    def local_size(self) -> int:
        """Slots on this node's host."""
        return self.placements[self.rank].local_size

    @property
    def cross_rank(self) -> int:
        """Number of this node's host among those that have its local rank."""
        return self.placements[self.rank].cross_rank

    @property
    def cross_size(self) -> int:
        """Hosts that have this node's local rank."""
        return self.placements[self.rank].cross_size

    @property
    def fence(self) -> WorldFence:
        """For ``fence=`` of a client's calls: they fail with ``GenerationOver`` once the generation is over."""
        return WorldFence(self)


class WorldFence:
    """The conditions under which a world may write; see the module.

    Attributes:
        conditions: all must hold.
        watched: the keys that tell of its end.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        keys = RunKeys(world.run_id)
        self.watched: Interval = keys.record
        self.conditions: tuple[Compare, ...] = (
            mod_revision(keys.round) == world.revision,
            version(keys.node(world.member.id)) > 0,
        )

    def compares(self) -> list[rpc_pb2.Compare]:
        """Implement ``client.guards.Fence.compares``."""
        return [condition.to_message(Space()) for condition in self.conditions]

    def why_over(self, items: Mapping[bytes, KeyValue]) -> str | None:
        """Return why the generation has ended, or is about to; None: it lasts, as far as the records say.

        Arguments:
            items: the keys that are ``watched``.
        """
        keys, world = RunKeys(self._world.run_id), self._world
        current, item = items.get(keys.round.encode()), items.get(keys.state.encode())
        if current is None or current.mod_revision != world.revision:
            return "another generation has begun"
        try:
            state = None if item is None else State.decode(item.value)
        except RecordError:
            return None  # whoever takes part in the run says so
        if state is None or (state.phase != CLOSED and (state.phase, state.generation) != (BROKEN, world.generation)):
            return None
        return state.reason

    def broken(self, reason: str = "") -> GenerationOver:
        """Implement ``client.guards.Fence.broken``.

        Arguments:
            reason: of the end, if it is known.
        """
        return GenerationOver(self._world.run_id, self._world.generation, reason)
