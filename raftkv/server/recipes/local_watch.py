"""A watch of this process: what a client's watch stream is, with nothing between it and the hub.

    watch = LocalWatch(hub, b"name/", b"name0", 8, recipe.soon)
    response = await watch.next()          # rpc_pb2.WatchResponse with events
    watch.close()

It is a ``WatchStream`` whose call is here, so it has all that clients are promised: order, no gaps, catching up from
history. Responses that nobody takes count as bytes not sent: beyond a limit the watch falls behind and is served from
history later, so an idle reader costs a bounded amount of memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from raftkv import errors
from raftkv.pb import rpc_pb2
from raftkv.rpc.framing import MessageAssembler
from raftkv.rpc.shares import Identity
from raftkv.server.watch.hub import WatchHub
from raftkv.server.watch.stream import WatchStream

_MESSAGE_MAX_BYTES: Final = 2**31 - 1
_RESPONSE_OVERHEAD_BYTES: Final = 64


class LocalWatch:
    """Watches an interval from within the member.

    Arguments:
        hub: of the member.
        key, range_end: the interval, its end as on the wire.
        start_revision: the first revision wanted.
        soon: calls back in a turn that has room for another reader to go on.
        identity: in whose share it falls.
    """

    def __init__(
        self,
        hub: WatchHub,
        key: bytes,
        range_end: bytes,
        start_revision: int,
        soon: Callable[[Callable[[], None]], None],
        identity: Identity = "",
    ) -> None:
        self._arrived = asyncio.Event()
        self._soon = soon
        self._assembler = MessageAssembler(_MESSAGE_MAX_BYTES)
        self._error: errors.StatusError | None = None
        self._on_room: Callable[[], None] | None = None
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._stream = WatchStream(hub, self, 0, self.fail, identity=identity)
        create = rpc_pb2.WatchCreateRequest(key=key, range_end=range_end, start_revision=start_revision)
        self._stream.receive(rpc_pb2.WatchRequest(create_request=create).SerializeToString())

    async def next(self) -> rpc_pb2.WatchResponse:
        """Return the next response with events.

        Raises:
            CompactedError: history that was still to come is gone.
            StatusError: the watch was ended, as by ``fail``, or refused: there is no room for another.
        """
        while True:
            while not self._queue:
                if self._error is not None:
                    raise self._error
                self._arrived.clear()
                await self._arrived.wait()
            response = self._take()
            if response.canceled and not response.compact_revision:
                raise errors.TooManyRequestsError(response.cancel_reason)
            if response.canceled:
                raise errors.CompactedError(response.compact_revision)
            if response.events:
                return response

    def _take(self) -> rpc_pb2.WatchResponse:
        size_bytes, message = self._queue.popleft()
        self._queued_bytes -= size_bytes
        if self._on_room is not None:
            self._on_room()
        return rpc_pb2.WatchResponse.FromString(message)

    def fail(self, error: errors.StatusError) -> None:
        """End the watch: ``next`` raises once what came before is taken."""
        self._stream.flush()
        self._error = error
        self._arrived.set()

    def close(self) -> None:
        """Let go of the watch."""
        self._stream.close()

    # -- what the stream uses ----------------------------------------------------------------------------------------

    @property
    def send_buffer_size(self) -> int:
        """Bytes that nobody has taken."""
        return self._queued_bytes

    @property
    def connection_send_buffer_size(self) -> int:
        """Bytes that nobody has taken: there is no connection beside this stream."""
        return self._queued_bytes

    @property
    def crowded(self) -> bool:
        """Never."""
        return False

    def send_frames_nowait(self, frames: bytes, count: int) -> None:
        """Take responses."""
        for message in self._assembler.feed(frames):
            size_bytes = len(message) + _RESPONSE_OVERHEAD_BYTES
            self._queued_bytes += size_bytes
            self._queue.append((size_bytes, message))
        self._soon(self._arrived.set)

    def on_room(self, callback: Callable[[], None] | None) -> None:
        """Call back each time something was taken; None to stop."""
        self._on_room = callback
