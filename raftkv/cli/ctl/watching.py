"""Many watchers on one stream, opened again elsewhere when its member is lost.

Owns the bookkeeping that makes a watch outlive its member: each watcher knows the revision that it waits for, and asks
the next member for it. No change is lost or told twice. Used by ``watch``, ``elect`` and ``make-mirror``, which need
the messages as they came (header and all); programs use ``raftkv.aio``.

    watching = Watching(client)
    watcher = watching.add(key, range_end, start_revision=7)
    async for answer in watcher:
        ...                            # the last answer has a cancel_reason

Creations are sent one after the other, so that an answer without an id (a refusal) belongs to the oldest one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Final

from raftkv.cli.ctl.session import remark, unanswered
from raftkv.cli.output.printer import WatchAnswer
from raftkv.client import Client
from raftkv.client.errors import plain_failures
from raftkv.client.rpc import methods
from raftkv.client.rpc.streams import Stream
from raftkv.errors import INTERNAL, UNAVAILABLE, CompactedError, FutureRevisionError, StatusError
from raftkv.pb import rpc_pb2

REQUIRE_LEADER: Final = (("hasleader", "true"),)
"""A member that has lost its leader ends the stream, instead of being silent for ever."""

RETRY_PAUSE_S: Final = 0.1
OUTAGE_TOLD_S: Final = 5.0
"""After so long without a member that answers, standard error says so: a wrong endpoint looks like a quiet key."""
QUEUED_MAX: Final = 256
"""Messages that wait for a slow watcher's owner; beyond, the stream is not read."""

EventStream = Stream[rpc_pb2.WatchResponse]


class Watcher:
    """One watcher; iterate over it."""

    def __init__(self, request: rpc_pb2.WatchCreateRequest) -> None:
        self.request = request
        self.ended = False
        self.answers: asyncio.Queue[WatchAnswer] = asyncio.Queue(QUEUED_MAX)

    async def __aiter__(self) -> AsyncIterator[WatchAnswer]:
        while True:
            answer = await self.answers.get()
            yield answer
            if answer.cancel_reason:
                return

    def passed(self, revision: int) -> None:
        """Everything up to the revision has come."""
        self.request.start_revision = max(self.request.start_revision, revision + 1)


class Watching:
    """The stream and its watchers. Its task ends with the ``async with`` block."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._watchers: list[Watcher] = []
        self._ids: dict[int, Watcher] = {}
        self._creating: deque[Watcher] = deque()
        self._stream: EventStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._failures: dict[str, str] = {}
        self._served_until = asyncio.get_running_loop().time()
        self._told = False

    async def __aenter__(self) -> Watching:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def add(
        self,
        key: bytes,
        range_end: bytes = b"",
        *,
        start_revision: int = 0,
        prev_kv: bool = False,
        progress_notify: bool = False,
    ) -> Watcher:
        """Make a watcher; with start revision 0 it begins now."""
        request = rpc_pb2.WatchCreateRequest(
            key=key,
            range_end=range_end,
            start_revision=start_revision,
            prev_kv=prev_kv,
            progress_notify=progress_notify,
        )
        watcher = Watcher(request)
        self._watchers.append(watcher)
        self._creating.append(watcher)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        elif len(self._creating) == 1:
            self._create_next()
        return watcher

    def request_progress(self) -> None:
        """Ask how far the stream has come; every watcher is told, if the member knows."""
        if self._stream is not None and not self._stream.done:
            self._stream.send_nowait(rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest()))

    async def _run(self) -> None:
        while True:
            try:
                stream = await self._client.stream(methods.WATCH, metadata=REQUIRE_LEADER)
            except StatusError as error:
                await self._end_all(error)
                return
            async with stream:
                try:
                    await self._read(stream)
                except StatusError as error:
                    if error.code not in (UNAVAILABLE, INTERNAL) and not self._client.forget_token(error):
                        await self._end_all(error)
                        return
                    self._note_outage(stream.endpoint, str(error))
                self._stream = None
            self._client.next_endpoint(stream.endpoint)
            await asyncio.sleep(RETRY_PAUSE_S)

    def _note_outage(self, endpoint: str, reason: str) -> None:
        """A stream has ended; say so, once in an outage, if none has served a watcher for long."""
        now = asyncio.get_running_loop().time()
        if self._ids:
            self._served_until, self._told = now, False
            self._failures.clear()
        self._failures[endpoint] = reason
        if self._told or now - self._served_until < OUTAGE_TOLD_S:
            return
        self._told = True
        for line in (*unanswered(plain_failures(self._failures)), "the watch goes on when a member answers"):
            remark(line)

    async def _read(self, stream: EventStream) -> None:
        self._stream = stream
        self._ids.clear()
        self._creating = deque(self._watchers)
        self._create_next()
        async for response in stream:
            await self._take(response)

    def _create_next(self) -> None:
        if self._creating and self._stream is not None and not self._stream.done:
            self._stream.send_nowait(rpc_pb2.WatchRequest(create_request=self._creating[0].request))

    async def _take(self, response: rpc_pb2.WatchResponse) -> None:
        if response.created:
            watcher = self._creating.popleft()
            if response.canceled:
                await self._end(watcher, WatchAnswer(None, cancel_reason=response.cancel_reason or "watch canceled"))
            else:
                self._ids[response.watch_id] = watcher
                if watcher.request.start_revision == 0:
                    watcher.passed(response.header.revision)
            self._create_next()
        elif response.watch_id == -1:
            for watcher in list(self._ids.values()):
                await self._deliver(watcher, response)
        elif watcher_with_id := self._ids.get(response.watch_id):
            await self._deliver(watcher_with_id, response)

    async def _deliver(self, watcher: Watcher, response: rpc_pb2.WatchResponse) -> None:
        if response.canceled:
            self._ids.pop(response.watch_id, None)
            reason = _reason(response)
            await self._end(watcher, WatchAnswer(response.header, (), response.compact_revision, reason))
            return
        events = response.events
        watcher.passed(events[-1].kv.mod_revision if events else response.header.revision)
        await watcher.answers.put(WatchAnswer(response.header, events))

    async def _end(self, watcher: Watcher, answer: WatchAnswer) -> None:
        self._watchers.remove(watcher)
        watcher.ended = True
        await watcher.answers.put(answer)

    async def _end_all(self, error: StatusError) -> None:
        for watcher in list(self._watchers):
            await self._end(watcher, WatchAnswer(None, cancel_reason=str(error)))


def _reason(response: rpc_pb2.WatchResponse) -> str:
    """Why a member ended a watcher, in the words of etcd's client."""
    if response.compact_revision:
        return CompactedError.text
    return response.cancel_reason or FutureRevisionError.text
