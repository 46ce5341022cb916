"""The history checker passes correct histories and names violations."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest

from jepsen import ops
from raftkv.apply import wire
from raftkv.apply.wire import Kind
from raftkv.pb import rpc_pb2
from raftkv.raft.types import Entry
from tests.sim.clients.history import History, Invocation, Operation, Outcome, ViolationError, check_history
from tests.sim.clients.workload import DELETE, PUT, RANGE, TXN
from tests.sim.replay import Replay


def put(value: str) -> Operation:
    return Operation(PUT, rpc_pb2.PutRequest(key=b"k", value=value.encode()))


def swap(value: str, expected: int) -> Operation:
    request = rpc_pb2.TxnRequest()
    request.compare.add(target=rpc_pb2.Compare.MOD, key=b"k").mod_revision = expected
    request.success.add().request_put.CopyFrom(rpc_pb2.PutRequest(key=b"k", value=value.encode()))
    request.failure.add().request_range.key = b"k"
    return Operation(TXN, request)


FIRST, SECOND, SWAP = put("1"), put("2"), swap("3", 2)
REMOVE = Operation(DELETE, rpc_pb2.DeleteRangeRequest(key=b"k"))
READ = Operation(RANGE, rpc_pb2.RangeRequest(key=b"k"))
IDS = {id(FIRST): 1, id(SECOND): 2, id(SWAP): 3, id(REMOVE): 4, id(READ): 0}
KINDS = {PUT: Kind.PUT, TXN: Kind.TXN, DELETE: Kind.DELETE_RANGE}

DONE = ops.PutResult()
WON = ops.TxnResult(True, (DONE,))
REFUSED = Outcome(0, error="etcdserver: too many requests")


def kv(value: str, mod: int, create: int = 2, version: int = 1) -> ops.KeyValue:
    return ops.KeyValue("k", value, create, mod, version)


def seen(revision: int, *kvs: ops.KeyValue) -> Outcome:
    return Outcome(revision, ops.RangeResult(kvs))


def sequence(*steps: tuple[Operation, Outcome]) -> list[Invocation]:
    """A history of one operation after the other."""
    history = History()
    for operation, outcome in steps:
        history.end(history.call(0, operation, IDS[id(operation)]), outcome)
    return history.invocations


def log(*operations: Operation) -> Replay:
    replay = Replay(0)
    for index, operation in enumerate(operations, 1):
        data = wire.encode(KINDS[operation.path], IDS[id(operation)], operation.request.SerializeToString())
        replay.apply(Entry(1, index, data))
    return replay


WRITTEN = (FIRST, Outcome(2, DONE))
GOOD = {
    "nothing": ([], log()),
    "put and read": (sequence(WRITTEN, (READ, seen(2, kv("1", 2)))), log(FIRST)),
    "read of nothing": (sequence((READ, seen(1))), log()),
    "refused and absent": (sequence((FIRST, REFUSED)), log()),
    "lost swap": (
        sequence((SECOND, Outcome(2, DONE)), (FIRST, Outcome(3, DONE)),
             (SWAP, Outcome(3, ops.TxnResult(False, (ops.RangeResult((kv("1", 3, version=2),)),))))),
        log(SECOND, FIRST, SWAP),
    ),
    "won swap": (sequence(WRITTEN, (SWAP, Outcome(3, WON))), log(FIRST, SWAP)),
    "delete, then nothing": (
        sequence(WRITTEN, (REMOVE, Outcome(3, ops.DeleteResult(1))), (READ, seen(3))), log(FIRST, REMOVE)
    ),
    "delete of nothing": (sequence((REMOVE, Outcome(1, ops.DeleteResult(0)))), log(REMOVE)),
}  # fmt: skip

BAD = {
    "acknowledged write lost": ("D1", sequence(WRITTEN), log()),
    "refused, yet done": ("K1", sequence((FIRST, REFUSED)), log(FIRST)),
    "swap won on another's value": (
        "K2", sequence(WRITTEN, (SWAP, Outcome(4, WON))), log(FIRST, SECOND, SWAP)
    ),
    "stale read": ("K3", sequence(WRITTEN, (READ, seen(1))), log(FIRST)),
    "read of a value never there": ("K3", sequence(WRITTEN, (READ, seen(2, kv("9", 2)))), log(FIRST)),
    "read from the future": ("K4", sequence((READ, seen(2, kv("1", 2)))), log()),
    "write ordered before one that had returned": (
        "K3", sequence((SECOND, Outcome(3, DONE)), (FIRST, Outcome(2, DONE))), log(FIRST, SECOND)
    ),
    "reads go back": ("K3", sequence((READ, seen(2, kv("1", 2))), (READ, seen(1))), log(FIRST)),
    "deleted value read": (
        "K3", sequence((REMOVE, Outcome(3, ops.DeleteResult(1))), (READ, seen(3, kv("1", 2)))), log(FIRST, REMOVE)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_history_passes(name: str) -> None:
    check_history(*GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_bad_history_is_named(name: str) -> None:
    property_id, invocations, replay = BAD[name]
    with pytest.raises(ViolationError) as caught:
        check_history(invocations, replay)
    assert caught.value.property_id == property_id


def test_a_request_that_is_in_the_log_twice_is_named() -> None:
    with pytest.raises(ViolationError, match="K9"):
        log(FIRST, FIRST)


def test_concurrent_operations_may_take_any_order() -> None:
    history = History()
    write, read = history.call(0, FIRST, 1), history.call(1, READ)
    history.end(read, seen(1))
    history.end(write, Outcome(2, DONE))
    check_history(history.invocations, log(FIRST))


def test_unknown_write_may_have_happened_or_not() -> None:
    history = History()
    history.call(0, FIRST, 1)
    check_history(history.invocations, log())
    check_history(history.invocations, log(FIRST))


def test_every_changed_answer_of_a_legal_history_is_flagged() -> None:
    rng, numbers = random.Random(5), count(1)
    history, replay = History(), Replay(0)
    for number in range(1, 200):
        operation = rng.choice((put(f"v{next(numbers)}"), swap("s", rng.randrange(1, 50)), REMOVE))
        data = wire.encode(KINDS[operation.path], number, operation.request.SerializeToString())
        replay.apply(Entry(1, number, data))
        history.end(history.call(0, operation, number), replay.outcomes[number])
    check_history(history.invocations, replay)
    for invocation in rng.sample(history.invocations, 50):
        true = invocation.outcome
        assert true is not None
        invocation.outcome = replace(true, revision=true.revision + rng.choice((-1, 1)))
        with pytest.raises(ViolationError):
            check_history(history.invocations, replay)
        invocation.outcome = true
