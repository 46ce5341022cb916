"""The command line of the benchmark of what operators do; exit code 1 if a bar is missed.

python -m bench.operate --row restart-killed --row leader-killed --scale 0.1
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict

from bench.hostile.stage import FLAGS
from bench.operate.report import Result, table
from bench.operate.rows import ROWS, Figures, Row
from bench.operate.scene import Scene, Sizes
from bench.report import machine, parser_of_rows, write_table
from bench.stage import in_turn, progress
from raftkv.rpc.status import RpcError
from tests.procs import ETCD, RAFTKV, Cluster, ProcessError

PROGRAMS = {"etcd": ETCD, "raftkv": RAFTKV.with_flags("--log-level", "warn")}
SIZE = 3


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of_rows(__doc__, ROWS)
    parser.add_argument("--rounds", type=int, default=1, help="of each row; medians count")
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes: 1,000,000 keys, 1 GiB")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reference/performance.md")
    return parser.parse_args(arguments)


async def measure(row: Row, program: str, sizes: Sizes) -> Figures:
    """Run a row with fresh members of a program."""
    with Cluster(PROGRAMS[program].with_flags(*FLAGS, *row.flags), SIZE) as cluster:
        return await row.run(Scene(cluster, sizes))


async def run_row(row: Row, options: argparse.Namespace) -> Result:
    """All rounds of a row."""
    sizes = Sizes().scaled(options.scale)
    rounds: dict[str, list[Figures]] = defaultdict(list)
    problems: dict[str, str] = {}
    for number in range(options.rounds):
        for program in in_turn(PROGRAMS, number):
            try:
                figures = await measure(row, program, sizes)
            except (RpcError, ProcessError, TimeoutError) as error:
                problems[program] = f"{type(error).__name__}: {error}"
                progress(f"  {program}: {problems[program]}")
                continue
            rounds[program].append(figures)
            progress(f"  {program}: {', '.join(f'{name} {value:,g}' for name, value in figures.items())}")
    return Result.of(row, rounds, problems)


async def run(options: argparse.Namespace) -> list[Result]:
    """Measure the rows that were asked for."""
    results = []
    for row in ROWS:
        if not options.row or row.name in options.row:
            progress(f"{row.name}: {row.what}")
            results.append(await run_row(row, options))
    return results


def main() -> None:
    """Run it."""
    options = parse()
    results = asyncio.run(run(options))
    facts = machine()
    text = table(
        results,
        f"Three members, writer and loader on {facts['cores']} shared cores, fsync on, median of {options.rounds} "
        f"rounds, scale {options.scale:g}, {facts['date']}. Less is better; ratios in bold have a bar of 1.",
    )
    print(text)
    if options.write:
        write_table(text, "operate")
    for result in results:
        for missed in result.misses:
            print(f"MISSED {result.row}: {missed}", file=sys.stderr)
    sys.exit(int(any(result.misses for result in results)))


if __name__ == "__main__":
    main()
