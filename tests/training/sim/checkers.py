"""The checker: what must be true of a run, checked at every change of the store and whenever workers start.

    P1  generations grow by one and never go back, also across close and reopen; their record is never deleted
    P2  ranks are a permutation, no node is a member twice, survivors keep their order; newcomers come behind
        them, unless the policy says otherwise
    P3  one world at a time: when a generation begins no member of it, and no member of the last one that has held its
        lease all the time since, runs anything; no agent starts an unrecorded world, or one twice; no write with the
        fence of a generation is accepted after the next began, or from a node without a lease
    P5  a connected member of a generation that is over learns so in bounded time
    P10 a run is closed as a success only if the workers of all members of its last generation ended well
    P8  no generation has fewer than the minimum or more than the maximum

P4, P6, P7 and P9 are about whole runs: see ``scenarios.py`` and ``run.py``. It stands apart and touches nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raftkv.client.values import DELETE, Event
from raftkv.training.config import APPEND, TOPOLOGY
from raftkv.training.records import BROKEN, CLOSED, RUNNING, SUCCEEDED, GenerationRecord, Node, RunKeys, State
from raftkv.training.rendezvous.world import placements

if TYPE_CHECKING:
    from raftkv.training.rendezvous.world import World
    from tests.virtual_store.cluster import Cluster

    from .agent import Agent

SUCCESSES = ("finished", SUCCEEDED)
TAKEN_OVER = "started anew"
"""Reason of a state with which a node takes over a run without nodes."""
TOLD_WITHIN_S = 4.0
"""From the moment that a generation is over and a member connected, to ``nodes_waiting``: the watch alone."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A generation that was recorded."""

    round: GenerationRecord
    revision: int
    at: float


@dataclass(slots=True)
class RunChecker:
    """See the module.

    Attributes:
        generations: all of the run, oldest first.
        reopened: how often a late node took over a closed run that all had left.
        state: the last that was recorded.
        violations: the first is what counts: what follows may be its consequence.
    """

    cluster: Cluster
    run_id: str
    min_nodes: int
    max_nodes: int
    rank_policy: str = APPEND
    agents: dict[int, Agent] = field(default_factory=dict)
    generations: list[Begun] = field(default_factory=list)
    state: State | None = None
    over_since: float = 0.0
    violations: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    fenced_writes: int = 0
    reopened: int = 0
    arbiter: int = -1
    cluster_calm_since: float = 0.0
    _agent_of: dict[str, int] = field(default_factory=dict)
    _started: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cluster.store.on_commit.append(self._on_commit)

    @property
    def generation(self) -> int:
        """The last that began."""
        return self.generations[-1].round.generation if self.generations else 0

    def fail(self, rule: str, text: str) -> None:
        """A property does not hold."""
        self.violations.append(f"{rule} at {self.cluster.scheduler.now:.3f} s: {text}")

    def say(self, text: str) -> None:
        """A line of the trace."""
        self.log.append(f"{self.cluster.scheduler.now:9.4f} {self.cluster.store.revision:5d}  {text}")

    # ---- the store's history

    def _on_commit(self, revision: int, events: list[Event]) -> None:
        keys = RunKeys(self.run_id)
        for event in events:
            key = event.kv.key.decode()
            if key == keys.round:
                self._on_round(event)
            elif key == keys.state:
                self._on_state(event)
            elif key.startswith(keys.nodes):
                self._on_node(event)
            elif key.startswith(f"{keys.base}sync/") and "/exit/" not in key and event.type != DELETE:
                self._on_fenced(key, event)
            elif key == keys.arbiter:
                self._on_arbiter(event)
            elif key.startswith(keys.base):
                self.say(f"{event.type} {key.removeprefix(keys.base)} {event.kv.value.decode()}")

    def _on_round(self, event: Event) -> None:
        if event.type == DELETE:
            self.fail("P1", "the record of the generation was deleted")
            return
        new = GenerationRecord.decode(event.kv.value)
        self.say(f"GENERATION {new.generation}: {' '.join(self._name(member.id) for member in new.members)}")
        if new.generation != self.generation + 1:
            self.fail("P1", f"generation {new.generation} after {self.generation}")
        self._check_members(new)
        self._check_one_world(new)
        self.generations.append(Begun(new, event.kv.mod_revision, self.cluster.scheduler.now))
        self.over_since = self.cluster.scheduler.now

    def _check_members(self, new: GenerationRecord) -> None:
        ids = [member.id for member in new.members]
        ranks = [placement.rank for placement in placements(new.members)]
        if len(set(ids)) < len(ids) or ranks != list(range(sum(member.slots for member in new.members))):
            self.fail("P2", f"generation {new.generation} has members {ids}, ranks {ranks}")
        if not self.min_nodes <= len(ids) <= self.max_nodes:
            self.fail(
                "P8", f"generation {new.generation} has {len(ids)} nodes, not {self.min_nodes} to {self.max_nodes}"
            )
        before = [member.id for member in self.generations[-1].round.members] if self.generations else []
        stayed = [node_id for node_id in before if node_id in ids]
        if self.rank_policy != TOPOLOGY and [node_id for node_id in ids if node_id in stayed] != stayed:
            self.fail("P2", f"generation {new.generation} moved survivors: {stayed} became {ids}")
        if self.rank_policy == APPEND and ids[: len(stayed)] != stayed:
            self.fail("P2", f"generation {new.generation} put newcomers before survivors: {stayed} became {ids}")

    def _check_one_world(self, new: GenerationRecord) -> None:
        keys = RunKeys(self.run_id)
        before = self.generations[-1].round.members if self.generations else ()
        bound = {member.id for member in new.members}
        for member in before:
            held = self.cluster.store.items.get(keys.node(member.id).encode())
            if held is not None and held.create_revision <= self.generations[-1].revision:
                bound.add(member.id)
        for node_id in sorted(bound):
            agent = self.agents.get(self._agent_of.get(node_id, -1))
            if agent is not None and agent.workers:
                self.fail("P3", f"generation {new.generation} began while {agent.name} ran {sorted(agent.workers)}")

    def _on_state(self, event: Event) -> None:
        if event.type == DELETE:
            self.fail("P1", "the state was deleted")
            return
        state = State.decode(event.kv.value)
        self.say(f"STATE {state.generation} {state.phase} joined={state.joined} {state.cause} {state.reason}")
        if self.state is not None and state.generation < self.state.generation:
            self.fail("P1", f"the state went from generation {self.state.generation} back to {state.generation}")
        if self.state is not None and self.state.phase == CLOSED and state.phase != CLOSED:
            self.reopened += 1
        if state.phase in (BROKEN, CLOSED) and (self.state is None or self.state.phase not in (BROKEN, CLOSED)):
            self.over_since = self.cluster.scheduler.now
        if state.phase == CLOSED or state.reason != TAKEN_OVER:
            limits = (self.min_nodes, self.max_nodes)
            if limits != (state.min_nodes, state.max_nodes) and self.state is not None:
                self.fail("P8", f"the limits {limits} became {state.min_nodes}:{state.max_nodes} all by themselves")
        if state.phase == CLOSED and state.reason in SUCCESSES and self.generations:
            for member in self.generations[-1].round.members:
                agent = self.agents.get(self._agent_of.get(member.id, -1))
                if agent is None or agent.finished_generation != self.generation:
                    self.fail("P10", f"the run is closed as a success, but {self._name(member.id)} has not finished")
        self.min_nodes, self.max_nodes = state.min_nodes, state.max_nodes
        self.state = state

    def _on_node(self, event: Event) -> None:
        node_id = event.kv.key.decode().rsplit("/", 1)[1]
        if event.type == DELETE:
            self.say(f"NODE {self._name(node_id)} gone")
            return
        node = Node.decode(event.kv.value)
        self._agent_of[node.id] = int(node.data["agent"])
        self.say(f"NODE {self._name(node_id)} want={node.want} running={node.running}")

    def _on_arbiter(self, event: Event) -> None:
        self.arbiter = self._agent_of.get(event.kv.value.decode(), -1)
        self.say(f"ARBITER {self._name(event.kv.value.decode()) or 'gone'}")

    def _on_fenced(self, key: str, event: Event) -> None:
        written = json.loads(event.kv.value)
        self.fenced_writes += 1
        if written["epoch"] != self.generation:
            self.fail("P3", f"a write of generation {written['epoch']} was accepted in generation {self.generation}")
        if RunKeys(self.run_id).node(written["node"]).encode() not in self.cluster.store.items:
            self.fail("P3", f"a write of {written['node']}, which has no lease, was accepted")

    def _name(self, node_id: str) -> str:
        agent = self.agents.get(self._agent_of.get(node_id, -1))
        return agent.name if agent is not None else node_id

    # ---- what nodes do

    def starts(self, agent: Agent, world: World) -> None:
        """An agent is about to start the workers of a world."""
        self.say(f"{agent.name} starts generation {world.generation} as node {world.index} of {world.node_count}")
        begun = next((begun for begun in self.generations if begun.round.generation == world.generation), None)
        if begun is None or begun.round.members != world.members or begun.revision != world.revision:
            self.fail(
                "P3", f"{agent.name} starts generation {world.generation} at {world.revision}, which is not recorded"
            )
            return
        if self._agent_of.get(world.member.id) != agent.number:
            self.fail("P3", f"{agent.name} starts as {world.member.id}, which it is not")
        if agent.workers:
            self.fail("P3", f"{agent.name} starts generation {world.generation} while it runs {sorted(agent.workers)}")
        if world.generation <= agent.last_generation:
            self.fail("P1", f"{agent.name} is given generation {world.generation} after {agent.last_generation}")
        for rank in range(world.rank, world.rank + world.member.slots):
            other = self._started.setdefault((world.generation, rank), agent.number)
            if other != agent.number:
                self.fail(
                    "P2", f"rank {rank} of generation {world.generation} is started by {agent.name} and agent {other}"
                )

    # ---- P5, from time to time

    def look(self) -> None:
        """Whether all nodes that must know that a generation is over do."""
        now = self.cluster.scheduler.now
        if self.state is None or not self.cluster.leads:
            return
        for agent in self.agents.values():
            if not agent.workers or not agent.connected or agent.participant is None or agent.leaving:
                continue
            over = agent.last_generation < self.generation or (
                self.state.phase != RUNNING and self.state.generation >= agent.last_generation
            )
            since = max(self.over_since, agent.calm_since, self.cluster_calm_since)
            if over and now - since > TOLD_WITHIN_S and not self._is_told(agent):
                self.fail(
                    "P5",
                    f"{agent.name} runs generation {agent.last_generation}; the run is in {self.state.generation} "
                    f"{self.state.phase} since {since:.3f} s, and it was not told",
                )

    def _is_told(self, agent: Agent) -> bool:
        participant = agent.participant
        return agent.told or (participant is not None and (participant.nodes_waiting > 0 or participant.closed))
