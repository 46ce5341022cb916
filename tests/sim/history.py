"""What clients asked and were told, and the judge of it: K1, K2, K3, K9 and "no acknowledged write is lost".

Owns the record of every operation and ``check_history``. The judge needs no search: the log gives the order of the
writes, every answer carries the revision of the state it was taken from, so a replay decides (O(n log n)).

    a write answered ok       is in the log, once, and the replay gives the same answer
    a write answered failed   is not in the log
    a read answered ok        equals the replayed state at the answer's revision
    real time                 an operation called after another returned has no smaller revision
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from .machine import Kind, Operation, Outcome, decode

NEVER = 1 << 62


class ViolationError(Exception):
    """A property of the system does not hold; ``property_id`` is its name in the list of properties."""

    def __init__(self, property_id: str, text: str) -> None:
        super().__init__(f"{property_id}: {text}")
        self.property_id = property_id


class Status(enum.Enum):
    """What the client knows of its operation."""

    UNKNOWN = "unknown"
    OK = "ok"
    FAILED = "failed"


@dataclass(slots=True)
class Invocation:
    """One operation of one client. ``called`` and ``returned`` are positions in the history."""

    operation: Operation
    client: int
    called: int
    returned: int = NEVER
    status: Status = Status.UNKNOWN
    outcome: Outcome | None = None


@dataclass(slots=True)
class History:
    """All invocations in the order of their calls."""

    invocations: list[Invocation] = field(default_factory=list)
    _position: int = 0

    def call(self, client: int, operation: Operation) -> Invocation:
        """Note that ``client`` asks for ``operation``."""
        self._position += 1
        invocation = Invocation(operation, client, self._position)
        self.invocations.append(invocation)
        return invocation

    def end(self, invocation: Invocation, outcome: Outcome | None) -> None:
        """Note the answer; None means that the operation certainly did not happen."""
        self._position += 1
        invocation.returned = self._position
        invocation.outcome = outcome
        invocation.status = Status.FAILED if outcome is None else Status.OK

    def count(self, status: Status) -> int:
        """How many operations ended so."""
        return sum(1 for invocation in self.invocations if invocation.status is status)


class Replay:
    """A dumb model of the state machine, independent of ``machine.StateMachine``, fed with the log in order."""

    def __init__(self, log: Sequence[bytes]) -> None:
        self.revision = 1
        self.outcomes: dict[int, Outcome] = {}
        self._values: dict[int, list[tuple[int, int | None]]] = {}
        for data in log:
            if data:
                self._apply(decode(data))

    def at(self, key: int, revision: int) -> tuple[int | None, int]:
        """``(value, mod_revision)`` of ``key`` as it was at ``revision``."""
        versions = self._values.get(key, [])
        position = bisect.bisect_right(versions, revision, key=lambda version: version[0])
        if not position:
            return None, 0
        mod_revision, value = versions[position - 1]
        return value, (0 if value is None else mod_revision)

    def _apply(self, operation: Operation) -> None:
        if operation.id in self.outcomes:
            raise ViolationError("K9", f"operation {operation.id} is in the log twice")
        value, mod_revision = self.at(operation.key, self.revision)
        wanted = operation.kind is not Kind.COMPARE_AND_SET or mod_revision == operation.expected
        changes = wanted and not (operation.kind is Kind.DELETE and value is None)
        if changes:
            self.revision += 1
            value = None if operation.kind is Kind.DELETE else operation.value
            mod_revision = 0 if value is None else self.revision
            self._values.setdefault(operation.key, []).append((self.revision, value))
        self.outcomes[operation.id] = Outcome(self.revision, wanted, value, mod_revision)


def check_history(invocations: Sequence[Invocation], log: Sequence[bytes]) -> None:
    """Judge a finished history against the committed log. Raises ``ViolationError``."""
    replay = Replay(log)
    for invocation in invocations:
        if invocation.operation.kind is Kind.READ:
            _check_read(invocation, replay)
        else:
            _check_write(invocation, replay)
    _check_real_time(invocations)


def _check_write(invocation: Invocation, replay: Replay) -> None:
    operation, expected = invocation.operation, replay.outcomes.get(invocation.operation.id)
    if invocation.status is Status.FAILED and expected is not None:
        raise ViolationError("K1", f"{operation} was refused, yet it is in the log")
    if invocation.status is not Status.OK:
        return
    if expected is None:
        raise ViolationError("D1", f"acknowledged write lost: {operation}, answered {invocation.outcome}")
    if invocation.outcome != expected:
        raise ViolationError("K2", f"{operation} answered {invocation.outcome}, the log gives {expected}")


def _check_read(invocation: Invocation, replay: Replay) -> None:
    outcome = invocation.outcome
    if invocation.status is not Status.OK or outcome is None:
        return
    if outcome.revision > replay.revision:
        raise ViolationError("K4", f"read saw revision {outcome.revision}, the log ends at {replay.revision}")
    expected = replay.at(invocation.operation.key, outcome.revision)
    if (outcome.value, outcome.mod_revision) != expected:
        raise ViolationError("K3", f"read of {invocation.operation} saw {outcome}, the log gives {expected}")


def _check_real_time(invocations: Sequence[Invocation]) -> None:
    """One sweep over the calls: none may answer with less than what had been answered before it was called."""
    done = [invocation for invocation in invocations if invocation.outcome is not None]
    by_return = sorted(done, key=lambda invocation: invocation.returned)
    newest, newest_by, position = 0, None, 0
    for invocation in sorted(done, key=lambda invocation: invocation.called):
        while by_return[position].returned < invocation.called:
            earlier = by_return[position]
            position += 1
            if earlier.outcome is not None and earlier.outcome.revision > newest:
                newest, newest_by = earlier.outcome.revision, earlier
        if invocation.outcome is not None and invocation.outcome.revision < newest:
            raise ViolationError("K3", f"stale: {invocation} was called after the return of {newest_by}")
