"""Execution of a txn of ranges alone, in pieces: it stays out of the log and takes its time.

The passes are those of ``txn``: compares, then what may fail, then the ranges; all on one view that stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final, cast

from raftkv.apply import ranges, response, txn
from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.storage.mvcc_range import PinnedView
from raftkv.storage.selection import Selection, no_limit

_RANGE_ANSWER: Final = 1
"""Field of a ResponseOp."""


def in_pieces(
    view: PinnedView, request: rpc_pb2.TxnRequest, grow: Callable[[int], None] = no_limit
) -> Generator[None, None, ranges.Answer]:
    """The view's revision and the body of the TxnResponse; see ``ranges.in_pieces``.

    Raises:
        CompactedError, FutureRevisionError: a range asks for a revision that cannot be read.
    """
    succeeded = True
    for compare in request.compare:
        succeeded = yield from _holds(view, compare)
        if not succeeded:
            break
    operations = list(request.success if succeeded else request.failure)
    txn.check_ranges(cast(txn.WriteView, view), txn.Path(succeeded, operations))  # which reads nothing but revisions
    body = [response.txn_body(succeeded, ())]
    for operation in operations:
        revision, pieces = yield from ranges.in_pieces(view, operation.request_range, grow)
        header = response.revision_header(revision)
        answer = response.head(_RANGE_ANSWER, len(header) + sum(map(len, pieces))) + header
        body += (response.head(3, len(answer) + sum(map(len, pieces))) + answer, *pieces)
    return view.revision, body


def _holds(view: ranges.ReadView, compare: rpc_pb2.Compare) -> Generator[None, None, bool]:
    """Whether the predicate holds for every key of the interval; values are read where they are compared."""
    selection = Selection(keys_only=compare.target != rpc_pb2.Compare.VALUE, counts=False)
    is_empty = True
    for kvs in view.select(compare.key, compare.range_end, selection):
        is_empty = is_empty and not kvs
        if not all(txn.matches(compare, kv_pb2.KeyValue.FromString(kv)) for kv in kvs):
            return False
        yield
    # A missing key has no value to compare with; its numbers compare as zeros.
    return not is_empty or (compare.target != rpc_pb2.Compare.VALUE and txn.matches(compare, kv_pb2.KeyValue()))
