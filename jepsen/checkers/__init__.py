"""The checkers. Each is a function from a history to a list of ``Violation``; none trusts another's reading."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise: which rule, what was seen, and the ids of the operations concerned."""

    rule: str
    text: str
    operations: tuple[int, ...] = ()

    def __str__(self) -> str:
        ids = f" (operations {', '.join(map(str, self.operations))})" if self.operations else ""
        return f"{self.rule}: {self.text}{ids}"
