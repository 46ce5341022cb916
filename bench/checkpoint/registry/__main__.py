"""The command line of the benchmark of the registry; exit code 1 if raftkv misses a bar.

python -m bench.checkpoint.registry --rows lookup --checkpoints 10000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from bench.checkpoint.registry import commit, lookups, watching
from bench.checkpoint.registry.figures import Figure, as_json, missed, table
from bench.compare import machine, write_table
from tests.procs import ETCD, RAFTKV, Cluster, Program

PROGRAMS = {"etcd": ETCD, "raftkv": RAFTKV.with_flags("--log-level", "warn")}
SIZE = 3
ROWS = ("commit", "watch", "lookup")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.checkpoint.registry", description="what the registry of checkpoints costs"
    )
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated")
    parser.add_argument("--programs", default="etcd,raftkv", help="comma-separated")
    parser.add_argument("--ranks", default="1,1000,10000", help="world sizes of the row commit, comma-separated")
    parser.add_argument("--checkpoints", type=int, default=100_000, help="of the row lookup, over all runs")
    parser.add_argument("--runs", type=int, default=100, help="of the row lookup")
    parser.add_argument("--commits", type=int, default=100, help="of the row watch")
    parser.add_argument("--rounds", type=int, default=5, help="commits of the row commit; medians count")
    parser.add_argument("--questions", type=int, default=300, help="of each sort in the row lookup")
    parser.add_argument("--json", action="store_true", help="one object instead of the table")
    parser.add_argument("--write", action="store_true", help="put the table into docs/training/checkpoints.md")
    return parser.parse_args()


async def measure(program: Program, options: argparse.Namespace) -> list[Figure]:
    """Run the rows with fresh members of a program."""
    rows, found = options.rows.split(","), []
    with Cluster(program, SIZE) as cluster:
        endpoints = cluster.endpoints
        if "commit" in rows:
            found += await commit.measure(endpoints, [int(one) for one in options.ranks.split(",")], options.rounds)
        if "watch" in rows:
            found += await watching.measure(endpoints, options.commits)
        if "lookup" in rows:
            found += await lookups.measure(cluster, endpoints, options.checkpoints, options.runs, options.questions)
    return found


def main() -> int:
    """Run the benchmark."""
    options, found = parse(), {}
    for name in options.programs.split(","):
        print(f"{name}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        found[name] = asyncio.run(measure(PROGRAMS[name], options))
    facts = machine()
    print(json.dumps(as_json(found, facts)) if options.json else table(found, facts))
    if options.write:
        write_table(table(found, facts), "registry")
    problems = missed(found)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
