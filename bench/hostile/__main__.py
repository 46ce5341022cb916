"""The command line of the benchmark of hostile requests; exit code 1 if a bar is missed.

python -m bench.hostile --row sort-modify --row flood-ping --scale 0.1
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from rich.console import Console

from bench.hostile.measure import Outcome, measure
from bench.hostile.report import details, misses, print_table, together
from bench.hostile.rows import ROWS, Row
from bench.report import parser_of_rows
from bench.stage import allow_many_files

PROGRAMS = ("etcd", "raftkv")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of_rows(__doc__, ROWS)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of keys, calls and connections")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long an attack that can be repeated lasts")
    parser.add_argument("--rounds", type=int, default=1, help="of each row, both programs in turn; see report.together")
    parser.add_argument("--programs", default="etcd,raftkv", help="comma-separated; etcd, raftkv")
    return parser.parse_args(arguments)


async def run_row(row: Row, options: argparse.Namespace, console: Console) -> tuple[Outcome | None, Outcome | None]:
    """Measure a row with every program that was asked for; raftkv's outcome, then etcd's."""
    found: dict[str, list[Outcome]] = {"raftkv": [], "etcd": []}
    programs = [name for name in PROGRAMS if name in options.programs.split(",") and name in row.programs]
    for _ in range(options.rounds):
        for program in programs:
            outcome = await measure(row, program, options.scale, options.seconds)
            found[program].append(outcome)
            for line in details(outcome):
                console.print(line, markup=False, highlight=False, style="dim", soft_wrap=True)
    raftkv, etcd = (together(rounds) if rounds else None for rounds in found.values())
    return raftkv, etcd


async def run(options: argparse.Namespace, console: Console) -> int:
    """Measure all rows and print them."""
    rows: list[tuple[Outcome | None, Outcome | None, list[str]]] = []
    for row in ROWS:
        if options.row and row.name not in options.row:
            continue
        console.print(f"{row.name}: {row.what}", highlight=False)
        raftkv, etcd = await run_row(row, options, console)
        missed = [] if raftkv is None else misses(raftkv, etcd)
        rows.append((raftkv, etcd, missed))
    print_table(rows, Console(width=max(160, console.width)))
    return int(any(missed for _, _, missed in rows))


def main() -> None:
    """Run it."""
    options = parse()
    allow_many_files()
    sys.exit(asyncio.run(run(options, Console(stderr=True))))


if __name__ == "__main__":
    main()
