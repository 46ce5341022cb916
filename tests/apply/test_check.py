"""Requests that are refused for what they are, whatever the store holds."""

from __future__ import annotations

from typing import Any

import pytest

from raftkv import errors
from raftkv.apply import check
from tests.compat.store import delete, get, put, txn

EMPTY, DUPLICATE = errors.EmptyKeyError, errors.DuplicateKeyError
TOO_MANY = errors.TooManyOperationsError


def _puts(count: int, first: int = 0) -> list[Any]:
    return [put(b"k%d" % number) for number in range(first, first + count)]


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (put(b"a"), None),
        (put(b""), EMPTY),
        (put(b"a", b"v", ignore_value=True), errors.ValueProvidedError),
        (put(b"a", lease=1, ignore_lease=True), errors.LeaseProvidedError),
        (put(b"a", b"v", lease=1, ignore_value=True, ignore_lease=True), errors.ValueProvidedError),
        (put(b"", b"v", ignore_value=True), EMPTY),
    ],
)
def test_put(request_: Any, error: type[errors.StatusError] | None) -> None:
    _expect(lambda: check.check_put(request_), error)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, None),
        ({"key": b""}, EMPTY),
        ({"sort_order": 3}, errors.InvalidSortOptionError),
        ({"sort_target": 5}, errors.InvalidSortOptionError),
        ({"sort_order": 2, "sort_target": 4}, None),
        ({"key": b"", "sort_order": 3}, EMPTY),
        ({"revision": -1, "limit": -1}, None),
    ],
)
def test_range(fields: dict[str, Any], error: type[errors.StatusError] | None) -> None:
    _expect(lambda: check.check_range(get(**{"key": b"a", **fields})), error)


TXNS = [
    (txn(), None),
    (txn(then=_puts(128)), None),
    (txn(then=_puts(129)), TOO_MANY),
    (txn(otherwise=_puts(129)), TOO_MANY),
    (txn(then=[*_puts(1), *_puts(1)]), DUPLICATE),
    (txn(then=_puts(1), otherwise=_puts(1)), None),
    (txn(then=[put(b"b"), delete(b"a", b"c")]), DUPLICATE),
    (txn(then=[put(b"c"), delete(b"a", b"c")]), None),
    (txn(then=[delete(b"a"), delete(b"a")]), None),
    (txn(then=[put(b"b"), delete(b"a", b"\0")]), None),
    (txn(then=[delete(b"")]), EMPTY),
    (txn(then=[get(b"")]), EMPTY),
    (txn(then=[put(b"a"), txn(then=_puts(1, 5), otherwise=_puts(1, 5))]), None),
    (txn(then=[put(b"k5"), txn(otherwise=_puts(1, 5))]), DUPLICATE),
    (txn(then=[txn(then=_puts(1)), txn(then=_puts(1))]), DUPLICATE),
    (txn(then=[delete(b"k"), txn(then=[put(b"k")])]), DUPLICATE),
    # A nested txn has what its parent left of the budget: 128 - 2.
    (txn(then=[get(b"a"), txn(then=_puts(126))]), None),
    (txn(then=[get(b"a"), txn(then=_puts(127))]), TOO_MANY),
]


@pytest.mark.parametrize(("request_", "error"), TXNS)
def test_txn(request_: Any, error: type[errors.StatusError] | None) -> None:
    _expect(lambda: check.check_txn(request_, 128), error)


def test_an_operation_left_empty() -> None:
    request = txn()
    request.success.add()
    _expect(lambda: check.check_txn(request, 128), errors.KeyNotFoundError)
    request = txn()
    request.compare.add()
    _expect(lambda: check.check_txn(request, 128), EMPTY)


def _expect(checked: Any, error: type[errors.StatusError] | None) -> None:
    if error is None:
        checked()
        return
    with pytest.raises(error):
        checked()
