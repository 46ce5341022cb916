"""Execution of a RangeRequest against a view of the store.

A plain request is answered with one read. A filtered, sorted or keys-only request is a *selection* of the interval,
which the store executes in pieces (``raftkv.storage.selection`` has the rules). ``execute`` executes any request at
once; ``in_pieces`` leaves the pauses to its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final

from raftkv.apply import wire
from raftkv.pb import rpc_pb2
from raftkv.storage.mvcc import Store, WriteTxn
from raftkv.storage.mvcc_range import Moment, PinnedView
from raftkv.storage.selection import KEY, LIMIT_MAX, NONE, VALUE, Selection, finish, no_limit

_DESCEND: Final = rpc_pb2.RangeRequest.DESCEND

Answer = tuple[int, list[bytes]]
"""The view's revision, and the body of a RangeResponse in pieces."""

ReadView = Store | PinnedView | WriteTxn
"""The store, now or pinned, or a write transaction in progress, which sees its own writes."""


def execute(view: ReadView, request: rpc_pb2.RangeRequest) -> tuple[int, bytes]:
    """Execute a Range at once; return the view's revision and the body of the RangeResponse.

    Arguments:
        view: the store, or the write transaction in progress.
        request: already checked.

    Raises:
        CompactedError: the requested revision is below the compact revision.
        FutureRevisionError: the requested revision does not exist yet.
    """
    if is_selection(request):
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
    """Read the current value of one key; return the result like ``execute``.

    Arguments:
        view: the store.
        key: not empty.
    """
    result = view.range(key)
    return result.revision, wire.range_body(result.kvs, False, result.count)


def execute_small(
    view: Store, request: rpc_pb2.RangeRequest, keys_max: int, size_bytes_max: int
) -> tuple[int, bytes] | None:
    """Execute a plain Range of few current keys at once; return ``None`` for any other request.

    Arguments:
        view: the store.
        request: already checked.
        keys_max: number of known keys of the interval above which they are too many.
        size_bytes_max: bytes of KeyValues above which they are too large.

    Returns:
        the result of ``execute``.
    """
    if request.revision > 0 or request.count_only or is_selection(request):
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


def is_selection(request: rpc_pb2.RangeRequest) -> bool:
    """Return whether the response is more than the interval cut at the limit: filtered, sorted or keys-only."""
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
    view: ReadView | Moment,
    request: rpc_pb2.RangeRequest,
    grow: Callable[[int], None] = no_limit,
    body: list[bytes] | None = None,
) -> Generator[None, None, Answer]:
    """Execute a Range in small pieces, with a pause after each.

    Arguments:
        view: must not change meanwhile: a pinned view, a moment of it, or a write txn in progress.
        request: already checked.
        grow: called with the change of the response's size (negative if it shrinks); raises when it is too large.
        body: filled with the parts of the response: a caller that cancels must free it (``response.drop``).

    Returns:
        the view's revision, and the parts of the body of the RangeResponse.

    Raises:
        CompactedError, FutureRevisionError: as in ``execute``.
    """
    # Members of another version may have accepted targets that this one does not know: those sort nothing.
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
