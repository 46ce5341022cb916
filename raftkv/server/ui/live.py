"""Live figures: one record a second to all viewers, encoded once.

    GET /ui/live      text/event-stream: "data: {...}\\n\\n" each second

    while there are viewers, each second:   own figures + those of the other members -> one record -> every viewer

Invariants
- Without viewers there is no task, no timer and no question to another member.
- A viewer holds one record, the newest: a slow reader misses some, and costs no memory.
- At most ``VIEWERS_MAX`` viewers at a time, in shares (``rpc/shares``): the oldest page of the greediest identity ends.
- The right of each is checked again with every record: a viewer that signs out, or loses its token or user, is cut off
  within a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from raftkv.rpc.shares import Identity, Shares, refusal

_log = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
VIEWERS_MAX: Final = 64
"""Open pages that look at one member: a few for each of its people, and a wall or two."""


class TooManyViewersError(Exception):
    """The limit of viewers is reached, and this identity has its share; the text says so."""


class Viewer:
    """One page that looks.

    Arguments:
        may_look: raises what refuses it, or returns False: no longer.
        identity: in whose share it falls.
    """

    def __init__(self, may_look: Callable[[], bool], identity: Identity) -> None:
        self.identity = identity
        self._may_look = may_look
        self._record: bytes | None = None
        self._has_news = asyncio.Event()
        self.is_over = False

    def offer(self, record: bytes) -> None:
        """Give it the newest record, in place of one that it has not read yet."""
        self._record = record
        self._has_news.set()

    def end(self) -> None:
        """Give it nothing more."""
        self.is_over = True
        self._has_news.set()

    async def records(self) -> AsyncIterator[bytes]:
        """Yield records as they come, until it may look no longer."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if self.is_over or not self._may_look():
                return
            record, self._record = self._record, None
            if record is not None:
                yield record


class Live:
    """Sends records to viewers.

    Arguments:
        collect: makes a record; called each second while there are viewers.
    """

    def __init__(self, collect: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._collect = collect
        self._viewers: dict[Viewer, None] = {}
        self._shares = Shares(VIEWERS_MAX)
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether records are made."""
        return self._task is not None

    def look(self, may_look: Callable[[], bool], identity: Identity) -> AsyncIterator[bytes]:
        """Return the records from now on, as server-sent events.

        Arguments:
            may_look: whether the viewer still may; asked before each record.
            identity: in whose share the page falls.

        Raises:
            TooManyViewersError: others have to close their pages first.
        """
        if self._is_closed or not self._shares.make_room(identity, 1, self._end_oldest):
            raise TooManyViewersError(refusal(identity, f"{self._shares.limit} pages that may look at one member"))
        return self._serve(Viewer(may_look, identity))

    def _end_oldest(self, identity: Identity) -> bool:
        viewer = next(viewer for viewer in self._viewers if viewer.identity == identity)
        viewer.end()
        self._leave(viewer)
        return True

    def _leave(self, viewer: Viewer) -> None:
        if viewer in self._viewers:
            del self._viewers[viewer]
            self._shares.give_back(viewer.identity, 1)

    async def _serve(self, viewer: Viewer) -> AsyncIterator[bytes]:
        # Here and not in ``look``: a page that left before the first byte was never a viewer.
        if self._is_closed or not self._shares.make_room(viewer.identity, 1, self._end_oldest):
            return
        self._viewers[viewer] = None
        self._shares.take(viewer.identity, 1)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        try:
            yield b"retry: 1000\n\n"
            async for record in viewer.records():
                yield record
        finally:
            self._leave(viewer)
            if not self._viewers:
                self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                record = encode(await self._collect())
            except Exception:
                # A figure that cannot be read is no reason to stop: the page says that it hears nothing.
                _log.exception("the dashboard's figures could not be read")
            else:
                for viewer in self._viewers:
                    viewer.offer(record)
            await asyncio.sleep(max(0.1, INTERVAL_S - (loop.time() - began)))

    def close(self) -> None:
        """End all streams: the member stops."""
        self._is_closed = True
        for viewer in list(self._viewers):
            viewer.end()
        self._stop()


def encode(record: dict[str, Any]) -> bytes:
    """Return a record as an event of a stream.

    >>> encode({"at": 1})
    b'data: {"at":1}\\n\\n'
    """
    return b"data: %s\n\n" % json.dumps(record, separators=(",", ":")).encode()
