"""The server side of a call: the common part of all kinds, the unary call (the hot path), and the carrier of calls.

A call is OPEN until exactly one thing ends it: an answer (ours), or a cancellation (the client reset it, its deadline
passed, or the connection was lost). Answering a cancelled call does nothing: this race is normal. Answering twice is a
bug in the handler and raises ``CallStateError``.

A call asks its *carrier* to send its answer and to count its bytes, and tells the carrier when it has ended. So the
same call objects and handlers serve gRPC and JSON:

    class ServerCore(Carrier)      # an HTTP/2 connection with many calls (``core``)
    class Exchange(Carrier)        # one request of the JSON gateway with its one call (``server/gateway/exchange``)

Leaves out: the path of an answer to the socket, and clients that do not read their answers (``budget``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mypy_extensions import mypyc_attr

from raftkv.loop.timers import DeadlineWheel, Expiring, forget
from raftkv.rpc.framing import MessageAssembler, user_metadata
from raftkv.rpc.http2 import H2Error
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.protocol import DrainWatcher
from raftkv.rpc.server.budget import AnswerAccount, AnswerBudget
from raftkv.rpc.shares import Identity
from raftkv.rpc.status import Code, Headers, RpcError

if TYPE_CHECKING:
    from raftkv.rpc.server.router import Route

OPEN: Final = 0
ANSWERED: Final = 1
CANCELLED: Final = 2

KEPT_BYTES_MIN: Final = 1024
"""Requests of possibly long calls count against the limit until the call ends if they are larger than this; the cost of
a call itself covers smaller ones."""
KEPT_TIMES: Final = 4
"""Copies counted for such a request: its bytes, its message, and what the handler derives from its fields."""

UnaryHandler = Callable[["UnaryCall", bytes], None]
"""Takes the call and the request's bytes; answers at once, or later from the loop."""

AsyncUnaryHandler = Callable[[bytes, "UnaryCall"], Awaitable[bytes | list[bytes]]]
"""Returns the response message; a large one in pieces, which avoids joining them."""


Observer = Callable[[int, bytes], None]
"""Called once when the call has ended: gRPC code, and the beginning of the answer (empty except for a unary OK)."""


def _tell_both(first: Observer, second: Observer, code: int, answer: bytes) -> None:
    first(code, answer)
    second(code, answer)


class CallStateError(Exception):
    """A handler answered a call twice: a bug in the handler."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The peer of a connection.

    Attributes:
        address: ``host:port``, or ``unix:``.
        certificate: client certificate as ``ssl.SSLSocket.getpeercert`` returns it. None if the client sent none, or
            if certificates are not verified against an authority.
        tls: True if the connection is encrypted.
        loopback: True if this end of the connection has a loopback address.
        identity: identity whose share is used by calls without a user (``raftkv.rpc.shares``).
    """

    address: str = ""
    certificate: dict[str, Any] | None = None
    tls: bool = False
    loopback: bool = False
    identity: Identity = field(kw_only=True)

    def __str__(self) -> str:
        return self.address


class Traffic:
    """Traffic of all HTTP/2 connections of a server.

    Attributes:
        received_bytes, sent_bytes: bytes as on the wire (with TLS: before encryption).
        serves: number of times that a connection was served.
    """

    __slots__ = ("received_bytes", "sent_bytes", "serves")

    def __init__(self) -> None:
        self.received_bytes = self.sent_bytes = self.serves = 0


@dataclass(frozen=True, slots=True)
class Environment:
    """Services that a carrier needs.

    Attributes:
        clock: the loop's time, seconds.
        wheel: deadlines of all calls of the server.
        spawn: runs a coroutine as a task that the server waits for when it closes.
        report: called with every exception that a handler let escape.
        translate: returns the status for an exception that is not an RpcError; None: INTERNAL.
        answers: budget of waiting answers of all connections.
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
    """The connection as calls see it. A carrier without calls of some kind need not implement the methods for them.

    Arguments:
        limits: limits on messages and answers.
        environment: environment of the server.
        peer: peer of the connection.

    Attributes:
        account: counts bytes that wait for the client.
        clock: returns the loop's time in seconds.
        severed: whether the connection was lost although this end did not close it.
        drain_watch: calls that wait for space in their send buffers; ``drained`` is called when there is some.
    """

    def __init__(self, limits: ServerLimits, environment: Environment, peer: Peer) -> None:
        self.limits = limits
        self.peer = peer
        self.severed = False
        self.clock = environment.clock
        self.account = AnswerAccount(environment.answers, limits, environment.clock, self, peer.identity)
        self.drain_watch: set[DrainWatcher] = set()
        self._environment = environment
        self._kept_bytes = 0

    # ---- around handlers

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task that the server waits for when it closes."""
        return self._environment.spawn(coroutine)

    def report(self, path: str, error: BaseException) -> None:
        """Report an exception that a handler let escape."""
        self._environment.report(path, error)

    def translate(self, path: str, error: BaseException) -> RpcError:
        """Return the status for an exception of a handler; report it if it is unexpected.

        Arguments:
            path: method path, for the report.
            error: exception of the handler.
        """
        if isinstance(error, RpcError):
            return error
        known = self._environment.translate(error)
        if known is not None:
            return known
        self.report(path, error)
        return RpcError(Code.INTERNAL, "internal error")

    def finished(self, call: ServerCall) -> None:
        """Release a call: its whole answer is queued."""
        raise NotImplementedError

    # ---- requests

    def assembler(self, is_packed: bool) -> MessageAssembler:
        """Return an assembler with the server's message limit.

        Arguments:
            is_packed: whether the messages may be compressed.
        """
        raise NotImplementedError

    def consume(self, stream_id: int, amount: int) -> None:
        """Note that the call has taken bytes of its request."""
        raise NotImplementedError

    def hold(self, amount: int) -> None:
        """Account for bytes of unfinished messages; negative when they are finished."""
        raise NotImplementedError

    def keep(self, amount: int) -> None:
        """Account for bytes of requests until they are answered, for all connections: one request may wait for long.

        Arguments:
            amount: size of a large request; negative when it has ended.
        """
        self._kept_bytes += amount
        budget = self._environment.answers
        budget.held_bytes += amount
        if budget.held_bytes > budget.held_limit_bytes and amount > 0:
            budget.drop_greediest()

    def check_held(self) -> None:
        """Raise RESOURCE_EXHAUSTED if the connection has too many bytes of unfinished messages."""
        raise NotImplementedError

    # ---- answers of all calls

    def send_status(self, call: ServerCall, error: RpcError) -> None:
        """Send a status other than OK, which ends the call."""
        raise NotImplementedError

    # ---- answers of unary calls

    def answer(self, stream_id: int, body: bytes, has_prefix: bool = False) -> bool:
        """Send a whole answer, if it may leave at once. Returns whether it was sent.

        Arguments:
            stream_id: stream of the call.
            body: the message, or all messages of a stream's answer.
            has_prefix: whether ``body`` has message prefixes already.
        """
        raise NotImplementedError

    def answer_later(self, stream_id: int, pieces: Sequence[bytes], trailers: Headers = ()) -> None:
        """Send a whole answer when there is room for it. Raises H2Error if the stream or its connection is gone.

        Arguments:
            stream_id: stream of the call.
            pieces: pieces of the message.
            trailers: trailers of the handler, sent after the status.
        """
        raise NotImplementedError

    # ---- answers of streams

    def answered(self) -> None:
        """Note that a part of an answer was queued."""
        raise NotImplementedError

    def send_headers(self, stream_id: int, fields: Headers, end_stream: bool) -> None:
        """Queue a header, or trailers. Raises H2Error as ``answer_later``."""
        raise NotImplementedError

    def send_data(self, stream_id: int, frames: bytes) -> None:
        """Queue messages with their prefixes. Raises H2Error as ``answer_later``."""
        raise NotImplementedError

    def send_in_slices(self, stream_id: int, message: bytes) -> None:
        """Queue a large message, without its prefix. Raises H2Error as ``answer_later``."""
        raise NotImplementedError

    def queued_size_of(self, stream_id: int) -> int:
        """Return the bytes of a stream's body that have not left."""
        raise NotImplementedError

    # ---- called by the account

    def held_size(self) -> int:
        """Return the bytes of unfinished messages, and of large requests without an answer."""
        raise NotImplementedError

    def queued_size(self) -> int:
        """Return the bytes of bodies that have not left."""
        raise NotImplementedError

    def queued_by_streams(self) -> list[int]:
        """Return the waiting bytes of each streaming call that has any."""
        raise NotImplementedError

    def give_up(self, reason: bytes) -> None:
        """Drop all waiting bytes, and end the connection with a GOAWAY that gives the reason."""
        raise NotImplementedError

    def wake(self) -> None:
        """Send the pending output in this turn."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class ServerCall:
    """The common part of all kinds of calls.

    Attributes:
        caller: caller of the call, set by the guard of the handler; not used by this layer.
        deadline: loop time after which the client no longer waits, or None.
        is_cut: whether the connection is lost and the cancellation callbacks have not run yet.
        peer: the client.
        observer: called at the end. CANCELLED and DEADLINE_EXCEEDED mean that the client did not get the result.
        sent_bytes: total bytes queued for an answer in pieces.
    """

    __slots__ = (
        "_callbacks",
        "_carrier",
        "_metadata",
        "_state",
        "bucket",
        "caller",
        "deadline",
        "headers",
        "identity",
        "is_cut",
        "observer",
        "peer",
        "request_done",
        "route",
        "sent_bytes",
        "stream_id",
    )

    def __init__(self, carrier: Carrier, stream_id: int, headers: Headers, route: Route) -> None:
        self.bucket: dict[Expiring, None] | None = None
        self.caller: Any = None
        self.deadline: float | None = None
        self.is_cut = False
        self.observer: Observer | None = None
        self.peer = carrier.peer
        self.identity: Identity = carrier.peer.identity
        self.request_done = False
        self.route = route
        route.counts.started += 1
        self.sent_bytes = 0
        self.stream_id = stream_id
        self._callbacks: list[Callable[[], object]] | None = None
        self._carrier = carrier
        self.headers = headers
        """Fields of the request as received, for a handler that looks for one name on the hot path."""
        self._metadata: dict[str, str | bytes] | None = None
        self._state = OPEN

    # ---- called by handlers

    @property
    def metadata(self) -> dict[str, str | bytes]:
        """The client's metadata by name (``-bin`` names: bytes), decoded at first use."""
        if self._metadata is None:
            self._metadata = user_metadata(self.headers)
        return self._metadata

    @property
    def path(self) -> str:
        """The full method name, ``/package.Service/Method``."""
        return self.route.path

    def add_observer(self, ended: Observer) -> None:
        """Call a function at the end, before those that observe the call already."""
        earlier = self.observer
        self.observer = ended if earlier is None else partial(_tell_both, ended, earlier)

    def identify(self, identity: Identity) -> None:
        """Count this call, and the waiting answers of its connection, in the share of the caller."""
        self.identity = self._carrier.account.identity = identity

    @property
    def cancelled(self) -> bool:
        """True once the client does not wait for the answer: reset, disconnected, or past its deadline."""
        if self._state or self.deadline is None:
            return self._state == CANCELLED
        return self.deadline <= self._carrier.clock()  # some expired calls may not have been told yet

    @property
    def severed(self) -> bool:
        """True if the open call lost its connection, because the client is gone or cut off.

        False for a call that the client has reset, whose deadline passed, or whose connection this end has closed.
        """
        return self._state == CANCELLED and self._carrier.severed

    @property
    def done(self) -> bool:
        """True once the call is answered or cancelled."""
        return self._state != OPEN

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once if the call is cancelled; at once if it already is."""
        if self._state == CANCELLED:
            callback()
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def fail(self, code: int, text: str = "", *, details: bytes = b"", trailers: Headers = ()) -> None:
        """Answer with a status other than OK.

        Arguments:
            code, text: code and text of the status.
            details: serialized google.rpc.Status.
            trailers: further trailing metadata (header form).
        """
        if self._may_answer():
            self._state = ANSWERED
            self._callbacks = None
            self.route.counts.count_failure(code)
            self._carrier.send_status(self, RpcError(code, text, details=details, trailers=trailers))
            self._carrier.finished(self)
            if self.observer is not None:
                self.observed(code)

    # ---- called by the core

    @property
    def crumbled(self) -> bool:
        """True if the unfinished message arrives in pieces that are far too small."""
        return False

    @property
    def is_busy(self) -> bool:
        """True while received messages are not unpacked. ``on_data`` continues with them, and must be called next."""
        return False

    def on_data(self, data: bytes, end_stream: bool) -> None:
        """Take a piece of the request body."""
        raise NotImplementedError

    def headers_sent(self) -> bool:
        """True if the response header was sent, so that a status must follow as trailers."""
        return False

    def cut(self) -> None:
        """End the call without sending: the connection is gone. ``closed`` follows, perhaps in a later turn."""
        forget(self)
        if self._state == OPEN:
            self._state = CANCELLED
            self.is_cut = True

    def closed(self) -> None:
        """Cancel the call, unless it was answered before: its stream is closed."""
        forget(self)
        if self._state == OPEN or self.is_cut:
            self._state = CANCELLED
            self.is_cut = False
            self.route.counts.count_failure(Code.CANCELLED)
            self._run_callbacks()
            if self.observer is not None:
                self.observed(Code.CANCELLED)
        self.released()

    def released(self) -> None:
        """Give back what the call holds: the core has released it."""

    def expire(self) -> None:
        """Answer in place of the handler and cancel it: the deadline has passed."""
        if self._state == OPEN:
            self._state = CANCELLED
            self.route.counts.count_failure(Code.DEADLINE_EXCEEDED)
            self._carrier.send_status(self, RpcError(Code.DEADLINE_EXCEEDED, "context deadline exceeded"))
            self._carrier.finished(self)
            self._run_callbacks()
            if self.observer is not None:
                self.observed(Code.DEADLINE_EXCEEDED)

    def observed(self, code: int, answer: bytes = b"") -> None:
        """Tell the observer how the call has ended.

        Arguments:
            code: gRPC code.
            answer: first bytes of the answer.
        """
        observer, self.observer = self.observer, None
        if observer is not None:
            try:
                observer(code, answer)
            except Exception as error:
                self._carrier.report(self.route.path, error)

    def fail_with(self, error: RpcError) -> None:
        """Answer with the error's status, unless the call has ended."""
        if self._state == OPEN:
            self.fail(error.code, error.text, details=error.details, trailers=error.trailers)

    def fail_for(self, error: BaseException) -> None:
        """Answer with the status for an exception of the handler, unless the call has ended."""
        self.fail_with(self._carrier.translate(self.route.path, error))

    def abort(self, error: RpcError) -> None:
        """Answer in place of the handler, and cancel its work."""
        if self._state == OPEN:
            callbacks = self._callbacks
            self.fail_with(error)
            self._callbacks = callbacks
            self._run_callbacks()

    def _may_answer(self) -> bool:
        if self._state == ANSWERED:
            raise CallStateError(f"{self.route.path}: answered twice")
        return self._state == OPEN

    def _run_callbacks(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            try:
                callback()
            except Exception as error:
                self._carrier.report(self.route.path, error)


PIECE_BYTES: Final = 64
"""Cost of each piece of an answer beyond its bytes."""


@mypyc_attr(allow_interpreted_subclasses=True)
class UnaryCall(ServerCall):
    """One request, one answer: ``reply(bytes)`` or ``fail(code, text)``, at once, or later from the loop."""

    __slots__ = ("assembler", "kept_bytes", "message")

    def __init__(self, carrier: Carrier, stream_id: int, headers: Headers, route: Route) -> None:
        super().__init__(carrier, stream_id, headers, route)
        self.kept_bytes = 0
        self.assembler: MessageAssembler | None = None
        self.message: bytes | None = None

    @property
    def crumbled(self) -> bool:
        """True if the unfinished message arrives in pieces that are far too small."""
        return self.assembler is not None and self.assembler.crumbled

    @property
    def is_busy(self) -> bool:
        """True while received messages are not unpacked."""
        return self.assembler is not None and self.assembler.is_busy

    def keep_request(self, size_bytes: int) -> None:
        """Count the memory of the request until the call ends: a call that a task handles may be long.

        Arguments:
            size_bytes: size of the request.
        """
        if size_bytes > KEPT_BYTES_MIN and self._state == OPEN:
            more_bytes = KEPT_TIMES * size_bytes - self.kept_bytes
            self.kept_bytes += more_bytes
            self._carrier.keep(more_bytes)

    def reply(self, message: bytes, trailers: Headers = ()) -> None:
        """Answer OK.

        Arguments:
            message: serialized response.
            trailers: trailing metadata (header form).
        """
        if self._state:
            self._may_answer()
            return
        carrier = self._carrier
        if trailers or not carrier.answer(self.stream_id, message):
            self._queue_answer(len(message), (message,), trailers)
            return
        self._state = ANSWERED
        # Cancellation callbacks usually hold the call: without this, every call would be a cycle, and the garbage
        # collector would cost more than the answers.
        self._callbacks = None
        self.route.counts.answered += 1
        carrier.finished(self)
        if self.observer is not None:
            self.observed(Code.OK, message)

    def _queue_answer(self, size: int, pieces: Sequence[bytes], trailers: Headers = ()) -> None:
        if not self._begin_answer(size, pieces[0] if pieces else b""):
            return
        try:
            self._carrier.answer_later(self.stream_id, pieces, trailers)
        except H2Error:
            self._lost()

    def _begin_answer(self, size: int, first: bytes) -> bool:
        """Count an answer, and end the call; False if the call has already ended."""
        account = self._carrier.account
        if size > account.room and not self._make_room(size):
            return False
        account.room -= size
        account.answers[self.stream_id] = size
        self._state = ANSWERED
        self._callbacks = None
        self.route.counts.answered += 1
        self._carrier.finished(self)
        if self.observer is not None:
            self.observed(Code.OK, first)
        return True

    def reply_many(self, pieces: Sequence[bytes]) -> None:
        """Answer OK with a serialized message in pieces, which avoids joining a large one."""
        if self._state:
            self._may_answer()
            return
        self._queue_answer(sum(map(len, pieces)) + PIECE_BYTES * len(pieces), pieces)

    def _make_room(self, size: int) -> bool:
        """Ask for room for a large answer; False if the call has ended."""
        refusal = self._carrier.account.ask(size)
        if refusal is not None:
            self.fail_with(refusal)
        # This connection may be one of those that were ended to make room.
        return not self.done

    def room_bytes(self) -> int:
        """Return how large an answer may be now; ``reply`` refuses a larger one.

        It allows a handler to stop before it builds an answer that does not fit. The code of the refusal is
        RESOURCE_EXHAUSTED, its text ``budget.CONNECTION_FULL``.
        """
        return self._carrier.account.room_bytes()

    def _lost(self) -> None:
        """Cancel the call: the connection has failed."""
        self._state = CANCELLED
        self._carrier.account.closed(self.stream_id)
        self._run_callbacks()

    def on_data(self, data: bytes, end_stream: bool) -> None:
        """Take a part of a request that does not arrive whole in one DATA frame."""
        try:
            self._assemble(data, end_stream)
        except RpcError as error:
            self.request_done = end_stream
            self.fail_with(error)

    def _assemble(self, data: bytes, end_stream: bool) -> None:
        carrier = self._carrier
        assembler = self.assembler
        if assembler is None:
            assembler = self.assembler = carrier.assembler(self.route.is_packed)
        held = assembler.held_bytes
        try:
            messages = assembler.feed(data)
        finally:
            carrier.hold(assembler.held_bytes - held)
            carrier.consume(self.stream_id, len(data))
        for message in messages:
            if self.message is not None:
                raise RpcError(Code.INTERNAL, TOO_MANY_MESSAGES)
            self.message = message
            carrier.hold(len(message))  # the end of the request may arrive much later
        carrier.check_held()
        if end_stream and self._state == OPEN:
            self._request_complete(assembler)

    def _request_complete(self, assembler: MessageAssembler) -> None:
        if assembler.is_busy:
            return
        self.request_done = True
        if assembler.held_bytes:
            raise RpcError(Code.INTERNAL, "unexpected EOF")
        if self.message is None:
            raise RpcError(Code.INTERNAL, NO_MESSAGE)
        message = self._take_message(self.message)
        # The request may have to wait: for a leader, a lock, a quorum.
        self.kept_bytes = len(message)
        self._carrier.keep(self.kept_bytes)
        if self._state == OPEN:
            self.run(message)

    def run(self, message: bytes) -> None:
        """Call the handler with the whole request."""
        try:
            self.route.handler(self, message)
        except Exception as error:
            self.fail_for(error)

    def _take_message(self, message: bytes) -> bytes:
        self.message = None
        self._carrier.hold(-len(message))
        return message

    def released(self) -> None:
        """Drop an unfinished message or request, and stop counting a complete one."""
        if self.kept_bytes:
            self._carrier.keep(-self.kept_bytes)
            self.kept_bytes = 0
        if self.message is not None:
            self._take_message(self.message)
        if self.assembler is not None:
            self._carrier.hold(-self.assembler.held_bytes)
            self.assembler = None


NO_MESSAGE = "cardinality violation: received no request message from non-client-streaming RPC"
TOO_MANY_MESSAGES = "cardinality violation: received multiple request messages for non-client-streaming RPC"
