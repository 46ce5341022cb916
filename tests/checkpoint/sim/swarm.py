"""A seed: which run, with which faults; and one simulation of it."""

from __future__ import annotations

import random

from tests.virtual_store.network import Weather

from .run import FAULTS, Outcome, Settings, Simulation


def draw(seed: int) -> Settings:
    """The settings that a seed stands for."""
    source = random.Random(seed)
    return Settings(
        seed=seed,
        weather=Weather(
            delay_s=source.choice(((0.0005, 0.003), (0.0005, 0.03), (0.001, 0.2))),
            loss=source.choice((0.0, 0.0, 0.05, 0.2)),
            late=source.choice((0.0, 0.5, 0.9)),
        ),
        copies=source.choice((0.0, 0.05, 0.2)),
        write_s=source.choice((0.001, 0.05, 0.3)),
        train_s=source.choice((0.06, 0.3, 1.0)),
        collect_s=source.choice((0.3, 2.0)),
        collectors=source.choice((1, 1, 2)),
        readers=source.choice((1, 2)),
        failure=source.choice((0.0, 0.0, 0.1)),
        faults=tuple(sorted(source.sample(FAULTS, source.randint(1, len(FAULTS))))),
        gap_s=source.choice((0.2, 0.7, 2.0)),
        faults_s=source.uniform(4.0, 14.0),
    )


def run_seed(seed: int) -> Outcome:
    """Simulate a seed."""
    return Simulation(draw(seed)).play()
