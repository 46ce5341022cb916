"""The command line of the chaos of checkpoints.

    python bench/ckpt_chaos.py [--ranks 2] [--trials 200] [--kill-at POINT ...] [--kill VICTIM ...] [--compare] [--json]

Every point with every victim, `--trials` times each. `--json` prints one line for each. The exit status is 1 if
anything did not hold.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict

import raftkv
from bench.checkpoint.chaos.compare import Row, compare
from bench.checkpoint.chaos.orders import POINTS
from bench.checkpoint.chaos.processes import DCP, DCP_ASYNC, REGISTRY, Pool
from bench.checkpoint.chaos.report import line_of, table, write
from bench.checkpoint.chaos.trial import VICTIMS, WITH_LEADER, Cell, Leaders, Scene, Tally, run_cell
from tests.procs import data_directory

SHOWN = 5
"""Problems of one point and victim that are printed; all are counted."""


def main() -> None:
    """Run, print, and exit with 1 if anything did not hold."""
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # members and ranks end with this
    tallies: list[Tally] = []
    for tally in chaos(cells(options), writer=options.writer, ranks=options.ranks, seed=options.seed):
        tallies.append(tally)
        print(json.dumps(asdict(tally)) if options.json else line_of(tally), flush=True)
        if options.write:
            write(options.writer, [tally], [])
    rows = _compare(options) if options.compare else []
    if options.write:
        write(options.writer, [], rows)
    problems = [f"{each.kill} at {each.kill_at}: {text}" for each in tallies for text in each.problems[:SHOWN]]
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


def _compare(options: argparse.Namespace) -> list[Row]:
    rows = []
    base = data_directory()
    try:
        for row in compare(base, ranks=options.ranks, trials=options.compare_trials, seed=options.seed):
            rows.append(row)
            if options.json:
                print(json.dumps(row.plain()), flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    if not options.json:
        print(table(rows))
    return rows


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=20, help="for each point and victim")
    parser.add_argument("--leader-trials", type=int, help="of those with raft-leader: each waits for an election")
    parser.add_argument("--kill-at", nargs="+", choices=POINTS, default=list(POINTS))
    parser.add_argument("--kill", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--compare", action="store_true", help="and the same faults on the orders of other tools")
    parser.add_argument("--compare-trials", type=int, default=10, help="for each tool, point and victim")
    parser.add_argument("--write", action="store_true", help="keep the results, and write their table")
    parser.add_argument(
        "--writer", choices=(REGISTRY, DCP, DCP_ASYNC), default=REGISTRY, help="what saves: the API, or DCP"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one line for each point and victim")
    options = parser.parse_args(words)
    if options.ranks < 2:
        parser.error("--ranks: at least 2, or nobody is left")
    return options


def cells(options: argparse.Namespace) -> list[Cell]:
    """Return what is to be run."""
    few = options.trials if options.leader_trials is None else options.leader_trials
    return [
        Cell(kill, point, few if kill in WITH_LEADER else options.trials)
        for kill in options.kill
        for point in options.kill_at
    ]


def chaos(todo: Sequence[Cell], *, writer: str = REGISTRY, ranks: int = 2, seed: int = 1) -> Iterator[Tally]:
    """Run trials on one cluster of three; yields the tally of each cell when it is done."""
    with ExitStack() as stack:
        base = data_directory()
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        cluster = stack.enter_context(raftkv.local(3, directory=base, flags=("--log-level", "error")))
        pool = stack.enter_context(Pool(writer, cluster.endpoints, 2 * ranks + 1))
        leaders, kv = Leaders(cluster), cluster.connect()
        for cell in todo:
            directory = base / "checkpoints" / f"{cell.kill}-{cell.point}"
            scene = Scene(pool, kv, leaders, f"chaos/{cell.kill}/{cell.point}", directory, ranks)
            yield run_cell(scene, cell, seed=seed)
