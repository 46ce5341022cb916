"""The steps of a new user's way are parts of pages that are there; ``python -m tests.site.path`` goes it."""

from __future__ import annotations

import pytest

from tests.site.path import JOB, ONE_MACHINE, OURS, THREE_MACHINES, Step, part
from tests.site.player import blocks

STEPS = [step for step in (*ONE_MACHINE, *THREE_MACHINES) if step.page]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_has_commands_below_each_of_its_headings(step: Step) -> None:
    for heading in step.headings:
        assert any(block.commands for block in part(Step(step.name, step.page, (heading,)))), heading


def test_every_block_that_only_this_way_plays_is_played_by_it() -> None:
    played = [block for step in STEPS for block in part(step)]
    assert [block.text for block in blocks(JOB) if OURS in block.note and block not in played] == []
