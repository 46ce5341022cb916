"""One simulated run: machines, agents, faults by seed, then calm, in which everything must settle.

    simulation = Simulation(Settings(seed=17))
    simulation.add_agent()
    simulation.settle()                          # P6
    outcome = simulation.finish()
    outcome.violation                            # None, or which property did not hold, and when

Owns what of the properties is about whole runs. P6: in bounded time all agents that are left, up to the maximum, are in
one running generation, or the run is closed and all nodes have gone. P9: nothing is asked or written while nothing
happens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from raftkv.training.config import RunConfig
from raftkv.training.records import CLOSED, RUNNING, RunKeys
from raftkv.training.rendezvous.world import HEAD_MAX_BYTES
from tests.virtual_loop import NodeLoop, Scheduler
from tests.virtual_store.cluster import Cluster
from tests.virtual_store.network import Link, Weather

from .agent import Agent, Habits
from .checkers import RunChecker

RUN_ID = "job"
LOOK_S = 0.5
SETTLE_S = 60.0
"""Far above what any case needs: a lease, some retries, the last call."""
STABLE_S = 3.0
LEASE_MAX_S = 5.0
IDLE_S = 20.0
CLOCK_OFFSET_S = 7200.0
CALM = Weather()


@dataclass(frozen=True, slots=True)
class Settings:
    """What one seed stands for.

    Attributes:
        machines: agents at the start.
        config: of all of them; hosts are filled in.
        faults: names, see ``Faults``; a random one happens every ``gap_s`` on average for ``faults_s``.
        finishes: at the end all workers end well, so the run is closed.
        head_max_bytes: see ``rendezvous.world``; 0: no head says what has changed.
        earlier_share: of the agents, which run a version that knows no heads.
    """

    seed: int
    machines: int = 3
    config: RunConfig = field(default_factory=lambda: RunConfig(run_id=RUN_ID, fault_limit=0))
    habits: Habits = field(default_factory=Habits)
    weather: Weather = field(default_factory=Weather)
    ttl_min_s: int = 1
    arrival_s: float = 1.0
    faults: tuple[str, ...] = ()
    gap_s: float = 4.0
    faults_s: float = 0.0
    finishes: bool = False
    head_max_bytes: int = HEAD_MAX_BYTES
    earlier_share: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    settings: Settings
    violation: str | None
    generations: int
    virtual_s: float
    faults: Counter[str]
    calls: Counter[str]
    fenced_writes: int
    settled_s: float
    log: list[str]

    @property
    def replay_command(self) -> str:
        """How to see it again."""
        return f"python -m tests.training.sim --seed {self.settings.seed} --trace"


class Simulation:
    """Machines, a cluster and a checker, on one virtual clock."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.scheduler = Scheduler(random.Random(self.random.random()))
        self.cluster = Cluster(self.scheduler, random.Random(self.random.random()), settings.ttl_min_s)
        config = settings.config
        self.checker = RunChecker(self.cluster, RUN_ID, config.min_nodes, config.max_nodes, config.rank_policy)
        self.agents: list[Agent] = []
        self.happened: Counter[str] = Counter()
        self.settled_s = 0.0
        self.scheduler.after(LOOK_S, self._look)

    # ---- agents

    def add_agent(self, host: str = "", **changes: object) -> Agent:
        """A new incarnation of an agent, on a machine of its own or on one that is named."""
        number = len(self.agents)
        config = replace(self.settings.config, host=host or f"h{number}", **changes).checked()
        offset_s = self.random.uniform(0.0, CLOCK_OFFSET_S)
        loop = NodeLoop(self.scheduler, offset_s, config.host)
        link = Link(loop, self.cluster, random.Random(self.random.random()), self.settings.weather)
        is_earlier = random.Random(f"{self.settings.seed} {number}").random() < self.settings.earlier_share
        agent = Agent(number, link, self.checker, config, self.settings.habits, is_earlier=is_earlier)
        self.agents.append(agent)
        self.checker.say(f"{agent.name} comes{', of an earlier version' if is_earlier else ''}")
        return agent

    @property
    def live(self) -> list[Agent]:
        """Agents that are there."""
        return [agent for agent in self.agents if agent.alive]

    # ---- time

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.scheduler.now

    @property
    def violation(self) -> str | None:
        """The first, if any."""
        for text in self.scheduler.failures:
            self.checker.violations.append(f"P0: an unhandled exception: {text}")
        self.scheduler.failures.clear()
        return self.checker.violations[0] if self.checker.violations else None

    def pass_time(self, duration_s: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass until something holds; whether it came to hold."""
        deadline = self.now + duration_s
        self.scheduler.run_until(deadline, lambda: bool(self.checker.violations or self.scheduler.failures) or until())
        return until()

    def _look(self) -> None:
        self.checker.look()
        self.scheduler.after(LOOK_S, self._look)

    # ---- where it has come to

    @property
    def members(self) -> list[Agent]:
        """Agents that run workers of the present generation."""
        return [agent for agent in self.live if any(number == self.checker.generation for number, _ in agent.workers)]

    def is_settled(self) -> bool:
        """P6, at this moment."""
        state = self.checker.state
        live = self.live
        if state is not None and state.phase == CLOSED:
            return not live
        if len(live) < self.checker.min_nodes:
            return not any(agent.workers for agent in live)
        if state is None or state.phase != RUNNING or state.generation != self.checker.generation:
            return False
        if any(agent.leaving for agent in live):
            return False
        wanted = min(self.checker.max_nodes, len(live))
        members, standby = self.members, [agent for agent in live if not agent.workers]
        return len(members) == wanted and len(standby) == len(live) - wanted and self._is_whole()

    def _is_whole(self) -> bool:
        ids = {agent.world.member.id for agent in self.members if agent.world is not None}
        return ids == {member.id for member in self.checker.generations[-1].round.members}

    def settle(self, limit_s: float = SETTLE_S, stable_s: float = STABLE_S) -> None:
        """Require P6: settled within a time, and still so a while later, in the same generation."""
        began = self.now
        while self.violation is None:
            if not self.pass_time(began + limit_s - self.now, self.is_settled):
                if self.violation is None:
                    self.checker.fail("P6", f"not settled after {limit_s:g} s: {self.describe()}")
                return
            self.settled_s = self.now - began
            generation = self.checker.generation
            self.pass_time(stable_s, lambda: not self.is_settled())
            if self.is_settled() and self.checker.generation == generation:
                return

    def idle(self, duration_s: float = IDLE_S) -> None:
        """Require the second half of P9: nothing is written while nothing happens, and no node calls."""
        revision, calls = self.cluster.store.revision, self.calls()
        fenced = self.checker.fenced_writes
        self.pass_time(duration_s)
        written = self.cluster.store.revision - revision - (self.checker.fenced_writes - fenced)
        asked = self.calls().total() - calls.total()
        if self.violation is None and (written or asked):
            self.checker.fail(
                "P9", f"{written} revisions and {asked} calls in {duration_s:g} s in which nothing happened"
            )

    def calls(self) -> Counter[str]:
        """Calls of all nodes ever, by kind."""
        total: Counter[str] = Counter()
        for agent in self.agents:
            total += agent.link.calls
        return total

    def describe(self) -> str:
        """Who is where, in a line."""
        state = self.checker.state
        where = [
            f"{agent.name} {'frozen ' if agent.link.loop.frozen else ''}"
            f"{sorted(agent.workers) or ('waits' if agent.waiting else 'idle')}"
            for agent in self.live
        ]
        return f"generation {self.checker.generation}, {state and (state.generation, state.phase)}; {', '.join(where)}"

    def finish(self) -> Outcome:
        """End everything and report."""
        violation = self.violation
        self.scheduler.tear_down()
        return Outcome(
            self.settings,
            violation,
            len(self.checker.generations),
            self.now,
            self.happened,
            self.calls(),
            self.checker.fenced_writes,
            self.settled_s,
            self.checker.log,
        )

    def heal(self) -> None:
        """From here on the network is good, and nodes that the minimum lacks are started."""
        for agent in self.live:
            agent.link.weather = CALM
            agent.fails = agent.leaves = False
        self.checker.cluster_calm_since = self.now
        config = self.settings.config
        limits = (config.min_nodes, config.max_nodes)
        while limits == (self.checker.min_nodes, self.checker.max_nodes) and len(self.live) < config.min_nodes:
            self.add_agent().link.weather = CALM

    def close_run(self) -> None:
        """All workers end well: all nodes must go, and nothing but what outlives a run may stay."""
        members = self.members
        if not members:
            return
        for agent in self.live:
            agent.finishes = True
        reopened = self.checker.reopened
        everybody_goes = self.pass_time(SETTLE_S, lambda: not self.live or self.checker.reopened > reopened)
        if self.checker.reopened > reopened:
            self.settle()  # by one that came when all others had left: the same id may be run again
            return
        if not everybody_goes:
            self.checker.fail("P6", f"the run was closed, but some are still there: {self.describe()}")
        # A node that could not deregister is gone when its lease ends.
        is_clean = self.pass_time(LEASE_MAX_S, lambda: not self.left_behind())
        if self.violation is None and not is_clean:
            self.checker.fail("P6", f"keys are left behind: {self.left_behind()}")

    def left_behind(self) -> list[str]:
        """Keys of the run that are there though no node is, other than those that stay."""
        keys = RunKeys(RUN_ID)
        return [
            key.decode() for key in sorted(self.cluster.store.items) if key.decode() not in (keys.round, keys.state)
        ]
