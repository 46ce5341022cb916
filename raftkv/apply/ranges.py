"""Execution of a RangeRequest against a view of the store.

A plain request is answered from one read. One that is filtered, sorted or keys-only is a *selection* of the interval,
which the store carries out in pieces (``raftkv.storage.selection``, where the rules are). ``execute`` does any request
at once; ``in_pieces`` leaves the pauses to its driver.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final

from raftkv.apply import wire
from raftkv.pb import rpc_pb2
from raftkv.storage.mvcc import Store, WriteTxn
from raftkv.storage.mvcc_range import PinnedView
from raftkv.storage.selection import KEY, LIMIT_MAX, NONE, VALUE, Selection, finish, no_limit

_DESCEND: Final = rpc_pb2.RangeRequest.DESCEND

Answer = tuple[int, list[bytes]]
"""The view's revision, and the body of a RangeResponse in pieces."""

ReadView = Store | PinnedView | WriteTxn
"""The store, as it is or was, or a write transaction in progress, which sees its own writes."""


def execute(view: ReadView, request: rpc_pb2.RangeRequest) -> tuple[int, bytes]:
    """Execute a Range at once; return the view's revision and the body of the RangeResponse.

    Arguments:
        view: the store, or the write transaction in progress.
        request: checked already.

    Raises:
        CompactedError: the revision asked for is below the compact revision.
        FutureRevisionError: it does not exist yet.
    """
    if _is_selection(request):
        revision, pieces = finish(in_pieces(view, request))
        return revision, b"".join(pieces)
    limit = request.limit
    # The largest limit has no successor in 64 bits, and cuts nothing.
    fetch = limit + 1 if 0 < limit < LIMIT_MAX else 0
    result = view.range(
        request.key, request.range_end, revision=request.revision, limit=fetch, count_only=request.count_only
    )
    kvs = result.kvs
    more = 0 < limit < len(kvs)
    return result.revision, wire.range_body(kvs[:limit] if more else kvs, more, result.count)


def get(view: ReadView, key: bytes) -> tuple[int, bytes]:
    """Read one key in the present; return as ``execute``.

    Arguments:
        view: the store.
        key: not empty.
    """
    result = view.range(key)
    return result.revision, wire.range_body(result.kvs, False, result.count)


def execute_small(
    view: Store, request: rpc_pb2.RangeRequest, keys_max: int, size_bytes_max: int
) -> tuple[int, bytes] | None:
    """Execute a Range at once if it is a plain one for the present of few keys; return ``None`` for any other.

    Arguments:
        view: the store.
        request: checked already.
        keys_max: known keys of the interval above which they are not few.
        size_bytes_max: bytes of KeyValues above which they are not few.

    Returns:
        as ``execute``.
    """
    if request.revision > 0 or request.count_only or _is_selection(request):
        return None
    limit = request.limit
    # One more than the limit shows whether there is more.
    fetch = limit + 1 if 0 < limit < LIMIT_MAX else 0
    result = view.small_range(request.key, request.range_end, fetch, keys_max, size_bytes_max)
    if result is None:
        return None
    kvs = result.kvs
    more = 0 < limit < len(kvs)
    return result.revision, wire.range_body(kvs[:limit] if more else kvs, more, result.count)


def _is_selection(request: rpc_pb2.RangeRequest) -> bool:
    """Return whether the answer is not just the interval, cut at the limit."""
    return bool(
        request.sort_order == _DESCEND
        or request.sort_target != KEY
        or request.keys_only
        or request.min_mod_revision
        or request.max_mod_revision
        or request.min_create_revision
        or request.max_create_revision
    )


def in_pieces(
    view: ReadView,
    request: rpc_pb2.RangeRequest,
    grow: Callable[[int], None] = no_limit,
    body: list[bytes] | None = None,
) -> Generator[None, None, Answer]:
    """Execute a Range a small piece at a time, with a pause after each.

    Arguments:
        view: must stay as it is meanwhile: a pinned view, or the write txn of the entry that is being applied.
        request: checked already.
        grow: called with the bytes that the answer takes more than before (less, if negative); raises when they are too
            many.
        body: filled with the parts of the answer: a caller that gives it up frees it (``response.drop``).

    Returns:
        the view's revision, and the parts of the body of the RangeResponse.

    Raises:
        CompactedError, FutureRevisionError: as ``execute``.
    """
    # Members of another version may have let through targets that this one does not know: those sort nothing.
    known = KEY <= request.sort_target <= VALUE
    selection = Selection(
        limit=request.limit,
        count_only=request.count_only,
        keys_only=request.keys_only,
        target=request.sort_target if known else KEY,
        order=request.sort_order if known else NONE,
        min_mod=request.min_mod_revision,
        max_mod=request.max_mod_revision,
        min_create=request.min_create_revision,
        max_create=request.max_create_revision,
    )
    revision = view.revision
    body = [] if body is None else body
    pieces = view.select(request.key, request.range_end, selection, revision=request.revision, grow=grow)
    while True:
        try:
            kvs = next(pieces)
        except StopIteration as end:
            body.append(wire.range_end(end.value.more, end.value.count))
            return revision, body
        if kvs:
            body.append(wire.range_kvs(kvs))
            grow(len(body[-1]))
        yield
