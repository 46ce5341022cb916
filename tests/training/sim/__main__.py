"""``python -m tests.training.sim``: run a range of seeds, or replay one."""

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
    calls: Counter[str] = sum((outcome.calls for outcome in outcomes), Counter())
    return "\n".join(
        (
            f"{len(outcomes)} seeds, {sum(outcome.virtual_s for outcome in outcomes) / 3600:.2f} run-hours, "
            f"{sum(outcome.generations for outcome in outcomes):,} generations, {calls.total():,} calls, "
            f"{sum(outcome.fenced_writes for outcome in outcomes):,} fenced writes accepted",
            f"{faults.total():,} faults: " + ", ".join(f"{name} {faults[name]}" for name in sorted(faults)),
            f"slowest to settle after the last fault: {max(outcome.settled_s for outcome in outcomes):.1f} s",
        )
    )


main = Simulator("tests.training.sim", "simulated training runs", draw, run_seed, summary).main

if __name__ == "__main__":
    sys.exit(main())
