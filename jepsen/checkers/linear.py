"""The linearizability checker: a search over the history of each key, based only on values.

The algorithm is Wing and Gong's with Lowe's memory of visited configurations ("Testing for linearizability", 2017):
take any operation that could come first, check whether the register allows it, continue, backtrack when stuck.
Revisions are ignored throughout, so this checker also detects a store with wrong revisions.

Checked operations are those on exactly one key, current and linearizable. A key that is also written in other ways
(txns over several keys, deletes of ranges, the server itself) is left to replay. Keep keys to a few hundred operations
each: the cost grows with concurrency and length, and exceeding the step limit is a violation ("undecided"), never a
pass.

Writes of unknown fate: a write whose value no reader saw may be left out, because its presence and absence then allow
the same answers (a later write replaced its value). A write whose value was seen happened before the return of the
first reader that saw it. Both rely on unique values. The first also relies on this: no client noticed a key without
seeing its value (for example a failed condition without a read, or the condition of another write of unknown fate). All
of this is checked, not assumed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from jepsen.checkers import Violation
from jepsen.history import History, Operation
from jepsen.ops import (
    SERVERS,
    Compare,
    Delete,
    DeleteResult,
    KeyValue,
    Put,
    PutResult,
    Range,
    RangeResult,
    Request,
    Result,
    Txn,
    TxnResult,
    branches,
    is_serializable,
    may_write,
    puts,
    ran,
)

STEPS_MAX = 2_000_000

State = str | None
"""The value of the key; None: the key does not exist."""


class Refused(Exception):
    """The register in this state cannot have given this answer."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of the search: its time span, and its effect on the register."""

    call: float
    returned: float
    request: Request
    result: Result | None
    id: int = 0


def check(history: History, steps_max: int = STEPS_MAX) -> list[Violation]:
    """Return the violations, key by key.

    Arguments:
        history: history to check.
        steps_max: step limit of the search for a key, after which it is undecided.
    """
    found = []
    for key, operations in sorted(_by_key(history.operations).items()):
        verdict = is_linearizable(prepare(operations), steps_max)
        ids = tuple(operation.id for operation in operations)[:8]
        if verdict is None:
            found.append(Violation("undecided", f"key {key}: no verdict within {steps_max} steps", ids))
        elif not verdict:
            found.append(Violation("not linearizable", f"key {key}, {len(operations)} operations", ids))
    return found


def prepare(operations: list[Operation]) -> list[Step]:
    """Return the operations of one key as steps; unknown ones are dropped or bounded (see the module)."""
    written = Counter(put.value for operation in operations for put in puts(operation.request))
    seen = _first_seen(operations)
    blind = any(_notices_blindly(operation) for operation in operations)
    wanted = {str(guard.operand) for op in operations if op.kind == "info" for guard in _guards(op.request)}
    steps = []
    for operation in operations:
        if operation.kind == "fail" or (operation.kind == "info" and not may_write(operation.request)):
            continue
        returned: float = operation.returned
        if operation.kind == "info":
            values = [put.value for put in puts(operation.request)]
            unique = all(written[value] == 1 for value in values)
            returned = min((seen.get(value, math.inf) for value in values if unique), default=math.inf)
            deletes = any(isinstance(part, Delete) for part in branches(operation.request))
            unneeded = unique and wanted.isdisjoint(values)
            if returned == math.inf and unneeded and not deletes and not blind:
                continue
        steps.append(Step(operation.call, returned, operation.request, operation.result, operation.id))
    return steps


def is_linearizable(steps: list[Step], steps_max: int = STEPS_MAX) -> bool | None:
    """Return whether some order of the steps, consistent with real time, explains all answers; None: undecided.

    Arguments:
        steps: the operations of one key.
        steps_max: step limit of the search, after which it is undecided.
    """
    search = _Search(steps)
    for _ in range(steps_max):
        verdict = search.advance()
        if verdict is not None:
            return verdict
    return None


class _Search:
    """The linked list of calls and returns, the operations taken so far, and the configurations seen.

    Entry 0 is the head. Steps without an answer have no return entry: they may remain untaken.
    """

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps
        marks = [(step.call, 0, number) for number, step in enumerate(steps)]
        marks += [(step.returned, 1, number) for number, step in enumerate(steps) if step.returned < math.inf]
        marks.sort()
        size = len(marks) + 1
        self._owner = [-1, *(number for _, _, number in marks)]
        self._is_call = [False, *(kind == 0 for _, kind, _ in marks)]
        self._return_of = {n: at + 1 for at, (_, kind, n) in enumerate(marks) if kind == 1}
        self._next = [*range(1, size), 0]
        self._previous = [size - 1, *range(size - 1)]
        self._unanswered = len(self._return_of)
        self._state: State = None
        self._taken = 0
        self._visited: set[tuple[int, State]] = set()
        self._path: list[tuple[int, State]] = []
        self._entry = self._next[0] if marks else 0

    def advance(self) -> bool | None:
        """Process one entry; True and False are verdicts."""
        if self._unanswered == 0:
            return True
        entry = self._entry
        if not self._is_call[entry]:
            return None if self._step_back() else False
        if not self._try(entry):
            self._entry = self._next[entry]
        return None

    def _try(self, entry: int) -> bool:
        number = self._owner[entry]
        step = self._steps[number]
        try:
            state = next_state(self._state, step.request, step.result)
        except Refused:
            return False
        configuration = (self._taken | 1 << number, state)
        if configuration in self._visited:
            return False
        self._visited.add(configuration)
        self._path.append((entry, self._state))
        self._taken, self._state = configuration
        self._lift(entry)
        self._entry = self._next[0]
        return True

    def _step_back(self) -> bool:
        if not self._path:
            return False
        entry, self._state = self._path.pop()
        self._taken &= ~(1 << self._owner[entry])
        self._unlift(entry)
        self._entry = self._next[entry]
        return True

    def _lift(self, entry: int) -> None:
        self._cut(entry)
        end = self._return_of.get(self._owner[entry])
        if end is not None:
            self._cut(end)
            self._unanswered -= 1

    def _unlift(self, entry: int) -> None:
        end = self._return_of.get(self._owner[entry])
        if end is not None:
            self._splice(end)
            self._unanswered += 1
        self._splice(entry)

    def _cut(self, entry: int) -> None:
        self._next[self._previous[entry]] = self._next[entry]
        self._previous[self._next[entry]] = self._previous[entry]

    def _splice(self, entry: int) -> None:
        self._next[self._previous[entry]] = entry
        self._previous[self._next[entry]] = entry


def next_state(state: State, request: Request, result: Result | None) -> State:
    """Return the register after a request.

    Arguments:
        state: value before the request.
        request: request, on this key only.
        result: its answer; None: unknown, so that any answer is possible.

    Raises:
        Refused: the answer is impossible in this state.
    """
    match request:
        case Put():
            if request.previous and isinstance(result, PutResult):
                _demand((result.previous.value if result.previous is not None else None) == state)
            return request.value
        case Range():
            if isinstance(result, RangeResult):
                _demand((result.kvs[0].value if result.kvs else None) == state)
            return state
        case Delete():
            if isinstance(result, DeleteResult):
                _demand(result.deleted == (state is not None))
            return None
        case Txn():
            return _after_txn(state, request, result)
        case _:
            raise TypeError(f"no request of one key: {request}")


def _after_txn(state: State, request: Txn, result: Result | None) -> State:
    answer = result if isinstance(result, TxnResult) else None
    verdicts = [_holds(state, guard) for guard in request.compares]
    if False in verdicts:
        succeeded = False
    elif None in verdicts:  # A condition on revisions: believe the store, or assume it held if a reader saw the write.
        succeeded = answer.succeeded if answer is not None else True
    else:
        succeeded = True
    _demand(answer is None or answer.succeeded == succeeded)
    parts = request.success if succeeded else request.failure
    results: tuple[Result | None, ...] = answer.results if answer is not None else (None,) * len(parts)
    for part, part_result in zip(parts, results, strict=True):
        state = next_state(state, part, part_result)
    return state


def _holds(state: State, guard: Compare) -> bool | None:
    """Return whether a condition holds; None: values cannot tell."""
    if guard.target == "value" and guard.relation in ("=", "!="):
        return state is not None and (state == guard.operand) == (guard.relation == "=")
    if guard.operand == 0 and guard.relation in ("=", "!=", ">"):
        return (state is None) == (guard.relation == "=")
    return None


def _demand(possible: bool) -> None:
    if not possible:
        raise Refused


def _by_key(operations: list[Operation]) -> dict[str, list[Operation]]:
    groups: dict[str, list[Operation]] = defaultdict(list)
    spoiled: set[str] = set()
    intervals = []
    for operation in operations:
        parts = branches(operation.request)
        keys = {part.key for part in parts} | {guard.key for guard in _guards(operation.request)}
        single = len(keys) == 1 and not any(isinstance(p, Range | Delete) and p.end for p in parts)
        past = any(isinstance(part, Range) and part.rev for part in parts)
        if single and not past and not (is_serializable(operation.request) and not may_write(operation.request)):
            groups[keys.pop()].append(operation)
        elif may_write(operation.request) and operation.kind != "fail":
            spoiled |= {part.key for part in parts if isinstance(part, Put | Delete)}
            intervals += [part for part in parts if isinstance(part, Delete) and part.end]
    if intervals:
        return {}
    return {key: group for key, group in groups.items() if key not in spoiled and not key.startswith(SERVERS)}


def _guards(request: Request) -> tuple[Compare, ...]:
    return request.compares if isinstance(request, Txn) else ()


def _first_seen(operations: list[Operation]) -> dict[str, float]:
    """Return, for each value, when the first operation that showed it returned."""
    seen: dict[str, float] = {}
    for operation in operations:
        for value in _shown(operation.request, operation.result):
            seen[value] = min(seen.get(value, math.inf), operation.returned)
    return seen


def _shown(request: Request, result: Result | None) -> Iterator[str]:
    """Yield the values that an answer showed, except those that the request itself wrote."""
    if result is None:
        return
    own = {put.value for put in puts(request)}
    if isinstance(request, Txn) and isinstance(result, TxnResult) and result.succeeded:
        yield from (str(guard.operand) for guard in request.compares if _names_value(guard))
    for _, answer in ran(request, result):
        match answer:
            case PutResult(previous=KeyValue(value=value)):
                yield value
            case RangeResult(kvs=kvs) | DeleteResult(previous=kvs):
                yield from (kv.value for kv in kvs if kv.value not in own)


def _notices_blindly(operation: Operation) -> bool:
    """Return whether an operation depends on the key's value without showing it."""
    request, result = operation.request, operation.result
    if result is None:  # It may have happened, depending on its conditions.
        guards_tell = all(_names_value(guard) for guard in _guards(request))
        return isinstance(request, Txn) and not (guards_tell and all(isinstance(p, Range) for p in request.failure))
    first = next(ran(request, result), None)
    if isinstance(request, Txn) and isinstance(result, TxnResult):
        named = result.succeeded and any(_names_value(guard) for guard in request.compares)
        reads_first = first is not None and isinstance(first[0], Range)
        return bool(request.compares) and not named and not reads_first
    return first is not None and isinstance(first[0], Delete) and not first[0].previous


def _names_value(guard: Compare) -> bool:
    return guard.target == "value" and guard.relation == "="
