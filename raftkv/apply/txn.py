"""Execution of puts, deletes and txns.

A txn runs in three passes, as in etcd (server/etcdserver/txn/txn.go):

1. All compares, nested ones on the taken path too, are evaluated against the state before the txn. The outcome is the
   *path*: for each txn on it, whether it succeeded.
2. Everything that could fail on the path is checked: first the puts (lease, key kept by ``ignore_*``), then the
   ranges (revision). A failure here leaves the state untouched.
3. The operations run in order; later ones see what earlier ones wrote; all writes share one main revision.

Nothing in pass 3 can fail, so every member ends with the same state and the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from raftkv import errors
from raftkv.apply import ranges, response
from raftkv.pb import kv_pb2, rpc_pb2

_RANGE: Final = "request_range"
_PUT: Final = "request_put"
_DELETE: Final = "request_delete_range"
_TXN: Final = "request_txn"
# Field of ResponseOp that answers each kind of operation.
_ANSWER: Final = {_RANGE: 1, _PUT: 2, _DELETE: 3, _TXN: 4}


class Leases(Protocol):
    """What a put needs to know of leases."""

    def exists(self, lease_id: int) -> bool:
        """Whether the lease is granted and not revoked."""


class Current(ranges.ReadView, Protocol):
    """A view that knows which revisions can be read."""

    @property
    def revision(self) -> int:
        """Revision that a read sees."""

    @property
    def compact_revision(self) -> int:
        """Revisions below are gone."""


class WriteView(Current, Protocol):
    """A write txn of the store; reads inside see its writes, and one more than the revision before them."""

    def put(self, key: bytes, value: bytes, lease: int = 0) -> object:
        """Write a key."""

    def delete_range(self, key: bytes, end: bytes = b"") -> Sized:
        """Delete an interval, its end as on the wire; what was deleted."""


def is_readonly(request: rpc_pb2.TxnRequest) -> bool:
    """Whether the txn can skip the log: ranges only. A nested txn counts as a write, as in etcd."""
    return all(op.WhichOneof("request") == _RANGE for op in _both(request))


def is_serializable(request: rpc_pb2.TxnRequest) -> bool:
    """Whether every operation is a serializable range, so that the txn may be answered locally.

    A txn of compares alone, or of nothing, has no range that could ask for less than a linearizable answer. (etcd takes
    it for serializable, because all of no ranges are, and may answer it from a state that is behind.)
    """
    ranges_ = [op.request_range for op in _both(request) if op.WhichOneof("request") == _RANGE]
    return bool(ranges_) and all(request_range.serializable for request_range in ranges_)


def has_put(request: rpc_pb2.TxnRequest) -> bool:
    """Whether the txn can grow the store: refused while the NOSPACE alarm is on."""
    return any(op.HasField(_PUT) or (op.HasField(_TXN) and has_put(op.request_txn)) for op in _both(request))


def _both(request: rpc_pb2.TxnRequest) -> Iterator[rpc_pb2.RequestOp]:
    yield from request.success
    yield from request.failure


@dataclass(slots=True)
class Path:
    """The taken branch of a txn, and the paths of the txns nested in it, in order."""

    succeeded: bool
    operations: list[rpc_pb2.RequestOp]
    nested: list[Path] = field(default_factory=list)


def choose_path(view: ranges.ReadView, request: rpc_pb2.TxnRequest) -> Path:
    """Pass 1."""
    succeeded = all(_holds(view, compare) for compare in request.compare)
    path = Path(succeeded, list(request.success if succeeded else request.failure))
    path.nested = [choose_path(view, op.request_txn) for op in path.operations if op.HasField(_TXN)]
    return path


def _holds(view: ranges.ReadView, compare: rpc_pb2.Compare) -> bool:
    """Whether the predicate holds for every key of the interval."""
    kvs = view.range(compare.key, compare.range_end).kvs
    if not kvs:
        # A missing key has no value to compare with; its numbers compare as zeros.
        return compare.target != rpc_pb2.Compare.VALUE and matches(compare, kv_pb2.KeyValue())
    return all(matches(compare, kv_pb2.KeyValue.FromString(kv)) for kv in kvs)


def matches(compare: rpc_pb2.Compare, kv: kv_pb2.KeyValue) -> bool:
    """Whether the predicate holds for one key."""
    have, want = _operands(compare, kv)
    order: int = (have > want) - (have < want)
    result = compare.result
    if result == rpc_pb2.Compare.EQUAL:
        return order == 0
    if result == rpc_pb2.Compare.NOT_EQUAL:
        return order != 0
    if result == rpc_pb2.Compare.GREATER:
        return order > 0
    if result == rpc_pb2.Compare.LESS:
        return order < 0
    return True  # a result that this version does not know holds, as in etcd


def _operands(compare: rpc_pb2.Compare, kv: kv_pb2.KeyValue) -> tuple[Any, Any]:
    """Both sides of a comparison; the wanted one is zero when the target's own field is not set."""
    target = compare.target
    if target == rpc_pb2.Compare.VALUE:
        return kv.value, compare.value
    if target == rpc_pb2.Compare.VERSION:
        return kv.version, compare.version
    if target == rpc_pb2.Compare.CREATE:
        return kv.create_revision, compare.create_revision
    if target == rpc_pb2.Compare.MOD:
        return kv.mod_revision, compare.mod_revision
    if target == rpc_pb2.Compare.LEASE:
        return kv.lease, compare.lease
    return 0, 0


def check_path(view: Current, path: Path, leases: Leases) -> None:
    """Pass 2 for a txn that writes."""
    _check_puts(view, path, leases, [])
    check_ranges(view, path)


def _check_puts(view: Current, path: Path, leases: Leases, deletes: list[rpc_pb2.DeleteRangeRequest]) -> None:
    nested = iter(path.nested)
    for operation in path.operations:
        kind = operation.WhichOneof("request")
        if kind == _TXN:
            _check_puts(view, next(nested), leases, deletes)
        elif kind == _DELETE:
            deletes.append(operation.request_delete_range)
        elif kind == _PUT:
            _check_put(view, operation.request_put, leases)
            _check_not_deleted(operation.request_put, deletes)
        elif kind is None:
            raise errors.KeyNotFoundError


def _check_not_deleted(request: rpc_pb2.PutRequest, deletes: list[rpc_pb2.DeleteRangeRequest]) -> None:
    """Refuse to keep the value or lease of a key that the txn itself has deleted by then.

    The check for duplicate keys takes an open end literally, as etcd's does, so such a txn gets here; etcd panics.
    """
    if not (request.ignore_value or request.ignore_lease):
        return
    for delete in deletes:
        if delete.range_end == b"\0" and delete.key <= request.key:
            raise errors.KeyNotFoundError


def _check_put(view: ranges.ReadView, request: rpc_pb2.PutRequest, leases: Leases) -> None:
    keeps = request.ignore_value or request.ignore_lease
    if keeps and not view.range(request.key).kvs:
        raise errors.KeyNotFoundError
    if request.lease and not leases.exists(request.lease):
        raise errors.LeaseNotFoundError


def check_ranges(view: Current, path: Path) -> None:
    """Refuse ranges on the path at revisions that cannot be read.

    Only 0 means "current" here: a negative revision is compared with the compact revision like any other.
    """
    nested = iter(path.nested)
    for operation in path.operations:
        kind = operation.WhichOneof("request")
        if kind == _TXN:
            check_ranges(view, next(nested))
        elif kind == _RANGE and operation.request_range.revision != 0:
            if operation.request_range.revision > view.revision:
                raise errors.FutureRevisionError
            if operation.request_range.revision < view.compact_revision:
                raise errors.CompactedError(view.compact_revision)


def execute(view: WriteView, path: Path) -> bytes:
    """Pass 3: the body of the TxnResponse."""
    nested = iter(path.nested)
    return response.txn_body(path.succeeded, [_execute_operation(view, op, nested) for op in path.operations])


def _execute_operation(view: WriteView, operation: rpc_pb2.RequestOp, nested: Iterator[Path]) -> bytes:
    kind = operation.WhichOneof("request")
    if kind == _RANGE:
        revision, body = ranges.execute(view, operation.request_range)
    elif kind == _PUT:
        revision, body = put(view, operation.request_put)
    elif kind == _DELETE:
        revision, body = delete_range(view, operation.request_delete_range)
    elif kind == _TXN:
        return response.field(_ANSWER[kind], response.EMPTY_HEADER + execute(view, next(nested)))
    else:
        raise errors.InvariantError("a txn operation without a request was proposed")
    return response.field(_ANSWER[kind], response.revision_header(revision) + body)


def put(view: WriteView, request: rpc_pb2.PutRequest) -> tuple[int, bytes]:
    """Write one key; the revision and the body of the PutResponse. Preconditions are checked already."""
    value, lease = request.value, request.lease
    prev: bytes | None = None
    if request.prev_kv or request.ignore_value or request.ignore_lease:
        prev = next(iter(view.range(request.key).kvs), None)
        if prev is not None and (request.ignore_value or request.ignore_lease):
            kept = kv_pb2.KeyValue.FromString(prev)
            value = kept.value if request.ignore_value else value
            lease = kept.lease if request.ignore_lease else lease
    view.put(request.key, value, lease)
    return view.revision, response.put_body(prev if request.prev_kv else None)


def check_put(view: ranges.ReadView, request: rpc_pb2.PutRequest, leases: Leases) -> None:
    """Refuse a single put that cannot be executed; a put on its own reports the lease first, as in etcd."""
    if request.lease and not leases.exists(request.lease):
        raise errors.LeaseNotFoundError
    if (request.ignore_value or request.ignore_lease) and not view.range(request.key).kvs:
        raise errors.KeyNotFoundError


def delete_range(view: WriteView, request: rpc_pb2.DeleteRangeRequest) -> tuple[int, bytes]:
    """Delete an interval; the revision and the body of the DeleteRangeResponse."""
    prev_kvs = view.range(request.key, request.range_end).kvs if request.prev_kv else []
    deleted = len(view.delete_range(request.key, request.range_end))
    return view.revision, response.delete_range_body(deleted, prev_kvs)
