"""Combines the checkers: which of them check a history, and one verdict.

Every history is checked by replay, by a search for each key, for its members and their logs; a workload may add further
checkers. ``undecided`` and "could not be read" are violations: a run passes only when everything was checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jepsen.checkers import Violation, linear, logs, members, replay
from jepsen.history import History

Checker = Callable[[History], list[Violation]]


@dataclass(slots=True)
class Verdict:
    """The violations that each checker found, by its name."""

    violations: dict[str, list[Violation]] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """Whether no checker found a violation."""
        return not any(self.violations.values())

    def lines(self, limit: int = 10) -> list[str]:
        """Return the first ``limit`` violations of each checker, one per line."""
        shown = []
        for name, found in self.violations.items():
            shown += [f"[{name}] {violation}" for violation in found[:limit]]
            if len(found) > limit:
                shown.append(f"[{name}] ... and {len(found) - limit} more")
        return shown


def sequential_clients(history: History) -> list[Violation]:
    """Check an invariant of the harness: a client has at most one operation outstanding."""
    last: dict[str, int] = {}
    found = []
    for operation in sorted(history.operations, key=lambda op: op.call):
        if operation.call < last.get(operation.client, 0):
            found.append(Violation("harness", f"client {operation.client} overlaps itself", (operation.id,)))
        last[operation.client] = operation.returned
    return found


COMMON: dict[str, Checker] = {
    "replay": replay.check,
    "linear": linear.check,
    "hashes": members.check_hashes,
    "monotone": members.check_monotone,
    "sequential": sequential_clients,
    "logs": logs.check,
}


def check_history(history: History, extra: dict[str, Checker] | None = None, acked_min: int = 0) -> Verdict:
    """Run the common checkers and those of the workload.

    Arguments:
        history: history to check.
        extra: checkers of the workload, by name.
        acked_min: minimum number of acknowledged writes; with fewer, a run proves nothing and fails.
    """
    verdict = Verdict({name: check(history) for name, check in (COMMON | (extra or {})).items()})
    acked = sum(1 for operation in history.operations if operation.wrote)
    if acked < acked_min:
        text = f"only {acked} writes were acknowledged, {acked_min} are needed"
        verdict.violations["load"] = [Violation("too little load", text)]
    return verdict
