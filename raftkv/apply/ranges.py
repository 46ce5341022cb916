"""Execution of a RangeRequest against a view of the store.

Order of the steps, as in etcd (server/etcdserver/txn/range.go): fetch in key order, filter by revisions, sort, cut to
the limit, strip values. ``count`` is of the interval and ignores limit and filters.

One quirk is kept because clients can see it: with a sort target other than KEY and no sort order, the limit is applied
*before* sorting, since only an explicit order (or a filter) lifts the limit of the fetch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from raftkv.apply import response
from raftkv.pb import kv_pb2, rpc_pb2

_NONE: Final = rpc_pb2.RangeRequest.NONE
_DESCEND: Final = rpc_pb2.RangeRequest.DESCEND
_KEY: Final = rpc_pb2.RangeRequest.KEY
_LIMIT_MAX: Final = 2**63 - 1

_SORT_KEYS: Final[dict[int, Callable[[kv_pb2.KeyValue], Any]]] = {
    rpc_pb2.RangeRequest.KEY: lambda kv: kv.key,
    rpc_pb2.RangeRequest.VERSION: lambda kv: kv.version,
    rpc_pb2.RangeRequest.CREATE: lambda kv: kv.create_revision,
    rpc_pb2.RangeRequest.MOD: lambda kv: kv.mod_revision,
    rpc_pb2.RangeRequest.VALUE: lambda kv: kv.value,
}


class RangeResult(Protocol):
    """What a view answers: stored KeyValue bytes in key order, the size of the interval, the current revision."""

    @property
    def kvs(self) -> list[bytes]:
        """KeyValue bytes, at most ``limit``."""

    @property
    def count(self) -> int:
        """Keys in the interval at the revision read."""

    @property
    def revision(self) -> int:
        """Current revision of the view."""


class ReadView(Protocol):
    """The store, or a write txn in progress (which sees its own writes)."""

    def range(
        self,
        key: bytes,
        range_end: bytes = b"",
        *,
        revision: int = 0,
        limit: int = 0,
        count_only: bool = False,
        keys_only: bool = False,
    ) -> RangeResult:
        """Read an interval; ``range_end`` as on the wire, revision and limit <= 0 for current and none."""


def execute(view: ReadView, request: rpc_pb2.RangeRequest) -> tuple[int, bytes]:
    """The view's revision and the body of the RangeResponse.

    Raises:
        CompactedError: the revision asked for is below the compact revision.
        FutureRevisionError: it does not exist yet.
    """
    limit = request.limit
    order, target = request.sort_order, request.sort_target
    filtered = _is_filtered(request)
    # The largest limit has no successor in 64 bits, and cuts nothing.
    fetch = 0 if order != _NONE or filtered or not 0 < limit < _LIMIT_MAX else limit + 1
    result = view.range(
        request.key, request.range_end, revision=request.revision, limit=fetch, count_only=request.count_only
    )
    kvs = result.kvs
    if filtered or order == _DESCEND or target != _KEY or request.keys_only:
        kvs = _refine(kvs, request, filtered)
    more = 0 < limit < len(kvs)
    return result.revision, response.range_body(kvs[:limit] if more else kvs, more, result.count)


def _is_filtered(request: rpc_pb2.RangeRequest) -> bool:
    return bool(
        request.min_mod_revision
        or request.max_mod_revision
        or request.min_create_revision
        or request.max_create_revision
    )


def _refine(stored: list[bytes], request: rpc_pb2.RangeRequest, filtered: bool) -> list[bytes]:
    """Filter, sort and strip values."""
    kvs = [kv_pb2.KeyValue.FromString(kv) for kv in stored]
    if filtered:
        kvs = [kv for kv in kvs if _passes(kv, request)]
    if request.sort_target in _SORT_KEYS and (request.sort_order != _NONE or request.sort_target != _KEY):
        kvs.sort(key=_SORT_KEYS[request.sort_target], reverse=request.sort_order == _DESCEND)
    if request.keys_only:
        for kv in kvs:
            kv.ClearField("value")
    return [kv.SerializeToString() for kv in kvs]


def _passes(kv: kv_pb2.KeyValue, request: rpc_pb2.RangeRequest) -> bool:
    """Inclusive bounds; 0 is no bound."""
    return not (
        (request.max_mod_revision and kv.mod_revision > request.max_mod_revision)
        or (request.min_mod_revision and kv.mod_revision < request.min_mod_revision)
        or (request.max_create_revision and kv.create_revision > request.max_create_revision)
        or (request.min_create_revision and kv.create_revision < request.min_create_revision)
    )
