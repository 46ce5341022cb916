"""``python -m tests.checkpoint.sim``: run a range of seeds, or replay one.

    python -m tests.checkpoint.sim --seeds 2000 --jobs 2     seeds 1-2000 on two processes, some lines of figures
    python -m tests.checkpoint.sim --seed 17 --trace         seed 17 again, every change a line

Exit code 1 when a property was violated.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from .run import Outcome
from .swarm import draw, run_seed


def main(arguments: list[str] | None = None) -> int:
    """Run and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint.sim", description="simulated checkpoints")
    parser.add_argument("--seed", type=int, help="replay this one seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _replay(options.seed, options.trace)
    return _sweep(range(options.first, options.first + options.seeds), options.jobs)


def _replay(seed: int, trace: bool) -> int:
    print(f"seed = {seed}\n{draw(seed)}", flush=True)
    outcome = run_seed(seed)
    if trace:
        print("\n".join(outcome.log))
    print(summary([outcome]))
    return _verdict([outcome])


def _sweep(seeds: Sequence[int], jobs: int) -> int:
    began = time.monotonic()
    if jobs == 1:
        outcomes = [run_seed(seed) for seed in seeds]
    else:
        with ProcessPoolExecutor(jobs) as pool:
            outcomes = list(pool.map(run_seed, seeds, chunksize=8))
    print(summary(outcomes))
    print(f"{time.monotonic() - began:.1f} s")
    return _verdict(outcomes)


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


def _verdict(outcomes: Sequence[Outcome]) -> int:
    bad = [outcome for outcome in outcomes if outcome.violation is not None]
    for outcome in bad:
        print(f"VIOLATION seed {outcome.settings.seed}: {outcome.violation}\n  replay: {outcome.replay_command}")
    print(f"{len(bad)} violations")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
