"""The server side of a streaming call: an async iterator of requests and ``send``, or a listener without a task.

One task runs the handler of a ``StreamCall``. If the handler returns, the answer is OK; if it raises RpcError, the
answer is that status. Cancelling the call cancels the task. ``send`` waits while more than
``ServerLimits.stream_send_buffer_bytes`` of this stream is queued, so a client that does not read blocks only its own
handler.

A ``ListenedCall`` has no task: a listener takes each request as it arrives, and answers at once, or later from the
loop.

    def keep_alives(call: ListenedCall) -> None:        # called when the header has arrived; may raise RpcError
        call.listen(Stream(call))

    call.send_frames_nowait(frames, count)              # answers
    call.finish(frames, count)                          # the end: this call, ``fail_with``, or the client leaves

It serves many short streams: a task, its wake-ups and its cancellation cost three times as much as such a call. It does
not wait for space: a listener must check ``send_buffer_size`` itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from raftkv.rpc.framing import frame
from raftkv.rpc.http2 import OK_TRAILERS, RESPONSE_HEADERS, H2Error
from raftkv.rpc.http2.connection import LARGE_BYTES
from raftkv.rpc.inbox import Inbox
from raftkv.rpc.server.calls import ANSWERED, CANCELLED, KEPT_BYTES_MIN, KEPT_TIMES, OPEN, Carrier, ServerCall
from raftkv.rpc.status import Code, Headers, RpcError

if TYPE_CHECKING:
    from raftkv.rpc.server.router import Route

StreamHandler = Callable[["StreamCall"], Awaitable[None]]


class StreamCall(ServerCall):
    """A client-, server- or bidi-streaming call, as seen by its handler.

    ::

        async def echo(call: StreamCall) -> None:
            async for message in call:
                await call.send(message)
    """

    __slots__ = ("_drained", "_held_bytes", "_kept_bytes", "_on_room", "_sent_headers", "inbox")

    def __init__(self, carrier: Carrier, stream_id: int, headers: Headers, route: Route) -> None:
        super().__init__(carrier, stream_id, headers, route)
        self.inbox = Inbox(carrier.assembler(route.is_packed), partial(carrier.consume, stream_id))
        self._held_bytes = self._kept_bytes = 0
        self._drained: asyncio.Future[None] | None = None
        self._on_room: Callable[[], None] | None = None
        self._sent_headers = False

    # ---- called by handlers

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        message = await self.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    async def receive(self) -> bytes | None:
        """Return the next request message, or None when the client has half-closed."""
        message = await self.inbox.get()
        if self._held_bytes:
            self._hold(self.inbox.held_bytes)
        # Most streams have one request, and keep it until their end.
        if message is not None and len(message) > KEPT_BYTES_MIN and not self._kept_bytes and self._state == OPEN:
            self._kept_bytes = KEPT_TIMES * len(message)
            self._carrier.keep(self._kept_bytes)
        return message

    def put_back(self, message: bytes) -> None:
        """Return a received message to the front of the queue: the guard of the handler only inspected it."""
        self.inbox.put_back(message)

    def deliver_to(self, listener: Callable[[bytes], None]) -> None:
        """Pass every request message to ``listener`` as it arrives; ``receive`` then waits for the end."""
        self.inbox.deliver_to(listener)

    @property
    def has_room(self) -> bool:
        """Whether ``send`` would not wait; true at the end of the call."""
        return self._state != OPEN or self._carrier.account.has_room(self.send_buffer_size)

    async def wait_for_room(self) -> None:
        """Wait for space in this stream's send buffer. Make large messages afterwards: what waits is not counted."""
        while not self.has_room:
            await self._wait_drained()

    async def send(self, message: bytes) -> None:
        """Queue a response message, after waiting for space in this stream's send buffer."""
        await self.wait_for_room()
        if self._state == OPEN:
            self.send_nowait(message)
        else:
            await asyncio.sleep(0)  # lets a pending cancellation reach a handler that pauses nowhere else

    def send_nowait(self, message: bytes) -> None:
        """Queue a response message without waiting for space; ignored if the call has ended."""
        if self._state != OPEN:
            return
        carrier = self._carrier
        try:
            self.send_headers()
            if len(message) > LARGE_BYTES:
                carrier.send_in_slices(self.stream_id, message)
            else:
                carrier.send_data(self.stream_id, frame(message))
            self._count(1, len(message))
        except H2Error:
            return  # the close of the stream is about to be reported
        carrier.answered()

    def send_frames_nowait(self, frames: bytes, count: int) -> None:
        """Queue messages that already have their prefixes (``framing.PREFIX``): many small ones cost as much as one.

        Arguments:
            frames: messages, each with its prefix.
            count: number of messages.
        """
        if self._state != OPEN:
            return
        carrier = self._carrier
        try:
            if not self._sent_headers:
                self.send_headers()
            carrier.send_data(self.stream_id, frames)
            self._count(count, len(frames))
        except H2Error:
            return  # the close of the stream is about to be reported
        carrier.answered()

    def _count(self, messages: int, size: int) -> None:
        self.route.counts.sent += messages
        self.sent_bytes += size
        self._carrier.account.queue(size)

    def on_room(self, callback: Callable[[], None] | None) -> None:
        """Call back each time queued bytes have left and ``send`` would not wait; None to stop.

        For handlers that queue with ``send_nowait`` and check ``send_buffer_size`` themselves.
        """
        self._on_room = callback
        if callback is not None:
            self._carrier.drain_watch.add(self)
        elif self._drained is None:
            self._carrier.drain_watch.discard(self)

    def send_headers(self, metadata: Headers = ()) -> None:
        """Send the response header now, with initial metadata (header form). Only the first call has an effect."""
        if not self._sent_headers:
            self._sent_headers = True
            try:
                self._carrier.send_headers(self.stream_id, RESPONSE_HEADERS + metadata, False)
            except H2Error:
                return  # the close of the stream is about to be reported
            self._carrier.answered()

    @property
    def send_buffer_size(self) -> int:
        """Bytes of this stream that are queued and not yet taken by the connection."""
        return self._carrier.queued_size_of(self.stream_id)

    @property
    def connection_send_buffer_size(self) -> int:
        """Bytes of all streams of the connection that are queued and not yet taken by the connection."""
        return self._carrier.queued_size()

    @property
    def crowded(self) -> bool:
        """True while so many bytes wait, for this connection or for all, that a handler should queue no more."""
        account = self._carrier.account
        if account.budget.short:
            account.budget.wait(account)
        return account.crowded

    # ---- called by the core

    @property
    def crumbled(self) -> bool:
        """True if the unfinished message arrives in pieces that are far too small."""
        return self.inbox.assembler.crumbled

    @property
    def is_busy(self) -> bool:
        """True while received messages are not unpacked."""
        return self.inbox.assembler.is_busy

    def on_data(self, data: bytes, end_stream: bool) -> None:
        """Take a piece of the request stream."""
        carrier = self._carrier
        try:
            try:
                self.route.counts.received += self.inbox.feed(data)
            finally:
                held_bytes = self.inbox.held_bytes
                if held_bytes != self._held_bytes:
                    self._hold(held_bytes)
            if held_bytes:
                carrier.check_held()
            if end_stream:
                self._half_closed()
        except RpcError as error:
            self.request_done = end_stream
            self.abort(error)

    def _hold(self, size: int) -> None:
        held, self._held_bytes = self._held_bytes, size
        self._carrier.hold(size - held)

    def _half_closed(self) -> None:
        if self.inbox.assembler.is_busy:
            return
        self.request_done = True
        if self.inbox.assembler.held_bytes:
            raise RpcError(Code.INTERNAL, "unexpected EOF")
        self.inbox.end()

    def abort(self, error: RpcError) -> None:
        """Answer in place of the handler, and stop it."""
        if self._state == OPEN:
            self.fail_with(error)
            self._stop()

    def headers_sent(self) -> bool:
        """True if a status must be sent as trailers."""
        return self._sent_headers

    def released(self) -> None:
        """Stop the handler of a cancelled call, wake its sender, and return bytes to the windows."""
        self._hold(0)
        if self._kept_bytes:
            self._carrier.keep(-self._kept_bytes)
            self._kept_bytes = 0
        self.inbox.assembler.drop()
        self.inbox.discard()
        self.inbox.release()
        if self._state == ANSWERED and self.sent_bytes:
            self._carrier.account.leave(self.stream_id, self.send_buffer_size)
        self.drained()
        if self._state == CANCELLED:
            self._stop()

    def _stop(self) -> None:
        """Stop the handler: the call has ended."""

    def drained(self) -> None:
        """Wake the sender: the send buffer has space, or the call has ended."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._on_room is not None and self._state == OPEN:
            self._on_room()

    async def _wait_drained(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()
        self._carrier.drain_watch.add(self)
        try:
            await self._drained
        finally:
            self._drained = None
            if self._on_room is None:
                self._carrier.drain_watch.discard(self)

    def _finish_ok(self) -> None:
        if self._state != OPEN:
            return
        self._state = ANSWERED
        self.route.counts.answered += 1
        self._carrier.finished(self)
        try:
            self.send_headers()
            self._carrier.send_headers(self.stream_id, OK_TRAILERS, True)
        except H2Error:
            self._state = CANCELLED
        if self.observer is not None:
            self.observed(Code.OK)


class TaskCall(StreamCall):
    """A streaming call whose handler is a coroutine."""

    __slots__ = ("_task",)

    def __init__(self, carrier: Carrier, stream_id: int, headers: Headers, route: Route) -> None:
        super().__init__(carrier, stream_id, headers, route)
        self._task: asyncio.Task[None] | None = carrier.spawn(self._run())
        self._task.add_done_callback(self._ended)

    def _stop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Drop the task: a cancelled one keeps frames that refer to this call."""
        self._task = None

    async def _run(self) -> None:
        try:
            await self.route.handler(self)
        except asyncio.CancelledError:
            self.fail_with(RpcError(Code.UNAVAILABLE, "the server is stopping"))
            raise
        except Exception as error:
            self.fail_for(error)
        else:
            self._finish_ok()


ListenedHandler = Callable[["ListenedCall"], None]
"""Called when the call begins; must call ``listen``."""


class Listener(Protocol):
    """Serves one streaming call."""

    def receive(self, message: bytes) -> None:
        """Take a request. Raising RpcError ends the call."""

    def half_closed(self) -> None:
        """Note that the client sends no more requests."""

    def released(self) -> None:
        """Note that the call has ended. Called once, as the last method."""


class ListenedCall(StreamCall):
    """A streaming call that is served by a listener."""

    __slots__ = ("_listener",)

    def __init__(self, carrier: Carrier, stream_id: int, headers: Headers, route: Route) -> None:
        super().__init__(carrier, stream_id, headers, route)
        self._listener: Listener | None = None
        self.begin(route.handler)

    def begin(self, handler: ListenedHandler) -> None:
        """Call the handler, unless the call has ended. A guard that had to wait calls this later.

        Arguments:
            handler: sets the listener.
        """
        if self.done:
            return
        try:
            handler(self)
        except Exception as error:
            self.fail_for(error)

    def listen(self, listener: Listener) -> None:
        """Pass the client's messages to a listener; those that have already arrived, at once.

        Arguments:
            listener: serves this call alone.
        """
        self._listener = listener
        self.inbox.deliver_to(listener.receive)
        if self.request_done:
            listener.half_closed()

    def finish(self, frames: bytes = b"", count: int = 0) -> None:
        """Answer OK after the sent messages, unless the call has ended.

        Arguments:
            frames, count: last answers, as in ``send_frames_nowait``.
        """
        if frames and not self._finish_whole(frames, count):
            self.send_frames_nowait(frames, count)
        self._finish_ok()

    def _finish_whole(self, frames: bytes, count: int) -> bool:
        """Send the whole answer at once, as for a unary call. Returns whether that was possible."""
        if self._state != OPEN or self._sent_headers or not self._carrier.answer(self.stream_id, frames, True):
            return False
        self._sent_headers = True
        self._state = ANSWERED
        self.route.counts.sent += count
        self.route.counts.answered += 1
        self._carrier.finished(self)
        if self.observer is not None:
            self.observed(Code.OK)
        return True

    def _half_closed(self) -> None:
        super()._half_closed()
        if self._listener is not None and self.request_done:
            self._listener.half_closed()

    def released(self) -> None:
        """Tell the listener, and drop the reference to it: it usually holds the call."""
        super().released()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.released()
