"""The client side of a streaming call: ``send``, ``half_close``, and an async iterator of responses.

::

    stream = channel.stream("/pkg.Echo/Bidi")
    await stream.send(b"one")
    stream.half_close()
    async for message in stream:
        …

The iteration ends when the server answers OK, and raises RpcError otherwise. Unread responses keep the stream's window
closed: for a slow reader at most one window and one message are held. A stream that is not read to its end must be
cancelled: use ``async with``, or call ``cancel``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from raftkv.loop.timers import Expiring, forget
from raftkv.rpc.client.calls import DEADLINE_TEXT
from raftkv.rpc.framing import MessageAssembler, frame
from raftkv.rpc.http2 import H2Error
from raftkv.rpc.inbox import Inbox
from raftkv.rpc.status import Code, Headers, RpcError

if TYPE_CHECKING:
    from raftkv.rpc.client.channel import Channel
    from raftkv.rpc.client.core import ClientCore

_LARGE_BYTES = 64 * 1024


class ClientStream:
    """One streaming call.

    Attributes:
        headers: initial metadata of the server (header form), once it has arrived.
        trailers: trailing metadata (header form), once the call has ended.
        error: error that ended the call; None while it runs, and after OK.
        done: True once the call has ended.
        room_bytes: ``send`` waits while more than this is queued; the channel's option unless set.
    """

    def __init__(self, channel: Channel, headers: Headers, assembler: MessageAssembler) -> None:
        self.assembler: MessageAssembler | None = assembler
        self.bucket: dict[Expiring, None] | None = None
        self.deadline: float | None = None
        self.done = False
        self.error: RpcError | None = None
        self.headers: Headers = ()
        self.room_bytes = channel.options.stream_send_buffer_bytes
        self.stream_id = 0
        self.trailers: Headers = ()
        self.wait_for_ready = False
        self._channel = channel
        self._core: ClientCore | None = None
        self._drained: asyncio.Future[None] | None = None
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._half_closed = False
        self._inbox = Inbox(assembler, _nothing_yet)
        self._request_headers = headers

    # ---- called by users

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        message = await self._inbox.get()
        if message is None:
            raise StopAsyncIteration
        return message

    async def receive(self) -> bytes | None:
        """Return the next response message; None after the last. Raises RpcError if the call failed."""
        return await self._inbox.get()

    def deliver_to(self, listener: Callable[[bytes], None]) -> None:
        """Pass every message to ``listener`` as it arrives; ``receive`` then returns only the end. See ``Inbox``."""
        self._inbox.deliver_to(listener)

    async def send(self, message: bytes) -> None:
        """Queue a request message, after waiting for space in the send buffer.

        Raises:
            RpcError: the call has ended.
        """
        while not self.done and not self.has_send_room:
            await self._wait_drained()
        self.send_nowait(message)

    def send_at_once(self, messages: Iterable[bytes]) -> None:
        """Send request messages now, before the end of the turn, without waiting for space. RpcError as ``send``."""
        core = self._core
        if self.done or core is None:
            raise self.error or RpcError(Code.CANCELLED, "the call has ended")
        for message in messages:
            self._queue(core, message)
        core.flush()

    def send_nowait(self, message: bytes) -> None:
        """Queue a request message without waiting for space. RpcError as ``send``."""
        if self.done:
            raise self.error or RpcError(Code.CANCELLED, "the call has ended")
        if self._half_closed:
            raise RuntimeError("send after half_close")
        if self._core is None:
            self._early.append(message)
            self._early_bytes += len(message)
        else:
            self._queue(self._core, message)
            self._core.wake()

    def half_close(self) -> None:
        """End the request stream: no more messages can be sent."""
        if self._half_closed or self.done:
            return
        self._half_closed = True
        if self._core is not None:
            self._end_request(self._core)

    def cancel(self) -> None:
        """Cancel the call: its stream is reset, unread messages are dropped, reads raise CANCELLED."""
        self._give_up(RpcError(Code.CANCELLED, "context canceled", definite=self._core is None))

    @property
    def under_way(self) -> bool:
        """True once the call has a connection; nothing of it was sent before."""
        return self._core is not None

    @property
    def send_buffer_size(self) -> int:
        """Bytes of this stream that are queued and not yet taken by the connection."""
        if self._core is None:
            return self._early_bytes
        return self._core.h2.queued_body_size(self.stream_id)

    @property
    def has_send_room(self) -> bool:
        """Whether ``send`` would queue a message at once."""
        return self.send_buffer_size <= self.room_bytes

    @property
    def unread_bytes(self) -> int:
        """Bytes of responses that have arrived and were not read."""
        return self._inbox.unread

    async def __aenter__(self) -> ClientStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    # ---- called by channel and core

    def begin(self, core: ClientCore) -> None:
        """Open the stream on a connection with a free stream."""
        core.start(self)

    def request_headers(self) -> Headers:
        """Return the request's header fields."""
        return self._request_headers

    def started(self, core: ClientCore) -> None:
        """Send the messages queued before: the stream is open now."""
        self._core = core
        self._inbox.consume = partial(core.consume_of, self.stream_id)
        early, self._early, self._early_bytes = self._early, [], 0
        for message in early:
            self._queue(core, message)
        core.wake()
        if self._half_closed:
            self._end_request(core)
        self.drained()

    def on_headers(self, headers: Headers) -> None:
        """Keep the server's initial metadata."""
        self.headers = headers

    def on_message(self, message: bytes) -> None:
        """Never called: a stream has its assembler from the start, so data comes through ``on_data``."""
        raise NotImplementedError

    def on_data(self, data: bytes) -> None:
        """Take a piece of the response stream."""
        self._inbox.feed(data)

    def on_end(self, error: RpcError | None, trailers: Headers) -> None:
        """End the call: its stream has ended."""
        forget(self)
        if self.done:
            return
        self.done = True
        self.error = error
        self.trailers = trailers
        if error is None:
            self._inbox.end()
        else:
            self._inbox.fail(error)
        self._reset_if_open()
        self.drained()

    def _reset_if_open(self) -> None:
        """Reset a stream that the server has answered before our half was closed: nothing more is needed."""
        if self._core is not None and not self._half_closed:
            self._half_closed = True
            self._core.reset(self.stream_id)

    def on_refused(self) -> bool:
        """Return False: a refused stream fails as ``definite``, since its messages are not kept for a retry."""
        return False

    def fail(self, error: RpcError) -> None:
        """End a call that was never sent."""
        self.on_end(error, ())

    def expire(self) -> None:
        """Fail the call: its deadline has passed."""
        self._give_up(RpcError(Code.DEADLINE_EXCEEDED, DEADLINE_TEXT, definite=self._core is None))

    def _give_up(self, error: RpcError) -> None:
        forget(self)
        if self.done:
            return
        self.done = True
        self.error = error
        if self._core is not None:
            self._core.forget(self)
        else:
            self._channel.withdraw(self)
        self._inbox.discard()
        self._inbox.fail(error)
        self.drained()

    def drained(self) -> None:
        """Wake the sender: the send buffer has space, or the call has ended."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def _wait_drained(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()
        core = self._core
        if core is not None:
            core.drain_watch.add(self)
        try:
            await self._drained
        finally:
            self._drained = None
            if core is not None:
                core.drain_watch.discard(self)

    def _queue(self, core: ClientCore, message: bytes) -> None:
        try:
            if len(message) > _LARGE_BYTES:
                core.h2.send_message(self.stream_id, message)
            else:
                core.h2.send_data(self.stream_id, frame(message))
        except H2Error:
            pass  # the stream's end is about to be reported

    def _end_request(self, core: ClientCore) -> None:
        try:
            core.h2.end_stream(self.stream_id)
        except H2Error:
            return  # as above
        core.wake()


def _nothing_yet(amount: int) -> None:
    """Ignore consumed bytes: none can arrive before the stream is open."""
    del amount
