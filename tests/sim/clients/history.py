"""Clients' requests and answers, and their check: K1 to K6, K9 and "no acknowledged write is lost".

Owns the record of every operation and ``check_history``. The check needs no search: the log gives the order of the
writes, and every answer carries the revision of its state, so a replay decides (O(n log n)).

    a write answered ok       is in the log, once, and the replay gives the same answer
    a write answered failed   is not in the log, or refused there in the same words
    a read answered ok        equals the replayed state at the answer's revision, or the one it asked for
    real time                 an operation called after another returned has no smaller revision
    a read with a bound       has no smaller revision than what was answered longer before its call (K11)
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from jepsen import ops

if TYPE_CHECKING:
    from tests.sim.replay import Replay

NEVER = 1 << 62


class ViolationError(Exception):
    """A property of the system does not hold; ``property_id`` is its name in the list of properties."""

    def __init__(self, property_id: str, text: str) -> None:
        super().__init__(f"{property_id}: {text}")
        self.property_id = property_id


class Status(enum.Enum):
    """Outcome of an operation, as the client knows it."""

    UNKNOWN = "unknown"
    OK = "ok"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to an operation: header revision and content, or the text of the refusal."""

    revision: int
    result: ops.Result | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """What a client asks for.

    Attributes:
        path: method.
        request: protobuf message.
    """

    path: str
    request: Any
    staleness_s_max: float | None = None
    """How old the state of a read may be; None: the request says it."""

    @property
    def is_read(self) -> bool:
        """Whether the operation stays out of the log."""
        return self.path.endswith("/Range")

    @property
    def is_stale(self) -> bool:
        """Whether the operation is a read that allows stale state."""
        return self.is_read and (self.request.serializable or self.staleness_s_max is not None)


@dataclass(slots=True)
class Invocation:
    """An operation of a client. ``called`` and ``returned`` are positions in the history."""

    operation: Operation
    client: int
    called: int
    request_id: int = 0
    returned: int = NEVER
    status: Status = Status.UNKNOWN
    outcome: Outcome | None = None
    called_at: float = 0.0
    returned_at: float = 0.0


@dataclass(slots=True)
class History:
    """All invocations in the order of their calls."""

    invocations: list[Invocation] = field(default_factory=list)
    _position: int = 0

    def call(self, client: int, operation: Operation, request_id: int = 0, now: float = 0.0) -> Invocation:
        """Record that ``client`` calls ``operation``."""
        self._position += 1
        invocation = Invocation(operation, client, self._position, request_id, called_at=now)
        self.invocations.append(invocation)
        return invocation

    def end(self, invocation: Invocation, outcome: Outcome, now: float = 0.0) -> None:
        """Record a definite answer."""
        self._position += 1
        invocation.returned_at = now
        invocation.returned = self._position
        invocation.outcome = outcome
        invocation.status = Status.FAILED if outcome.error else Status.OK

    def count(self, status: Status) -> int:
        """Count operations with a status."""
        return sum(1 for invocation in self.invocations if invocation.status is status)


def check_history(invocations: Sequence[Invocation], replay: Replay) -> None:
    """Check a finished history against the replay of the log. Raises ``ViolationError``."""
    for invocation in invocations:
        if invocation.operation.is_read:
            _check_read(invocation, replay)
        else:
            _check_write(invocation, replay)
    _check_real_time(invocations)
    _check_staleness(invocations)


def _check_write(invocation: Invocation, replay: Replay) -> None:
    operation, outcome = invocation.operation, invocation.outcome
    expected = replay.outcomes.get(invocation.request_id)
    if outcome is None:
        return
    if outcome.error:
        if expected is not None and expected.error != outcome.error:
            raise ViolationError("K1", f"{operation} was refused ({outcome.error}), yet the log gives {expected}")
    elif expected is None:
        raise ViolationError("D1", f"acknowledged write lost: {operation}, answered {outcome}")
    elif outcome != expected and not _is_late_compaction(operation, outcome, expected):
        raise ViolationError("K2", f"{operation} answered {outcome}, the log gives {expected}")


def _is_late_compaction(operation: Operation, outcome: Outcome, expected: Outcome) -> bool:
    """A physical compaction is answered when the old revisions are gone, at the revision of that moment."""
    if not getattr(operation.request, "physical", False):
        return False
    return outcome.result == expected.result and outcome.revision > expected.revision


def _check_read(invocation: Invocation, replay: Replay) -> None:
    outcome, request = invocation.outcome, invocation.operation.request
    if outcome is None:
        return
    if outcome.error:
        if "compacted" in outcome.error and request.revision >= replay.compacted:
            raise ViolationError("K6", f"{request} was refused, compacted is only {replay.compacted}")
        return
    if outcome.revision > replay.revision:
        raise ViolationError("K4", f"read saw revision {outcome.revision}, the log ends at {replay.revision}")
    revision = request.revision or outcome.revision
    expected = replay.read(request.key.decode(), request.range_end.decode(), revision)
    if outcome.result != ops.RangeResult(expected):
        name = "K5" if request.serializable else "K6" if request.revision else "K3"
        raise ViolationError(name, f"read of {request} saw {outcome}, the log gives {expected}")


def _check_real_time(invocations: Sequence[Invocation]) -> None:
    """Check that no call answers a smaller revision than calls that returned before it began."""
    done = [each for each in invocations if each.outcome is not None and not each.outcome.error]
    by_return = sorted(done, key=lambda invocation: invocation.returned)
    newest, newest_by, position = 0, None, 0
    for invocation in done:
        while by_return[position].returned < invocation.called:
            earlier = by_return[position]
            position += 1
            if earlier.outcome is not None and earlier.outcome.revision > newest:
                newest, newest_by = earlier.outcome.revision, earlier
        is_stale = invocation.operation.is_stale
        if not is_stale and invocation.outcome is not None and invocation.outcome.revision < newest:
            raise ViolationError("K3", f"stale: {invocation} was called after the return of {newest_by}")


def _check_staleness(invocations: Sequence[Invocation]) -> None:
    """Check that a read with a staleness bound has every revision answered longer than the bound before its call."""
    done = [each for each in invocations if each.outcome is not None and not each.outcome.error]
    done.sort(key=lambda invocation: invocation.returned_at)
    returned_at = [invocation.returned_at for invocation in done]
    newest = list(accumulate((each.outcome.revision for each in done if each.outcome is not None), max))
    for invocation in done:
        bound_s = invocation.operation.staleness_s_max
        if bound_s is None or invocation.outcome is None:
            continue
        before = bisect_left(returned_at, invocation.called_at - bound_s)
        if before and invocation.outcome.revision < newest[before - 1]:
            text = f"{invocation} is older than {bound_s} s: revision {newest[before - 1]} had been shown before"
            raise ViolationError("K11", text)
