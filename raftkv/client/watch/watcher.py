"""One watcher: what it asked for, how far it has come, what its reader has not taken yet. No I/O.

Invariants:
1. ``next_revision`` is right behind the last revision that was queued or known to hold nothing for it: a watcher that
   is created again from there misses nothing. It never goes back, and what lies before it is not queued again.
2. A batch holds whole revisions, so a reader never sees a part of one.
3. The queue is bounded: once it holds ``queue_bytes`` the hub gives the watcher up at the cluster (``parked``), and
   asks for the rest from ``next_revision`` when half of it is read. Others are not held up, and memory does not grow;
   the price is that a reader which is slower than the compactions of the cluster meets ``Compacted``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from raftkv.client.arguments import whole
from raftkv.pb import rpc_pb2

QUEUE_BYTES = 4 * 1024 * 1024
"""Events that may wait for the reader of one watcher, as they came over the wire."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is watched: an interval as the store knows it, and which of its events.

    ``progress`` queues responses without events too, which say how far the watch has come.
    """

    key: bytes
    range_end: bytes = b""
    start_revision: int = 0
    prev_kv: bool = False
    no_put: bool = False
    no_delete: bool = False
    progress: bool = False


class Watcher:
    """The state of one watcher.

    Attributes:
        next_revision: where it goes on; 0: at whatever is new when the cluster creates it.
        cluster_id: of the cluster that has confirmed it; 0: none has, or it has not said.
        created: the cluster has confirmed it once.
        doubted: it was refused since it was last created, and is tried again with a new token.
        parked: its queue is full, nothing is asked for.
        ended: it gets nothing more; ``error`` says why, if it was not its reader's wish.
        refusal: the response by which a member canceled it for good; None: there was none.
        id: on the present stream; 0: it is not there.
    """

    __slots__ = (
        "_queued_bytes",
        "_responses",
        "_waiters",
        "cluster_id",
        "created",
        "doubted",
        "ended",
        "error",
        "id",
        "next_revision",
        "parked",
        "queue_bytes",
        "refusal",
        "request",
    )

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
        """Return the message that creates it, from where it has come to."""
        request = self.request
        create = rpc_pb2.WatchCreateRequest(
            key=request.key,
            range_end=request.range_end,
            start_revision=self.next_revision,
            # Keeps the resume point of an idle watcher ahead of compaction.
            progress_notify=True,
            prev_kv=request.prev_kv,
            watch_id=self.id,
        )
        if request.no_put:
            create.filters.append(rpc_pb2.WatchCreateRequest.NOPUT)
        if request.no_delete:
            create.filters.append(rpc_pb2.WatchCreateRequest.NODELETE)
        return rpc_pb2.WatchRequest(create_request=create)

    def confirm(self, revision: int, cluster_id: int = 0) -> None:
        """Note that a cluster has created it while its store was at ``revision``."""
        if not self.next_revision:
            self.next_revision = revision + 1
        self.cluster_id = cluster_id or self.cluster_id
        self.created = True
        self.doubted = False
        self._wake()

    def is_of_another(self, cluster_id: int) -> bool:
        """Tell if its revisions are those of another cluster than this one."""
        return 0 != self.cluster_id != cluster_id != 0

    def accept(self, response: rpc_pb2.WatchResponse, size_bytes: int) -> None:
        """Queue a response with events; one without says that there are none up to its revision.

        Arguments:
            response: of the member.
            size_bytes: as it came over the wire.
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
        self._queue(response, size_bytes)

    def show_progress(self, response: rpc_pb2.WatchResponse, size_bytes: int) -> None:
        """Queue a response without events, if the reader wants these.

        Arguments:
            response: of the member.
            size_bytes: as it came over the wire.
        """
        if self.request.progress:
            self._queue(response, size_bytes)

    def advance(self, revision: int) -> None:
        """Note that everything up to ``revision`` has been sent."""
        self.next_revision = max(self.next_revision, revision + 1)

    def _queue(self, response: rpc_pb2.WatchResponse, size_bytes: int) -> None:
        self._responses.append((response, size_bytes))
        self._queued_bytes += size_bytes
        self._wake()

    @property
    def is_full(self) -> bool:
        """Whether its reader is so far behind that it must be parked."""
        return self._queued_bytes >= self.queue_bytes

    @property
    def has_room(self) -> bool:
        """Whether its reader has caught up so far that it may go on after it was parked."""
        return self._queued_bytes <= self.queue_bytes // 2

    def end(self, error: Exception | None = None, refusal: rpc_pb2.WatchResponse | None = None) -> None:
        """Accept nothing more; what is queued can still be read.

        Arguments:
            error: why, if it was not its reader's wish.
            refusal: the response by which the member canceled it.
        """
        if not self.ended:
            self.ended = True
            self.error = error
            self.refusal = refusal
            self._wake()

    # ---- for the reader

    @property
    def is_empty(self) -> bool:
        """Nothing is queued."""
        return not self._responses

    def take(self) -> rpc_pb2.WatchResponse:
        """Take the oldest response; only if there is one."""
        response, size_bytes = self._responses.popleft()
        self._queued_bytes -= size_bytes
        return response

    async def changed(self) -> None:
        """Wait until something happens to it."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
