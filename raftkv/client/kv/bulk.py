"""Many keys: puts and gets pipelined over the one connection, large intervals read piece by piece.

::

    results = await kv.put_many({"a": b"1", "b": b"2"})
    items = await kv.get_many(["a", "b", "missing"])                          # [KeyValue, KeyValue, None]
    async for page in kv.pages("jobs/", prefix=True, page_size=1000): ...     # RangeResults
    async for item in kv.scan("jobs/", prefix=True): ...                      # KeyValues

Puts and gets are single calls, not a transaction: each has its own revision, and they happen in any order. The first
failure stops the rest and is raised once those under way have ended; what was done before it stays done.

The first page fixes the revision; every other is read at that one, so what is read is a snapshot however long it takes
and whichever member answers. A page that fails is asked for again elsewhere, as every read. What is not bounded is
time: once the cluster has compacted that revision, the next page raises ``Compacted``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from raftkv.client.arguments import many, whole
from raftkv.client.keys import Text
from raftkv.client.kv.compares import LeaseLike
from raftkv.client.kv.kv import KV
from raftkv.client.kv.operations import GetRange
from raftkv.client.rpc import methods
from raftkv.client.scope import Part, Scope
from raftkv.client.values import KeyValue, PutResult, RangeResult

Given = TypeVar("Given")
Result = TypeVar("Result")

Pairs = (
    Mapping[Text, Text]
    | Mapping[str, str]
    | Mapping[str, bytes]
    | Mapping[bytes, str]
    | Mapping[bytes, bytes]
    | Iterable[tuple[Text, Text]]
)
"""Keys and values; spelt out because mappings are invariant in their keys."""

WINDOW = 128
"""Calls under way at once: enough to fill a member's batches, far below its limit of streams."""
WINDOW_MAX = 10_000
"""Each is a task: with more of them, making them would hold up the leases of the client."""
PAGE_SIZE = 1000
"""Keys a page: some 100 kB of short values."""


class Bulk(Part):
    """Calls for many keys."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self._kv = KV(scope)

    async def put_many(
        self,
        items: Pairs,
        *,
        lease: LeaseLike | None = None,
        window: int = WINDOW,
        timeout_s: float | None = None,
    ) -> list[PutResult]:
        """Write many keys; results in the order of ``items``.

        Arguments:
            items: keys and values; an iterator is drawn from as room is made.
            lease: of all of them.
            window: calls under way at once, up to ``WINDOW_MAX``.
            timeout_s: of each call; None: the client's.

        Raises:
            StatusError: of the first that failed; see ``definite``.
        """
        pairs: Iterable[tuple[Text, Text]] = items.items() if isinstance(items, Mapping) else many(items, "put_many")

        async def write(pair: tuple[Text, Text]) -> PutResult:
            if isinstance(pair, str | bytes) or len(pair) != 2:
                raise TypeError(f"put_many() takes a mapping, or pairs of a key and a value, not {pair!r}")
            return await self._kv.put(pair[0], pair[1], lease=lease, timeout_s=timeout_s)

        return await pipelined(write, pairs, window)

    async def get_many(
        self,
        keys: Iterable[Text],
        *,
        revision: int = 0,
        serializable: bool = False,
        max_staleness_s: float | None = None,
        window: int = WINDOW,
        timeout_s: float | None = None,
    ) -> list[KeyValue | None]:
        """Read many keys, in their order; None for those that do not exist. Arguments as for ``put_many``.

        Arguments:
            keys: which; an iterator is drawn from as room is made.
            revision, serializable, max_staleness_s: as for ``get``.
            window, timeout_s: as for ``put_many``.
        """

        async def read(key: Text) -> KeyValue | None:
            return await self._kv.get(
                key,
                revision=revision,
                serializable=serializable,
                max_staleness_s=max_staleness_s,
                timeout_s=timeout_s,
            )

        return await pipelined(read, many(keys, "get_many"), window)

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
        if whole(page_size, "page_size") < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        operation = GetRange(
            key, end, prefix, limit=page_size, revision=revision, keys_only=keys_only, serializable=serializable
        )
        request = operation.request(self.scope.space)
        while True:
            answer = await self.scope.call(methods.RANGE, request, timeout_s)
            # Pinned from the first answer on. A member that is behind would refuse it: then it is no snapshot of ours.
            request.revision = request.revision or answer.header.revision
            yield operation.result(answer, self.scope.space, request.revision)
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
        """Read an interval in pages, and give out key by key; arguments and errors are those of ``pages``.

        Arguments:
            key, end, prefix, keys_only, serializable: as for ``range``.
            page_size, revision, timeout_s: as for ``pages``.
        """
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


async def pipelined(call: Callable[[Given], Awaitable[Result]], given: Iterable[Given], window: int) -> list[Result]:
    """Call for each of ``given``, at most ``window`` at once; results in their order.

    Arguments:
        call: makes one call.
        given: what to call it with.
        window: calls under way at once.
    """
    if not 1 <= whole(window, "window") <= WINDOW_MAX:
        raise ValueError(f"window is a number from 1 to {WINDOW_MAX}, not {window}")
    run = _Run(call, enumerate(given))
    async with asyncio.TaskGroup() as group:
        for _ in range(window):
            group.create_task(run.work())
    if run.failure is not None:
        raise run.failure
    return [run.results[number] for number in range(len(run.results))]


class _Run(Generic[Given, Result]):
    """What the workers of one pipeline share."""

    def __init__(self, call: Callable[[Given], Awaitable[Result]], numbered: Iterator[tuple[int, Given]]) -> None:
        self.results: dict[int, Result] = {}
        self.failure: Exception | None = None
        self._call = call
        self._numbered = numbered

    async def work(self) -> None:
        """Take one after the other, until there are none or one has failed; never give up one under way."""
        while self.failure is None:
            try:
                drawn = next(self._numbered, None)
                if drawn is None:
                    return
                self.results[drawn[0]] = await self._call(drawn[1])
            except Exception as error:  # of a call, or of the iterator itself
                self.failure = self.failure or error
