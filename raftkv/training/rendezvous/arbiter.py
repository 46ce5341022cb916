"""The decisions of a run: the end of the current generation, and the members of the next. Pure.

Contains only the rules: ``arbiter_driver`` passes in what the store holds, and carries out the decisions.

    running   -> closed     all members have finished successfully (usually the last one closes the run itself)
    running   -> broken     a member is lost, came back or reported a fault; or new nodes can be added
    broken    -> running    every member that is still present has come back, and the minimum is present
    gathering -> running    the maximum or the expected number is present, or the last call has ended

Rules:

1. A generation begins only with nodes that run nothing of an earlier one: a member states this by ``want >
   generation``, any other node by ``running == 0``. This rule alone ensures that there is only one world at a time.
2. The next generation waits for every member that still holds its lease, so one fault makes one new generation, not
   two. A member that does not come back for a long time (its workers do not end) is evicted by deleting its key, if
   enough others are present.
3. Survivors keep their order, and no survivor moves for a new node, unless ``rank_policy`` says so.
4. After an outage of the store, members count as lost only after they had time to register again (``postponed_until``),
   so that an outage costs no healthy worker.
5. A member that has finished successfully may leave without ending the generation. From then on, new nodes do not end
  it either.

Not here: how leases end, and clocks. Times are arguments, in seconds of any monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raftkv.training.config import APPEND, FILL, TOPOLOGY
from raftkv.training.records import CLOSED, HEARTBEAT_LOST, RUNNING, Fault, GenerationRecord, Member, Node, State

RETURNED = "returned"
SCALE_UP = "scale up"
AHEAD_MAX = 1_000_000
"""How far a node's ``want`` may be ahead of the run, as after a restore of the store. Nodes with more are excluded: the
next generation is at least what its nodes want, so a false value would use up the numbers."""


@dataclass(frozen=True, slots=True)
class Present:
    """A present node.

    Attributes:
        node: the node's own record.
        since: create revision of its key: the order of arrival.
        written: mod revision of its key.
    """

    node: Node
    since: int
    written: int = 0


@dataclass(frozen=True, slots=True)
class Break:
    """Decision: the generation has ended.

    Attributes:
        cause, node, reason: fields of the state.
        lost: members whose leases ended, to be recorded as faults.
    """

    cause: str
    node: str
    reason: str
    lost: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class Begin:
    """Decision: begin the next generation with these members.

    Attributes:
        members: members in rank order.
        generation: the lowest number that all members accept: one more than the last in the store, unless the cluster
            was restored from a backup and the members have seen later ones.
    """

    members: tuple[Member, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Decision: delete the keys of members that delay all others, as if their leases had ended."""

    nodes: tuple[Present, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Decision: all members have finished successfully, so close the run."""


Decision = Break | Begin | Evict | Finish


@dataclass(slots=True)
class View:
    """The run as the arbiter sees it.

    Attributes:
        round, state: as recorded; generation 0 has no members.
        nodes: nodes by id.
        faults: faults of the current generation, in the order in which they were recorded.
        finished: places of the members of the current generation that have finished successfully.
        denied: hosts that are excluded for now.
        admitted: nodes that have slots in the cluster; None: the run does not share its machines.
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
        """Number of the last generation that began."""
        return self.round.generation

    def lost(self) -> tuple[Member, ...]:
        """Members whose leases have ended before their work."""
        return tuple(
            member
            for place, member in enumerate(self.round.members)
            if member.id not in self.nodes and place not in self.finished
        )

    def still_out(self) -> Iterator[Present]:
        """Present members that have not come back."""
        there = (self.nodes.get(member.id) for member in self.round.members)
        return (one for one in there if one is not None and not self._has_stopped(one.node))

    def survivors(self) -> list[Node]:
        """Members that have come back, in rank order."""
        there = [one.node for member in self.round.members if (one := self.nodes.get(member.id)) is not None]
        return [node for node in there if self._has_stopped(node) and self._is_eligible(node)]

    def newcomers(self) -> list[Node]:
        """Ready nodes that are not members, in the order of arrival."""
        members = {member.id for member in self.round.members}
        others = [
            present
            for node_id, present in self.nodes.items()
            if node_id not in members and present.node.running == 0 and self._is_eligible(present.node)
        ]
        return [present.node for present in sorted(others, key=lambda present: present.since)]

    def _has_stopped(self, node: Node) -> bool:
        """Whether a member runs nothing; after a restore it may run a later generation than the last in the store."""
        return node.want > self.generation and not node.running

    def _is_eligible(self, node: Node) -> bool:
        if node.want > self.generation + AHEAD_MAX:
            return False
        return node.host not in self.denied and (self.admitted is None or node.id in self.admitted)


class Arbiter:
    """Decides on the next generation from the known nodes and faults.

    Arguments:
        last_call_s: how long the first generation waits for more nodes than the minimum.
        expected_nodes: number of nodes with which it begins at once; 0: the maximum.
        rank_policy: see ``RunConfig``.
        return_timeout_s: how long to wait for present members to return; 0: for ever.

    Attributes:
        look_again_at: when ``decide`` would decide differently without a change of the view; None: never.
        postponed_until: see rule 4.
        is_short: whether a generation could begin if there were more nodes.
    """

    def __init__(
        self, last_call_s: float, expected_nodes: int = 0, rank_policy: str = APPEND, return_timeout_s: float = 0.0
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
        """Decide what to do now; None: nothing yet.

        Arguments:
            view: what the store holds.
            now: seconds of a monotonic clock, the same in all calls.
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
        if any(view.still_out()):
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
        """Wait for members that have not come back; evict them after a time if the others are enough."""
        if self._out_since is None:
            self._out_since = now
        if not self._return_timeout_s:
            return None
        over_at = self._out_since + self._return_timeout_s
        if now < over_at:  # asked for each node that comes back: the nodes are counted only afterwards
            self.look_again_at = over_at
            return None
        is_enough = len(view.survivors()) + len(view.newcomers()) >= view.state.min_nodes
        return Evict(tuple(view.still_out())) if is_enough else None

    def begin(self, view: View) -> Begin | None:
        """Choose the members of the next generation among the eligible nodes; None: too few."""
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
    """Sort nodes so that nodes of one place, and of one host, are adjacent; places by their first node."""
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
    """Return survivors at their old ranks as far as new nodes fill the gaps, then the other new nodes."""
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
    """Make the next state record, with unchanged limits and generation."""
    state = view.state
    changes = {"generation": view.generation, "phase": state.phase, **changes}
    return State(min_nodes=state.min_nodes, max_nodes=state.max_nodes, **changes)
