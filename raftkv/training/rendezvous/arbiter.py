"""The decisions of a run: the end of the present generation, and the members of the next. Pure.

Owns the rules, not the keys: ``arbiter_driver`` hands it what it sees and carries out what it decides.

    running   -> closed     the work of all members has ended well (the last one mostly closes the run itself)
    running   -> broken     a member is lost, came back or reported a fault; or newcomers are welcome
    broken    -> running    every member that is still there has come back, and the minimum is there
    gathering -> running    the maximum or the expected number is there, or the last call is over

Rules:

1. A generation begins only with nodes that run nothing of an earlier one: a member says so by ``want > generation``, a
   node that is no member by ``running == 0``. That is all the safety there is to it: one world at a time.
2. It waits for every member that still holds its lease: so one fault makes one new generation, not two. One that does
   not come back for long, as its workers do not end, is evicted (its key is deleted), if enough others are there.
3. Survivors keep their order; no survivor moves for a newcomer, unless ``rank_policy`` says so.
4. After an outage of the store members are not taken for lost before they had time to register again
   (``postponed_until``): losing the store must not cost a healthy worker.
5. A member whose work has ended well may go: it breaks no generation, and nor does a newcomer from then on.

Leaves out how leases end, and every clock: times are arguments, in seconds of any monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raftkv.training.config import APPEND, FILL, TOPOLOGY
from raftkv.training.records import CLOSED, HEARTBEAT_LOST, RUNNING, Fault, GenerationRecord, Member, Node, State

RETURNED = "returned"
SCALE_UP = "scale up"
AHEAD_MAX = 1_000_000
"""Generations that a node may be ahead of the run, as after a restore of the store: one that says more is left out,
since the next generation is no lower than what its nodes want, and numbers end."""


@dataclass(frozen=True, slots=True)
class Present:
    """A node that is there.

    Attributes:
        node: as it says.
        since: create revision of its key: the order of arrival.
        written: mod revision of its key.
    """

    node: Node
    since: int
    written: int = 0


@dataclass(frozen=True, slots=True)
class Break:
    """The generation is over.

    Attributes:
        cause, node, reason: for the state.
        lost: members whose leases ended, to be recorded as faults.
    """

    cause: str
    node: str
    reason: str
    lost: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class Begin:
    """The next generation, with these members.

    Attributes:
        members: in rank order.
        generation: the least that all of them take part in: the one after the last on record, unless the cluster was
            restored from a backup, and they have seen later ones.
    """

    members: tuple[Member, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Members that hold up all others: their keys go, as if their leases had ended."""

    nodes: tuple[Present, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The work of all members has ended well: the run is over."""


Decision = Break | Begin | Evict | Finish


@dataclass(slots=True)
class View:
    """The run as the arbiter sees it.

    Attributes:
        round, state: as recorded; generation 0 has no members.
        nodes: by id.
        faults: of the present generation, in the order in which they were recorded.
        finished: members of the present generation whose work has ended well, by their places in it.
        denied: hosts that are left out for now.
        admitted: nodes that have slots in the cluster; None: the run has its machines to itself.
    """

    round: GenerationRecord
    state: State
    nodes: dict[str, Present] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    finished: frozenset[int] = frozenset()
    denied: frozenset[str] = frozenset()
    admitted: frozenset[str] | None = None

    @property
    def generation(self) -> int:
        """The last that began."""
        return self.round.generation

    def lost(self) -> tuple[Member, ...]:
        """Members whose leases have ended before their work."""
        return tuple(
            member
            for place, member in enumerate(self.round.members)
            if member.id not in self.nodes and place not in self.finished
        )

    def still_out(self) -> list[Member]:
        """Members that are there and have not come back."""
        present = ((member, self.nodes.get(member.id)) for member in self.round.members)
        return [member for member, one in present if one is not None and not self._has_stopped(one.node)]

    def survivors(self) -> list[Node]:
        """Members that have come back, in rank order."""
        there = [one.node for member in self.round.members if (one := self.nodes.get(member.id)) is not None]
        return [node for node in there if self._has_stopped(node) and self._is_eligible(node)]

    def newcomers(self) -> list[Node]:
        """Others that are ready, the first to come first."""
        members = {member.id for member in self.round.members}
        others = [
            present
            for node_id, present in self.nodes.items()
            if node_id not in members and present.node.running == 0 and self._is_eligible(present.node)
        ]
        return [present.node for present in sorted(others, key=lambda present: present.since)]

    def _has_stopped(self, node: Node) -> bool:
        """Whether a member runs nothing; after a restore it may run a later generation than the last on record."""
        return node.want > self.generation and not node.running

    def _is_eligible(self, node: Node) -> bool:
        if node.want > self.generation + AHEAD_MAX:
            return False
        return node.host not in self.denied and (self.admitted is None or node.id in self.admitted)


class Arbiter:
    """Decides on the next generation from what is known of nodes and faults.

    Arguments:
        last_call_s: how long a first generation waits for more than the minimum.
        expected_nodes: how many make it begin at once; 0: the maximum.
        rank_policy: see ``RunConfig``.
        return_timeout_s: how long members that are there are waited for; 0: for ever.

    Attributes:
        look_again_at: when ``decide`` would say something else though nothing happened; None: never.
        postponed_until: see rule 4.
        is_short: a generation could begin, if there were more nodes.
    """

    def __init__(
        self,
        last_call_s: float,
        expected_nodes: int = 0,
        rank_policy: str = APPEND,
        return_timeout_s: float = 0.0,
    ) -> None:
        self.look_again_at: float | None = None
        self.postponed_until = -math.inf
        self.is_short = False
        self._last_call_s = last_call_s
        self._expected_nodes = expected_nodes
        self._rank_policy = rank_policy
        self._return_timeout_s = return_timeout_s
        self._minimum_since: float | None = None
        self._out_since: float | None = None

    def decide(self, view: View, now: float) -> Decision | None:
        """Decide what is to be done now; None: nothing yet.

        Arguments:
            view: what is there.
            now: seconds of any monotonic clock, always the same one.
        """
        self.look_again_at = None
        self.is_short = False
        phase = view.state.phase
        if phase == CLOSED:
            return None
        if phase == RUNNING and view.state.generation == view.generation:
            self._minimum_since = self._out_since = None
            return self._over(view, now)
        return self._next(view, now)

    # -- is the generation over?

    def _over(self, view: View, now: float) -> Break | Finish | None:
        if view.finished and len(view.finished) == len(view.round.members):
            return Finish()
        if view.faults:
            fault = view.faults[0]
            return Break(fault.cause, fault.node, str(fault), self._lost(view, now))
        lost = self._lost(view, now)
        if lost:
            names = ", ".join(member.host for member in lost[:3])
            return Break(HEARTBEAT_LOST, lost[0].id, f"lost {len(lost)} of {len(view.round.members)}: {names}", lost)
        for member in view.round.members:
            present = view.nodes.get(member.id)
            if present is not None and present.node.want > view.generation:
                return Break(RETURNED, member.id, f"{member.host} came back to the rendezvous")
        newcomers = view.newcomers()
        if newcomers and not view.finished and len(view.round.members) < view.state.max_nodes:
            return Break(SCALE_UP, newcomers[0].id, _joined([one.host for one in newcomers]))
        return None

    def _lost(self, view: View, now: float) -> tuple[Member, ...]:
        lost = view.lost()
        if lost and now < self.postponed_until:
            self.look_again_at = self.postponed_until
            return ()
        return lost

    # -- who is in the next one?

    def _next(self, view: View, now: float) -> Begin | Evict | None:
        if view.still_out():
            return self._evict(view, now)
        self._out_since = None
        if view.lost() and not self._lost(view, now):
            return None
        survivors, newcomers = view.survivors(), view.newcomers()
        count = len(survivors) + len(newcomers)
        if count < view.state.min_nodes:
            self._minimum_since = None
            self.is_short = True
            return None
        if not survivors and not self._last_call_is_over(view, count, now):
            return None
        return self.begin(view)

    def _evict(self, view: View, now: float) -> Evict | None:
        """Wait for members that have not come back, but not for ever, if the others can go on without them."""
        if self._out_since is None:
            self._out_since = now
        count = len(view.survivors()) + len(view.newcomers())
        if not self._return_timeout_s or count < view.state.min_nodes:
            return None
        over_at = self._out_since + self._return_timeout_s
        if now < over_at:
            self.look_again_at = over_at
            return None
        return Evict(tuple(view.nodes[member.id] for member in view.still_out()))

    def begin(self, view: View) -> Begin | None:
        """Choose the next generation among those that may take part; None: they are too few."""
        survivors, newcomers = view.survivors(), view.newcomers()
        if len(survivors) + len(newcomers) < view.state.min_nodes:
            return None
        nodes = self._in_order(view, survivors, newcomers)
        generation = max(view.generation + 1, *(node.want for node in nodes))
        return Begin(tuple(node.member for node in nodes), generation)

    def _last_call_is_over(self, view: View, count: int, now: float) -> bool:
        enough = min(self._expected_nodes or view.state.max_nodes, view.state.max_nodes)
        if count >= max(enough, view.state.min_nodes):
            return True
        if self._minimum_since is None:
            self._minimum_since = now
        over_at = self._minimum_since + self._last_call_s
        if now < over_at:
            self.look_again_at = over_at
            return False
        return True

    def _in_order(self, view: View, survivors: Sequence[Node], newcomers: Sequence[Node]) -> list[Node]:
        room = view.state.max_nodes - len(survivors)
        chosen = by_place(newcomers[: max(room, 0)])
        if self._rank_policy == TOPOLOGY:
            return by_place([*survivors, *chosen])[: view.state.max_nodes]
        if self._rank_policy == FILL:
            return _filled(view.round.members, survivors, chosen)
        return [*survivors, *chosen][: view.state.max_nodes]


def by_place(nodes: Iterable[Node]) -> list[Node]:
    """Sort nodes so that those of one place, and of one host, are neighbours; places by their first node."""
    rank_of: dict[tuple[str, str], int] = {}
    nodes = list(nodes)
    topologies: dict[str, int] = {}
    for node in nodes:
        topologies.setdefault(node.topology, len(topologies))
        rank_of.setdefault((node.topology, node.host), len(rank_of))
    return sorted(nodes, key=lambda node: (topologies[node.topology], rank_of[node.topology, node.host]))


def _joined(hosts: Sequence[str]) -> str:
    return f"node joined: {hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} nodes joined: {hosts[0]} and others"


def _filled(before: Sequence[Member], survivors: Sequence[Node], newcomers: Sequence[Node]) -> list[Node]:
    """Survivors at their old ranks as far as newcomers fill the holes, then the other newcomers."""
    alive = {node.id: node for node in survivors}
    waiting = list(newcomers)
    order: list[Node] = []
    for member in before:
        if member.id in alive:
            order.append(alive[member.id])
        elif waiting:
            order.append(waiting.pop(0))
    return order + waiting


def new_state(view: View, **changes: Any) -> State:
    """Make the next state record: limits and generation as before."""
    state = view.state
    values: dict[str, Any] = {
        "generation": view.generation,
        "phase": state.phase,
        "min_nodes": state.min_nodes,
        "max_nodes": state.max_nodes,
    }
    return State(**{**values, **changes})
