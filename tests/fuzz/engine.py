"""Runs of a target: over its samples and old findings, a number of examples, or for a time.

Guided by outcomes: an input whose outcome is new (taken, or refused for a reason not seen yet) is kept and changed
further. Seeds are printed and make a run the same again.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.mutate import Mutator
from tests.fuzz.oracle import GROWTH_WARM_UP, Judge, watched
from tests.fuzz.target import Target

KEPT_MAX = 300
REGRESSIONS = Path(__file__).with_name("regressions.txt")


@dataclass(frozen=True)
class Report:
    """What a run came to."""

    target: str
    inputs: int
    outcomes: int
    taken: int
    peak_bytes: int

    def __str__(self) -> str:
        share = self.taken / max(1, self.inputs)
        return (
            f"{self.target:24} {self.inputs:>9,} inputs, {share:4.0%} taken, {self.outcomes:>3} outcomes, "
            f"peak {self.peak_bytes / 1024:>8,.0f} KiB"
        )


def regressions(name: str) -> list[bytes]:
    """The inputs that once were findings of a target."""
    lines = (line.split("#")[0].split() for line in REGRESSIONS.read_text().splitlines())
    return [bytes.fromhex("".join(words[1:])) for words in lines if words and words[0] == name]


def run(target: Target, seed: int, examples: int | None = None, seconds: float | None = None) -> Report:
    """Run a target over its samples, its old findings, and then what is made of them.

    Arguments:
        target: which one.
        seed: of the inputs.
        examples: number of inputs made; None: no limit.
        seconds: how long; None: no limit.

    Raises:
        FuzzFailure: a finding.
    """
    end_s = None if seconds is None else time.monotonic() + seconds
    samples = target.samples()
    mutator = Mutator(Random(f"{seed} {target.name}"), samples, target.tokens)
    outcomes: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        watched(),
        contextlib.closing(Judge(target, Path(directory))) as judge,
    ):
        for sample in samples:
            outcome = judge.judge(sample)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        for old in regressions(target.name):
            judge.judge(old)
        made = 0
        while (examples is None or made < examples) and (end_s is None or time.monotonic() < end_s):
            data = mutator.make()
            outcome = judge.judge(data)
            if outcome not in outcomes and len(outcomes) < KEPT_MAX:
                mutator.keep(data)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            made += 1
        if judge.inputs > GROWTH_WARM_UP:  # else there is nothing to compare with
            judge.check_growth()
    return Report(
        target.name,
        judge.inputs,
        len(outcomes),
        sum(count for outcome, count in outcomes.items() if outcome.startswith("taken")),
        judge.peak_bytes,
    )
