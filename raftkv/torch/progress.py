"""What the state of a rank is worth, and on whose state the ranks of a new group agree.

A rank tells of which step its state is. While a sync hands out another's state, that of the receivers is neither the
old nor the new one; if the group breaks then, they have none any more, and the source's is what the next group goes on
with. If the source is lost as well, there is only a checkpoint left.

    progress = Progress(first_step=0)
    agreed = agree(told)                                 # rank 0 does, and says it to the others
    progress.receive(agreed.step, is_overwritten=True)   # from here on this rank's state is being overwritten
    progress.keep(agreed.step)                           # and here it is whole again

Leaves out: how ranks tell each other; where a checkpoint comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

NO_STEP: Final = -1
"""What a rank tells whose state was overwritten in part."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank tells the others.

    Attributes:
        step: the next to be done with its state; ``NO_STEP``: it has no whole state.
        has_state: its state has been in a group; else it is what its program began with.
    """

    step: int
    has_state: bool


@dataclass(frozen=True, slots=True)
class Agreed:
    """What a group goes on with.

    Attributes:
        step: the next to be done; ``NO_STEP``: no rank has a whole state.
        source: the lowest rank whose state is that of the step.
        is_new: no rank has state from a group before: a checkpoint may be further.
    """

    step: int
    source: int
    is_new: bool


def agree(ranks: Sequence[Told]) -> Agreed:
    """Return the furthest step that any of the ranks tells, and who has it."""
    step = max(told.step for told in ranks)
    source = next(number for number, told in enumerate(ranks) if told.step == step)
    return Agreed(step, source, not any(told.has_state for told in ranks))


class Progress:
    """The state of this rank.

    Arguments:
        first_step: the step that the program's own state begins with.
    """

    def __init__(self, first_step: int) -> None:
        self._told = Told(first_step, has_state=False)

    @property
    def told(self) -> Told:
        """What to tell the others."""
        return self._told

    def keep(self, step: int) -> None:
        """Note that the state is that of a step, whole."""
        self._told = Told(step, has_state=True)

    def receive(self, step: int, *, is_overwritten: bool) -> None:
        """Note that the source's state of a step is about to come in place of this rank's, until ``keep``.

        Arguments:
            step: the one that the group goes on with.
            is_overwritten: a sync that is cut off may leave bytes that are neither rank's. If not, a state of the same
                step stays what it is: each byte is replaced by the same one.
        """
        if is_overwritten or step != self._told.step:
            self._told = Told(NO_STEP, has_state=False)
