"""Streaming calls: requests from a body, answers as lines, at the speed of the reader.

    exchange = StreamExchange(...)
    call = exchange.open(route, timeout_s)      # a StreamCall, whose handler runs as a task
    await exchange.begun()                      # the handler has sent something, or ended
    async for line in StreamBody(exchange, ...)

Messages of a handler wait here, and count like those of an HTTP/2 stream: the handler sees ``send_buffer_size``, waits
in ``send``, and is called back when there is space. So a client that reads slowly blocks only its own handler.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Generator
from copy import copy
from time import perf_counter
from typing import Any, Final

from google.protobuf.descriptor import Descriptor

from raftkv.loop.scheduler import Slices, Work
from raftkv.loop.timers import forget
from raftkv.pb.services import Method
from raftkv.rpc.framing import PREFIX, PREFIX_BYTES, frame
from raftkv.rpc.server.calls import ServerCall
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.status import Headers, RpcError
from raftkv.server.gateway.decoder import JsonError, Requests
from raftkv.server.gateway.encoder import SMALL_BYTES, encode_large, encoder_of, stream_error
from raftkv.server.gateway.exchange import Chunks, Exchange

UNREAD_MAX_BYTES: Final = 64 * 1024
"""Request bytes that a handler has not taken; above this size the body is not read."""

WHOLE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Messages up to this size are sent as one chunk of HTTP/1.1. Clients such as etcd3gw take each chunk for a line, as
etcd's gateway writes them. For the same reason no chunk has two lines."""

_LINE: Final = '{"result":'


class StreamExchange(Exchange):
    """The one streaming call of an HTTP request.

    Attributes:
        has_sent: whether a message of the answer has arrived.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.has_sent = False
        self._messages: deque[bytes] = deque()
        self._queued_bytes = 0
        self._is_over = False
        self._said = asyncio.Event()
        self._taken = asyncio.Event()
        self._feeder: asyncio.Task[None] | None = None

    # ---- requests

    def feed(self, call: StreamCall, message: bytes | None, rest: Requests | None, method: Method) -> None:
        """Pass requests to the call.

        Arguments:
            call: call created by ``open``.
            message: first request, or None.
            rest: provides the following requests; None: there are none.
            method: method of the call.
        """
        if message is not None:
            call.on_data(frame(message), False)
        if rest is None:
            call.on_data(b"", True)
        else:
            self._feeder = self.spawn(self._feed(call, rest, method))

    async def _feed(self, call: StreamCall, rest: Requests, method: Method) -> None:
        try:
            while not call.done and (message := await rest.next(method)) is not None:
                call.on_data(frame(message), False)
                while not call.done and call.inbox.unread > UNREAD_MAX_BYTES:
                    self._taken.clear()
                    await self._taken.wait()
        except JsonError:
            pass  # as in etcd, an invalid request ends the stream of requests
        finally:
            if not call.done:
                call.on_data(b"", True)

    def consume(self, stream_id: int, amount: int) -> None:
        """Continue reading the body: the handler has taken requests."""
        del stream_id, amount
        self._taken.set()

    # ---- answers

    async def begun(self) -> None:
        """Wait until the handler has sent a message, or has ended. As in etcd, a header alone does not count."""
        while not self.has_sent and not self._is_over:
            self._said.clear()
            await self._said.wait()

    @property
    def early_error(self) -> RpcError | None:
        """The error that ended the call before its first message."""
        return None if self.has_sent else self.error

    async def take(self) -> bytes | None:
        """Return the next message; None at the end of the call.

        Raises:
            RpcError: error that ended the call.
        """
        while not self._messages:
            if self._is_over:
                if self.error is not None:
                    raise copy(self.error)  # a raised error holds frames that refer to this object
                return None
            self._said.clear()
            await self._said.wait()
        message = self._messages.popleft()
        self._queued_bytes -= len(message) + PREFIX_BYTES
        return message

    def passed_on(self, size_bytes: int) -> None:
        """Wake the handler if there is space: the socket has taken text.

        Arguments:
            size_bytes: size of the text.
        """
        account = self.account
        account.left_bytes += size_bytes
        account.settle(0)
        if not (account.crowded and account.budget.short):
            room = self.limits.stream_send_buffer_bytes
            for call in [one for one in self.drain_watch if one.send_buffer_size <= room]:
                call.drained()

    def close(self) -> None:
        """End: the client has the whole answer, or has left."""
        feeder, self._feeder = self._feeder, None
        if feeder is not None and not feeder.done():
            feeder.cancel()
        self._messages.clear()
        self._queued_bytes = 0
        super().close()
        self.drain_watch.clear()

    def given_up(self) -> None:
        """Wake the task that waits for a message; ``error`` is set."""
        self._is_over = True
        self._said.set()
        self._taken.set()

    # ---- called by calls

    def finished(self, call: ServerCall) -> None:
        """Release a call that has ended."""
        if call.bucket is not None:
            forget(call)
        self._is_over = True
        self._said.set()
        self._taken.set()
        call.released()

    def answered(self) -> None:
        """Wake the reader: a message was queued."""
        self._said.set()

    def check_held(self) -> None:
        """Do nothing: the body is counted where it is read."""

    def wake(self) -> None:
        """Wake the handlers: the budget of all clients has room again."""
        for call in list(self.drain_watch):
            call.drained()

    def queued_size_of(self, stream_id: int) -> int:
        """Return the bytes of messages that the reader has not taken."""
        del stream_id
        return self._queued_bytes

    def queued_size(self) -> int:
        """Return the same, for the account."""
        return self._queued_bytes

    def queued_by_streams(self) -> list[int]:
        """Return the same, for the account."""
        return [self._queued_bytes] if self._queued_bytes else []

    def send_headers(self, stream_id: int, fields: Headers, end_stream: bool) -> None:
        """Do nothing: headers and trailers are not part of the lines."""

    def send_data(self, stream_id: int, frames: bytes) -> None:
        """Take messages with their prefixes."""
        del stream_id
        at = 0
        while at < len(frames):
            end = at + PREFIX_BYTES + PREFIX.unpack_from(frames, at)[1]
            self._messages.append(frames[at + PREFIX_BYTES : end])
            at = end
        self.has_sent = True
        self._queued_bytes += len(frames)

    def send_in_slices(self, stream_id: int, message: bytes) -> None:
        """Take a large message."""
        del stream_id
        self._messages.append(message)
        self.has_sent = True
        self._queued_bytes += len(message) + PREFIX_BYTES


class StreamBody(AsyncIterator[bytes]):
    """The lines of a call's answers, one after the other. Closing the body ends the call.

    Arguments:
        exchange: exchange that has begun.
        message_type: type of the answers.
        slices: runs the long work of the member.
    """

    def __init__(self, exchange: StreamExchange, message_type: type[Any], slices: Slices) -> None:
        self._exchange = exchange
        self._message_type = message_type
        self._encode = encoder_of(message_type.DESCRIPTOR)
        self._slices = slices
        self._chunks: Chunks | None = None
        self._sent_bytes = 0
        self._is_over = False

    async def __anext__(self) -> bytes:
        if self._is_over:
            await self.aclose()
            raise StopAsyncIteration
        self._exchange.passed_on(self._sent_bytes)
        self._sent_bytes = 0
        if self._slices.is_late:  # others have used the time of this pass of the loop
            await self._slices.result(_nothing, 1, self._exchange.queue)
        if self._chunks is None:
            try:
                message = await self._exchange.take()
            except RpcError as error:
                self._is_over = True
                return stream_error(error.code, error.text)
            if message is None:
                await self.aclose()
                raise StopAsyncIteration
            if len(message) <= SMALL_BYTES:
                started_at = perf_counter()
                text = self._line(message).encode()
                self._slices.spend(perf_counter() - started_at)
                self._sent_bytes = len(text)
                return text
            self._chunks = Chunks(
                _large_line(self._message_type.DESCRIPTOR, message), self._slices, self._exchange.queue
            )
            if len(message) <= WHOLE_BYTES_MAX:
                return await self._whole_line(self._chunks)
        chunk = await self._chunks.next()
        if not chunk:
            self._chunks = None
            return await self.__anext__()
        self._sent_bytes = len(chunk)
        return chunk

    async def _whole_line(self, chunks: Chunks) -> bytes:
        parts: list[bytes] = []
        while part := await chunks.next():
            parts.append(part)
        self._chunks = None
        line = b"".join(parts)
        self._sent_bytes = len(line)
        return line

    def _line(self, message: bytes) -> str:
        return _LINE + self._encode(self._message_type.FromString(message)) + "}\n"

    async def aclose(self) -> None:
        """Close everything: the client has the whole body, or has left."""
        self._is_over = True
        if self._chunks is not None:
            self._chunks.close()
        self._exchange.close()


def _nothing() -> Work[None]:
    """Do nothing: empty work that is only waited for."""
    yield from ()


def _large_line(descriptor: Descriptor, message: bytes) -> Generator[str, None, None]:
    yield _LINE
    yield from encode_large(descriptor, (message,))
    yield "}\n"
