"""Execution of puts, deletes and txns.

A txn runs in three passes, as in etcd (server/etcdserver/txn/txn.go):

1. All compares, also of nested txns on the taken path, are evaluated against the state before the txn. The result is
   the *path*: for each txn on it, whether it succeeded.
2. Everything that could fail on the path is checked: first the puts (lease, key kept by ``ignore_*``), then the
   ranges (revision). A failure here leaves the state unchanged.
3. The operations run in order; later ones see the writes of earlier ones; all writes share one main revision.

Nothing in pass 3 can fail, so every member ends with the same state and the same response.

A txn that looks at many keys is executed in pieces, between which the loop of the member does other things. Its
response is not part of applying: each operation leaves a step, and the member that was asked reads the response
afterwards from a view of the history, where an operation sees the changes before its own sub-revision. Executing at
once and executing in pieces have the same result; a property test checks that. A long deletion without a waiting
caller, such as the end of a lease with many keys, is done the same way (``applier``, ``leases``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Final, cast

from raftkv import errors
from raftkv.apply import compares, ranges, wire
from raftkv.apply.leases import Leases
from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.storage.mvcc import Store, WriteTxn
from raftkv.storage.mvcc_range import PinnedView
from raftkv.storage.selection import Selection, finish, no_limit

_RANGE: Final = "request_range"
PUT: Final = "request_put"
DELETE: Final = "request_delete_range"
_TXN: Final = "request_txn"
_VALUE: Final = rpc_pb2.Compare.VALUE
_RESPONSES: Final = 3
"""Field of TxnResponse."""
# Field of ResponseOp for each kind of operation.
_ANSWER: Final = {_RANGE: 1, PUT: 2, DELETE: 3, _TXN: 4}


OPERATIONS_PER_PIECE: Final = 16
"""Operations on single keys between two pauses: 0.1 ms. A pause costs as much as a fifth of a put."""

KEPT_BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes of values that the puts of one txn may keep: each is written again, by every member."""

LONG_WORK: Final = 16_384
"""Keys of the intervals of an entry above which it takes long to apply: 10 to 20 ms."""

VALUES_AT_ONCE: Final = 8
"""Values that one entry reads at once, to compare, keep or return them: each may be as large as a request."""


def is_readonly(request: rpc_pb2.TxnRequest) -> bool:
    """Return whether a txn can bypass the log: it has only ranges. A nested txn counts as a write, as in etcd."""
    for branch in (request.success, request.failure):
        for operation in branch:
            if not operation.HasField(_RANGE):
                return False
    return True


def is_serializable(request: rpc_pb2.TxnRequest) -> bool:
    """Return whether every operation is a serializable range, so that the txn may be answered locally.

    A txn with only compares, or an empty one, has no range that could request less than a linearizable read. (etcd
    treats it as serializable, because all of its zero ranges are, and may answer it from an old state.)
    """
    ranges_ = [op.request_range for op in _both(request) if op.WhichOneof("request") == _RANGE]
    return bool(ranges_) and all(request_range.serializable for request_range in ranges_)


def keys_of(view: Store, request: rpc_pb2.TxnRequest) -> int:
    """Return about how many keys the intervals of a txn's operations have.

    Arguments:
        view: the store of the member that received the txn.
        request: the txn.
    """
    keys = 0
    for operation in _both(request):
        kind = operation.WhichOneof("request")
        if kind == _TXN:
            keys += keys_of(view, operation.request_txn)
        elif kind in (_RANGE, DELETE):
            one: Any = getattr(operation, kind)
            keys += view.known_count(one.key, one.range_end) if one.range_end else 0
    return keys


def work_of(view: Store, request: rpc_pb2.TxnRequest) -> Generator[None, None, int]:
    """Return about how much work applying a txn's operations is, in keys, with pauses: the intervals that it deletes,
    and the values that it compares, keeps, or reads for its response at once.

    Arguments:
        view: the store of the member that received the txn.
        request: the txn.

    Raises:
        RequestTooLargeError: its puts keep values that are larger than ``KEPT_BYTES_MAX``.
    """
    known = _Estimate(view)
    yield from known.add_txn(request)
    return known.work_bytes // compares.BYTES_PER_KEY


def work_of_plain(view: Store, plain: wire.PlainTxn) -> int:
    """Return about how much work the values are that a plain txn reads, in keys; at most a little over ``LONG_WORK``.

    Arguments:
        view: the store of the member that received the txn.
        plain: the txn.
    """
    names = [key for key, target, _, _ in plain.compares if target == _VALUE]
    gets = [key for branch in (plain.success, plain.failure) for key, value, _ in branch if value is None]
    known = _Estimate(view)
    for name in names + gets[:VALUES_AT_ONCE]:
        known.add_values(1, name, b"")
    return known.work_bytes // compares.BYTES_PER_KEY


def work_of_operation(kind: str, view: Store, request: Any) -> int:
    """Return about how much work a put or a deletion is, in keys.

    Arguments:
        kind: its field of a ``RequestOp``.
        view: the store of the member that received it.
        request: the operation.
    """
    known = _Estimate(view)
    known.add(kind, request)
    return known.work_bytes // compares.BYTES_PER_KEY


class _Estimate:
    """The work of a request, as far as it is known. Once that is long, it no longer grows with each value: finding the
    size of a value of 1 MB takes 0.2 ms.

    Arguments:
        view: the store of the member that received the request.

    Attributes:
        work_bytes: bytes to read, and ``BYTES_PER_KEY`` for each key of an interval.
        kept_bytes: size of the values that puts keep.
    """

    def __init__(self, view: Store) -> None:
        self._view = view
        self._sizes: dict[tuple[bytes, bytes], int] = {}
        """The mean size of a KeyValue of an interval."""
        self._at_once = VALUES_AT_ONCE
        self.work_bytes = self.kept_bytes = 0

    def add_txn(self, request: rpc_pb2.TxnRequest) -> Generator[None, None, None]:
        """Add a txn with pauses. Raises as ``work_of``."""
        for compare in request.compare:
            if compare.target == _VALUE and not compare.range_end:
                self.add_values(1, compare.key, b"")
                yield
        for operation in _both(request):
            kind = operation.WhichOneof("request")
            if kind == _TXN:
                yield from self.add_txn(operation.request_txn)
            elif kind is not None:
                self.add(kind, getattr(operation, kind))
                if self.kept_bytes > KEPT_BYTES_MAX:
                    raise errors.RequestTooLargeError
                yield

    def add(self, kind: str, one: Any) -> None:
        """Add a put, a deletion or a range."""
        if kind == PUT:
            if one.ignore_value:
                self.kept_bytes += self._mean_bytes(one.key, b"")
            if one.prev_kv or one.ignore_value or one.ignore_lease:
                self.add_values(1, one.key, b"")
            return
        count = self._view.known_count(one.key, one.range_end) if one.range_end else 1
        if kind == DELETE and one.range_end:
            self.work_bytes += count * compares.BYTES_PER_KEY
        # More values than can be read at once are not read while the txn is applied.
        if count <= self._at_once and (one.prev_kv if kind == DELETE else not (one.count_only or one.keys_only)):
            self._at_once -= count
            self.add_values(count, one.key, one.range_end)

    def add_values(self, count: int, key: bytes, range_end: bytes) -> None:
        """Add the reading of values of an interval."""
        if count and self.work_bytes <= LONG_WORK * compares.BYTES_PER_KEY:
            self.work_bytes += count * self._mean_bytes(key, range_end)

    def _mean_bytes(self, key: bytes, range_end: bytes) -> int:
        interval = key, range_end
        if interval not in self._sizes:
            view = self._view
            self._sizes[interval] = view.reader.mean_bytes(view.revision, key, range_end, compares.SAMPLES)
        return self._sizes[interval]


def has_put(request: rpc_pb2.TxnRequest) -> bool:
    """Return whether a txn can grow the store; it is then refused while the NOSPACE alarm is raised."""
    for branch in (request.success, request.failure):
        for operation in branch:
            kind = operation.WhichOneof("request")
            if kind == PUT or (kind == _TXN and has_put(operation.request_txn)):
                return True
    return False


def _both(request: rpc_pb2.TxnRequest) -> Iterator[rpc_pb2.RequestOp]:
    yield from request.success
    yield from request.failure


Operation = tuple[str | None, Any]
"""The field of a ``RequestOp`` that is set, and its message; ``None`` twice for an empty operation."""


class Path:
    """The taken branch of a txn.

    Arguments:
        succeeded: whether all compares held.
        branch: the operations of the branch.

    Attributes:
        operations: operations of the branch, decoded once, because each pass looks at every operation.
        nested: paths of the nested txns, in order.
        is_answered: whether the response is needed here.
    """

    __slots__ = ("is_answered", "nested", "operations", "succeeded")

    def __init__(self, succeeded: bool, branch: Iterable[rpc_pb2.RequestOp]) -> None:
        self.succeeded = succeeded
        self.operations: list[Operation] = []
        self.nested: list[Path] = []
        self.is_answered = True
        for operation in branch:
            kind = operation.WhichOneof("request")
            self.operations.append((kind, None if kind is None else getattr(operation, kind)))

    @property
    def txns(self) -> list[rpc_pb2.TxnRequest]:
        """The nested txns, in order."""
        return [request for kind, request in self.operations if kind == _TXN]


def without_answers(path: Path) -> Path:
    """Return the same path for a member without a waiting caller: ranges and previous values are not read.

    So only one member does the work of the response, however much a client requests in one entry.
    """
    silent = Path(path.succeeded, ())
    silent.operations = path.operations
    silent.nested = [without_answers(one) for one in path.nested]
    silent.is_answered = False
    return silent


class NeedsSlicing(Exception):
    """The signal that a request is too much work for one turn of the loop: execute it in pieces."""


class Budget:
    """The work that may be done at once. It may differ between members, because the way of executing a request does not
    change its result.

    Arguments:
        units: number of keys to look at, and of operations.
        values: number of values to read.
    """

    __slots__ = ("_left", "_values_left")

    def __init__(self, units: int, values: int = VALUES_AT_ONCE) -> None:
        self._left = units
        self._values_left = values

    def spend(self, units: int) -> None:
        """Subtract units from the budget; raises ``NeedsSlicing`` when it is exhausted."""
        self._left -= units
        if self._left < 0:
            raise NeedsSlicing

    def spend_values(self, count: int) -> None:
        """Count values to read; raises ``NeedsSlicing`` when they are too many to be read at once."""
        self._values_left -= count
        if self._values_left < 0:
            raise NeedsSlicing


def choose_path(view: compares.View, request: rpc_pb2.TxnRequest, budget: Budget) -> Path:
    """Choose the path of a txn at once (pass 1).

    Arguments:
        view: the state before the txn.
        request: already checked.
        budget: work that may be done at once.

    Raises:
        NeedsSlicing: the work exceeds the budget.
    """
    # Charge before doing any work: work that is too much is done again in pieces.
    single, intervals = [], []
    budget.spend(len(request.compare))
    for compare in request.compare:
        count = 1
        if compare.range_end:
            count = view.known_count(compare.key, compare.range_end)
            budget.spend(count)
            intervals.append(compare)
        else:
            single.append(compare)
        if compare.target == _VALUE:
            budget.spend_values(count)
    # Single keys first: a false one avoids the scans of intervals.
    succeeded = True
    for compare in single:
        if not compares.holds(view, compare.key, compare.target, compare.result, compares.wanted(compare)):
            succeeded = False
            break
    if succeeded and intervals:
        succeeded = finish(compares.all_hold(view, intervals))
    path = Path(succeeded, request.success if succeeded else request.failure)
    budget.spend(len(path.operations))
    path.nested = [choose_path(view, nested, budget) for nested in path.txns]
    return path


def choose_path_in_pieces(view: compares.View, request: rpc_pb2.TxnRequest) -> Generator[None, None, Path]:
    """Choose the path of a txn, with a pause after each piece (pass 1).

    Arguments:
        view: the state before the txn.
        request: already checked.
    """
    succeeded = yield from compares.all_hold(view, request.compare)
    path = Path(succeeded, request.success if succeeded else request.failure)
    for nested in path.txns:
        path.nested.append((yield from choose_path_in_pieces(view, nested)))
    yield
    return path


def spend_operations(view: compares.View, path: Path, budget: Budget, *, is_counted: bool) -> None:
    """Charge for the intervals that the operations of a path read or delete, and for the values that they read.

    Arguments:
        view: the state before the txn.
        path: path of the txn.
        budget: work that may be done at once.
        is_counted: whether quotas need the sizes of replaced and deleted values.

    Raises:
        NeedsSlicing: the work exceeds the budget.
    """
    is_answered = path.is_answered
    for kind, request in path.operations:
        if kind == DELETE or (kind == _RANGE and is_answered):
            count = 1
            if request.range_end:
                count = view.known_count(request.key, request.range_end)
                budget.spend(count)
            if (is_counted or (is_answered and request.prev_kv)) if kind == DELETE else not request.count_only:
                budget.spend_values(count)
        elif kind == PUT and (
            is_counted or request.ignore_value or request.ignore_lease or (is_answered and request.prev_kv)
        ):
            budget.spend_values(1)
    for nested in path.nested:
        spend_operations(view, nested, budget, is_counted=is_counted)


def count_changes(view: compares.View, path: Path) -> Generator[None, None, int]:
    """Return the number of changes of a path, or a slightly larger one, with a pause after each piece: keys that it
    puts and deletes again count twice.

    Arguments:
        view: the state before the txn.
        path: path of the txn.
    """
    changes = 0
    for number, (kind, request) in enumerate(path.operations, 1):
        if kind == PUT:
            # A deletion of an interval that contains a key put earlier may count the key once more.
            changes += 2
        elif kind == DELETE:
            changes += view.range(request.key, request.range_end, count_only=True).count
            if number % OPERATIONS_PER_PIECE == 0:
                yield
    for nested in path.nested:
        changes += yield from count_changes(view, nested)
    yield
    return changes


def check_path(view: ranges.ReadView, path: Path, leases: Leases) -> None:
    """Refuse a path that cannot be executed to its end (pass 2, for a txn that writes).

    Arguments:
        view: the state before the txn.
        path: path of the txn.
        leases: the existing leases.

    Raises:
        KeyNotFoundError, LeaseNotFoundError: a put cannot be executed.
        CompactedError, FutureRevisionError: a range requests a revision that cannot be read.
    """
    _check_puts(view, path, leases, None)
    check_ranges(view, path)


def _check_puts(view: ranges.ReadView, path: Path, leases: Leases, emptied: bytes | None) -> bytes | None:
    """Check in order of execution; ``emptied`` and the result: the key from which on everything is deleted by then."""
    nested = iter(path.nested)
    for kind, request in path.operations:
        if kind == _TXN:
            emptied = _check_puts(view, next(nested), leases, emptied)
        elif kind == DELETE:
            if request.range_end == b"\0" and (emptied is None or request.key < emptied):
                emptied = request.key
        elif kind == PUT:
            _check_put(view, request, leases)
            if emptied is not None:
                _check_not_deleted(request, emptied)
        elif kind is None:
            raise errors.KeyNotFoundError
    return emptied


def _check_not_deleted(request: rpc_pb2.PutRequest, emptied: bytes) -> None:
    """Refuse keeping the value or lease of a key that the txn itself has already deleted.

    The check for duplicate keys takes an open end literally, like etcd's, so such a txn gets here; etcd panics.
    """
    if emptied <= request.key and (request.ignore_value or request.ignore_lease):
        raise errors.KeyNotFoundError


def _check_put(view: ranges.ReadView, request: rpc_pb2.PutRequest, leases: Leases) -> None:
    keeps = request.ignore_value or request.ignore_lease
    # Counted, not read, because a txn may keep thousands of values, each as large as a request.
    if keeps and not view.range(request.key, count_only=True).count:
        raise errors.KeyNotFoundError
    if request.lease and not leases.exists(request.lease):
        raise errors.LeaseNotFoundError


def check_ranges(view: ranges.ReadView, path: Path) -> None:
    """Refuse ranges on the path at revisions that cannot be read.

    Only 0 means "current" here: a negative revision is compared with the compact revision like any other.

    Arguments:
        view: the state before the txn.
        path: path of the txn.

    Raises:
        CompactedError, FutureRevisionError: the revision of a range cannot be read.
    """
    nested = iter(path.nested)
    for kind, request in path.operations:
        if kind == _TXN:
            check_ranges(view, next(nested))
        elif kind == _RANGE and request.revision != 0:
            if request.revision > view.revision:
                raise errors.FutureRevisionError
            if request.revision < view.compact_revision:
                raise errors.CompactedError(view.compact_revision)


def execute(view: WriteTxn, path: Path) -> bytes:
    """Execute a path at once (pass 3); return the body of the TxnResponse, empty if it is not needed.

    Arguments:
        view: the write transaction.
        path: already checked.
    """
    nested = iter(path.nested)
    if not path.is_answered:
        for operation in path.operations:
            _change(view, operation, nested)
        return b""
    return wire.txn_body(path.succeeded, [_execute_operation(view, op, nested) for op in path.operations])


def _execute_operation(view: WriteTxn, operation: Operation, nested: Iterator[Path]) -> bytes:
    kind, request = operation
    if kind == _RANGE:
        revision, body = ranges.execute(view, request)
    elif kind == PUT:
        revision, body = put(view, request)
    elif kind == DELETE:
        revision, body = delete_range(view, request)
    elif kind == _TXN:
        return wire.field(_ANSWER[kind], wire.EMPTY_HEADER + execute(view, next(nested)))
    else:
        raise errors.InvariantError("a txn operation without a request was proposed")
    return wire.field(_ANSWER[kind], wire.revision_header(revision) + body)


def _change(view: WriteTxn, operation: Operation, nested: Iterator[Path]) -> None:
    """Execute an operation whose response is not needed."""
    kind, request = operation
    if kind == PUT:
        _put(view, request)
    elif kind == DELETE:
        view.delete_range(request.key, request.range_end)
    elif kind == _TXN:
        execute(view, next(nested))
    elif kind != _RANGE:
        raise errors.InvariantError("a txn operation without a request was proposed")


Step = tuple[int, int]
"""What an executed operation leaves for its response: packed revision of the next change after it, and a number: the
replaced value of a put, the keys that a deletion deleted, or the keys in the interval of a range (-1: unknown)."""


def execute_in_pieces(view: WriteTxn, path: Path, steps: list[Step] | None) -> Generator[None, None, None]:
    """Execute a path with a pause after some operations and within deletions of intervals (pass 3).

    Only what the response cannot be made of later is looked up: ``read_answer`` reads the rest from a view.

    Arguments:
        view: the write transaction.
        path: already checked.
        steps: gets the step of each operation, also of nested txns, in order; ``None``: no caller waits.
    """
    nested = iter(path.nested)
    for number, (kind, request) in enumerate(path.operations):
        found = -1
        if kind == _TXN:
            yield from execute_in_pieces(view, next(nested), steps)
            continue
        if kind == DELETE and request.range_end:
            found = yield from delete_in_pieces(view, request)
        elif kind == DELETE:
            found = len(view.delete_range(request.key))
        elif kind == PUT:
            found = _put(view, request)
            # The kept value of a put may be as large as a request.
            if request.ignore_value or request.ignore_lease:
                yield
        elif kind is None:
            raise errors.InvariantError("a txn operation without a request was proposed")
        elif steps is not None and request.range_end and request.revision <= 0:
            found = view.range(request.key, request.range_end, count_only=True).count
        if steps is not None:
            steps.append((view.bound, found))
        # Deletions pause after each key that they find, but may find none.
        if number % OPERATIONS_PER_PIECE == 0:
            yield


def delete_in_pieces(view: WriteTxn, request: rpc_pb2.DeleteRangeRequest) -> Generator[None, None, int]:
    """Delete an interval, with a pause after each piece; return the number of deleted keys.

    Arguments:
        view: the write transaction.
        request: already checked.
    """
    deleted = 0
    for count in view.delete_in_pieces(request.key, request.range_end):
        deleted += count
        yield
    return deleted


def read_answer(
    view: compares.View,
    path: Path,
    steps: Iterator[Step] | None,
    grow: Callable[[int], None] = no_limit,
    body: list[bytes] | None = None,
) -> Generator[None, None, ranges.Answer]:
    """Read the response of a txn, with a pause after each piece.

    Arguments:
        view: a view that does not change; it was made after the txn was applied.
        path: path of the txn.
        steps: steps of its operations; ``None``: it has only ranges, and they read the view.
        grow, body: as in ``ranges.in_pieces``.

    Returns:
        the view's revision, and the parts of the body of the TxnResponse.

    Raises:
        CompactedError, FutureRevisionError: a range of a txn without steps requests a revision that cannot be read.
        RequestTimeoutError: what a txn with steps saw is compacted.
    """
    body = [] if body is None else body
    body.append(wire.txn_body(path.succeeded, ()))
    nested = iter(path.nested)
    for number, (kind, request) in enumerate(path.operations):
        pieces: list[bytes] = []
        header = wire.EMPTY_HEADER
        try:
            if kind == _TXN:
                yield from read_answer(view, next(nested), steps, grow, pieces)
            else:
                step = None if steps is None else next(steps)
                revision = yield from _read_operation(view, str(kind), request, step, grow, pieces)
                header = wire.revision_header(revision)
        except BaseException:
            body += pieces  # the response is cancelled: the owner of the rest frees these too
            raise
        size_bytes = len(header) + sum(map(len, pieces))
        head = wire.head(_ANSWER[str(kind)], size_bytes)
        body += (wire.head(_RESPONSES, len(head) + size_bytes) + head + header, *pieces)
        if number % OPERATIONS_PER_PIECE == 0:
            yield
    return view.revision, body


def _read_operation(
    view: compares.View, kind: str, request: Any, step: Step | None, grow: Callable[[int], None], body: list[bytes]
) -> Generator[None, None, int]:
    """Read the response of one operation into ``body``; return the revision of its header."""
    if step is None:
        revision, _ = yield from ranges.in_pieces(view, request, grow, body)
        return revision
    pinned, (bound, found) = cast(PinnedView, view), step
    moment = pinned.at(bound, found if found >= 0 else None)
    if kind == _RANGE:
        yield from ranges.in_pieces(moment, request, grow, body)
    elif kind == DELETE:
        yield from read_deleted(pinned, request, step, grow, body)
    elif found and request.prev_kv:
        body.append(wire.put_body(pinned.at(bound - 1).record(found)))
        grow(len(body[-1]))
        yield
    return moment.revision


def read_deleted(
    view: PinnedView,
    request: rpc_pb2.DeleteRangeRequest,
    step: Step,
    grow: Callable[[int], None] = no_limit,
    body: list[bytes] | None = None,
) -> Generator[None, None, ranges.Answer]:
    """Read the response of a deletion; arguments, result and errors as those of ``read_answer``."""
    bound, deleted = step
    body = [] if body is None else body
    body.append(wire.delete_range_body(deleted, ()))
    if request.prev_kv and deleted:
        # Each deleted key was one change.
        for kvs in view.at(bound - deleted, deleted).select(request.key, request.range_end, Selection(), grow=grow):
            body.append(b"".join([wire.field(3, kv) for kv in kvs]))
            grow(len(body[-1]))
            yield
    return view.revision, body


def put(view: WriteTxn, request: rpc_pb2.PutRequest) -> tuple[int, bytes]:
    """Write one key; return the revision and the body of the PutResponse.

    Arguments:
        view: the write transaction.
        request: its preconditions are already checked.
    """
    prev = next(iter(view.range(request.key).kvs), None) if request.prev_kv else None
    _put(view, request)
    return view.revision, wire.put_body(prev)


def _put(view: WriteTxn, request: rpc_pb2.PutRequest) -> int:
    """Write one key; return the packed revision of the replaced value, 0 if there was none."""
    value, lease = request.value, request.lease
    if request.ignore_value or request.ignore_lease:
        for kv in view.range(request.key).kvs:
            kept = kv_pb2.KeyValue.FromString(kv)
            value = kept.value if request.ignore_value else value
            lease = kept.lease if request.ignore_lease else lease
    return view.put(request.key, value, lease)


def check_put(view: ranges.ReadView, request: rpc_pb2.PutRequest, leases: Leases) -> None:
    """Refuse a single put that cannot be executed; a put on its own reports the lease first, as in etcd.

    Arguments:
        view: the state before the put.
        request: the put.
        leases: the existing leases.

    Raises:
        LeaseNotFoundError: the lease does not exist.
        KeyNotFoundError: there is no value or lease to keep.
    """
    if request.lease and not leases.exists(request.lease):
        raise errors.LeaseNotFoundError
    if (request.ignore_value or request.ignore_lease) and not view.range(request.key, count_only=True).count:
        raise errors.KeyNotFoundError


def delete_range(view: WriteTxn, request: rpc_pb2.DeleteRangeRequest) -> tuple[int, bytes]:
    """Delete an interval; return the revision and the body of the DeleteRangeResponse.

    Arguments:
        view: the write transaction.
        request: already checked.
    """
    prev_kvs = view.range(request.key, request.range_end).kvs if request.prev_kv else []
    deleted = len(view.delete_range(request.key, request.range_end))
    return view.revision, wire.delete_range_body(deleted, prev_kvs)


# -- read_txn -------------------------------------------------------------------------------------------------------
#
# A txn with only ranges bypasses the log and is executed in pieces, by the same passes, on one view that does not
# change.


def read_in_pieces(
    view: compares.View,
    request: rpc_pb2.TxnRequest,
    grow: Callable[[int], None] = no_limit,
    body: list[bytes] | None = None,
) -> Generator[None, None, ranges.Answer]:
    """Execute a read-only txn in small pieces, with a pause after each.

    Arguments:
        view, grow, body: as in ``ranges.in_pieces``.
        request: already checked; it has only ranges.

    Returns:
        the view's revision, and the parts of the body of the TxnResponse.

    Raises:
        CompactedError, FutureRevisionError: a range requests a revision that cannot be read.
    """
    succeeded = yield from compares.all_hold(view, request.compare)
    path = Path(succeeded, request.success if succeeded else request.failure)
    check_ranges(view, path)
    return (yield from read_answer(view, path, None, grow, body))
