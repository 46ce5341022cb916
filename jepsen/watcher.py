"""A client that watches: several watchers on one stream, resumed on the next member when the stream ends.

It resumes exactly where a client library would: after the last event or bookmark that it received. It requests
bookmarks at random times, ends streams at random times, and leaves a member that is silent for a while. At the end of
the run it continues until all its watchers have reached the last revision.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio

from jepsen.client import open_channel
from jepsen.db import Member
from jepsen.history import Recorder
from jepsen.watches import Event, Kind, Message, Stream, Watched
from jepsen.wire import key_values
from raftkv.pb import rpc_pb2

WATCH = "/etcdserverpb.Watch/Watch"
CATCH_UP_S = 30.0
_SILENCE_S = 3.0
_ASK_S = (0.05, 0.6)
_ASK_LAST_S = 0.1
_RECONNECT_S = 0.05
_FILTERS = {"put": "NOPUT", "delete": "NODELETE"}


@dataclass(slots=True)
class Ending:
    """The end of a run: what watchers wait for, and the revision that each must reach."""

    over: asyncio.Event = field(default_factory=asyncio.Event)
    rev: int = 0


@dataclass(frozen=True, slots=True)
class Habits:
    """The behaviour of a watching client.

    Attributes:
        lives_s: bounds of the seconds after which the client ends a stream.
        slow_s: pause after each message (seconds), for a reader that does not keep up.
        lasting: whether to resume until the end of the run, or to use only one stream.
    """

    lives_s: tuple[float, float] = (2.0, 15.0)
    slow_s: float = 0.0
    lasting: bool = True


class WatchingClient:
    """A client with watchers that share streams.

    Arguments:
        name: name, unique in the run; watcher i is called ``<name>/<i>``.
        members: members to ask, in turn.
        wanted: request of each watcher.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        recorder: Recorder,
        rng: random.Random,
        wanted: Sequence[Watched],
        habits: Habits | None = None,
    ) -> None:
        self._members, self._recorder, self._rng = members, recorder, rng
        self._habits = habits or Habits()
        self._wanted = {f"{name}/{number}": watched for number, watched in enumerate(wanted)}
        self._attempt = 0
        self._streams: dict[str, Stream] = {}

    async def run(self, ending: Ending) -> None:
        """Watch until the end, or for one stream."""
        deadline: float | None = None
        while deadline is None or time.monotonic() < deadline:
            member = self._members[self._attempt % len(self._members)]
            # A write to a call that has ended raises grpc's InvalidStateError.
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
                await self._stream(member, ending)
            if not self._habits.lasting or (ending.over.is_set() and self._reached(ending.rev)):
                return
            if ending.over.is_set() and deadline is None:
                deadline = time.monotonic() + CATCH_UP_S
            await asyncio.sleep(_RECONNECT_S)

    async def _stream(self, member: Member, ending: Ending) -> None:
        """Run one stream, until it ends, is silent for too long, or is ended by this client."""
        streams = self._begin(member, ending)
        async with _opened(member) as call:
            try:
                for number, stream in enumerate(streams, start=1):
                    await asyncio.wait_for(call.write(_create(stream.request, number)), _SILENCE_S)
                asking = asyncio.create_task(self._ask(call, ending))
                try:
                    await self._read(call, streams, ending)
                finally:
                    asking.cancel()
            finally:
                now = time.monotonic_ns()
                for stream in streams:
                    stream.ended, stream.lives = now, (stream.lives[0], member.lives)

    def _begin(self, member: Member, ending: Ending) -> list[Stream]:
        """Return the watchers of a new stream; at the end of the run, without those that have received everything.

        These would begin at a future revision, where nothing is written any more; and a server does not answer a
        progress request while any watcher of the stream begins in the future.
        """
        now = time.monotonic_ns()
        begun = []
        for watcher, watched in self._wanted.items():
            before = self._streams.get(watcher)
            if before is not None and ending.over.is_set() and _has_reached(before, ending.rev):
                continue
            start = before.next_start() if before is not None else watched.start
            stream = Stream(watcher, self._attempt, member.number, replace(watched, start=start), now)
            stream.lives, stream.lasting = (member.lives, member.lives), self._habits.lasting
            self._streams[watcher] = stream
            self._recorder.streams.append(stream)
            begun.append(stream)
        self._attempt += 1
        return begun

    async def _read(self, call: Any, begun: Sequence[Stream], ending: Ending) -> None:
        streams = dict(enumerate(begun, start=1))
        until = time.monotonic() + self._rng.uniform(*self._habits.lives_s)
        while not (ending.over.is_set() and self._reached(ending.rev)):
            if time.monotonic() > until and not ending.over.is_set():
                return
            response = await asyncio.wait_for(call.read(), _SILENCE_S)
            if response is grpc.aio.EOF:
                return
            message = _message(response)
            for stream in [streams[response.watch_id]] if response.watch_id in streams else streams.values():
                stream.messages.append(message)
            if response.canceled:
                return
            if self._habits.slow_s and not ending.over.is_set():
                await asyncio.sleep(self._habits.slow_s)

    async def _ask(self, call: Any, ending: Ending) -> None:
        """Request bookmarks, which also shows whether the member is alive."""
        request = rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest())
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            while True:
                least_s, most_s = (_ASK_LAST_S, _ASK_LAST_S) if ending.over.is_set() else _ASK_S
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ending.over.wait(), self._rng.uniform(least_s, most_s))
                    await asyncio.sleep(_ASK_LAST_S)
                await call.write(request)

    def _reached(self, rev: int) -> bool:
        return all(_has_reached(stream, rev) for stream in self._streams.values())


def _has_reached(stream: Stream, rev: int) -> bool:
    return bool(stream.first) and stream.position() >= rev


@contextlib.asynccontextmanager
async def _opened(member: Member) -> AsyncIterator[Any]:
    channel = open_channel(member.address)
    try:
        call = channel.stream_stream(
            WATCH,
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=rpc_pb2.WatchResponse.FromString,
        )()
        yield call
        call.cancel()
    finally:
        await channel.close()


def _create(watched: Watched, number: int) -> Any:
    return rpc_pb2.WatchRequest(
        create_request=rpc_pb2.WatchCreateRequest(
            key=watched.key.encode(),
            range_end=watched.end.encode(),
            start_revision=watched.start,
            prev_kv=watched.previous,
            filters=[_FILTERS[kind] for kind in watched.without],
            fragment=watched.fragment,
            watch_id=number,
        )
    )


def _message(response: Any) -> Message:
    events = tuple(_event(event) for event in response.events)
    kind: Kind = "events" if events else "progress"
    if response.canceled:
        kind = "canceled"
    elif response.created:
        kind = "created"
    now = time.monotonic_ns()
    rev, compact = response.header.revision, response.compact_revision
    return Message(now, kind, rev, events, response.fragment, compact, response.cancel_reason)


def _event(event: Any) -> Event:
    previous = key_values([event.prev_kv])[0] if event.HasField("prev_kv") else None
    return Event("delete" if event.type else "put", key_values([event.kv])[0], previous)
