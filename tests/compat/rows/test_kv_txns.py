"""The rows on Txn of the KV tables, each with its literal answer, on etcd 3.5.1 and on raftkv."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from raftkv.pb import rpc_pb2
from tests.compat.store import (
    COMPACTED,
    DUPLICATE_KEY,
    EMPTY_KEY,
    EVERYTHING,
    FUTURE,
    KEY_NOT_FOUND,
    LEASE_NOT_FOUND,
    TOO_MANY_OPERATIONS,
    Store,
    compact,
    compare,
    delete,
    get,
    put,
    txn,
)

# --- shape --------------------------------------------------------------------------------------------------


def test_empty(store: Store) -> None:
    assert store.ask(txn()) == store.txn_answer(0, succeeded=True)
    assert store.ask(txn(otherwise=[put(b"a")])) == store.txn_answer(0, succeeded=True)


def test_operation_without_a_request(store: Store) -> None:
    for request in (
        *(txn(then=[None]), txn(otherwise=[None]), txn(then=[txn(then=[None])])),
        txn(then=[put(b"a"), None]),
    ):
        assert store.refusal(request) == KEY_NOT_FOUND
    assert store.keys(get(*EVERYTHING)) == []


def test_number_of_operations(store: Store) -> None:
    condition, read = compare("VERSION", "EQUAL", b"a", 0), get(b"a")
    for part, operation, answers in (("compares", condition, 0), ("then", read, 128), ("otherwise", read, 0)):
        assert len(store.ask(txn(**{part: [operation] * 128})).responses) == answers, part
        assert store.refusal(txn(**{part: [operation] * 129})) == TOO_MANY_OPERATIONS, part


def test_a_nested_transaction_has_what_its_parent_left(store: Store) -> None:
    for outer, inner in ((1, 127), (100, 28)):
        others = [get(b"a")] * (outer - 1)
        assert len(store.ask(txn(then=[txn(then=[get(b"a")] * inner), *others])).responses) == outer
        assert store.refusal(txn(then=[txn(then=[get(b"a")] * (inner + 1)), *others])) == TOO_MANY_OPERATIONS


def test_each_nested_transaction_has_the_whole_rest(store: Store) -> None:
    nested = txn(then=[get(b"a")] * 126)
    answer = store.ask(txn(then=[nested, nested]))
    assert [len(part.response_txn.responses) for part in answer.responses] == [126, 126]


# --- which refusal comes first ------------------------------------------------------------------------------


def test_too_many_operations_is_told_before_what_is_wrong_in_them(store: Store) -> None:
    assert store.refusal(txn(then=[put(b"")] * 129)) == TOO_MANY_OPERATIONS


def test_an_invalid_operation_is_told_before_a_duplicate(store: Store) -> None:
    assert store.refusal(txn(then=[put(b"a"), put(b"a")], otherwise=[put(b"")])) == EMPTY_KEY


def test_a_duplicate_is_told_before_the_preconditions(store: Store) -> None:
    assert store.refusal(txn(then=[put(b"a", lease=7), put(b"a")])) == DUPLICATE_KEY


# --- duplicates ---------------------------------------------------------------------------------------------

DUPLICATES: dict[str, list[Any]] = {
    "put-put": [put(b"a"), put(b"a")],
    "put-delete": [put(b"a"), delete(b"a")],
    "delete-put": [delete(b"a"), put(b"a")],
    "put-in-interval": [put(b"b"), delete(b"a", b"c")],
    "put-at-start-of-interval": [put(b"a"), delete(b"a", b"c")],
    "nested-put": [put(b"a"), txn(then=[put(b"a")])],
    "nested-put-in-failure": [put(b"a"), txn(otherwise=[put(b"a")])],
    "nested-put-and-delete": [delete(b"a", b"c"), txn(then=[put(b"b")])],
    "nested-delete-and-put": [txn(then=[delete(b"a")]), put(b"a")],
    "two-nested-puts": [txn(then=[put(b"a")]), txn(then=[put(b"a")])],
    "nested-delete-then-nested-put": [txn(then=[delete(b"a")]), txn(then=[put(b"a")])],
    "inside-a-nested": [txn(then=[put(b"a"), put(b"a")])],
    "twice-nested": [txn(then=[txn(then=[put(b"a")])]), put(b"a")],
}
NO_DUPLICATES: dict[str, list[Any]] = {
    "delete-delete": [delete(b"a"), delete(b"a", b"c")],
    "put-and-range": [put(b"a"), get(b"a"), get(*EVERYTHING)],
    "put-at-end-of-interval": [put(b"c"), delete(b"a", b"c")],
    "put-after-point": [put(b"a\x00"), delete(b"a")],
    "branches-of-one-nested": [txn(then=[put(b"a")], otherwise=[put(b"a")])],
    "inverted-interval": [put(b"b"), delete(b"c", b"a")],
    "nested-put-then-nested-delete": [txn(then=[put(b"a")]), txn(then=[delete(b"a")])],
}


def test_duplicates_are_refused_in_either_branch(store: Store) -> None:
    for case, operations in DUPLICATES.items():
        assert store.refusal(txn(then=operations)) == DUPLICATE_KEY, case
        assert store.refusal(txn(otherwise=operations)) == DUPLICATE_KEY, case


def test_distinct_keys_are_no_duplicates(store: Store) -> None:
    for case, operations in NO_DUPLICATES.items():
        assert store.ask(txn(then=operations)).succeeded, case


def test_the_two_branches_may_put_one_key(store: Store) -> None:
    assert store.ask(txn(then=[put(b"a", b"1")], otherwise=[put(b"a", b"2")])).header.revision == store.at(1)


def test_a_deletion_without_end_is_not_seen_as_a_duplicate(store: Store) -> None:
    """etcd takes the end "\\0" literally here, so that the interval is empty; the operations run in order."""
    store.fill(b"a")
    answer = store.ask(txn(then=[delete(*EVERYTHING), put(b"a", b"2")]))
    assert answer == store.txn_answer(2, True, [store.delete_answer(2, 1), store.put_answer(2)])
    assert store.ask(get(b"a")) == store.range_answer(2, [store.kv(b"a", b"2", create=2)])
    store.ask(txn(then=[put(b"b"), delete(b"a", b"\x00")]))
    assert store.keys(get(*EVERYTHING)) == []


# --- compares -----------------------------------------------------------------------------------------------

# The key is at version 2, created at 1, modified at 2, has no lease and the value "m".
OPERANDS: dict[str, tuple[Any, Any, Any]] = {  # less, equal, greater
    "VERSION": (1, 2, 3),
    "LEASE": (-1, 0, 1),
    "VALUE": (b"a", b"m", b"m\x00"),
}
HOLDS = {
    "EQUAL": (False, True, False),
    "NOT_EQUAL": (True, False, True),
    "GREATER": (True, False, False),
    "LESS": (False, False, True),
}


def _held(store: Store, target: str, operands: tuple[Any, ...]) -> dict[str, tuple[bool, ...]]:
    """Return which of the operands each result holds for."""
    return {
        result: tuple(store.ask(txn([compare(target, result, b"a", operand)])).succeeded for operand in operands)
        for result in HOLDS
    }


def test_compare(store: Store) -> None:
    store.fill(b"a")
    store.ask(put(b"a", b"m"))
    revisions = {"CREATE": (store.at(0), store.at(1), store.at(2)), "MOD": (store.at(1), store.at(2), store.at(3))}
    for target, operands in (OPERANDS | revisions).items():
        assert _held(store, target, operands) == HOLDS, target


def test_numbers_of_a_missing_key_are_zero(store: Store) -> None:
    for target in ("VERSION", "CREATE", "MOD", "LEASE"):
        assert _held(store, target, (-1, 0, 1)) == HOLDS, target


def test_value_of_a_missing_key_never_holds(store: Store) -> None:
    for result, operand in product(HOLDS, (b"", b"x")):
        assert not store.ask(txn([compare("VALUE", result, b"a", operand)])).succeeded, (result, operand)
        assert not store.ask(txn([compare("VALUE", result, b"a", operand, b"c")])).succeeded, (result, operand)


def test_compare_of_an_interval_must_hold_for_all(store: Store) -> None:
    store.fill(b"a", b"b", b"b")
    for request, holds in (
        (compare("VERSION", "GREATER", b"a", 0, b"c"), True),
        (compare("VERSION", "EQUAL", b"a", 1, b"c"), False),
        (compare("VERSION", "EQUAL", b"a", 1, b"b"), True),
        (compare("VALUE", "LESS", b"a", b"c", b"\x00"), True),
        (compare("VERSION", "EQUAL", b"x", 0, b"z"), True),
        (compare("VERSION", "EQUAL", b"z", 0, b"a"), True),
        (compare("VERSION", "EQUAL", b"\x00", 0, b"\x00"), False),
    ):
        assert store.ask(txn([request])).succeeded is holds, request


def test_all_compares_must_hold(store: Store) -> None:
    true, false = compare("VERSION", "EQUAL", b"a", 0), compare("VERSION", "EQUAL", b"a", 1)
    assert store.ask(txn([true, true])).succeeded
    assert not store.ask(txn([true, false])).succeeded
    assert not store.ask(txn([false, true])).succeeded


def test_an_operand_of_another_target_counts_as_zero(store: Store) -> None:
    store.fill(b"a")
    request = rpc_pb2.Compare(key=b"a", target=rpc_pb2.Compare.VERSION, value=b"1")
    assert not store.ask(txn([request])).succeeded
    request.key = b"missing"
    assert store.ask(txn([request])).succeeded


def test_compare_without_an_operand(store: Store) -> None:
    """Zero or empty is the operand then, in all five targets."""
    missing = [store.ask(txn([rpc_pb2.Compare(key=b"a", target=target)])).succeeded for target in range(5)]
    assert missing == [target != rpc_pb2.Compare.VALUE for target in range(5)]


def test_an_unknown_result_holds_and_an_unknown_target_is_equal(store: Store) -> None:
    store.fill(b"a")
    assert store.ask(txn([rpc_pb2.Compare(key=b"a", target=0, result=9, version=7)])).succeeded
    assert store.ask(txn([rpc_pb2.Compare(key=b"a", target=9, result=0)])).succeeded
    assert not store.ask(txn([rpc_pb2.Compare(key=b"a", target=9, result=3)])).succeeded


# --- execution ----------------------------------------------------------------------------------------------


def test_operations_run_in_order_and_share_one_revision(store: Store) -> None:
    store.fill(b"a")
    answer = store.ask(txn(then=[put(b"b", b"1"), get(b"b"), delete(b"a"), get(b"a"), put(b"c", b"2")]))
    assert answer == store.txn_answer(
        2,
        True,
        [
            store.put_answer(2),
            store.range_answer(2, [store.kv(b"b", b"1", create=2)]),
            store.delete_answer(2, 1),
            store.range_answer(2),
            store.put_answer(2),
        ],
    )
    assert store.ask(put(b"d")) == store.put_answer(3)


def test_reads_before_the_first_write_see_the_old_revision(store: Store) -> None:
    store.fill(b"a")
    answer = store.ask(txn(then=[get(b"b"), put(b"b"), get(b"b", count_only=True)]))
    parts = [store.range_answer(1), store.put_answer(2), store.range_answer(2, count=1)]
    assert answer == store.txn_answer(2, True, parts)


def test_a_transaction_that_changes_nothing_is_no_revision(store: Store) -> None:
    store.fill(b"a")
    assert store.ask(txn(then=[delete(b"b")])) == store.txn_answer(1, True, [store.delete_answer(1, 0)])
    failed = txn([compare("VERSION", "EQUAL", b"a", 0)], then=[put(b"a")], otherwise=[get(b"b")])
    assert store.ask(failed) == store.txn_answer(1, False, [store.range_answer(1)])


def test_nested_answer_has_an_empty_header(store: Store) -> None:
    answer = store.ask(txn(then=[txn(then=[put(b"a"), txn()]), put(b"b")]))
    nested = store.txn_answer(None, True, [store.put_answer(1), store.txn_answer(None, True)])
    assert answer == store.txn_answer(1, True, [nested, store.put_answer(1)])
    assert answer.responses[0].response_txn.HasField("header")


def test_nested_compares_see_the_state_before_the_transaction(store: Store) -> None:
    nested = txn([compare("VERSION", "EQUAL", b"a", 0)], then=[put(b"b", b"old")], otherwise=[put(b"b", b"new")])
    answer = store.ask(txn(then=[put(b"a"), nested]))
    assert answer.responses[1].response_txn.succeeded
    assert store.ask(get(b"b")).kvs[0].value == b"old"


def test_prev_kv_inside_sees_earlier_writes(store: Store) -> None:
    store.ask(txn(then=[put(b"a", b"1"), put(b"b", b"2")]))
    answer = store.ask(txn(then=[put(b"a", b"3", prev_kv=True), delete(b"b", prev_kv=True)]))
    assert answer.responses[0].response_put.prev_kv == store.kv(b"a", b"1")
    assert list(answer.responses[1].response_delete_range.prev_kvs) == [store.kv(b"b", b"2")]


def test_writes_inside_keep_create_revision_and_version(store: Store) -> None:
    store.fill(b"a", b"a")
    store.ask(txn(then=[put(b"a", b"3"), put(b"b")]))
    kvs = [store.kv(b"a", b"3", mod=3, version=3), store.kv(b"b", create=3)]
    assert store.ask(get(*EVERYTHING)) == store.range_answer(3, kvs)


# --- the pre-check: all or nothing --------------------------------------------------------------------------


BAD = [
    (put(b"b", lease=7), LEASE_NOT_FOUND),
    (put(b"b", ignore_value=True), KEY_NOT_FOUND),
    (put(b"b", ignore_lease=True), KEY_NOT_FOUND),
    (get(b"b", revision=2**62), FUTURE),
    (get(b"b", revision=1), COMPACTED),
    (get(b"b", revision=-5), COMPACTED),
]


def test_one_bad_operation_undoes_all(store: Store) -> None:
    for bad, expected in BAD:
        for last in (bad, txn(then=[bad])):
            assert store.refusal(txn(then=[put(b"a", b"1"), delete(b"x"), last])) == expected, bad
            assert store.ask(get(*EVERYTHING)) == store.range_answer(0), bad


def test_the_branch_not_taken_is_not_checked(store: Store) -> None:
    bad = [put(b"a", lease=7), get(b"a", revision=2**62)]
    assert store.ask(txn(then=[put(b"a")], otherwise=bad)).succeeded
    never = txn([compare("VERSION", "EQUAL", b"a", 0)], then=bad)
    assert store.ask(txn(then=[never])).header.revision == store.at(1)


def test_a_range_at_the_new_revision_is_in_the_future(store: Store) -> None:
    """Revisions are checked before anything runs, so the transaction's own revision cannot be asked for."""
    assert store.refusal(txn(then=[put(b"a"), get(b"a", revision=store.at(1))])) == FUTURE
    assert store.ask(get(b"a")) == store.range_answer(0)


def test_a_range_at_a_past_revision_inside(store: Store) -> None:
    store.fill(b"a", b"a")
    answer = store.ask(txn(then=[put(b"a", b"3"), get(b"a", revision=store.at(1))]))
    assert answer.responses[1].response_range == store.range_answer(3, [store.kv(b"a", b"a")])


def test_puts_are_checked_before_ranges(store: Store) -> None:
    request = txn(then=[get(b"a", revision=2**62), put(b"a", lease=7)])
    assert store.refusal(request) == LEASE_NOT_FOUND


def test_a_compacted_range_in_a_read_only_transaction(store: Store) -> None:
    store.fill(b"a", b"a", b"a")
    store.ask(compact(store.at(2)))
    assert store.refusal(txn(then=[get(b"a", revision=store.at(1))])) == COMPACTED
    assert store.refusal(txn(then=[get(b"a", revision=store.at(1), serializable=True)])) == COMPACTED
    assert store.ask(txn(then=[get(b"a", revision=store.at(2))])).succeeded


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("flag", ["ignore_value", "ignore_lease"])
def test_a_precondition_that_the_transaction_itself_undoes(raftkv_store: Store, flag: str, nested: bool) -> None:
    """Nothing sees the open deletion as a duplicate, so this gets through to the store; etcd 3.5.1 panics on it."""
    raftkv_store.fill(b"a")
    kept = put(b"a", **{flag: True})
    request = txn(then=[delete(*EVERYTHING), txn(then=[kept]) if nested else kept])
    assert raftkv_store.refusal(request) == KEY_NOT_FOUND
    assert raftkv_store.keys(get(*EVERYTHING)) == [b"a"]
