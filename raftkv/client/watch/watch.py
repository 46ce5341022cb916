"""Watching keys: an endless iteration over changes that survives members.

::

    async for event in kv.watch("jobs/", prefix=True):
        print(event.type, event.key, event.value, event.revision)

    async with kv.watch("jobs/a") as watch:        # the cluster has confirmed it: what is written now is seen
        await kv.put("jobs/a", b"1")
        event = await anext(watch)

    page = await kv.range("jobs/", prefix=True)    # a copy, kept up to date
    async for event in kv.watch("jobs/", prefix=True, start_revision=page.revision + 1): ...

Guarantees: events come in the order of their revisions, each once, none left out, whichever members die meanwhile;
``next_batch`` never splits a revision. What the cluster has compacted before it could be delivered raises ``Compacted``
with the revision from which history still exists.

A reader that is slower than the changes costs nobody else anything: up to ``queue_bytes`` wait here, then the client
gives the watch up at the cluster and asks for the rest later, from where its reader has come to (see ``watcher``).

A watch ends when its reader breaks off and drops it, by ``cancel``, or at the end of ``async with``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING

from raftkv.client.arguments import seconds
from raftkv.client.keys import Space, Text
from raftkv.client.scope import Part
from raftkv.client.values import Event
from raftkv.client.watch.watcher import QUEUE_BYTES, Request, Watcher

if TYPE_CHECKING:
    from raftkv.client.watch.hub import WatchHub
    from raftkv.pb import rpc_pb2


class Watch:
    """One watch; made by ``Client.watch``. One task reads it."""

    def __init__(self, hub: WatchHub, space: Space, watcher: Watcher, timeout_s: float) -> None:
        self._hub = hub
        self._space = space
        self._watcher = watcher
        self._timeout_s = timeout_s
        self._events: deque[Event] = deque()
        self._handed_out = 0
        self._loop = asyncio.get_running_loop()
        hub.add(watcher)

    def __repr__(self) -> str:
        request, state = self._watcher.request, "ended" if self._watcher.ended else "open"
        end = f" to {request.range_end!r}" if request.range_end else ""
        return f"<Watch of {request.key!r}{end}: {state}, next revision {self._watcher.next_revision or 'unknown'}>"

    @property
    def revision(self) -> int:
        """Everything up to this revision has been handed out: the place to go on from, plus one. 0: not known yet."""
        if self._watcher.is_empty and not self._events:
            return max(self._watcher.next_revision - 1, 0)
        return self._handed_out

    @property
    def is_parked(self) -> bool:
        """Whether its reader is so far behind that the client has ended it at the cluster until more is read."""
        return self._watcher.parked

    async def ready(self, timeout_s: float | None = None) -> None:
        """Wait until the cluster has confirmed it: from then on no change can be missed.

        Arguments:
            timeout_s: None: the client's.

        Raises:
            Compacted: its start revision is gone.
            EndpointsFailed: no member confirmed it in time; it goes on trying.
        """
        limit_s = self._timeout_s if timeout_s is None else seconds(timeout_s, "timeout_s")
        watcher = self._watcher
        try:
            async with asyncio.timeout(limit_s):
                while not watcher.created and not watcher.ended:
                    await watcher.changed()
        except TimeoutError:
            raise self._hub.unreachable(limit_s) from None
        if watcher.error is not None:
            raise watcher.error

    async def next_batch(self) -> list[Event]:
        """Return the next changes, at least one, of whole revisions; none: the watch was cancelled.

        Raises:
            Compacted: what should come next is gone.
            WatchCanceled: a member refused to go on, or the client was closed.
        """
        if self._events:
            events, self._events = list(self._events), deque()
        else:
            events = await self._fetch()
        if events:
            self._handed_out = events[-1].revision
        return events

    async def _fetch(self) -> list[Event]:
        response = await self._hub.next_response(self._watcher)
        convert = self._space.event
        return [] if response is None else [convert(event) for event in response.events]

    def cancel(self) -> None:
        """End it; what has come and was not read is dropped."""
        self._events.clear()
        self._hub.remove(self._watcher)
        while not self._watcher.is_empty:
            self._watcher.take()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if not self._events:
            self._events.extend(await self._fetch())
            if not self._events:
                raise StopAsyncIteration
        event = self._events.popleft()
        if not self._events:
            self._handed_out = event.kv.mod_revision
        return event

    async def __aenter__(self) -> Watch:
        try:
            await self.ready()
        except BaseException:
            self.cancel()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        watcher = getattr(self, "_watcher", None)
        if watcher is None or watcher.ended or self._loop.is_closed():
            return
        try:
            # Objects may be collected on any thread.
            self._loop.call_soon_threadsafe(self._hub.remove, watcher)
        except RuntimeError:
            return  # the loop was closed meanwhile, and the stream with it


async def responses(hub: WatchHub, watcher: Watcher) -> AsyncGenerator[rpc_pb2.WatchResponse, None]:
    """Watch with the messages of members as they come, header and all; for programs that pass them on.

    Those with events, in order and each event once; others if the request asks for progress. The watch ends when this
    generator is closed: wrap it in ``aclosing``.

    Arguments:
        hub: of the client.
        watcher: what to watch; a member that ends it for good leaves its message in ``watcher.refusal``.

    Raises:
        CompactedError: what should come next is gone.
        StatusError: a member refused to go on.
    """
    hub.add(watcher)
    try:
        while (response := await hub.next_response(watcher)) is not None:
            yield response
    finally:
        hub.remove(watcher)


class Watches(Part):
    """Watches."""

    def watch(
        self,
        key: Text,
        end: Text | None = None,
        *,
        prefix: bool = False,
        start_revision: int = 0,
        prev_kv: bool = False,
        no_put: bool = False,
        no_delete: bool = False,
        queue_bytes: int = QUEUE_BYTES,
    ) -> Watch:
        """Watch a key or an interval; begins at once.

        Arguments:
            key, end, prefix: as for ``range``.
            start_revision: from then on; 0: what is new when the cluster gets to know (see ``Watch.ready``).
            prev_kv: events carry the key as it was before.
            no_put, no_delete: leave such events out.
            queue_bytes: what may wait here for a slow reader.

        Raises:
            WatchCanceled: the client is closed.
        """
        first, range_end = self.scope.space.interval(key, end, prefix=prefix)
        request = Request(first, range_end, start_revision, prev_kv, no_put, no_delete)
        return Watch(self.scope.hub, self.scope.space, Watcher(request, queue_bytes), self.scope.timeout_s)
