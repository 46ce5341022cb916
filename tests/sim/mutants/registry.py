"""The list of planted bugs: each takes one safety rule out of the running code, and the simulator must notice.

A mutant is a context manager that patches a function of the production code, and puts it back. ``hunt`` runs seeds
until one reports a violation. What the mutants say of the simulator is the reason to believe it when it says nothing.

    with MUTANTS["vote given twice"].planted():
        report = hunt(range(100))

Owns the register; the bugs are in the other modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.sim.swarm import Report, RunParameters, draw, run_seed

Plant = Callable[["Patches"], None]


class Patches:
    """Replaces attributes and puts them back."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Put ``value`` in the place of ``owner.name``; returns what was there."""
        old = owner.__dict__[name]
        setattr(owner, name, value)
        self._stack.callback(setattr, owner, name, old)
        return old

    def undo(self) -> None:
        """Put everything back."""
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug. ``rule`` is the rule that it takes out."""

    name: str
    rule: str
    plant: Plant
    parameters: Callable[[int], RunParameters] = draw

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is in the code for as long as the context lasts."""
        patches = Patches()
        try:
            self.plant(patches)
            yield
        finally:
            patches.undo()


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, rule: str, parameters: Callable[[int], RunParameters] = draw) -> Callable[[Plant], Plant]:
    """Register a planted bug, with the corner of the swarm in which it shows itself soonest."""

    def register(plant: Plant) -> Plant:
        MUTANTS[name] = Mutant(name, rule, plant, parameters)
        return plant

    return register


def hunt(seeds: Iterable[int], parameters: Callable[[int], RunParameters] = draw) -> Report | None:
    """Run seeds until one finds a violation."""
    for seed in seeds:
        report = run_seed(seed, parameters(seed))
        if report.violation is not None:
            return report
    return None


def nothing(*_arguments: Any, **_more: Any) -> None:
    """Do nothing, in the place of a function that does something."""
