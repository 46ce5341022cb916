"""The checker of list appends reports each anomaly by its name, and nothing for correct histories."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jepsen.checkers.append import Transaction, check_transactions

Reads = dict[str, list[int]]


def txn(number: int, span: tuple[int, int | None], reads: Reads, **appends: int) -> Transaction:
    """A transaction: its time, what it read, and one element appended per key."""
    return Transaction(
        number, span[0], span[1], {k: list(v) for k, v in reads.items()}, {k: [v] for k, v in appends.items()}
    )


def aborted(number: int, **appends: int) -> Transaction:
    """A transaction that certainly did not happen."""
    transaction = txn(number, (0, 1), {}, **appends)
    transaction.aborted = True
    return transaction


GOOD = {
    "nothing": [],
    "one append": [txn(1, (0, 1), {"x": []}, x=1)],
    "in turn": [txn(1, (0, 1), {}, x=1), txn(2, (2, 3), {"x": [1]}, x=2), txn(3, (4, 5), {"x": [1, 2]})],
    "concurrent, against the order of calls": [
        txn(1, (0, 9), {}, x=2),
        txn(2, (1, 8), {}, x=1),
        txn(3, (10, 11), {"x": [1, 2]}),
    ],
    "unknown and unseen": [txn(1, (0, None), {}, x=1), txn(2, (5, 6), {"x": []})],
    "unknown and seen later": [txn(1, (0, None), {}, x=1), txn(2, (5, 6), {"x": []}), txn(3, (7, 8), {"x": [1]})],
    "two keys, one order": [
        txn(1, (0, 1), {}, x=1, y=1),
        txn(2, (2, 3), {"x": [1], "y": [1]}, x=2),
        txn(3, (4, 5), {"x": [1, 2], "y": [1]}),
    ],
    "aborted and unseen": [aborted(1, x=1), txn(2, (5, 6), {"x": []})],
    "append after the last read": [txn(1, (0, 1), {"x": []}), txn(2, (2, 3), {}, x=1)],
    "reader overlaps writer, sees the old": [txn(1, (0, 9), {}, x=1), txn(2, (3, 4), {"x": []})],
}


@pytest.mark.parametrize("transactions", GOOD.values(), ids=GOOD)
def test_good_histories_pass(transactions: list[Transaction]) -> None:
    assert check_transactions(transactions) == []


BAD = {
    "G0: two keys written in opposite orders": (
        [txn(1, (0, 9), {}, x=1, y=1), txn(2, (0, 9), {}, x=2, y=2), txn(3, (10, 11), {"x": [1, 2], "y": [2, 1]})],
        "G0",
    ),
    "G1c: each read the other": (
        [txn(1, (0, 9), {"y": [1]}, x=1), txn(2, (0, 9), {"x": [1]}, y=1), txn(3, (10, 11), {"x": [1], "y": [1]})],
        "G1c",
    ),
    "G-single: read one key before and the other after": (
        [txn(1, (0, 9), {}, x=1, y=1), txn(2, (0, 9), {"x": [1], "y": []}), txn(3, (10, 11), {"x": [1], "y": [1]})],
        "G-single",
    ),
    "G-single: lost update": (
        [txn(1, (0, 9), {"x": []}, x=1), txn(2, (0, 9), {"x": []}, x=2), txn(3, (10, 11), {"x": [1, 2]})],
        "G-single",
    ),
    "G2: write skew": (
        [
            txn(1, (0, 9), {"x": [], "y": []}, x=1),
            txn(2, (0, 9), {"x": [], "y": []}, y=1),
            txn(3, (10, 11), {"x": [1], "y": [1]}),
        ],
        "G2",
    ),
    "stale read": (
        [txn(1, (0, 1), {}, x=1), txn(2, (2, 3), {"x": []}), txn(3, (4, 5), {"x": [1]})],
        "G-single-realtime",
    ),
    "appended before what was there": (
        [txn(1, (0, 1), {}, x=1), txn(2, (2, 3), {}, x=2), txn(3, (4, 5), {"x": [2, 1]})],
        "G0-realtime",
    ),
    "read before it was written": ([txn(1, (0, 1), {"x": [1]}), txn(2, (2, 3), {}, x=1)], "G1c-realtime"),
    "two readers, time between, in the wrong order": (
        [
            txn(1, (0, 99), {}, x=1),
            txn(2, (10, 11), {"x": [1]}),
            txn(3, (20, 21), {"x": []}),
            txn(4, (100, 101), {"x": [1]}),
        ],
        "G-single-realtime",
    ),
    "incompatible order": (
        [
            txn(1, (0, 9), {}, x=1),
            txn(2, (0, 9), {}, x=2),
            txn(3, (10, 11), {"x": [1, 2]}),
            txn(4, (12, 13), {"x": [2]}),
        ],
        "incompatible order",
    ),
    "aborted read": ([aborted(1, x=1), txn(2, (5, 6), {"x": [1]})], "aborted read"),
    "element without a writer": ([txn(1, (0, 1), {"x": [7]})], "phantom element"),
    "element twice in a list": ([txn(1, (0, 1), {}, x=1), txn(2, (2, 3), {"x": [1, 1]})], "duplicate element"),
    "element appended by two": ([txn(1, (0, 1), {}, x=1), txn(2, (2, 3), {}, x=1)], "duplicate element"),
    "lost append": ([txn(1, (0, 1), {}, x=1), txn(2, (2, 3), {"x": []})], "lost append"),
    "lost in the middle": (
        [txn(1, (0, 1), {}, x=1), txn(2, (2, 3), {}, x=2), txn(3, (4, 5), {}, x=3), txn(4, (6, 7), {"x": [1, 3]})],
        "lost append",
    ),
    "half of a transaction": (
        [Transaction(1, 0, 9, {}, {"x": [1, 2]}), txn(2, (0, 9), {"x": [1]}), txn(3, (10, 11), {"x": [1, 2]})],
        "intermediate read",
    ),
}


@pytest.mark.parametrize(("transactions", "rule"), BAD.values(), ids=BAD)
def test_anomalies_have_their_names(transactions: list[Transaction], rule: str) -> None:
    assert rule in {violation.rule for violation in check_transactions(transactions)}


@st.composite
def small_histories(draw: st.DrawFn) -> list[Transaction]:
    """Up to five random appending and reading transactions, and a correct last read of all lists."""
    count = draw(st.integers(1, 5))
    orders = {key: draw(st.permutations(range(count))) for key in "xy"}
    appending = {key: draw(st.sets(st.integers(0, count - 1))) for key in "xy"}
    lists = {key: [n for n in orders[key] if n in appending[key]] for key in "xy"}
    transactions = []
    for number in range(count):
        call = draw(st.integers(0, 8))
        reads = {}
        for key in draw(st.sets(st.sampled_from("xy"))):
            others = [n for n in lists[key] if n != number]
            own = lists[key].index(number) if number in lists[key] else len(others)
            reads[key] = others[: draw(st.integers(0, own))]
        appends = {key: [number] for key in "xy" if number in appending[key]}
        transactions.append(Transaction(number, call, draw(st.integers(call + 1, 10)), reads, appends))
    transactions.append(Transaction(count, 20, 21, lists, {}))
    return transactions


def explained(transactions: list[Transaction]) -> bool:
    """Whether some real-time order gives exactly these reads, by trying all orders."""
    return any(_runs(order) for order in itertools.permutations(transactions))


def _runs(order: tuple[Transaction, ...]) -> bool:
    lists: dict[str, list[int | str]] = {"x": [], "y": []}
    for place, transaction in enumerate(order):
        for later in order[place + 1 :]:
            if later.returned is not None and later.returned < transaction.call:
                return False
        if any(lists[key] != seen for key, seen in transaction.reads.items()):
            return False
        for key, elements in transaction.appends.items():
            lists[key] = lists[key] + elements
    return True


@settings(max_examples=120, deadline=None)
@given(small_histories())
def test_verdict_is_that_of_trying_all_orders(transactions: list[Transaction]) -> None:
    assert (check_transactions(transactions) == []) == explained(transactions)
