"""The same faults on the orders of other tools: what a resume finds.

A trial has a checkpoint that nothing disturbed, and a fault while the next one is saved. What the tool then resumes
from is noted. If the victim was frozen, the new generation goes on meanwhile: it does the step again and saves it, and
in half of the trials one more, before the victim thaws and does what it was about to do; then the tool resumes again.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.checkpoint.chaos.orders import (
    AFTER_COMMIT,
    ALL_POINTS,
    COORDINATOR_POINTS,
    LOADS,
    MID_TRACKER,
    ORDERS,
    Found,
)
from bench.checkpoint.chaos.processes import Generation, Pool, Rank
from bench.checkpoint.chaos.trial import COORDINATOR, FREEZE, RANK, STRIDE, Tally

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
