"""The state that a group goes on with after any ranks are lost in any sync."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from raftkv.torch.recovery import NO_STEP, Progress, RankReport, agree

CELLS = 3
GARBAGE = -7


@dataclass
class Rank:
    """A rank whose state is as many numbers as a sync hands out, each the step that it is of."""

    state: list[int] = field(default_factory=lambda: [0] * CELLS)
    progress: Progress = field(default_factory=lambda: Progress(0))


@dataclass(frozen=True)
class Generation:
    """What happens in one: who is there, after how many numbers the sync breaks, and who completes the step."""

    present: frozenset[int]
    broken_after: int
    done_by: frozenset[int]


RANKS = st.frozensets(st.integers(0, 3))
GENERATIONS = st.builds(Generation, RANKS.filter(bool), st.integers(0, CELLS + 2), RANKS)


def hand_out(source: Rank, ranks: list[Rank], step: int, broken_after: int, on_device: bool) -> bool:
    """Do a sync as ElasticGroup does; returns whether it was whole."""
    for rank in ranks:
        if rank is not source:
            rank.progress.receive(step, is_overwritten=on_device)
    for cell in range(CELLS):
        for rank in ranks:
            if cell < broken_after:
                rank.state[cell] = source.state[cell]
            elif cell == broken_after and on_device and rank is not source:
                rank.state[cell] = GARBAGE
    if broken_after < CELLS:
        return False
    for rank in ranks:
        rank.progress.keep(step)
    return True


@given(st.lists(GENERATIONS, max_size=12), st.booleans())
def test_an_incomplete_state_is_never_handed_out(generations, on_device):
    ranks = [Rank() for _ in range(4)]
    for generation in generations:
        present = [ranks[number] for number in sorted(generation.present)]
        agreed = agree([rank.progress.told for rank in present])
        if agreed.step == NO_STEP:
            continue  # StateLost, or a checkpoint
        source = present[agreed.source]
        assert source.state == [agreed.step] * CELLS
        if not hand_out(source, present, agreed.step, generation.broken_after, on_device):
            continue
        assert all(rank.state == [agreed.step] * CELLS for rank in present)
        for number in generation.present & generation.done_by:  # a fault may come between the first and the last
            ranks[number].state = [agreed.step + 1] * CELLS
            ranks[number].progress.keep(agreed.step + 1)


def test_the_furthest_step_and_the_lowest_rank_that_has_it():
    agreed = agree([RankReport(3, True), RankReport(5, True), RankReport(5, True), RankReport(NO_STEP, False)])
    assert (agreed.step, agreed.source, agreed.is_new) == (5, 1, False)
    agreed = agree([RankReport(NO_STEP, False), RankReport(0, False)])
    assert (agreed.step, agreed.source, agreed.is_new) == (0, 1, True)
