"""One HTTP request as the carrier of one call, and the body of its answer.

The handlers, the guard and the audit are those of gRPC, and so are the call objects. Only the layer below the call
differs: answers are stored for the writer of the HTTP response instead of queued as frames.

    call = exchange.open(route)            # UnaryCall
    route.handler(call, message)           # the handler of gRPC, with its guard
    pieces = await exchange.outcome()      # pieces of the answer; raises RpcError for any other status than OK

A stored answer counts with the answers that wait for clients (``rpc.server.budget``) until ``close``.

The text of a large answer is generated while the client reads it (``LargeBody``), in the member's slices, so no body
blocks the loop. When the body ends, or the client leaves, the exchange, its call and its share of the budget are
closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from copy import copy
from functools import partial
from typing import Any, Final

from raftkv.loop.cycle_free import FREE_BYTES_PER_STEP, free_in_steps
from raftkv.loop.fair import Identity
from raftkv.loop.scheduler import Slices, Work
from raftkv.loop.timers import forget
from raftkv.rpc.framing import MessageAssembler
from raftkv.rpc.server.calls import Carrier, Peer, ServerCall, UnaryCall
from raftkv.rpc.server.router import Route
from raftkv.rpc.server.server import Server
from raftkv.rpc.shares import queue_of
from raftkv.rpc.status import Code, Headers, RpcError

CALL: Final = 1
"""The stream id of the only call of an exchange."""

LEFT: Final = RpcError(Code.CANCELLED, "context canceled")


class Exchange(Carrier):
    """The one call of an HTTP request. It is never severed: it carries no keep-alives whose connection could be lost.

    Arguments:
        server: server whose methods are called.
        peer: the client.
        headers: metadata of the call.

    Attributes:
        on_given_up: called when the answer is dropped because others need the memory.
    """

    def __init__(self, server: Server, peer: Peer, headers: Headers) -> None:
        super().__init__(server.limits, server.environment(), peer)
        self.call: ServerCall | None = None
        self.on_given_up: Callable[[], None] | None = None
        self._headers = headers
        self._pieces: Sequence[bytes] | None = None
        self.error: RpcError | None = None
        """Error that ended the call, if any."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def queue(self) -> Identity:
        """Queue in which the answer waits: that of the user, once known, else of the client (``rpc/shares``)."""
        return queue_of(self.account.identity)

    def open(self, route: Route, timeout_s: float | None) -> Any:
        """Create the call.

        Arguments:
            route: route of its method.
            timeout_s: seconds after which it fails; None: never.
        """
        self.call = call = route.open(self, CALL, self._headers, route)
        if timeout_s is not None and not call.done:
            now = self._environment.clock()
            self._environment.wheel.add(call, now + timeout_s, now)
        return call

    def run(self, call: UnaryCall, message: bytes) -> None:
        """Call the handler of a unary call.

        Arguments:
            call: call created by ``open``.
            message: serialized request.
        """
        call.request_done = True
        began_s = self.clock()
        call.run(message)
        self._environment.answers.uses.charge(self.account.identity, self.clock() - began_s, 1, len(message))

    async def outcome(self) -> Sequence[bytes]:
        """Wait for the answer.

        Returns:
            The message of the answer, in pieces.

        Raises:
            RpcError: the call ended with another status than OK.
        """
        if self._pieces is None and self.error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.error is not None:
            raise copy(self.error)  # a raised error holds frames that refer to this object
        return self._pieces or ()

    def close(self) -> None:
        """End: the client has its answer, or has left. A call that is still open is cancelled."""
        call, self.call = self.call, None
        if call is not None and not call.done:
            call.closed()
        pieces, self._pieces, self.on_given_up = self._pieces, None, None
        # The text was generated from the pieces, which were kept until now.
        if isinstance(pieces, list) and sum(map(len, pieces)) > FREE_BYTES_PER_STEP:
            self.spawn(free_in_steps(partial(_drop_pieces, pieces)))
        self.account.close()

    # ---- called by calls

    def finished(self, call: ServerCall) -> None:
        """Release a call: its whole answer is stored."""
        if call.bucket is not None:
            forget(call)
        call.released()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)  # the waiting task runs in a later turn, when the outcome is stored

    def send_status(self, call: ServerCall, error: RpcError) -> None:
        """Store a status other than OK, which ends the call."""
        del call
        self.error = error

    def assembler(self, is_packed: bool) -> MessageAssembler:
        """Return an assembler with the server's message limit; messages are never compressed here."""
        del is_packed
        return MessageAssembler(self.limits.max_receive_message_bytes)

    def hold(self, amount: int) -> None:
        """Do nothing: the request is counted where its bytes are read."""

    def answer(self, stream_id: int, body: bytes, has_prefix: bool = False) -> bool:
        """Return False: the answer must be counted first, since it is kept until its text is written."""
        del stream_id, body, has_prefix
        return False

    def answer_later(self, stream_id: int, pieces: Sequence[bytes], trailers: Headers = ()) -> None:
        """Store a whole answer."""
        del stream_id, trailers
        self._pieces = pieces

    # ---- called by the account

    def held_size(self) -> int:
        """Return the memory of the parsed request, in bytes."""
        return self._kept_bytes

    def queued_size(self) -> int:
        """Return 0: no bodies are queued here."""
        return 0

    def queued_by_streams(self) -> list[int]:
        """Return the waiting bytes of each streaming call that has any: none."""
        return []

    def give_up(self, reason: bytes) -> None:
        """Drop the answer: others need its memory."""
        self.error = RpcError(Code.RESOURCE_EXHAUSTED, reason.decode("ascii"))
        on_given_up = self.on_given_up
        self.close()
        self.given_up()
        if on_given_up is not None:
            on_given_up()

    def given_up(self) -> None:
        """Wake the task that waits for the answer or writes it; ``error`` is set."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def wake(self) -> None:
        """Do nothing: the writer of the response pulls by itself."""


def _drop_pieces(pieces: list[bytes], size_bytes: int) -> bool:
    """Drop about ``size_bytes`` of an answer. Returns whether more is left."""
    while pieces and size_bytes > 0:
        size_bytes -= len(pieces.pop())
    return bool(pieces)


CHUNK_BYTES: Final = 64 * 1024
"""Approximate size of text generated at once, and of text that waits beside the socket's own buffer."""

KEYS_A_CHUNK: Final = 256
"""Size of a chunk for the slices: it makes the work short, so it takes turns with all other short work."""


class Chunks:
    """Text from a generator, in chunks.

    Arguments:
        text: generates the text.
        slices: runs the long work of the member.
        queue: queue of the client (``rpc/shares``).
    """

    def __init__(self, text: Generator[str, None, None], slices: Slices, queue: Identity) -> None:
        self._queue = queue
        self._text = text
        self._slices = slices

    async def next(self) -> bytes:
        """Return the next chunk; empty at the end."""
        return await self._slices.result(self._chunk, KEYS_A_CHUNK, self._queue)

    def _chunk(self) -> Work[bytes]:
        parts: list[str] = []
        size = 0
        for part in self._text:
            parts.append(part)
            size += len(part)
            if size >= CHUNK_BYTES:
                break
            if len(parts) % 16 == 0:
                yield
        return "".join(parts).encode()

    def close(self) -> None:
        """Stop generating."""
        self._text.close()


class LargeBody(AsyncIterator[bytes]):
    """The body of one large answer.

    Arguments:
        exchange: exchange of the answer; closed with the body.
        chunks: chunks of the body.
    """

    def __init__(self, exchange: Exchange, chunks: Chunks) -> None:
        self._exchange = exchange
        self._chunks = chunks
        exchange.on_given_up = chunks.close

    async def __anext__(self) -> bytes:
        chunk = await self._chunks.next()
        if self._exchange.error is not None:
            raise copy(self._exchange.error)  # a raised error holds frames that refer to this object
        if not chunk:
            await self.aclose()
            raise StopAsyncIteration
        self._exchange.account.left_bytes += len(chunk)
        return chunk

    async def aclose(self) -> None:
        """Close everything: the client has the whole body, or has left."""
        self._chunks.close()
        self._exchange.close()
