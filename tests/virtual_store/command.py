"""The command line of the simulators of runs and of checkpoints: run a range of seeds, or replay one.

    sys.exit(Simulator("tests.training.sim", "simulated training runs", draw, run_seed, summary).main())

Exit code 1 when a property was violated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Simulator:
    """What the command line needs of a simulator.

    Arguments:
        module: that ``python -m`` runs.
        subject: what is simulated, for ``--help``.
        draw: makes the settings of a seed.
        run_seed: simulates a seed, in a process of its own with ``--jobs``; returns its outcome.
        summary: makes some lines of figures of many outcomes.
    """

    module: str
    subject: str
    draw: Callable[[int], object]
    run_seed: Callable[[int], Any]
    summary: Callable[[Sequence[Any]], str]

    def main(self, arguments: list[str] | None = None) -> int:
        """Run and print; returns the exit code."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.module}", description=self.subject)
        parser.add_argument("--seed", type=int, help="replay this one seed")
        parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
        parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
        parser.add_argument("--first", type=int, default=1, help="the first of them")
        parser.add_argument("--jobs", type=int, default=1, help="processes")
        options = parser.parse_args(arguments)
        if options.seed is not None:
            return self._replay(options.seed, options.trace)
        return self._sweep(range(options.first, options.first + options.seeds), options.jobs)

    def _replay(self, seed: int, trace: bool) -> int:
        print(f"seed = {seed}\n{self.draw(seed)}", flush=True)
        outcome = self.run_seed(seed)
        if trace:
            print("\n".join(outcome.log))
        print(self.summary([outcome]))
        return _verdict([outcome])

    def _sweep(self, seeds: Sequence[int], jobs: int) -> int:
        began = time.monotonic()
        if jobs == 1:
            outcomes = [self.run_seed(seed) for seed in seeds]
        else:
            with ProcessPoolExecutor(jobs) as pool:
                outcomes = list(pool.map(self.run_seed, seeds, chunksize=8))
        print(self.summary(outcomes))
        print(f"{time.monotonic() - began:.1f} s")
        return _verdict(outcomes)


def _verdict(outcomes: Sequence[Any]) -> int:
    bad = [outcome for outcome in outcomes if outcome.violation is not None]
    for outcome in bad:
        print(f"VIOLATION seed {outcome.settings.seed}: {outcome.violation}\n  replay: {outcome.replay_command}")
    print(f"{len(bad)} violations")
    return 1 if bad else 0
