"""The checkers against random histories: legal ones pass, falsified ones are flagged or still true."""

from __future__ import annotations

import dataclasses
import itertools
import math

from hypothesis import event
from hypothesis import strategies as st

from jepsen.checkers import linear, replay
from jepsen.checkers.linear import Refused, Step, next_state
from jepsen.checkers.model import Model
from jepsen.history import Change, History, Operation, StoreRecord
from jepsen.ops import (
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
    did_write,
    may_write,
    puts,
)
from tests.jepsen.story import LOST
from tests.long import property_of

KEYS = "ab"


@st.composite
def requests(draw: st.DrawFn, value: str) -> Request:
    """A request that writes unique values."""
    key = draw(st.sampled_from(KEYS))
    kind = draw(st.sampled_from(["put", "get", "delete", "swap", "txn"]))
    match kind:
        case "put":
            return Put(key, value, previous=draw(st.booleans()))
        case "get":
            return Range(key)
        case "delete":
            return Delete(key, previous=draw(st.booleans()))
        case "swap":
            guard = Compare(key, "version", draw(st.sampled_from("=<>")), draw(st.integers(0, 2)))
            return Txn((guard,), (Range(key), Put(key, value)), (Range(key),))
        case _:
            return Txn((), (Put("a", value), Put("b", value), Range("a", "c")))


class World:
    """A correct store under concurrent clients; each request is called, takes effect, and returns."""

    def __init__(self) -> None:
        self.model = Model()
        self.rev = 1
        self.store = StoreRecord()
        self.operations: list[Operation] = []
        self._clock = 0

    def tick(self) -> int:
        """The next instant."""
        self._clock += 1
        return self._clock

    def call(self, request: Request) -> Operation:
        """A client sends a request."""
        number = len(self.operations) + 1
        operation = Operation(number, f"c{number}", 1, self.tick(), request, (1, 1), by=1)
        self.operations.append(operation)
        return operation

    def effect(self, operation: Operation) -> None:
        """Apply a request at one instant."""
        before = set(self.model.current)
        result = self.model.apply(operation.request, self.rev + 1)
        if did_write(operation.request, result):
            self.rev += 1
            written = self.model.written_at(self.rev, {put.key for put in puts(operation.request)})
            kvs = tuple(kv for kv in written.values() if kv is not None)
            gone = tuple(sorted(before - set(self.model.current))) if not kvs else ()
            self.store.changes[self.rev] = Change(kvs, gone)
        self.store.last = self.rev
        self.store.states[self.rev] = tuple(self.model.current.values())
        operation.rev, operation.result = self.rev, result

    def finish(self, operation: Operation, answered: bool) -> None:
        """Return the answer to the client, or lose it."""
        operation.returned = self.tick()
        if not answered or operation.result is None:
            operation.rev, operation.result, operation.by = 0, None, 0
            reads_only = not may_write(operation.request)
            operation.failure = dataclasses.replace(LOST, definite=reads_only)


@st.composite
def legal_histories(draw: st.DrawFn) -> History:
    """Possible histories of a correct store, including lost answers."""
    world = World()
    waiting: list[Operation] = []
    done: list[Operation] = []
    for number in range(draw(st.integers(1, 14))):
        waiting.append(world.call(draw(requests(f"v{number}"))))
        while waiting and draw(st.booleans()):
            operation = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
            world.effect(operation)
            done.append(operation)
        while done and draw(st.booleans()):
            world.finish(done.pop(draw(st.integers(0, len(done) - 1))), answered=draw(st.integers(0, 9)) > 0)
    for operation in (*done, *waiting):
        if operation in waiting and draw(st.booleans()):
            world.effect(operation)  # given up, and done all the same
            operation.rev, operation.result = 0, None
        world.finish(operation, answered=operation not in waiting)
    return History(world.operations, [], world.store)


@property_of(legal_histories(), short=40, long=100)
def test_legal_histories_pass(history: History) -> None:
    assert replay.check(history) == []
    assert linear.check(history) == []


def falsified(draw: st.DrawFn, operation: Operation) -> Operation:
    """Return the operation with one part of its answer changed."""
    if draw(st.booleans()):
        return dataclasses.replace(operation, rev=max(1, operation.rev + draw(st.sampled_from([-2, -1, 1, 2]))))
    result = operation.result
    assert result is not None
    return dataclasses.replace(operation, result=_falsified_result(draw, result))


def _falsified_result(draw: st.DrawFn, result: Result) -> Result:
    ghost = KeyValue("a", "ghost", 2, 2, 1)
    match result:
        case PutResult():
            return PutResult(ghost if result.previous is None else None)
        case DeleteResult():
            return dataclasses.replace(result, deleted=result.deleted + draw(st.sampled_from([-1, 1])))
        case RangeResult(kvs=()):
            return RangeResult((ghost,))
        case RangeResult():
            changed = draw(st.sampled_from(["value", "create", "mod", "version", "gone"]))
            first, *rest = result.kvs
            if changed == "gone":
                return RangeResult(tuple(rest))
            value: str | int = "ghost" if changed == "value" else getattr(first, changed) + 1
            return RangeResult((dataclasses.replace(first, **{changed: value}), *rest))
        case TxnResult():
            position = draw(st.integers(0, len(result.results) - 1))
            parts = list(result.results)
            parts[position] = _falsified_result(draw, parts[position])
            return TxnResult(result.succeeded, tuple(parts))


@st.composite
def falsified_histories(draw: st.DrawFn) -> History:
    """A legal history with one answer falsified."""
    history = draw(legal_histories().filter(lambda h: any(op.result for op in h.operations)))
    answered = [place for place, op in enumerate(history.operations) if op.result is not None]
    place = draw(st.sampled_from(answered))
    operations = list(history.operations)
    operations[place] = falsified(draw, operations[place])
    return History(operations, [], history.store)


@property_of(falsified_histories(), short=40, long=150)
def test_a_falsified_answer_is_flagged_unless_it_could_be_true(history: History) -> None:
    flagged = replay.check(history) != []
    event("flagged" if flagged else "still true")
    assert flagged or could_be_true(history)


def could_be_true(history: History) -> bool:
    """Whether every answer equals the model's at its revision, and revision order respects real time."""
    assert history.store is not None
    owners = {op.rev: op for op in history.operations if op.wrote}
    model = Model()
    states: dict[int, Model] = {}
    for rev in range(1, history.store.last + 1):
        change = history.store.changes.get(rev, Change(()))
        if rev in owners and model.apply(owners[rev].request, rev) != owners[rev].result:
            return False
        if rev not in owners:
            model.force(rev, change.kvs, change.deleted)
        states[rev] = Model()
        states[rev].force(rev, tuple(model.current.values()), ())
        if set(model.current.values()) != set(history.store.states.get(rev, tuple(model.current.values()))):
            return False
    answered = [op for op in history.operations if op.result is not None]
    for op in answered:
        if not op.wrote and (op.rev not in states or states[op.rev].apply(op.request, op.rev) != op.result):
            return False
    places = {op.id: 2 * op.rev + (not op.wrote) for op in answered}
    pairs = itertools.permutations(answered, 2)
    return not any(places[a.id] < places[b.id] and b.returned < a.call for a, b in pairs)


@st.composite
def register_histories(draw: st.DrawFn) -> list[Operation]:
    """Up to six operations on one key with random answers, some lost."""
    operations = []
    values = [f"v{n}" for n in range(6)]
    for number in range(draw(st.integers(1, 6))):
        call = draw(st.integers(0, 10))
        request = _register_request(draw, values[number])
        operation = Operation(number + 1, f"c{number}", 1, call, request, (1, 1), draw(st.integers(call + 1, 14)))
        if draw(st.integers(0, 3)) == 0:
            operation.failure = LOST
        else:
            operation.result = _any_answer(draw, request)
        operations.append(operation)
    return operations


def _register_request(draw: st.DrawFn, value: str) -> Request:
    guard = Compare("k", "value", "=", draw(st.sampled_from(["v0", "v1", "v2"])))
    return draw(
        st.sampled_from(
            [
                Put("k", value),
                Put("k", value, previous=True),
                Range("k"),
                Delete("k"),
                Txn((guard,), (Put("k", value),), (Range("k"),)),
                Txn((guard,), (Put("k", value),)),
                Txn((guard,), (Range("k"),), (Put("k", value),)),
                Txn((Compare("k", "version", draw(st.sampled_from("=>")), 0),), (Put("k", value),), (Range("k"),)),
            ]
        )
    )


def _any_answer(draw: st.DrawFn, request: Request) -> Result:
    shown = draw(st.sampled_from([None, "v0", "v1", "v2"]))
    kv = None if shown is None else KeyValue("k", shown, 0, 0, 0)
    match request:
        case Put():
            return PutResult(kv if request.previous else None)
        case Range():
            return RangeResult((kv,) if kv else ())
        case Delete():
            return DeleteResult(draw(st.integers(0, 1)))
        case Txn():
            succeeded = draw(st.booleans())
            branch = request.success if succeeded else request.failure
            shown_kvs = RangeResult((kv,) if kv else ())
            return TxnResult(succeeded, tuple(PutResult() if isinstance(p, Put) else shown_kvs for p in branch))


def linearizable_by_trying(operations: list[Operation]) -> bool:
    """Whether some order of all answered and some lost operations explains the answers."""
    answered = [Step(op.call, op.returned, op.request, op.result) for op in operations if op.kind == "ok"]
    lost = [Step(op.call, math.inf, op.request, None) for op in operations if op.kind == "info"]
    for count in range(len(lost) + 1):
        for some in itertools.combinations(lost, count):
            if any(_explains(order) for order in itertools.permutations([*answered, *some])):
                return True
    return False


def _explains(order: tuple[Step, ...]) -> bool:
    state = None
    for place, step in enumerate(order):
        if any(later.returned < step.call for later in order[place + 1 :]):
            return False
        try:
            state = next_state(state, step.request, step.result)
        except Refused:
            return False
    return True


@property_of(register_histories(), short=40, long=150)
def test_search_agrees_with_trying_everything(operations: list[Operation]) -> None:
    expected = linearizable_by_trying(operations)
    event("linearizable" if expected else "not linearizable")
    assert linear.is_linearizable(linear.prepare(operations)) is expected
