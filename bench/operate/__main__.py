"""The command line of the benchmark of what operators do; exit code 1 if a bar is missed.

python -m bench.operate --row restart-killed --row leader-killed --scale 0.1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Callable

from bench.hostile.stage import FLAGS
from bench.operate.report import Result, table
from bench.operate.rows import ROWS, Figures, Row
from bench.operate.scene import Scene, Sizes
from bench.report import machine, write_table
from raftkv.rpc.status import RpcError
from tests.procs import ETCD, RAFTKV, Cluster, ProcessError

PROGRAMS = {"etcd": ETCD, "raftkv": RAFTKV.with_flags("--log-level", "warn")}
SIZE = 3


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    names = "\n".join(f"  {row.name:16} {row.what}" for row in ROWS)
    parser = argparse.ArgumentParser(
        prog="python -m bench.operate",
        description="what operators do, raftkv beside etcd in the same run",
        epilog=f"rows:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--row", action="append", default=[], choices=[row.name for row in ROWS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=1, help="of each row; medians count")
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes: 1,000,000 keys, 1 GiB, 50 kills")
    parser.add_argument("--kills", type=int, help="of the leader, whatever the scale")
    parser.add_argument("--programs", default="etcd,raftkv", help="comma-separated; etcd, raftkv")
    parser.add_argument("--json", action="store_true", help="one object instead of the table")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reference/performance.md")
    return parser.parse_args(arguments)


async def measure(row: Row, program: str, sizes: Sizes) -> Figures:
    """Run a row with fresh members of a program."""
    with Cluster(PROGRAMS[program].with_flags(*FLAGS, *row.flags), SIZE) as cluster:
        return await row.run(Scene(cluster, sizes))


async def run_row(row: Row, options: argparse.Namespace, tell: Callable[[str], None]) -> Result:
    """All rounds of a row."""
    sizes = Sizes().scaled(options.scale)
    if options.kills:
        sizes = Sizes(sizes.keys, sizes.revisions, sizes.copied_bytes, options.kills)
    rounds: dict[str, list[Figures]] = defaultdict(list)
    problems: dict[str, str] = {}
    programs = [name for name in PROGRAMS if name in options.programs.split(",")]
    for number in range(options.rounds):
        # The program that goes first changes, so that a drift of the machine favours neither.
        for program in programs if number % 2 == 0 else reversed(programs):
            try:
                figures = await measure(row, program, sizes)
            except (RpcError, ProcessError, TimeoutError) as error:
                problems[program] = f"{type(error).__name__}: {error}"
                tell(f"  {program}: {problems[program]}")
                continue
            rounds[program].append(figures)
            tell(f"  {program}: {', '.join(f'{name} {value:,g}' for name, value in figures.items())}")
    return Result.of(row, rounds, problems)


async def run(options: argparse.Namespace, tell: Callable[[str], None]) -> list[Result]:
    """Measure the rows that were asked for."""
    results = []
    for row in ROWS:
        if not options.row or row.name in options.row:
            tell(f"{row.name}: {row.what}")
            results.append(await run_row(row, options, tell))
    return results


def main() -> None:
    """Run it."""
    options = parse()
    # Progress goes beside the result, so that --json stays JSON.
    results = asyncio.run(run(options, lambda text: print(text, file=sys.stderr, flush=True)))
    facts = machine()
    text = table(
        results,
        f"Three members, writer and loader on {facts['cores']} shared cores, fsync on, median of {options.rounds} "
        f"rounds, scale {options.scale:g}, {facts['date']}. Less is better; ratios in bold have a bar of 1.",
    )
    print(json.dumps([result.as_json() for result in results], indent=2) if options.json else text)
    if options.write:
        write_table(text, "operate")
    for result in results:
        for missed in result.misses:
            print(f"MISSED {result.row}: {missed}", file=sys.stderr)
    sys.exit(int(any(result.misses for result in results)))


if __name__ == "__main__":
    main()
