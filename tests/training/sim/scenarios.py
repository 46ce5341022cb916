"""Directed runs: one fault, and what must come of it.

Owns P4 (exactly one new generation for one fault), P7 (an outage of the store alone ends nothing), P9 (calls of a
generation without faults), and the odd cases of people: two jobs with one id, a run that is started again, a zombie.

    with scenario(machines=3) as run:
        run.forms(3)
        with run.generations(1):
            run.members[0].kill()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from raftkv.training.config import RunConfig
from tests.virtual_store.network import Weather

from .agent import Agent, Habits
from .faults import Faults
from .run import RUN_ID, Settings, Simulation

CALLS_PER_GENERATION = 6


class Broken(AssertionError):
    """A property does not hold."""


class Directed(Simulation):
    """A simulation with a hand on it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.faults = Faults(self)

    def check(self) -> None:
        """Raise if a property has been violated."""
        if self.violation is not None:
            raise Broken("\n".join([self.violation, *self.checker.log[-60:]]))

    def require(self, holds: bool, text: str) -> None:
        """Raise unless something holds."""
        self.check()
        if not holds:
            raise Broken("\n".join([f"{text}: {self.describe()}", *self.checker.log[-60:]]))

    def forms(self, count: int) -> None:
        """Let the generation form that all nodes are in, and all calls come to rest."""
        self.settle(20.0, stable_s=1.0)
        self.require(len(self.members) == count, f"not {count} members")

    def node(self, index: int) -> Agent:
        """The member with a node rank."""
        return next(agent for agent in self.members if agent.world is not None and agent.world.index == index)

    @property
    def deciding(self) -> Agent:
        """The arbiter."""
        agent = self.faults.arbiter()
        if agent is None:
            raise Broken("there is no arbiter")
        return agent

    @contextlib.contextmanager
    def generations(self, count: int, limit_s: float = 20.0) -> Iterator[None]:
        """What happens inside makes so many new generations, and then nothing more."""
        before = self.checker.generation
        yield
        self.settle(limit_s, stable_s=8.0)
        self.require(
            self.checker.generation == before + count,
            f"{self.checker.generation - before} new generations, not {count}",
        )

    def end(self) -> None:
        """Nothing was violated; nothing runs any more."""
        try:
            self.check()
        finally:
            self.scheduler.tear_down()


@contextlib.contextmanager
def scenario(
    machines: int = 3,
    *,
    seed: int = 1,
    weather: Weather | None = None,
    habits: Habits | None = None,
    earlier_share: float = 0.0,
    **changes: object,
) -> Iterator[Directed]:
    """A run with agents that have just come; torn down and checked at the end.

    Arguments:
        earlier_share: see ``Settings``.
        changes: of the configuration; the limits are two nodes to as many as there are machines.
    """
    values: dict[str, object] = {"min_nodes": min(2, machines), "max_nodes": machines, "last_call_timeout_s": 2.0}
    config = RunConfig(run_id=RUN_ID, fault_limit=0, **{**values, **changes})
    settings = Settings(seed, machines, config, habits or Habits(), weather or Weather(), earlier_share=earlier_share)
    run = Directed(settings)
    with run.scheduler.ambient():
        for _ in range(machines):
            run.add_agent()
        try:
            yield run
        finally:
            run.end()
