"""Watches that survive member failures: events in revision order, each exactly once.

    member 1 ==stream==> hub: every watcher of the client ---> Watcher: next_revision, queue ---> Watch: events
        x                 |                                                               or ---> responses, as sent
    member 2 ==stream==>  |  recreated, each from its own next_revision

::

    async for event in kv.watch("jobs/", prefix=True):
        print(event.type, event.key, event.value, event.revision)

    async with kv.watch("jobs/a") as watch:        # confirmed by the cluster: later writes are seen
        await kv.put("jobs/a", b"1")
        event = await anext(watch)

    page = await kv.range("jobs/", prefix=True)    # a copy, kept up to date
    async for event in kv.watch("jobs/", prefix=True, start_revision=page.revision + 1): ...

Invariants:

- A watcher is recreated from the revision after the last one that it has queued, or that is known to have no events
  for it.
- ``next_batch`` never splits a revision.
- A slow reader affects only itself: at most about ``queue_bytes`` wait here. Then the client cancels the watcher at the
  member (``parked``) and requests the rest later, from the reader's position.
- If the cluster compacts events before the client has received them, the watch raises ``Compacted`` with the first
  revision that is still available.

A watch ends by ``cancel``, at the end of ``async with``, or when its reader leaves the loop and drops it.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from raftkv.client.arguments import seconds, whole
from raftkv.client.errors import (
    ANOTHER_LOOP,
    CLIENT_CLOSED,
    EndpointsFailed,
    HistoryReplaced,
    StreamLost,
    WatchCanceled,
    from_status,
)
from raftkv.client.rpc import methods
from raftkv.client.rpc.retry import BASE_S, MAX_S, Backoff, is_transient
from raftkv.client.scope import Part, Space, Text
from raftkv.client.values import Event
from raftkv.errors import (
    CODE_NAMES,
    PERMISSION_DENIED,
    RETRY_AFTER,
    UNAVAILABLE,
    UNKNOWN,
    CompactedError,
    LimitedError,
    StatusError,
)
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError

if TYPE_CHECKING:
    from raftkv.client.rpc.core import Client, Stream

# -- watcher --------------------------------------------------------------------------------------------------------
#
# The state of one watcher: its request, its progress, and the queue of its reader. No I/O.
#
# Invariants:
#
# 1. ``next_revision`` follows the last revision that was queued or is known to have no events for the watcher, so a
#    watcher recreated from there misses nothing. It never decreases, and older events are not queued again.
# 2. A batch holds whole revisions, so a reader never sees a part of one.
# 3. The queue is bounded: once it holds ``queue_bytes``, the hub cancels the watcher at the cluster (``parked``), and
#    requests the rest from ``next_revision`` when half of the queue is read. Other watchers continue, and memory does
#    not grow. A reader slower than the compactions of the cluster gets ``Compacted``.

QUEUE_BYTES = 4 * 1024 * 1024
"""Limit of the queued events of one watcher, by their size on the wire."""


@dataclass(frozen=True, slots=True)
class Request:
    """The range to watch, as the store knows it, and the selection of its events.

    With ``progress``, responses without events are queued too; they show how far the watch has come.
    """

    key: bytes
    range_end: bytes = b""
    start_revision: int = 0
    prev_kv: bool = False
    no_put: bool = False
    no_delete: bool = False
    progress: bool = False
    keys_only: bool = False
    max_value_bytes: int = 0


class Watcher:
    """The state of one watcher.

    Attributes:
        next_revision: revision to continue from; 0: the next revision when the cluster creates the watcher.
        cluster_id: id of the cluster that confirmed the watcher; 0: unconfirmed or unknown.
        created: whether the cluster has ever confirmed the watcher.
        doubted: whether it was refused since it was last created, and is retried with a new token.
        parked: whether its queue is full, and it is cancelled at the cluster.
        ended: whether it receives nothing more; ``error`` is the reason, unless the reader ended it.
        refusal: response with which a member canceled it for good; None: none.
        id: id on the current stream; 0: not on the stream.
    """

    __slots__ = (
        "_queued_bytes", "_responses", "_waiters", "cluster_id", "created", "doubted", "ended",
        "error", "id", "next_revision", "parked", "queue_bytes", "refusal", "request",
    )  # fmt: skip

    def __init__(self, request: Request, queue_bytes: int = QUEUE_BYTES) -> None:
        self.request = request
        self.queue_bytes = whole(queue_bytes, "queue_bytes")
        self.next_revision = request.start_revision
        self.id = 0
        self.cluster_id = 0
        self.created = False
        self.doubted = False
        self.parked = False
        self.ended = False
        self.error: Exception | None = None
        self.refusal: rpc_pb2.WatchResponse | None = None
        self._responses: deque[tuple[rpc_pb2.WatchResponse, int]] = deque()
        self._queued_bytes = 0
        self._waiters: list[asyncio.Future[None]] = []

    # ---- for the hub

    def to_message(self) -> rpc_pb2.WatchRequest:
        """Return the message that creates the watcher at its current position."""
        request = self.request
        create = rpc_pb2.WatchCreateRequest(
            key=request.key,
            range_end=request.range_end,
            start_revision=self.next_revision,
            # Keeps the resume point of an idle watcher ahead of compaction.
            progress_notify=True,
            prev_kv=request.prev_kv,
            watch_id=self.id,
            keys_only=request.keys_only,
            max_value_bytes=request.max_value_bytes,
        )
        if request.no_put:
            create.filters.append(rpc_pb2.WatchCreateRequest.NOPUT)
        if request.no_delete:
            create.filters.append(rpc_pb2.WatchCreateRequest.NODELETE)
        return rpc_pb2.WatchRequest(create_request=create)

    def confirm(self, revision: int, cluster_id: int = 0) -> None:
        """Record that a cluster has created the watcher while its store was at ``revision``."""
        if not self.next_revision:
            self.next_revision = revision + 1
        self.cluster_id = cluster_id or self.cluster_id
        self.created = True
        self.doubted = False
        self._wake()

    def is_of_another(self, cluster_id: int) -> bool:
        """Return whether the watcher's revisions belong to another cluster than this one."""
        return 0 != self.cluster_id != cluster_id != 0

    def accept(self, response: rpc_pb2.WatchResponse, size_bytes: int) -> None:
        """Queue a response with events; a response without events means that there are none up to its revision.

        Arguments:
            response: response of the member.
            size_bytes: size on the wire.
        """
        events = response.events
        if not events:
            self.advance(response.header.revision)
            self.show_progress(response, size_bytes)
            return
        if events[0].kv.mod_revision < self.next_revision:
            del events[: sum(event.kv.mod_revision < self.next_revision for event in events)]
            if not events:
                return
        self.next_revision = events[-1].kv.mod_revision + 1
        if self.request.keys_only or self.request.max_value_bytes:
            self._filter(events)
            if not events:
                return
        self._queue(response, size_bytes)

    def _filter(self, events: Any) -> None:
        """Remove events and values that the request excludes; raftkv members do not send them, etcd members do."""
        bytes_max = self.request.max_value_bytes
        for number in reversed(range(len(events))):
            event = events[number]
            if not event.type and 0 < bytes_max < len(event.kv.value):
                del events[number]
            elif self.request.keys_only:
                event.kv.ClearField("value")
                if event.HasField("prev_kv"):
                    event.prev_kv.ClearField("value")

    def show_progress(self, response: rpc_pb2.WatchResponse, size_bytes: int) -> None:
        """Queue a response without events, if the reader has requested such responses.

        Arguments:
            response: response of the member.
            size_bytes: size on the wire.
        """
        if self.request.progress:
            self._queue(response, size_bytes)

    def advance(self, revision: int) -> None:
        """Record that all events up to ``revision`` have been sent."""
        if revision >= self.next_revision:
            self.next_revision = revision + 1
            self._wake()

    def _queue(self, response: rpc_pb2.WatchResponse, size_bytes: int) -> None:
        self._responses.append((response, size_bytes))
        self._queued_bytes += size_bytes
        self._wake()

    @property
    def is_full(self) -> bool:
        """Whether the queue is full, so that the watcher must be parked."""
        return self._queued_bytes >= self.queue_bytes

    @property
    def has_room(self) -> bool:
        """Whether at least half of the queue is free, so that a parked watcher may continue."""
        return self._queued_bytes <= self.queue_bytes // 2

    def end(self, error: Exception | None = None, refusal: rpc_pb2.WatchResponse | None = None) -> None:
        """Accept no more responses; queued ones can still be read.

        Arguments:
            error: the reason, unless the reader ended the watch.
            refusal: response with which the member canceled the watcher.
        """
        if not self.ended:
            self.ended = True
            self.error = error
            self.refusal = refusal
            self._wake()

    # ---- for the reader

    @property
    def is_empty(self) -> bool:
        """Whether the queue is empty."""
        return not self._responses

    def take(self) -> rpc_pb2.WatchResponse:
        """Remove and return the oldest response; the queue must not be empty."""
        response, size_bytes = self._responses.popleft()
        self._queued_bytes -= size_bytes
        return response

    async def changed(self) -> None:
        """Wait until the watcher's state changes."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


# -- hub ------------------------------------------------------------------------------------------------------------
#
# All watchers of a client on one stream to one endpoint; when the stream ends, on a stream to the next endpoint.
#
# Owns the stream and the guarantee that no event is lost or seen twice: when a stream ends, every watcher is recreated
# on the next one from its own ``next_revision``. A member without a leader ends the stream (``hasleader``); pings of
# the connection detect a member that does not answer. In both cases the next endpoint is used.
#
# Members confirm creates in order, and a refused create has no id; ``_asked`` keeps this order. An id is used only
# once, so late responses for a cancelled watcher are dropped.
#
# A watcher whose next stream leads to a cluster with another id, for example one restored from a backup, is ended: the
# revisions that it has seen reappear there with other contents.
#
# Idle watchers: their resume point must advance, or compaction overtakes it. Each watcher is created with
# ``progress_notify``, and the hub periodically requests the progress of the whole stream. An answer applies only to
# watchers that were confirmed before the request. Members before etcd 3.6 get no requests, because they may answer
# before they have sent all events that the answer covers.

PROGRESS_INTERVAL_S: Final = 30.0
"""Seconds between progress requests for idle watchers."""
_AGAIN: Final = re.compile(
    rf"{re.escape(LimitedError.text)} \(raftkv: .*; {RETRY_AFTER.decode()}: (\d{{1,12}})\)", re.DOTALL
)
_REASON: Final = re.compile(r"rpc error: code = (\w+) desc = (.*)", re.DOTALL)
_CODES: Final = {name: code for code, name in CODE_NAMES.items()}
_HAS_LEADER: Final = (("hasleader", "true"),)
_ALL_WATCHERS: Final = -1
_NO_WATCHER: Final = 0
_SAFE_PROGRESS: Final = (3, 6)
_QUESTIONS_MAX: Final = 64
"""Maximum number of pending progress requests: members drop some, and answers beyond this number are ignored."""


class WatchHub:
    """The watchers of one client.

    Arguments:
        core: connection to the cluster.
        progress_interval_s: seconds between progress requests.
        heard_of: called with the id of the cluster that confirms a watcher.
    """

    def __init__(
        self,
        core: Client,
        progress_interval_s: float = PROGRESS_INTERVAL_S,
        heard_of: Callable[[int], object] = lambda cluster_id: None,
    ) -> None:
        self.failures: dict[str, str] = {}
        """For each endpoint, why no stream could be opened there; empty while a stream works."""
        self.failing_since = 0.0
        """Loop time of the first of ``failures``."""
        self.on_failure: Callable[[], None] | None = None
        """Called after each failed stream."""
        self.progress_interval_s = progress_interval_s
        self._core = core
        self._heard_of = heard_of
        self.watchers: dict[Watcher, None] = {}
        """All watchers that have not ended."""
        self._by_id: dict[int, Watcher] = {}
        self._asked: deque[tuple[int, Watcher]] = deque()
        self._confirmations = 0
        self._confirmed_at: dict[int, int] = {}
        self._progress_asked: deque[int] = deque()
        self._last_id = 0
        self._stream: Stream[rpc_pb2.WatchResponse] | None = None
        self._tells_safely: bool | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    # ---- for watches

    def add(self, watcher: Watcher) -> None:
        """Add a watcher, which then receives events; must be called on the loop.

        Raises:
            StatusError: the client is closed.
            RuntimeError: called on another loop than the client's.
            TypeError, ValueError: the request cannot be encoded.
        """
        if self._closed:
            raise WatchCanceled(CLIENT_CLOSED)
        if self._task is not None and self._task.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError(ANOTHER_LOOP)  # the watcher would be served on that loop, or never
        watcher.to_message()  # an invalid request must fail here, before it ends the shared stream
        self.watchers[watcher] = None
        if self._stream is not None:
            self._create(watcher)
        elif self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._on_run_end)

    def remove(self, watcher: Watcher) -> None:
        """Remove a watcher, which then receives nothing more."""
        self.watchers.pop(watcher, None)
        self._withdraw(watcher)
        watcher.end()

    async def next_response(self, watcher: Watcher) -> rpc_pb2.WatchResponse | None:
        """Wait for the next response of a watcher and return it; None: the reader has ended the watch.

        Raises:
            CompactedError: the next events are compacted; ``HistoryReplaced``: the cluster's history was replaced.
            WatchCanceled: a member refused to continue, or the client was closed.
        """
        while watcher.is_empty:
            if watcher.error is not None:
                raise watcher.error
            if watcher.ended:
                return None
            await watcher.changed()
        response = watcher.take()
        if watcher.parked and watcher.has_room and not watcher.ended:
            watcher.parked = False
            if self._stream is not None:
                self._create(watcher)
        return response

    def request_progress(self) -> None:
        """Request the progress of the stream, for all watchers that report progress to their readers.

        Resume points do not advance: members before etcd 3.6 may answer before they have sent all events.
        """
        self._progress_asked.append(_NO_WATCHER)
        self._send(rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest()))

    async def ask_progress(self) -> bool:
        """Request progress, to advance idle watchers; while one watcher lags, the member does not answer.

        Returns:
            False: the member was not asked, because it may answer before it has sent all events that the answer covers.
        """
        stream = self._stream
        if stream is None:
            return True  # the next stream shows the progress, or is asked later
        if self._tells_safely is None:
            is_safe = await self._tells_progress_safely(stream.endpoint)
            if stream is not self._stream:
                return True
            self._tells_safely = is_safe
        if self._tells_safely:
            self._ask_now()
        return self._tells_safely

    def unreachable(self, timeout_s: float) -> EndpointsFailed:
        """Return the error for a timeout while waiting for the confirmation of a watcher."""
        return EndpointsFailed(self.failures, timeout_s, definite=True)

    async def close(self) -> None:
        """End every watcher."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._end_all(WatchCanceled(CLIENT_CLOSED))

    # ---- requests

    def _create(self, watcher: Watcher) -> None:
        self._last_id += 1
        watcher.id = self._last_id
        self._by_id[watcher.id] = watcher
        self._asked.append((watcher.id, watcher))
        self._send(watcher.to_message())

    def _withdraw(self, watcher: Watcher) -> None:
        watch_id = watcher.id
        if self._forget_id(watcher):
            cancel = rpc_pb2.WatchCancelRequest(watch_id=watch_id)
            self._send(rpc_pb2.WatchRequest(cancel_request=cancel))

    def _forget_id(self, watcher: Watcher) -> bool:
        watch_id, watcher.id = watcher.id, 0
        self._confirmed_at.pop(watch_id, None)
        return self._by_id.pop(watch_id, None) is not None

    def _send(self, request: rpc_pb2.WatchRequest) -> None:
        if self._stream is not None:
            with suppress(StatusError):  # the stream has ended; its reader will notice
                self._stream.send_nowait(request)

    # ---- the stream

    async def _run(self) -> None:
        backoff = Backoff()
        while self.watchers:
            endpoint, token = self._core.endpoint, ""
            try:
                stream = await self._core.stream(methods.WATCH, endpoint, metadata=_HAS_LEADER)
                token = stream.token
                async with stream:
                    await self._serve(stream, backoff)
                error: StatusError = StreamLost("the member has ended the stream")
            except StatusError as failed:
                error = failed
            finally:
                self._stream = None
            renews = self._core.forget_token(error, token)
            # A stream of several watchers may have ended because of one; recreated, each gets a separate answer.
            is_for_some = error.code == PERMISSION_DENIED and bool(self._confirmed_at)
            if not (renews or is_transient(error, wait_for_room=True) or is_for_some):
                self._end_all(error)
                return
            self._note_failure(endpoint, str(error))
            if not renews:
                self._core.next_endpoint(endpoint)
            await backoff.wait()

    def _note_failure(self, endpoint: str, reason: str) -> None:
        if not self.failures:
            self.failing_since = asyncio.get_running_loop().time()
        self.failures[endpoint] = reason
        if self.on_failure is not None:
            self.on_failure()

    def _on_run_end(self, task: asyncio.Task[None]) -> None:
        # An unexpected error, for example malformed bytes, must not leave readers waiting for ever.
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._end_all(WatchCanceled(f"watch canceled: {type(error).__name__}: {error}"))

    async def _serve(self, stream: Stream[rpc_pb2.WatchResponse], backoff: Backoff) -> None:
        """Create every watcher on a new stream and distribute the responses, until the stream ends."""
        self._stream = stream
        self._tells_safely = None
        self._by_id.clear()
        self._asked.clear()
        self._confirmed_at.clear()
        self._progress_asked.clear()
        for watcher in list(self.watchers):
            if not watcher.parked:
                self._create(watcher)
        asking = asyncio.get_running_loop().create_task(self._ask_for_progress(stream))
        try:
            while (message := await _receive(stream)) is not None:
                self._dispatch(rpc_pb2.WatchResponse.FromString(message), len(message))
                if backoff.failures:
                    backoff.reset()
                    self.failures.clear()
        finally:
            asking.cancel()

    def _dispatch(self, response: rpc_pb2.WatchResponse, size_bytes: int) -> None:
        if response.created:
            self._on_created(response)
        elif response.canceled:
            if (watcher := self._by_id.get(response.watch_id)) is not None:
                self._give_up(watcher, response)
        elif response.watch_id == _ALL_WATCHERS:
            self._on_progress(response, size_bytes)
        elif (watcher := self._by_id.get(response.watch_id)) is not None:
            watcher.accept(response, size_bytes)
            if watcher.is_full:
                watcher.parked = True
                self._withdraw(watcher)

    def _on_created(self, response: rpc_pb2.WatchResponse) -> None:
        if not self._asked:
            return
        asked_id, watcher = self._asked.popleft()
        if self._by_id.get(asked_id) is not watcher:
            return  # cancelled before it was confirmed
        header = response.header
        self._heard_of(header.cluster_id)
        if watcher.is_of_another(header.cluster_id):
            self._withdraw(watcher)
            self.watchers.pop(watcher, None)
            watcher.end(HistoryReplaced())
        elif response.canceled and (again_s := _again_s(watcher, response.cancel_reason)):
            self._forget_id(watcher)
            asyncio.get_running_loop().call_later(again_s + Backoff().next_s(), self._create_again, watcher)
        elif response.canceled:
            self._give_up(watcher, response)
        else:
            self._confirmations += 1
            self._confirmed_at[asked_id] = self._confirmations
            watcher.confirm(header.revision, header.cluster_id)

    def _create_again(self, watcher: Watcher) -> None:
        """Create a watcher again after a rate limit refused it, unless the present stream has it already."""
        if watcher in self.watchers and not watcher.id and not watcher.parked and self._stream is not None:
            self._create(watcher)

    def _give_up(self, watcher: Watcher, response: rpc_pb2.WatchResponse) -> None:
        """End a watcher that the member canceled for good; if another stream can serve it, end the stream instead."""
        error: StatusError = CompactedError(response.compact_revision)
        if not response.compact_revision:
            error = _error_of(response.cancel_reason)
            token = "" if self._stream is None else self._stream.token
            if error.code == UNAVAILABLE or self._core.forget_token(error, token):
                raise StreamLost(str(error))  # the next stream may succeed
            # etcd 3.5 refuses a watch with an expired token as if a permission were missing.
            is_doubtful = error.code == PERMISSION_DENIED and not watcher.doubted
            if is_doubtful and self._core.renew_token():
                for one in self.watchers:
                    one.doubted = True  # after a refusal on the next stream, with a new token, no retry
                raise StreamLost(str(error))
        self._forget_id(watcher)
        self.watchers.pop(watcher, None)
        watcher.end(error, response)

    def _end_all(self, error: Exception) -> None:
        watchers, self.watchers = self.watchers, {}
        for watcher in watchers:
            watcher.end(error)

    # ---- progress

    async def _ask_for_progress(self, stream: Stream[rpc_pb2.WatchResponse]) -> None:
        await asyncio.sleep(self.progress_interval_s)
        while not stream.done:
            if not await self.ask_progress():
                return
            await asyncio.sleep(self.progress_interval_s)

    def _ask_now(self) -> None:
        """Request progress, and remember which watchers are confirmed by now."""
        if self._confirmed_at:
            if len(self._progress_asked) < _QUESTIONS_MAX:
                self._progress_asked.append(self._confirmations)
            self._send(rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest()))

    def _on_progress(self, response: rpc_pb2.WatchResponse, size_bytes: int) -> None:
        for watch_id in self._confirmed_at:
            self._by_id[watch_id].show_progress(response, size_bytes)
        # Members drop requests, so the oldest pending one may not be the answered one, but it is the safe assumption.
        if not self._progress_asked:
            return
        limit = self._progress_asked.popleft()
        for watch_id, confirmed_at in self._confirmed_at.items():
            if confirmed_at <= limit:
                self._by_id[watch_id].advance(response.header.revision)

    async def _tells_progress_safely(self, endpoint: str) -> bool:
        try:
            answer = await self._core.call_at(endpoint, methods.STATUS, rpc_pb2.StatusRequest(), timeout_s=5.0)
        except StatusError:
            return False
        found = re.match(r"(\d+)\.(\d+)", answer.version)
        return found is not None and (int(found[1]), int(found[2])) >= _SAFE_PROGRESS


async def _receive(stream: Stream[rpc_pb2.WatchResponse]) -> bytes | None:
    try:
        return await stream.call.receive()
    except RpcError as error:
        raise from_status(error.code, error.text, definite=error.definite) from None


def _again_s(watcher: Watcher, reason: str) -> float:
    """Return the seconds until a watcher refused by a limit is created again; 0: never.

    A watcher that was created before, on any stream, always continues, because other watches may end and free a place.
    """
    if (found := _AGAIN.fullmatch(reason)) is not None:
        return max(int(found[1]) / 1000, BASE_S)
    return MAX_S if watcher.created and reason.startswith(LimitedError.text) else 0.0


def _error_of(reason: str) -> StatusError:
    """Return the error in a cancel reason, if the reason contains a status."""
    found = _REASON.fullmatch(reason)
    if found is None:
        return WatchCanceled(f"watch canceled: {reason}" if reason else "watch canceled by the member")
    return from_status(_CODES.get(found[1], UNKNOWN), found[2], definite=True)


class Watch:
    """One watch; created by ``Client.watch``. Only one task may read it."""

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
        """The revision up to which all events were returned; continue from the next one. 0: unknown."""
        if self._watcher.is_empty and not self._events:
            return max(self._watcher.next_revision - 1, 0)
        return self._handed_out

    @property
    def is_parked(self) -> bool:
        """Whether the reader is so far behind that the client has cancelled the watcher at the cluster for now."""
        return self._watcher.parked

    async def ready(self, timeout_s: float | None = None) -> None:
        """Wait until the cluster has confirmed the watch: later changes cannot be missed.

        Arguments:
            timeout_s: None: the client's.

        Raises:
            Compacted: the start revision is compacted.
            EndpointsFailed: no member confirmed the watch in time; the watch keeps trying.
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
        """Return the next changes, at least one, of whole revisions; an empty list: the watch was cancelled.

        Raises:
            Compacted: the next events are compacted.
            WatchCanceled: a member refused to continue, or the client was closed.
        """
        if self._events:
            events, self._events = list(self._events), deque()
        else:
            events = await self._fetch()
        if events:
            self._handed_out = events[-1].revision
        return events

    async def next_step(self) -> list[Event] | None:
        """Like ``next_batch``, but an empty list means that only ``revision`` has advanced; None: cancelled."""
        known = self.revision
        watcher = self._watcher
        while watcher.is_empty and not self._events and not watcher.ended:
            if self.revision > known:
                return []
            await watcher.changed()
        return await self.next_batch() or None

    def expect(self, cluster_id: int) -> None:
        """Set the cluster of the start revision; another cluster's history ends the watch. 0: unknown."""
        self._watcher.cluster_id = self._watcher.cluster_id or cluster_id

    async def _fetch(self) -> list[Event]:
        response = await self._hub.next_response(self._watcher)
        convert = self._space.event
        return [] if response is None else [convert(event) for event in response.events]

    def cancel(self) -> None:
        """End the watch; responses that were not read are dropped."""
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

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        watcher = getattr(self, "_watcher", None)
        if watcher is None or watcher.ended or self._loop.is_closed():
            return
        with suppress(RuntimeError):  # the loop was closed, and the stream with it
            # The garbage collector may run on any thread.
            self._loop.call_soon_threadsafe(self._hub.remove, watcher)


async def responses(hub: WatchHub, watcher: Watcher) -> AsyncGenerator[rpc_pb2.WatchResponse, None]:
    """Watch with the members' unmodified messages, headers included; for programs that forward them.

    Yields messages with events, in order and each event once, and others if the request asks for progress. The watch
    ends when this generator is closed: wrap it in ``aclosing``.

    Arguments:
        hub: hub of the client.
        watcher: watcher to add; if a member ends it for good, the message is in ``watcher.refusal``.

    Raises:
        CompactedError: the next events are compacted.
        StatusError: a member refused to continue.
    """
    hub.add(watcher)
    try:
        while (response := await hub.next_response(watcher)) is not None:
            yield response
    finally:
        hub.remove(watcher)


class Watches(Part):
    """Methods for watches."""

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
        keys_only: bool = False,
        max_value_bytes: int = 0,
        queue_bytes: int = QUEUE_BYTES,
    ) -> Watch:
        """Watch a key or a range, starting at once.

        Arguments:
            key, end, prefix: as for ``range``.
            start_revision: first revision; 0: changes after the cluster creates the watch (see ``Watch.ready``).
            prev_kv: whether events carry the key as it was before.
            no_put, no_delete: whether to leave such events out.
            keys_only: whether to leave values out; raftkv members then do not send them.
            max_value_bytes: leave out puts of larger values, in the same way; 0: no limit.
            queue_bytes: limit of the queue for a slow reader.

        Raises:
            WatchCanceled: the client is closed.
        """
        first, range_end = self.scope.space.interval(key, end, prefix=prefix)
        most = whole(max_value_bytes, "max_value_bytes")
        request = Request(first, range_end, start_revision, prev_kv, no_put, no_delete, False, keys_only, most)
        return Watch(self.scope.hub, self.scope.space, Watcher(request, queue_bytes), self.scope.timeout_s)
