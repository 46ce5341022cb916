"""Validation of KV requests before anything else happens to them.

Owns the refusals that depend on the request alone; each rule is etcd's (server/etcdserver/api/v3rpc/key.go), including
which of two faults is reported. What depends on the state of the store is refused while applying, in ``txn``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from raftkv import errors
from raftkv.pb import rpc_pb2

_ACTIONS: Final = frozenset(rpc_pb2.AlarmRequest.AlarmAction.values())
_ALARMS: Final = frozenset(rpc_pb2.AlarmType.values())
_SORT_ORDERS: Final = frozenset(rpc_pb2.RangeRequest.SortOrder.values())
_SORT_TARGETS: Final = frozenset(rpc_pb2.RangeRequest.SortTarget.values())

Interval = tuple[bytes, bytes]
"""Keys from the first to below the second."""


def check_range(request: rpc_pb2.RangeRequest) -> None:
    """Refuse an empty key and unknown sort options."""
    if not request.key:
        raise errors.EmptyKeyError
    if request.sort_order not in _SORT_ORDERS or request.sort_target not in _SORT_TARGETS:
        raise errors.InvalidSortOptionError


def check_put(request: rpc_pb2.PutRequest) -> None:
    """Refuse an empty key, and a value or lease given together with the flag to keep the old one."""
    if not request.key:
        raise errors.EmptyKeyError
    if request.ignore_value and request.value:
        raise errors.ValueProvidedError
    if request.ignore_lease and request.lease:
        raise errors.LeaseProvidedError


def check_delete_range(request: rpc_pb2.DeleteRangeRequest) -> None:
    """Refuse an empty key."""
    if not request.key:
        raise errors.EmptyKeyError


def check_alarm(request: rpc_pb2.AlarmRequest) -> None:
    """Refuse an unknown action, and to raise an unknown alarm. One of an old log may be listed and disarmed."""
    if request.action not in _ACTIONS:
        raise errors.InvalidAlarmError(f"raftkv: unknown alarm action {request.action}")
    if request.action == rpc_pb2.AlarmRequest.ACTIVATE and request.alarm not in _ALARMS:
        raise errors.InvalidAlarmError(f"raftkv: unknown alarm {request.alarm}")


def check_txn(request: rpc_pb2.TxnRequest, operations_max: int) -> None:
    """Refuse a txn that is too large, has an invalid operation, or writes a key twice in one branch."""
    _check_operations(request, operations_max)
    for branch in (request.success, request.failure):
        written_keys(branch)


def _check_operations(request: rpc_pb2.TxnRequest, operations_max: int) -> None:
    size = max(len(request.compare), len(request.success), len(request.failure))
    if size > operations_max:
        raise errors.TooManyOperationsError
    for compare in request.compare:
        if not compare.key:
            raise errors.EmptyKeyError
    for branch in (request.success, request.failure):
        for operation in branch:
            # A nested txn may use what its parent left of the budget, so nesting cannot multiply it.
            _check_operation(operation, operations_max - size)


def _check_operation(operation: rpc_pb2.RequestOp, operations_max: int) -> None:
    kind = operation.WhichOneof("request")
    if kind == "request_range":
        check_range(operation.request_range)
    elif kind == "request_put":
        check_put(operation.request_put)
    elif kind == "request_delete_range":
        check_delete_range(operation.request_delete_range)
    elif kind == "request_txn":
        _check_operations(operation.request_txn, operations_max)
    else:
        raise errors.KeyNotFoundError


def written_keys(operations: Iterable[rpc_pb2.RequestOp]) -> tuple[set[bytes], list[Interval]]:
    """Keys put and intervals deleted by one branch, nested txns included.

    Raises:
        DuplicateKeyError: a key is put twice, or put and deleted, on one possible path. The two branches of a nested
            txn exclude each other, so both may put the same key.
    """
    operations = list(operations)
    deletes = [_interval(op.request_delete_range) for op in operations if op.HasField("request_delete_range")]
    puts: set[bytes] = set()
    for operation in operations:
        if operation.HasField("request_txn"):
            _merge_nested(operation.request_txn, puts, deletes)
    for key in _put_keys(operations):
        if key in puts or _intersects(deletes, key):
            raise errors.DuplicateKeyError
        puts.add(key)
    return puts, deletes


def _merge_nested(request: rpc_pb2.TxnRequest, puts: set[bytes], deletes: list[Interval]) -> None:
    """Add what a nested txn writes to ``puts`` and ``deletes`` of its parent."""
    success_puts, success_deletes = written_keys(request.success)
    failure_puts, failure_deletes = written_keys(request.failure)
    for key in success_puts:
        if key in puts or _intersects(deletes, key):
            raise errors.DuplicateKeyError
    for key in failure_puts:
        if key in puts or _intersects(deletes, key):
            raise errors.DuplicateKeyError
    puts |= success_puts | failure_puts
    deletes += success_deletes + failure_deletes


def _put_keys(operations: Iterable[rpc_pb2.RequestOp]) -> Iterator[bytes]:
    return (op.request_put.key for op in operations if op.HasField("request_put"))


def _interval(request: rpc_pb2.DeleteRangeRequest) -> Interval:
    if not request.range_end:
        return request.key, request.key + b"\0"
    # The end "\0" too is taken as it stands, and holds no key then, though executing it deletes everything from the
    # key on. Clients can see that etcd has it so: such a deletion may stand beside a put.
    return request.key, request.range_end


def _intersects(intervals: Iterable[Interval], key: bytes) -> bool:
    return any(low <= key < high for low, high in intervals)
