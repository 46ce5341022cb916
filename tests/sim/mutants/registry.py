"""The registry of planted bugs: each removes one safety rule from the running code, and the simulator must find it.

A mutant is a context manager that patches a function of the production code and restores it. ``hunt`` runs seeds until
one reports a violation. That the simulator finds all mutants is the reason to trust it when it finds nothing.

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
    """Replaces attributes and restores them."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Replace ``owner.name`` by ``value``; returns the old value."""
        old = owner.__dict__[name]
        setattr(owner, name, value)
        self._stack.callback(setattr, owner, name, old)
        return old

    def undo(self) -> None:
        """Restore all attributes."""
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted bug. ``rule`` is the removed rule."""

    name: str
    rule: str
    plant: Plant
    parameters: Callable[[int], RunParameters] = draw

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the bug within the block."""
        patches = Patches()
        try:
            self.plant(patches)
            yield
        finally:
            patches.undo()


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, rule: str, parameters: Callable[[int], RunParameters] = draw) -> Callable[[Plant], Plant]:
    """Register a planted bug, with the corner of the swarm that finds it soonest."""

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
    """Do nothing; replaces a function that does something."""
