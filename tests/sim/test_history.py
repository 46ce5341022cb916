"""The judge of histories: it must pass what is right and name what is wrong."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from raftkv.raft.types import Entry
from tests.sim.history import History, Invocation, ViolationError, check_history
from tests.sim.machine import EMPTY_DIGEST as _EMPTY_DIGEST
from tests.sim.machine import Kind, Operation, Outcome, StateMachine, encode

PUT = Operation(1, Kind.PUT, 0, 11)
PUT_AGAIN = Operation(2, Kind.PUT, 0, 22)
SWAP = Operation(3, Kind.COMPARE_AND_SET, 0, 33, expected=2)
DELETE = Operation(4, Kind.DELETE, 0)
READ = Operation(9, Kind.READ, 0)
FIRST = Outcome(2, True, 11, 2)
"""What PUT answers when it is the first in the log."""
LATER = Outcome(3, True, 11, 3)


def told(*steps: tuple[Operation, Outcome | None]) -> list[Invocation]:
    """A history of one operation after the other."""
    history = History()
    for operation, outcome in steps:
        history.end(history.call(0, operation), outcome)
    return history.invocations


def log(*operations: Operation) -> list[bytes]:
    return [b"", *(encode(operation) for operation in operations)]


GOOD = {
    "nothing": ([], log()),
    "put and read": (told((PUT, FIRST), (READ, FIRST)), log(PUT)),
    "read of nothing": (told((READ, Outcome(1))), log()),
    "refused and absent": (told((PUT, None)), log()),
    "lost swap": (
        told((PUT_AGAIN, Outcome(2, True, 22, 2)), (PUT, Outcome(3, True, 11, 3)), (SWAP, Outcome(3, False, 11, 3))),
        log(PUT_AGAIN, PUT, SWAP),
    ),
    "won swap": (told((PUT, FIRST), (SWAP, Outcome(3, True, 33, 3))), log(PUT, SWAP)),
    "delete, then nothing": (
        told((PUT, FIRST), (DELETE, Outcome(3)), (READ, Outcome(3))),
        log(PUT, DELETE),
    ),
    "delete of nothing": (told((DELETE, Outcome(1))), log(DELETE)),
}

BAD = {
    "acknowledged write lost": ("D1", told((PUT, FIRST)), log()),
    "refused, yet done": ("K1", told((PUT, None)), log(PUT)),
    "done twice": ("K9", told((PUT, FIRST)), log(PUT, PUT)),
    "revision skipped": ("K2", told((PUT, Outcome(3, True, 11, 3))), log(PUT)),
    "swap won against the compare": (
        "K2",
        told((PUT, FIRST), (SWAP, Outcome(4, True, 33, 4))),
        log(PUT, PUT_AGAIN, SWAP),
    ),
    "stale read": ("K3", told((PUT, FIRST), (READ, Outcome(1))), log(PUT)),
    "read of a value never there": (
        "K3",
        told((PUT, FIRST), (READ, Outcome(2, True, 12, 2))),
        log(PUT),
    ),
    "read from the future": ("K4", told((READ, FIRST)), log()),
    "write ordered before one that had returned": (
        "K3",
        told((PUT_AGAIN, Outcome(3, True, 22, 3)), (PUT, FIRST)),
        log(PUT, PUT_AGAIN),
    ),
    "reads go back": ("K3", told((READ, FIRST), (READ, Outcome(1))), log(PUT)),
    "deleted value read": ("K3", told((DELETE, Outcome(3)), (READ, Outcome(3, True, 11, 2))), log(PUT, DELETE)),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_history_passes(name: str) -> None:
    check_history(*GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_bad_history_is_named(name: str) -> None:
    property_id, invocations, entries = BAD[name]
    with pytest.raises(ViolationError) as caught:
        check_history(invocations, entries)
    assert caught.value.property_id == property_id


def test_concurrent_operations_may_take_any_order() -> None:
    history = History()
    write, read = history.call(0, PUT), history.call(1, READ)
    history.end(read, Outcome(1))
    history.end(write, Outcome(2, True, 11, 2))
    check_history(history.invocations, log(PUT))


def test_unknown_write_may_have_happened_or_not() -> None:
    history = History()
    history.call(0, PUT)
    check_history(history.invocations, log())
    check_history(history.invocations, log(PUT))


def test_every_changed_answer_of_a_legal_history_is_flagged() -> None:
    rng = random.Random(5)
    machine, history, entries = StateMachine(), History(), []
    for number in range(1, 200):
        kind = rng.choice((Kind.PUT, Kind.COMPARE_AND_SET, Kind.DELETE))
        operation = Operation(number, kind, rng.randrange(3), number, rng.randrange(1, machine.revision + 2))
        entries.append(encode(operation))
        outcome = machine.apply(Entry(1, number, entries[-1]))
        history.end(history.call(0, operation), outcome)
    check_history(history.invocations, entries)
    for invocation in rng.sample(history.invocations, 50):
        true = invocation.outcome
        assert true is not None
        invocation.outcome = replace(true, revision=true.revision + rng.choice((-1, 1)))
        with pytest.raises(ViolationError):
            check_history(history.invocations, entries)
        invocation.outcome = true
    assert machine.digest != _EMPTY_DIGEST
