"""``python -m tests.sim``: run a range of seeds, or replay one.

    python -m tests.sim --seeds 500 --jobs 2      seeds 1-500 on two processes, one line of figures at the end
    python -m tests.sim --seed 17 --trace         seed 17 again, every event a line
    python -m tests.sim --corner membership       only with constant membership changes (corners.py)
    python -m tests.sim --year --minutes 20       the next half hours of a cluster's year, recorded in YEAR.jsonl

Exit code 1 when a property was violated.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from tests.sim import ledger
from tests.sim.corners import CORNERS, run_corner
from tests.sim.swarm import Report, describe


def main(arguments: list[str] | None = None) -> int:
    """Run and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="deterministic simulation")
    parser.add_argument("--seed", type=int, help="replay this one seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--corner", choices=CORNERS, default="draw", help="where in the swarm to look")
    parser.add_argument("--year", action="store_true", help="play on from where the ledger ends")
    parser.add_argument("--minutes", type=float, default=60.0, help="with --year: begin nothing new after these")
    options = parser.parse_args(arguments)
    if options.year:
        return ledger.play_on(options.minutes, options.jobs)
    if options.seed is not None:
        return _replay(options.seed, options.corner, options.trace)
    return _sweep(range(options.first, options.first + options.seeds), options.corner, options.jobs)


def _replay(seed: int, corner: str, trace: bool) -> int:
    print(f"seed = {seed}")
    print("\n".join(describe(CORNERS[corner](seed))), flush=True)
    report = run_corner(seed, corner, print if trace else None)
    print(summary([report]))
    print(f"digest = {report.digest}")
    return _verdict([report])


def _sweep(seeds: Sequence[int], corner: str, jobs: int) -> int:
    run = functools.partial(run_corner, corner=corner)
    if jobs == 1:
        reports = [run(seed) for seed in seeds]
    else:
        with ProcessPoolExecutor(jobs) as pool:
            reports = list(pool.map(run, seeds, chunksize=4))
    print(summary(reports))
    return _verdict(reports)


def summary(reports: list[Report]) -> str:
    """Summarize many runs in a few lines."""
    cpu_s = sum(report.cpu_s for report in reports) or 1e-9
    simulated_s = sum(report.simulated_s for report in reports)
    events_count = sum(report.events_count for report in reports)
    faults: Counter[str] = sum((report.faults for report in reports), Counter())
    deaths: Counter[str] = sum((report.deaths for report in reports), Counter())
    return "\n".join(
        (
            f"{len(reports)} seeds, {simulated_s / 3600:.2f} cluster-hours in {cpu_s:.1f} cpu-s: "
            f"{simulated_s / cpu_s:.0f}x real time, {events_count / cpu_s:,.0f} events/s, "
            f"{60 * len(reports) / cpu_s:.0f} seeds/min per core",
            f"{faults.total():,} faults: " + ", ".join(f"{name} {faults[name]}" for name in sorted(faults)),
            f"{sum(r.acknowledged_count for r in reports):,} operations acknowledged, "
            f"{sum(r.unknown_count for r in reports):,} unknown, {sum(r.refused_count for r in reports):,} refused; "
            f"{sum(r.leaders_count for r in reports):,} leaders, "
            f"{sum(r.conf_changes_count for r in reports):,} membership changes; "
            f"{sum(r.leases_count for r in reports):,} leases, "
            f"{sum(r.watched_count for r in reports):,} events watched, "
            f"{sum(r.compactions_count for r in reports):,} compactions; "
            f"slowest recovery {max((r.recovery_s for r in reports), default=0):.2f} s",
            f"{deaths.total():,} deaths at {len(deaths)} failpoints",
        )
    )


def _verdict(reports: list[Report]) -> int:
    bad = [report for report in reports if report.violation is not None]
    for report in bad:
        print(f"VIOLATION seed {report.seed}: {report.violation}\n  replay: {report.replay_command}")
        if len(bad) <= 3 and report.trace_back:
            print(report.trace_back)
    print(f"{len(bad)} violations")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
