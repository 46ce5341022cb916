"""A seed: which run, with which faults; and one simulation of it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final
from unittest import mock

from raftkv.training.config import APPEND, FILL, TOPOLOGY, RunConfig
from raftkv.training.rendezvous import world
from raftkv.training.rendezvous.world import HEAD_MAX_BYTES
from tests.virtual_store.network import Weather

from . import faults
from .agent import Habits
from .faults import Faults
from .run import RUN_ID, Outcome, Settings, Simulation

TTLS_S: Final = (1, 1, 1, 2, 3)
STORE_ONLY_SHARE: Final = 0.05


def draw(seed: int) -> Settings:
    """The settings that a seed stands for."""
    source = random.Random(seed)
    machines = source.choice((2, 3, 3, 4, 5, 8))
    max_nodes = source.randint(max(1, machines - 2), machines + 2)
    min_nodes = source.randint(1, min(max_nodes, machines))
    count = source.randint(1, len(faults.ALL))
    config = RunConfig(
        run_id=RUN_ID,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        lease_ttl_s=source.choice(TTLS_S),
        disconnect_grace_s=source.choice((0.0, 0.1, 0.1, 0.3)),
        last_call_timeout_s=source.choice((0.0, 0.5, 2.0, 5.0)),
        expected_nodes=source.choice((0, 0, min(machines, max_nodes))),
        rank_policy=source.choice((APPEND, APPEND, FILL)),
        fault_limit=0,
        slots=source.choice((1, 1, 2)),
    )
    # Drawn separately, as later additions should be: the seeds that found bugs must keep their stories.
    later = random.Random(f"{seed} later")
    config = replace(
        config,
        join_timeout_s=later.choice((600.0, 600.0, 600.0, 8.0)),
        rank_policy=later.choice((config.rank_policy, config.rank_policy, TOPOLOGY)),
    )
    versions = random.Random(f"{seed} versions")
    return Settings(
        head_max_bytes=versions.choice((HEAD_MAX_BYTES, HEAD_MAX_BYTES, 200, 0)),
        earlier_share=versions.choice((0.0, 0.0, 0.0, 0.4)),
        seed=seed,
        machines=machines,
        config=config,
        habits=Habits(
            poll_s=source.choice((0.1, 0.25, 0.5)),
            stop_s=source.choice(((0.0, 0.0), (0.0, 0.3), (0.1, 3.0))),
            fenced_write=source.choice((0.0, 0.05, 0.2)),
        ),
        weather=Weather(
            delay_s=source.choice(((0.0005, 0.003), (0.0005, 0.03), (0.001, 0.4))),
            loss=source.choice((0.0, 0.0, 0.02, 0.15)),
            late=source.choice((0.0, 0.5)),
        ),
        ttl_min_s=source.choice((1, 1, 2)),
        arrival_s=source.choice((0.0, 0.5, 3.0)),
        faults=_faults(source, later, count),
        gap_s=source.choice((0.5, 2.0, 6.0)),
        faults_s=source.uniform(3.0, 25.0),
        finishes=source.random() < 0.3,
    )


def _faults(source: random.Random, later: random.Random, count: int) -> tuple[str, ...]:
    drawn = tuple(sorted(source.sample(faults.ALL, count)))
    more = later.choice(faults.LATER)
    return drawn + more if source.random() > STORE_ONLY_SHARE else faults.STORE_ONLY


def run_seed(seed: int) -> Outcome:
    """Simulate a seed."""
    return simulate(draw(seed))


def simulate(settings: Settings) -> Outcome:
    """Agents come, faults happen, everything is healed; then it must settle, and end if it is to end."""
    simulation = Simulation(settings)
    with simulation.scheduler.ambient(), mock.patch.object(world, "HEAD_MAX_BYTES", settings.head_max_bytes):
        return _simulate(simulation, settings)


def _simulate(simulation: Simulation, settings: Settings) -> Outcome:
    trouble = Faults(simulation)
    for _ in range(settings.machines):
        simulation.scheduler.after(simulation.random.random() * settings.arrival_s, simulation.add_agent)
    simulation.pass_time(settings.arrival_s)
    if settings.faults == faults.STORE_ONLY:
        simulation.settle()
    formed = simulation.checker.generation
    if settings.faults:
        simulation.scheduler.after(simulation.random.random() * 3, trouble.strike_on, settings.faults, settings.gap_s)
        simulation.pass_time(settings.faults_s)
    trouble.heal()
    simulation.heal()
    if simulation.violation is None:
        simulation.settle()
    if settings.faults == faults.STORE_ONLY and simulation.checker.generation != formed:
        simulation.checker.fail(
            "P7", f"the store alone failed, and generation {formed} became {simulation.checker.generation}"
        )
    if settings.finishes and simulation.violation is None:
        simulation.close_run()
    return simulation.finish()
