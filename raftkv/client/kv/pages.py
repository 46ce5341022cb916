"""Reading many keys piece by piece, all as of one revision.

::

    async for page in kv.pages("jobs/", prefix=True, page_size=1000): ...     # RangeResults
    async for item in kv.scan("jobs/", prefix=True): ...                      # KeyValues

The first page fixes the revision; every other is read at that one, so what is read is a snapshot however long it takes
and whichever member answers. A page that fails is asked for again elsewhere, as every read. What is not bounded is
time: once the cluster has compacted that revision, the next page raises ``Compacted``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from raftkv.client.kv.operations import GetRange
from raftkv.client.rpc import methods
from raftkv.client.scope import Scope
from raftkv.client.space import Text
from raftkv.client.values import KeyValue, RangeResult

PAGE_SIZE = 1000
"""Keys a page: some 100 kB of short values."""


class Pages(Scope):
    """The part of a client that reads large intervals."""

    async def pages(
        self,
        key: Text,
        end: Text | None = None,
        *,
        prefix: bool = False,
        page_size: int = PAGE_SIZE,
        revision: int = 0,
        keys_only: bool = False,
        serializable: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RangeResult, None]:
        """Read an interval in pages.

        Arguments:
            key, end, prefix, keys_only, serializable: as for ``range``.
            page_size: keys a page.
            revision: as of which; 0: the present one.
            timeout_s: for each page; None: the client's.

        Raises:
            Compacted: the revision is gone.
            StatusError: a page could not be read in time.
        """
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        operation = GetRange(
            key, end, prefix, limit=page_size, revision=revision, keys_only=keys_only, serializable=serializable
        )
        request = operation.request(self.space)
        while True:
            answer = await self.core.call(methods.RANGE, request, timeout_s=limit_s)
            # Pinned from the first answer on. A member that is behind would refuse it: then it is no snapshot of ours.
            request.revision = request.revision or answer.header.revision
            yield operation.result(answer, self.space, request.revision)
            if not answer.more:
                return
            request.key = answer.kvs[-1].key + b"\0"

    async def scan(
        self,
        key: Text,
        end: Text | None = None,
        *,
        prefix: bool = False,
        page_size: int = PAGE_SIZE,
        revision: int = 0,
        keys_only: bool = False,
        serializable: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[KeyValue, None]:
        """As ``pages``, key by key."""
        async for page in self.pages(
            key,
            end,
            prefix=prefix,
            page_size=page_size,
            revision=revision,
            keys_only=keys_only,
            serializable=serializable,
            timeout_s=timeout_s,
        ):
            for item in page.items:
                yield item
