"""The part of a connection that calls see, the same for every protocol below.

    class ServerCore(Carrier)      # an HTTP/2 connection with many calls (``core``)
    class Exchange(Carrier)        # one request of the JSON gateway with its one call (``server/gateway/exchange``)

A call asks its carrier to send its answer and to count its bytes, and tells it when it is over. So the same call
objects, and with them the same handlers, serve gRPC and JSON.

Leaves out: where answers go, and what is done about clients that do not read them (``budget``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mypy_extensions import mypyc_attr

from raftkv.loop.timers import DeadlineWheel
from raftkv.rpc.framing import MessageAssembler
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.protocol import DrainWatcher
from raftkv.rpc.server.budget import AnswerAccount, AnswerBudget
from raftkv.rpc.status import Code, Headers, RpcError

if TYPE_CHECKING:
    from raftkv.rpc.server.calls import ServerCall


@dataclass(frozen=True, slots=True)
class Peer:
    """The peer of a connection.

    Attributes:
        address: ``host:port``, or ``unix:``.
        certificate: the client certificate as ``ssl.SSLSocket.getpeercert`` gives it; None without one, and where
            certificates are not asked for and verified by an authority: what is here is true.
        tls: True if the connection is encrypted.
        loopback: True if this end of it has a loopback address.
        identity: in whose share falls what calls without a user take (``raftkv.rpc.shares``).
    """

    address: str = ""
    certificate: dict[str, Any] | None = None
    tls: bool = False
    loopback: bool = False
    identity: str = field(kw_only=True)

    def __str__(self) -> str:
        return self.address


class Traffic:
    """Bytes of all HTTP/2 connections of a server, as they are on the wire (below TLS: before it)."""

    __slots__ = ("received_bytes", "sent_bytes")

    def __init__(self) -> None:
        self.received_bytes = self.sent_bytes = 0


@dataclass(frozen=True, slots=True)
class Environment:
    """Services that a carrier needs.

    Attributes:
        clock: the loop's time, seconds.
        wheel: deadlines of all calls of the server.
        spawn: runs a coroutine as a task that the server waits for at its end.
        report: called with every exception that a handler let escape.
        translate: makes a status of an exception that is not an RpcError, or None for INTERNAL.
        answers: what all connections may have waiting for their clients.
        traffic: counts the bytes of all connections.
    """

    clock: Callable[[], float]
    wheel: DeadlineWheel
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    report: Callable[[str, BaseException], None]
    translate: Callable[[BaseException], RpcError | None]
    answers: AnswerBudget
    traffic: Traffic = field(default_factory=Traffic)


@mypyc_attr(allow_interpreted_subclasses=True)
class Carrier:
    """The connection as calls see it. A carrier that never has calls of a kind leaves out what only those ask for.

    Arguments:
        limits: of messages and answers.
        environment: of the server.
        peer: the other end.

    Attributes:
        account: counts what waits for the client.
        clock: the loop's time, seconds.
        severed: set when the connection has gone and this end did not close it.
    """

    def __init__(self, limits: ServerLimits, environment: Environment, peer: Peer) -> None:
        self.limits = limits
        self.peer = peer
        self.severed = False
        self.clock = environment.clock
        self.account = AnswerAccount(environment.answers, limits, environment.clock, self, peer.identity)
        self._environment = environment

    # ---- around handlers

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task that the server waits for at its end."""
        return self._environment.spawn(coroutine)

    def report(self, path: str, error: BaseException) -> None:
        """Tell of an exception that a handler let escape."""
        self._environment.report(path, error)

    def translate(self, path: str, error: BaseException) -> RpcError:
        """Return the status for an exception of a handler; report it if it is unexpected.

        Arguments:
            path: of the method, for the report.
            error: what the handler raised.
        """
        if isinstance(error, RpcError):
            return error
        known = self._environment.translate(error)
        if known is not None:
            return known
        self.report(path, error)
        return RpcError(Code.INTERNAL, "internal error")

    def handle(self, call: ServerCall, message: bytes) -> None:
        """Run the handler of a unary call whose request is complete."""
        try:
            call.route.handler(call, message)
        except Exception as error:
            call.fail_for(error)

    def finished(self, call: ServerCall) -> None:
        """The call has its whole answer."""
        raise NotImplementedError

    # ---- requests

    def assembler(self, is_packed: bool) -> MessageAssembler:
        """Return an assembler under the server's message limit.

        Arguments:
            is_packed: for messages that may be compressed.
        """
        raise NotImplementedError

    def consume(self, stream_id: int, amount: int) -> None:
        """The call has taken so many octets of its request."""
        raise NotImplementedError

    def hold(self, amount: int) -> None:
        """Account for bytes of unfinished messages; negative when they are finished."""
        raise NotImplementedError

    def keep(self, amount: int) -> None:
        """Account for bytes of large requests until they are answered; negative when they are."""
        raise NotImplementedError

    def check_held(self) -> None:
        """Raise RESOURCE_EXHAUSTED when the unfinished messages of the connection are too many."""
        raise NotImplementedError

    # ---- answers of all calls

    def send_status(self, call: ServerCall, error: RpcError) -> None:
        """Send a status other than OK, which ends the call."""
        raise NotImplementedError

    # ---- answers of unary calls

    def answer(self, stream_id: int, body: bytes, has_prefix: bool = False) -> bool:
        """Send a whole answer, if it may leave at once; whether it was sent.

        Arguments:
            stream_id: of the call.
            body: its message, or all that a stream is answered.
            has_prefix: whether each message stands behind its prefix.
        """
        raise NotImplementedError

    def answer_later(self, stream_id: int, message: bytes) -> None:
        """Send a whole answer when there is room for it. Raises H2Error if the stream or its connection has gone."""
        raise NotImplementedError

    def answer_in_pieces(self, stream_id: int, message: bytes, trailers: Headers) -> None:
        """Do the same for a large answer, or one with trailers."""
        raise NotImplementedError

    def answer_many(self, stream_id: int, pieces: Sequence[bytes]) -> None:
        """Do the same for an answer in pieces."""
        raise NotImplementedError

    # ---- answers of streams

    def answered(self) -> None:
        """Something of an answer was queued."""
        raise NotImplementedError

    def send_headers(self, stream_id: int, fields: Headers, end_stream: bool) -> None:
        """Queue a header, or trailers. Raises H2Error as above."""
        raise NotImplementedError

    def send_data(self, stream_id: int, frames: bytes) -> None:
        """Queue messages behind their prefixes. Raises H2Error as above."""
        raise NotImplementedError

    def send_in_slices(self, stream_id: int, message: bytes) -> None:
        """Queue a large message, without its prefix. Raises H2Error as above."""
        raise NotImplementedError

    def queued_size_of(self, stream_id: int) -> int:
        """Bytes of a stream's body that have not left."""
        raise NotImplementedError

    def watch_drain(self, call: DrainWatcher) -> None:
        """Call ``call.drained`` when its send buffer has room."""
        raise NotImplementedError

    def unwatch_drain(self, call: DrainWatcher) -> None:
        """Stop calling ``drained``."""
        raise NotImplementedError

    # ---- what the account asks of its connection

    def held_size(self) -> int:
        """Bytes of unfinished messages, and of large requests that are not answered."""
        raise NotImplementedError

    def queued_size(self) -> int:
        """Bytes of bodies that have not left."""
        raise NotImplementedError

    def queued_by_streams(self) -> list[int]:
        """For each streaming call that has bytes waiting: how many."""
        raise NotImplementedError

    def give_up(self, reason: bytes) -> None:
        """Drop all that waits, and end the connection with a GOAWAY that says why."""
        raise NotImplementedError

    def wake(self) -> None:
        """Have the output sent in this turn."""
        raise NotImplementedError
