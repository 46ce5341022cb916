"""Bad luck, by name: what a seed draws from, and what directed scenarios do one at a time.

Owns what each fault does and how long it lasts; ``heal`` ends all that are still on. Each returns whether there was
anything to do it to.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .agent import Agent
    from .run import Simulation

AGENTS_MAX: Final = 24
"""Incarnations in one simulation."""


class Faults:
    """The faults of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.random = random.Random(simulation.random.random())
        self.on = True

    def strike(self, name: str) -> bool:
        """Let a fault happen, if it can."""
        happened: bool = getattr(self, name)()
        if happened:
            self.simulation.happened[name] += 1
        return happened

    def strike_on(self, names: tuple[str, ...], gap_s: float) -> None:
        """Let random faults happen until ``heal``."""
        if self.on:
            self.strike(self.random.choice(names))
            pause_s = self.random.choice((0.0, self.random.uniform(0.0, 0.5), self.random.expovariate(1 / gap_s)))
            self.simulation.scheduler.after(pause_s, self.strike_on, names, gap_s)

    def heal(self) -> None:
        """End what is still on."""
        self.on = False
        for agent in self.simulation.live:
            self._thaw(agent)
            self._mend(agent)
        self.simulation.cluster.outage(0.0)

    # ---- workers and agents

    def worker_fails(self) -> bool:
        """A worker exits."""
        agent = self._any(lambda agent: bool(agent.workers))
        if agent is not None:
            agent.fails = True
        return agent is not None

    def workers_fail(self) -> bool:
        """Several do, in the same instant."""
        agents = [agent for agent in self.simulation.live if agent.workers]
        chosen = self.random.sample(agents, min(len(agents), self.random.randint(2, 4)))
        for agent in chosen:
            agent.fails = True
        return bool(chosen)

    def kill(self) -> bool:
        """An agent is killed, and not replaced."""
        agent = self._any()
        if agent is None or len(self.simulation.live) <= self.simulation.settings.config.min_nodes:
            return False
        agent.kill()
        return True

    def restart(self) -> bool:
        """An agent is killed and started again, at once or soon."""
        agent = self._any()
        if agent is None or len(self.simulation.agents) >= AGENTS_MAX:
            return False
        agent.kill("killed, to be restarted")
        self._later((0.0, 0.05, 2.0), lambda: self.simulation.add_agent(agent.config.host))
        return True

    def restart_arbiter(self) -> bool:
        """The node that decides is killed and started again."""
        agent = self.arbiter()
        if agent is None or len(self.simulation.agents) >= AGENTS_MAX:
            return False
        agent.kill("the arbiter is killed, to be restarted")
        self._later((0.0, 0.05, 2.0), lambda: self.simulation.add_agent(agent.config.host))
        return True

    def come(self) -> bool:
        """A new node."""
        if len(self.simulation.agents) >= AGENTS_MAX:
            return False
        self.simulation.add_agent()
        return True

    def come_and_die(self) -> bool:
        """A new node that dies as soon as it has come."""
        if len(self.simulation.agents) >= AGENTS_MAX:
            return False
        agent = self.simulation.add_agent()
        self._later((0.0, 0.004, 0.01, 0.05, 1.0), lambda: agent.kill("dies as it comes") if agent.alive else None)
        return True

    def leave(self) -> bool:
        """An agent goes, as after SIGTERM."""
        agent = self._any(lambda agent: bool(agent.workers))
        if agent is None or len(self.simulation.live) <= self.simulation.settings.config.min_nodes:
            return False
        agent.leaves = True
        return True

    def come_other(self) -> bool:
        """An agent of another job that was given the same id."""
        config = self.simulation.settings.config
        if len(self.simulation.agents) >= AGENTS_MAX:
            return False
        self.simulation.add_agent(min_nodes=config.min_nodes, max_nodes=config.max_nodes + 1)
        return True

    # ---- machines

    def freeze_short(self) -> bool:
        """A machine stands still for less than its lease lasts."""
        return self._freeze(self.random.uniform(0.05, 0.6))

    def freeze_long(self) -> bool:
        """A machine stands still for longer than its lease lasts; when it thaws, its workers write first."""
        return self._freeze(self.random.uniform(1.2, 8.0))

    def _freeze(self, duration_s: float) -> bool:
        agent = self._any(lambda agent: not agent.link.loop.frozen)
        if agent is not None:
            self.freeze(agent)
            self.simulation.scheduler.after(duration_s, self._thaw, agent)
        return agent is not None

    def freeze(self, agent: Agent) -> None:
        """A machine stands still."""
        agent.checker.say(f"{agent.name} freezes")
        agent.link.loop.freeze()

    def _thaw(self, agent: Agent) -> None:
        if agent.alive and agent.link.loop.frozen:
            agent.checker.say(f"{agent.name} thaws")
            agent.haunt()
            agent.link.loop.thaw()
            agent.calm_since = self.simulation.now

    # ---- the way to the cluster

    def partition_short(self) -> bool:
        """A node cannot reach the cluster, for less than its lease lasts."""
        return self._partition(self.random.uniform(0.05, 0.5))

    def partition_long(self) -> bool:
        """A node cannot reach the cluster, for longer."""
        return self._partition(self.random.uniform(1.2, 8.0))

    def _partition(self, duration_s: float) -> bool:
        agent = self._any(lambda agent: not agent.link.cut)
        if agent is not None:
            self.cut(agent)
            self.simulation.scheduler.after(duration_s, self._mend, agent)
        return agent is not None

    def cut(self, agent: Agent) -> None:
        """A node cannot reach the cluster."""
        agent.checker.say(f"{agent.name} is cut off")
        agent.link.cut = True
        agent.link.breaks += 1

    def _mend(self, agent: Agent) -> None:
        if agent.link.cut:
            agent.checker.say(f"{agent.name} is connected again")
            agent.link.cut = False
            agent.calm_since = self.simulation.now

    def reset(self) -> bool:
        """A connection breaks and is made again."""
        agent = self._any(lambda agent: not agent.link.cut)
        if agent is not None:
            agent.checker.say(f"{agent.name} loses its connection")
            agent.link.reset()
            agent.calm_since = self.simulation.now
        return agent is not None

    # ---- the cluster

    def outage(self) -> bool:
        """No node can reach the cluster."""
        return self._trouble(self.simulation.cluster.outage, self.random.choice((0.3, 2.0, 10.0)))

    def election(self) -> bool:
        """No member leads for a while."""
        return self._trouble(self.simulation.cluster.election, self.random.uniform(0.1, 1.5))

    def _trouble(self, begin: Callable[[float], None], most_s: float) -> bool:
        if not self.simulation.cluster.leads:
            return False
        duration_s = self.random.uniform(0.05, most_s)
        self.simulation.checker.say(f"{begin.__name__} for {duration_s:.3f} s")
        begin(duration_s)
        self.simulation.checker.cluster_calm_since = self.simulation.now + duration_s
        return True

    def compact(self) -> bool:
        """The cluster forgets its history."""
        self.simulation.checker.say("compaction")
        self.simulation.cluster.store.compact()
        return True

    # ---- choosing

    def arbiter(self) -> Agent | None:
        """The agent that decides now."""
        checker = self.simulation.checker
        return next((agent for agent in self.simulation.live if agent.number == checker.arbiter), None)

    def _any(self, fits: Callable[[Agent], bool] = lambda agent: True) -> Agent | None:
        agents = [agent for agent in self.simulation.live if fits(agent)]
        return self.random.choice(agents) if agents else None

    def _later(self, delays_s: tuple[float, ...], action: Callable[[], object]) -> None:
        delay_s = self.random.choice(delays_s)
        if delay_s:
            delay_s *= self.random.random()
        self.simulation.scheduler.after(delay_s, action)


ALL: Final = (
    "worker_fails", "workers_fail", "kill", "restart", "restart_arbiter", "come", "come_and_die", "freeze_short",
    "freeze_long", "partition_short", "partition_long", "reset", "outage", "election", "compact",
)  # fmt: skip
LATER: Final = ((), (), ("leave",), ("come_other", "leave"))
"""Drawn apart, as they came later: the seeds that found bugs must stay what they were."""
STORE_ONLY: Final = ("outage", "election")
