"""Reading long lists in pages; the number of keys in a page is estimated from the sizes of earlier keys.

    size = PageSize(1000)
    ... ask for size.keys ...
    size.took(answer.kvs)          # or size.failed(error): whether fewer keys may do

A page with a fixed number of keys may be a few kilobytes or exceed a member's limit, depending on the stored values.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Final, Protocol

from raftkv.errors import RESOURCE_EXHAUSTED, LimitedError, StatusError
from raftkv.pb import rpc_pb2

FIRST_KEYS: Final = 100
"""Number of keys in a first page, whose sizes are unknown."""
PAGE_BYTES: Final = 8 << 20
"""Target size of a page."""
PAGE_CUT: Final = 16
"""After a failed page, the number of keys is divided by this."""
PAGE_KEYS_MIN: Final = 16
"""Minimum number of keys after a failure for a reason other than size; after one for size it may drop to 1."""
PAGE_GROWTH: Final = 8
"""Maximum growth factor of the next page: large keys may follow small ones."""


class _Item(Protocol):
    @property
    def key(self) -> bytes: ...

    @property
    def value(self) -> bytes: ...


class PageSize:
    """The number of keys in the next page of a list.

    Arguments:
        keys_max: maximum number of keys in a page.
        first: maximum number of keys in the first page.

    Attributes:
        keys: number of keys in the next page.
    """

    def __init__(self, keys_max: int, first: int = FIRST_KEYS) -> None:
        self.keys = min(keys_max, first)
        self._keys_max = keys_max

    def took(self, items: Iterable[_Item]) -> None:
        """Adapt the number of keys to a page that was read."""
        count = size_bytes = 0
        for item in items:
            count += 1
            size_bytes += len(item.key) + len(item.value)
        if count:
            fitting = count * PAGE_BYTES // max(size_bytes, 1)
            self.keys = max(min(self._keys_max, PAGE_GROWTH * self.keys, fitting), 1)

    def failed(self, error: StatusError) -> bool:
        """Reduce the number of keys after a failure; return whether the page may have been too large."""
        before, is_too_large = self.keys, error.code == RESOURCE_EXHAUSTED and not isinstance(error, LimitedError)
        self.keys = max(before // PAGE_CUT, 1 if is_too_large else min(before, PAGE_KEYS_MIN))
        return is_too_large and before > 1


async def read_pages(
    call: Callable[[rpc_pb2.RangeRequest], Awaitable[rpc_pb2.RangeResponse]],
    request: rpc_pb2.RangeRequest,
    keys_max: int,
) -> AsyncGenerator[rpc_pb2.RangeResponse, None]:
    """Read a range of keys in pages, all at one revision.

    Arguments:
        call: sends a request to the cluster.
        request: request for the range; its limit, key and revision are overwritten.
        keys_max: maximum number of keys in a page.

    Raises:
        StatusError: a page could not be read, after retries with fewer keys if it was too large.
    """
    size = PageSize(keys_max)
    while True:
        request.limit = size.keys
        try:
            page = await call(request)
        except StatusError as error:
            if not size.failed(error):
                raise
            continue
        size.took(page.kvs)
        # The first answer fixes the revision. A member that lags refuses it rather than answer from older state.
        request.revision = request.revision or page.header.revision
        yield page
        if not page.more:
            return
        request.key = page.kvs[-1].key + b"\0"
