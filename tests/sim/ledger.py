"""A cluster's year, half an hour per seed (``swarm.year``): the ledger of finished seeds, which any run continues.

A line describes a run of successive seeds:

    {"commit": "1d6daf42", "date": "2026-11-29", "seeds": [1, 12], "hours": 6.1, "cpu_s": 201.3, "faults": 214, ...}

Other machines run other ranges of seeds by ``--first``; the order of lines does not matter.
"""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.sim.corners import run_corner
from tests.sim.swarm import Report

LEDGER = Path(__file__).with_name("YEAR.jsonl")
SEEDS_A_LINE = 12
HOURS_A_YEAR = 8766


def play_on(minutes: float, jobs: int, path: Path = LEDGER) -> int:
    """Run the next seeds and record them in the ledger. Returns 1 when one violated a property.

    Arguments:
        minutes: time after which no new seed begins.
        jobs: number of processes.
        path: ledger file.
    """
    until, bad = time.monotonic() + 60 * minutes, 0
    with ProcessPoolExecutor(jobs) as pool:
        while time.monotonic() < until:
            first = next_seed(path)
            reports = list(pool.map(partial(run_corner, corner="year"), range(first, first + SEEDS_A_LINE)))
            note(reports, path)
            bad += sum(report.violation is not None for report in reports)
            print(total(path), flush=True)
    return 1 if bad else 0


def entries(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ledger; empty if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def next_seed(path: Path) -> int:
    """Return the first seed after all recorded ones."""
    return max((entry["seeds"][1] for entry in entries(path)), default=0) + 1


def note(reports: list[Report], path: Path) -> None:
    """Append a line.

    Arguments:
        reports: reports of successive seeds.
        path: ledger file.
    """
    entry = {
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seeds": [reports[0].seed, reports[-1].seed],
        "hours": round(sum(report.simulated_s for report in reports) / 3600, 2),
        "cpu_s": round(sum(report.cpu_s for report in reports), 1),
        "faults": sum(report.faults.total() for report in reports),
        "acknowledged": sum(report.acknowledged_count for report in reports),
        "leaders": sum(report.leaders_count for report in reports),
        "changes": sum(report.conf_changes_count for report in reports),
        "leases": sum(report.leases_count for report in reports),
        "events": sum(report.watched_count for report in reports),
        "violations": [[report.seed, report.violation] for report in reports if report.violation is not None],
    }
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def total(path: Path) -> str:
    """Return the totals of a ledger in one line."""
    lines = entries(path)
    hours, cpu_s = sum(line["hours"] for line in lines), sum(line["cpu_s"] for line in lines)
    sums = ", ".join(f"{sum(line[name] for line in lines):,} {name}" for name in ("faults", "acknowledged", "changes"))
    return (
        f"{hours:,.1f} of {HOURS_A_YEAR:,} cluster-hours, {hours * 3600 / max(cpu_s, 1e-9):.0f}x real time a core: "
        f"{sums}, {sum(len(line['violations']) for line in lines)} violations"
    )


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
