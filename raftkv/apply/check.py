"""Validation of KV requests before anything else is done with them.

Only checks that depend on the request alone are here; each rule is etcd's (server/etcdserver/api/v3rpc/key.go),
including which one of two faults is reported. Checks that depend on the state are made while applying, in ``txn``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Generator, Iterable
from typing import Final

from raftkv import errors
from raftkv.pb import rpc_pb2
from raftkv.storage.selection import finish

_ACTIONS: Final = frozenset(rpc_pb2.AlarmRequest.AlarmAction.values())
_ALARMS: Final = frozenset(rpc_pb2.AlarmType.values())
_SORT_ORDERS: Final = frozenset(rpc_pb2.RangeRequest.SortOrder.values())
_SORT_TARGETS: Final = frozenset(rpc_pb2.RangeRequest.SortTarget.values())

OPERATIONS_TOTAL_MAX: Final = 16_384
"""Maximum number of compares and operations of a txn, including nested ones and both branches: about 30 ms of checks,
in pieces. etcd has no such limit; with its default of 128 per list, ordinary txns are far below."""

OPERATIONS_PER_PIECE: Final = 128
"""Operations of a list checked between two pauses: 0.3 ms."""
SMALL_LIST: Final = 16
"""Length from which a nested list is followed by a pause."""

KEPT_VALUES_MAX: Final = 128
"""Maximum number of puts of a txn that keep the value of their key: each writes a value that may be as large as a
request but is not part of this one, and all are in memory until the database has them. ``max-txn-ops`` if larger."""


def check_range(request: rpc_pb2.RangeRequest) -> None:
    """Refuse an empty key and unknown sort options."""
    if not request.key:
        raise errors.EmptyKeyError
    if request.sort_order not in _SORT_ORDERS or request.sort_target not in _SORT_TARGETS:
        raise errors.InvalidSortOptionError


def check_put(request: rpc_pb2.PutRequest) -> None:
    """Refuse an empty key, and a value or lease together with the flag to keep the old one."""
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
    """Refuse an unknown action, and raising an unknown alarm.

    An unknown alarm in an old log may still be listed and disarmed.
    """
    if request.action not in _ACTIONS:
        raise errors.InvalidAlarmError(f"raftkv: unknown alarm action {request.action}")
    if request.action == rpc_pb2.AlarmRequest.ACTIVATE and request.alarm not in _ALARMS:
        raise errors.InvalidAlarmError(f"raftkv: unknown alarm {request.alarm}")


def check_txn(request: rpc_pb2.TxnRequest, operations_max: int) -> list[rpc_pb2.Compare]:
    """Refuse a txn that is too large, has an invalid operation, or writes a key twice in one branch.

    Arguments:
        request: the txn.
        operations_max: ``max-txn-ops``, for each list and for nested lists together with those around them.

    Returns:
        The compares on intervals, including nested ones: the request does not show how much work these are.

    Raises:
        TooManyOperationsError, DuplicateKeyError: also the errors of the checks of single operations.
    """
    return finish(check_txn_in_pieces(request, operations_max))


def check_txn_in_pieces(
    request: rpc_pb2.TxnRequest, operations_max: int
) -> Generator[None, None, list[rpc_pb2.Compare]]:
    """Make the checks of ``check_txn``, with a pause after each piece of a large txn.

    Arguments:
        request, operations_max: as in ``check_txn``, which also documents the result and the errors.
    """
    found = _Found(operations_max)
    yield from _check_txn(request, operations_max, found)
    return found.intervals


class _Found:
    """Remaining limits of a txn and its nested txns, and their compares on intervals.

    etcd limits the longest of three lists; the sums over all nested txns, counted here, are raftkv's own limits.
    """

    __slots__ = ("intervals", "kept_left", "operations_left")

    def __init__(self, operations_max: int) -> None:
        self.operations_left = OPERATIONS_TOTAL_MAX
        self.kept_left = max(operations_max, KEPT_VALUES_MAX)
        self.intervals: list[rpc_pb2.Compare] = []


def _check_txn(request: rpc_pb2.TxnRequest, operations_max: int, found: _Found) -> Generator[None, None, None]:
    yield from _check_operations(request, operations_max, found)
    for branch in (request.success, request.failure):
        # A single put, range or deletion cannot write a key twice.
        if len(branch) > 1 or (branch and branch[0].HasField("request_txn")):
            yield from _check_branch(branch)


def _check_operations(request: rpc_pb2.TxnRequest, operations_max: int, found: _Found) -> Generator[None, None, None]:
    compares, success, failure = request.compare, request.success, request.failure
    sizes = len(compares), len(success), len(failure)
    size = max(sizes)
    found.operations_left -= sum(sizes)
    if size > operations_max or found.operations_left < 0:
        raise errors.TooManyOperationsError
    for compare in compares:
        if not compare.key:
            raise errors.EmptyKeyError
        if compare.range_end:
            found.intervals.append(compare)
    for branch in (success, failure):
        for number, operation in enumerate(branch, 1):
            nested = _check_operation(operation, found)
            if nested is not None:
                # A nested txn may use the rest of its parent's budget.
                yield from _check_operations(nested, operations_max - size, found)
            if number % OPERATIONS_PER_PIECE == 0:
                yield
    # Shorter lists rely on the pauses of the surrounding list.
    if size >= SMALL_LIST:
        yield


def _check_operation(operation: rpc_pb2.RequestOp, found: _Found) -> rpc_pb2.TxnRequest | None:
    """Refuse an invalid operation; return it if it is a txn, which must be checked in turn."""
    kind = operation.WhichOneof("request")
    if kind == "request_range":
        check_range(operation.request_range)
    elif kind == "request_put":
        check_put(operation.request_put)
        if operation.request_put.ignore_value:
            found.kept_left -= 1
            if found.kept_left < 0:
                raise errors.TooManyOperationsError
    elif kind == "request_delete_range":
        check_delete_range(operation.request_delete_range)
    elif kind == "request_txn":
        return operation.request_txn
    else:
        raise errors.KeyNotFoundError
    return None


class _Written:
    """The writes of one branch: keys put, and deleted intervals, merged so that each key is in at most one."""

    __slots__ = ("deletes", "puts")

    def __init__(self) -> None:
        self.puts: set[bytes] = set()
        self.deletes = Intervals()

    def size(self) -> int:
        """Return the cost of merging this into another."""
        return len(self.puts) + len(self.deletes)

    def merge(self, other: _Written) -> Generator[None, None, _Written]:
        """Return the union; the larger of the two is changed and returned, so that each key moves O(log n) times in
        total.
        """
        into, one = (self, other) if self.size() >= other.size() else (other, self)
        into.puts |= one.puts
        yield from into.deletes.update(one.deletes)
        return into


class Intervals:
    """Disjoint intervals of keys, in order: a lookup of a key is a binary search."""

    __slots__ = ("_highs", "_lows")

    def __init__(self) -> None:
        self._lows: list[bytes] = []
        self._highs: list[bytes] = []

    def __len__(self) -> int:
        return len(self._lows)

    def add(self, low: bytes, high: bytes) -> None:
        """Merge an interval with those that it overlaps; an empty interval is ignored.

        Arguments:
            low, high: the interval ``low <= key < high``.
        """
        if low >= high:
            return
        first = bisect_left(self._highs, low)
        last = bisect_right(self._lows, high)
        if first < last:
            low, high = min(low, self._lows[first]), max(high, self._highs[last - 1])
        self._lows[first:last] = [low]
        self._highs[first:last] = [high]

    def update(self, other: Intervals) -> Generator[None, None, None]:
        """Merge all intervals of another set, with a pause after each piece."""
        for number, low in enumerate(other._lows):
            self.add(low, other._highs[number])
            if number % OPERATIONS_PER_PIECE == OPERATIONS_PER_PIECE - 1:
                yield

    def __contains__(self, key: bytes) -> bool:
        position = bisect_right(self._lows, key) - 1
        return position >= 0 and key < self._highs[position]

    def touch(self, keys: Collection[bytes]) -> bool:
        """Return whether any of the keys is in an interval."""
        return bool(self._lows) and any(key in self for key in keys)


def _check_branch(operations: Iterable[rpc_pb2.RequestOp]) -> Generator[None, None, _Written]:
    """Return the keys put and intervals deleted by one branch, including nested txns.

    Raises:
        DuplicateKeyError: a key is put twice, or put and deleted, on one possible path. The two branches of a nested
            txn exclude each other, so both may put the same key.
    """
    # Deletions, then nested txns, then puts, as in etcd's checkIntervals: the same txns are refused, for the same
    # reason.
    written = _Written()
    txns: list[rpc_pb2.TxnRequest] = []
    put_keys: list[bytes] = []
    for number, operation in enumerate(operations, 1):
        kind = operation.WhichOneof("request")
        if kind == "request_put":
            put_keys.append(operation.request_put.key)
        elif kind == "request_delete_range":
            written.deletes.add(*_interval(operation.request_delete_range))
        elif kind == "request_txn":
            txns.append(operation.request_txn)
        if number % OPERATIONS_PER_PIECE == 0:
            yield
    for request in txns:
        written = yield from _merge_nested(request, written)
        if len(request.success) + len(request.failure) >= SMALL_LIST:
            yield
    for number, key in enumerate(put_keys, 1):
        if key in written.puts or key in written.deletes:
            raise errors.DuplicateKeyError
        written.puts.add(key)
        if number % OPERATIONS_PER_PIECE == 0:
            yield
    return written


def _merge_nested(request: rpc_pb2.TxnRequest, written: _Written) -> Generator[None, None, _Written]:
    """Return the keys written by a branch including a nested txn.

    Only the puts of the nested txn are compared with the earlier writes, not its deletions. So a branch may put a key
    in one nested txn and delete it in a later one, as in etcd.
    """
    success = yield from _check_branch(request.success)
    failure = yield from _check_branch(request.failure)
    for branch in (success, failure):
        if not written.puts.isdisjoint(branch.puts) or written.deletes.touch(branch.puts):
            raise errors.DuplicateKeyError
    both = yield from success.merge(failure)
    return (yield from written.merge(both))


def _interval(request: rpc_pb2.DeleteRangeRequest) -> tuple[bytes, bytes]:
    if not request.range_end:
        return request.key, request.key + b"\0"
    # The end "\0" is taken literally here and makes an empty interval, although executing the request deletes
    # everything from the key on. etcd does the same, visibly to clients: such a deletion may be combined with a put.
    return request.key, request.range_end
