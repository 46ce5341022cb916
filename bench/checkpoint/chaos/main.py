"""The command line of the chaos of checkpoints.

    python bench/ckpt_chaos.py [--ranks 2] [--trials 200] [--kill-at POINT ...] [--kill VICTIM ...] [--compare] [--json]

Every point with every victim, `--trials` times each. `--json` prints one line for each. The exit status is 1 if
anything did not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import raftkv
from bench.checkpoint.chaos.orders import (
    AFTER_COMMIT,
    ALL_POINTS,
    COORDINATOR_POINTS,
    LOADS,
    LOST_STATE,
    MID_TRACKER,
    MIXED,
    ORDERS,
    PARTIAL,
    POINTS,
    REFUSES,
    SCRATCH,
    Found,
)
from bench.checkpoint.chaos.processes import DCP, DCP_ASYNC, REGISTRY, Generation, Pool, Rank
from bench.checkpoint.chaos.trial import (
    COORDINATOR,
    FREEZE,
    RANK,
    STRIDE,
    VICTIMS,
    WITH_LEADER,
    Cell,
    Leaders,
    Scene,
    Tally,
    run_cell,
)
from bench.report import keep, machine, markdown, parser_of, write_table
from tests.procs import data_directory

# -- compare --------------------------------------------------------------------------------------------------------
#
# The same faults on the orders of other tools: what a resume finds.
#
# A trial has a checkpoint that nothing disturbed, and a fault while the next one is saved. What the tool then resumes
# from is noted. If the victim was frozen, the new generation goes on meanwhile: it does the step again and saves it,
# and
# in half of the trials one more, before the victim thaws and does what it was about to do; then the tool resumes
# again.

COMPARED = (RANK, COORDINATOR, FREEZE)
NEW: Final = "the step that was being saved, whole"
KEPT: Final = "the last step that was acknowledged"
GOES_BACK: Final = "an older step than was acknowledged"
OVERWRITTEN: Final = "the last step, but another that was acknowledged is overwritten"
WRONG: Final = "wrong"
RIGHT: Final = (NEW, KEPT)
"""Name what is right after a fault in mid-save; anything else is not."""


@dataclass
class Row:
    """What a resume has found with one tool and one fault: verdicts, and how often."""

    tool: str
    kill: str
    kill_at: str
    found: Counter[str] = field(default_factory=Counter)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"tool": self.tool, "kill": self.kill, "kill_at": self.kill_at, "found": dict(self.found)}

    @property
    def is_right(self) -> bool:
        """Every resume was from a whole checkpoint, and not from an older one than was acknowledged."""
        return set(self.found) <= set(RIGHT)


class Bystander:
    """One tool, and its directories.

    Arguments:
        tool: its name in ``ORDERS``.
        pool: of its ranks.
        base: below which it saves.
        size: ranks of a generation.
    """

    def __init__(self, tool: str, pool: Pool, base: Path, size: int) -> None:
        self._tool = tool
        self._pool = pool
        self._base = base
        self._size = size
        self._generation = 0

    def trial(self, kill: str, point: str, chooser: random.Random) -> str:
        """Do one trial; returns the verdict."""
        root = self._base / self._tool.replace(" ", "-")
        old = self._begin(root)
        self._save(old, STRIDE)
        victim, acknowledged = self._strike(old, kill, point, 2 * STRIDE, chooser)
        is_damaged = False
        newer = self._begin(root)
        found = newer.ranks[0].call("resume", self._size)
        if victim is not None and Found(*found).verdict == LOADS:
            done_again = self._overtake(newer, found[1], chooser.choice((1, 2)))
            acknowledged = done_again[-1]
            victim.thaw()
            victim.go_on()
            old.end()
            old.until_ended()
            found = newer.ranks[0].call("resume", self._size)
            is_damaged = any(newer.ranks[0].call("load", step, self._size)[0] != LOADS for step in done_again)
        elif victim is not None:
            victim.kill()
        old.end()
        old.until_ended()
        self._pool.give_back([*old.ranks, *newer.ranks])
        shutil.rmtree(root)
        verdict = verdict_of(Found(*found), acknowledged)
        return OVERWRITTEN if is_damaged and verdict in RIGHT else verdict

    def _begin(self, root: Path) -> Generation:
        self._generation += 1
        ranks = self._pool.take(self._size)
        for rank in ranks:
            rank.call("open", str(root))
        return Generation(ranks)

    def _save(self, generation: Generation, step: int) -> None:
        generation.start("save", lambda rank: (step, rank, self._size, self._generation, ""))
        generation.until_ended()

    def _strike(
        self, old: Generation, kill: str, point: str, step: int, chooser: random.Random
    ) -> tuple[Rank | None, int]:
        """Save with a fault at the point; returns who is frozen, and the last step that is acknowledged."""
        number = self._generation
        victim = chooser.randrange(1, self._size) if kill == RANK else 0
        stopped = 0 if point in COORDINATOR_POINTS else victim
        old.start("save", lambda rank: (step, rank, self._size, number, point if rank == stopped else ""))
        old.until_at(old.ranks[stopped])
        old.until_quiet()
        stops = old.ranks[stopped]
        is_acknowledged = point == AFTER_COMMIT
        if kill == FREEZE:
            stops.freeze()
            return stops, step if is_acknowledged else step - STRIDE
        old.ranks[victim].kill()
        if not stops.is_dead:
            stops.go_on()
            old.until_quiet()
        return None, step if is_acknowledged else step - STRIDE

    def _overtake(self, newer: Generation, found: int, count: int) -> list[int]:
        """Go on from the step that was found, and save so many times; returns the steps."""
        steps = [found + STRIDE * number for number in range(1, count + 1)]
        for step in steps:
            self._save(newer, step)
        return steps


def verdict_of(found: Found, acknowledged: int) -> str:
    """Say what a resume has come to."""
    if found.verdict != LOADS:
        return found.verdict
    if found.step < acknowledged:
        return GOES_BACK
    return NEW if found.step > acknowledged else KEPT


def compare(base: Path, *, ranks: int, trials: int, seed: int) -> Iterator[Row]:
    """Do all faults to all tools; yields a row for each tool, victim and point."""
    for tool in ORDERS:
        with Pool(tool, str(base), 2 * ranks + 1) as pool:
            bystander = Bystander(tool, pool, base, ranks)
            for kill in COMPARED:
                for point in ALL_POINTS:
                    if point == MID_TRACKER and tool == "HF newest folder":
                        continue
                    row = Row(tool, kill, point)
                    for number in range(trials):
                        chooser = random.Random(f"{seed}/{tool}/{kill}/{point}/{number}")
                        row.found[bystander.trial(kill, point, chooser)] += 1
                    yield row


def rows_of(name: str, tallies: Iterable[Tally]) -> list[Row]:
    """Return the rows of raftkv, under a name, from its own trials."""
    rows = []
    for tally in tallies:
        is_acknowledged = tally.kill_at == AFTER_COMMIT
        found = Counter({KEPT if is_acknowledged else NEW: tally.new_step})
        found[KEPT] += tally.previous_step
        if tally.problems:
            found[WRONG] = len(tally.problems)
        rows.append(Row(name, tally.kill, tally.kill_at, +found))
    return rows


# -- report ---------------------------------------------------------------------------------------------------------
#
# What the chaos of checkpoints shows and keeps: `bench/checkpoint/chaos_results.json`, and its table.

RESULTS: Final = Path(__file__).resolve().parents[1] / "chaos_results.json"
SHORT: Final = {
    NEW: "ok",
    KEPT: "ok",
    PARTIAL: "does not load",
    MIXED: "mixture",
    LOST_STATE: "state lost",
    REFUSES: "refuses",
    SCRATCH: "scratch",
    GOES_BACK: "goes back",
    OVERWRITTEN: "overwritten",
    WRONG: "WRONG",
}
"""How the table says it; the page explains each."""
NAMES: Final = {"registry": "raftkv", "dcp": "raftkv + DCP", "dcp-async": "raftkv + DCP, asynchronous"}
"""By what saves."""


def line_of(tally: Tally) -> str:
    """Return a tally as a line of a terminal."""
    return (
        f"{tally.kill:24} {tally.kill_at:15} {tally.trials:4} trials, resumed from new step {tally.new_step:4}, "
        f"previous {tally.previous_step:4}, {tally.zombie_writes:5} zombie writes refused, "
        f"{tally.seconds / max(1, tally.trials):.2f} s a trial (max {tally.longest_s:.2f}), "
        f"{len(tally.problems)} problems"
    )


def table(rows: Sequence[Row]) -> str:
    """Return a row for each tool and victim, a column for each point, as markdown."""
    lines = []
    for tool, kill in dict.fromkeys((row.tool, row.kill) for row in rows):
        found = {row.kill_at: row for row in rows if (row.tool, row.kill) == (tool, kill)}
        lines.append((tool, kill, *(_cell(found.get(point)) for point in ALL_POINTS)))
    return markdown(("tool", "fault", *ALL_POINTS), lines, texts=2 + len(ALL_POINTS))


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.is_right:
        return "ok"
    names = Counter[str]()
    for verdict, count in row.found.items():
        names[SHORT[verdict]] += count
    return ", ".join(f"**{name}**" if name != "ok" else name for name, _ in sorted(names.items()))


def write(writer: str, tallies: Sequence[Tally], rows: Sequence[Row]) -> None:
    """Keep what was measured, in place of what was kept of it, and write the table."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    raftkv = {(each["writer"], each["kill"], each["kill_at"]): each for each in kept.get("raftkv", [])}
    raftkv.update({(writer, tally.kill, tally.kill_at): _rounded(writer, tally) for tally in tallies})
    others = [row.plain() for row in rows] or kept.get("others", [])
    results = {"machine": machine(), "raftkv": [raftkv[key] for key in sorted(raftkv, key=_place)], "others": others}
    keep(RESULTS, results)
    publish(results)


def _place(key: tuple[str, str, str]) -> tuple[int, ...]:
    """Return where a cell stands among the others: the order of the options."""
    return tuple(names.index(name) for names, name in zip((tuple(NAMES), VICTIMS, ALL_POINTS), key, strict=True))


def _rounded(writer: str, tally: Tally) -> dict[str, Any]:
    times = {"seconds": round(tally.seconds, 1), "longest_s": round(tally.longest_s, 2)}
    return {"writer": writer, **asdict(tally), **times}


def publish(results: dict[str, Any]) -> None:
    """Write the table of the documentation."""
    tallies = [(each["writer"], _tally(each)) for each in results["raftkv"]]
    others = [Row(**{**each, "found": Counter(each["found"])}) for each in results["others"]]
    own = [row for writer, tally in tallies for row in rows_of(NAMES[writer], [tally])]
    write_table(f"{table([*own, *others])}\n\n{_about(results, others)}", "checkpoint-chaos")


def _tally(kept: dict[str, Any]) -> Tally:
    return Tally(**{name: value for name, value in kept.items() if name != "writer"})


def _about(results: dict[str, Any], others: Sequence[Row]) -> str:
    headings = ("raftkv", "fault", "trials", "resumed from the new step", "from the one before", "writes of zombies",
                "problems", "s a trial (max)")  # fmt: skip
    lines = []
    groups: dict[tuple[str, str], list[Tally]] = {}
    for each in results["raftkv"]:
        groups.setdefault((each["writer"], each["kill"]), []).append(_tally(each))
    for (writer, kill), tallies in groups.items():
        trials, seconds = sum(each.trials for each in tallies), sum(each.seconds for each in tallies)
        counts = (
            f"{trials:,}",
            *(f"{sum(getattr(each, name) for each in tallies):,}" for name in ("new_step", "previous_step")),
            f"{sum(each.zombie_writes for each in tallies):,}",
            str(sum(len(each.problems) for each in tallies)),
            f"{seconds / max(1, trials):.2f} ({max(each.longest_s for each in tallies):.1f})",
        )
        lines.append((NAMES[writer], kill, *counts))
    admitted = any("not refused" in problem for each in results["raftkv"] for problem in each["problems"])
    return f"{markdown(headings, lines, texts=2)}\n\n{' '.join(_facts(results, others, admitted=admitted))}"


def _facts(results: dict[str, Any], others: Sequence[Row], *, admitted: bool) -> list[str]:
    compared = sum(row.found.total() for row in others)
    wrong = sum(count for row in others for verdict, count in row.found.items() if verdict not in RIGHT)
    machine = results["machine"]
    return [
        "Some writes of zombies were admitted." if admitted else "Every write of a zombie was refused.",
        f"The others: {compared:,} trials, {wrong:,} of them not ok.",
        f"Three members with fsync on {machine['cores']} cores that other work shared, {machine['date']}.",
    ]


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
    parser = parser_of(__doc__)
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
