"""Requests refused by their contents, in any state of the store."""

from __future__ import annotations

import time
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv import errors
from raftkv.apply import check
from raftkv.pb import rpc_pb2
from tests.compat.store import delete, get, put, txn

DUPLICATE = errors.DuplicateKeyError
TOO_MANY = errors.TooManyOperationsError


def _expect(checked: Any, error: type[errors.StatusError] | None) -> None:
    if error is None:
        checked()
        return
    with pytest.raises(error):
        checked()


def _written(operations: Any) -> tuple[set[bytes], list[tuple[bytes, bytes]]]:
    """Keys put and intervals deleted by a branch, by looking at all pairs (etcd: v3rpc.checkIntervals)."""
    deletes = [_interval(op.request_delete_range) for op in operations if op.HasField("request_delete_range")]
    puts: set[bytes] = set()
    for operation in operations:
        if operation.HasField("request_txn"):
            branches = [_written(operation.request_txn.success), _written(operation.request_txn.failure)]
            for keys, _ in branches:
                if any(key in puts or _is_in(deletes, key) for key in keys):
                    raise DUPLICATE
            for keys, intervals in branches:
                puts |= keys
                deletes += intervals
    for operation in operations:
        if operation.HasField("request_put"):
            key = operation.request_put.key
            if key in puts or _is_in(deletes, key):
                raise DUPLICATE
            puts.add(key)
    return puts, deletes


def _interval(request: rpc_pb2.DeleteRangeRequest) -> tuple[bytes, bytes]:
    return request.key, request.range_end or request.key + b"\0"


def _is_in(intervals: list[tuple[bytes, bytes]], key: bytes) -> bool:
    return any(low <= key < high for low, high in intervals)


NAMES = st.binary(min_size=1, max_size=2).map(lambda name: bytes(byte % 4 + 97 for byte in name))
LEAVES = st.one_of(NAMES.map(put), st.builds(delete, NAMES, st.one_of(NAMES, st.sampled_from((b"", b"\0", b"z")))))
BRANCHES = st.recursive(
    st.lists(LEAVES, max_size=4),
    lambda branches: st.lists(
        st.one_of(LEAVES, st.builds(lambda a, b: txn(then=a, otherwise=b), branches, branches)), max_size=4
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(BRANCHES, BRANCHES)
def test_duplicate_check_matches_plain_rule(then: list[Any], otherwise: list[Any]) -> None:
    request = txn(then=then, otherwise=otherwise)
    expected: type[errors.StatusError] | None = None
    try:
        _written(request.success)
        _written(request.failure)
    except DUPLICATE:
        expected = DUPLICATE
    _expect(lambda: check.check_txn(request, 128), expected)


def _nested(counts: tuple[int, ...], make: Any, prefix: bytes = b"") -> Any:
    count, *rest = counts
    if not rest:
        return txn(then=[make(prefix + b"%03d" % number) for number in range(count)])
    return txn(then=[_nested(tuple(rest), make, prefix + b"%03d" % number) for number in range(count)])


def test_all_operations_together_are_limited() -> None:
    _expect(lambda: check.check_txn(_nested((64, 64), put), 128), None)
    _expect(lambda: check.check_txn(_nested((40, 40, 10), put), 128), TOO_MANY)


@pytest.mark.parametrize("make", [put, delete, get, lambda name: delete(name, name + b"\0")])
@pytest.mark.parametrize("counts", [(64, 64), (20, 20, 39), (check.OPERATIONS_TOTAL_MAX,)])
def test_the_largest_txns_are_checked_in_pieces(make: Any, counts: tuple[int, ...]) -> None:
    # They took 27 to 41 ms at once, and several of them fitted into one pass of the loop.
    request, operations_max = _nested(counts, make), max(counts[0], 128)
    pieces = list(check.check_txn_in_pieces(request, operations_max))
    assert len(pieces) >= prod(counts) // check.OPERATIONS_PER_PIECE


def test_compares_on_intervals_are_found() -> None:
    names = (b"a", b"b", b"c")
    some = [rpc_pb2.Compare(key=name, range_end=b"z", version=1) for name in names]
    single = rpc_pb2.Compare(key=b"k")
    nested = txn([single, some[1]], otherwise=[txn(some[2:])])
    assert check.check_txn(txn([some[0], single], then=[put(b"k"), nested]), 128) == some


def test_the_largest_txn_is_checked_in_no_time() -> None:
    """A coarse bound: comparing all pairs takes far longer than the bound, the real check a hundredth of it."""

    def make(name: bytes) -> Any:
        return put(b"p" + name) if name[-1] % 2 else delete(b"d" + name, b"d" + name + b"x")

    request = _nested((64, 64), make)
    began = time.process_time()
    check.check_txn(request, 128)
    assert time.process_time() - began < 2.0


def test_a_txn_keeps_no_more_values_than_a_list_has_operations() -> None:
    # 1,400 of them in nested txns, 30 KB, wrote 2 GB in one entry, which all members hold in memory at once.
    kept = [put(b"k%d" % number, ignore_value=True) for number in range(check.KEPT_VALUES_MAX + 1)]
    check.check_txn(txn(then=[txn(then=kept[:64]), txn(then=kept[64:-1])]), 128)
    with pytest.raises(TOO_MANY):
        check.check_txn(txn(then=[txn(then=kept[:64]), txn(then=kept[64:])]), 128)
    check.check_txn(txn(then=kept), 200)
