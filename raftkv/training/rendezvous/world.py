"""A world: one generation, as one of its members sees it. A constant value.

::

    world = await participant.next_world()
    world.generation, world.rank, world.world_size
    await kv.put("checkpoints/latest", b"7", fence=world.fence)    # refused once the generation is over

The fence of a world has two conditions: ``round`` was not written since, and the leased key of this node exists. So the
writes of a process that was frozen until its lease ended are refused.
"""

from __future__ import annotations

from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

from raftkv.client.control import Control, Reflector, Sparse
from raftkv.client.operations import Compare, mod_revision, version
from raftkv.client.records import RecordError
from raftkv.client.scope import Space
from raftkv.client.values import DELETE, Event, KeyValue
from raftkv.pb import rpc_pb2
from raftkv.training.errors import DeprecatedAlias, GenerationOver
from raftkv.training.records import BROKEN, CLOSED, GenerationRecord, Head, Member, RunKeys, State

# -- ranks ----------------------------------------------------------------------------------------------------------
#
# Ranks: the place of every slot, computed from the members of a generation in their order. Pure.
#
# Terms as in Horovod: the *local* rank numbers the slots on one host, the *cross* rank the hosts that have a slot with
# that local rank. Members on one host share its local ranks, in their order.


class Placement(NamedTuple):
    """The place of one slot.

    Attributes:
        member: index of its member: the node rank.
        rank: rank among all slots.
        local_rank, local_size: rank among the slots of its host, and their number.
        cross_rank, cross_size: rank of its host among the hosts with this local rank, and their number.
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
    """Find one of the ``placements`` by its host and local rank, in time proportional to the number of members.

    Arguments:
        members: members of the generation, in rank order.
        host: name of the machine.
        local_rank: number of the slot on its host.

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
    """Compute the places of all slots, by rank.

    >>> two = [Member("a-1", "a", slots=2), Member("b-1", "b", slots=1)]
    >>> [(p.rank, p.local_rank, p.cross_rank, p.cross_size) for p in placements(two)]
    [(0, 0, 0, 2), (1, 1, 0, 1), (2, 0, 1, 2)]
    """
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


class Place:
    """The place of one rank in a generation; base of ``World`` and of both ``Run`` classes."""

    @property
    def world(self) -> World:
        """The generation as this node sees it."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """This rank, which may change in the next generation."""
        raise NotImplementedError

    @property
    def placement(self) -> Placement:
        """The place of this rank among all slots."""
        return self.world.placements[self.rank]

    @property
    def local_rank(self) -> int:
        """Number of this rank among those on its host."""
        return self.placement.local_rank

    @property
    def local_size(self) -> int:
        """Ranks on this host."""
        return self.placement.local_size

    @property
    def cross_rank(self) -> int:
        """Number of this host among the hosts that have this local rank."""
        return self.placement.cross_rank

    @property
    def cross_size(self) -> int:
        """Hosts that have this local rank."""
        return self.placement.cross_size

    epoch = DeprecatedAlias("generation")


class RunPlace(Place):
    """The current generation of a run; no I/O."""

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.world.run_id

    @property
    def generation(self) -> int:
        """Generation number; increases by one with every world of the run and never decreases."""
        return self.world.generation

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.world.world_size

    @property
    def members(self) -> tuple[Member, ...]:
        """Nodes of the generation, in rank order."""
        return self.world.members

    @property
    def fence(self) -> WorldFence:
        """Fence (``fence=``) for writes: once the generation has ended, they raise ``GenerationOver``."""
        return self.world.fence

    term = DeprecatedAlias("leadership")


@dataclass(frozen=True)
class World(Place):
    """One generation as one of its nodes sees it.

    Attributes:
        run_id: run id.
        generation: generation number, the fencing token; increases with every world of the run and never decreases.
        members: members in rank order.
        index: place of this node among the members: the node rank.
        revision: store revision when it began.
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
    def world(self) -> World:
        """Itself."""
        return self

    @property
    def member(self) -> Member:
        """This node."""
        return self.members[self.index]

    @property
    def node_rank(self) -> int:
        """Place of this node among the nodes."""
        return self.index

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return len(self.members)

    @cached_property
    def placements(self) -> list[Placement]:
        """The places of all slots, by rank."""
        return placements(self.members)

    @cached_property
    def world_size(self) -> int:
        """Number of slots of all nodes."""
        return world_size(self.members)

    @cached_property
    def rank(self) -> int:
        """The lowest rank on this node."""
        return first_ranks(self.members)[self.index]

    @property
    def fence(self) -> WorldFence:
        """Fence for ``fence=`` of a client's calls: once the generation has ended, they raise ``GenerationOver``."""
        return WorldFence(self)


ANOTHER: Final = "another generation has begun"


class WorldFence:
    """The conditions under which a world may write; see the module.

    Attributes:
        conditions: conditions, all of which must hold.
        watched: keys whose changes show that the generation has ended.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        keys = RunKeys(world.run_id)
        self.watched: Sparse = keys.news
        self.conditions: tuple[Compare, ...] = (
            mod_revision(keys.round) == world.revision,
            version(keys.node(world.member.id)) > 0,
        )

    def compares(self) -> list[rpc_pb2.Compare]:
        """Implement ``client.operations.Fence.compares``."""
        return [condition.to_message(Space()) for condition in self.conditions]

    def why_over(self, items: Mapping[bytes, KeyValue]) -> str | None:
        """Return why the generation has ended or is about to end; None: according to the records it lasts.

        Arguments:
            items: the keys that are ``watched``.
        """
        world = self._world
        if (item := items.get(RunKeys(world.run_id).state.encode())) is None:
            return ANOTHER
        try:
            state = State.decode(item.value)
        except RecordError:
            return None  # the participants of the run report the damage
        is_another = item.mod_revision != world.revision and _read_head(item.value) is not None
        if state.generation != world.generation or is_another:
            return ANOTHER
        return state.reason if state.phase in (CLOSED, BROKEN) else None

    def broken(self, reason: str = "") -> GenerationOver:
        """Implement ``client.operations.Fence.broken``.

        Arguments:
            reason: reason of the end, if known.
        """
        return GenerationOver(self._world.run_id, self._world.generation, reason)


# -- roster ---------------------------------------------------------------------------------------------------------
#
# The members of a generation, and the step from one generation to the next.
#
#     arbiter     round 7 = a b c d          round 8 = a c d e
#                                            head 8  = place 1 left, e is added at 3, digest of a c d e
#     survivor    knows a b c d              a b c d - place 1 + e at 3 = a c d e; its digest is that of the head: done
#     newcomer    knows nothing              reads round 8
#
# The digest covers the encoded members in rank order. A reader whose result has a different digest, or who does not
# know the round on which the head is based, reads ``round``. So a head may cost a reader one call, but never gives a
# wrong rank.

MARK_BYTES: Final = 16
DIGEST_BYTES: Final = 12
"""Size of the digest, which all nodes receive. It finds mistakes; forgers could as well write another ``round``."""
HEAD_MAX_BYTES: Final = 4096
"""Maximum size of a head. For a larger change the head has only a digest and all nodes read ``round``, as at the first
start."""


class Roster:
    """The members of a generation, with digests that make the next generation fast to compute and verify.

    Arguments:
        members: members in rank order.
        marks: digest of each member, if known.
    """

    def __init__(self, members: tuple[Member, ...] = (), marks: bytes | None = None) -> None:
        self.members = members
        self._marks = marks

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each member, by its id."""
        return {member.id: place for place, member in enumerate(self.members)}

    @property
    def marks(self) -> bytes:
        """The digests of the members, concatenated."""
        if self._marks is None:
            self._marks = b"".join(map(_mark, self.members))
        return self._marks

    @cached_property
    def digest(self) -> str:
        """The digest of the members in their order."""
        return b64encode(blake2b(self.marks, digest_size=DIGEST_BYTES).digest()).decode()

    def after(self, head: Head) -> Roster | None:
        """Return the members of the next generation according to its head; None: the head is not based on this one."""
        members, marks = list(self.members), bytearray(self.marks)
        for place in reversed(head.left):
            if place >= len(members):
                return None
            del members[place], marks[place * MARK_BYTES : (place + 1) * MARK_BYTES]
        for place, member in head.added:
            members.insert(place, member)
            marks[place * MARK_BYTES : place * MARK_BYTES] = _mark(member)
        found = Roster(tuple(members), bytes(marks))
        return found if found.digest == head.digest else None

    def changes(self, members: Sequence[Member]) -> tuple[tuple[int, ...], tuple[tuple[int, Member], ...]] | None:
        """Return the places of leaving members, and the new members with theirs; None: the order of others changes."""
        added, stay, last = [], set[int](), -1
        for place, member in enumerate(members):
            before = self.places.get(member.id)
            if before is None or self.members[before] != member:
                added.append((place, member))
            elif before < last:
                return None
            else:
                last = before
                stay.add(before)
        return tuple(place for place in range(len(self.members)) if place not in stay), tuple(added)


def _mark(member: Member) -> bytes:
    lengths = f"{member.slots} {len(member.id)} {len(member.host)} {len(member.address)} "
    encoded = lengths + member.id + member.host + member.address + member.topology
    return blake2b(encoded.encode(), digest_size=MARK_BYTES).digest()


def new_head(current: Roster, members: tuple[Member, ...], state: State) -> Head:
    """Make the head of the next generation.

    Arguments:
        current: the members of the current generation.
        members: the members of the next one.
        state: its state.
    """
    left, added = current.changes(members) or ((), ())
    empty = replace(Head.from_plain(state.plain()), digest=Roster(members).digest)
    head = replace(empty, left=left, added=added)
    return head if len(head.encode()) <= HEAD_MAX_BYTES else empty


# -- record_cache ---------------------------------------------------------------------------------------------------
#
# A node's view of ``round`` and ``state``: decoded, as of one revision, kept current by a reflector.
#
# It reads ``round`` once, and watches ``state``. If a head is not based on the known ``round``, both keys are read at
# one later revision, as after a compaction. So ``round`` and ``round_revision`` always belong together, and ``state``
# is never newer than they are.


class RecordCache(Reflector):
    """The records ``round`` and ``state`` of a run, decoded and kept current.

    Arguments:
        control: the store.
        run_id: run id.
        on_change: called on the loop when something is new.

    Attributes:
        round, state: records as of ``revision``; None: absent.
        roster: the members of ``round``.
        round_revision, state_revision: mod revisions of the records; 0: absent.
        end: why the records are no longer followed, as when the client was closed; None: they are followed.
    """

    def __init__(self, control: Control, run_id: str, on_change: Callable[[], None]) -> None:
        keys = RunKeys(run_id)
        super().__init__(control, keys.record, self._decode, on_end=self._ended, watched=keys.news[:2])
        self.round: GenerationRecord | None = None
        self.roster = Roster()
        self.state: State | None = None
        self.round_revision = self.state_revision = 0
        self.end: Exception | None = None
        self._round_key, self._state_key = keys.round.encode(), keys.state.encode()
        self._damage: dict[bytes, str] = {}
        self._ahead: dict[int, tuple[GenerationRecord, Roster]] = {}
        self._on_change = on_change

    @property
    def damage(self) -> str:
        """Why a record cannot be read; empty: all can be read."""
        return next(iter(self._damage.values()), "")

    @property
    def closed(self) -> bool:
        """Whether the run is closed."""
        return self.state is not None and self.state.phase == CLOSED

    def nodes_waiting(self, world: World | None) -> int:
        """Return 0 while a world lasts, as far as is known; else how many nodes wait for the next one, at least 1."""
        state = self.state
        if world is None or self.closed:
            return 0
        if state is None or self.round_revision != world.revision:
            return 1  # a later generation; after a deletion or a restore from a backup also an earlier one or none
        return max(1, state.joined) if state.phase == BROKEN and state.generation == world.generation else 0

    def _on_events(self, revision: int, events: Sequence[Event]) -> None:
        """Apply watch events; list again if a head is not based on the known generation."""
        if self._is_closed or self._lead_on([event for event in events if event.kv.mod_revision > self.revision]):
            super()._on_events(revision, events)
            return
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        self._list_again()

    def _lead_on(self, events: Sequence[Event]) -> bool:
        """Compute the generations from the heads among some events; False: a head does not suffice."""
        generation, roster = self.round.generation if self.round is not None else 0, self.roster
        self._ahead.clear()
        for event in events:
            if event.key != self._state_key:
                continue
            if event.type == DELETE:
                return False  # the run was deleted
            if (head := _read_head(event.kv.value)) is not None:
                if (found := roster.after(head)) is None:
                    return False
                roster, generation = found, head.generation
                self._ahead[event.kv.mod_revision] = GenerationRecord(generation, roster.members, head.time), roster
            elif _generation_of(event.kv.value) > generation:
                return False  # the arbiter is of an earlier version, which writes no heads
        return True

    def _decode(self, changes: Sequence[Event]) -> None:
        for event in changes:
            self._apply(event.key, None if event.type == DELETE else event.kv)
        self._on_change()

    def _apply(self, key: bytes, item: KeyValue | None) -> None:
        revision = item.mod_revision if item is not None else 0
        self._damage.pop(key, None)
        try:
            if key == self._round_key:
                self._begin(GenerationRecord.decode(item.value) if item is not None else None, None, revision)
            elif key == self._state_key:
                if revision in self._ahead:
                    self._begin(*self._ahead.pop(revision), revision)
                self.state, self.state_revision = _read_state(item.value) if item is not None else None, revision
        except RecordError as error:
            self._damage[key] = f"{key.decode(errors='replace')}: {error}"

    def _begin(self, record: GenerationRecord | None, roster: Roster | None, revision: int) -> None:
        self._damage.pop(self._round_key, None)
        self.round, self.round_revision = record, revision
        self.roster = roster or Roster(record.members if record is not None else ())
        if record is not None:
            # Drop the encoded bytes of thousands of members, which are not needed any more.
            self.items[self._round_key] = KeyValue(self._round_key, b"", 0, 0, revision, 0)

    def _ended(self, error: Exception) -> None:
        self.end = error
        self._on_change()


@lru_cache(maxsize=2)
def _read_state(value: bytes) -> State:
    """Decode a state before it is applied."""
    return State.decode(value)


def _generation_of(state: bytes) -> int:
    try:
        return _read_state(state).generation
    except RecordError:
        return 0  # the error is reported when the state is applied


@lru_cache(maxsize=2)
def _read_head(value: bytes) -> Head | None:
    """Decode a state with which a generation begins; None: it is not one, or cannot be read."""
    try:
        head = Head.decode(value)
    except RecordError:
        return None
    return head if head.digest else None


class RecordView:
    """A node's last view of its run: no I/O, and readable from any thread."""

    def _seen(self) -> tuple[RecordCache, World | None]:
        """Return the records and the last world that began here."""
        raise NotImplementedError

    @property
    def nodes_waiting(self) -> int:
        """0 while the last world lasts; else call ``next_world``."""
        records, world = self._seen()
        return records.nodes_waiting(world)

    @property
    def closed(self) -> bool:
        """Whether the run is closed."""
        return self._seen()[0].closed

    @property
    def end(self) -> Exception | None:
        """Why the run is no longer followed here: the client was closed; None: it is followed."""
        return self._seen()[0].end

    @property
    def phase(self) -> State | None:
        """State record of the run."""
        return self._seen()[0].state

    @property
    def damage(self) -> str:
        """Why a record of the run cannot be read; empty: all can be read."""
        return self._seen()[0].damage
