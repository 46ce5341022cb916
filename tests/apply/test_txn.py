"""What rows beside etcd leave out of txns (`tests/compat/rows/test_kv_txns.py`): open deletions, and their kinds."""

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


REFUSED = [
    # The key's absence is found before the lease's.
    ([put(b"c"), put(b"x", ignore_value=True, lease=7)], errors.KeyNotFoundError),
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
