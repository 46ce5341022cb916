"""Long lists: so many keys at once as one answer should have, by the bytes of those before.

    size = PageSize(1000)
    ... ask for size.keys ...
    size.took(answer.kvs)          # or size.failed(error): whether fewer keys may do

A page of a fixed number of keys is a few kilobytes or more than a member sends at once, by what others wrote there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Final, Protocol

from raftkv.errors import RESOURCE_EXHAUSTED, LimitedError, StatusError
from raftkv.pb import rpc_pb2

FIRST_KEYS: Final = 100
"""Keys of a first page: these may be of any size."""
PAGE_BYTES: Final = 8 << 20
"""About how much of a list is read at once."""
PAGE_CUT: Final = 16
"""A page that did not come is asked for again with so many times fewer keys."""
PAGE_KEYS_MIN: Final = 16
"""Unless it is too large: it may not have come for another reason than its size."""
PAGE_GROWTH: Final = 8
"""The next page has so many times more keys at most: small keys may stand before large ones."""


class _Item(Protocol):
    @property
    def key(self) -> bytes: ...

    @property
    def value(self) -> bytes: ...


class PageSize:
    """How many keys of one list are asked for next.

    Arguments:
        keys_max: of one page.
        first: keys of the first page, if these are fewer.

    Attributes:
        keys: of the next page.
    """

    def __init__(self, keys_max: int, first: int = FIRST_KEYS) -> None:
        self.keys = min(keys_max, first)
        self._keys_max = keys_max

    def took(self, items: Iterable[_Item]) -> None:
        """Note what came."""
        count = size_bytes = 0
        for item in items:
            count += 1
            size_bytes += len(item.key) + len(item.value)
        if count:
            fitting = count * PAGE_BYTES // max(size_bytes, 1)
            self.keys = max(min(self._keys_max, PAGE_GROWTH * self.keys, fitting), 1)

    def failed(self, error: StatusError) -> bool:
        """Note why a page did not come; return whether it may be that it was too large."""
        before, is_too_large = self.keys, error.code == RESOURCE_EXHAUSTED and not isinstance(error, LimitedError)
        self.keys = max(before // PAGE_CUT, 1 if is_too_large else min(before, PAGE_KEYS_MIN))
        return is_too_large and before > 1


async def read_pages(
    call: Callable[[rpc_pb2.RangeRequest], Awaitable[rpc_pb2.RangeResponse]],
    request: rpc_pb2.RangeRequest,
    keys_max: int,
) -> AsyncGenerator[rpc_pb2.RangeResponse, None]:
    """Yield an interval page by page, all as of one revision.

    Arguments:
        call: asks the cluster.
        request: for the interval; its limit, its key and its revision are set here.
        keys_max: of one page.

    Raises:
        StatusError: a page could not be read, though it was asked for with fewer keys if it was too large.
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
        # Pinned from the first answer on. A member that is behind would refuse it: then it is no snapshot of ours.
        request.revision = request.revision or page.header.revision
        yield page
        if not page.more:
            return
        request.key = page.kvs[-1].key + b"\0"
