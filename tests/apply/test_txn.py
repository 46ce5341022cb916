"""Txns: compares against the state before, checks before any write, operations in order under one revision."""

from __future__ import annotations

from typing import Any

import pytest

from raftkv import errors
from raftkv.apply import txn as apply_txn
from raftkv.pb import rpc_pb2
from tests.apply.machine import Machine
from tests.compat.store import compact, compare, delete, get, put, txn


@pytest.fixture
def machine() -> Machine:
    """Two keys: a with three versions (revisions 2 to 4), b with one (5)."""
    made = Machine()
    for value in (b"1", b"2", b"3"):
        made.answer(put(b"a", value))
    made.answer(put(b"b", b"9", lease=100))
    assert made.store.revision == 5
    return made


COMPARES = [
    (compare("VERSION", "EQUAL", b"a", 3), True),
    (compare("VERSION", "GREATER", b"a", 2), True),
    (compare("VERSION", "LESS", b"a", 3), False),
    (compare("VERSION", "NOT_EQUAL", b"a", 3), False),
    (compare("CREATE", "EQUAL", b"a", 2), True),
    (compare("MOD", "EQUAL", b"a", 4), True),
    (compare("VALUE", "EQUAL", b"a", b"3"), True),
    (compare("VALUE", "GREATER", b"a", b"29"), True),
    (compare("LEASE", "EQUAL", b"b", 100), True),
    # A missing key has numbers, all zero, and no value.
    (compare("VERSION", "EQUAL", b"x", 0), True),
    (compare("CREATE", "LESS", b"x", 1), True),
    (compare("VALUE", "EQUAL", b"x", b""), False),
    (compare("VALUE", "NOT_EQUAL", b"x", b"1"), False),
    # Over an interval it must hold for every key, and for a missing one if there is none.
    (compare("VERSION", "GREATER", b"a", 0, b"c"), True),
    (compare("VERSION", "GREATER", b"a", 1, b"c"), False),
    (compare("VERSION", "EQUAL", b"x", 0, b"z"), True),
    # An operand of another target counts as zero.
    (rpc_pb2.Compare(key=b"x", target=rpc_pb2.Compare.VERSION, value=b"1"), True),
    # An unknown result and an unknown target.
    (rpc_pb2.Compare(key=b"a", result=9, version=7), True),
    (rpc_pb2.Compare(key=b"a", target=9), True),
]


@pytest.mark.parametrize(("condition", "holds"), COMPARES)
def test_compares(machine: Machine, condition: rpc_pb2.Compare, holds: bool) -> None:
    assert machine.answer(txn([condition], [put(b"c")], [put(b"c")])).succeeded is holds
    assert machine.answer(txn([condition, compare("VERSION", "EQUAL", b"a", 3)], [delete(b"d")])).succeeded is holds


def test_txn_operations_see_earlier_writes_at_one_revision(machine: Machine) -> None:
    answer = machine.answer(
        txn(then=[get(b"a"), put(b"a", b"4", prev_kv=True), get(b"a"), delete(b"b", prev_kv=True), get(b"b")])
    )
    before, written, during, deleted, after = answer.responses
    assert before.response_range.kvs[0].value == b"3"
    assert written.response_put.prev_kv.value == b"3"
    assert (during.response_range.kvs[0].value, during.response_range.kvs[0].mod_revision) == (b"4", 6)
    assert deleted.response_delete_range.prev_kvs[0].value == b"9"
    assert after.response_range.count == 0
    headers = [getattr(part, part.WhichOneof("response")).header.revision for part in answer.responses]
    assert headers == [5, 6, 6, 6, 6]
    assert machine.store.revision == 6


def test_a_txn_that_writes_nothing_makes_no_revision(machine: Machine) -> None:
    assert machine.answer(txn(then=[delete(b"nothing")])).succeeded
    assert machine.store.revision == 5


def test_nested_compares_look_at_the_state_before_the_whole_txn(machine: Machine) -> None:
    inner = txn([compare("VALUE", "EQUAL", b"a", b"3")], [put(b"c", b"then")], [put(b"c", b"otherwise")])
    answer = machine.answer(txn(then=[put(b"a", b"4"), inner]))
    assert answer.responses[1].response_txn.succeeded
    assert (machine.value(b"a"), machine.value(b"c")) == (b"4", b"then")


REFUSED = [
    ([put(b"c"), put(b"x", ignore_value=True)], errors.KeyNotFoundError),
    ([put(b"c"), put(b"x", ignore_lease=True)], errors.KeyNotFoundError),
    ([put(b"c"), put(b"d", lease=7)], errors.LeaseNotFoundError),
    # The key's absence is found before the lease's.
    ([put(b"c"), put(b"x", ignore_value=True, lease=7)], errors.KeyNotFoundError),
    ([put(b"c"), get(b"a", revision=99)], errors.FutureRevisionError),
    ([put(b"c"), get(b"a", revision=2)], errors.CompactedError),
    ([put(b"c"), get(b"a", revision=-1)], errors.CompactedError),
    ([get(b"a", revision=99), put(b"x", ignore_value=True)], errors.KeyNotFoundError),
    ([put(b"c"), txn(then=[get(b"a", revision=99)])], errors.FutureRevisionError),
    ([delete(b"a", b"\0"), put(b"b", ignore_value=True)], errors.KeyNotFoundError),
    ([delete(b"b", b"\0"), put(b"b", ignore_lease=True)], errors.KeyNotFoundError),
    ([delete(b"b", b"\0"), delete(b"c", b"\0"), put(b"b", ignore_value=True)], errors.KeyNotFoundError),
]


@pytest.mark.parametrize(("operations", "error"), REFUSED)
def test_refused_txn_changes_nothing(machine: Machine, operations: list[Any], error: type[errors.StatusError]) -> None:
    machine.answer(compact(3))
    before = machine.hash()
    with pytest.raises(error):
        machine.answer(txn(then=operations))
    assert (machine.hash(), machine.store.revision) == (before, 5)
    # On the path that is not taken, the same is harmless.
    assert not machine.answer(txn([compare("VERSION", "EQUAL", b"a", 9)], operations)).succeeded


def test_keeping_the_value_of_a_key_that_was_not_deleted_before(machine: Machine) -> None:
    """Only an end that is open reaches further than the check for duplicate keys sees."""
    machine.answer(txn(then=[delete(b"0"), delete(b"1", b"a"), put(b"b", ignore_value=True)]))
    machine.answer(txn(then=[delete(b"b", b"\0"), put(b"a", ignore_value=True)]))
    assert (machine.value(b"a"), machine.value(b"b")) == (b"3", None)


def test_ranges_at_the_oldest_revision_and_at_the_newest(machine: Machine) -> None:
    machine.apply(compact(3))
    answer = machine.answer(txn(then=[put(b"c"), get(b"a", revision=3), get(b"a", revision=5)]))
    assert [part.response_range.kvs[0].value for part in answer.responses[1:]] == [b"2", b"3"]


def test_keeping_value_or_lease(machine: Machine) -> None:
    machine.answer(txn(then=[put(b"b", ignore_value=True)]))
    stored = machine.answer(txn(then=[get(b"b")])).responses[0].response_range.kvs[0]
    assert (stored.value, stored.lease) == (b"9", 0)
    machine.answer(put(b"b", b"9", lease=101))
    machine.answer(put(b"b", b"8", ignore_lease=True))
    stored = machine.answer(txn(then=[get(b"b")])).responses[0].response_range.kvs[0]
    assert (stored.value, stored.lease) == (b"8", 101)


@pytest.mark.parametrize(
    ("request_", "readonly", "serializable"),
    [
        (txn(), True, False),
        (txn([compare("VERSION", "EQUAL", b"a", 0)]), True, False),
        (txn(then=[get(b"a")], otherwise=[get(b"a")]), True, False),
        (txn(then=[get(b"a", serializable=True)], otherwise=[get(b"a", serializable=True)]), True, True),
        (txn(then=[get(b"a", serializable=True)], otherwise=[get(b"a")]), True, False),
        (txn(then=[txn()]), False, True),
        (txn(otherwise=[delete(b"a")]), False, True),
    ],
)
def test_the_way_a_txn_goes(request_: rpc_pb2.TxnRequest, readonly: bool, serializable: bool) -> None:
    assert apply_txn.is_readonly(request_) is readonly
    if readonly:
        assert apply_txn.is_serializable(request_) is serializable


@pytest.mark.parametrize(
    ("request_", "grows"),
    [
        (txn(then=[delete(b"a")]), False),
        (txn(otherwise=[put(b"a")]), True),
        (txn(then=[txn(otherwise=[txn(then=[put(b"a")])])]), True),
        (txn(then=[txn(then=[get(b"a")])]), False),
    ],
)
def test_limits_of_a_txn(request_: rpc_pb2.TxnRequest, grows: bool) -> None:
    assert apply_txn.has_put(request_) is grows
