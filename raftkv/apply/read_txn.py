"""Execution of a txn of ranges alone, in pieces: it stays out of the log and takes its time.

The passes are those of ``txn``: compares, then what may fail, then the ranges; all on one view that stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final

from raftkv.apply import compares, ranges, response, txn
from raftkv.pb import rpc_pb2
from raftkv.storage.selection import no_limit

_RANGE_ANSWER: Final = 1
"""Field of a ResponseOp."""


def in_pieces(
    view: txn.PathView,
    request: rpc_pb2.TxnRequest,
    grow: Callable[[int], None] = no_limit,
    body: list[bytes] | None = None,
) -> Generator[None, None, ranges.Answer]:
    """Execute a read-only txn a small piece at a time, with a pause after each.

    Arguments:
        view, grow, body: as of ``ranges.in_pieces``.
        request: checked already; it has ranges only.

    Returns:
        the view's revision, and the parts of the body of the TxnResponse.

    Raises:
        CompactedError, FutureRevisionError: a range asks for a revision that cannot be read.
    """
    succeeded = yield from compares.all_hold(view, request.compare)
    path = txn.Path(succeeded, request.success if succeeded else request.failure)
    txn.check_ranges(view, path)
    body = [] if body is None else body
    body.append(response.txn_body(succeeded, ()))
    for _, operation in path.operations:
        pieces: list[bytes] = []
        try:
            revision, _ = yield from ranges.in_pieces(view, operation, grow, pieces)
        except BaseException:
            body += pieces  # the answer is given up: it is freed by whoever has the rest
            raise
        header = response.revision_header(revision)
        answer = response.head(_RANGE_ANSWER, len(header) + sum(map(len, pieces))) + header
        body += (response.head(3, len(answer) + sum(map(len, pieces))) + answer, *pieces)
    return view.revision, body
