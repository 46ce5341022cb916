"""One HTTP request as the carrier of one call, and the body of its answer.

The handlers, the guard and the audit are those of gRPC, and so are their call objects. Only the layer below the call
differs: answers are kept for the writer of the HTTP response, instead of queued as frames.

    call = exchange.open(route)            # UnaryCall
    route.handler(call, message)           # the handler of gRPC, with its guard
    pieces = await exchange.outcome()      # of the answer; raises RpcError for any other status than OK

A kept answer counts with the answers that wait for clients (``rpc.server.budget``) until ``close``.

A large answer is written while the client reads it (``LargeBody``), by the slices of the member, so no body holds the
loop up. The end of the body, or a client that leaves, closes the exchange, its call and its share of the budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from raftkv.loop.cycle_free import FREE_BYTES_PER_STEP, free_in_steps
from raftkv.loop.fair import Identity
from raftkv.loop.scheduler import Slices, Work
from raftkv.loop.timers import forget
from raftkv.rpc.framing import MessageAssembler
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.calls import Carrier, Environment, Peer, ServerCall, UnaryCall
from raftkv.rpc.server.router import Route
from raftkv.rpc.shares import queue_of
from raftkv.rpc.status import Code, Headers, RpcError

CALL: Final = 1
"""The stream id of the only call of an exchange."""

LEFT: Final = RpcError(Code.CANCELLED, "context canceled")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The server whose methods exchanges call, as they use it.

    Attributes:
        environment: clock, deadlines, tasks and reports.
        limits: of messages and answers.
    """

    environment: Environment
    limits: ServerLimits


class Exchange(Carrier):
    """The one call of an HTTP request. It is never severed: a client that leaves amid it loses no connection of leases.

    Attributes:
        on_given_up: called when the answer is dropped because others need the memory.
    """

    def __init__(self, around: Surroundings, peer: Peer, headers: Headers) -> None:
        super().__init__(around.limits, around.environment, peer)
        self.call: ServerCall | None = None
        self.on_given_up: Callable[[], None] | None = None
        self._headers = headers
        self._kept_bytes = 0
        self._pieces: Sequence[bytes] | None = None
        self._error: RpcError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def queue(self) -> Identity:
        """Where its answer waits: of the user, once one is known, else of the client (``rpc/shares``)."""
        return queue_of(self.account.identity)

    def open(self, route: Route, timeout_s: float | None) -> Any:
        """Make the call.

        Arguments:
            route: of its method.
            timeout_s: after which it fails; None: never.
        """
        self.call = call = route.open(self, CALL, self._headers, route)
        if timeout_s is not None and not call.done:
            now = self._environment.clock()
            self._environment.wheel.add(call, now + timeout_s, now)
        return call

    def run(self, call: UnaryCall, message: bytes) -> None:
        """Call the handler of a unary call.

        Arguments:
            call: opened before.
            message: the request.
        """
        call.request_done = True
        began_s = self.clock()
        call.run(message)
        self._environment.answers.uses.charge(self.account.identity, self.clock() - began_s, 1, len(message))

    async def outcome(self) -> Sequence[bytes]:
        """Wait for the answer.

        Returns:
            Its message, in pieces.

        Raises:
            RpcError: the call ended with another status.
        """
        if self._pieces is None and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise copy(self._error)  # what is raised holds the frames that hold this
        return self._pieces or ()

    def close(self) -> None:
        """The client has its answer, or has left: a call that is still open is cancelled."""
        call, self.call = self.call, None
        if call is not None and not call.done:
            call.closed()
        pieces, self._pieces, self.on_given_up = self._pieces, None, None
        # The text was made of it, but all of it was kept.
        if isinstance(pieces, list) and sum(map(len, pieces)) > FREE_BYTES_PER_STEP:
            self.spawn(free_in_steps(partial(_drop_pieces, pieces)))
        self.account.close()

    # ---- what calls ask of their carrier

    def finished(self, call: ServerCall) -> None:
        """The call has its whole answer."""
        if call.bucket is not None:
            forget(call)
        call.released()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)  # the waiting task runs in a later turn: the outcome is there by then

    def send_status(self, call: ServerCall, error: RpcError) -> None:
        """The call has ended with a status other than OK."""
        del call
        self._error = error

    def assembler(self, is_packed: bool) -> MessageAssembler:
        """Return an assembler under the server's message limit: here are no compressed messages."""
        del is_packed
        return MessageAssembler(self.limits.max_receive_message_bytes)

    def hold(self, amount: int) -> None:
        """The request is counted where its bytes are read."""

    def keep(self, amount: int) -> None:
        """Account for what is made of a request until it is answered: a call may last, and so may thousands of them."""
        self._kept_bytes += amount
        budget = self._environment.answers
        budget.held_bytes += amount
        if budget.held_bytes > budget.held_limit_bytes and amount > 0:
            budget.drop_greediest()

    def answer(self, stream_id: int, body: bytes, has_prefix: bool = False) -> bool:
        """Take no answer yet: it is paid for first, since it waits for the text that is made of it."""
        del stream_id, body, has_prefix
        return False

    def answer_later(self, stream_id: int, pieces: Sequence[bytes], trailers: Headers = ()) -> None:
        """Take a whole answer."""
        del stream_id, trailers
        self._pieces = pieces

    # ---- what the account asks of its connection

    def held_size(self) -> int:
        """Bytes of what is kept of the request."""
        return self._kept_bytes

    def queued_size(self) -> int:
        """Bytes of bodies that have not left."""
        return 0

    def queued_by_streams(self) -> list[int]:
        """Return how many bytes wait, for each streaming call that has any."""
        return []

    def give_up(self, reason: bytes) -> None:
        """Others need the memory: drop all that waits."""
        self._error = RpcError(Code.RESOURCE_EXHAUSTED, reason.decode("ascii"))
        on_given_up = self.on_given_up
        self.close()
        self.given_up()
        if on_given_up is not None:
            on_given_up()

    def given_up(self) -> None:
        """Wake the task that waits for the answer or writes it: ``error`` is set."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def error(self) -> RpcError | None:
        """How the call ended, if not well."""
        return self._error

    def wake(self) -> None:
        """Nothing to send: the writer of the response asks by itself."""


def _drop_pieces(pieces: list[bytes], size_bytes: int) -> bool:
    """Drop about so many bytes of an answer; whether more is left."""
    while pieces and size_bytes > 0:
        size_bytes -= len(pieces.pop())
    return bool(pieces)


CHUNK_BYTES: Final = 64 * 1024
"""About how much text is made at once, and how much waits for the socket beside its own buffer."""

KEYS_A_CHUNK: Final = 256
"""Size of a chunk for the slices: short work, in turn with all other short work."""


class Chunks:
    """Text that a generator makes, in chunks.

    Arguments:
        text: makes it.
        slices: the long work of the member.
        queue: of the client (``rpc/shares``).
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
        """Write no more."""
        self._text.close()


class LargeBody(AsyncIterator[bytes]):
    """The body of one large answer.

    Arguments:
        exchange: whose answer it is; closed with the body.
        chunks: of the body.
    """

    def __init__(self, exchange: Exchange, chunks: Chunks) -> None:
        self._exchange = exchange
        self._chunks = chunks
        exchange.on_given_up = chunks.close

    async def __anext__(self) -> bytes:
        chunk = await self._chunks.next()
        if self._exchange.error is not None:
            raise copy(self._exchange.error)  # what is raised holds the frames that hold this
        if not chunk:
            await self.aclose()
            raise StopAsyncIteration
        self._exchange.account.left_bytes += len(chunk)
        return chunk

    async def aclose(self) -> None:
        """The client has it all, or has left."""
        self._chunks.close()
        self._exchange.close()
