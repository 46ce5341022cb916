"""``python -m tests.checkpoint.sim``: run a range of seeds, or replay one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from tests.virtual_store.command import Simulator

from .run import Outcome
from .swarm import draw, run_seed


def summary(outcomes: Sequence[Outcome]) -> str:
    """The figures of many runs in a few lines."""
    faults: Counter[str] = sum((outcome.faults for outcome in outcomes), Counter())
    return "\n".join(
        (
            f"{len(outcomes)} seeds, {sum(outcome.virtual_s for outcome in outcomes) / 3600:.2f} run-hours, "
            f"{sum(outcome.generations for outcome in outcomes):,} generations, "
            f"{sum(outcome.begun for outcome in outcomes):,} attempts, "
            f"{sum(outcome.commits for outcome in outcomes):,} commits, "
            f"{sum(outcome.deleted for outcome in outcomes):,} deleted, "
            f"{sum(outcome.fenced_writes for outcome in outcomes):,} fenced writes accepted",
            f"{faults.total():,} faults: " + ", ".join(f"{name} {faults[name]}" for name in sorted(faults)),
        )
    )


main = Simulator("tests.checkpoint.sim", "simulated checkpoints", draw, run_seed, summary).main

if __name__ == "__main__":
    sys.exit(main())
